"""How a ``GradScaler`` is used, whatever system it is of: what its calls mean, and which order of them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final
from weakref import WeakSet

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mezzo.errors import PolicyError, StateError
from mezzo.scale import LossScale
from mezzo.scale.held import HeldScaler
from mezzo.session import Step
from mezzo.session.attached.scaling import ScaledOptimizer
from mezzo.session.update import Writes
from mezzo.session.window.window import NoGradient
from mezzo.step.executors.choose import shared

__all__ = ["CallScaler"]

_ORDER: Final = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"


class CallScaler:
    """A loss scale in the calls of a ``GradScaler``: ``scale``, ``unscale_``, ``step``, ``update``.

    Args:
        config: The rules.
        enabled: Whether it does anything.
    """

    #: What a user of this style writes to have FP32 masters.
    _masters = ""

    def __init__(self, config: LossScale, *, enabled: bool) -> None:
        self._enabled = enabled
        self._held = HeldScaler(config, "cpu", shared)
        self._given: Tensor | None = None  # the scale that losses were last multiplied by
        self._last_step: Step | None = None
        self._known: dict[int, ScaledOptimizer] = {}  # by id, since the last update
        self._writes: WeakSet[Writes] = WeakSet()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    @property
    def last_step(self) -> Step | None:
        """What the last :meth:`step` found and did: a :class:`mezzo.Step`; ``None`` before the first.

        ``scaler.last_step.skipped`` says whether the weights stayed as they were. Reading it as a Python value waits
        for the device.
        """
        return self._last_step

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of a list, a tuple or another iterable, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._given is None:
                self._held.place(outputs.device)
            self._given = self._held.state.scale
            return outputs * self._given.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, dict)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise PolicyError(
            f"scale() takes tensors, not {type(outputs).__name__}", write="scaler.scale(loss), or scaler.scale([a, b])"
        )

    @_disable_dynamo  # as a session's step; scale() is compiled with the loss
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale now, so that they can be looked at or clipped; no host sync."""
        if not self._enabled:
            return
        given, name = self._require_scaled("unscale_"), type(optimizer).__name__
        if id(optimizer) in self._stepped:
            raise StateError(
                "unscale_() after step()",
                where=name,
                why="step() has unscaled these gradients, and used them",
                write="scaler.unscale_(optimizer), what edits the gradients, then scaler.step(optimizer)",
            )
        if id(optimizer) in self._unscaled:
            raise StateError(
                "unscale_() was called already since the last update()",
                where=name,
                why="the gradients would be divided by the scale twice",
                write="scaler.unscale_(optimizer) once, after the last backward pass; scaler.update() after each step",
            )
        scaled = self._of(optimizer)
        scaled.find(given)
        try:
            scaled.unscale_()
        except BaseException:
            scaled.forget()
            raise
        self._unscaled.add(id(optimizer))

    @_disable_dynamo
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients unless they are, and step with the optimizer unless they are not finite.

        Args:
            optimizer: The optimizer.
            *args: What its ``step`` takes: a closure, which scales its loss as well, first of all.
            **kwargs: By name.

        Returns:
            What ``optimizer.step`` returns; ``None`` where it was not called.
        """
        if not self._enabled:
            self._last_step = Step.plain()
            return optimizer.step(*args, **kwargs)
        if id(optimizer) in self._stepped:
            raise StateError(
                "step() was called already since the last update()",
                where=type(optimizer).__name__,
                why="its gradients are unscaled and used; nothing tells new ones from them",
                write="scaler.update() after each iteration's last scaler.step(optimizer)",
            )
        closure, args = (args[0], args[1:]) if args else (kwargs.pop("closure", None), ())
        if closure is None:
            given = self._require_scaled("step")
        elif not callable(closure):
            raise PolicyError(
                f"step() takes a closure after the optimizer, not {type(closure).__name__}",
                write="scaler.step(optimizer), or scaler.step(optimizer, closure)",
            )
        scaled = self._of(optimizer)
        try:
            if closure is None:
                scaled.find(given)
                self._last_step, found = scaled.step(None, args, kwargs)
            else:
                self._last_step, found = scaled.step(self._evaluating(closure, optimizer, scaled), args, kwargs)
        except NoGradient as error:
            raise NoGradient(
                "no parameter of the optimizer has a gradient that was scaled",
                where=type(optimizer).__name__,
                why="its gradients are None: nothing was backpropagated to them, or they were cleared since",
                write=_ORDER,
            ) from error
        self._stepped.add(id(optimizer))
        if self._config.mode == "constant":  # nothing moves, and an update may be left out
            self._held.set(self._held.state.scale)
            self._forget()
        return found

    @_disable_dynamo
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what was found since the last call, once for all optimizers, or set another one.

        Args:
            new_scale: The scale from now on; what was found is forgotten.
        """
        if not self._enabled or self._config.mode == "constant":
            return
        self._require_scaled("update")
        if new_scale is not None:
            self._held.set(_checked(new_scale))
        else:
            flags = [flag for each in self._known.values() for flag in each.overflows()]
            if not self._known:
                raise StateError(
                    "update() has nothing to go by",
                    why="no gradients were checked since the last one",
                    write=_ORDER,
                )
            self._held.advance(flags)
        self._forget()

    def is_enabled(self) -> bool:
        """Return whether it does anything."""
        return self._enabled

    # For each system's own calls ----------------------------------------------------------------------------

    @property
    def _config(self) -> LossScale:
        return self._held.config

    def _follow(self, **fields: Any) -> None:
        """Go on by other rules."""
        self._held.config = replace(self._held.config, **fields)

    def _load(self, scale: Any, clean_steps: Any, **counted: Any) -> None:
        """Go on with another scale, another count of clean steps, and whatever else was counted."""
        fresh = self._config.start().state_dict()
        self._held.load_state_dict(fresh | {"scale": scale, "clean_steps": clean_steps, **counted})
        for writes in self._writes:  # what a step that was left half-way has written was loaded anew
            writes.drop()
        self._forget()

    @staticmethod
    def _require(state: Any, *keys: str) -> None:
        """Refuse what is no state of a scaler that scales."""
        if missing := [key for key in keys if not isinstance(state, Mapping) or key not in state]:
            raise StateError(
                "this is not the state of a GradScaler",
                where=f"it lacks {', '.join(missing)}" if state else "it is empty, as a disabled GradScaler's is",
                write="what state_dict() of an enabled scaler returned; or nothing, and the scale starts afresh",
            )

    def _forget(self) -> None:
        for each in self._known.values():
            each.forget()
        for known in (self._known, self._unscaled, self._stepped):
            known.clear()

    def _of(self, optimizer: Any) -> ScaledOptimizer:
        if (known := self._known.get(id(optimizer))) is None:
            if not isinstance(optimizer, Optimizer):
                what = f"an optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
                raise PolicyError(what, write="scaler.step(optimizer), for one after the other")
            known = self._known[id(optimizer)] = ScaledOptimizer(optimizer, self._held, self._masters)
            self._writes.add(known.writes)
        return known

    def _evaluating(self, closure: Callable[[], Any], optimizer: Optimizer, scaled: ScaledOptimizer) -> Any:
        """Return a closure that finds the gradients which the user's has made."""

        def evaluate() -> Any:
            self._unscaled.discard(id(optimizer))
            loss = closure()
            scaled.find(self._require_scaled("step"))
            return loss

        return evaluate

    def _require_scaled(self, call: str) -> Tensor:
        if self._given is None:
            raise StateError(
                f"{call}() before scale()",
                why="no loss was scaled yet, so that these gradients carry no scale",
                write=_ORDER,
            )
        return self._given


def _checked(scale: Any) -> float | Tensor:
    if isinstance(scale, Tensor):
        if scale.numel() == 1 and not scale.requires_grad:
            return scale
        what = f"a tensor of shape {tuple(scale.shape)}" + (" that requires a gradient" if scale.requires_grad else "")
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return LossScale.constant(scale).init  # which refuses what no scale can be
    else:
        what = f"a {type(scale).__name__}"
    raise PolicyError(f"new_scale is {what}", why="a scale is one positive number", write="scaler.update(2.0**16)")
