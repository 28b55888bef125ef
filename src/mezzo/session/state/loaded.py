"""A session's state, loaded under the same policy or another that stands for the same weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import StateError, printable
from mezzo.policy import Policy
from mezzo.scale import LossScale, ScaleState
from mezzo.session.core import Core
from mezzo.session.state import other_scalers
from mezzo.session.state.differences import check
from mezzo.session.state.load_hooks import watch
from mezzo.session.window.window import Window
from mezzo.step.gradients import left_over

__all__ = ["load"]

logger = logging.getLogger(__name__)


def load(core: Core, state: Any) -> None:
    """Load what :func:`save` returned, or another library's loss scale; all is checked before anything is changed."""
    if open_windows := [group.window for group in core.groups if group.window is not None]:
        raise StateError(
            "loading would change the loss scale inside an accumulation window",
            where=f"after {open_windows[0].micro_batches} backward pass(es) since the last step",
            write="amp.step() or amp.zero_grad() first",
        )
    if (scales := other_scalers.loss_scales(state, core.policy, len(core.scalers))) is not None:
        _load_scales(core, scales)
        own = core.stats.state_dict()
        core.stats.load_state_dict(own, core.scale_tensors(), continued=False)
        return
    core.group_optimizers()
    check(core, state)
    policy = Policy.parse(state["policy"])
    if changes := policy.differences(core.policy):
        logger.info("the state was saved under another policy: %s", printable("; ".join(changes)))
    _load_loss_scales(core, policy.loss_scale, state)
    _load_masters(core, state)
    if any(state["windows"]):
        _load_windows(core, state)
    if core.buffers is not None:
        buffers = core.weights.named_buffers()
        core.buffers.recall(
            [(buffers[name], before.to(buffers[name].device, copy=True)) for name, before in state["buffers"].items()]
        )


def _load_scales(core: Core, scales: list[ScaleState]) -> None:
    core.inner_overflows.clear()
    for scaler, each in zip(core.scalers, scales, strict=True):
        scaler.load_state_dict(each.state_dict())


def _load_loss_scales(core: Core, before: LossScale, state: Mapping[str, Any]) -> None:
    """Continue the saved loss scales where the session's are of the same kind; start afresh where they are not."""
    now = core.policy.loss_scale
    same_kind = before.mode == now.mode and (now.mode == "dynamic" or before.init == now.init)
    continued = same_kind and len(state["loss_scales"]) == len(core.scalers)
    if continued:
        scales = [ScaleState.from_state_dict(_within(each, before, now)) for each in state["loss_scales"]]
    else:
        scales = [now.start() for _ in core.scalers]
    _load_scales(core, scales)
    if continued:
        found = {each["loss_id"]: each["found_inf"] for each in state["on_the_way"]}
        core.inner_overflows = {n: torch.tensor(overflow, device=core.device) for n, overflow in found.items()}
    core.stats.load_state_dict(state["stats"], core.scale_tensors(), continued=continued)


def _within(scale: Mapping[str, Any], before: LossScale, now: LossScale) -> dict[str, Any]:
    """Bring a scale within the bounds of new rules."""
    if before == now or now.mode != "dynamic":
        return dict(scale)
    highest = scale["scale"] if now.ceiling is None else min(scale["scale"], now.ceiling)
    return {**scale, "scale": float(max(highest, now.floor))}


@torch.no_grad()
def _load_masters(core: Core, state: Mapping[str, Any]) -> None:
    """Give the saved FP32 values to their keepers, or to the parameters themselves where these are FP32 now."""
    masters, weights = state["masters"], core.weights
    weights.take_edits()
    weights.restored.clear()
    stored = weights.stored(in_fp32=True)
    for name, param in weights.named_params():
        if (keeper := stored.get(param)) is not None:
            # Without a saved master, the model's own state dict has the weight, in this precision and no better.
            was = getattr(torch, state["parameters"][name].partition(" ")[0])
            keeper.write(param, masters[name] if name in masters else keeper.master_of(param).to(was).float())
        elif name in masters and param.dtype == torch.float32:
            param.copy_(masters[name])
            weights.restored.add(param)
    if weights.restored:
        watch(weights)


def _load_windows(core: Core, state: Mapping[str, Any]) -> None:
    params, masters = dict(core.weights.named_params()), core.weights.named_masters()
    # What was cleared since the last backward pass, in states that were saved before anyone took note of it.
    noted = {name for window in state["windows"] if window for name in window["beside"]}
    cleared = {name for name in noted if name not in state["gradients"]}
    for kind, tensors, without in (("gradients", params, set()), ("master_gradients", masters, cleared)):
        for name, tensor in tensors.items():
            _give_gradient(tensor, None if name in without else state[kind].get(name))
    scales = core.scale_tensors()
    scales += [scales[0].new_tensor(value) for value in state["carried_scales"][len(scales) :]]
    left, names = set(state["left"]), core.weights.names()
    for group, window in zip(core.groups, state["windows"], strict=True):
        if window:
            window = {**window, "aside": {n: total for n, total in window["aside"].items() if n not in cleared}}
        group.resume(window and Window.from_state_dict(window, scales, {**params, **masters}))
        theirs = (param.grad for param in group.params() if names.get(id(param)) in left)
        group.stale = left_over(gradient for gradient in theirs if gradient is not None)
    carrying = [group for group in core.groups if group.window and group.window.carries_scale]
    core.edits.remember(leaf for group in carrying for leaf in group.leaves())


def _give_gradient(param: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter a copy of a gradient, whose dtype was found to fit."""
    param.grad = None
    if gradient is not None:
        given: Any = param
        if getattr(param, "grad_dtype", None) not in (None, gradient.dtype):
            given.grad_dtype = gradient.dtype
        param.grad = gradient.to(param.device, copy=True)
