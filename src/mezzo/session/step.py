"""One step, from its open windows to what it returns: window, verdict, update, scale."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from mezzo.session.agreement import Agreement
from mezzo.session.closures import evaluated
from mezzo.session.core import Core, current
from mezzo.session.refusals.calls import check_closure, check_numbers, checked_schedulers, chosen, not_finite
from mezzo.session.scale import Step, StepOutcome, adapt, one_or_all
from mezzo.session.update import update
from mezzo.session.verdict import Judged, judge_groups
from mezzo.session.window.group import GradientGroup
from mezzo.step.consensus import Heard
from mezzo.step.passes import Verdict
from mezzo.step.whole import Call, Piece, at_once

if TYPE_CHECKING:
    from mezzo.overflow import Changed, Overflow

__all__ = ["take", "take_together"]

logger = logging.getLogger(__name__)


def take_together(core: Core, agreement: Agreement, optimizers: Any, closure: Any, scheduler: Any) -> Step:
    """Take a step with other ranks: on all of them or on none; the other arguments as of :func:`take`.

    Args:
        core: The session.
        agreement: What the ranks decide together.
        optimizers: See there.
        closure: See there.
        scheduler: See there.
    """
    agreement.begin(core.stats.begun + 1)
    try:
        taken = take(core, optimizers, closure, scheduler)
    except Exception as error:
        heard = agreement.refuse(error, core.device)
        if heard is None:
            raise
        taken = _abstained(core, heard)
    agreement.consensus.step += 1
    return taken


@torch.no_grad()
def _abstained(core: Core, heard: Heard) -> Step:
    """Skip a step that other ranks have gradients for: at the end of the data a rank may have none left."""
    scales = core.scale_tensors()
    verdict = Verdict.of_flags(torch.ones_like(scales[0]), None, core.device)
    outcome = StepOutcome.of_nothing(verdict, one_or_all(scales), heard)
    core.forget_passes()
    calls, then = current().noted(core, outcome)
    at_once(*calls)
    then()
    return Step(outcome, core.stats.check)


def take(core: Core, optimizers: Any, closure: Callable[[], Any] | None, scheduler: Any) -> Step:
    """Check the gradients of some optimizers, then update or skip, as one piece of work that is done whole.

    Args:
        core: The session.
        optimizers: Those that step; all that have gradients when ``None``.
        closure: Evaluates the loss, for an optimizer that asks for it several times.
        scheduler: One or several, stepped if the weights were.
    """
    current().refuse(core, closure, scheduler)
    core.stats.check()
    optimizers, schedulers = chosen(optimizers, core.optimizers), checked_schedulers(scheduler)
    if closure is not None:
        check_closure(closure)
    try:
        if core.consensus is not None:
            core.weights.follow_first_rank(core.consensus)
        if closure is not None:
            return _finished(core, *evaluated(core, optimizers, closure, partial(_judged, core)), schedulers)
        groups = core.open_groups(optimizers, "step")
        core.weights.shards.refuse_unreduced("this step would not see them, and the next would take them for its own")
        stepping = [o for group in groups for o in group.optimizers if o in optimizers]
        alone = {o for group in groups if len(group.optimizers) == 1 for o in group.optimizers}
        check_numbers(stepping)
        judged = _judged(core, groups, stepping)
        overflowed = cache(judged.overflowed)  # waits for the device, once
        pieces = update(core.writes, judged, stepping, alone, overflowed, core.weights.masters)
        return _finished(core, groups, judged, overflowed, pieces, schedulers)
    except BaseException as error:
        _give_up(core, error)
        raise


def _judged(core: Core, groups: list[GradientGroup], optimizers: list[Optimizer]) -> Judged:
    """Gather and judge the gradients of some optimizers of open groups, with all ranks that step together."""
    core.look_for_edits(groups)
    agreement = core.agreement
    whole = None if agreement is None else agreement.whole
    judged = judge_groups(groups, optimizers, core.device, core.max_grad_norm, whole)
    core.weights.low.check(judged.dtypes)
    if agreement is not None:
        call = sum(1 << core.optimizers.index(optimizer) for optimizer in optimizers)
        judged = agreement.judged(judged, core.inner_overflows, call)
    return current().seen(judged)  # a rehearsal for a graph skips


def _finished(
    core: Core,
    groups: list[GradientGroup],
    judged: Judged,
    overflowed: Callable[[], bool],
    pieces: list[Piece],
    schedulers: list[Callable[[], Any]],
) -> Step:
    """Do the writes of a step and all that ends it, whole, whatever interrupts it."""
    # The host asks about the overflow only where it has to act on the answer.
    where = _explained(core, judged) if core.replay is not None and overflowed() else None
    scales_before = [scaler.remembering() for scaler in core.scalers]
    inner = dict(core.inner_overflows) if judged.heard is None else {}  # which all ranks have told already
    ended: list[tuple[StepOutcome, Callable[[], None]]] = []

    def end() -> list[Call]:
        """Write down what the step did: from what was known before, since it is asked again after an interrupt."""
        for restore in scales_before:
            restore()
        outcome = adapt(core.scalers, judged, inner)
        core.close(groups, judged)
        calls, then = current().noted(core, outcome)
        ended[:] = [(outcome, then)]
        return calls

    def abandon() -> None:
        for group in groups:
            group.abandon()

    stepping: list[Piece] = []
    if schedulers and not overflowed():
        stepping = [partial(list, (each,)) for each in schedulers]
    # From here on the step counts: what a closure has done is no longer undone, and an interrupt waits.
    core.writes.begin([*pieces, end, core.writes.end, *stepping], abandon, core.writes.undo.clear)
    core.writes.run()
    ((outcome, then),) = ended
    then()
    if where is not None:
        logger.warning("%s", where)
    if core.on_overflow == "raise" and overflowed():
        raise not_finite(judged, core.weights.name_of, outcome.loss_failed)
    return Step(outcome, core.stats.check, where)


def _explained(core: Core, judged: Judged) -> Overflow | Changed | None:
    """Run the step's batches again, on this rank alone: another one may stop earlier, and reduces nothing."""
    wrappers, replay = core.weights.wrappers, core.replay
    assert replay is not None, "asked where overflows are explained"
    with torch.enable_grad(), nullcontext() if wrappers is None else wrappers.no_sync():
        where = replay.locate(judged.shares[-1].scale)
    if judged.heard is not None and where is None:
        logger.warning("the overflow began on rank %d, whose log says where", int(judged.heard.rank_found))
    return where


@torch.no_grad()
def _give_up(core: Core, error: BaseException) -> None:
    """Finish what has begun before an error, or an interrupt, goes on; undo what can be undone."""
    core.evaluating = None
    while core.writes.undo:
        at_once(core.writes.undo[0], core.writes.undo.clear)
    core.writes.complete(error)
    for group in core.groups:
        if group.window is not None:
            group.wide.give_back()  # users see the gradients of windows that are still open, and clear them
