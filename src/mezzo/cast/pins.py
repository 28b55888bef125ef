"""Decorators that pin a function, or an ``nn.Module`` class, to one precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn

from mezzo.cast.casts import cast_floating
from mezzo.cast.region import autocast, emulates_here
from mezzo.errors import PolicyError
from mezzo.policy import Policy, Rule
from mezzo.tensors import CASTABLE, tensors

Target = TypeVar("Target", bound=Callable[..., Any])

#: The attribute by which ``prepare`` knows a pinned class.
PIN: Final = "__mezzo_pin__"


def low(target: Target) -> Target:
    """Pin a function or an ``nn.Module`` class to the compute dtype of the region it is called in.

    Inside it every op runs low, whatever the policy's op lists say; floating inputs are cast. Outside any autocast
    region, and under policies without autocast, it changes nothing.

    Args:
        target: A function, or a class derived from ``nn.Module``, whose ``forward`` is pinned.

    Returns:
        The same class, or a function that behaves as the given one.

    Example:
        >>> import mezzo, torch
        >>> @mezzo.low
        ... def attend(scores):
        ...     return scores.softmax(-1)
        >>> with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        ...     attend(torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    return _pin(target, "low")


def fp32(target: Target) -> Target:
    """Pin a function or an ``nn.Module`` class to FP32.

    Floating inputs are cast to FP32, nothing inside is cast, and what it returns is FP32. ``prepare`` keeps the
    parameters of a pinned class in FP32.

    Args:
        target: As for :func:`low`.

    Returns:
        As for :func:`low`.
    """
    return _pin(target, "fp32")


def _pin(target: Target, treatment: Literal["low", "fp32"]) -> Target:
    if isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise PolicyError(
                f"{target.__name__} is a class, and not one of modules",
                where=f"@mezzo.{treatment}",
                write="the decorator on its method, or on a class derived from nn.Module",
            )
        target.forward = _pinned(target.forward, treatment)
        setattr(target, PIN, treatment)
        return target
    if not callable(target):
        raise PolicyError(
            f"{target!r} cannot be pinned", where=f"@mezzo.{treatment}", write="a function or an nn.Module class"
        )
    return _pinned(target, treatment)  # type: ignore[return-value]


def _pinned(function: Callable[..., Any], treatment: Literal["low", "fp32"]) -> Callable[..., Any]:
    @functools.wraps(function)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        floats = [x for x in tensors((args, kwargs)) if x.dtype in CASTABLE]
        device_type = floats[0].device.type if floats else "cpu"
        if treatment == "low":
            if not torch.is_autocast_enabled(device_type):
                return function(*args, **kwargs)
            dtype = torch.get_autocast_dtype(device_type)
            args, kwargs = cast_floating((args, kwargs), dtype)
            with autocast(_everything_low(dtype, emulates_here(device_type)), device_type):
                return function(*args, **kwargs)
        args, kwargs = cast_floating((args, kwargs), torch.float32)
        with autocast(_OFF, device_type):
            return cast_floating(function(*args, **kwargs), torch.float32)

    return pinned


_OFF: Final = Policy.O0()


@functools.cache
def _everything_low(dtype: torch.dtype, emulate: Literal["auto"] | bool) -> Policy:
    return Policy.O1(dtype, emulate=emulate, rules=(Rule("low", op="*", reason="pinned by @mezzo.low"),))
