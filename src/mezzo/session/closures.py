"""Optimizers that evaluate the loss inside their step: each time it is checked, and all is undone if one overflows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from mezzo.errors import PolicyError, StateError, some_of
from mezzo.interrupts import uninterrupted
from mezzo.optim.optimizer import as_one_pass
from mezzo.session.observers import Judged, Watched
from mezzo.session.update import check_numbers
from mezzo.session.window import Window, multiply
from mezzo.weights.halves import owner_of
from mezzo.weights.views import inner_optimizers, views_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mezzo.session.stats import Step

__all__ = ["evaluated", "evaluates_once"]


class Judges(Watched, Protocol):
    """What judges evaluations and takes the step that they end in: an engine.

    Attributes:
        steps_by: What steps with an optimizer whose ``step`` is taken over.
        is_stepping: Whether optimizers step on the engine's behalf now.
    """

    steps_by: dict[Optimizer, Callable[..., Any]]
    is_stepping: bool

    def require_whole(self) -> None:
        """Refuse to go on from an update that was ended half-way."""

    def told_to_ranks(self) -> AbstractContextManager[None]:
        """Have an error of this rank end the step of all."""

    def warn_of_edits(self, windows: list[Window]) -> None:
        """Warn of gradients that were edited while they carry the scale."""

    def judge(self, windows: list[Window], optimizers: Collection[Optimizer]) -> tuple[Judged, Tensor | None]:
        """Judge the gradients of some optimizers."""

    def finish(self, windows: list[Window], judged: Judged, absent: Tensor | None) -> Step:
        """End a step whose writes are done."""


def evaluated(engine: Judges, optimizers: Collection[Optimizer], closure: Callable[[], Any]) -> Step:
    """Let one optimizer evaluate the loss by itself, as LBFGS and SAM do.

    Gradients that there are before the first evaluation count as one: SAM begins with them. If an evaluation overflows,
    or anything raises, weights and the optimizer's state are put back.

    Args:
        engine: The engine.
        optimizers: The one.
        closure: Clears the gradients, computes the loss, and runs its backward pass.

    Raises:
        PolicyError: Several optimizers, each of which would move its weights between evaluations.
        StateError: The closure computed no gradient, or was not evaluated.

    **Cost**: a copy of weights and state; one host sync for each evaluation.
    """
    if len(optimizers) != 1:
        raise PolicyError(
            "a closure is for one optimizer",
            where=f"amp.step(closure=…) for {some_of([type(each).__name__ for each in optimizers])}",
            why="each optimizer moves its weights between two evaluations of the loss",
            write="amp.step(optimizers=optimizer, closure=closure), for one after the other",
        )
    engine.require_whole()
    check_numbers(optimizers)
    with engine.told_to_ranks():
        return _Evaluations(engine, next(iter(optimizers)), closure).run()


class _Evaluations:
    """The evaluations of one step."""

    def __init__(self, engine: Judges, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self._engine, self._optimizer, self._closure = engine, optimizer, closure
        (self._window,) = (window for window in engine.windows if optimizer in window.optimizers)
        self._views = views_of(optimizer)
        self._last: tuple[Judged, Tensor | None, Tensor | None] | None = None

    def run(self) -> Step:
        engine, weights = self._engine, self._engine.weights
        weights.settle()
        written = list(weights.updated(self._optimizer))
        written += [owner.rest_of(p) for p in written if (owner := owner_of(p, weights.halves())) is not None]
        before = [(tensor, tensor.detach().clone()) for tensor in written]
        restores = [_remembering(each) for each in (self._optimizer, *inner_optimizers(self._optimizer))]
        engine.is_stepping = True
        try:
            if self._window.passes and self._window.has_gradients():
                self._judge()  # SAM begins with these
            engine.steps_by.get(self._optimizer, self._optimizer.step)(self._evaluate)
            if self._last is None:
                raise StateError(
                    f"{type(self._optimizer).__name__}.step() did not evaluate the closure",
                    write="amp.backward(loss), then amp.step() without closure=",
                )
        except BaseException as error:
            with uninterrupted():
                for tensor, value in before:
                    tensor.copy_(value)
                for restore in restores:
                    restore()
                self._window.close()
            if not isinstance(error, Overflowed):
                raise
        finally:
            engine.is_stepping = False
            if self._views is not None:
                self._views.multiplier = None
        assert self._last is not None, "an optimizer that was not asked raises"
        with uninterrupted():
            judged, absent, self._window.made_with = self._last
            return engine.finish([self._window], judged, absent)

    def _evaluate(self) -> Any:
        self._engine.is_stepping = False
        try:
            with torch.enable_grad():  # as torch's own optimizers do, and others may not
                loss = self._closure()
        finally:
            self._engine.is_stepping = True
        if not self._window.has_gradients():
            raise StateError("the closure computed no gradient", write="amp.backward(loss) in the closure")
        self._judge()
        return loss

    @torch.no_grad()
    def _judge(self) -> None:
        """Judge an evaluation's gradients, and show the optimizer plain ones."""
        window = self._window
        self._engine.warn_of_edits([window])
        judged, absent = self._engine.judge([window], [self._optimizer])
        self._last = judged, absent, window.made_with
        if bool(judged.verdict.found_inf):
            raise Overflowed
        if not judged.verdict.is_one:
            if self._views is not None:
                self._views.multiplier = judged.verdict.multiplier
            else:
                multiply(judged.gradients, judged.verdict.multiplier)
        window.close()


class Overflowed(Exception):  # noqa: N818 - it never leaves the engine
    """An evaluation's gradients are not finite."""


def evaluates_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to evaluate a closure once, before it updates anything."""
    of_torch = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return of_torch or as_one_pass(optimizer) is not None


def _remembering(optimizer: Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's state and options back, tensors of its state in the same memory."""
    # By parameter, and what users note down beside them.
    state = {key: dict(kept) if isinstance(kept, dict) else kept for key, kept in optimizer.state.items()}
    values = {key: _copied(kept) for key, kept in state.items()}
    options = [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        for key, kept in values.items():
            if isinstance(there := state[key], dict):  # an optimizer may know the addresses of its tensors
                kept = {n: there[n].copy_(value) if isinstance(value, Tensor) else value for n, value in kept.items()}
            optimizer.state[key] = kept
        for group, before in zip(optimizer.param_groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(params=params, **before)

    return restore


def _copied(value: Any) -> Any:
    """Copy a tensor, any plain value, and whatever containers hold them."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), value)
