"""What sessions tell a recorder of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.numerics.recording.choices import Choices, LossScaleNow
from mezzo.numerics.recording.step import Recording
from mezzo.scale.scaler import Scaler
from mezzo.scale.state import inverse
from mezzo.session.core import Core, PlainRun
from mezzo.session.scale import StepOutcome
from mezzo.session.stats import Noted
from mezzo.session.verdict import Judged

__all__ = ["SessionSide"]


class SessionSide(PlainRun):
    """What sessions tell a recorder of, while its block is open.

    Args:
        owner: The recorder, for errors.
        choices: What it was asked for.
        scale: Where its gradients' scale comes from.
        joined: Called when a session turns out to update the model.
        advance: Called after a step of such a session, with the loss scales and the flags of which one says that it was
            skipped.

    Attributes:
        recording: What is told of the step; ``None`` where it is not recorded.
        cores: The sessions that update the model.
        outer: What their calls are part of besides.
    """

    def __init__(
        self,
        owner: object,
        choices: Choices,
        scale: LossScaleNow,
        joined: Callable[[], None],
        advance: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    ) -> None:
        self.recording: Recording | None = None
        self.cores: list[Core] = []
        self.outer = PlainRun()
        self._owner, self._choices, self._scale = owner, choices, scale
        self._joined, self._advance = joined, advance
        self._others: list[Core] = []
        self._stepping: Core | None = None
        self._updated: dict[int, Tensor] = {}
        self._is_ours = False

    def join(self, core: Core) -> None:
        """Know of a session: one of the model's, or another."""
        self.outer.join(core)
        if core in self.cores or core in self._others:
            return
        if not self._leaves(core):
            self._others.append(core)
            return
        if self._scale.is_given:
            raise PolicyError(
                "a recorder in a session is not given a loss scale",
                where=repr(self._owner),
                why="the session knows which scale its gradients carry",
                write="Recorder(model, optimizer), without loss_scale=",
            )
        self.cores.append(core)
        self._joined()

    def begin(self, scaler: Scaler) -> None:
        """Take the scale of the gradients that are about to come."""
        self.outer.begin(scaler)
        self._scale.told(scaler.state.scale if scaler.changes_gradients else None)

    def refuse(self, core: Core, closure: Any, scheduler: Any) -> None:
        """Count the weights that a step of the model's is about to move."""
        self.outer.refuse(core, closure, scheduler)
        if core is not self._stepping:
            self._updated = {}
        self._stepping, self._is_ours = core, False
        if core in self.cores and self.recording is not None:
            self._updated = self._leaves(core)
            self.recording.weights.before(core.weights.stored(), set(self._updated.values()))

    def seen(self, judged: Judged) -> Judged:
        """Count the gradients that the step takes."""
        judged = self.outer.seen(judged)
        core, recording = self._stepping, self.recording
        if core is None or core not in self.cores:
            return judged
        if recording is None:
            self._updated = self._updated or self._leaves(core)
        self._is_ours = any(id(param) in self._updated for param in judged.params)
        if recording is not None and self._is_ours:
            recording.weights.keep({self._updated[id(p)] for p in judged.params if id(p) in self._updated})
            factor = None if judged.scale is None else inverse(judged.scale)
            for param, gradient in zip(judged.params, judged.gradients, strict=True):
                if (leaf := self._updated.get(id(param))) is not None:
                    recording.weights.gradient(leaf, gradient, factor)
        return judged

    def noted(self, core: Core, outcome: StepOutcome) -> Noted:
        """Count the updates, once the step is done."""
        calls, then = self.outer.noted(core, outcome)

        def after() -> None:
            then()
            self._ended(core, outcome)

        return Noted(calls, after)

    def _ended(self, core: Core, outcome: StepOutcome) -> None:
        recording = self.recording
        if not self._is_ours or core is not self._stepping:
            if recording is not None:
                recording.weights.keep(())
            return
        if recording is not None:
            recording.weights.after(core.weights.stored())
        is_scaled = core.policy.loss_scale.mode != "none"
        scales = outcome.scale.reshape(-1).unbind() if is_scaled else ()
        self._advance(scales, [outcome.verdict.found_inf])

    def refuse_capture(self, what: str, **words: str) -> None:
        """Refuse that a step is captured."""
        self.outer.refuse_capture(what, **words)
        raise UnsupportedError(
            f"{what} in the block of a Recorder",
            where=repr(self._owner),
            why="a captured step is replayed without Python, which is what records",
            write="the train step itself in the recorder's block, and mezzo.capture(…) after it",
        )

    def _leaves(self, core: Core) -> dict[int, Tensor]:
        """Return the model's parameters by the ``id`` of what a session's optimizers update for each."""
        own = set(self._choices.subject.model.parameters())
        chosen = {id(p) for o, _ in self._choices.optimizers for group in o.param_groups for p in group["params"]}
        return {
            id(param): leaf
            for group in core.groups
            for param, leaf in group.with_leaves()
            if leaf in own and (not chosen or id(param) in chosen)
        }
