"""The four verbs of an engine as a ``GradScaler`` by type, for what takes one and calls it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.compiling import never_compiled
from mezzo.errors import PolicyError, raise_together
from mezzo.interrupts import uninterrupted
from mezzo.scale import LossScale
from mezzo.scale.config import TORCHS_WORDS, from_words
from mezzo.scale.device_state import Scaler
from mezzo.session.closures import closure_of, evaluated, evaluates_once, handing_on
from mezzo.session.engine import Engine
from mezzo.session.session import MixedPrecision, engine_of
from mezzo.session.stats import Step


class _Rule:
    """A rule of the loss scale under torch's own name for it, by which torch's getters, setters and states know it."""

    def __init__(self, word: str) -> None:
        self._word = word

    def __get__(self, scaler: EngineScaler, _: type) -> Any:
        return getattr(scaler.loss_scale.config, TORCHS_WORDS[self._word])

    def __set__(self, scaler: EngineScaler, value: Any) -> None:
        rules, problems = from_words("torch", {self._word: value}, "GradScaler", scaler.loss_scale.config)
        raise_together(problems)
        scaler.loss_scale.config = rules


class EngineScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` by type: the verbs are an engine's, and all that torch's has besides reads its scale.

    Args:
        device: The device type.
        loss_scale: See below.
        enabled: ``False`` for one that scales nothing, and steps always.

    Attributes:
        loss_scale: The loss scale, and how it moves.
        last_step: What the last :meth:`step` found and did; ``None`` before the first.
    """

    last_step: Step | None = None

    _growth_factor = _Rule("growth_factor")
    _backoff_factor = _Rule("backoff_factor")
    _growth_interval = _Rule("growth_interval")

    def __init__(self, device: str, loss_scale: Scaler, *, enabled: bool = True) -> None:
        super().__init__(device, enabled=False)  # nothing of torch's own runs
        self.loss_scale, self._enabled = loss_scale, enabled

    @abstractmethod
    def _engine_of(self, optimizer: Optimizer) -> Engine:
        """Return the engine, which knows an optimizer."""

    @abstractmethod
    def _scaled(self, loss: Tensor) -> Tensor:
        """Return a tensor times the scale."""

    def _check(self, optimizer: Optimizer, call: str) -> None:
        """Refuse a call for an optimizer, before anything is evaluated or written."""

    def _open(self, optimizer: Optimizer, *, again: bool = True) -> None:
        """Open a window of an optimizer's gradients, where no backward pass has.

        Args:
            optimizer: The optimizer.
            again: Whether those that the last step has left are taken, too.
        """

    def _idles(self, optimizer: Optimizer, call: str) -> bool:
        """Whether a call does nothing, as torch's: no parameter has a gradient, and an optimizer that is to step asks.

        Of several ranks each must know what one has found, and so all refuse such a step.
        """
        if has_gradient(optimizer):
            return False
        asks = getattr(optimizer, "_step_supports_amp_scaling", False)
        return call == "unscale_" or (asks and self._engine_of(optimizer).ranks.size == 1)

    # The four verbs ---------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of a list, a tuple or another iterable, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return self._scaled(outputs)
        if not isinstance(outputs, Iterable) or isinstance(outputs, str):
            what = f"scale() takes tensors, not {type(outputs).__name__}"
            raise PolicyError(what, write="scaler.scale(loss), or scaler.scale([a, b])")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    @never_compiled
    def unscale_(self, optimizer: Optimizer) -> None:
        """Make an optimizer's gradients FP32 and plain, so that they can be looked at or clipped; no host sync.

        Without a gradient there is nothing to do.

        Raises:
            StateError: Of a scaler without a session, before :meth:`scale`, or twice since the last ``update``.
            UnsupportedError: FP16 gradients of weights without FP32 values, which would lose what is small.
        """
        if self._enabled and not (engine := self._engine_of(optimizer)).plain:
            self._check(optimizer, "unscale_")
            with uninterrupted():
                self._open(optimizer)
                if not self._idles(optimizer, "unscale_"):
                    engine.unscale_([optimizer])

    @never_compiled
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step with the optimizer, or skip; what its ``step`` was replaced by is called.

        Args:
            optimizer: The optimizer.
            *args: What its ``step`` takes, first of all a closure, which scales its loss and runs the backward pass.
            **kwargs: By name.

        Returns:
            What the closure returned first, if there is one; else what ``optimizer.step`` did, ``None`` if it was
            not called.

        Raises:
            StateError: No gradient, where the optimizer is not one that asks for the scale by itself, as fused ones do;
                an earlier update that was ended half-way; of a scaler without a session, before :meth:`scale`, or twice
                since the last ``update``.
            UnsupportedError: FP16 gradients that nothing can unscale in FP32.
        """
        if not self._enabled:
            self.last_step = _unchecked()
            return optimizer.step(*args, **kwargs)
        self._engine_of(optimizer)
        self._check(optimizer, "step")
        engine, closure = self._engine_of(optimizer), closure_of(args, kwargs)
        asked = handing_on(engine.writes.step_of(optimizer), args, kwargs)
        if closure is None:
            return self._take(optimizer, asked)
        if evaluates_once(optimizer):
            with torch.enable_grad():
                loss = closure()
            self._take(optimizer, partial(asked, None))
            return loss
        with engine.writes.stepping_by(optimizer, asked):
            return self._evaluate(optimizer, closure)

    def _take(self, optimizer: Optimizer, step: Callable[..., Any]) -> Any:
        """Step once, by a call of the optimizer's step."""
        self._open(optimizer)
        engine = self._engine_of(optimizer)
        if self._idles(optimizer, "step"):
            self.last_step = _unchecked()
            return step()
        with engine.writes.stepping_by(optimizer, step) as returned:
            self.last_step = engine.step([optimizer])
        return returned[0] if returned else None

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Step with an optimizer that evaluates the loss as often as it likes."""
        losses = list[Any]()

        def evaluate() -> Any:
            losses.append(closure())
            self._open(optimizer)
            return losses[-1]

        self._open(optimizer, again=False)  # SAM begins with these
        self.last_step = evaluated(self._engine_of(optimizer), [optimizer], evaluate)
        return losses[0] if losses else None

    # What torch's own methods ask for ---------------------------------------------------------------------

    def _get_scale_async(self) -> Tensor | None:
        return self.loss_scale.state.scale if self._enabled else None

    def _get_growth_tracker(self) -> int:
        return int(self.loss_scale.state.clean_steps) if self._enabled else 0


class SessionScaler(EngineScaler):
    """Scale, unscale, step and update as a session does.

    The scale moves in :meth:`update` alone, once for all optimizers that have stepped since.

    Args:
        amp: The session.

    Attributes:
        amp: The session.
    """

    def __init__(self, amp: MixedPrecision) -> None:
        super().__init__(engine_of(amp).device.type, engine_of(amp).scaler)
        self.amp = amp
        engine_of(amp).waits = True
        engine_of(amp).plan_anew()

    def _engine_of(self, optimizer: Optimizer) -> Engine:
        return engine_of(self.amp)

    def _scaled(self, loss: Tensor) -> Tensor:
        return engine_of(self.amp).scale(loss)  # the pass that differentiates it opens windows

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale on.

        Args:
            new_scale: Go on with this one instead.

        Raises:
            PolicyError: No number that is a scale.
        """
        if new_scale is not None:
            new_scale = new_scale if isinstance(new_scale, Tensor) else LossScale.constant(new_scale).init
        engine_of(self.amp).update()
        if new_scale is not None:
            self.loss_scale.set(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state."""
        return self.amp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the session's state, or another scaler's."""
        self.amp.load_state_dict(state_dict)


def has_gradient(optimizer: Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient."""
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def _unchecked() -> Step:
    """Return what a step did that nothing has checked."""
    one = torch.ones(())
    return Step(skipped=one.eq(0), scale=one, next_scale=one, grad_norm=one * torch.nan)
