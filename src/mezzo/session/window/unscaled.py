"""Unscaled gradients where users look for them: of a master, on its parameter too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import StateError
from mezzo.step.whole import Call, at_once

__all__ = ["Unscaled"]


class Unscaled:
    """Gradients from ``unscale_`` on: that of a master is, as the same FP32 tensor, that of its parameter too.

    So whatever is done in place on either side is done. What is assigned counts as well, on whichever side, until
    :meth:`withdraw`. Meanwhile the parameters take gradients of any dtype, since users write ``zeros_like(param)``.

    Args:
        pairs: What the optimizers update, each with the low-precision parameter of the model that it stands for:
            a master, or the parameter itself, where an optimizer of mezzo's updates it.
        name_of: Gives a parameter's name, for errors.

    **Cost**: no memory, and no pass over gradients that are FP32 already.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]], name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        self._is_shown = True
        self._shown: list[tuple[Any, Any, Tensor | None]] = []
        for master, param in pairs:
            param.grad_dtype = None
            if master.grad is not None and master.grad.dtype != torch.float32:
                master.grad = master.grad.to(torch.float32)
            if param is not master:
                param.grad = master.grad
            self._shown.append((master, param, master.grad))

    def agree(self) -> None:
        """Let both sides have what was assigned to one of them.

        Raises:
            StateError: Both were assigned, with different values; nothing was changed.
        """
        if not self._is_shown:
            return
        decided = [self._decided(master, param, shown) for master, param, shown in self._shown]
        for (master, param, _), gradient in zip(self._shown, decided, strict=True):
            if master.grad is not gradient:
                master.grad = gradient
            if param.grad is not gradient:
                param.grad = gradient
        self._shown = [(master, param, param.grad) for master, param, _ in self._shown]

    def withdraw(self) -> None:
        """Leave the gradients to the masters alone, as a step and a backward pass expect them.

        Raises:
            StateError: As :meth:`agree`.
        """
        if not self._is_shown:
            return
        self.agree()
        calls: list[Call] = []
        for master, param, _ in self._shown:
            if param is master:
                calls.append(partial(setattr, param, "grad_dtype", torch.float32))
            else:
                calls += [partial(setattr, param, "grad", None), partial(setattr, param, "grad_dtype", param.dtype)]
        at_once(*calls, partial(setattr, self, "_is_shown", False))  # or gradients would be summed with themselves

    def put_back(self) -> None:
        """Let parameters take gradients of their own dtype again; any that is still there is rounded to it."""
        self._is_shown = False
        for _, param, _ in self._shown:
            gradient = None if param.grad is None else param.grad.to(param.dtype)
            at_once(
                partial(setattr, param, "grad", None),
                partial(setattr, param, "grad_dtype", param.dtype),
                partial(setattr, param, "grad", gradient),
            )

    def _decided(self, master: Tensor, param: Tensor, shown: Tensor | None) -> Tensor | None:
        """Return the gradient that was assigned last, as far as that can be told."""
        one, other = master.grad, param.grad
        if one is shown:
            gradient = other
        elif other is shown or other is None or one is other:
            gradient = one
        elif one is None or _same(one, other):
            gradient = other
        else:
            raise StateError(
                "a parameter and its master were given different gradients",
                where=self._name_of(param),
                why="after amp.unscale_() they share one, and nothing says which of the two is meant",
                write="p.grad = … for those of model.parameters(), or for those of amp.master_params(), not for both",
            )
        return gradient if gradient is None else gradient.to(torch.float32)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two dense gradients have the same values; a host sync."""
    return one.layout == other.layout == torch.strided and torch.equal(one, other.to(one.dtype))
