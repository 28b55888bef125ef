"""A session's state: saved whole, loaded under the same policy or another that stands for the same weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from mezzo.errors import StateError, some_of
from mezzo.policy import Policy
from mezzo.scale import ScaleState
from mezzo.session import foreign
from mezzo.session.window import Window

if TYPE_CHECKING:
    from mezzo.session.loop import MixedPrecision

__all__ = ["STATE_VERSION", "ExactLoading", "load", "saved"]

logger = logging.getLogger(__name__)

#: Of the form of a session's state dict.
STATE_VERSION: Final = 2
_KEYS: Final[dict[str, type]] = {
    "version": int, "policy": str, "parameters": Mapping, "loss_scales": list, "stats": Mapping, "masters": Mapping,
    "windows": list, "gradients": Mapping, "master_gradients": Mapping,
}  # fmt: skip


def saved(session: MixedPrecision) -> dict[str, Any]:
    """Return a session's state as plain containers and tensors."""
    for masters in session._masters.values():
        masters.take_edits()
    open_window = any(cluster.window for cluster in session._clusters)
    gradients = {n: p.grad.clone() for n, p in session._named_params() if open_window and p.grad is not None}
    named = session._named_masters()
    return {
        "version": STATE_VERSION,
        "policy": str(session.policy),
        "parameters": _fingerprint(session),
        "loss_scales": [scaler.state_dict() for scaler in session._scalers],
        "stats": session._accounts.state_dict(),
        "masters": {name: master.detach().clone() for name, master in named.items()},
        "windows": [
            None if cluster.window is None else cluster.window.state_dict(session._name_of)
            for cluster in session._clusters
        ],
        "gradients": gradients,
        "master_gradients": {n: m.grad.clone() for n, m in named.items() if open_window and m.grad is not None},
    }


def load(session: MixedPrecision, state: Any) -> None:
    """Load what :func:`saved` returned, or another library's loss scale; all is checked before anything is changed."""
    if open_windows := [cluster.window for cluster in session._clusters if cluster.window is not None]:
        raise StateError(
            "loading would change the loss scale inside an accumulation window",
            where=f"after {open_windows[0].micro_batches} backward pass(es) since the last step",
            write="amp.step() or amp.zero_grad() first",
        )
    if (scales := foreign.loss_scales(state, session.policy.loss_scale, len(session._scalers))) is not None:
        _load_scales(session, scales)
        session._accounts.start_over(session._scale_tensors())
        return
    _check(session, state)
    policy = Policy.parse(state["policy"])
    if changes := policy.differences(session.policy):
        logger.info("the state was saved under another policy: %s", "; ".join(changes))
    mode = session.policy.loss_scale.mode
    if policy.loss_scale.mode == mode:
        _load_scales(session, [ScaleState.from_state_dict(each) for each in state["loss_scales"]])
    if len(state["loss_scales"]) == len(session._scalers):
        session._accounts.load_state_dict(state["stats"], session._scale_tensors())
    _load_masters(session, state["masters"])
    if any(state["windows"]):
        _load_windows(session, state)


def _load_scales(session: MixedPrecision, scales: list[ScaleState]) -> None:
    for scaler, each in zip(session._scalers, scales, strict=True):
        scaler.load_state_dict(each.state_dict())


@torch.no_grad()
def _load_masters(session: MixedPrecision, masters: Mapping[str, Tensor]) -> None:
    """Put saved masters where the FP32 weights are now: in masters, or in the parameters themselves."""
    mine = session._named_masters()
    session._restored.clear()
    for name, param in session._named_params():
        if name in mine:
            mine[name].copy_(masters.get(name, mine[name]))
        elif name in masters and param.dtype == torch.float32:
            param.copy_(masters[name])
            session._restored.add(name)
    for each in session._masters.values():
        each.round_to_params()


def _load_windows(session: MixedPrecision, state: Mapping[str, Any]) -> None:
    by_name: dict[str, Tensor] = {**dict(session._named_params()), **session._named_masters()}
    for cluster, window in zip(session._clusters, state["windows"], strict=True):
        if window is not None:
            cluster.window = Window.from_state_dict(window, session._scalers, by_name)
    for kind, tensors in (("gradients", dict(session._named_params())), ("master_gradients", session._named_masters())):
        for name, tensor in tensors.items():
            gradient = state[kind].get(name)
            tensor.grad = None if gradient is None else gradient.to(tensor.device, copy=True)


# What cannot be loaded -----------------------------------------------------------------------------------


def _fingerprint(session: MixedPrecision) -> dict[str, str]:
    return {n: f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for n, p in session._named_params()}


def _check(session: MixedPrecision, state: Any) -> None:
    """Refuse a state that cannot be continued here, with every difference."""
    if isinstance(state, Mapping):
        wrong = [
            f"{key} is missing" if key not in state else f"{key} is a {type(state[key]).__name__}"
            for key, kind in _KEYS.items()
            if not isinstance(state.get(key), kind)
        ]
    else:
        wrong = [f"it is a {type(state).__name__}"]
    if isinstance(state, Mapping) and isinstance(state.get("version"), int) and state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']}", why=f"this mezzo reads version {STATE_VERSION}")
    if wrong:
        raise StateError(
            "this is not the state of a MixedPrecision session", why=some_of(wrong), write="amp.state_dict()"
        )
    if differences := [*_weights(session, state), *_unfinished(session, state)]:
        policies = [f"policy {line}" for line in Policy.parse(state["policy"]).differences(session.policy)]
        raise StateError(
            "the state belongs to another session",
            where="\n".join((*policies, *differences)),
            why="saved → this session; continuing would not be the same run",
            write="MixedPrecision(model, optimizer, policy) with the saved policy and model",
        )


def _weights(session: MixedPrecision, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that is another one, or that would lose bits."""
    before, mine, held = state["parameters"], _fingerprint(session), session._named_masters()
    for name in dict.fromkeys((*before, *mine)):
        was, now = before.get(name, "missing"), mine.get(name, "missing")
        if was.partition(" ")[2] != now.partition(" ")[2] or "missing" in (was, now):
            yield f"parameter {name}: {was} → {now}"
            continue
        was_exact = name in state["masters"] or was.startswith("float")
        if name in held or (was == now and name not in state["masters"]) or now.startswith("float32"):
            continue
        kind = "with a master" if name in state["masters"] else ""
        if was_exact or was != now:
            yield f"parameter {name}: {' '.join(filter(None, (was, kind)))} → {now} without a master"
    for name, master in state["masters"].items():
        if name in mine and list(master.shape) != list(dict(session._named_params())[name].shape):
            yield f"master of {name}: {list(master.shape)} → {mine[name]}"


def _unfinished(session: MixedPrecision, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be the same for loss scales, and for gradients in the middle of a window."""
    policy = Policy.parse(state["policy"])
    scales = len(state["loss_scales"])
    if scales != len(session._scalers) and policy.loss_scale.mode == session.policy.loss_scale.mode != "none":
        yield f"losses: {scales} → {len(session._scalers)}"
    if any(state["windows"]):
        if policy.differences(session.policy):
            yield "gradients of an unfinished accumulation window, which belong to the saved policy"
        if len(state["windows"]) != len(session._clusters):
            yield f"optimizers with gradients: {len(state['windows'])} → {len(session._clusters)}"


# Weights that a model loads ------------------------------------------------------------------------------


class ExactLoading:
    """Keep all bits when a model of a session loads weights in another precision than it stores.

    FP32 weights go to the masters whole, and low-precision ones leave every master, or FP32 weight that the session
    restored, that rounds to them. So the state dicts of model and session load in either order.
    A hook before ``nn.Module.load_state_dict``; a copied or unpickled model has one that does nothing.
    """

    def __init__(self, session: MixedPrecision | None = None, prefix: str = "") -> None:
        self._session = None if session is None else weakref.ref(session)
        self._prefix = prefix

    def __reduce__(self) -> tuple[Any, ...]:
        return ExactLoading, ()

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace what is about to be loaded."""
        session = self._session() if self._session is not None else None
        if session is None:
            return
        held = session._named_masters()
        for name, param in module.named_parameters(remove_duplicate=False):
            incoming, own = state_dict.get(prefix + name), self._prefix + name
            if not isinstance(incoming, Tensor) or incoming.shape != param.shape or not incoming.is_floating_point():
                continue
            master = held.get(own)
            exact = master if master is not None else param if own in session._restored else None
            if exact is None:
                continue
            incoming = incoming.to(exact.device)
            if incoming.element_size() >= exact.element_size():
                exact.copy_(incoming)
            else:
                kept = exact.to(incoming.dtype) == incoming
                state_dict[prefix + name] = torch.where(kept, exact, incoming.to(exact.dtype))
