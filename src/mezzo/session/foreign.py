"""The loss scales of other libraries' checkpoints, taken over."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from mezzo.errors import StateError
from mezzo.scale import LossScale, ScaleState

__all__ = ["loss_scales"]

#: torch.amp.GradScaler.state_dict()'s rules, and the fields of a LossScale that they are.
_TORCH_RULES: Final = MappingProxyType(
    {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
)
_TORCH_KEYS: Final = frozenset({"scale", "_growth_tracker", *_TORCH_RULES})
_APEX: Final = "loss_scaler"


def loss_scales(state: Any, config: LossScale, num_losses: int) -> list[ScaleState] | None:
    """Return the loss scales in the state of a ``torch.amp.GradScaler`` or of ``apex.amp``.

    Args:
        state: What ``load_state_dict`` was given.
        config: The session's rules.
        num_losses: How many scales it has.

    Returns:
        One state for each loss; ``None`` if this is neither.

    Raises:
        StateError: The saved rules are not the session's, or the session has no dynamic scale.

    References:
        torch/amp/grad_scaler.py, ``GradScaler.state_dict``; apex/amp/frontend.py, ``state_dict``.
    """
    if not isinstance(state, Mapping) or not state:
        return None
    if state.keys() == _TORCH_KEYS:
        _require_dynamic(config, "torch.amp.GradScaler")
        _require_same_rules(state, config)
        return [_state(config, state["scale"], state["_growth_tracker"])] * num_losses
    if all(isinstance(key, str) and key.startswith(_APEX) for key in state):
        _require_dynamic(config, "apex.amp")
        if len(state) != num_losses:
            raise StateError(
                f"the state of apex.amp has {len(state)} losses, and this session {num_losses}",
                write=f"MixedPrecision(…, num_losses={len(state)})",
            )
        ordered = [state[f"{_APEX}{number}"] for number in range(num_losses)]
        return [_state(config, each["loss_scale"], each["unskipped"]) for each in ordered]
    return None


def _state(config: LossScale, scale: float, clean_steps: int) -> ScaleState:
    fresh = config.start().state_dict()
    return ScaleState.from_state_dict(fresh | {"scale": float(scale), "clean_steps": int(clean_steps)})


def _require_dynamic(config: LossScale, library: str) -> None:
    if config.mode != "dynamic":
        raise StateError(
            f"the state of {library} has a dynamic loss scale, and this session none",
            why=f"its loss scale is {config}",
            write='policy="O1", whose float16 has one; or load nothing, as bfloat16 needs none',
        )


def _require_same_rules(state: Mapping[str, Any], config: LossScale) -> None:
    wrong = {ours: state[theirs] for theirs, ours in _TORCH_RULES.items() if state[theirs] != getattr(config, ours)}
    if wrong:
        raise StateError(
            "the saved GradScaler follows other rules",
            where="\n".join(f"{name}: {value:g} → {getattr(config, name):g}" for name, value in wrong.items()),
            why="saved → this session",
            write=f'loss_scale=LossScale.like("torch", {", ".join(f"{k}={v:g}" for k, v in wrong.items())})',
        )
