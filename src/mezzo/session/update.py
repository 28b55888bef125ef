"""The third station, the update: the optimizers do what the verdict says, or skip, whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import OnePassOptimizer, as_one_pass
from mezzo.session.verdict import Judged
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import multiplications
from mezzo.step.passes import Verdict, as_fused
from mezzo.step.whole import Call, Piece, Work, at_once
from mezzo.tensors import versions

__all__ = ["Writes", "lacks_momentum", "takes_flag", "update"]

logger = logging.getLogger(__name__)

#: What a fused optimizer is told besides, whose gradients were divided already.
_UNSCALED: Final[dict[str, Tensor | None]] = {"grad_scale": None}


def update(
    writes: Writes,
    judged: Judged,
    optimizers: list[Optimizer],
    alone: set[Optimizer],
    overflowed: Callable[[], bool],
    masters: Mapping[int, MasterWeights],
) -> list[Piece]:
    """Return what updates the weights, or skips; all that mezzo's optimizers can refuse is refused here.

    Optimizers whose kernels can do it unscale, clip and skip on the device; for the others the gradients are
    multiplied before, and the host asks whether to skip.

    Args:
        writes: What does it.
        judged: The gradients.
        optimizers: Those that step.
        alone: Optimizers that share no gradient: only they may leave the multiplying to their kernels, since another
            one would read the same gradients.
        overflowed: Whether to skip; the host waits for the answer.
        masters: The masters of those optimizers that have any, by ``id``.
    """
    writes.params = judged.params
    verdict = judged.verdict
    on_device = {optimizer for optimizer in optimizers if skips_on_device(optimizer)}
    multiplying = on_device & alone
    pieces: list[Piece] = []
    if len(multiplying) < len(optimizers) and not verdict.is_one:
        apart = {id(param) for o in multiplying for group in o.param_groups for param in group["params"]}
        pairs = zip(judged.params, judged.gradients, strict=True)
        gradients = [g for param, g in pairs if id(param) not in apart] if apart else judged.gradients
        calls = multiplications(gradients, verdict.multiplier)
        pieces.append(lambda: calls)
    flags: dict[str, Tensor | None] = {}
    for optimizer in optimizers:
        its_masters = masters.get(id(optimizer))
        if (own := as_one_pass(optimizer)) is not None:
            # Prepared before any piece runs: what one optimizer refuses is refused before another has stepped.
            its_verdict = verdict if optimizer in multiplying else verdict.applied()
            own.make_ready(its_verdict, keep=optimizer in multiplying)
            pieces.append(partial(writes.step_of_mezzo, own, its_verdict, own.updates))
        elif optimizer in on_device:
            flags = flags or _flags(judged)
            pieces += writes.steps(optimizer, its_masters, flags if optimizer in multiplying else flags | _UNSCALED)
        elif not overflowed():
            pieces += writes.steps(optimizer, its_masters)
    return pieces


def _flags(judged: Judged) -> dict[str, Tensor | None]:
    """Return a verdict as torch's fused optimizers take it: whether to skip, and what to divide gradients by."""
    # Unclipped, the scale itself: the inverse of its inverse is another number, unless it is a power of two.
    numbers = [judged.verdict.found_inf, judged.verdict.multiplier]
    found_inf, *divisor = judged.verdict.as_fused or shared(as_fused, (), numbers[: 1 + judged.is_clipped])
    return {"found_inf": found_inf, "grad_scale": divisor[0] if divisor else judged.scale}


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels are told on the device whether to skip, as torch's fused ones and mezzo's are."""
    return takes_flag(optimizer) and not lacks_momentum(optimizer, lambda param: param.grad is not None)


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels take a flag for skipping; a loaded state may have turned them off."""
    supports_flag: bool = getattr(optimizer, "_step_supports_amp_scaling", False)
    return supports_flag and all(group.get("fused", True) for group in optimizer.param_groups)


def lacks_momentum(optimizer: Optimizer, steps: Callable[[Tensor], bool]) -> bool:
    """Whether torch's fused SGD has momentum buffers to make: a skipped kernel would leave them uninitialised.

    Args:
        optimizer: Any optimizer.
        steps: Which of its parameters are asked about.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and steps(param) and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )


class Writes(Work):
    """The writes of a session's step, in order; an interrupt goes on once all of them are done.

    mezzo's optimizers finish by themselves what they have begun. An optimizer of another library that is interrupted
    inside its own ``step()`` may have written any part of its weights: the update stays half-way, and
    :meth:`require_whole` says so.

    Attributes:
        params: What the step updates. Their versions tell whether an optimizer of another library has written.
        undo: What puts back a closure's evaluations, until its step counts.
        plain_steps: What ``optimizer.step`` was, where it is taken over.
        entering: Called, as a function of C's, before the code of an optimizer that is not mezzo's: what is written
            from there on is its own.
        leaving: Called, as a function of C's, between that code and hooks of the user's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._at: Optimizer | None = None  # whose step is under way
        self._stepped: list[Optimizer] = []
        self.entering: Call = dict
        # Python raises interrupts between two of its own lines, so that what notes the end of an optimizer's code must
        # be a function of C's. An exception keeps the arguments that it is initialised with: a note that C can write.
        self._came_back = Exception()
        self.leaving: Callable[..., None] = partial(BaseException.__init__, self._came_back)
        self._give_up: Callable[[], object] = dict
        self._is_whole = False
        self.undo: list[Callable[[], None]] = []
        self.plain_steps: dict[Optimizer, Callable[..., Any]] = {}
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

    def steps(
        self, optimizer: Optimizer, masters: MasterWeights | None, flags: dict[str, Tensor | None] | None = None
    ) -> list[Piece]:
        """Return what steps with an optimizer that is not mezzo's, and rounds its masters into the model.

        Args:
            optimizer: The optimizer.
            masters: Its masters.
            flags: For one of torch's fused optimizers, whose kernels find out by themselves whether to skip:
                ``found_inf``, 0-d float32, 1 to skip; and ``grad_scale``, what to divide the gradients by, if anything.
        """
        pieces: list[Piece] = [partial(self._step_of_another, optimizer), partial(self._stepped_with, masters)]
        if flags is None:
            return pieces
        return [lambda: [partial(optimizer.__dict__.update, flags)], *pieces, partial(_disarm, optimizer)]

    def step_of_mezzo(self, optimizer: OnePassOptimizer, verdict: Verdict, before: int) -> list[Call]:
        """Step with one of mezzo's optimizers, or skip: a piece.

        Args:
            optimizer: The optimizer.
            verdict: What it is given.
            before: Its count of updates before.
        """
        self._at = optimizer
        if optimizer.updates == before:  # or an interrupt came after it had finished
            optimizer.update(verdict, self.plain_steps.get(optimizer))
        self._came_back.args = ()
        return [partial(self._stepped.append, optimizer)]

    def step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return what steps with an optimizer by itself, without the session."""
        return self.plain_steps.get(optimizer, optimizer.step)

    def _step_of_another(self, optimizer: Optimizer) -> list[Call]:
        self._at, step, self._came_back.args = optimizer, self.plain_steps.get(optimizer, optimizer.step), ()
        self._versions = versions(self.params)
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
        own = None if self._at is None else as_one_pass(self._at)
        half_way = own is not None and own.is_half_way
        # An error may come after some weights were written too: of a later group, for instance.
        within = self._begun and (not isinstance(error, Exception) or versions(self.params) != self._versions)
        if not self._is_whole and (self._stepped or half_way or within):
            _disarm(self._at)
            return
        give_up = self._give_up if self.is_half_way and not self._is_whole else dict
        self.drop()
        give_up()

    def drop(self) -> None:
        """See :meth:`mezzo.step.whole.Work.drop`."""
        super().drop()
        _disarm(self._at)
        self._stepped.clear()
        self._at, self.entering, self._came_back.args, self.params = None, dict, (), []

    def require_whole(self) -> None:
        """Refuse to go on after an update that could not be finished.

        Raises:
            StateError: With the optimizer, and what to write.
        """
        if self.is_half_way:
            raise StateError(
                "an update was interrupted half-way",
                where=f"{type(self._at).__name__}.step()",
                why="some weights and moments are those of the next step, and some are not",
                write="load_state_dict(…) of the model, the optimizer, and then of what steps (amp, or a scaler), "
                "from the last checkpoint",
            )


def _disarm(optimizer: Optimizer | None) -> list[Call]:
    """Take the flags of a step away again."""
    for name in ("found_inf", "grad_scale") if optimizer is not None else ():
        vars(optimizer).pop(name, None)
    return []
