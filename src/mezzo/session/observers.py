"""What looks at an engine's work: recorders, explanations of overflows, progress, the report of ``mezzo run``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from mezzo.backward import set_thread_owner
from mezzo.errors import NumericsError, UnsupportedError, some_of
from mezzo.session.stats import Step
from mezzo.sharded import is_distributed
from mezzo.step.verdict import JudgedGradients

if TYPE_CHECKING:
    from mezzo.distributed.exchange import Ranks
    from mezzo.overflow import Replay
    from mezzo.scale.device_state import Scaler
    from mezzo.session.stats import Step, StepAccount
    from mezzo.session.weights import Weights
    from mezzo.session.window import Window


class Watched(Protocol):
    """What an observer may ask an engine for.

    Attributes:
        weights: The models and optimizers.
        windows: Gradients between a backward pass and a step.
        scaler: The loss scale.
        account: The steps so far.
        ranks: Those that step together.
        is_captured: Whether calls are part of a captured step: see :class:`GraphObserver`.
    """

    is_captured: bool
    ranks: Ranks
    weights: Weights
    windows: list[Window]
    scaler: Scaler
    account: StepAccount


class StepObserver(Protocol):
    """Looks, and changes nothing. An engine calls all of its observers, in their order."""

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """A backward pass is about to begin, whose gradients will carry ``scale``; ``None`` for none."""

    def judged(self, engine: Watched, judged: JudgedGradients) -> None:
        """Called when the gradients of a step, or of a closure's evaluation, were checked; nothing is written yet."""

    def stepped(self, engine: Watched, step: Step) -> None:
        """Called when a step has updated, or skipped."""


@runtime_checkable
class GraphObserver(StepObserver, Protocol):
    """An observer of replays of a captured step too: kernels that it launches become part of the graph."""

    def enters(self, engine: Watched) -> None:
        """Called before a captured step runs as Python, is recorded, or is replayed."""

    def leaves(self, engine: Watched, is_done: bool) -> None:
        """Called after that, unless the step has raised; numbers may be read from the device."""


_WATCHING: Final[ContextVar[tuple[StepObserver, ...]]] = ContextVar("mezzo.session.watching", default=())


@contextmanager
def watching(observer: StepObserver) -> Iterator[None]:
    """Show an observer all passes and steps of this context, of engines that begin in it too."""
    token = _WATCHING.set((*_WATCHING.get(), observer))
    try:
        yield
    finally:
        _WATCHING.reset(token)


def context_observers() -> tuple[StepObserver, ...]:
    """Return the observers of this context; while torch.compile traces, which cannot ask, there are none."""
    return () if torch.compiler.is_compiling() else _WATCHING.get()


# What a skipped step does besides, under ``on_overflow="locate"`` and ``"raise"``: observers of the engine.

logger = logging.getLogger(__name__)


def reaction(
    on_overflow: str, weights: Weights, unreduced: Callable[[], AbstractContextManager[Any]]
) -> tuple[StepObserver | None, Callable[[], None]]:
    """Return the observer of overflows, ``None`` where a step is only skipped, and the call that ends it.

    Args:
        on_overflow: One of :data:`mezzo.session.refusals.Reaction`.
        weights: The models, and the region that they run in.
        unreduced: Returns the context in which a backward pass exchanges nothing with other ranks.

    Raises:
        UnsupportedError: ``"locate"``, and the models are sharded, or cut by tensor parallelism.

    **Cost**: with ``"locate"`` and ``"raise"`` one host sync a step.
    """
    if on_overflow == "raise":
        return Raises(), lambda: None
    if on_overflow == "locate":
        if weights.units:
            raise UnsupportedError(
                "an overflow in a model that fully_shard has sharded cannot be located in the run",
                where=f"{len(weights.units)} modules that are gathered",
                why="the rank that overflowed would run its batch again, and all ranks gather parameters together",
                write='on_overflow="skip"; mezzo.overflow.locate with the batch and a model that is not sharded',
            )
        if cut := [
            name for model in weights.models for name, param in model.named_parameters() if is_distributed(param)
        ]:
            raise UnsupportedError(
                "an overflow in a model that tensor parallelism has cut cannot be located in the run",
                where=some_of(cut),
                why="the rank that overflowed would run its batch again, and ranks compute its products together",
                write='on_overflow="skip"; mezzo.overflow.locate with the batch and a model that is not cut',
            )
        from mezzo.overflow import Replay  # which only such a session needs

        replay = Replay(weights.models, region=weights.region)
        return Locates(replay, unreduced), replay.remove
    return None, lambda: None


class Locates:
    """Logs where an overflow began, found by running the step's batch again with checks.

    Args:
        replay: What keeps the calls of the models.
        unreduced: The context of backward passes that exchange nothing: another rank may find its own overflow earlier.
    """

    def __init__(self, replay: Replay, unreduced: Callable[[], AbstractContextManager[Any]]) -> None:
        self._replay, self._unreduced = replay, unreduced

    def __repr__(self) -> str:
        return 'on_overflow="locate"'

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """Forget passes whose gradients were cleared without a step."""
        if not any(window.now.passes for window in engine.windows):
            self._replay.clear()

    def judged(self, engine: Watched, judged: JudgedGradients) -> None:
        """No-op: the verdict does not say where an overflow began."""

    def stepped(self, engine: Watched, step: Step) -> None:
        """Run the calls of a skipped step again, and forget them."""
        if bool(step.skipped):
            forget = set_thread_owner(self)  # so that no session scales these passes again
            try:
                with torch.enable_grad(), self._unreduced():
                    step.overflow = self._replay.locate(step.scale)
            finally:
                forget()
            if step.overflow is not None:
                logger.warning("%s", step.overflow)
        self._replay.clear()


class Raises:
    """Ends the run at the first overflow, with the gradients that are not finite."""

    def __init__(self) -> None:
        self._judged: JudgedGradients | None = None

    def __repr__(self) -> str:
        return 'on_overflow="raise"'

    def begins(self, engine: Watched, scale: Tensor | None) -> None:
        """No-op: only a step can overflow."""

    def judged(self, engine: Watched, judged: JudgedGradients) -> None:
        """Keep the norms until it is known whether the step is skipped."""
        self._judged = judged

    def stepped(self, engine: Watched, step: Step) -> None:
        """Raise if the step was skipped; nothing was updated, and the loop can go on.

        Raises:
            NumericsError: It was.
        """
        judged, self._judged = self._judged, None
        if judged is None or not bool(step.skipped):
            return
        finite = judged.verdict.norms.isfinite().tolist()
        bad = [engine.weights.name_of(p) for p, ok in zip(judged.params, finite, strict=True) if not ok]
        is_scaled, scale = engine.scaler.changes_gradients, float(step.scale)
        raise NumericsError(
            "the gradients are not finite",
            where=f"{len(bad)} of {len(judged.params)}: {some_of(bad)}" if bad else "their norm, once unscaled",
            why="the loss itself is not finite, which no loss scale cures; nothing was updated"
            if bool(judged.failed)
            else f"an overflow{f' under the loss scale {scale:.6g}' if is_scaled else ''}; nothing was updated",
            write='on_overflow="locate", which says where it began; or on_overflow="skip" to go on',
        )
