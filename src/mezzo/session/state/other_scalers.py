"""The loss scales of other libraries' checkpoints, taken over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, Final

from mezzo.errors import PolicyError, StateError, shown
from mezzo.policy import Policy
from mezzo.scale import LossScale, ScaleState

__all__ = ["loss_scales"]

#: torch.amp.GradScaler.state_dict()'s rules, and the fields of a LossScale that they are.
_TORCH_RULES: Final = MappingProxyType(
    {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
)
_TORCH_KEYS: Final = ("scale", "_growth_tracker", *_TORCH_RULES)
_TORCH: Final = "torch.amp.GradScaler"
#: What a GradScaler has no field for, and always does.
_TORCH_FIXED: Final = MappingProxyType({"hysteresis": 1, "growth_offset": 0, "skip_rate_limit": None})
_APEX: Final = "loss_scaler"


def loss_scales(state: Any, policy: Policy, num_losses: int) -> list[ScaleState] | None:
    """Return the loss scales in the state of a ``torch.amp.GradScaler`` or of ``apex.amp``.

    The empty state of a disabled ``GradScaler`` stands for no loss scale.

    Args:
        state: What ``load_state_dict`` was given.
        policy: The session's policy.
        num_losses: How many scales the session has.

    Returns:
        One state for each loss; ``None`` if this is neither.

    Raises:
        StateError: The saved rules are not the session's, the session has no dynamic scale, or the state is damaged.

    References:
        torch/amp/grad_scaler.py, ``GradScaler.state_dict``; apex/amp/frontend.py, ``state_dict``.
    """
    if not isinstance(state, Mapping) or "version" in state:
        return None
    config = policy.loss_scale
    if not state:
        _require_none(config)
        return [config.start()] * num_losses
    if not state.keys().isdisjoint(_TORCH_KEYS):
        _require_dynamic(config, _TORCH)
        _require_keys(state, _TORCH_KEYS, _TORCH)
        scale = _state(config, _TORCH, state["scale"], state["_growth_tracker"])
        _require_same_rules(state, policy)
        return [scale] * num_losses
    if all(isinstance(key, str) and key.startswith(_APEX) for key in state):
        _require_dynamic(config, "apex.amp")
        return _apex(state, config, num_losses)
    return None


def _apex(state: Mapping[str, Any], config: LossScale, num_losses: int) -> list[ScaleState]:
    if len(state) != num_losses:
        raise StateError(
            f"the state of apex.amp has {len(state)} losses, and this session {num_losses}",
            write=f"MixedPrecision(…, num_losses={len(state)})",
        )
    names = [f"{_APEX}{number}" for number in range(num_losses)]
    _require_keys(state, names, "apex.amp")
    for name in names:
        if not isinstance(state[name], Mapping):
            raise StateError(f"{name} is a {type(state[name]).__name__}", where="the state of apex.amp")
        _require_keys(state[name], ("loss_scale", "unskipped"), f"apex.amp, {name}")
    return [_state(config, f"apex.amp, {name}", state[name]["loss_scale"], state[name]["unskipped"]) for name in names]


def _state(config: LossScale, library: str, scale: Any, clean_steps: Any) -> ScaleState:
    fresh = config.start().state_dict()
    try:
        return ScaleState.from_state_dict(fresh | {"scale": scale, "clean_steps": clean_steps})
    except StateError as problem:
        raise StateError(f"the state of {library} has wrong values", where=str(problem)) from problem


def _require_keys(state: Mapping[str, Any], keys: Any, library: str) -> None:
    if missing := [key for key in keys if key not in state]:
        has = f"it has {', '.join(map(str, state)) or 'nothing'}"
        raise StateError(f"the state of {library} lacks {', '.join(missing)}", why=has)


def _require_none(config: LossScale) -> None:
    if config.mode != "none":
        raise StateError(
            "an empty mapping is not the state of a MixedPrecision session",
            why=f"so is that of a disabled torch.amp.GradScaler; this session's loss scale, {config}, is not in it",
            write="nothing: leave amp.load_state_dict() out, and the loss scale starts afresh",
        )


def _require_dynamic(config: LossScale, library: str) -> None:
    if config.mode != "dynamic":
        raise StateError(
            f"the state of {library} has a dynamic loss scale, and this session none",
            why=f"its loss scale is {config}",
            write='policy="O1", whose float16 has one; or load nothing, as bfloat16 needs none',
        )


def _require_same_rules(state: Mapping[str, Any], policy: Policy) -> None:
    """Refuse to continue a scale by other rules than it was saved with."""
    config = policy.loss_scale
    if odd := [f"{key} is {shown(state[key])}" for key in _TORCH_RULES if not isinstance(state[key], Real)]:
        raise StateError(f"the state of {_TORCH} has wrong values", where="\n".join(odd), why="each is a number")
    theirs: dict[str, Any] = {ours: state[key] for key, ours in _TORCH_RULES.items()} | _TORCH_FIXED
    # A GradScaler has no bounds; those of the session matter only once the scale is beyond them.
    if config.ceiling is not None and state["scale"] > config.ceiling:
        theirs["ceiling"] = None
    if state["scale"] < config.floor:
        theirs["floor"] = LossScale.like("torch").floor
    wrong = {name: value for name, value in theirs.items() if value != getattr(config, name)}
    if not wrong:
        return
    try:
        continued = policy.evolve(loss_scale=dataclasses.replace(config, **wrong))
    except PolicyError as problem:
        raise StateError(f"the state of {_TORCH} has wrong values", where=str(problem)) from problem
    raise StateError(
        "the saved GradScaler follows other rules",
        where="\n".join(f"{name}: {value} → {getattr(config, name)}" for name, value in wrong.items()),
        why=f"saved, at a scale of {state['scale']:.6g} → this session",
        write=f'policy="{continued}"',
    )
