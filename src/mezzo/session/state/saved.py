"""A session's state, saved whole: plain containers and tensors, gradients in mid-window among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mezzo.errors import StateError, some_of
from mezzo.session.core import Core
from mezzo.session.state.schema import STATE_VERSION
from mezzo.step.gradients import is_left
from mezzo.tensors import described

__all__ = ["save"]


def save(core: Core) -> dict[str, Any]:
    """Return a session's state as plain containers and tensors."""
    core.weights.take_edits()
    for group in core.groups:
        group.wide.agree()
        group.take_clearing()
    scales = core.scale_tensors()

    def number_of(scale: Tensor) -> int:
        """Return a scale's place among those that gradients carry: which one it is counts, not only its value."""
        if not any(scale is known for known in scales):
            scales.append(scale)
        return next(number for number, known in enumerate(scales) if known is scale)

    names = core.weights.names()
    _refuse_nameless(core, names)
    windows = [g.window and g.window.state_dict(lambda t: names[id(t)], number_of) for g in core.groups]
    gradients, master_gradients, left = _gradients(core, names) if any(windows) else ({}, {}, [])
    return {
        "version": STATE_VERSION,
        "policy": str(core.policy),
        "parameters": {name: described(param) for name, param in core.weights.named_params()},
        "loss_scales": [scaler.state_dict() for scaler in core.scalers],
        "stats": core.stats.state_dict(),
        "masters": _masters(core),
        "windows": windows,
        "carried_scales": [float(scale) for scale in scales],
        "on_the_way": [{"loss_id": n, "found_inf": bool(found)} for n, found in core.inner_overflows.items()],
        "gradients": gradients,
        "master_gradients": master_gradients,
        "left": left,
        "buffers": {name: before.clone() for name, (_, before) in _remembered(core).items()},
    }


def _masters(core: Core) -> dict[str, Tensor]:
    """Return a copy of every FP32 value that the parameters themselves lack."""
    stored = core.weights.stored(in_fp32=True)
    named = ((name, param) for name, param in core.weights.named_params() if param in stored)
    return {name: stored[param].master_of(param).detach().clone() for name, param in named}


def _refuse_nameless(core: Core, names: Mapping[int, str]) -> None:
    """Refuse to lose what only the session knows of parameters that were added without a model."""
    masters = {id(master) for each in core.weights.masters.values() for master in each.masters().values()}
    has_window = any(group.window for group in core.groups)
    nameless = [param for param in core.weights.updated() if id(param) not in names]
    if lost := [described(param) for param in nameless if has_window or id(param) in masters]:
        raise StateError(
            "an optimizer updates parameters that belong to no model of the session",
            where=some_of(lost),
            why="their masters, and their gradients inside an accumulation window, have no name to be saved under",
            write="MixedPrecision([model, what_holds_them], optimizer, policy)",
        )


def _gradients(core: Core, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return the gradients of parameters and of masters, and the names of those that a step has left over."""
    masters = core.weights.named_masters()
    # After unscale_ a parameter shows its master's own gradient.
    shown = {id(master.grad) for master in masters.values() if master.grad is not None}
    params = core.weights.named_params()
    gradients = {name: p.grad.clone() for name, p in params if p.grad is not None and id(p.grad) not in shown}
    left = [
        names[id(param)]
        for group in core.groups
        for param in group.params()
        if param.grad is not None and is_left(param.grad, group.stale)
    ]
    held = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
    return gradients, held, left


def _remembered(core: Core) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the buffers that a skipped step puts back, and what it puts back, by name."""
    pairs = [] if core.buffers is None else core.buffers.remembered()
    by_id = {id(buffer): (buffer, before) for buffer, before in pairs}
    return {name: by_id[id(buffer)] for name, buffer in core.weights.named_buffers().items() if id(buffer) in by_id}
