"""What no optimizer can work with, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import PolicyError, StateError, nearest
from mezzo.step.storage import storage

__all__ = ["check_group", "check_unchanged"]

_STATE_DTYPES: Final = ("float32", "bfloat16")
#: Hyper-parameters, the least they may be, and where they must stop.
_RANGES: Final = {
    "lr": (0.0, float("inf")),
    "eps": (0.0, float("inf")),
    "weight_decay": (0.0, float("inf")),
    "momentum": (0.0, float("inf")),
    "dampening": (float("-inf"), float("inf")),
}


def check_group(group: Mapping[str, Any]) -> None:
    """Raise all that is wrong with the values of a parameter group.

    Raises:
        PolicyError: One message lists everything.
    """
    if problems := list(_problems(group)):
        raise PolicyError.together(problems)


def _problems(group: Mapping[str, Any]) -> Iterator[PolicyError]:
    for name, (least, most) in _RANGES.items():
        value = group.get(name, 0.0)
        if not isinstance(value, Tensor) and not (isinstance(value, (int, float)) and least <= value < most):
            yield PolicyError(f"{name} is {value!r}", why=f"it is a finite number from {least:g}", write=f"{name}=0.01")
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(isinstance(b, Tensor) or 0.0 <= b < 1.0 for b in betas):
        yield PolicyError(f"betas are {betas!r}", why="each is from 0 to below 1", write="betas=(0.9, 0.999)")
    if group.get("nesterov") and (not group.get("momentum") or group.get("dampening")):
        yield PolicyError(
            "nesterov needs momentum and no dampening",
            where=f"momentum={group.get('momentum')}, dampening={group.get('dampening')}",
            write="momentum=0.9, dampening=0, nesterov=True",
        )
    if group["state_dtype"] not in _STATE_DTYPES:
        wrong = str(group["state_dtype"])
        yield PolicyError(f"unknown state_dtype {wrong!r}", why=nearest(wrong, _STATE_DTYPES))
    try:
        storage(group["master"], torch.bfloat16, rounding=group["rounding"])
    except PolicyError as error:
        yield error


def check_unchanged(param: Tensor, state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a parameter whose shape or device is not that of its state any more.

    Raises:
        StateError: With both.
    """
    for name in names:
        if name in state and state[name].shape != param.shape:
            raise StateError(
                "a parameter was resized after the optimizer made its state",
                where=f"{tuple(state[name].shape)} → {tuple(param.shape)}, {name}",
                write="a new optimizer over the new parameters",
            )
        if name in state and state[name].device != param.device:
            raise StateError(
                "a parameter was moved after the optimizer made its state",
                where=f"{state[name].device} → {param.device}, shape {tuple(param.shape)}",
                write="model.to(device) before the optimizer is made, or optimizer.load_state_dict after it",
            )
