"""Earlier gradients of a window, around a backward pass that reduces those that it makes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, reduce
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import StateError
from mezzo.session.window.wide import WideGradients, added
from mezzo.session.window.wrappers import Reduction
from mezzo.step.gradients import mark
from mezzo.step.whole import Call, at_once
from mezzo.tensors import LOW

__all__ = ["Waiting"]


class Waiting:
    """What is known of the gradients in ``.grad`` between ranks, where wrappers reduce them.

    A reducer takes all that ``.grad`` holds, in the parameter's dtype. Sums that no backward pass has reduced yet wait
    in FP32 and are rounded once, together with what the last one makes; where a hook of the user's reduces, they go
    to ``.grad``. Those that are reduced already stand aside, and come back when it is done.

    Args:
        wide: The dtypes of gradients.

    Attributes:
        is_reduced: Whether all of them are reduced.
        is_known: Whether that is known: not where a communication hook of the user's reduces them, or nothing does.
        ranks: How many times their mean over ranks they are: 1, or how many ranks were summed over.
        usual: What that is from the first backward pass on, where ``fully_shard`` reduces them.
    """

    def __init__(self, wide: WideGradients) -> None:
        self._wide = wide
        self._reduction: Reduction | None = None
        self._apart: dict[Tensor, Tensor] = {}
        self._summed: list[Any] = []
        self._before: list[tuple[int, int] | None] = []
        self.is_reduced, self.is_known, self.ranks, self.usual = True, False, 1, 1

    def start(self) -> None:
        """Know nothing of gradients that are gone, or set aside as unscaled sums."""
        self._reduction, self._apart, self._summed = None, {}, []
        self.is_reduced, self.is_known, self.ranks = True, False, self.usual

    def resume(self, ranks: int, leaves: Iterable[Tensor]) -> None:
        """Go on with gradients that were saved.

        Args:
            ranks: As :attr:`ranks` was.
            leaves: The parameters that have them.
        """
        self.start()
        self.ranks, self._summed = ranks, list(leaves)

    def require_reduced(self, calls: int) -> None:
        """Refuse to set gradients aside, unscaled, that a later backward pass would have to reduce.

        Args:
            calls: How many backward passes there were.
        """
        if self.is_known and not self.is_reduced:
            raise StateError(
                "gradients that DistributedDataParallel has not reduced yet would be set aside",
                where=f"{calls} amp.backward() call(s) since the last step",
                why="the next ones carry another loss scale and are summed apart: no later pass would reduce these",
                write="each loss outside no_sync(), after a forward pass of its own; or one loss_id for all of them",
            )

    @torch.no_grad()
    def step_aside(self, reduction: Reduction | None, *, is_first: bool) -> None:
        """Make way for a backward pass.

        Args:
            reduction: What it reduces; ``None`` where no wrapper reduces anything.
            is_first: Whether it is the first of its window.
        """
        self._reduction, self._before = reduction, []
        if reduction is None:
            return
        self.is_known = reduction.is_known
        if is_first and not self._wide.is_on:
            return  # there is no gradient yet, or it has its parameter's dtype
        if self.ranks not in (1, reduction.ranks):
            self._average()
        self.is_reduced = self.is_reduced or all(leaf.grad is None for leaf in reduction.near)
        kept = set(map(id, self._wide.params()))
        calls: list[Call] = []
        for leaf in reduction.leaves:
            calls += self._making_way(leaf, reduction, leaf.dtype not in LOW or id(leaf) in kept)
        at_once(*calls)
        self._before = _marks(reduction.near)

    def _making_way(self, leaf: Any, reduction: Reduction, is_kept: bool) -> list[Call]:
        """Return what makes way on one parameter; one without an FP32 value is summed in low precision, as by torch."""
        total, wire = leaf.grad, reduction.wire_of(leaf)
        empty: list[Call] = [partial(setattr, leaf, "grad", None), partial(setattr, leaf, "grad_dtype", leaf.dtype)]
        if total is None:
            return empty if leaf.grad_dtype != leaf.dtype else []
        if self.is_reduced and reduction.is_known and is_kept and reduction.changes(leaf):
            # A copy where it may be a bucket's own memory, which the reducer is about to fill.
            total = total.to(torch.float32, copy=total.dtype == leaf.dtype)
            return [partial(setitem, self._apart, leaf, total), *empty]
        if is_kept and leaf.dtype in LOW and wire is not None and total.layout == torch.strided:
            nothing = torch.zeros_like(leaf) if wire.looks else None
            return [
                partial(setitem, wire.added, id(leaf), total.float()),
                *empty,
                partial(setattr, leaf, "grad", nothing),
            ]
        return [*empty, partial(setattr, leaf, "grad", total.to(leaf.dtype))] if total.dtype != leaf.dtype else []

    @torch.no_grad()
    def come_back(self) -> None:
        """Add what stood aside to what the backward pass has made, and note how far all of it is reduced."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        has_run, found = reduction.has_run, dict[int, Tensor]()
        for wire in reduction.wires:
            found |= wire.found if has_run else wire.added
        ranks, is_reduced = self.ranks, self.is_reduced
        if has_run:
            ranks, is_reduced = reduction.ranks, reduction.is_whole
        elif found or _marks(reduction.near) != (self._before or [None] * len(reduction.near)):
            ranks, is_reduced = 1, False
        if ranks != self.ranks and self._apart:
            torch._foreach_mul_(list(self._apart.values()), ranks / self.ranks)
        for leaf in reduction.leaves if found or self._apart else ():
            before, new = self._apart.get(leaf), found.get(id(leaf))
            if has_run and leaf.grad is None:
                new = None  # zeros: no rank has used it
            if before is not None or new is not None:
                own = None if has_run and new is not None else leaf.grad
                total = reduce(added, (each for each in (before, new, own) if each is not None))
                at_once(*self._wide.giving(leaf, total), partial(self._apart.pop, leaf, None))
        self.ranks, self.is_reduced = ranks, is_reduced
        if has_run:
            self._summed = reduction.leaves if ranks > 1 else []

    def _average(self) -> None:
        """Make means of sums over ranks, to which a rank's own gradients can be added."""
        calls: list[Call] = []
        for leaf in self._summed:
            if leaf.grad is not None:
                calls += self._wide.giving(leaf, leaf.grad.float() * (1 / self.ranks))
        at_once(*calls, partial(setattr, self, "ranks", 1))


def _marks(leaves: Iterable[Tensor]) -> list[tuple[int, int] | None]:
    """Return what tells whether gradients were made, or added to."""
    return [None if leaf.grad is None else mark(leaf.grad) for leaf in leaves]
