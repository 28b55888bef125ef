"""``GradScaler`` with torch's signature over the session's engine: it learns optimizers as it is shown them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.compiling import never_compiled
from mezzo.distributed.exchange import Ranks
from mezzo.errors import PolicyError, StateError, UnsupportedError, raise_together, shown, some_of
from mezzo.interrupts import uninterrupted
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.scale.config import TORCHS_RULES, from_words
from mezzo.scale.device_state import Scaler
from mezzo.session.engine import SCALERS_ORDER, Engine
from mezzo.session.grad_scaler import EngineScaler, has_gradient
from mezzo.session.weights import Weights
from mezzo.session.window import Window
from mezzo.session.writers import takes_flags
from mezzo.step.executors.choose import shared
from mezzo.tensors import described, moved


class UncheckedError(StateError, AssertionError):
    """No gradient was looked at, which torch asserts."""


class GradScaler(EngineScaler):
    """``torch.amp.GradScaler``, of which it is one, without its faults.

    The scale follows torch's rules step by step, and weights are torch's bit for bit, but for these: the scale stops at
    2^-126 and never becomes 0; gradients that become infinite by unscaling count as an overflow, and so do those whose
    norm, scaled, is beyond FP32 (a value above 1.8e19 is enough), and those that were made so after :meth:`unscale_`;
    what a skipped step has left in ``.grad`` is cleared by the next :meth:`scale`, and nothing is added to infinity;
    ranks of ``torch.distributed`` take the same steps, or none; closures are evaluated with unscaled gradients;
    gradients are unscaled by the scale that ``scale`` multiplied by, also when ``update`` has moved it since.

    Args:
        device: The device type, as for torch: ``"cuda"`` on a machine without disables the scaler, with a warning.
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` updates without an overflow.
        backoff_factor: What it is multiplied by after one with.
        growth_interval: See there.
        enabled: ``False`` for a scaler that scales nothing, and steps always.

    Attributes:
        last_step: What the last :meth:`step` found and did; ``None`` before the first.

    Raises:
        PolicyError: A number that is no scale's, or no device type.

    **Cost**: a pass over the gradients that reads them, and one that writes them where they are unscaled in place:
    after :meth:`unscale_`, or for an optimizer whose kernels do not unscale; what was unscaled is read again by
    :meth:`step`, as it may have been edited. No host sync with torch's fused optimizers and mezzo's; one a step with
    any other, to know whether to call it. One launch in :meth:`update`. Optimizers of the last iteration are kept alive
    until other ones are scaled for.

    Example:
        >>> import torch
        >>> from mezzo.compat.torch import GradScaler
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> bool(scaler.last_step.skipped), scaler.get_scale()
        (False, 65536.0)
    """

    #: Whose rules the scale follows, and what a user of this style writes to have FP32 weights.
    _system: Literal["torch", "paddle"] = "torch"
    _cure = (
        "model.float(), and autocast(device_type, torch.float16) around its forward pass;\n"
        'or mezzo.MixedPrecision(model, optimizer, "O2"), whose weights are FP32, of a model given in FP32'
    )

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and _type_of(device) == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is disabled: CUDA is not available", UserWarning, stacklevel=2)
            enabled = False
        words = {
            "init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }  # fmt: skip
        rules, problems = from_words("torch", words if enabled else {}, "GradScaler")
        raise_together(problems)
        self._begin(_type_of(device), rules, enabled=enabled)

    def _begin(self, device: str, rules: LossScale, *, enabled: bool) -> None:
        """Set the state of before the first loss."""
        EngineScaler.__init__(self, device, Scaler(rules, "cpu", shared), enabled=enabled)
        self._given: Tensor | None = None  # what losses were last multiplied by
        self._engine: Engine | None = None
        self._seen: dict[Optimizer, bool] = {}  # since the last update: whether it has stepped
        self._unchecked: set[Optimizer] = set()  # of these, those that had no gradient
        self.last_step = None

    # Optimizers -------------------------------------------------------------------------------------------

    def _engine_of(self, optimizer: Any) -> Engine:
        if not isinstance(optimizer, Optimizer):
            problem = f"an optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            raise PolicyError(problem, write="scaler.step(optimizer), for one after the other")
        engine = self._engine
        if engine is not None and optimizer in engine.weights.optimizers:
            return engine
        with uninterrupted():
            if engine is None:
                engine = Engine(Weights([], [], Policy.O0(), {}), self.loss_scale, Ranks.of())
                engine.waits = True
            # Those of earlier iterations may be gone.
            engine.weights.replace_optimizers([*(seen for seen in self._seen if seen is not optimizer), optimizer])
            engine.plan_anew()
            self._engine = engine
        return engine

    def _window(self, optimizer: Optimizer) -> Window:
        windows = self._engine_of(optimizer).windows
        return next(window for window in windows if optimizer in window.plan.optimizers)

    def _open(self, optimizer: Optimizer, *, again: bool = True) -> None:
        engine = self._engine_of(optimizer)
        if self._given is None or self._window(optimizer).now.passes:
            return
        engine.replan()
        window = self._window(optimizer)
        if not window.has_gradients():
            return
        if again or not window.has_left_alone():
            if not takes_flags(optimizer):
                self._refuse_fp16(optimizer)
            window.adopt_gradients(self._given)
            self._seen[optimizer] = False

    def _refuse_fp16(self, optimizer: Optimizer) -> None:
        if not self._engine_of(optimizer).weights.are_low:
            return
        low_gradients = [
            f"group {number}, parameter {index} ({described(param.grad)})"
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if param.grad is not None and param.grad.dtype == torch.float16
        ]
        if low_gradients:
            raise UnsupportedError(
                "fp16 gradients cannot be unscaled in fp16",
                where=f"{some_of(low_gradients, 1)}, optimizer {type(optimizer).__name__}",
                why="dividing them by the loss scale in float16 flushes small ones to zero",
                write=self._cure,
            )

    def _check(self, optimizer: Optimizer, call: str) -> None:
        has_stepped = self._seen.get(optimizer, False)
        if has_stepped or (call == "unscale_" and optimizer in self._seen):
            raise StateError(
                "unscale_() after step()"
                if has_stepped and call == "unscale_"
                else f"{call}() was called already since the last update()",
                where=type(optimizer).__name__,
                why="its gradients are unscaled, or used up; nothing tells new ones from them",
                write="scaler.unscale_(optimizer) once, after the last backward pass, then scaler.step(optimizer);\n"
                "scaler.update() after each iteration's last step",
            )
        if call == "unscale_":
            self._refuse_fp16(optimizer)

    def _idles(self, optimizer: Optimizer, call: str) -> bool:
        is_seen, idles = optimizer in self._seen, super()._idles(optimizer, call)
        is_alone = self._engine_of(optimizer).ranks.size == 1
        if is_seen and optimizer not in self._unchecked:
            return is_alone and not has_gradient(optimizer)  # they were cleared since
        if self._given is None or (is_seen and not idles) or (not has_gradient(optimizer) and is_alone and not idles):
            raise _unchecked(call, optimizer, is_scaled=self._given is not None)
        if idles:
            self._seen[optimizer] = False
            self._unchecked.add(optimizer)
        return idles

    # The four verbs ---------------------------------------------------------------------------------------

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._given is None and loss.device != self.loss_scale.state.scale.device:
            self._place(loss.device)
        for window in () if self._engine is None else self._engine.windows:
            window.drop_skipped()
        self._given = self.loss_scale.state.scale
        return loss * moved(self._given, loss.device)

    @never_compiled
    def _place(self, device: torch.device) -> None:
        """Keep the scale where losses are."""
        self.loss_scale.hold(self.loss_scale.state.to(device), in_graph=False)
        self._engine = None

    def _take(self, optimizer: Optimizer, step: Callable[..., Any]) -> Any:
        with uninterrupted(), self._once(optimizer):
            return super()._take(optimizer, step)

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        with self._once(optimizer):
            return super()._evaluate(optimizer, closure)

    @contextmanager
    def _once(self, optimizer: Optimizer) -> Iterator[None]:
        """Record that an optimizer has stepped; an optimizer that raises before it has written may step again."""
        found_inf = self._window(optimizer).now.found_inf
        try:
            yield
        except BaseException:
            if (window := self._window(optimizer)).now.passes:
                if found_inf is not None:
                    self._engine_of(optimizer).count_found_inf(found_inf)
                window.close(window.now.found_inf)
            raise
        self._seen[optimizer] = True

    @never_compiled
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what was found since the last call, once for all optimizers, or set another one.

        Args:
            new_scale: The scale from now on; what was found is forgotten.

        Raises:
            StateError: No gradients were judged since the last call.
            PolicyError: No number that is a scale.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            new_scale = new_scale if isinstance(new_scale, Tensor) else LossScale.constant(new_scale).init
        elif self._seen.keys() <= self._unchecked:
            why = "no gradients were judged since the last one"
            raise UncheckedError("update() has nothing to go by", why=why, write=SCALERS_ORDER)
        with uninterrupted():
            self._close()
            if new_scale is not None:
                self.loss_scale.set(new_scale)
            elif self._engine is not None:
                self._engine.update()
            self._forget()

    def _close(self) -> None:
        """Close windows that no step has taken; what unscaling has found in them counts, on all ranks alike."""
        for engine in [] if self._engine is None else [self._engine]:
            for window in engine.windows:
                if not window.now.passes:
                    continue
                if (found_inf := window.now.found_inf) is not None:
                    no = torch.zeros_like(found_inf)
                    engine.count_found_inf(engine.ranks.agree(found_inf, no, step=engine.account.begun + 1)[0])
                window.close(found_inf)

    # State ------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``GradScaler``'s state, mezzo's or torch's, rules included; a disabled scaler loads nothing.

        Raises:
            StateError: Not such a state, or a disabled scaler's. Nothing was loaded.
            PolicyError: Rules that no scale follows. Nothing was loaded.
        """
        if not self._enabled:
            return
        self._require(state_dict, "scale", *TORCHS_RULES, "_growth_tracker")
        words = {word: state_dict[word] for word in TORCHS_RULES}
        rules, problems = from_words("torch", words, "the state of a GradScaler")
        raise_together(problems)
        self._load(rules, state_dict["scale"], clean_steps=state_dict["_growth_tracker"])

    def _load(self, rules: LossScale, scale: Any, **counted: Any) -> None:
        """Load rules, a scale and counts."""
        self.loss_scale.load_state_dict(rules.start().state_dict() | {"scale": scale, **counted})
        self.loss_scale.config = rules
        self._engine = None
        self._forget()

    def _forget(self) -> None:
        self._seen.clear()
        self._unchecked.clear()

    @staticmethod
    def _require(state: Any, *keys: str) -> None:
        """Refuse what is no state of a scaler that scales."""
        if missing := [key for key in keys if not isinstance(state, Mapping) or key not in state]:
            raise StateError(
                "this is not the state of a GradScaler",
                where=f"it lacks {', '.join(missing)}" if state else "it is empty, as a disabled GradScaler's is",
                write="what state_dict() of an enabled scaler returned; or nothing, and the scale starts afresh",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with, between two iterations.

        Raises:
            StateError: Gradients were judged since the last ``update``, which a copy would not know of.
        """
        if self._seen:
            raise StateError("a GradScaler is copied in the middle of an iteration", write="after scaler.update()")
        return {"device": self._device, "enabled": self._enabled, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as a copy."""
        self._begin(state["device"], LossScale.like(self._system), enabled=state["enabled"])
        self.load_state_dict(state["state"])


def _unchecked(call: str, optimizer: Optimizer, *, is_scaled: bool) -> UncheckedError:
    problem = f"{call}() before backward()"
    if not is_scaled and has_gradient(optimizer):
        problem += ": gradients are there, but not from scaler.scale(loss).backward()"
    return UncheckedError(problem, where=type(optimizer).__name__, write=SCALERS_ORDER)


def _type_of(device: Any) -> str:
    try:
        return torch.device(str(device)).type
    except RuntimeError:
        problem, why = f"the device is {shown(device)}", "the first argument of GradScaler is a device type"
        raise PolicyError(problem, why=why, write='GradScaler("cuda", init_scale=…)') from None
