"""Steps of optimizers that evaluate the loss by themselves, as LBFGS and SAM do; and closures that a step is given."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from mezzo.errors import PolicyError, StateError, UnsupportedError, some_of
from mezzo.interrupts import uninterrupted
from mezzo.optim.optimizer import as_one_pass
from mezzo.session.engine import Engine
from mezzo.session.stats import Step
from mezzo.session.writers import check_numbers, inner_optimizers
from mezzo.step.gradients import multiply
from mezzo.step.verdict import JudgedGradients
from mezzo.tensors import tensors
from mezzo.weights.stepping import stored_again


def evaluated(engine: Engine, optimizers: Collection[Optimizer], closure: Callable[[], Any]) -> Step:
    """Step with one optimizer that evaluates the loss by itself, as LBFGS and SAM do.

    Gradients that there are before the first evaluation count as one: SAM begins with them. If an evaluation overflows,
    or anything raises, weights and the optimizer's state are put back.

    Args:
        engine: The engine.
        optimizers: The one.
        closure: Clears the gradients, computes the loss, and runs its backward pass.

    Raises:
        PolicyError: Several optimizers, each of which would move its weights between evaluations.
        StateError: The closure computed no gradient, or was not evaluated.
        UnsupportedError: The step is captured.

    **Cost**: a copy of weights and state; one host sync for each evaluation.
    """
    if len(optimizers) != 1:
        raise PolicyError(
            "a closure is for one optimizer",
            where=f"amp.step(closure=…) for {some_of([type(optimizer).__name__ for optimizer in optimizers])}",
            why="each optimizer moves its weights between two evaluations of the loss",
            write="amp.step(optimizers=optimizer, closure=closure), for one after the other",
        )
    if engine.is_captured:
        raise UnsupportedError(
            "closure= cannot be captured",
            where="amp.step(closure=…) in a train step under mezzo.capture",
            why="whether an evaluation overflowed decides what the optimizer does next: the host would have to ask",
            write="amp.backward(loss), then amp.step(); or the train step without mezzo.capture",
        )

    engine.refuse_capture()
    engine.account.check()
    engine.replan(writes=True)
    engine.writes.require_whole()
    check_numbers(next(iter(optimizers)))
    with torch.no_grad():
        with engine.errors_sent_to_ranks():
            step = _Evaluations(engine, next(iter(optimizers)), closure).run()
        return engine.accounted(step)


class _Evaluations:
    """The evaluations of one step."""

    def __init__(self, engine: Engine, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self._engine, self._optimizer, self._closure = engine, optimizer, closure
        self._writes = engine.writes
        (self._window,) = (window for window in engine.windows if optimizer in window.plan.optimizers)
        self._last: tuple[JudgedGradients, Tensor | None, Tensor | None] | None = None

    def run(self) -> Step:
        engine, weights = self._engine, self._engine.weights
        before = [(param, param.detach().clone()) for param in weights.updated(self._optimizer)]
        restores = [_remembering(optimizer) for optimizer in (self._optimizer, *inner_optimizers(self._optimizer))]
        try:
            with self._writes.stepping():
                if self._window.now.passes and self._window.has_gradients():
                    self._judge()  # SAM begins with these
                self._writes.step_of(self._optimizer)(self._evaluate)
            if self._last is None:
                raise StateError(
                    f"{type(self._optimizer).__name__}.step() did not evaluate the closure",
                    write="amp.backward(loss), then amp.step() without closure=",
                )
        except BaseException as error:
            with uninterrupted():
                for optimizer in (self._optimizer, *inner_optimizers(self._optimizer)):
                    stored_again(optimizer)
                with torch.no_grad():
                    for param, value in before:
                        param.copy_(value)
                for restore in restores:
                    restore()
                self._window.close()
            if not isinstance(error, Overflowed):
                raise
        assert self._last is not None, "an optimizer that was not asked raises"
        with uninterrupted():
            judged, absent, made_with = self._last
            self._window.now = self._window.now._replace(made_with=made_with)
            return engine.finish([self._window], judged, absent)

    def _evaluate(self) -> Any:
        torch.clear_autocast_cache()  # of weights that the optimizer has moved since
        # Other optimizers do not enable gradients, as torch's own do.
        with self._writes.stepping(False), torch.enable_grad():
            loss = self._closure()
        if not self._window.has_gradients():
            raise StateError("the closure computed no gradient", write="amp.backward(loss) in the closure")
        self._judge()
        return loss

    @torch.no_grad()
    def _judge(self) -> None:
        """Judge an evaluation's gradients, and unscale and clip them for the optimizer."""
        window = self._window
        self._engine.warn_of_edits([window])
        judged, absent = self._engine.judge([window], window.plan.writers_of([self._optimizer]))
        self._last = judged, absent, window.now.made_with
        if bool(judged.verdict.found_inf):
            raise Overflowed
        if not judged.verdict.is_one:
            multiply(judged.gradients, judged.verdict.multiplier)
        window.close()


class Overflowed(Exception):  # noqa: N818 - it never leaves the engine
    """An evaluation's gradients are not finite."""


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among what a step is given, first of all or by name: an optimizer may take more."""
    first = args[0] if args else None
    is_first = callable(first) and not isinstance(first, nn.Module)
    return first if is_first else kwargs.get("closure")


def handing_on(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return a step with these arguments bound; a closure that it is called with replaces the bound closure."""
    if not args and not kwargs:
        return step

    @functools.wraps(step)
    def call(*closure: Any) -> Any:
        if not closure:
            return step(*args, **kwargs)
        if "closure" in kwargs:
            return step(*args, **kwargs | {"closure": closure[0]})
        return step(*closure, *args[1:], **kwargs)

    return call


def evaluates_once(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to evaluate a closure once, before it updates anything."""
    of_torch = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return of_torch or as_one_pass(optimizer) is not None


def _remembering(optimizer: Optimizer) -> Callable[[], None]:
    """Return a call that restores an optimizer's state and options, tensors of the state in the same memory."""
    # By parameter, and what users note down beside them.
    state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in optimizer.state.items()}
    values = {key: _copied(entry) for key, entry in state.items()}
    options = [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        for key, entry in values.items():
            if isinstance(old_entry := state[key], dict):  # an optimizer may know the addresses of its tensors
                entry = {
                    n: old_entry[n].copy_(value) if isinstance(value, Tensor) else value for n, value in entry.items()
                }
            optimizer.state[key] = entry
        for group, before in zip(optimizer.param_groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(params=params, **before)

    return restore


def _copied(value: Any) -> Any:
    """Copy a tensor, any plain value, and whatever containers hold them."""
    return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in tensors(value)})
