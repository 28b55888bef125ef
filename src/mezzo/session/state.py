"""A session's state between two steps: a plain tree, checked against a table before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from mezzo.errors import MezzoError, StateError, shown, some_of
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.scale.state import is_count, is_whole
from mezzo.scale.words import one_number
from mezzo.tensors import described, overflows

if TYPE_CHECKING:
    from mezzo.session.engine import Engine

__all__ = ["VERSION", "check", "load", "load_checked", "require_between_steps", "save"]

logger = logging.getLogger(__name__)

#: Of the form of a state; others are refused by their number.
VERSION: Final = 3


# Saving ---------------------------------------------------------------------------------------------------


def require_between_steps(engine: Engine, what: str) -> None:
    """Refuse to save or load inside an accumulation window, whose gradients a state does not hold.

    Raises:
        StateError: A backward pass has been made since the last step.
    """
    passes = max((window.passes for window in engine.windows if window.has_gradients()), default=0)
    if passes:
        raise StateError(
            f"{what} inside an accumulation window",
            where=f"after {passes} backward pass(es) since the last step",
            why="a state holds weights, scale and counts, and no gradients",
            write="amp.step() first; or amp.zero_grad()",
        )


def save(engine: Engine, policy: Policy, *, weights: bool = True) -> dict[str, Any]:
    """Return a session's state.

    Args:
        engine: The session's.
        policy: The session's.
        weights: Whether FP32 values that are kept beside low weights are part of it; else the models' own state dicts
            have them.

    Raises:
        StateError: Inside an accumulation window.

    **Cost**: a copy of these values, and a host sync.
    """
    if weights:
        require_between_steps(engine, "state_dict()")
    engine.weights.settle()
    engine.commit()
    stored = engine.weights.stored() if weights else {}
    named = list(engine.weights.named_params())
    return {
        "version": VERSION,
        "policy": str(policy),
        "parameters": {name: described(param) for name, param in named},
        "loss_scale": engine.scaler.state_dict(),
        "stats": engine.account.state_dict(),
        "masters": {name: stored[p].master_of(p).detach().clone() for name, p in named if p in stored},
    }


# Loading --------------------------------------------------------------------------------------------------


def load(engine: Engine, policy: Policy, state: Any) -> None:
    """Load what :func:`save` returned, or another system's scaler; all is checked before anything is changed.

    Raises:
        StateError: It is none, damaged, of another model or of another release; or inside an accumulation window.
            Nothing was loaded.
    """
    if not engine.broken:
        require_between_steps(engine, "load_state_dict()")
    if (other := _of_another_system(state, policy.loss_scale)) is not None:
        _load_scale(engine, other)
        counts = {**engine.account.state_dict(), "failures": 0}
        engine.account.load_state_dict(counts, float(engine.scaler.state.scale))
        return
    check(engine, state)
    load_checked(engine, policy, state)


def load_checked(engine: Engine, policy: Policy, state: Mapping[str, Any]) -> None:
    """Load a state in which :func:`check` has found nothing."""
    saved = Policy.parse(state["policy"])
    if changes := saved.differences(policy):
        logger.info("the state was saved under another policy: %s", "; ".join(changes))
    engine.clear()
    engine.broken = ""
    named = dict(engine.weights.named_params())
    stored = engine.weights.stored()
    for name, value in state["masters"].items():
        engine.weights.write(named[name], value)
    for name, param in named.items() if state["masters"] else ():
        if param in stored and name not in state["masters"]:
            # Without a saved FP32 value the model's own state has the weight, in the precision that it was stored in.
            was = getattr(torch, state["parameters"][name].partition(" ")[0])
            engine.weights.write(param, stored[param].master_of(param).to(was).float())
    before, now = saved.loss_scale, policy.loss_scale
    if before.mode == now.mode == "dynamic":
        _load_scale(engine, _within(state["loss_scale"], now))
    engine.account.load_state_dict(state["stats"], float(engine.scaler.state.scale))


def _load_scale(engine: Engine, numbers: Mapping[str, Any]) -> None:
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), **numbers})


def _within(saved: Mapping[str, Any], now: LossScale) -> dict[str, Any]:
    """Return a saved scale within the bounds of this session's rules."""
    highest = saved["scale"] if now.ceiling is None else min(saved["scale"], now.ceiling)
    return {**saved, "scale": float(max(highest, now.floor)), "budget": min(saved["budget"], now.hysteresis)}


# The table ------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """What a value in a state may be."""

    kind: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_policy(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(Policy.parse(value))
    except MezzoError:
        return False


_TEXTS: Final = _Field(
    "texts by name", lambda v: isinstance(v, Mapping) and all(isinstance(each, str) for each in v.values())
)
_TENSORS: Final = _Field(
    "tensors by name", lambda v: isinstance(v, Mapping) and all(isinstance(each, Tensor) for each in v.values())
)
_COUNT: Final = _Field("a count", is_count)
_NUMBER: Final = _Field("a finite number", _is_number)
_MARKS: Final = _Field("a text of X and .", lambda v: isinstance(v, str) and set(v) <= {"X", "."})

#: Each field of a state, with what stands before the last dot as the mapping that it is in.
_FIELDS: Final[dict[str, _Field]] = {
    "policy": _Field("the text of a policy", _is_policy),
    "parameters": _TEXTS,
    "masters": _TENSORS,
    "loss_scale.scale": _Field("a positive number", lambda v: _is_number(v) and v > 0),
    "loss_scale.clean_steps": _COUNT,
    "loss_scale.budget": _Field("a whole number", is_whole),
    "loss_scale.floor_overflows": _COUNT,
    "stats.steps": _COUNT,
    "stats.skipped": _COUNT,
    "stats.skip_rate": _NUMBER,
    "stats.growths": _COUNT,
    "stats.backoffs": _COUNT,
    "stats.scale": _NUMBER,
    "stats.lowest_scale": _NUMBER,
    "stats.highest_scale": _NUMBER,
    "stats.recent": _MARKS,
    "stats.failures": _COUNT,
}


def check(engine: Engine, state: Any, others: list[str] | None = None) -> None:
    """Raise what stands against a state.

    Args:
        engine: The session's.
        state: The state.
        others: What else was found to differ from this session.

    Raises:
        StateError: It is none, damaged, of another release, or of another model or optimizer.
    """
    write = "what amp.state_dict() returned; or the state of a GradScaler, or of apex.amp"
    if not isinstance(state, Mapping) or "version" not in state:
        where = shown(list(state)) if isinstance(state, Mapping) else shown(state)
        raise StateError("this is not the state of a MixedPrecision session", where=where, write=write)
    if (version := state["version"]) != VERSION:
        raise StateError(
            f"the state has version {shown(version)}",
            why=f"this mezzo reads version {VERSION}, and no checkpoints of releases before it",
            write="the release that has written it; or the model's and optimizer's own states, without the session's",
        )
    damaged = [*_damages(state)]
    if damaged:
        raise StateError(
            "the state of the session is damaged", where="\n".join(damaged[:5]), write="an older checkpoint"
        )
    differing = [*_differences(engine, state), *(others or ())]
    if differing:
        raise StateError(
            "the state is that of another model or optimizer",
            where=some_of(differing),
            why="saved → here",
            write="the model, optimizer and policy that it was saved with",
        )


def _damages(state: Mapping[str, Any]) -> Iterator[str]:
    for path, field in _FIELDS.items():
        folder, _, name = path.rpartition(".")
        there = state.get(folder) if folder else state
        if not isinstance(there, Mapping) or name not in there:
            yield f"{path} is missing"
        elif not field.fits(there[name]):
            yield f"{path} is {shown(there[name])}, not {field.kind}"


def _differences(engine: Engine, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that is another one, or whose weight would lose bits."""
    before, mine, weights = state["parameters"], dict(engine.weights.named_params()), state["masters"]
    stored = engine.weights.stored()
    for name in dict.fromkeys((*before, *mine, *weights)):
        was = before.get(name, "missing")
        now = described(mine[name]) if name in mine else "missing"
        if was.partition(" ")[2] != now.partition(" ")[2] or name not in mine:
            yield f"parameter {name}: {was} → {now}"
            continue
        value = weights.get(name)
        if value is None:
            continue
        if value.shape != mine[name].shape:
            yield f"masters.{name} is {described(value)}, and the parameter {now}"
        elif mine[name].dtype != torch.float32 and mine[name] not in stored:
            yield f"parameter {name}: {was} with its FP32 value → {now} without"
        elif overflows(value, mine[name].dtype):
            yield f"parameter {name}: values beyond {torch.finfo(mine[name].dtype).max:g} → {now}"


# Other systems --------------------------------------------------------------------------------------------


class _System(NamedTuple):
    """The state of another system's scaler: its name, and its keys of the scale and of the steps since it moved."""

    name: str
    scale: str
    clean_steps: str


_SYSTEMS: Final = (
    _System("torch.amp.GradScaler", "scale", "_growth_tracker"),
    _System("paddle.amp.GradScaler", "scale", "incr_count"),
    _System("apex.amp", "loss_scale", "unskipped"),
)


def _of_another_system(state: Any, config: LossScale) -> dict[str, float] | None:
    """Return the numbers of torch's, Paddle's or apex's scaler; ``None`` where it is none of these.

    Raises:
        StateError: The session's scale does not move, and is another one; or the numbers are none.

    References:
        torch/amp/grad_scaler.py, ``GradScaler.state_dict``; python/paddle/amp/grad_scaler.py, ``AmpScaler.state_dict``;
        apex/amp/frontend.py, ``state_dict``.
    """
    if not isinstance(state, Mapping) or "version" in state:
        return None
    state = state["loss_scaler0"] if isinstance(state.get("loss_scaler0"), Mapping) else state
    system = next((each for each in _SYSTEMS if each.scale in state and each.clean_steps in state), None)
    if system is None:
        if not state and config.mode == "none":  # a disabled GradScaler's
            return {}
        return None
    scale, clean = one_number(state[system.scale]), one_number(state[system.clean_steps])
    if not (_is_number(scale) and scale > 0 and is_count(clean)):
        raise StateError(
            f"the state of {system.name} has wrong values",
            where=f"{system.scale} is {shown(scale)}, {system.clean_steps} is {shown(clean)}",
            why="a positive number and a count",
            write="an older checkpoint",
        )
    if config.mode != "dynamic":
        if config.mode == "constant" and scale == config.init:
            return {}
        raise StateError(
            f"the state of {system.name} has a loss scale, and this session another",
            where=f"{scale:g} → {config}",
            write=f"loss_scale=mezzo.LossScale.dynamic(), the text loss_scale=dynamic; or loss_scale={scale:g}",
        )
    return {"scale": scale, "clean_steps": int(clean), "floor_overflows": 0}
