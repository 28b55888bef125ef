"""``GradScaler`` with torch's signature, over the pure rules of a loss scale: it knows optimizers, and no session.

What torch gets right is left as torch has it, bit for bit. The gradients of one optimizer are judged once between two
updates: their norm says whether one is not finite, now or once it is unscaled.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from mezzo.errors import PolicyError, StateError, UnsupportedError, shown, some_of
from mezzo.interrupts import uninterrupted
from mezzo.optim.masters import masters_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.scale import LossScale
from mezzo.scale.scaler import Scaler
from mezzo.scale.words import TORCHS_RULES
from mezzo.session.closures import evaluates_once
from mezzo.session.update import takes_flags, telling
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import alike, dense, norms
from mezzo.step.passes import decided
from mezzo.tensors import LOW, described, moved

__all__ = ["GradScaler", "ScalerStep"]

_ORDER = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"


@dataclass(frozen=True, slots=True)
class ScalerStep:
    """What the last step of a scaler found and did: reading one of these as a Python value waits for the device.

    Attributes:
        skipped: 0-d bool: whether the gradients were not finite, so that the weights stayed as they were.
        scale: 0-d float32: what the loss was multiplied by.
        grad_norm: 0-d float32: the 2-norm of the gradients, without the scale, as they were when they were judged.
    """

    skipped: Tensor
    scale: Tensor
    grad_norm: Tensor


@dataclass(slots=True)
class _Found:
    """An optimizer's gradients between two updates of the scale.

    Attributes:
        found: What was found of them.
        unscaled: Whether they were divided by the scale in place.
        shown: FP32 gradients of low weights that have FP32 masters, which show them too: weight, master and gradient.
        stepped: Whether the optimizer has stepped with them, or skipped.
    """

    found: ScalerStep
    unscaled: bool
    shown: list[tuple[Tensor, Tensor, Tensor]]
    stepped: bool = False

    def take_back(self) -> None:
        """Leave each gradient on its weight alone, whichever of the two was given another."""
        for param, master, gradient in self.shown:
            if param.grad is gradient:
                param.grad = master.grad
            master.grad = None
        self.shown = []


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, of which it is one, without its faults.

    The scale follows torch's rules step by step, and weights are torch's bit for bit, but for these: the scale stops at
    2^-126 and never becomes 0; gradients that become infinite by unscaling count as an overflow, and so do those whose
    norm, scaled, is beyond FP32 (a value above 1.8e19 is enough); where ``torch.distributed`` is initialised, its ranks
    take the same steps, so that all of them call ``unscale_`` and ``step`` alike; a closure of an optimizer that
    evaluates it once is evaluated before the gradients are judged; gradients are unscaled by the scale that ``scale``
    multiplied by, also when ``update`` has moved it since.

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
    after :meth:`unscale_`, or for an optimizer whose kernels do not unscale. No host sync with torch's fused optimizers
    and mezzo's; one a step with any other, to know whether to call it. One launch in :meth:`update`.

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

    #: Whose rules the scale follows, and what a user of this style writes to have FP32 masters.
    _system = "torch"
    _cure = (
        "model.float(), and autocast(device_type, torch.float16) around its forward pass;\n"
        'or mezzo.MixedPrecision(model, optimizer, "O2"), which keeps FP32 masters of a model given in FP32'
    )

    last_step: ScalerStep | None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._device = _type_of(device)
        if enabled and self._device == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is disabled: CUDA is not available", UserWarning, stacklevel=2)
            enabled = False
        self._enabled = enabled
        given = {"growth": growth_factor, "backoff": backoff_factor, "interval": growth_interval}
        with _in_torchs_words():  # a disabled scaler follows none
            self._begin(LossScale.like(self._system, **({"init": init_scale, **given} if enabled else {})))

    def _begin(self, rules: LossScale) -> None:
        """Be as before the first loss."""
        self._held = Scaler(rules, "cpu", shared)
        self._no = torch.zeros((), dtype=torch.bool)  # made once: a launch less in each update
        self._given: Tensor | None = None  # what losses were last multiplied by
        self._known: dict[int, _Found] = {}  # by optimizer's id, since the last update
        self.last_step = None

    # The four verbs ---------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of a list, a tuple or another iterable, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._given is None and outputs.device != self._held.state.scale.device:
                self._place(outputs.device)
            self._given = self._held.state.scale
            return outputs * moved(self._given, outputs.device)
        if not isinstance(outputs, Iterable) or isinstance(outputs, str):
            what = f"scale() takes tensors, not {type(outputs).__name__}"
            raise PolicyError(what, write="scaler.scale(loss), or scaler.scale([a, b])")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    @_disable_dynamo
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale now, so that they can be looked at or clipped; no host sync.

        Raises:
            StateError: Before :meth:`scale`; twice, or after :meth:`step`, since the last :meth:`update`; without a
                gradient.
            UnsupportedError: FP16 gradients, which would lose what is small.
        """
        if not self._enabled:
            return
        if (known := self._known.get(id(optimizer))) is not None:
            raise StateError(
                "unscale_() after step()" if known.stepped else "unscale_() was called already since the last update()",
                where=type(optimizer).__name__,
                why="the gradients would be divided by the scale twice",
                write="scaler.unscale_(optimizer) once, after the last backward pass, then scaler.step(optimizer);\n"
                "scaler.update() after each iteration's last step",
            )
        with uninterrupted():
            self._known[id(optimizer)] = self._judged(optimizer, "unscale_", unscales=True)

    @_disable_dynamo
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients unless they are, and step with the optimizer unless they are not finite.

        Args:
            optimizer: The optimizer.
            *args: What its ``step`` takes, first of all a closure, which scales its loss and runs the backward pass.
            **kwargs: By name.

        Returns:
            What ``optimizer.step`` returned, or the closure; ``None`` where neither was called.

        Raises:
            StateError: Before :meth:`scale`, twice since the last :meth:`update`, or without a gradient.
            UnsupportedError: FP16 gradients that the optimizer cannot unscale in FP32; a closure of an optimizer that
                evaluates it as often as it likes.
        """
        if not self._enabled:
            no = torch.zeros((), dtype=torch.bool)
            self.last_step = ScalerStep(no, torch.ones(()), torch.full((), torch.nan))
            return optimizer.step(*args, **kwargs)
        known = self._known.get(id(optimizer))
        if known is not None and known.stepped:
            raise StateError(
                "step() was called already since the last update()",
                where=type(optimizer).__name__,
                why="its gradients are unscaled and used; nothing tells new ones from them",
                write="scaler.update() after each iteration's last scaler.step(optimizer)",
            )
        loss, closure = None, args[0] if args else kwargs.get("closure")
        if closure is not None:
            loss = _evaluated(optimizer, closure)
            args, kwargs = ((None, *args[1:]), kwargs) if args else ((), kwargs | {"closure": None})
            known = self._known.get(id(optimizer))  # the closure may have unscaled, to clip
        # What is no optimizer is refused where its gradients would be judged.
        is_told = isinstance(optimizer, Optimizer) and takes_flags(optimizer, _masters(optimizer))
        if known is None:
            known = self._known[id(optimizer)] = self._judged(optimizer, "step", unscales=not is_told)
        known.stepped, self.last_step = True, known.found
        known.take_back()
        returned, entered = None, list[Optimizer]()
        try:
            with uninterrupted(), telling(optimizer, entered, 0):
                if is_told:
                    returned = _flagged(optimizer, known)(*args, **kwargs)
                elif not bool(known.found.skipped):  # the one sync: whether to call it
                    returned = optimizer.step(*args, **kwargs)
        except BaseException:
            known.stepped = bool(entered)  # a hook that has raised before the update lets it be taken again
            raise
        return returned if closure is None else loss

    @_disable_dynamo
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what was found since the last call, once for all optimizers, or set another one.

        Args:
            new_scale: The scale from now on; what was found is forgotten.

        Raises:
            StateError: Before :meth:`scale`, or where no gradients were judged since the last call.
            PolicyError: No number that is a scale.
        """
        if not self._enabled:
            return
        self._scale_given("update")
        if new_scale is not None:
            self._held.set(new_scale if isinstance(new_scale, Tensor) else LossScale.constant(new_scale).init)
        elif not self._known:
            why = "no gradients were judged since the last one"
            raise StateError("update() has nothing to go by", why=why, write=_ORDER)
        else:
            for each in self._known.values():
                self._held.update(each.found.skipped, hold=self._no)
            self._held.advance()
        self._known.clear()

    # What they stand on -----------------------------------------------------------------------------------

    @_disable_dynamo
    def _place(self, device: torch.device) -> None:
        """Keep the scale where losses are."""
        state, self._held = self._held.state_dict(), Scaler(self._held.config, device, shared)
        self._held.load_state_dict(state)
        self._no = self._no.to(device)

    def _scale_given(self, call: str) -> Tensor:
        if self._given is None:
            why = "no loss was scaled yet, so that these gradients carry no scale"
            raise StateError(f"{call}() before scale()", why=why, write=_ORDER)
        return self._given

    @torch.no_grad()
    def _judged(self, optimizer: Any, call: str, *, unscales: bool) -> _Found:
        """Say whether an optimizer's gradients are finite, all of them and on all ranks; unscale them in place."""
        if not isinstance(optimizer, Optimizer):
            what = f"an optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            raise PolicyError(what, write=f"scaler.{call}(optimizer), for one after the other")
        scale, masters = self._scale_given(call), _masters(optimizer)
        of = {id(master): param for param, master in masters.items()}
        updated = (param for group in optimizer.param_groups for param in group["params"])
        params, gradients = dense([of.get(id(param), param) for param in updated])
        if not gradients:
            _on_any_rank(torch.ones_like(scale, dtype=torch.bool))  # the others wait for this one; they skip
            raise StateError(
                "no parameter of the optimizer has a gradient",
                where=f"scaler.{call}({type(optimizer).__name__})",
                why="nothing was backpropagated to them, or they were cleared since",
                write=_ORDER,
            )
        if unscales and (masters or _keeps_halves(optimizer)):
            _widen(params)
            params, gradients = dense(params)
        if unscales and any(gradient.dtype == torch.float16 for gradient in gradients):
            self._refuse_fp16(optimizer)
        found = norms(gradients, scale.device, one_pass=as_one_pass(optimizer) is not None)
        grad_norm, found_inf, multiplier = shared(decided, (True, False), [found, scale])
        for (device, _), places in alike(gradients).items() if unscales else ():
            torch._foreach_mul_([gradients[place] for place in places], moved(multiplier, device))
        shown = [(p, masters[p], p.grad) for p in params if unscales and p in masters and p.grad is not None]
        for _, master, gradient in shown:
            master.grad = gradient
        return _Found(ScalerStep(_on_any_rank(found_inf), scale, grad_norm), unscales, shown)

    def _refuse_fp16(self, optimizer: Optimizer) -> None:
        low = [
            f"group {number}, parameter {place} ({described(param.grad)})"
            for number, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
            if param.grad is not None and param.grad.dtype == torch.float16
        ]
        raise UnsupportedError(
            "fp16 gradients cannot be unscaled in fp16",
            where=f"{some_of(low, 1)}, optimizer {type(optimizer).__name__}",
            why="dividing them by the loss scale in float16 flushes small ones to zero",
            write=self._cure,
        )

    # The rules --------------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Return whether it does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale, 1.0 of a disabled scaler; waits for the device."""
        return float(self._held.state.scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return what the scale grows by."""
        return self._held.config.growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Grow by another factor from now on."""
        self._follow(growth=new_factor)

    def get_backoff_factor(self) -> float:
        """Return what the scale backs off by."""
        return self._held.config.backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Back off by another factor from now on."""
        self._follow(backoff=new_factor)

    def get_growth_interval(self) -> int:
        """Return after how many updates without an overflow the scale grows."""
        return self._held.config.interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after another number of updates from now on."""
        self._follow(interval=new_interval)

    def _follow(self, **fields: Any) -> None:
        with _in_torchs_words():
            self._held.config = replace(self._held.config, **fields)

    def _get_scale_async(self) -> Tensor | None:  # asked by libraries
        return self._held.state.scale if self._enabled else None

    def _get_growth_tracker(self) -> int:
        return int(self._held.state.clean_steps) if self._enabled else 0

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.amp.GradScaler.load_state_dict`` loads; empty for a disabled scaler. A host sync."""
        if not self._enabled:
            return {}
        state = self._held.state_dict()
        rules = {theirs: getattr(self._held.config, ours) for theirs, ours in TORCHS_RULES.items()}
        return {"scale": state["scale"], **rules, "_growth_tracker": state["clean_steps"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``GradScaler``'s state, mezzo's or torch's, rules included; a disabled scaler loads nothing.

        Raises:
            StateError: Not such a state, or a disabled scaler's. Nothing was loaded.
            PolicyError: Rules that no scale follows. Nothing was loaded.
        """
        if not self._enabled:
            return
        self._require(state_dict, "scale", *TORCHS_RULES, "_growth_tracker")
        with _in_torchs_words():
            rules = {ours: state_dict[theirs] for theirs, ours in TORCHS_RULES.items()}
            config = replace(self._held.config, **rules)
        self._load(config, state_dict["scale"], clean_steps=state_dict["_growth_tracker"])

    def _load(self, config: LossScale, scale: Any, **counted: Any) -> None:
        """Go on by these rules, from a scale and what was counted."""
        self._held.load_state_dict(config.start().state_dict() | {"scale": scale, **counted})
        self._held.config = config
        self._known.clear()

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
        if self._known:
            raise StateError("a GradScaler is copied in the middle of an iteration", write="after scaler.update()")
        return {"device": self._device, "enabled": self._enabled, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as a copy."""
        self._device, self._enabled = state["device"], state["enabled"]
        self._begin(LossScale.like(self._system))
        self.load_state_dict(state["state"])


# Optimizers -------------------------------------------------------------------------------------------------


def _evaluated(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    """Evaluate the closure of an optimizer that evaluates it once, before anything else."""
    if not evaluates_once(optimizer):
        raise UnsupportedError(
            "a GradScaler takes no closure for this optimizer",
            where=f"{type(optimizer).__name__}.step(closure)",
            why="it may evaluate the loss as often as it likes, with gradients that still carry the scale",
            write='amp = mezzo.MixedPrecision(model, optimizer, "O1"), and amp.step(closure=closure)\n'
            "whose closure calls amp.backward(loss)",
        )
    with torch.enable_grad():
        return closure()


def _masters(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the FP32 masters that an optimizer updates in the place of low weights, by weight."""
    masters = masters_of(optimizer)
    return {} if masters is None else {**masters.masters()}


def _keeps_halves(optimizer: Optimizer) -> bool:
    own = as_one_pass(optimizer)
    return own is not None and own.keeps_masters


def _widen(params: list[Tensor]) -> None:
    """Give low weights their gradients in FP32: what is small is lost no more."""
    for param in params:
        if param.grad is not None and param.grad.dtype in LOW:
            gradient, param.grad, param.grad_dtype = param.grad, None, None
            param.grad = gradient.float()


def _flagged(optimizer: Any, known: _Found) -> Callable[..., Any]:
    """Return an optimizer's step that is told on the device whether to skip, and what to divide by."""

    def step(*args: Any, **kwargs: Any) -> Any:
        own = getattr(optimizer, "grad_scale", None)  # what a user has set counts besides, as in torch
        scale = known.found.scale
        optimizer.grad_scale = own if known.unscaled else scale if own is None else scale * own
        optimizer.found_inf = known.found.skipped.float()
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    return step


def _on_any_rank(found: Tensor) -> Tensor:
    """Return whether any rank has found it: they step together. One small reduction on the device."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    flag = found.float()
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return flag != 0


# Words ------------------------------------------------------------------------------------------------------


def _type_of(device: Any) -> str:
    try:
        return torch.device(str(device)).type
    except RuntimeError:
        what, why = f"the device is {shown(device)}", "the first argument of GradScaler is a device type"
        raise PolicyError(what, why=why, write='GradScaler("cuda", init_scale=…)') from None


@contextlib.contextmanager
def _in_torchs_words() -> Iterator[None]:
    """Let errors about rules name torch's arguments."""
    try:
        yield
    except PolicyError as problem:
        text = str(problem).replace("LossScale", "GradScaler")
        for theirs, ours in {**TORCHS_RULES, "init_scale": "init"}.items():
            text = re.sub(rf"\b{ours}(?==| is )", theirs, text)
        raise PolicyError(text) from None
