"""What follows the check, as work that is done whole: the optimizers' step or its skip, and the next loss scales."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import OnePassOptimizer
from mezzo.scale import ScaleState
from mezzo.scale.scaler import Scaler
from mezzo.session.verdict import Judged
from mezzo.session.window.window import Share
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import can_fold, multiplications
from mezzo.step.passes import Verdict, not_finite
from mezzo.step.whole import Call, Piece, Work, at_once
from mezzo.tensors import LOW, moved

__all__ = ["Adapted", "Found", "Update", "adapt", "update"]

logger = logging.getLogger(__name__)

_VERSION: Final = attrgetter("_version")


class Found:
    """Whether a step overflowed; asked from Python it waits for the device, once."""

    def __init__(self, found_inf: Tensor) -> None:
        self._found_inf = found_inf
        self._known: bool | None = None

    def __bool__(self) -> bool:
        if self._known is None:
            self._known = bool(self._found_inf)
        return self._known


class Update(Work):
    """The writes of a session's step, in order; an interrupt goes on once all of them are done.

    mezzo's optimizers finish by themselves what they have begun. How far another one came that was interrupted inside
    its own ``step()`` nobody knows: the update stays half-way, and :meth:`require_whole` says so.
    """

    __slots__ = ("_at", "_came_back", "_give_up", "_is_whole", "_stepped", "_versions", "entering", "leaving", "params")

    def __init__(self) -> None:
        super().__init__()
        self._at: Optimizer | None = None  # whose step is under way
        self._stepped: list[Optimizer] = []
        #: To be called, as a function of C's, before the code of an optimizer that is not mezzo's: what it has written
        #: from there on is its own.
        self.entering: Call = dict
        # What tells that an optimizer's own code has run to its end is called between that and hooks of the user's, so
        # that it must be C's as well: an exception keeps the arguments that it is initialised with.
        self._came_back = Exception()
        self.leaving: Callable[..., None] = partial(BaseException.__init__, self._came_back)
        self._give_up: Callable[[], object] = dict
        self._is_whole = False
        #: What the step updates; whether it was written tells how far an optimizer came that is not mezzo's.
        self.params: list[Tensor] = []
        self._versions: list[int] = []

    def begin(self, pieces: Iterable[Piece], give_up: Callable[[], object], then: Call) -> None:
        """Take the writes of a step: from here on they are done, all of them.

        Args:
            pieces: The writes.
            give_up: Called if an optimizer raises before anything was updated.
            then: Called, as a function of C's, once they are taken.
        """
        self._give_up, self._is_whole, self._first = give_up, False, None
        at_once(partial(self._left.extend, pieces), then)

    def end(self) -> list[Call]:
        """All that belongs to the step is done; what follows, schedulers for instance, may fail by itself."""
        self._at, self._is_whole, self.params = None, True, []
        return [self._stepped.clear]

    def steps(self, optimizer: Optimizer, masters: MasterWeights | None) -> list[Piece]:
        """Return what steps with an optimizer that is not mezzo's, and rounds its masters into the model."""
        return [partial(self._step_of_another, optimizer), partial(self._stepped_with, masters)]

    def steps_of_mezzo(self, optimizer: OnePassOptimizer, verdict: Verdict) -> list[Piece]:
        """Return what steps with one of mezzo's optimizers, or skips."""
        return [partial(self._step_of_mezzo, optimizer, verdict, optimizer.updates)]

    def steps_on_device(
        self, optimizer: Optimizer, masters: MasterWeights | None, found_inf: Tensor, divisor: Tensor | None
    ) -> list[Piece]:
        """Return what steps with one of torch's fused optimizers, whose kernels find out by themselves whether to skip.

        Args:
            optimizer: One that :func:`mezzo.step.gradients.can_fold`.
            masters: Its masters.
            found_inf: 0-d float32: 1 to skip.
            divisor: 0-d float32: what its kernel divides the gradients by; ``None`` for nothing.
        """
        flags = {"found_inf": found_inf, "grad_scale": divisor}

        def arm() -> list[Call]:
            return [partial(vars(optimizer).update, flags)]

        return [arm, *self.steps(optimizer, masters), partial(_disarm, optimizer)]

    def _step_of_mezzo(self, optimizer: OnePassOptimizer, verdict: Verdict, before: int) -> list[Call]:
        self._at = optimizer
        if optimizer.updates == before:  # or an interrupt came after it had finished
            optimizer.update(verdict)
        self._came_back.args = ()
        return [partial(self._stepped.append, optimizer)]

    def _step_of_another(self, optimizer: Optimizer) -> list[Call]:
        self._at, step, self._came_back.args = optimizer, optimizer.step, ()
        self._versions = list(map(_VERSION, self.params))
        calls: list[Call] = [step, partial(self._stepped.append, optimizer)]
        if not getattr(type(optimizer).step, "hooked", False):
            return calls
        self.entering = self._enter  # called by the session's hook, with no line of mezzo's between it and the step
        return [self._begun.clear, *calls]

    def _stepped_with(self, masters: MasterWeights | None) -> list[Call]:
        self.entering, self._came_back.args = dict, ()
        if masters is not None:
            masters.round_to_params()
        return []

    def complete(self, error: BaseException) -> None:
        """Do what a step that was interrupted has left.

        Args:
            error: What interrupted it. Where an optimizer refuses to step, and nothing was updated yet, the rest is
                given up; where something was, the update stays half-way.
        """
        if self._begun and self._came_back.args and self._at is not None:  # out of a hook behind a step that is whole
            at_once(partial(self._stepped.append, self._at), self._left.popleft, self._begun.clear)
        if not self._begun:
            try:
                self.run()
            except Exception as again:
                logger.debug("an interrupted step could not go on: %s", again)
        if not self._left:
            return
        half_way = isinstance(self._at, OnePassOptimizer) and self._at.is_half_way
        # An error may come after some weights were written too: of a later group, for instance.
        within = self._begun and (
            not isinstance(error, Exception) or list(map(_VERSION, self.params)) != self._versions
        )
        if not self._is_whole and (self._stepped or half_way or within):
            self._disarm()
            return
        give_up = self._give_up if self.is_half_way and not self._is_whole else dict
        self.drop()
        give_up()

    def drop(self) -> None:
        """See :meth:`mezzo.step.whole.Work.drop`."""
        super().drop()
        self._disarm()
        self._stepped.clear()
        self._at, self.entering, self._came_back.args, self.params = None, dict, (), []

    def _disarm(self) -> None:
        if self._at is not None:
            _disarm(self._at)

    def require_whole(self) -> None:
        """Refuse to go on after an update that could not be finished.

        Raises:
            StateError: With the optimizer, and what to write.
        """
        if self.is_half_way:
            raise StateError(
                "an update was interrupted half-way",
                where=f"{type(self._at).__name__}.step(), called by amp.step()",
                why="some weights and moments are those of the next step, and some are not",
                write="load_state_dict(…) of the model, the optimizer and then amp, from the last checkpoint",
            )


def update(
    writes: Update,
    judged: Judged,
    optimizers: list[Optimizer],
    alone: set[Optimizer],
    found: Found,
    masters: Mapping[int, MasterWeights],
) -> list[Piece]:
    """Return what updates the weights, or skips; all that mezzo's optimizers can refuse is refused here.

    Optimizers whose kernels can do it unscale, clip and skip on the device; for the others the gradients are
    multiplied before, and the host asks whether to skip.

    Args:
        writes: What does it.
        judged: The gradients.
        optimizers: Those that step.
        alone: Optimizers that share no gradient, which therefore may rewrite theirs.
        found: Whether to skip.
        masters: The masters of those optimizers that have any, by ``id``.
    """
    writes.params = judged.params
    verdict = judged.verdict
    on_device = {optimizer for optimizer in optimizers if can_fold(optimizer)}
    folding = on_device & alone
    pieces: list[Piece] = []
    if len(folding) < len(optimizers) and not verdict.is_one:
        apart = {id(param) for optimizer in folding for group in optimizer.param_groups for param in group["params"]}
        pairs = zip(judged.params, judged.gradients, strict=True)
        gradients = [g for param, g in pairs if id(param) not in apart] if apart else judged.gradients
        calls = multiplications(gradients, verdict.multiplier)
        pieces.append(lambda: calls)
    flags: tuple[Tensor, Tensor | None] | None = None  # for torch's fused kernels
    for optimizer in optimizers:
        its_masters = masters.get(id(optimizer))
        if isinstance(optimizer, OnePassOptimizer):
            its_verdict = verdict if optimizer in folding else verdict.applied()
            optimizer.prepare(its_verdict, keep=optimizer in folding)
            pieces += writes.steps_of_mezzo(optimizer, its_verdict)
        elif optimizer in on_device:
            flags = _flags(judged) if flags is None else flags
            pieces += writes.steps_on_device(
                optimizer, its_masters, flags[0], flags[1] if optimizer in folding else None
            )
        elif not found:
            pieces += writes.steps(optimizer, its_masters)
    return pieces


def _flags(judged: Judged) -> tuple[Tensor, Tensor | None]:
    """Return a verdict as torch's fused optimizers take it: whether to skip, and what to divide gradients by."""
    verdict = judged.verdict
    if judged.is_clipped:
        divisor: Tensor | None = verdict.multiplier.reciprocal()
    else:  # the scale itself: its inverse is rounded, unless it is a power of two
        divisor = judged.scale
    return verdict.found_inf.to(torch.float32), divisor


def _disarm(optimizer: Optimizer) -> list[Call]:
    for name in ("found_inf", "grad_scale"):
        vars(optimizer).pop(name, None)
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """The loss scales around a step.

    Attributes:
        before: The scale that gradients carried, by loss.
        after: The state of each of these losses' scales now.
        loss_failed: 0-d bool: whether a loss was not finite by itself, so that its scale stayed.
    """

    before: Mapping[int, Tensor]
    after: Mapping[int, ScaleState]
    loss_failed: Tensor


def adapt(scalers: list[Scaler], judged: Judged, on_the_way: Mapping[int, Tensor]) -> Adapted:
    """Move the scale of each loss that took part, on the device.

    A loss that is not finite itself leaves its scale alone, unless gradients inside it overflowed on their way there.

    Args:
        scalers: The scale of each loss.
        judged: What was found.
        on_the_way: Whether gradients that a loss was computed from had overflowed, by loss.
    """
    device = judged.verdict.found_inf.device
    failures = []
    before, after = {}, {}
    for loss_id, parts in _by_loss(judged.shares).items():
        scaler = scalers[loss_id]
        of_these = [loss for number, loss in judged.losses if number == loss_id or not scaler.keeps_apart]
        loss, overflowed = _one_of(of_these, device), on_the_way.get(loss_id)
        for scale, found_inf in parts:
            flags = [found_inf] if overflowed is None else [found_inf, overflowed]
            bad, found, hold = shared(_told, (), [loss, *flags])
            scaler.update(found, made_with=scale, hold=hold)
        failures.append(bad)
        before[loss_id], after[loss_id] = parts[-1][0], scaler.state
    failed = failures[0] if len(failures) == 1 else torch.stack(failures).any()
    return Adapted(before=before, after=after, loss_failed=failed)


def _by_loss(shares: Iterable[Share]) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Group shares by loss, lowest id first: each scale that gradients carried, and whether they overflowed."""
    groups: defaultdict[tuple[int, int], list[Share]] = defaultdict(list)
    for share in shares:
        groups[share.loss_id, id(share.scale)].append(share)
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for (loss_id, _), alike in sorted(groups.items(), key=lambda group: group[0][0]):
        flags = [share.found_inf for share in alike]
        pair = alike[0].scale, flags[0] if len(flags) == 1 else torch.stack(flags).any()
        found.setdefault(loss_id, []).append(pair)
    return found


def _one_of(losses: list[Tensor], device: torch.device) -> Tensor:
    """Return a 0-d tensor of a device that is finite where all losses are, without a sync."""
    if len(losses) == 1:
        loss = losses[0].reshape(())
        return moved(loss, device, torch.float32 if loss.dtype in LOW else loss.dtype)
    # In float64 only where a loss is: on float32 it would be infinite above 3.4e38.
    dtype = torch.float64 if any(loss.dtype == torch.float64 for loss in losses) else torch.float32
    there = [moved(loss.reshape(()), device, dtype) for loss in losses]
    return (torch.stack(there) * 0).sum()


def _told(loss: Tensor, found_inf: Tensor, on_the_way: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether a loss itself failed, whether its gradients overflowed, and whether its scale is to stay."""
    failed = not_finite(loss)
    if on_the_way is not None:
        failed, found_inf = failed & ~on_the_way, found_inf | on_the_way
    return failed, found_inf, found_inf & failed
