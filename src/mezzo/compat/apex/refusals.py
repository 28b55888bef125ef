"""What ``initialize`` and its like refuse of what they were given, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mezzo.errors import MezzoError, PolicyError, StateError, shown, some_of
from mezzo.tensors import LOW, dtype_name

__all__ = ["listed", "unfit"]


def listed(given: Any, kind: type, call: str) -> list[Any]:
    """Return what a call was given as a list; ``None`` is none.

    Args:
        given: One, a list or a tuple.
        kind: Of what.
        call: The user's call, for errors.

    Raises:
        PolicyError: Something else among them, or no model.
    """
    every = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    wrong = [shown(each) for each in every if not isinstance(each, kind)]
    if wrong or (given is None and kind is nn.Module):
        raise PolicyError(
            f"{call} takes {kind.__name__}s, one or a list",
            where=some_of(wrong) or "None",
            write=f"model, optimizer = {call}(model, optimizer, …), the optimizer as torch or mezzo made it",
        )
    return every


def unfit(model: nn.Module, call: str, *, stores_low: bool) -> Iterator[MezzoError]:
    """Yield what stands against a model: a wrapper that is there too early, parameters that are low already.

    Args:
        model: The model.
        call: The user's call, for errors.
        stores_low: Whether weights are about to change their dtype.
    """
    if isinstance(model, DataParallel) or (stores_low and isinstance(model, DistributedDataParallel)):
        wrapper = type(model).__name__
        yield StateError(
            f"the model is wrapped in {wrapper} already",
            where=call,
            why="the wrapper has looked at weights that would now change their dtype"
            if stores_low
            else "it copies the model in each forward pass, to threads in which nothing is cast",
            write=f"model, optimizer = {call}(model, optimizer, …), then {wrapper}(model)"
            if stores_low
            else "DistributedDataParallel, one process for each device",
        )
    tensors = (*model.named_parameters(), *model.named_buffers())
    if low := [f"{name} ({dtype_name(tensor.dtype)})" for name, tensor in tensors if tensor.dtype in LOW]:
        yield PolicyError(
            f"{call} was given half-precision parameters",
            where=some_of(low),
            why="it converts what the level stores low by itself, and keeps the FP32 values",
            write="the model without .half(), or model.float() first",
        )
