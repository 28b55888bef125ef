"""One step that is being recorded, and who tells of it: the hooks of a loop without a session, or the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo.errors import PolicyError
from mezzo.numerics.counting import ROW
from mezzo.numerics.evidence import KINDS, RecordedStep, RecordedTensor
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.numerics.moves import FIELDS
from mezzo.numerics.recording.subject import Choices, LossScaleNow, updated_by
from mezzo.numerics.recording.watches import PassWatch, Places, Tally, WeightWatch, swallowed_of
from mezzo.policy import Policy
from mezzo.scale.state import inverse
from mezzo.session.observers import Judged, Watched
from mezzo.session.stats import Step

#: The kinds that are seen where modules are called.
OF_PASSES: Final = frozenset(("activations", "activation_gradients"))


class Recording:
    """What is counted of one step.

    Args:
        choices: What the recorder was asked for.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.
        hidden: Is told of modules whose activations cannot be seen: which, and what compiled them. It may raise.

    Attributes:
        weights: What is told of the parameters.
    """

    def __init__(
        self, choices: Choices, factor: Callable[[], Tensor | None], hidden: Callable[[str, str], None]
    ) -> None:
        self._hidden = hidden
        self._subject, self._formats = subject, formats = choices.subject, choices.formats
        self._tally = Tally(FIELDS + len(formats))
        self._places: Places = {}
        self.weights = WeightWatch(subject, choices.kinds, formats, self._tally, self._places)
        self._passes: PassWatch | None = None
        if kinds := OF_PASSES.intersection(choices.kinds):
            if (found := subject.hidden()) is not None:
                hidden(*found)
            else:
                self._passes = PassWatch(subject, kinds, self._tally, self._places, factor)

    @property
    def called(self) -> list[str]:
        """The paths of the modules, in the order in which their calls ended."""
        return [] if self._passes is None else list(self._passes.called)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        if self._passes is not None:
            self._passes.remove()

    def finish(self, step: int, loss_scales: Sequence[Tensor], skipped: bool | Sequence[Tensor]) -> RecordedStep:
        """Bring everything to the host.

        Args:
            step: The step's number.
            loss_scales: 0-d: the scale of each loss.
            skipped: Whether the weights were left alone, or 0-d tensors of which one says so.

        Raises:
            UnsupportedError: Activations alone were asked for, and gradients came without a call of a module.

        **Cost**: one transfer from each device.
        """
        self.weights.rest()
        if self._passes is not None and not self.called and self._subject.is_whole and self.weights.has_gradients:
            where = f"step {step}: gradients of {type(self._subject.model).__name__}, and no call of a module"
            self._hidden(where, "torch.compile")
        flags = [] if isinstance(skipped, bool) else skipped
        rows, numbers = self._tally.fetch([*loss_scales, *flags])
        is_skipped = skipped is True or any(numbers[len(loss_scales) :])
        order = {each.path: place for place, each in enumerate(self._subject.ordered(self.called))}
        places = sorted(self._places, key=lambda place: (KINDS.index(place[0]), order[place[1]]))
        return RecordedStep(
            step=step,
            loss_scales=tuple(numbers[: len(loss_scales)]),
            skipped=is_skipped,
            tensors=tuple(self._tensor(place, rows) for place in places if not (is_skipped and place[0] == "updates")),
        )

    def _tensor(self, place: tuple[str, str, str], rows: list[Tensor]) -> RecordedTensor:
        kind, module, name = place
        dtype, numbers = self._places[place]
        parts = [ExponentHistogram(rows[number][:ROW]) for number in numbers]
        return RecordedTensor(
            kind=kind,
            module=module,
            name=name,
            dtype=dtype,
            histogram=parts[0] if len(parts) == 1 else ExponentHistogram.total_of(parts),
            swallowed=swallowed_of(rows[numbers[0]][ROW:].tolist(), self._formats) if kind == "updates" else None,
        )


class PlainLoop:
    """Follows one step of a loop without a session: gradients as they are accumulated, steps of the optimizers.

    Args:
        recording: What is told.
        choices: What the recorder was asked for.
        factor: Returns what to multiply gradients with as they arrive; ``None`` for 1.

    Attributes:
        guards: Whether its hooks of optimizers make these a session's: they look.
    """

    guards: ClassVar[bool] = False

    def __init__(self, recording: Recording, choices: Choices, factor: Callable[[], Tensor | None]) -> None:
        self._weights, self._factor = recording.weights, factor
        self._optimizers = choices.optimizers
        self._flags: list[Tensor] = []
        self._has_stepped = False
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for param in choices.subject.params
            if param.requires_grad
        ]
        for optimizer in choices.optimizers:
            self._handles += (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def skipped(self) -> bool | Sequence[Tensor]:
        """Whether no optimizer has stepped, or the flags by which fused ones were told to skip."""
        return self._flags if self._has_stepped or not self._optimizers else True

    @torch.no_grad()
    def _accumulated(self, param: Tensor) -> None:
        if param.grad is not None:
            self._weights.gradient(param, param.grad, self._factor())

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._has_stepped = True
        if isinstance(getattr(optimizer, "grad_scale", None), Tensor) and self._factor() is None:
            raise PolicyError(
                "gradients carry a loss scale that the recorder does not know",
                where=type(optimizer).__name__,
                why="a torch.amp.GradScaler leaves it to the fused optimizer, and it would be recorded as theirs",
                write="Recorder(model, optimizer, loss_scale=scaler)",
            )
        found_inf = getattr(optimizer, "found_inf", None)  # torch's scaler tells it so to fused optimizers
        if isinstance(found_inf, Tensor):
            self._flags.append(found_inf.detach().reshape(()).clone())
        self._weights.before(updated_by(optimizer))

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        self._weights.after()


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
