"""The state of mezzo's optimizers: what a step takes of what programs make of it, and state dicts in torch's form.

Every tensor is saved in its own dtype. Moments in codes have names of their own, which no other optimizer knows.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from numbers import Real
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from mezzo.errors import StateError, some_of
from mezzo.optim.groups import Group, check_group, holds_numbers, in_words, is_number
from mezzo.sharded import flags_of_all, is_distributed, local, placed, sharded_as, sharding
from mezzo.step import moments
from mezzo.step.update import RULES, UpdateRule, rule
from mezzo.tensors import described, dtype_name, flat

#: Rules whose corrections follow from the count: without it, or half of the moments, no step has the right size.
_CORRECTED: Final = ("adam", "adamw")
#: torch's SGD counts nothing, and neither does Lion of other libraries: a momentum is there from its first step on.
_COUNTED: Final = {"step": 1}
#: Tensors that are their memory and nothing else.
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_EDITS: Final = "tensors of the parameter's shape; or optimizer.state.pop(parameter), for a history that begins anew"
#: All moments of all rules.
_MOMENTS: Final = tuple(dict.fromkeys(name for update_rule in RULES.values() for name in update_rule.states))
#: Moments that torch's optimizers begin where they find none, and what stands there in a state dict for codes: they
#: would go on without them, and end in an error now.
_BEGUN: Final = {"momentum_buffer": "codes"}
#: What a loaded state does not change of a group: its parameters, and how the moments lie in memory.
_OWN: Final = ("params", "state_dtype", "adamw")

# What is no state of an optimizer's, found before anything is changed.


def check_state(state_dict: Mapping[str, Any], rule_names: Sequence[str]) -> None:
    """Raise for a value that is no optimizer's state, or the state of one that updates weights in another way.

    Args:
        state_dict: What is to be loaded.
        rule_names: The update rule of each of the optimizer's groups.

    Raises:
        StateError: With what is missing or different.
    """
    write = "optimizer.load_state_dict(saved), with saved = optimizer.state_dict()"
    if not isinstance(state_dict, Mapping):
        raise StateError(f"this is no optimizer's state: {in_words(state_dict)}, not a mapping", write=write)
    if missing := [name for name in ("state", "param_groups") if name not in state_dict]:
        raise StateError(
            f"this is no optimizer's state: {' and '.join(missing)} missing",
            where=f"keys {', '.join(map(str, state_dict)) or 'none'}",
            write=write,
        )
    # Of more groups than there are torch says it.
    groups = [*zip(state_dict["param_groups"], chain(rule_names, repeat(rule_names[0])), strict=False)]
    if wrong := [problem for group, name in groups for problem in _malformed(state_dict, group, RULES[name].states)]:
        raise StateError("this is no optimizer's state", where=some_of(wrong), write=write)
    for number, (group, name) in enumerate(groups):
        decoupled = group.get("decoupled_weight_decay")
        if not is_number(decay := group.get("weight_decay", 0.0), 0.0, math.inf):
            continue  # which every group is asked about later
        if name in _CORRECTED and decay and decoupled not in (None, name == "adamw"):
            raise StateError(
                f"the saved weight decay is {'' if decoupled else 'not '}decoupled, and this optimizer's is "
                f"{'not' if decoupled else ''}".rstrip(),
                where=f"group {number}, weight_decay={decay}",
                why="one is added to the gradient, the other taken off the weight",
                write=f"mezzo.optim.{'AdamW' if decoupled else 'Adam'}",
            )


def _require_same_rule(state_dict: Mapping[str, Any], number: int, group: Mapping[str, Any], name: str) -> None:
    """Refuse a group that another rule has updated, by what it says, or by the moments of its parameters."""
    entries = {index: state_dict["state"][index] for index in group["params"] if index in state_dict["state"]}
    own_moments = {*RULES[name].states, *map(moments.name_of_codes, RULES[name].states)}
    other_moments = {*_MOMENTS, *map(moments.name_of_codes, _MOMENTS)} - own_moments
    foreign = [
        f"state[{index!r}] has {', '.join(sorted(other_moments & entry.keys()))}"
        for index, entry in entries.items()
        if not own_moments & entry.keys() and other_moments & entry.keys()
    ]
    if foreign or bool(group.get("adamw", name == "adamw")) != (name == "adamw"):
        raise StateError(
            f"the saved state of group {number} is {'not ' * (name == 'adamw')}AdamW's",
            where=some_of(foreign) or f"group {number}, adamw={group['adamw']}",
            why=f"this group is updated by {'AdamW' if name == 'adamw' else 'Muon'}, whose history is another one",
            write="groups as they were when it was saved; or optimizer.load_state_dict of an optimizer made alike",
        )


def _malformed(state_dict: Mapping[str, Any], group: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield what no optimizer has written of a group's parameters; of containers of another kind Python says it."""
    for index in group["params"]:
        if index in state_dict["state"]:
            yield from _malformed_entry(state_dict["state"][index], f"state[{index!r}]", names)


def _malformed_entry(entry: Any, at: str, names: Sequence[str]) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"{at} is {in_words(entry)}, not a mapping"
        return
    numbers = {*names, *map(moments.name_of_codes, names)}
    for name, value in entry.items():
        if name == "step" and not _is_count(value):
            yield f"{at}.step is {in_words(value)}, not a count"
        # torch's SGD has kept None for a momentum that is yet to come.
        is_left_out = value is None or (isinstance(value, str) and value == _BEGUN.get(name))
        if name in numbers and not is_left_out and not holds_numbers(value):
            yield f"{at}.{name} is {in_words(value)}, not a dense tensor of real numbers"


def _is_count(value: Any) -> bool:
    """Whether a value is a scalar that converts to ``int``; :func:`counts_of` checks its range."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and holds_numbers(value)
    return abs(value) < 2**63 if isinstance(value, int) else isinstance(value, Real)


def check_unchanged(param: Tensor, kept: Mapping[str, Tensor]) -> None:
    """Refuse a parameter whose shape or device is not that of what belongs to it any more.

    Args:
        param: The parameter.
        kept: What belongs to it, by name.

    Raises:
        StateError: With both.
    """
    for name, value in kept.items():
        if value.shape != param.shape:
            raise StateError(
                "a parameter was resized after the optimizer made its state, or its state was edited",
                where=f"{tuple(value.shape)} → {tuple(param.shape)}, {name}",
                write="a new optimizer over the new parameters; or state of the parameter's shape: "
                f'optimizer.state[param]["{name}"] = torch.zeros_like(param)',
            )
        if value.device != param.device:
            raise StateError(
                "a parameter was moved after the optimizer made its state",
                where=f"{value.device} → {param.device}, shape {tuple(param.shape)}",
                write="model.to(device) before the optimizer is made, or optimizer.load_state_dict after it",
            )


# What a step reads of a state, which is the user's to edit.


def keys_of(update_rule: UpdateRule, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of what a step reads of the state of a parameter: the count, then as an update takes it."""
    if dtype != torch.int8:
        return "step", *update_rule.states
    return "step", *(
        name_of(name) for name in update_rule.states for name_of in (moments.name_of_codes, moments.scale_of)
    )


def taken(state: Any, param: Tensor, update_rule: UpdateRule, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a step takes of the state of a parameter, whatever a program has made of it.

    What lies in memory as kernels read it is taken as it is, and anything else as a copy that does. A history that is
    to begin is left out.

    Args:
        state: What ``optimizer.state`` holds of it; ``None`` before the first step.
        param: The parameter.
        update_rule: What the state is for.
        dtype: Of the moments: ``torch.int8`` for codes.

    Returns:
        The moments, by the names that :func:`keys_of` gives them, and the count as it stands there.

    Raises:
        StateError: What is no state of this rule and this parameter, or the rest of one; nothing was changed.
    """
    if state is None:
        return {}
    moments_by_name = {name: _kept(state, name) for name in update_rule.states} if isinstance(state, Mapping) else {}
    stored_moments = {name: pair for name, pair in moments_by_name.items() if isinstance(pair[0], Tensor)}
    check_unchanged(param, {name: value for name, (value, _) in stored_moments.items()})
    if wrong := list(_malformed_entry(state, f"optimizer.state of {described(param)}", update_rule.states)):
        raise StateError("the edited state is none that a step can use", where=some_of(wrong), write=_EDITS)
    state_of_step: dict[str, Any] = {}
    for name, (value, scales) in stored_moments.items():
        state_of_step |= _as_it_lies(name, value, scales, param, dtype) or _moment(
            name, value, scales, param, dtype, "edited"
        )
    count = {"step": state["step"]} if "step" in state else {}
    if update_rule.name in _CORRECTED:
        _require_complete(stored_moments.keys() | count.keys(), state, rule(update_rule.name), param, "edited")
        return {**state_of_step, **count}
    # A momentum begins with the first step that finds none, as torch's does.
    if len(stored_moments) < len(moments_by_name):
        return {}
    return {**_COUNTED, **state_of_step, **count} if stored_moments else count


def _kept(state: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Return a moment or its codes, and the scales of these; codes had the moment's own name once."""
    value = state.get(name)
    codes = value if isinstance(value, Tensor) else state.get(moments.name_of_codes(name))
    return codes, state.get(moments.scale_of(name))


def _as_it_lies(name: str, value: Tensor, scales: Any, param: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a moment by the names that a step reads, if it lies as kernels read it; nothing if it does not."""
    local_value, local_param = local(value), local(param)
    if type(local_value) not in _PLAIN or sharding(value) != sharding(param) or flat(local_value) is None:
        return {}
    if dtype != torch.int8:
        return {name: value} if value.dtype == dtype else {}
    form = torch.bfloat16, (moments.num_groups(local_param.numel()),), local_param.device
    fits = isinstance(scales, Tensor) and (scales.dtype, tuple(scales.shape), scales.device) == form
    are_codes = value.dtype == moments.codes_of(name) and fits and scales.is_contiguous()
    return {moments.name_of_codes(name): value, moments.scale_of(name): scales} if are_codes else {}


def put(state: MutableMapping[str, Any], new_state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Update a state in place to what a step reads, and remove every other moment.

    Args:
        state: What ``optimizer.state`` holds of a parameter.
        new_state: What a step reads.
        names: The moments, as their rule calls them.
    """
    state.update(new_state)
    for name in names:
        for key in {name, moments.name_of_codes(name), moments.scale_of(name)}.difference(new_state):
            state.pop(key, None)


def counts_of(steps: Sequence[Any], whose: str) -> list[int]:
    """Return counts of updates as numbers, by one transfer from each device.

    Raises:
        StateError: A count that no number of steps gives.
    """
    counts: list[Any] = list(steps)
    tensors = {index: step.reshape(()) for index, step in enumerate(steps) if isinstance(step, Tensor)}
    for device in {step.device for step in tensors.values()}:
        places = [index for index, step in tensors.items() if step.device == device]
        for index, count in zip(places, torch.stack([tensors[p].double() for p in places]).tolist(), strict=True):
            counts[index] = count
    if wrong := [count for count in counts if not 0 <= count < 2**53]:
        raise StateError(
            f"the {whose} step is {wrong[0]:g}", why="it counts updates, from 0 on", write="optimizer.state_dict()"
        )
    return list(map(int, counts))


def first_count(state: Mapping[str, Any], group: Group) -> int:
    """Return what to count on from where a program has set a count to zero: 1 where a momentum has begun.

    torch's SGD counts nothing, and dampens the gradient wherever there is a momentum: not in the first step.
    """
    moments_of_param = [state[key] for key in state if key != "step"] if group.get("dampening") else []
    if not moments_of_param:
        return 0
    moves = torch.stack([local(moment).count_nonzero() for moment in moments_of_param]).any().reshape(1)
    return int(flags_of_all(moves, moments_of_param))  # one for all ranks, although some may see zeros alone


def kept_of(state: Mapping[str, Tensor], keys: Sequence[str]) -> tuple[Tensor, ...]:
    """Return what this rank keeps of the moments of a parameter, as an update takes it."""
    return tuple(local(state[key]) for key in keys if key != "step")


# State dicts.


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
    saved_state = {
        places[id(key)] if isinstance(key, Tensor) else key: _exact(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
    }
    return {"state": saved_state, "param_groups": packed}


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
    known_keys = set()
    for number, (mine, theirs) in enumerate(zip(groups, given["param_groups"], strict=True)):
        if "adamw" in mine:
            _require_same_rule(given, number, theirs, rule_of(mine).name)
        group = {**mine, **theirs, **{name: mine[name] for name in _OWN if name in mine}}
        check_group({**group, "params": None})
        continued.append(group)
        known_keys.update(theirs["params"])
        for param, index in zip(mine["params"], theirs["params"], strict=True):
            its, dtype = given["state"].get(index, {}), getattr(torch, group["state_dtype"])
            if theirs.get("state_dtype") == "int8":
                _require_codes(its, rule_of(group).states)
            if entry := _continued(its, param, rule_of(group), dtype):
                state[param] = entry
    counts_of([kept["step"] for kept in state.values() if "step" in kept], "saved")
    state.update((key, copy.deepcopy(value)) for key, value in given["state"].items() if key not in known_keys)
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
    """Return state as it is saved.

    The count is a float64 tensor, which is exact to 2^53. Scales of shards are one for each element: so they are loaded
    over any number of ranks.
    """
    step = state.get("step")
    exact = {**state, "step": step.to(torch.float64)} if isinstance(step, Tensor) else dict(state)
    exact |= {n: word for n, word in _BEGUN.items() if n not in state and moments.name_of_codes(n) in state}
    return with_spread_scales(exact) if any(map(is_distributed, state.values())) else exact


def with_spread_scales(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with one scale for each code, which lie over the ranks as the codes do."""
    spread = dict(state)
    for name in _MOMENTS:
        codes, scales = state.get(moments.name_of_codes(name)), state.get(moments.scale_of(name))
        if isinstance(codes, Tensor) and isinstance(scales, Tensor) and scales.shape != codes.shape:
            spread[moments.scale_of(name)] = sharded_as(moments.spread(scales, local(codes)), codes)
    return spread


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
    names = RULES[update_rule.name].states
    pairs = {name: pair for name in names for pair in [_kept(saved, name)] if isinstance(pair[0], Tensor)}
    _require_complete(pairs.keys() | (saved.keys() & {"step"}), saved, update_rule, param, "saved")
    state = dict[str, Any]()
    for name, (value, scales) in pairs.items():
        state |= _moment(name, value, scales, param, state_dtype, "saved")
    if (step := saved.get("step", _COUNTED["step"] if pairs else None)) is not None:
        state["step"] = torch.as_tensor(step).to(param.device, torch.int64).reshape(()).clone()
    own_keys = {*names, *map(moments.name_of_codes, names), *map(moments.scale_of, names), "step"}
    for name, value in saved.items():  # notes of the user's
        if name not in own_keys:
            state[name] = value.to(param.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
    return state


def _require_codes(saved: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse moments that are codes in another dtype, as where a checkpoint of before is read into FP32 tensors.

    Codes had the moments' own names, and torch's distributed checkpoint copies by name.

    Raises:
        StateError: Every element of a moment is a whole number that a code can be, and not all are zero.
    """
    for name in names:
        value = None if moments.name_of_codes(name) in saved else saved.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            codes = local(value)
            if codes.count_nonzero() and ((codes == codes.round()) & (codes.abs() <= 255)).all():
                raise StateError(
                    f"the saved {name} is codes without their scales",
                    where=f"{described(codes)}, whole numbers",
                    why="a checkpoint of int8 moments was read into the tensors of an optimizer that keeps others",
                    write='state_dtype="int8" where it is read; that optimizer\'s state_dict() loads into any other',
                )


def _moment(name: str, value: Tensor, scales: Any, param: Tensor, dtype: torch.dtype, whose: str) -> dict[str, Tensor]:
    """Return a moment as the state stores it, in new memory.

    Args:
        name: The moment's.
        value: The moment, or its codes.
        scales: Of the codes.
        param: Whose moment it is.
        dtype: Of the moments from now on: ``torch.int8`` for codes.
        whose: Where it comes from, for errors.

    Raises:
        StateError: Another shape, or codes that scales do not fit.
    """
    if value.shape != param.shape:
        raise StateError(
            f"the {whose} {name} belongs to another parameter",
            where=f"{tuple(value.shape)} → {tuple(param.shape)}",
            write="the same model and optimizer",
        )
    stored = moments.zeros(name, param, dtype)
    target, *target_scales = stored.values()
    if moments.is_coded(value.dtype):
        scales_of_codes, codes = _scale_of_each(name, value, scales, whose), local(value)
        if dtype == torch.int8 and sharding(value) == sharding(param) and flat(codes, local(target)) is not None:
            scales_here = moments.gathered(local(scales_of_codes), codes)
            if scales_here is not None and moments.fit(codes, scales_here):  # else groups were cut otherwise
                local(target).copy_(codes)
                target_scales[0].copy_(scales_here)
                return stored
        decoded = sharded_as(moments.valued(codes, local(scales_of_codes)), value)
        return _moment(name, decoded, None, param, dtype, whose)
    if dtype != torch.int8:
        target.copy_(placed(value, param))
        return stored
    wide = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    codes, new_scales = moments.encode(local(wide.copy_(placed(value, param))), moments.codes_of(name))
    local(target).copy_(codes)
    target_scales[0].copy_(new_scales)
    return stored


def _scale_of_each(name: str, codes: Tensor, scales: Any, whose: str) -> Tensor:
    """Return the scales of codes, one for each of them.

    Raises:
        StateError: There are none, or they do not belong to the codes.
    """
    write = "the state as optimizer.state_dict() returned it"
    if not holds_numbers(scales) or not scales.is_floating_point():
        raise StateError(
            f"the {whose} {name} has codes without scales",
            where=f"{moments.scale_of(name)}: {in_words(scales)}",
            write=write,
        )
    count = moments.num_groups(codes.numel())
    shapes = (codes.shape,) if is_distributed(codes) else (codes.shape, (count,))
    if codes.dtype != moments.codes_of(name) or scales.shape not in shapes:
        raise StateError(
            f"the {whose} {name} is in codes of another form",
            where=f"{described(codes)} with scales {list(scales.shape)}, {list(shapes[-1])} expected",
            why=f"its codes are {dtype_name(moments.codes_of(name))}, and {moments.GROUP} neighbours share a scale",
            write=write,
        )
    if scales.shape == codes.shape:
        return placed(scales.to(torch.bfloat16), codes)
    if not moments.fit(codes, scales):
        raise StateError(
            f"the {whose} {name} and its scales are not those of one state",
            where=f"{described(codes)}, {moments.scale_of(name)}",
            why="in some group no element is as large as its scale says: they are damaged, or the codes were brought "
            "into another order, as those of a channels-last model are where a file keeps no strides",
            write="the state as optimizer.state_dict() returned it, saved by torch.save; or amp.stateful()",
        )
    return moments.spread(scales.to(torch.bfloat16), codes if flat(codes) else codes.contiguous())


def _require_complete(
    present: Collection[str], state: Mapping[str, Any], update_rule: UpdateRule, param: Tensor, whose: str
) -> None:
    """Refuse a history of which a part is missing; one that has not begun yet may be as short as it likes.

    Args:
        present: The names of moments that are there, and of the count.
        state: Of the parameter.
        update_rule: What the state is for.
        param: The parameter.
        whose: Where the state comes from.
    """
    missing = [name for name in update_rule.states if name not in present]
    if "step" not in present:
        begun = len(missing) < len(update_rule.states)
        missing += ["step"] if update_rule.name in _CORRECTED else []
    else:
        begun = bool(missing) and float(state["step"]) != 0
    if begun and missing:
        count = f"step {float(state['step']):g} of a" if "step" in present else "a"
        raise StateError(
            f"the {whose} state has no {missing[0]}",
            where=f"{count} parameter of shape {tuple(param.shape)}, "
            f"which has {', '.join(name for name in present if name != 'step') or 'nothing else'}",
            why="moments that begin at zero in the middle of a run would take steps of another size",
            write=_EDITS if whose == "edited" else "the state of an optimizer of the same name and options",
        )
