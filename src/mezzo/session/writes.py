"""The writes of a session's step, done whole: what has begun is finished before an interrupt goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Final

from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import OnePassOptimizer, as_one_pass
from mezzo.step.passes import Verdict
from mezzo.step.whole import Call, Piece, Work, at_once

__all__ = ["Writes"]

logger = logging.getLogger(__name__)

_VERSION: Final = attrgetter("_version")


class Writes(Work):
    """The writes of a session's step, in order; an interrupt goes on once all of them are done.

    mezzo's optimizers finish by themselves what they have begun. An optimizer of another library that is interrupted
    inside its own ``step()`` may have written any part of its weights: the update stays half-way, and
    :meth:`require_whole` says so.

    Attributes:
        params: What the step updates. Their versions tell whether an optimizer of another library has written.
        undo: What puts back a closure's evaluations, until its step counts.
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
            optimizer: One whose kernels can.
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
        own = None if self._at is None else as_one_pass(self._at)
        half_way = own is not None and own.is_half_way
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


def _disarm(optimizer: Optimizer) -> list[Call]:
    for name in ("found_inf", "grad_scale"):
        vars(optimizer).pop(name, None)
    return []
