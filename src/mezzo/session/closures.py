"""Optimizers that evaluate the loss inside their step: each evaluation checked, all undone if one overflows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

__all__ = ["Before", "Overflowed"]


class Overflowed(Exception):  # noqa: N818 - it never leaves the session
    """An evaluation's gradients are not finite; caught by the session."""


class Before:
    """Weights, optimizer state and options as they were before a step.

    Args:
        optimizer: The optimizer that steps; one that it wraps, as SAM does, is put back with it.
        params: What it updates.

    **Cost**: a copy of weights and optimizer state.
    """

    def __init__(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        self._weights = [(param, param.detach().clone()) for param in params]
        wrapped = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
        self._states = [_State(each) for each in (optimizer, *wrapped)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; to do it twice is to do it once."""
        for param, weight in self._weights:
            param.copy_(weight)
        for each in self._states:
            each.restore()


class _State:
    """An optimizer's state and options as they were; tensors of its state get their values back in the same memory."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # By parameter, and what users note down beside them.
        self._state = {key: dict(kept) if isinstance(kept, dict) else kept for key, kept in optimizer.state.items()}
        self._values = {key: _copied(kept) for key, kept in self._state.items()}
        options = ({key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups)
        self._options = [_copied(each) for each in options]

    def restore(self) -> None:
        self._optimizer.state.clear()
        for key, values in self._values.items():
            there = self._state[key]
            if not isinstance(there, dict):
                self._optimizer.state[key] = values
                continue
            for name, value in values.items():
                if isinstance(value, Tensor):
                    there[name].copy_(value)  # an optimizer may know its address
                else:
                    there[name] = value
            self._optimizer.state[key] = there
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            params = group["params"]
            group.clear()
            group.update(params=params, **options)


def _copied(value: Any) -> Any:
    """Copy a tensor, any plain value, and whatever containers hold them."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), value)
