"""Low-precision parameters with FP32 gradients: where several backward passes are summed, and where users look."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import one_pass
from mezzo.step.whole import at_once
from mezzo.tensors import LOW

__all__ = ["WideGradients", "added"]


class WideGradients:
    """Says of which dtype the gradients of low-precision parameters are, through ``Tensor.grad_dtype``.

    The first gradients of a window come in the parameter's dtype, as the backward pass makes them: half the memory.
    From the second backward pass on they are summed in FP32, where the parameter has an FP32 value to add them to.

    Args:
        optimizers: Of one group.
        masters: Their masters.

    Attributes:
        is_on: Whether some parameters take FP32 gradients now.
    """

    def __init__(self, optimizers: list[Optimizer], masters: list[MasterWeights]) -> None:
        self._optimizers, self._masters = optimizers, masters
        self.is_on = False

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield the low-precision parameters that have masters, each with its own."""
        return (pair for masters in self._masters for pair in masters.masters().items())

    def of_one_pass(self) -> Iterator[Any]:
        """Yield the low-precision parameters of mezzo's optimizers, whose kernels read FP32 gradients as well."""
        groups = (group for optimizer in one_pass(self._optimizers) for group in optimizer.param_groups)
        return (param for group in groups for param in group["params"] if param.dtype in LOW)

    def params(self) -> Iterator[Any]:
        """Yield the low-precision parameters that may hold FP32 gradients."""
        yield from self.of_one_pass()
        yield from (param for param, _ in self.pairs())

    def begin(self) -> None:
        """From here on sum, and unscale, in FP32 where a parameter's FP32 value is kept."""
        kept = [param for optimizer in one_pass(self._optimizers) for param in optimizer.stored()]
        for param in (*kept, *(param for param, _ in self.pairs())):
            if param.grad_dtype != torch.float32:
                self._give(param, None if param.grad is None else param.grad.float(), torch.float32)

    def allow_any(self) -> None:
        """Let users assign gradients of any dtype, since they write ``p.grad = torch.zeros_like(p)``."""
        for param in self.params():
            if param.grad_dtype not in (None, param.dtype):
                at_once(partial(setattr, self, "is_on", True), partial(setattr, param, "grad_dtype", None))

    def end(self) -> None:
        """Let the first gradients of the next window come as its backward pass makes them."""
        if self.is_on:
            still = False
            for param in self.params():
                if param.grad is None:
                    param.grad_dtype = param.dtype
                else:  # cleared to zeros, which have the dtype that they had
                    still = True
            self.is_on = still

    def give_back(self) -> None:
        """Let parameters hold, in FP32, what lies with their masters: there users see it, and clear it."""
        for param, master in self.pairs():
            if master.grad is not None:
                total = master.grad.float()
                self._give(param, total if param.grad is None else added(total, param.grad), None, master)

    def _give(self, param: Any, gradient: Tensor | None, dtype: torch.dtype | None, master: Any = None) -> None:
        # In one go: an interrupt would lose the gradient, or leave it with both, to be counted twice.
        at_once(
            partial(setattr, self, "is_on", True),
            partial(setattr, param, "grad", None),
            partial(setattr, param, "grad_dtype", dtype),
            partial(setattr, param, "grad", gradient),
            *([partial(setattr, master, "grad", None)] if master is not None else []),
        )


def added(one: Tensor, other: Tensor) -> Tensor:
    """Add two gradients, of which either may be sparse."""
    return other + one if one.layout == torch.sparse_coo else one + other
