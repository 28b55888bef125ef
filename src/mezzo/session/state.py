"""A session's state between two steps: a plain tree, checked against a table before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mezzo.errors import MezzoError, StateError, shown, some_of
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.scale.state import VALUES, is_count
from mezzo.scale.words import one_number
from mezzo.session.stats import Stats
from mezzo.shards import sharded_as
from mezzo.tensors import described, dtype_name

if TYPE_CHECKING:
    from mezzo.session.engine import Engine

__all__ = ["VERSION", "check", "load", "load_checked", "require_between_steps", "save"]

logger = logging.getLogger(__name__)

#: Of the form of a state; others are refused by their number.
VERSION: Final = 4


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
        weights: Whether the low halves of weights are part of it; the models' own state dicts have FP32 values.

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
    rests = {name: sharded_as(stored[p].rest_of(p).clone(), p) for name, p in named if p in stored}
    return {
        "version": VERSION,
        "policy": str(policy),
        "parameters": {name: described(param) for name, param in named},
        "loss_scale": engine.scaler.state_dict(),
        "stats": engine.account.state_dict(),
        "remainders": rests,
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
    if (other := _of_another_system(state)) is not None:
        if policy.loss_scale.mode == "dynamic":
            _load_scale(engine, other)
        engine.account.load_state_dict(engine.account.state_dict(), float(engine.scaler.state.scale))
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
    for name, rest in state["remainders"].items():
        if (param := named[name]) in stored and state["parameters"][name].startswith(f"{dtype_name(param.dtype)} "):
            stored[param].set_rest(param, rest)
    if saved.loss_scale.mode == policy.loss_scale.mode == "dynamic":
        _load_scale(engine, _within(state["loss_scale"], policy.loss_scale))
    engine.account.load_state_dict(state["stats"], float(engine.scaler.state.scale))


def _load_scale(engine: Engine, numbers: Mapping[str, Any]) -> None:
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), **numbers})


def _within(saved: Mapping[str, Any], now: LossScale) -> dict[str, Any]:
    """Return a saved scale within the bounds of this session's rules."""
    highest = saved["scale"] if now.ceiling is None else min(saved["scale"], now.ceiling)
    return {**saved, "scale": float(max(highest, now.floor)), "budget": min(saved["budget"], now.hysteresis)}


# The table ------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_policy(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(Policy.parse(value))
    except MezzoError:
        return False


def _by_name(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(each, kind) for each in value.values())


#: Each field of a state, with what stands before the dot as the mapping that it is in: what fits it, and in words.
_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "policy": (_is_policy, "the text of a policy"),
    "parameters": (_by_name(str), "texts by name"),
    "remainders": (_by_name(Tensor), "tensors by name"),
    **{f"loss_scale.{name}": field for name, field in VALUES.items()},
    **{
        f"stats.{field.name}": (is_count, "a count") if isinstance(field.default, int) else (_is_number, "a number")
        for field in fields(Stats)
    },
    "stats.recent": (lambda value: isinstance(value, str) and set(value) <= {"X", "."}, "a text of X and ."),
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
    for path, (fits, words) in _FIELDS.items():
        folder, _, name = path.rpartition(".")
        there = state.get(folder) if folder else state
        if not isinstance(there, Mapping) or name not in there:
            yield f"{path} is missing"
        elif not fits(there[name]):
            yield f"{path} is {shown(there[name])}, not {words}"


def _differences(engine: Engine, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that is another one, or whose weight would lose bits."""
    before, mine, rests = state["parameters"], dict(engine.weights.named_params()), state["remainders"]
    for name in dict.fromkeys((*before, *mine, *rests)):
        was = before.get(name, "missing")
        now = described(mine[name]) if name in mine else "missing"
        if was.partition(" ")[2] != now.partition(" ")[2] or name not in mine:
            yield f"parameter {name}: {was} → {now}"
        elif name in rests and (rests[name].shape != mine[name].shape or rests[name].dtype != torch.int16):
            yield f"remainders.{name} is {described(rests[name])}, and the parameter {now}"


# Other systems --------------------------------------------------------------------------------------------


#: In the states of torch's, Paddle's and apex's scalers: the keys of the scale, and of the steps since it moved.
_SYSTEMS: Final = (("scale", "_growth_tracker"), ("scale", "incr_count"), ("loss_scale", "unskipped"))


def _of_another_system(state: Any) -> dict[str, Any] | None:
    """Return the numbers of torch's, Paddle's or apex's scaler; ``None`` where it is none of these.

    References:
        torch/amp/grad_scaler.py, ``GradScaler.state_dict``; python/paddle/amp/grad_scaler.py, ``AmpScaler.state_dict``;
        apex/amp/frontend.py, ``state_dict``.
    """
    if not isinstance(state, Mapping) or "version" in state:
        return None
    state = state.get("loss_scaler0", state)
    for scale, clean_steps in _SYSTEMS:
        if scale in state and clean_steps in state:
            numbers = {"scale": state[scale], "clean_steps": state[clean_steps]}
            return {name: one_number(value) for name, value in numbers.items()} | {"floor_overflows": 0}
    return None
