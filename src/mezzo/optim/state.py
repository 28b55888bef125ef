"""What mezzo's optimizers save and load: torch's state dicts in form, with every tensor in its own dtype."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy
import torch
from torch import Tensor

from mezzo.errors import StateError
from mezzo.optim.checks import check_group
from mezzo.shards import placed
from mezzo.step.update import RULES, UpdateRule

Group: TypeAlias = dict[str, Any]

#: What a loaded state does not change of a group: its parameters, and how the moments lie in memory.
_OWN: Final = ("params", "state_dtype")


def saved(groups: Sequence[Group], state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what a state dict of an optimizer holds, in torch's form.

    Args:
        groups: Its parameter groups.
        state: What it keeps, by parameter; what belongs to none is saved as it is.
    """
    places: dict[int, int] = {}
    packed = [
        {name: _plain(value) for name, value in group.items() if name != "params"}
        | {"params": [places.setdefault(id(param), len(places)) for param in group["params"]]}
        for group in groups
    ]
    kept = {
        places[id(key)] if isinstance(key, Tensor) else key: _exact(value) if isinstance(value, dict) else value
        for key, value in state.items()
    }
    return {"state": kept, "param_groups": packed}


def restored(
    given: Mapping[str, Any], groups: Sequence[Group], rule_of: Callable[[Group], UpdateRule]
) -> tuple[dict[Any, Any], list[Group]]:
    """Return the state and the parameter groups of an optimizer that continues a saved one.

    Args:
        given: A state dict, as :func:`saved` returns it, or torch's optimizer of the same name.
        groups: The optimizer's parameter groups.
        rule_of: Gives a group's update rule.

    Raises:
        StateError: State of another shape or rule.
        ValueError: Other parameter groups, as torch says it.
    """
    _require_groups(groups, given["param_groups"])
    continued: list[Group] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    known = set()
    for mine, theirs in zip(groups, given["param_groups"], strict=True):
        group = {**mine, **theirs, **{name: mine[name] for name in _OWN}}
        check_group({**group, "params": None})
        continued.append(group)
        known.update(theirs["params"])
        for param, index in zip(mine["params"], theirs["params"], strict=True):
            its, dtype = given["state"].get(index, {}), getattr(torch, group["state_dtype"])
            if entry := _continued(its, param, rule_of(group), dtype):
                state[param] = entry
    _share_counts(state.values())
    state.update((key, copy.deepcopy(value)) for key, value in given["state"].items() if key not in known)
    return state, continued


def _require_groups(mine: Sequence[Group], theirs: Sequence[Group]) -> None:
    """Refuse other parameter groups, in torch's words, which programs look for."""
    if len(mine) != len(theirs):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(a["params"]) != len(b["params"]) for a, b in zip(mine, theirs, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )


def _plain(value: Any) -> Any:
    """Return an option as it is saved: NumPy's numbers are Python's."""
    if isinstance(value, numpy.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _exact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return state as it is saved: the count as a float64 tensor, which is exact to 2^53."""
    step = state.get("step")
    return {**state, "step": step.to(torch.float64)} if isinstance(step, Tensor) else dict(state)


def _continued(
    saved: Mapping[str, Any], param: Tensor, update_rule: UpdateRule, state_dtype: torch.dtype
) -> dict[str, Any]:
    """Return the state of one parameter that continues a saved one.

    Args:
        saved: Of this optimizer, or of torch's of the same name.
        param: The parameter.
        update_rule: What the state is for.
        state_dtype: Of the moments.

    Raises:
        StateError: Another shape, or too few states.
    """
    moments = RULES[update_rule.name].states
    # torch's SGD has kept None for a momentum that is yet to come.
    saved = {name: value for name, value in saved.items() if name not in moments or isinstance(value, Tensor)}
    _require_whole(saved, update_rule, param)

    def of_this_run(name: str, value: Any) -> Any:
        if name == "step":
            return torch.as_tensor(value).to(param.device, torch.int64).reshape(()).clone()
        if name in moments:
            if value.shape != param.shape:
                raise StateError(
                    f"the saved {name} belongs to another parameter",
                    where=f"{tuple(value.shape)} → {tuple(param.shape)}",
                    write="the same model and optimizer",
                )
            laid_out = torch.empty_like(param, dtype=state_dtype, memory_format=torch.preserve_format)
            return laid_out.copy_(placed(value, param))
        # A note of the user's.
        return value.to(param.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)

    state = {name: of_this_run(name, value) for name, value in saved.items()}
    if "step" not in state and any(name in state for name in moments):
        # torch's SGD counts nothing: a momentum is there from its first step on. Other libraries' Lion is alike.
        state["step"] = torch.ones((), dtype=torch.int64, device=param.device)
    return state


def _require_whole(saved: Mapping[str, Any], update_rule: UpdateRule, param: Tensor) -> None:
    """Refuse a history of which a part is missing; one that has not begun yet may be as short as it likes."""
    missing = [name for name in update_rule.states if name not in saved]
    if "step" not in saved:
        begun = len(missing) < len(update_rule.states)
        missing += ["step"] if update_rule.name in ("adam", "adamw") else []
    else:
        begun = bool(missing) and float(saved["step"]) != 0
    if begun and missing:
        count = f"step {float(saved['step']):g} of a" if "step" in saved else "a"
        raise StateError(
            f"the saved state has no {missing[0]}",
            where=f"{count} parameter of shape {tuple(param.shape)}, "
            f"which has {', '.join(name for name in saved if name != 'step') or 'nothing else'}",
            why="moments that begin at zero in the middle of a run would take steps of another size",
            write="the state of an optimizer of the same name and options",
        )


def _share_counts(states: Iterable[dict[str, Any]]) -> None:
    """Let parameters with equal counts share one, so that they are updated together again.

    Raises:
        StateError: A count that no number of steps gives.
    """
    counted = [state for state in states if "step" in state]
    shared: dict[tuple[torch.device, int], Tensor] = {}
    for device in {state["step"].device for state in counted}:
        here = [state for state in counted if state["step"].device == device]
        counts = torch.stack([state["step"] for state in here]).tolist()  # one transfer for all
        if wrong := [count for count in counts if not 0 <= count < 2**53]:
            raise StateError(
                f"the saved step is {wrong[0]}", why="it counts updates, from 0 on", write="optimizer.state_dict()"
            )
        for state, count in zip(here, counts, strict=True):
            state["step"] = shared.setdefault((device, count), state["step"])
