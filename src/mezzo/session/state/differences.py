"""Why a saved state cannot be continued by a session: every difference, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import StateError, printable, shown
from mezzo.policy import Policy
from mezzo.session.core import Core
from mezzo.session.state.load_hooks import overflows
from mezzo.session.state.schema import STATE_VERSION, wrong_values
from mezzo.tensors import described, dtype_name

__all__ = ["check"]

#: Lines of a message that lists differences; another model has a great many.
_LINES: Final = 40


def check(core: Core, state: Any) -> None:
    """Refuse a state that cannot be continued here, with every difference."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if isinstance(version, int) and version != STATE_VERSION:
        raise StateError(f"the state has version {shown(version)}", why=f"this mezzo reads version {STATE_VERSION}")
    if wrong := wrong_values(state):
        raise StateError(
            "this is not the state of a MixedPrecision session", where=_listed(wrong), write="amp.state_dict()"
        )
    if differences := [*_weights(core, state), *_unfinished(core, state)]:
        policies = [f"policy {line}" for line in Policy.parse(state["policy"]).differences(core.policy)]
        raise StateError(
            "the state belongs to another session",
            where=_listed([*policies, *differences]),
            why="saved → this session; continuing would not be the same run",
            write="MixedPrecision(model, optimizer, policy) with the saved policy and model",
        )


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "\n".join([*map(printable, lines[:_LINES]), *more])


def _weights(core: Core, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that is another one, or whose weights would lose bits."""
    before, mine = state["parameters"], dict(core.weights.named_params())
    stored = core.weights.stored(in_fp32=True)
    held = {*core.weights.named_masters(), *(name for name, param in mine.items() if param in stored)}
    updated = {id(param) for param in core.weights.updated()}
    for name in dict.fromkeys((*before, *mine)):
        was = before.get(name, "missing")
        now = described(mine[name]) if name in mine else "missing"
        dtype, _, shape = was.partition(" ")
        if name not in mine or shape != now.partition(" ")[2]:
            yield f"parameter {name}: {was} → {now}"
            continue
        has_master = name in state["masters"]
        exact, place = "float32" if has_master else dtype, "float32" if name in held else now.partition(" ")[0]
        fits = exact == place or (place == "float32" and exact in ("float16", "bfloat16"))
        # What no optimizer updates has no other weights than those that the policy rounds.
        if not fits and (has_master or id(mine[name]) in updated):
            yield f"parameter {name}: {was}{' with a master' if has_master else ''} → {now} without a master"
        elif has_master and overflows(state["masters"][name], mine[name].dtype):
            yield f"parameter {name}: values beyond {torch.finfo(mine[name].dtype).max:g} → {now}"


def _unfinished(core: Core, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be the same for loss scales, and for gradients in the middle of a window."""
    policy, has_windows = Policy.parse(state["policy"]), any(state["windows"])
    scales = len(state["loss_scales"])
    is_used = policy.loss_scale.mode == core.policy.loss_scale.mode != "none" or has_windows or state["on_the_way"]
    if scales != len(core.scalers) and is_used:
        yield f"losses: {scales} → {len(core.scalers)}"
    if has_windows:
        if policy.differences(core.policy):
            yield "gradients of an unfinished accumulation window, which belong to the saved policy"
        if len(state["windows"]) != len(core.groups):
            yield f"optimizers with gradients: {len(state['windows'])} → {len(core.groups)}"
        wide, held = {id(p) for group in core.groups for p in group.wide.params()}, core.weights.named_masters()
        for name, param in core.weights.named_params():
            gradient, dtypes = state["gradients"].get(name), _gradient_dtypes(param, summed_in_fp32=id(param) in wide)
            if gradient is not None and gradient.dtype not in dtypes:
                fits = " or ".join(dtype_name(dtype) for dtype in dtypes)
                yield f"gradient of {name}: {described(gradient)} → {fits}"
        yield from (
            f"gradient of {name} in a master → no master" for name in state["master_gradients"] if name not in held
        )
    buffers = core.weights.named_buffers()
    for name, before in state["buffers"].items() if core.buffers is not None else ():
        if name not in buffers or described(buffers[name]) != described(before):
            now = described(buffers[name]) if name in buffers else "missing"
            yield f"buffer {name}: {described(before)} → {now}"


def _gradient_dtypes(param: Tensor, *, summed_in_fp32: bool) -> list[torch.dtype]:
    """Return what dtypes a parameter's gradient may have in the middle of a window.

    Args:
        param: The parameter.
        summed_in_fp32: Whether several backward passes are summed in FP32, and the first comes as it is made.
    """
    given: torch.dtype | None = getattr(param, "grad_dtype", None)
    wide = [torch.float32] if summed_in_fp32 and hasattr(param, "grad_dtype") else []
    return list(dict.fromkeys([param.dtype, *([given] if given is not None else []), *wide]))
