"""What a recorder was asked for, checked: subject, kinds, formats, optimizers, and where the loss scale comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import MezzoError, PolicyError, raise_together, shown
from mezzo.formats import Format, by_name
from mezzo.numerics.evidence import kind_of
from mezzo.numerics.recording.subject import Subject
from mezzo.numerics.recording.weights import given_optimizers, updated_by
from mezzo.scale.state import inverse

__all__ = ["Choices", "LossScaleNow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The arguments of a recorder, as it works with them.

    Attributes:
        subject: What is watched.
        optimizers: The optimizers.
        every: Steps from one recorded step to the next.
        formats: The storage formats that updates are rounded to.
        kinds: What is recorded.
    """

    subject: Subject
    optimizers: Sequence[Optimizer]
    every: int
    formats: Sequence[Format]
    kinds: Sequence[str]

    @classmethod
    def of(cls, model: Any, optimizer: Any, every: Any, formats: Any, kinds: Any, modules: Any, keep: Any) -> Choices:
        """Check arguments, and report all that is wrong with them.

        Raises:
            PolicyError: Something is.
        """
        problems: list[MezzoError] = []

        def tried(make: Any, *arguments: Any) -> Any:
            try:
                return make(*arguments)
            except PolicyError as error:
                problems.append(error)
                return None

        globs = [modules] if isinstance(modules, str) else modules
        subject = tried(Subject.of, model, globs)
        optimizers = tried(given_optimizers, optimizer) or []
        for name, number in (("every", every), ("keep", 1 if keep is None else keep)):
            tried(_require_positive, name, number)
        found = [tried(by_name, each) for each in ([formats] if isinstance(formats, str) else formats)]
        words = [tried(kind_of, each) for each in ([kinds] if isinstance(kinds, str) else kinds)]
        if not words:
            problems.append(PolicyError("there is nothing to record", why="kinds is empty", write='kinds=("weights",)'))
        if subject is not None:
            own = set(subject.model.parameters())
            problems += (_foreign(each, subject) for each in optimizers if own.isdisjoint(updated_by(each)))
        raise_together(problems)
        return cls(
            subject=subject,
            optimizers=optimizers,
            every=every,
            formats=tuple(dict.fromkeys(found)),
            kinds=tuple(dict.fromkeys(words)),
        )


def _require_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PolicyError(f"{name} is {shown(number)}, not a number of steps", write=f"{name}=50")


def _foreign(optimizer: Optimizer, subject: Subject) -> PolicyError:
    return PolicyError(
        "the optimizer updates none of the model's parameters",
        where=f"{type(optimizer).__name__}, {type(subject.model).__name__}",
        why="there would be no updates to record",
        write="Recorder(model, optimizer), with an optimizer over model.parameters()",
    )


class LossScaleNow:
    """The loss scale of the gradients that arrive now.

    Args:
        given: What a loop without a session says of it: its scaler, a number, a tensor, or nothing.
        device: Where it is wanted.

    Raises:
        PolicyError: Something else is given.
    """

    def __init__(self, given: Any, device: torch.device) -> None:
        if given is not None and not callable(getattr(given, "scale", None)):
            is_number = isinstance(given, int | float) and not isinstance(given, bool) and 0.0 < given < math.inf
            if not is_number and not (isinstance(given, Tensor) and given.numel() == 1):
                raise PolicyError(
                    f"the loss scale is {shown(given)}, not a positive finite number",
                    write="loss_scale=scaler, a torch.amp.GradScaler; or loss_scale=1024.0",
                )
        self.is_given = given is not None
        self._given, self._device = given, device
        self._scale: Tensor | None = None
        self._factor: Tensor | None = None

    def told(self, scale: Tensor | None) -> None:
        """Take the scale of a session's gradients that are about to come; ``None`` for none, or to ask anew."""
        self._scale, self._factor = scale, None

    def factor(self) -> Tensor | None:
        """Return what to multiply gradients by; ``None`` for 1."""
        if self._factor is None and (scale := self.scale()) is not None:
            self._factor = inverse(scale)
        return self._factor

    def scale(self) -> Tensor | None:
        """Return the scale, 0-d float32; ``None`` where losses are not scaled."""
        if self._scale is None and self._given is not None:
            one = torch.ones((), device=self._device)
            # torch's scaler says what it is without asking the device only by scaling something.
            scaled = self._given.scale(one) if callable(getattr(self._given, "scale", None)) else one * self._given
            self._scale = scaled.detach().reshape(()).float().clone()
        return self._scale
