"""Low-precision parameters with FP32 gradients: where several backward passes are summed, and where users look."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.keeper import Keeper
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import one_pass
from mezzo.session.window.together import cast
from mezzo.step.whole import Call, at_once
from mezzo.tensors import LOW, is_distributed

__all__ = ["WideGradients", "added"]


class WideGradients:
    """Says of which dtype the gradients of low-precision parameters are, through ``Tensor.grad_dtype``.

    The first gradients of a window come in the parameter's dtype, as the backward pass makes them: half the memory.
    From the second backward pass on they are summed in FP32, where the parameter has an FP32 value to add them to.

    From ``unscale_`` on the gradient of a master is, as the same FP32 tensor, that of its parameter too: whatever is
    done in place on either side is done. What is assigned counts as well, on whichever side, until :meth:`withdraw`.
    Meanwhile the parameters take gradients of any dtype, since users write ``zeros_like(param)``.

    Args:
        optimizers: Of one group.
        masters: Their masters.
        name_of: Gives a parameter's name, for errors.

    Attributes:
        is_on: Whether some parameters take FP32 gradients now.
        shown: What each master and its parameter were shown, empty once that is over; ``None`` where nothing was shown
            since the last step.

    **Cost**: no pass over gradients that are FP32 already; few launches for all others.
    """

    def __init__(
        self, optimizers: list[Optimizer], masters: list[MasterWeights], name_of: Callable[[Tensor], str]
    ) -> None:
        self._optimizers, self._masters, self._name_of = optimizers, masters, name_of
        self.is_on = self._stays_on = False
        self.shown: list[tuple[Any, Any, Tensor | None]] | None = None

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield the low-precision parameters that have masters, each with its own."""
        return (pair for masters in self._masters for pair in masters.masters().items())

    def _of_one_pass(self) -> Iterator[Any]:
        """Yield the low-precision parameters of mezzo's optimizers, whose kernels read FP32 gradients as well."""
        groups = (group for optimizer in one_pass(self._optimizers) for group in optimizer.param_groups)
        return (param for group in groups for param in group["params"] if param.dtype in LOW)

    def params(self) -> Iterator[Any]:
        """Yield the low-precision parameters that may hold FP32 gradients."""
        yield from self._of_one_pass()
        yield from (param for param, _ in self.pairs())

    def begin(self, but: Container[int] = ()) -> None:
        """From here on sum, and unscale, in FP32 where a parameter's FP32 value is kept.

        Args:
            but: The ``id`` of parameters that are left out.
        """
        keepers: list[Keeper] = [*one_pass(self._optimizers), *self._masters]
        for keeper in keepers:
            params: list[Any] = [param for param in keeper.stored() if id(param) not in but]
            held = []
            for param in params:
                # Gradients of parts are made by fully_shard, which assigns the first in the parameter's dtype.
                wide = None if param.grad is None and is_distributed(param) else torch.float32
                if param.grad is None and param.grad_dtype != wide:
                    self._give(param, None, wide)
                elif param.grad is not None and {param.grad_dtype, param.grad.dtype} != {wide}:
                    held.append(param)
            for param, gradient in cast(held, torch.float32):
                self._give(param, gradient, torch.float32)

    def stay_on(self) -> None:
        """Sum in FP32 from the first backward pass of each window on, where a parameter's FP32 value is kept."""
        self._stays_on = True
        self.begin()

    def allow_any(self) -> None:
        """Let users assign gradients of any dtype, since they write ``p.grad = torch.zeros_like(p)``."""
        for param in self.params() if self.is_on else ():
            if param.grad_dtype not in (None, param.dtype):
                param.grad_dtype = None

    def end(self) -> bool:
        """Let the first gradients of the next window come as its backward pass makes them.

        Returns:
            Whether gradients that users were shown, and that are still there, were rounded to their parameters' dtype.
        """
        was_shown, self.shown = self.shown is not None, None
        still = self._stays_on
        rounded = dict[torch.dtype, list[Any]]()
        for param in self.params() if self.is_on else ():
            first = torch.float32 if self._stays_on else param.dtype
            if param.grad is None:
                param.grad_dtype = first
            elif was_shown:
                rounded.setdefault(first, []).append(param)
            else:  # cleared to zeros, which have the dtype that they had
                still = True
        for first, params in rounded.items():
            for param, gradient in cast(params, first):
                self._give(param, gradient, first)
        self.is_on = still
        return was_shown

    def give_back(self) -> None:
        """Let parameters hold, in FP32, what lies with their masters: there users see it, and clear it."""
        self.withdraw()
        for param, master in self.pairs():
            if master.grad is not None:
                total = master.grad.float()
                total = total if param.grad is None else added(total, param.grad)
                self._give(param, total, None, partial(setattr, master, "grad", None))
        self.allow_any()

    def _give(self, param: Any, gradient: Tensor | None, dtype: torch.dtype | None, *more: Call) -> None:
        # In one go: an interrupt would lose the gradient, or leave it with both, to be counted twice.
        at_once(*self.giving(param, gradient, dtype), *more)

    def giving(self, param: Any, gradient: Tensor | None, dtype: torch.dtype | None = None) -> list[Call]:
        """Return what gives a parameter a gradient, and lets autograd add to it in its dtype.

        Args:
            param: A parameter; of an FP32 one the gradient is of FP32.
            gradient: The gradient.
            dtype: Of later ones; any when omitted.
        """
        later = dtype if param.dtype in LOW else param.dtype
        return [
            partial(setattr, self, "is_on", True),
            partial(setattr, param, "grad", None),
            partial(setattr, param, "grad_dtype", later),
            partial(setattr, param, "grad", gradient),
        ]

    # Unscaled, where users look ---------------------------------------------------------------------------

    def show(self) -> None:
        """Let users see unscaled gradients, and edit them, on the models' parameters as on their masters."""
        shown, self.is_on = [], True
        pairs = [*self.pairs(), *((param, param) for param in self._of_one_pass())]
        for param, _ in pairs:
            param.grad_dtype = None
        for master, gradient in cast([master for _, master in pairs if master.grad is not None], torch.float32):
            master.grad = gradient
        for param, master in pairs:
            param.grad = master.grad
            shown.append((master, param, master.grad))
        self.shown = shown

    def agree(self) -> None:
        """Give a gradient that was assigned to a parameter to its master too, and the other way round.

        Raises:
            StateError: Both were assigned, with different values; nothing was changed.
        """
        decided = [(master, param, self._decided(master, param, was)) for master, param, was in self.shown or ()]
        for master, param, gradient in decided:
            master.grad = param.grad = gradient
        if self.shown:
            self.shown = decided

    def withdraw(self) -> None:
        """Leave the gradients to the masters alone, as a step and a backward pass expect them.

        Raises:
            StateError: As :meth:`agree`.
        """
        self.agree()
        calls: list[Call] = []
        for master, param, _ in self.shown or ():
            if param is master:
                calls.append(partial(setattr, param, "grad_dtype", torch.float32))
            else:
                calls += [partial(setattr, param, "grad", None), partial(setattr, param, "grad_dtype", param.dtype)]
        if calls:  # in one go, or gradients would be summed with themselves
            at_once(*calls, partial(setattr, self, "shown", []))

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


def added(one: Tensor, other: Tensor) -> Tensor:
    """Add two gradients, of which either may be sparse."""
    return other + one if one.layout == torch.sparse_coo else one + other
