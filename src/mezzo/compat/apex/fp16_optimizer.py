"""``FP16_Optimizer``: masters and a loss scale around the optimizer of a model that is FP16 already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import PolicyError, StateError, nearest, shown
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.session.attached import Standing, Words
from mezzo.session.refusals.beginning import listed_optimizers
from mezzo.tensors import LOW

__all__ = ["FP16_Optimizer"]

_KEYS: Final = ("loss_scaler", "dynamic_loss_scale", "optimizer_state_dict", "fp32_from_fp16")
_DYNAMIC: Final = {"init_scale": 2.0**32, "scale_factor": 2.0, "scale_window": 1000}


class FP16_Optimizer:  # noqa: N801 - apex's name
    """Train a model that is FP16 already, such as ``model.half()``, with FP32 masters and a loss scale.

    Parameters in FP32, batch norm's for instance, stay what they are. The optimizer that is wrapped works with the
    masters; schedulers take it: ``StepLR(optimizer.optimizer, …)``.

    Args:
        init_optimizer: An optimizer over the model's parameters.
        static_loss_scale: The loss scale.
        dynamic_loss_scale: Let the scale follow the gradients instead: from 2^32 down by halves at each overflow, and
            doubled after 1000 steps without, never below 1.
        dynamic_loss_args: Other values for that: ``init_scale``, ``scale_factor``, ``scale_window``.
        verbose: Accepted, and not used: skipped steps are logged by the session.

    Raises:
        PolicyError: Unknown ``dynamic_loss_args``, or no optimizer.
        StateError: The optimizer has masters already.

    **Cost**: that of :class:`mezzo.MixedPrecision` with masters; ``overflow`` and ``clip_master_grads`` wait for the
    device.

    Example:
        >>> import torch
        >>> from mezzo.compat.apex import FP16_Optimizer
        >>> model = torch.nn.Linear(8, 1).half()
        >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        >>> loss = model(torch.ones(4, 8).half()).float().mean()
        >>> optimizer.zero_grad()
        >>> optimizer.backward(loss)
        >>> optimizer.step()
        >>> optimizer.overflow, optimizer.loss_scale  # 2^32 is too much for FP16
        (True, 2147483648.0)
        >>> optimizer.close()
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        scale = _dynamic(dynamic_loss_args or {}) if dynamic_loss_scale else LossScale.constant(static_loss_scale)
        (self.optimizer,) = listed_optimizers(init_optimizer, "FP16_Optimizer(optimizer)")
        self.dynamic_loss_scale = dynamic_loss_scale
        groups: list[list[Tensor]] = [group["params"] for group in self.optimizer.param_groups]
        self._low = [[param for param in params if param.dtype in LOW] for params in groups]
        self._model = nn.ParameterList(param for params in groups for param in params)
        policy = Policy.O0(loss_scale=scale)
        if kinds := {param.dtype for params in self._low for param in params}:
            dtype = torch.bfloat16 if kinds == {torch.bfloat16} else torch.float16  # both are refused, by name
            wide = [name for name, param in self._model.named_parameters() if param.dtype not in LOW]
            policy = Policy.O2(dtype, loss_scale=scale).keep_fp32(params=wide)
        self._standing = Standing(
            [self._model], [self.optimizer], policy, words=Words(backward="optimizer.backward(loss)")
        )
        self._attached, self._amp = self._standing.attached, self._standing.attached.amp
        self._found: Tensor | None = None

    def __getstate__(self) -> Any:
        raise StateError("an FP16_Optimizer cannot be pickled", write="torch.save(optimizer.state_dict(), path)")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, with masters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The optimizer's own."""
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the last gradients were not finite; waits for the device."""
        return self._found is not None and bool(self._found)

    @property
    def loss_scale(self) -> float:
        """The loss scale; it may be set between two steps. Waits for the device."""
        return float(self._amp.loss_scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._attached.set_scale(value)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss.

        Args:
            loss: The loss.
            update_master_grads: Whether to unscale at once; with several losses the last call may do it for all.
            retain_graph: As ``Tensor.backward`` takes it.
        """
        self._standing.scaled(loss, 0, [self.optimizer]).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the gradients: the masters' are FP32 then."""
        self._found = self._attached.judge(adapts=False)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients, group by group; ``None`` where they are not finite."""
        if self.overflow:
            return None
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in self.param_groups]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients together.

        Args:
            max_norm: To what.
            norm_type: Which norm.

        Returns:
            Their norm before; -1 where they are not finite.
        """
        return -1 if self.overflow else nn.utils.clip_grad_norm_(list(self._amp.master_params()), max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and round them into the model; skip where gradients were not finite.

        Args:
            closure: Clears the gradients, computes the loss, and calls ``optimizer.backward(loss)``.

        Returns:
            What the closure returned first.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)  # which is taken over

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - apex's name
        """Clear the gradients of model and masters.

        Args:
            set_grads_to_None: Whether to remove them, or fill them with zeros.
        """
        self._amp.zero_grad(set_to_none=set_grads_to_None)

    def state_dict(self) -> dict[str, Any]:
        """Return scale, optimizer and masters under apex's names, as plain containers and tensors."""
        (scale,) = self._attached.scales()
        return {
            "loss_scaler": {"loss_scale": scale["scale"], "unskipped": scale["clean_steps"]},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self._fp32_values(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or one of apex's, whose ``loss_scaler`` is an object of apex's.

        Raises:
            StateError: No such state, or one of other parameters. Nothing was loaded.
        """
        if missing := [key for key in _KEYS if key not in state_dict]:
            raise StateError("this is no state of an FP16_Optimizer", where=f"it lacks {', '.join(missing)}")
        scaler = state_dict["loss_scaler"]
        fields = scaler if isinstance(scaler, Mapping) else {"loss_scale": scaler.cur_scale, "unskipped": 0}
        self._load_fp32_values(state_dict["fp32_from_fp16"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self._attached.set_scale(fields["loss_scale"])
        if self.dynamic_loss_scale:
            self._amp.load_state_dict({"loss_scaler0": dict(fields)})

    def _fp32_values(self) -> list[list[Tensor]]:
        """Return copies of the FP32 values of low-precision parameters, group by group."""
        updated = zip(self._model.parameters(), self._amp.master_params(), strict=True)
        of: dict[Tensor, Tensor] = dict(updated)
        return [[of[param].detach().clone() for param in params] for params in self._low]

    def _load_fp32_values(self, saved: Iterable[Iterable[Any]]) -> None:
        """Take FP32 values over, and round them into the parameters."""
        given = [list(each) for each in saved]
        if [[each.shape for each in group] for group in given] != [[p.shape for p in params] for params in self._low]:
            raise StateError(
                "these are masters of other parameters",
                why="their number or their shapes differ",
                write="the state of an optimizer over the same parameters, in the same groups",
            )
        names: dict[Tensor, str] = {param: name for name, param in self._model.named_parameters()}
        pairs = zip(itertools.chain(*self._low), itertools.chain(*given), strict=True)
        self._model.load_state_dict({names[param]: master for param, master in pairs}, strict=False)

    def close(self) -> None:
        """End it: the optimizer is as it was, over the model's FP16 parameters."""
        self._standing.end()


def _dynamic(args: Mapping[str, Any]) -> LossScale:
    if unknown := [key for key in args if key not in _DYNAMIC]:
        why = nearest(str(unknown[0]), _DYNAMIC)
        what = f"unknown dynamic_loss_args {shown(unknown[0])}"
        raise PolicyError(what, where="FP16_Optimizer", why=why, write='dynamic_loss_args={"scale_window": 500}')
    init, factor, window = {**_DYNAMIC, **args}.values()
    return LossScale.dynamic(
        init=init, growth=factor, backoff=1 / factor, interval=int(window), floor=1.0, ceiling=None
    )
