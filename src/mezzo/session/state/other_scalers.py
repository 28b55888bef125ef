"""The loss scales of other libraries' checkpoints, taken over."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Final, NamedTuple

from mezzo.errors import StateError, shown
from mezzo.policy import Policy
from mezzo.scale import LossScale, ScaleState
from mezzo.scale.words import PADDLES_RULES, TORCHS_RULES

__all__ = ["loss_scales", "one_number"]

logger = logging.getLogger(__name__)


class _Library(NamedTuple):
    """What a GradScaler's state holds.

    Args:
        name: The class.
        clean: The key that counts clean steps.
        rules: By key the field of a LossScale that it is.
        more: Other keys that are numbers.
    """

    name: str
    clean: str
    rules: Mapping[str, str]
    more: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys; each library's own but the first, which both have."""
        return ("scale", self.clean, *self.rules, *self.more)


_TORCH: Final = _Library("torch.amp.GradScaler", "_growth_tracker", TORCHS_RULES)
_PADDLE: Final = _Library(
    "paddle.amp.GradScaler", "incr_count", PADDLES_RULES, ("decr_count", "use_dynamic_loss_scaling")
)
_APEX: Final = "loss_scaler"


def loss_scales(state: Any, policy: Policy, num_losses: int) -> list[ScaleState] | None:
    """Return the loss scales in the state of a ``GradScaler``, torch's or Paddle's, or of ``apex.amp``.

    The empty state of a disabled ``GradScaler`` stands for no loss scale. Scale and clean steps are taken over, and of
    Paddle's the overflows since a clean step. From there on the session's own rules count, and the log says so where
    the saved ones were others. A constant scale is taken where the session has the same.

    Args:
        state: What ``load_state_dict`` was given.
        policy: The session's policy.
        num_losses: How many scales the session has.

    Returns:
        One state for each loss; ``None`` if this is neither.

    Raises:
        StateError: The session has no dynamic scale, or another constant one, or the state is damaged.

    References:
        torch/amp/grad_scaler.py, ``GradScaler.state_dict``; apex/amp/frontend.py, ``state_dict``;
        python/paddle/amp/grad_scaler.py, ``AmpScaler.state_dict``.
    """
    if not isinstance(state, Mapping) or "version" in state:
        return None
    config = policy.loss_scale
    if not state:
        if config.mode != "none":
            raise StateError(
                "an empty mapping is not the state of a MixedPrecision session",
                why="so is that of a disabled torch.amp.GradScaler, or Paddle's; "
                f"this session's loss scale, {config}, is not in it",
                write="nothing: leave amp.load_state_dict() out, and the loss scale starts afresh",
            )
        return [config.start()] * num_losses
    if not state.keys().isdisjoint((*_TORCH.keys, *_PADDLE.keys)):
        is_torchs = state.keys().isdisjoint(_PADDLE.keys[1:])
        return [_of_gradscaler(_TORCH if is_torchs else _PADDLE, state, config)] * num_losses
    if all(isinstance(key, str) and key.startswith(_APEX) for key in state):
        return _apex(state, config, num_losses)
    return None


def _of_gradscaler(library: _Library, state: Mapping[str, Any], config: LossScale) -> ScaleState:
    scale: Any = state.get("scale") if library is _TORCH else one_number(state.get("scale"))
    if library is _PADDLE and state.get("use_dynamic_loss_scaling") is False:
        if config.mode == "dynamic" or scale != config.init:
            raise StateError(
                f"the state of {library.name} has the constant loss scale {shown(scale)}, and this session another",
                why=f"its loss scale is {config}",
                write=f'policy="O1,loss_scale={shown(scale)}"; or load nothing, and the session\'s own is used',
            )
        return config.start()
    _require(state, library.keys, library.name, config)
    numbers = (*library.rules, *library.more)
    if odd := [key for key in numbers if not isinstance(state[key], Real) or not abs(state[key]) < math.inf]:
        where = "\n".join(f"{key} is {shown(state[key])}" for key in odd)
        raise StateError(f"the state of {library.name} has wrong values", where=where, why="each is a finite number")
    left = max(1, min(config.hysteresis, config.hysteresis - state.get("decr_count", 0)))
    made = _state(config, library.name, scale=scale, clean_steps=state[library.clean], budget=left)
    _log_other_rules(library, state, scale, config)
    return made


def _apex(state: Mapping[str, Any], config: LossScale, num_losses: int) -> list[ScaleState]:
    constant = [each.get("loss_scale") if isinstance(each, Mapping) else None for each in state.values()]
    if config.mode != "dynamic" and constant == [config.init] * num_losses:
        return [config.start()] * num_losses
    names = [f"{_APEX}{number}" for number in range(len(state))]
    _require(state, names, "apex.amp", config)
    if len(state) != num_losses:
        raise StateError(
            f"the state of apex.amp has {len(state)} losses, and this session {num_losses}",
            write=f"MixedPrecision(…, num_losses={len(state)})",
        )
    made = []
    for name in names:
        saved, library = state[name], f"apex.amp, {name}"
        if not isinstance(saved, Mapping):
            raise StateError(f"{name} is a {type(saved).__name__}", where="the state of apex.amp")
        _require(saved, ("loss_scale", "unskipped"), library, config)
        made.append(_state(config, library, scale=saved["loss_scale"], clean_steps=saved["unskipped"]))
    return made


def one_number(scale: Any) -> Any:
    """Return the one number of an array of it, as Paddle keeps a scale; what is no such array as it is."""
    values = scale.tolist() if hasattr(scale, "tolist") else scale
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def _state(config: LossScale, library: str, **saved: Any) -> ScaleState:
    try:
        return ScaleState.from_state_dict(config.start().state_dict() | saved)
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


def _log_other_rules(library: _Library, state: Mapping[str, Any], scale: float, config: LossScale) -> None:
    """Say by which rules a scale goes on that followed others where it was saved."""
    # What a library has no word for it always does.
    theirs: dict[str, Any] = {"hysteresis": 1, "growth_offset": 0, "skip_rate_limit": None}
    theirs |= {ours: state[key] for key, ours in library.rules.items()}
    # What the other has no bounds for, or other ones, matters only once the scale is beyond the session's.
    if config.ceiling is not None and scale > config.ceiling:
        theirs["ceiling"] = None
    if scale < config.floor:
        theirs["floor"] = LossScale.like("torch").floor
    if library is _PADDLE and config.hysteresis > 1:
        theirs["refill"] = LossScale.like("paddle").refill
    pairs = ((name, saved, getattr(config, name)) for name, saved in theirs.items())
    if other := [f"{name} {shown(saved)} → {now}" for name, saved, now in pairs if saved != now]:
        log = "the loss scale goes on by this session's rules, not by those of %s: %s"
        logger.info(log, library.name, ", ".join(other))
