"""What looks at an engine's work: recorders, explanations of overflows, progress, the report of ``mezzo run``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor

from mezzo.step.passes import Verdict

if TYPE_CHECKING:
    from mezzo.scale.scaler import Scaler
    from mezzo.session.stats import Step, StepAccount
    from mezzo.session.weights import Weights
    from mezzo.session.window import Window

__all__ = ["Judged", "StepObserver", "Watched", "observing", "watching"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The gradients of one step with the verdict on them, before anything is written.

    Attributes:
        params: The models' parameters that have gradients.
        gradients: Their gradients, dense, of the same order.
        scale: 0-d float32: what they carry; ``None`` for plain ones.
        verdict: Whether to update, and what to multiply them by.
        is_clipped: Whether the verdict's multiplier clips.
        losses: What the backward passes have differentiated, in their order; 0-d.
        failed: 0-d bool: whether a loss itself was not finite.
    """

    params: list[Tensor]
    gradients: list[Tensor]
    scale: Tensor | None
    verdict: Verdict
    is_clipped: bool
    losses: list[Tensor]
    failed: Tensor


class Watched(Protocol):
    """What an observer may ask an engine for.

    Attributes:
        weights: The models and optimizers.
        windows: Gradients between a backward pass and a step.
        scaler: The loss scale.
        account: The steps so far.
    """

    weights: Weights
    windows: list[Window]
    scaler: Scaler
    account: StepAccount


class StepObserver(Protocol):
    """Looks, and changes nothing. An engine calls all of its observers, in their order."""

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """A backward pass is about to begin, whose gradients will carry ``scale``; ``None`` for none."""

    def judged(self, engine: Watched, judged: Judged) -> None:
        """The gradients of a step, or of one evaluation of a closure, were checked; nothing is written yet."""

    def stepped(self, engine: Watched, step: Step) -> None:
        """A step is over: it has updated, or skipped."""


_WATCHING: Final[ContextVar[tuple[StepObserver, ...]]] = ContextVar("mezzo.session.watching", default=())


@contextmanager
def watching(observer: StepObserver) -> Iterator[None]:
    """Let an observer look at all engines of this context, those that begin meanwhile too."""
    token = _WATCHING.set((*_WATCHING.get(), observer))
    try:
        yield
    finally:
        _WATCHING.reset(token)


def observing() -> tuple[StepObserver, ...]:
    """Return the observers of this context; while torch.compile traces, which cannot ask, there are none."""
    return () if torch.compiler.is_compiling() else _WATCHING.get()
