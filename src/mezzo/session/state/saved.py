"""A session's state: saved whole, loaded under the same policy or another that stands for the same weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mezzo.errors import StateError, printable, shown, some_of
from mezzo.policy import Policy
from mezzo.scale import LossScale, ScaleState
from mezzo.session.state import other_scalers
from mezzo.session.state.load_hooks import overflows
from mezzo.session.state.schema import STATE_VERSION, wrong_values
from mezzo.session.weights.weights import plain_name
from mezzo.session.window.group import give_gradient, gradient_dtypes, regrouped
from mezzo.session.window.window import Window
from mezzo.tensors import described, dtype_name

if TYPE_CHECKING:
    from mezzo.session.session import MixedPrecision

__all__ = ["STATE_VERSION", "load", "saved"]

logger = logging.getLogger(__name__)

#: Lines of a message that lists differences; another model has a great many.
_LINES: Final = 40


def saved(session: MixedPrecision) -> dict[str, Any]:
    """Return a session's state as plain containers and tensors."""
    session._parts.take_edits()
    for cluster in session._clusters:
        cluster.agree()
        cluster.forget_cleared(session._parts.name_of)
    scales = session._scale_tensors()

    def number_of(scale: Tensor) -> int:
        """Return a scale's place among those that gradients carry: which one it is counts, not only its value."""
        if not any(scale is known for known in scales):
            scales.append(scale)
        return next(number for number, known in enumerate(scales) if known is scale)

    names = _names(session)
    _refuse_nameless(session, names)
    windows = [c.window and c.window.state_dict(lambda t: names[id(t)], number_of) for c in session._clusters]
    gradients, master_gradients, left = _gradients(session, names) if any(windows) else ({}, {}, [])
    return {
        "version": STATE_VERSION,
        "policy": str(session.policy),
        "parameters": _fingerprint(session),
        "loss_scales": [scaler.state_dict() for scaler in session._scalers],
        "stats": session._accounts.state_dict(),
        "masters": _masters(session),
        "windows": windows,
        "carried_scales": [float(scale) for scale in scales],
        "on_the_way": [{"loss_id": n, "found_inf": bool(found)} for n, found in session._on_the_way.items()],
        "gradients": gradients,
        "master_gradients": master_gradients,
        "left": left,
        "buffers": {name: before.clone() for name, (_, before) in _remembered(session).items()},
    }


def _masters(session: MixedPrecision) -> dict[str, Tensor]:
    """Return a copy of every FP32 value that the parameters themselves lack."""
    stored = session._parts.stored(in_fp32=True)
    held = {name: master.detach().clone() for name, master in session._named_masters().items()}
    return held | {
        name: stored[param].master_of(param) for name, param in session._parts.named_params() if param in stored
    }


def _names(session: MixedPrecision) -> dict[int, str]:
    """Return the name of each tensor that the optimizers update, by ``id``."""
    held = session._named_masters()
    return {id(held.get(name, param)): name for name, param in session._parts.named_params()}


def _refuse_nameless(session: MixedPrecision, names: Mapping[int, str]) -> None:
    """Refuse to lose what only the session knows of parameters that were added without a model."""
    masters = {id(master) for each in session._parts.masters.values() for master in each.masters().values()}
    has_window = any(cluster.window for cluster in session._clusters)
    nameless = [param for param in session.master_params() if id(param) not in names]
    if lost := [described(param) for param in nameless if has_window or id(param) in masters]:
        raise StateError(
            "an optimizer updates parameters that belong to no model of the session",
            where=some_of(lost),
            why="their masters, and their gradients inside an accumulation window, have no name to be saved under",
            write="MixedPrecision([model, what_holds_them], optimizer, policy)",
        )


def load(session: MixedPrecision, state: Any) -> None:
    """Load what :func:`saved` returned, or another library's loss scale; all is checked before anything is changed."""
    if open_windows := [cluster.window for cluster in session._clusters if cluster.window is not None]:
        raise StateError(
            "loading would change the loss scale inside an accumulation window",
            where=f"after {open_windows[0].micro_batches} backward pass(es) since the last step",
            write="amp.step() or amp.zero_grad() first",
        )
    if (scales := other_scalers.loss_scales(state, session.policy, len(session._scalers))) is not None:
        _load_scales(session, scales)
        own = session._accounts.state_dict()
        session._accounts.load_state_dict(own, session._scale_tensors(), continued=False)
        return
    session._clusters = regrouped(session._clusters, session._optimizers, session._parts.masters)
    _check(session, state)
    policy = Policy.parse(state["policy"])
    if changes := policy.differences(session.policy):
        logger.info("the state was saved under another policy: %s", printable("; ".join(changes)))
    _load_loss_scales(session, policy.loss_scale, state)
    _load_masters(session, state)
    if any(state["windows"]):
        _load_windows(session, state)
    if session._buffers is not None:
        buffers = _named_buffers(session)
        session._buffers.recall(
            [(buffers[name], before.to(buffers[name].device, copy=True)) for name, before in state["buffers"].items()]
        )


# Loss scales ---------------------------------------------------------------------------------------------


def _load_scales(session: MixedPrecision, scales: list[ScaleState]) -> None:
    session._on_the_way.clear()
    for scaler, each in zip(session._scalers, scales, strict=True):
        scaler.load_state_dict(each.state_dict())


def _load_loss_scales(session: MixedPrecision, before: LossScale, state: Mapping[str, Any]) -> None:
    """Continue the saved loss scales where the session's are of the same kind; start afresh elsewhere."""
    now = session.policy.loss_scale
    same_kind = before.mode == now.mode and (now.mode == "dynamic" or before.init == now.init)
    continued = same_kind and len(state["loss_scales"]) == len(session._scalers)
    if continued:
        scales = [ScaleState.from_state_dict(_within(each, before, now)) for each in state["loss_scales"]]
    else:
        scales = [now.start() for _ in session._scalers]
    _load_scales(session, scales)
    if continued:
        found = {each["loss_id"]: each["found_inf"] for each in state["on_the_way"]}
        session._on_the_way = {n: torch.tensor(overflow, device=session._device) for n, overflow in found.items()}
    session._accounts.load_state_dict(state["stats"], session._scale_tensors(), continued=continued)


def _within(scale: Mapping[str, Any], before: LossScale, now: LossScale) -> dict[str, Any]:
    """Bring a scale within the bounds of new rules."""
    if before == now or now.mode != "dynamic":
        return dict(scale)
    highest = scale["scale"] if now.ceiling is None else min(scale["scale"], now.ceiling)
    return {**scale, "scale": float(max(highest, now.floor))}


# Weights -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _load_masters(session: MixedPrecision, state: Mapping[str, Any]) -> None:
    """Put saved masters where the FP32 weights are now: in masters, or in the parameters themselves."""
    mine, masters = session._named_masters(), state["masters"]
    session._parts.take_edits()
    session._parts.exact.restored.clear()
    stored = session._parts.stored(in_fp32=True)
    for name, param in session._parts.named_params():
        before = getattr(torch, state["parameters"][name].partition(" ")[0])
        if param in stored:
            exact = masters[name] if name in masters else stored[param].master_of(param).to(before)
            stored[param].write(param, exact)
        elif name in mine and name in masters:
            mine[name].copy_(masters[name])
        elif name in mine:
            # The model's own state dict has these weights, in this precision and no better.
            mine[name].copy_(mine[name].to(before))
        elif name in masters and param.dtype == torch.float32:
            param.copy_(masters[name])
            session._parts.exact.restored.add(param)
    for each in session._parts.masters.values():
        each.round_to_params()
    if session._parts.exact.restored:
        session._parts.exact.watch(session._models)


# Accumulation windows ------------------------------------------------------------------------------------


def _gradients(
    session: MixedPrecision, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return the gradients of parameters and of masters, and the names of those that a step has left over."""
    masters = session._named_masters()
    # After unscale_ a parameter shows its master's own gradient.
    shown = {id(master.grad) for master in masters.values() if master.grad is not None}
    params = session._parts.named_params()
    gradients = {name: p.grad.clone() for name, p in params if p.grad is not None and id(p.grad) not in shown}
    left = [
        names[id(param)]
        for cluster in session._clusters
        for param in cluster.params()
        if param.grad is not None and cluster.is_left(param.grad)
    ]
    held = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
    return gradients, held, left


def _load_windows(session: MixedPrecision, state: Mapping[str, Any]) -> None:
    params, masters = dict(session._parts.named_params()), session._named_masters()
    # What was cleared since the last backward pass, in states that were saved before anyone took note of it.
    noted = {name for window in state["windows"] if window for name in window["beside"]}
    cleared = {name for name in noted if name not in state["gradients"]}
    for kind, tensors, without in (("gradients", params, set()), ("master_gradients", masters, cleared)):
        for name, tensor in tensors.items():
            give_gradient(tensor, None if name in without else state[kind].get(name))
    scales = session._scale_tensors()
    scales += [scales[0].new_tensor(value) for value in state["carried_scales"][len(scales) :]]
    left, names = set(state["left"]), _names(session)
    for cluster, window in zip(session._clusters, state["windows"], strict=True):
        if window:
            window = {**window, "aside": {n: total for n, total in window["aside"].items() if n not in cleared}}
        cluster.resume(window and Window.from_state_dict(window, scales, {**params, **masters}))
        theirs = (param.grad for param in cluster.params() if names.get(id(param)) in left)
        cluster.leave(gradient for gradient in theirs if gradient is not None)
        if cluster.window is not None and cluster.window.is_unscaled:
            cluster.show(session._parts.name_of)
    carrying = [c for c in session._clusters if c.window and c.window.carried and not c.window.carried.is_one]
    session._edits.remember(leaf for cluster in carrying for leaf in cluster.leaves())


def _named_buffers(session: MixedPrecision) -> dict[str, Tensor]:
    several = len(session._models) > 1
    return {
        (f"{number}." if several else "") + plain_name(model, name): buffer
        for number, model in enumerate(session._models)
        for name, buffer in model.named_buffers()
    }


def _remembered(session: MixedPrecision) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the buffers that a skipped step puts back, and what it puts back, by name."""
    pairs = [] if session._buffers is None else session._buffers.remembered()
    by_id = {id(buffer): (buffer, before) for buffer, before in pairs}
    return {name: by_id[id(buffer)] for name, buffer in _named_buffers(session).items() if id(buffer) in by_id}


# What cannot be loaded -----------------------------------------------------------------------------------


def _fingerprint(session: MixedPrecision) -> dict[str, str]:
    return {name: described(param) for name, param in session._parts.named_params()}


def _check(session: MixedPrecision, state: Any) -> None:
    """Refuse a state that cannot be continued here, with every difference."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if isinstance(version, int) and version != STATE_VERSION:
        raise StateError(f"the state has version {shown(version)}", why=f"this mezzo reads version {STATE_VERSION}")
    if wrong := wrong_values(state):
        raise StateError(
            "this is not the state of a MixedPrecision session", where=_listed(wrong), write="amp.state_dict()"
        )
    if differences := [*_weights(session, state), *_unfinished(session, state)]:
        policies = [f"policy {line}" for line in Policy.parse(state["policy"]).differences(session.policy)]
        raise StateError(
            "the state belongs to another session",
            where=_listed([*policies, *differences]),
            why="saved → this session; continuing would not be the same run",
            write="MixedPrecision(model, optimizer, policy) with the saved policy and model",
        )


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "\n".join([*map(printable, lines[:_LINES]), *more])


def _weights(session: MixedPrecision, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that is another one, or whose weights would lose bits."""
    before, mine = state["parameters"], dict(session._parts.named_params())
    stored = session._parts.stored(in_fp32=True)
    held = {*session._named_masters(), *(name for name, param in mine.items() if param in stored)}
    updated = {id(param) for param in session.master_params()}
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


def _unfinished(session: MixedPrecision, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be the same for loss scales, and for gradients in the middle of a window."""
    policy, has_windows = Policy.parse(state["policy"]), any(state["windows"])
    scales = len(state["loss_scales"])
    is_used = policy.loss_scale.mode == session.policy.loss_scale.mode != "none" or has_windows or state["on_the_way"]
    if scales != len(session._scalers) and is_used:
        yield f"losses: {scales} → {len(session._scalers)}"
    if has_windows:
        if policy.differences(session.policy):
            yield "gradients of an unfinished accumulation window, which belong to the saved policy"
        if len(state["windows"]) != len(session._clusters):
            yield f"optimizers with gradients: {len(state['windows'])} → {len(session._clusters)}"
        wide, held = {id(p) for c in session._clusters for p in c.summed_in_fp32()}, session._named_masters()
        for name, param in session._parts.named_params():
            gradient, dtypes = state["gradients"].get(name), gradient_dtypes(param, summed_in_fp32=id(param) in wide)
            if gradient is not None and gradient.dtype not in dtypes:
                fits = " or ".join(dtype_name(dtype) for dtype in dtypes)
                yield f"gradient of {name}: {described(gradient)} → {fits}"
        yield from (
            f"gradient of {name} in a master → no master" for name in state["master_gradients"] if name not in held
        )
    buffers = _named_buffers(session)
    for name, before in state["buffers"].items() if session._buffers is not None else ():
        if name not in buffers or described(buffers[name]) != described(before):
            now = described(buffers[name]) if name in buffers else "missing"
            yield f"buffer {name}: {described(before)} → {now}"
