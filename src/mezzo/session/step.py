"""One step, from its open windows to what it returns: window, verdict, update, scale."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from mezzo.session.arguments import check_numbers, overflowed
from mezzo.session.closures import evaluated
from mezzo.session.core import Core, current
from mezzo.session.outcome import Step, StepOutcome
from mezzo.session.scale import adapt
from mezzo.session.update import Found, update
from mezzo.session.verdict import Judged, check
from mezzo.session.window.group import GradientGroup
from mezzo.step.whole import Call, Piece, at_once

if TYPE_CHECKING:
    from mezzo.overflow import Changed, Overflow, Replay

__all__ = ["take"]

logger = logging.getLogger(__name__)


def take(
    core: Core,
    optimizers: list[Optimizer],
    closure: Callable[[], Any] | None,
    schedulers: list[Callable[[], Any]],
) -> Step:
    """Check the gradients of some optimizers, then update or skip, as one piece of work that is done whole.

    Args:
        core: The session.
        optimizers: Those that step.
        closure: Evaluates the loss, for an optimizer that asks for it several times.
        schedulers: Stepped if the weights were.
    """
    try:
        if closure is not None:
            return _finished(core, *evaluated(core, optimizers, closure), schedulers)
        groups = core.open_groups(optimizers, "step")
        stepping = [o for group in groups for o in group.optimizers if o in optimizers]
        alone = {o for group in groups if len(group.optimizers) == 1 for o in group.optimizers}
        check_numbers(stepping)
        core.look_for_edits(groups)
        judged = check(groups, optimizers, core.device, core.max_grad_norm)
        core.weights.refuse_lost_bits(judged.dtypes)
        judged = current().seen(judged)  # a rehearsal for a graph skips
        found = Found(judged.verdict.found_inf)
        pieces = update(core.writes, judged, stepping, alone, found, core.weights.masters)
        return _finished(core, groups, judged, found, pieces, schedulers)
    except BaseException as error:
        _give_up(core, error)
        raise


def _finished(
    core: Core,
    groups: list[GradientGroup],
    judged: Judged,
    found: Found,
    pieces: list[Piece],
    schedulers: list[Callable[[], Any]],
) -> Step:
    """Do some pieces of work and all that ends a step, whole, whatever interrupts it."""
    # The host asks about the overflow only where it has to act on the answer.
    overflow = _located(core.replay, judged) if core.replay is not None and found else None
    ending = _Ending(core, groups, judged)
    stepping = [partial(_one, each) for each in schedulers] if schedulers and not found else []
    # From here on the step counts: what a closure has done is no longer undone, and an interrupt waits.
    core.writes.begin([*pieces, *ending.pieces(), *stepping], partial(_abandon, groups), core.writes.undo.clear)
    core.writes.run()
    ending.then()
    if overflow is not None:
        logger.warning("%s", overflow)
    step = ending.outcome.step(overflow, core.stats.check)
    if core.on_overflow == "raise" and found:
        raise overflowed(judged, core.weights.name_of, ending.outcome.loss_failed)
    return step


def _located(replay: Replay, judged: Judged) -> Overflow | Changed | None:
    """Run the step's batches again, and say where the overflow began."""
    with torch.enable_grad():
        return replay.locate(judged.shares[-1].scale)


def _abandon(groups: Iterable[GradientGroup]) -> None:
    for group in groups:
        group.abandon()


@torch.no_grad()
def _give_up(core: Core, error: BaseException) -> None:
    """Finish what has begun before an error, or an interrupt, goes on; undo what can be undone."""
    core.evaluating = None
    while core.writes.undo:
        at_once(core.writes.undo[0], core.writes.undo.clear)
    core.writes.complete(error)
    for group in core.groups:
        if group.window is not None:
            group.give_back()  # users see the gradients of windows that are still open, and clear them


class _Ending:
    """What a session writes down of a step, after its optimizers.

    Each piece may be asked again after an interrupt, so that it begins from what was known before.
    """

    outcome: StepOutcome

    def __init__(self, core: Core, groups: list[GradientGroup], judged: Judged) -> None:
        self._core, self._groups, self._judged = core, groups, judged
        self._scales_before = [scaler.remembering() for scaler in core.scalers]
        self.then: Callable[[], object] = dict

    def pieces(self) -> list[Piece]:
        return [self._close_windows, self._adapt_scales, self._forget, self._count, self._core.writes.end]

    def _close_windows(self) -> list[Call]:
        for group in self._groups:
            for masters in group.masters:
                masters.drop_gradients()
            group.close(self._judged.gradients if len(group.optimizers) == 1 else None)
        self._core.weights.restored.clear()
        return []

    def _adapt_scales(self) -> list[Call]:
        for restore in self._scales_before:  # an interrupt may have come in the middle
            restore()
        self.outcome = adapt(self._core.scalers, self._judged, self._core.inner_overflows)
        return []

    def _forget(self) -> list[Call]:
        for share in self._judged.shares:
            self._core.inner_overflows.pop(share.loss_id, None)
        if self._core.buffers is not None:
            self._core.buffers.restore_where(self._judged.verdict.found_inf)
        self._core.forget_passes()
        return []

    def _count(self) -> list[Call]:
        calls, self.then = current().noted(self._core, self.outcome)
        return calls


def _one(call: Call) -> list[Call]:
    return [call]
