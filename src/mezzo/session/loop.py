"""``MixedPrecision``: a model, an optimizer and a policy, tied into a training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mezzo.cast.modules import Prepared
from mezzo.cast.region import autocast
from mezzo.errors import StateError
from mezzo.policy import Policy
from mezzo.scale.scaler import Scaler
from mezzo.session.checks import (
    STATE_VERSION,
    check_loss,
    check_session,
    check_state,
    checked_schedulers,
    listed,
    refuse_fp16_unscaling,
)
from mezzo.session.gradients import dense, global_norm, multiply, step_or_skip
from mezzo.step.master import MasterWeights

__all__ = ["MixedPrecision", "Step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step did. Reading a field as a Python value waits for the device.

    Attributes:
        skipped: 0-d bool: whether a gradient was not finite, so that nothing was updated.
        scale: 0-d float32: the loss scale that this step's gradients carried.
        next_scale: 0-d float32: the loss scale from now on.
        grad_norm: 0-d float32: 2-norm of all unscaled gradients, before clipping.
    """

    skipped: Tensor
    scale: Tensor
    next_scale: Tensor
    grad_norm: Tensor


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return what tells one writing of a tensor from the next."""
    return tensor.data_ptr(), tensor._version


@dataclass(frozen=True, slots=True)
class _Window:
    """The micro-batches since the last step, and the scale that their gradients carry."""

    scale: Tensor
    version: int
    micro_batches: int


class MixedPrecision:
    """Train models under a policy: five lines in a training loop.

    Every step checks all gradients before anything is written: one that is not finite skips the step, whatever the
    policy. Gradients are unscaled before they are clipped, so that no hyper-parameter changes its meaning.

    Args:
        models: The model, or a list of models. Converted in place where the policy stores them in low precision.
        optimizers: The optimizer, or a list of them, over parameters of these models.
        policy: A :class:`Policy`, its text, or the path of a policy file.
        max_grad_norm: Clip the 2-norm of all gradients together to this; ``None`` does not clip.
        device: Where the loss scale lives; the first parameter's device when omitted.

    Raises:
        PolicyError: A wrong policy, or an optimizer over parameters that are not the models'.
        UnsupportedError: The device or the model cannot honour the policy.
        StateError: The optimizer's state cannot be carried over exactly, or a model is prepared already.
            Whatever is raised, models and optimizers are as they were.

    **Cost**: per step one pass that reads the gradients (their norm is also the overflow check) and one that
    multiplies them by clip coefficient / scale, left out where that is 1. One host sync to learn whether to skip,
    none with torch's fused optimizers, which skip on the device (but one while fused SGD has momentum to allocate).

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16", max_grad_norm=1.0)
        >>> with amp.autocast():
        ...     loss = model(torch.ones(4, 8)).square().mean()
        >>> amp.backward(loss)
        >>> step = amp.step()
        >>> amp.zero_grad()
        >>> bool(step.skipped)
        False

    References:
        Micikevicius et al., *Mixed Precision Training*, ICLR 2018.
    """

    def __init__(
        self,
        models: nn.Module | Iterable[nn.Module],
        optimizers: Optimizer | Iterable[Optimizer],
        policy: Policy | str | os.PathLike[str] = "O1",
        *,
        max_grad_norm: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.policy = Policy.of(policy)
        self.max_grad_norm = max_grad_norm
        self._models = [models] if isinstance(models, nn.Module) else list(models)
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else listed(optimizers)
        check_session(self._models, self._optimizers, self.policy, max_grad_norm, device)
        self._prepared: list[Prepared] = []
        self._masters: list[MasterWeights] = []
        self._guards: list[RemovableHandle] = []
        self._window: _Window | None = None
        self._rescaled: set[tuple[int, int]] = set()
        self._stepping = self._closed = False
        first = next(self.master_params())
        self._scaler = Scaler(self.policy.loss_scale, device if device is not None else first.device)
        try:
            self._convert()
        except BaseException:
            self._undo()
            raise
        if self.policy.dtype != torch.float32:
            kind = "emulated in float32" if self.emulated else "native"
            logger.info("%s arithmetic on %s is %s", self.policy.dtype, first.device.type, kind)

    def _convert(self) -> None:
        for optimizer in self._optimizers:  # before the masters' own hooks, so that nothing is gathered either
            self._guards.append(optimizer.register_step_pre_hook(self._refuse_foreign_step))
        for model in self._models:
            self._prepared.append(Prepared(model, self.policy))
        refuse_fp16_unscaling(self._models, self._optimizers, self.policy)
        if self.policy.master_weights:
            originals = {t: data for prepared in self._prepared for t, data in prepared.converted.items()}
            for optimizer in self._optimizers:
                self._masters.append(MasterWeights(optimizer, grad_dtype="param", originals=originals))
        for prepared in self._prepared:
            prepared.release_originals()

    def _undo(self) -> None:
        for guard in self._guards:
            guard.remove()
        # Backwards, since the first of two models that share a parameter knows what it was before.
        for prepared in reversed(self._prepared):
            prepared.remove()
        for masters in self._masters:
            masters.remove()

    def _refuse_foreign_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._window is not None and not self._stepping:
            raise StateError(
                "optimizer.step() behind the session's back",
                where=f"{type(optimizer).__name__}, after {self._window.micro_batches} amp.backward() call(s)",
                why="the gradients still carry the loss scale, and were neither checked nor clipped",
                write="amp.step()",
            )

    def __deepcopy__(self, memo: Any) -> MixedPrecision:
        raise StateError(
            "a session cannot be copied",
            why="the copied optimizer would have no hooks, and would never update the copied model",
            write="copy.deepcopy(model), then MixedPrecision(copied_model, new_optimizer, policy)",
        )

    def __reduce__(self) -> Any:
        raise StateError("a session cannot be pickled", write="torch.save(amp.state_dict(), path)")

    # The loop -----------------------------------------------------------------------------------------

    @property
    def emulated(self) -> bool:
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on this device."""
        return self.autocast().emulated

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, 0-d float32 on the device."""
        return self._scaler.state.scale

    def autocast(self) -> autocast:
        """Return the region to run the forward pass and the loss in."""
        self._require_open("autocast")
        return self._prepared[0].autocast(*self._prepared[1:])

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale a loss and run its backward pass; call it again to accumulate, or for another loss.

        Gradients of low-precision parameters that have masters are summed in FP32 from the second call on.

        Args:
            loss: A floating scalar.
            **kwargs: As ``Tensor.backward`` takes them: ``retain_graph``, ``create_graph``, ``inputs``.

        Raises:
            PolicyError: The loss is not a floating scalar.
            StateError: The loss depends on no parameter, or the scale was changed since the last ``backward``.
        """
        self._require_open("backward")
        check_loss(loss)
        scale = self._scaler.state.scale
        if self._window is None:
            self._refuse_leftovers()
        elif self._window.scale is not scale or self._window.version != scale._version:
            raise StateError(
                "the loss scale was changed inside an accumulation window",
                where=f"after {self._window.micro_batches} backward pass(es) since the last step",
                why="their gradients carry another scale, and the sum would mix the two",
                write="amp.step() or amp.zero_grad() first",
            )
        else:
            for masters in self._masters:
                masters.gather()
        self._window = _Window(scale, scale._version, self._window.micro_batches + 1 if self._window else 1)
        self.autocast().run_backward(self._scaler.scaled(loss), **kwargs)

    def _refuse_leftovers(self) -> None:
        """Refuse to add scaled gradients to those that the last step unscaled."""
        if any(p.grad is not None and _mark(p.grad) in self._rescaled for p in self.master_params()):
            raise StateError(
                "the last step's gradients are still there",
                why="they are unscaled by now, and the new ones would be added to them with the loss scale",
                write="amp.zero_grad() after each amp.step()",
            )
        self._rescaled.clear()

    @torch.no_grad()
    def step(self, *, scheduler: Any = None) -> Step:
        """Check the gradients, unscale and clip them, update or skip, and adapt the loss scale.

        Args:
            scheduler: A learning-rate scheduler (or a list of them) to step only if the weights were. Needs one
                host sync.

        Returns:
            What happened, as device tensors.

        Raises:
            StateError: No ``backward`` since the last step, or no parameter has a gradient.
        """
        self._require_open("step")
        window = self._window
        if window is None:
            raise StateError("step() before backward()", write="amp.backward(loss), then amp.step()")
        if window.scale is not self._scaler.state.scale or window.version != window.scale._version:
            raise StateError(
                "the loss scale was changed inside an accumulation window",
                why="the gradients carry the scale they were made with",
                write="amp.zero_grad(), then amp.backward(loss) again",
            )
        schedulers = checked_schedulers(scheduler)
        for masters in self._masters:
            masters.take_edits()
            masters.gather()
        params = {id(param): param for param in self.master_params()}.values()  # optimizers may share some
        gradients = [dense(param, param.grad) for param in params if param.grad is not None]
        if not gradients:
            raise StateError(
                "no parameter has a gradient",
                why="every optimizer's gradients are None: frozen, detached, or cleared since backward()",
                write="amp.zero_grad() only after amp.step()",
            )
        device = window.scale.device
        inverse = self._scaler.state.inverse()
        # The norm of the scaled gradients times 1/scale also finds an infinity that unscaling would make.
        norm = global_norm(gradients, device) * inverse
        found_inf = ~torch.isfinite(norm)
        self._window = None  # whatever happens from here on, these gradients are not the scaled ones any more
        self._rescale(gradients, norm, inverse)
        self._stepping = True
        try:
            for optimizer in self._optimizers:
                step_or_skip(optimizer, found_inf)
        finally:
            self._stepping = False
        for masters in self._masters:
            masters.drop_gradients()
        self._scaler.update(found_inf)
        self._forget_casts()
        step = Step(skipped=found_inf, scale=window.scale, next_scale=self._scaler.state.scale, grad_norm=norm)
        if schedulers and not bool(found_inf):
            for each in schedulers:
                each.step()
        return step

    def _rescale(self, gradients: list[Tensor], norm: Tensor, inverse: Tensor) -> None:
        """Multiply gradients by clip coefficient / scale, in one pass, unless that is 1 by construction."""
        multiplier = inverse
        if self.max_grad_norm is not None:
            # torch.nn.utils.clip_grad_norm_'s coefficient, its epsilon included
            multiplier = inverse * torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        elif not self._scaler.changes_gradients:
            return
        multiply(gradients, multiplier)
        if self._scaler.changes_gradients:
            self._rescaled = {_mark(gradient) for gradient in gradients}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of models and masters, and forget an unfinished accumulation window."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)
        for model in self._models:
            model.zero_grad(set_to_none)
        self._forget_casts()
        self._window = None

    def _forget_casts(self) -> None:
        for prepared in self._prepared:
            prepared.casts.clear()

    def master_params(self, optimizer: Optimizer | None = None) -> Iterator[Tensor]:
        """Yield the tensors that the optimizers update: FP32 masters, or the parameters themselves.

        Args:
            optimizer: One of the session's optimizers; all when omitted.
        """
        for each in self._optimizers:
            if optimizer is None or each is optimizer:
                for group in each.param_groups:
                    yield from group["params"]

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the models' and optimizers' own state dicts lack.

        The loss scale with its counters, the masters, and in the middle of an accumulation window the gradients.
        Plain containers and tensors: ``torch.load(weights_only=True)`` reads it back.

        **Cost**: a host sync, and a copy of the masters.
        """
        self._require_open("state_dict")
        for masters in self._masters:
            masters.take_edits()
        open_window = self._window is not None
        gradients = {n: p.grad.clone() for n, p in self._named_params() if open_window and p.grad is not None}
        named = self._named_masters()
        return {
            "version": STATE_VERSION,
            "policy": str(self.policy),
            "parameters": self._fingerprint(),
            "loss_scale": self._scaler.state_dict(),
            "masters": {name: master.detach().clone() for name, master in named.items()},
            "micro_batches": self._window.micro_batches if self._window else 0,
            "gradients": gradients,
            "master_gradients": {n: m.grad.clone() for n, m in named.items() if open_window and m.grad is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the models' and optimizers' own may be loaded before or after.

        Raises:
            StateError: Another policy or model (all differences listed), an unfinished accumulation window, or not
                a session's state. Nothing was loaded.
        """
        self._require_open("load_state_dict")
        if self._window is not None:
            raise StateError(
                "loading would change the loss scale inside an accumulation window",
                where=f"after {self._window.micro_batches} backward pass(es) since the last step",
                write="amp.step() or amp.zero_grad() first",
            )
        check_state(state, self.policy, self._fingerprint(), self._named_masters())
        self._scaler.load_state_dict(state["loss_scale"])
        with torch.no_grad():
            for name, master in self._named_masters().items():
                master.copy_(state["masters"][name])
        for masters in self._masters:
            masters.round_to_params()
        if state["micro_batches"]:
            self._load_window(state)

    def _load_window(self, state: Mapping[str, Any]) -> None:
        scale = self._scaler.state.scale
        self._window = _Window(scale, scale._version, int(state["micro_batches"]))
        for name, param in self._named_params():
            saved = state["gradients"].get(name)
            param.grad = None if saved is None else saved.to(param.device, copy=True)
        for name, master in self._named_masters().items():
            saved = state["master_gradients"].get(name)
            master.grad = None if saved is None else saved.to(master.device, copy=True)

    def _named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, model in enumerate(self._models):
            prefix = f"{number}." if len(self._models) > 1 else ""
            for name, param in model.named_parameters():
                yield prefix + name, param

    def _named_masters(self) -> dict[str, nn.Parameter]:
        held = {param: master for masters in self._masters for param, master in masters.masters().items()}
        return {name: held[param] for name, param in self._named_params() if param in held}

    def _fingerprint(self) -> dict[str, str]:
        return {n: f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for n, p in self._named_params()}

    def close(self) -> None:
        """Undo the preparation: FP32 weights with the masters' values, and the optimizers as they were built."""
        if self._closed:
            return
        for masters in self._masters:
            masters.take_edits()
        self.zero_grad()
        self._undo()
        self._closed = True

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise StateError(f"{call}() after close()", write="a new MixedPrecision(model, optimizer, policy)")
