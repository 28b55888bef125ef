"""Optimizers that evaluate the loss inside their step: each evaluation checked, all undone if one overflows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Overflowed", "undone_on_overflow"]


class Overflowed(Exception):  # noqa: N818 - it never leaves the session
    """An evaluation's gradients are not finite; caught by the session."""


@contextmanager
def undone_on_overflow(optimizer: Optimizer, params: list[Tensor], then: Callable[[], None] | None) -> Iterator[None]:
    """Put weights and optimizer state back if an evaluation overflows, and swallow :class:`Overflowed`.

    Any other exception restores nothing, as with torch's own optimizers.

    Args:
        optimizer: The optimizer that steps.
        params: What it updates.
        then: Called after everything is back in place, if given.

    **Cost**: a copy of weights and optimizer state, for as long as the step runs.
    """
    weights = [param.detach().clone() for param in params]
    state = {param: _copied(values) for param, values in optimizer.state.items()}
    try:
        yield
    except Overflowed:
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
        optimizer.state.clear()
        optimizer.state.update(state)
        if then is not None:
            then()


def _copied(value: Any) -> Any:
    """Copy an optimizer's state: tensors, and whatever plain containers hold them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(inner) for inner in value)
    return copy.deepcopy(value)
