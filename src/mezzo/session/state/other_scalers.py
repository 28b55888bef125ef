"""The loss scales of other libraries' checkpoints, taken over."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, Final

from mezzo.errors import StateError, shown
from mezzo.policy import Policy
from mezzo.scale import LossScale, ScaleState

__all__ = ["loss_scales"]

logger = logging.getLogger(__name__)

#: torch.amp.GradScaler.state_dict()'s rules, and the fields of a LossScale that they are.
_TORCH_RULES: Final = MappingProxyType(
    {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
)
#: What a GradScaler has no field for, and always does.
_TORCH_FIXED: Final = MappingProxyType({"hysteresis": 1, "growth_offset": 0, "skip_rate_limit": None})
_TORCH_KEYS: Final = ("scale", "_growth_tracker", *_TORCH_RULES)
_TORCH: Final = "torch.amp.GradScaler"
_APEX: Final = "loss_scaler"


def loss_scales(state: Any, policy: Policy, num_losses: int) -> list[ScaleState] | None:
    """Return the loss scales in the state of a ``torch.amp.GradScaler`` or of ``apex.amp``.

    The empty state of a disabled ``GradScaler`` stands for no loss scale. Scale and clean steps are taken over. From
    there on the session's own rules count, and the log says so where the saved ones were others.

    Args:
        state: What ``load_state_dict`` was given.
        policy: The session's policy.
        num_losses: How many scales the session has.

    Returns:
        One state for each loss; ``None`` if this is neither.

    Raises:
        StateError: The session has no dynamic scale, or the state is damaged.

    References:
        torch/amp/grad_scaler.py, ``GradScaler.state_dict``; apex/amp/frontend.py, ``state_dict``.
    """
    if not isinstance(state, Mapping) or "version" in state:
        return None
    config = policy.loss_scale
    if not state:
        if config.mode != "none":
            raise StateError(
                "an empty mapping is not the state of a MixedPrecision session",
                why=f"so is that of a disabled torch.amp.GradScaler; this session's loss scale, {config}, is not in it",
                write="nothing: leave amp.load_state_dict() out, and the loss scale starts afresh",
            )
        return [config.start()] * num_losses
    if not state.keys().isdisjoint(_TORCH_KEYS):
        _require(state, _TORCH_KEYS, _TORCH, config)
        scale = _state(config, _TORCH, state["scale"], state["_growth_tracker"])
        _log_other_rules(state, config)
        return [scale] * num_losses
    if all(isinstance(key, str) and key.startswith(_APEX) for key in state):
        return _apex(state, config, num_losses)
    return None


def _apex(state: Mapping[str, Any], config: LossScale, num_losses: int) -> list[ScaleState]:
    _require(state, (), "apex.amp", config)
    if len(state) != num_losses:
        raise StateError(
            f"the state of apex.amp has {len(state)} losses, and this session {num_losses}",
            write=f"MixedPrecision(…, num_losses={len(state)})",
        )
    names = [f"{_APEX}{number}" for number in range(num_losses)]
    _require(state, names, "apex.amp", config)
    for name in names:
        if not isinstance(state[name], Mapping):
            raise StateError(f"{name} is a {type(state[name]).__name__}", where="the state of apex.amp")
        _require(state[name], ("loss_scale", "unskipped"), f"apex.amp, {name}", config)
    return [_state(config, f"apex.amp, {name}", state[name]["loss_scale"], state[name]["unskipped"]) for name in names]


def _state(config: LossScale, library: str, scale: Any, clean_steps: Any) -> ScaleState:
    fresh = config.start().state_dict()
    try:
        return ScaleState.from_state_dict(fresh | {"scale": scale, "clean_steps": clean_steps})
    except StateError as problem:
        raise StateError(f"the state of {library} has wrong values", where=str(problem)) from problem


def _require(state: Mapping[str, Any], keys: Iterable[str], library: str, config: LossScale) -> None:
    """Refuse a state that lacks keys, or that a session has no place for."""
    if config.mode != "dynamic":
        raise StateError(
            f"the state of {library} has a dynamic loss scale, and this session none",
            why=f"its loss scale is {config}",
            write='policy="O1", whose float16 has one; or load nothing, as bfloat16 needs none',
        )
    if missing := [key for key in keys if key not in state]:
        has = f"it has {', '.join(map(str, state)) or 'nothing'}"
        raise StateError(f"the state of {library} lacks {', '.join(missing)}", why=has)


def _log_other_rules(state: Mapping[str, Any], config: LossScale) -> None:
    """Say by which rules a scale goes on that followed others where it was saved."""
    odd = [key for key in _TORCH_RULES if not isinstance(state[key], Real) or not abs(state[key]) < math.inf]
    if odd:
        where = "\n".join(f"{key} is {shown(state[key])}" for key in odd)
        raise StateError(f"the state of {_TORCH} has wrong values", where=where, why="each is a finite number")
    theirs: dict[str, Any] = {ours: state[key] for key, ours in _TORCH_RULES.items()} | _TORCH_FIXED
    # A GradScaler has no bounds; those of the session matter only once the scale is beyond them.
    if config.ceiling is not None and state["scale"] > config.ceiling:
        theirs["ceiling"] = None
    if state["scale"] < config.floor:
        theirs["floor"] = LossScale.like("torch").floor
    pairs = ((name, saved, getattr(config, name)) for name, saved in theirs.items())
    if other := [f"{name} {shown(saved)} → {now}" for name, saved, now in pairs if saved != now]:
        logger.info("the loss scale goes on by this session's rules, not by those of %s: %s", _TORCH, ", ".join(other))
