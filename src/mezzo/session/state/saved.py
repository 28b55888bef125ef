"""A session's state, saved whole, and loaded under the same policy or another that stands for the same weights.

Plain containers and tensors, in the middle of an accumulation window the gradients among them.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import StateError, printable, some_of
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.session.core import Core
from mezzo.session.state import other_scalers
from mezzo.session.state.load_hooks import watch
from mezzo.session.state.refusals import STATE_VERSION, check
from mezzo.session.window.window import Window
from mezzo.step.gradients import is_left, left_over
from mezzo.tensors import described

__all__ = ["load", "refuse_nameless", "save"]

logger = logging.getLogger(__name__)


# Saving ---------------------------------------------------------------------------------------------------


def save(core: Core, *, weights: bool = True) -> dict[str, Any]:
    """Return a session's state as plain containers and tensors.

    Args:
        core: The session.
        weights: Whether the masters are part of it.
    """
    core.weights.take_edits()
    for group in core.groups:
        group.wide.agree()
        group.take_clearing()
    scales = {id(scale): scale for scale in core.scale_tensors()}

    def number_of(scale: Tensor) -> int:
        """Return a scale's place among those that gradients carry: which one it is counts, not only its value."""
        scales[id(scale)] = scale
        return list(scales).index(id(scale))

    names = core.weights.names()
    has_window = any(group.window for group in core.groups)
    held = {id(master) for each in core.weights.masters.values() for master in each.masters().values()}
    refuse_nameless(core, names, None if has_window else held)
    windows = [g.window and g.window.state_dict(lambda t: names[id(t)], number_of) for g in core.groups]
    gradients, master_gradients, left = _gradients(core, names) if any(windows) else ({}, {}, [])
    return {
        "version": STATE_VERSION,
        "policy": str(core.policy),
        "parameters": {name: described(param) for name, param in core.weights.named_params()},
        "loss_scales": [scaler.state_dict() for scaler in core.scalers],
        "stats": core.stats.state_dict(),
        "masters": _masters(core) if weights else {},
        "windows": windows,
        "carried_scales": [float(scale) for scale in scales.values()],
        "on_the_way": [{"loss_id": n, "found_inf": bool(found)} for n, found in core.inner_overflows.items()],
        "gradients": gradients,
        "master_gradients": master_gradients,
        "left": left,
        "buffers": _remembered(core),
        **({"rank": core.place} if _is_of_one_rank(core) else {}),
    }


def _is_of_one_rank(core: Core) -> bool:
    """Whether the gradients of an open window are, or may be, this rank's own.

    Raises:
        StateError: A wrapper is still to reduce them, which no other one would know of.
    """
    waiting = [group.waiting for group in core.groups if group.window]
    if core.consensus is not None and any(each.is_known and not each.is_reduced for each in waiting):
        raise StateError(
            "gradients that DistributedDataParallel has not reduced yet cannot be saved",
            where=f"{core.place}, in the middle of an accumulation window",
            why="where they are loaded nothing would know that they are still to be reduced",
            write="amp.state_dict() after amp.step(), or after a backward pass outside amp.no_sync()",
        )
    return core.consensus is not None and any(not (each.is_known and each.is_reduced) for each in waiting)


def _masters(core: Core) -> dict[str, Tensor]:
    """Return a copy of every FP32 value that the parameters themselves lack."""
    core.weights.take_thawed()
    stored = core.weights.stored(in_fp32=True)
    named = ((name, param) for name, param in core.weights.named_params() if param in stored)
    return {name: stored[param].master_of(param).detach().clone() for name, param in named}


def refuse_nameless(core: Core, names: Mapping[int, str], among: Container[int] | None = None) -> None:
    """Refuse to lose what is known of parameters that were added without a model.

    Args:
        core: The session.
        names: The names that there are, by ``id``.
        among: The ``id`` of those that count; all when omitted.
    """
    nameless = [param for param in core.weights.updated() if id(param) not in names]
    if lost := [described(param) for param in nameless if among is None or id(param) in among]:
        raise StateError(
            "an optimizer updates parameters that belong to no model of the session",
            where=some_of(lost),
            why="what is kept for them, masters or gradients of an unfinished window, has no name to be saved under",
            write="MixedPrecision([model, what_holds_them], optimizer, policy)",
        )


def _gradients(core: Core, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return the gradients of parameters and of masters, and the names of those that a step has left over."""
    masters = core.weights.named_masters()
    # After unscale_ a parameter shows its master's own gradient.
    shown = {id(master.grad) for master in masters.values() if master.grad is not None}
    params = core.weights.named_params()
    gradients = {name: p.grad.clone() for name, p in params if p.grad is not None and id(p.grad) not in shown}
    there = ((group, param, param.grad) for group in core.groups for param in group.params())
    left = [names[id(p)] for group, p, found in there if found is not None and is_left(found, group.stale)]
    held = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
    return gradients, held, left


def _remembered(core: Core) -> dict[str, Tensor]:
    """Return a copy of what a skipped step puts back, by the names of the buffers."""
    before = {} if core.buffers is None else core.buffers.before
    return {name: before[each].clone() for name, each in core.weights.named_buffers().items() if each in before}


# Loading --------------------------------------------------------------------------------------------------


def load(core: Core, state: Any, *, weights: bool = True) -> None:
    """Load what :func:`save` returned, or another library's loss scale; all is checked before anything is changed.

    Args:
        core: The session.
        state: The state.
        weights: Whether to load the masters, too; else the weights are those of the models' own states.
    """
    if open_windows := [group.window for group in core.groups if group.window is not None]:
        raise StateError(
            "loading would change the loss scale inside an accumulation window",
            where=f"after {open_windows[0].micro_batches} backward pass(es) since the last step",
            write="amp.step() or amp.zero_grad() first",
        )
    if (scales := other_scalers.loss_scales(state, core.policy, len(core.scalers))) is not None:
        _load_scales(core, [scale.state_dict() for scale in scales])
        core.stats.load_state_dict(core.stats.state_dict(), core.scale_tensors(), continued=False)
        return
    core.group_optimizers()
    check(core, state)
    policy = Policy.parse(state["policy"])
    if changes := policy.differences(core.policy):
        logger.info("the state was saved under another policy: %s", printable("; ".join(changes)))
    _load_loss_scales(core, policy.loss_scale, state)
    if weights:
        _load_masters(core, state)
    if any(state["windows"]):
        _load_windows(core, state)
    if core.buffers is not None:
        named, saved = core.weights.named_buffers(), state["buffers"]
        core.buffers.before = {named[name]: each.to(named[name].device, copy=True) for name, each in saved.items()}


def _load_scales(core: Core, scales: list[dict[str, Any]]) -> None:
    core.inner_overflows.clear()
    for scaler, each in zip(core.scalers, scales, strict=True):
        scaler.load_state_dict(each)


def _load_loss_scales(core: Core, before: LossScale, state: Mapping[str, Any]) -> None:
    """Continue the saved loss scales where the session's are of the same kind; start afresh where they are not."""
    now = core.policy.loss_scale
    same_kind = before.mode == now.mode and (now.mode == "dynamic" or before.init == now.init)
    continued = same_kind and len(state["loss_scales"]) == len(core.scalers)
    fresh = [now.start().state_dict()] * len(core.scalers)
    _load_scales(core, [_within(each, before, now) for each in state["loss_scales"]] if continued else fresh)
    if continued:
        found = {each["loss_id"]: each["found_inf"] for each in state["on_the_way"]}
        core.inner_overflows = {n: torch.tensor(overflow, device=core.device) for n, overflow in found.items()}
    core.stats.load_state_dict(state["stats"], core.scale_tensors(), continued=continued)


def _within(scale: Mapping[str, Any], before: LossScale, now: LossScale) -> dict[str, Any]:
    """Return the state of a scale, whatever else was saved beside it, within the bounds of new rules."""
    found = {key: scale[key] for key in now.start().state_dict()}
    if before != now and now.mode == "dynamic":
        highest = found["scale"] if now.ceiling is None else min(found["scale"], now.ceiling)
        found["scale"] = float(max(highest, now.floor))
    return found


@torch.no_grad()
def _load_masters(core: Core, state: Mapping[str, Any]) -> None:
    """Give the saved FP32 values to their keepers, or to the parameters themselves where these are FP32 now."""
    masters, weights = state["masters"], core.weights
    weights.take_edits()
    weights.take_thawed()
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
    # What was cleared since the last backward pass, in states of earlier versions, which took no note of it.
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


def _give_gradient(param: Any, gradient: Tensor | None) -> None:
    """Give a parameter a copy of a gradient, whose dtype was found to fit."""
    param.grad = None
    if gradient is not None:
        if param.grad_dtype not in (None, gradient.dtype):
            param.grad_dtype = gradient.dtype
        param.grad = gradient.to(param.device, copy=True)
