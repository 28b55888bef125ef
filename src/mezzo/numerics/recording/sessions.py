"""What sessions tell a recorder of: an observer of their engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.numerics.recording.choices import Choices, LossScaleNow
from mezzo.numerics.recording.step import Recording
from mezzo.numerics.recording.weights import updated_by
from mezzo.policy import Policy
from mezzo.scale.state import inverse
from mezzo.session.observers import Judged, Watched
from mezzo.session.stats import Step

__all__ = ["SessionSide"]


class SessionSide:
    """What sessions tell a recorder of, while its block is open: a :class:`mezzo.session.observers.StepObserver`.

    Args:
        owner: The recorder, for errors.
        choices: What it was asked for.
        scale: Where its gradients' scale comes from.
        joined: Called when a session turns out to update the model.
        advance: Called after a step of such a session, with the loss scales and the flags of which one says that it was
            skipped.

    Attributes:
        recording: What is told of the step; ``None`` where it is not recorded.
        policy: That of the first session that updates the model; ``None`` as long as there is none.
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
        self.policy: Policy | None = None
        self._owner, self._choices, self._scale = owner, choices, scale
        self._joined, self._advance = joined, advance
        self._ours: list[Watched] = []
        self._stepping: Watched | None = None
        self._moved: set[Tensor] = set()

    def __repr__(self) -> str:
        return repr(self._owner)

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """Know of a session that updates the model, and take the scale of the gradients that are about to come."""
        if engine not in self._ours and self._updated(engine):
            if self._scale.is_given:
                raise PolicyError(
                    "a recorder in a session is not given a loss scale",
                    where=repr(self._owner),
                    why="the session knows which scale its gradients carry",
                    write="Recorder(model, optimizer), without loss_scale=",
                )
            self._ours.append(engine)
            self.policy = self.policy or engine.weights.policy
            self._joined()
        self._scale.told(scale)

    def judged(self, engine: Watched, judged: Judged) -> None:
        """Count the weights that a step is about to move, and the gradients that it takes."""
        if engine not in self._ours:
            return
        updated, recording = self._updated(engine), self.recording
        is_first = self._stepping is not engine  # and no further evaluation of a closure
        self._stepping = engine
        self._moved = updated.intersection(judged.params)
        if recording is None:
            return
        if is_first:
            recording.weights.before(self._moved)
        recording.weights.keep(self._moved)
        factor = None if judged.scale is None else inverse(judged.scale)
        for param, gradient in zip(judged.params, judged.gradients, strict=True):
            if param in self._moved:
                recording.weights.gradient(param, gradient, factor)

    def stepped(self, engine: Watched, step: Step) -> None:
        """Count the updates, once the step is done."""
        is_ours, self._stepping = engine is self._stepping and bool(self._moved), None
        if not is_ours:
            return
        if self.recording is not None:
            self.recording.weights.after()
        is_scaled = engine.weights.policy.loss_scale.mode != "none"
        self._advance([step.scale] if is_scaled else [], [step.skipped])

    def _updated(self, engine: Watched) -> set[Tensor]:
        """Return the model's parameters that a session's optimizers update, of those that were chosen."""
        own = set(self._choices.subject.model.parameters())
        updated = {param for param in engine.weights.updated() if param in own}
        chosen = [updated_by(each) for each in self._choices.optimizers]
        return updated.intersection(set().union(*chosen)) if chosen else updated
