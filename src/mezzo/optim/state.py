"""What mezzo's optimizers take in and give out: arguments, hyper-parameters, and state dicts in torch's form.

Every tensor is saved in its own dtype.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy
import torch
from torch import Tensor

from mezzo.errors import PolicyError, StateError, closest, message, nearest, raise_together, shown, some_of
from mezzo.sharded import flags_of_all, is_distributed, local, placed, sharded_as, sharding
from mezzo.step import moments
from mezzo.step.update import RULES, UpdateRule
from mezzo.tensors import CASTABLE, described, dtype_name, dtype_of, flat

# What no optimizer can work with, found before anything is changed.

_STATE_DTYPES: Final = ("float32", "bfloat16", "int8")
#: Hyper-parameters: the least they may be, and what to write.
_LEAST: Final = {
    "lr": (0.0, "1e-3"),
    "eps": (0.0, "1e-8"),
    "weight_decay": (0.0, "0.01"),
    "momentum": (0.0, "0.9"),
    "dampening": (-math.inf, "0.0"),
}
#: Options that are on or off.
_FLAGS: Final = ("amsgrad", "maximize", "nesterov")
_ONE_PASS: Final = "a step here is always one pass that never waits for the host, so that a CUDA graph can capture it"
#: Arguments of torch's optimizers that have no meaning here: why, and what to write instead.
_TORCH_ONLY: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        **dict.fromkeys(("foreach", "fused", "capturable"), (_ONE_PASS, "leave it out")),
        "differentiable": ("autograd does not record an update here", "leave it out; torch.optim's where it is True"),
        "decoupled_weight_decay": ("that is another class here", "leave it out; mezzo.optim.AdamW where it is True"),
    }
)


def check_arguments(optimizer: object, others: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that an optimizer's signature does not name.

    Args:
        optimizer: The optimizer under construction.
        others: What is left over.

    Raises:
        PolicyError: One message lists everything.
    """
    kind, problems = type(optimizer), []
    for name, value in others.items():
        if name not in _TORCH_ONLY:
            known = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
            problems.append(PolicyError(f"{kind.__name__} has no argument {name!r}", why=nearest(name, known)))
        elif value:  # torch's optimizers have none of them by default
            why, write = _TORCH_ONLY[name]
            problems.append(PolicyError(f"{kind.__name__} takes no {name}={value!r}", why=why, write=write))
    raise_together(problems)


def check_group(group: Mapping[str, Any], where: str = "") -> None:
    """Raise all that is wrong with the values of a parameter group.

    Args:
        group: With the defaults filled in. Its parameters are looked at where they are a list.
        where: Which group it is, for the message.

    Raises:
        PolicyError: One message lists everything.
    """
    raise_together(_problems(group, where))


def ordered(params: Any) -> Any:
    """Return parameters as they are given, unless their order would change between runs.

    Raises:
        TypeError: A set, as torch's optimizers refuse it.
    """
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            message(
                f"optimizer parameters need to be organized in ordered collections, not in a {type(params).__name__}",
                why="its order changes from run to run, and a saved state belongs to parameters by their order",
                write="a list of them",
            )
        )
    return params


def named(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group, or the defaults of an optimizer, with the full name of the dtype of its state."""
    if "state_dtype" not in group:
        return dict(group)
    dtype = dtype_of(group["state_dtype"])
    return {**group, "state_dtype": dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype}


def _problems(group: Mapping[str, Any], where: str) -> Iterator[PolicyError]:
    for name, (least, example) in _LEAST.items():
        if not _is_number(group.get(name, 0.0), least, math.inf):
            why = "it is a finite number" + (f" from {least:g}" if math.isfinite(least) else "")
            yield PolicyError(f"{name} is {group[name]!r}", where=where, why=why, write=f"{name}={example}")
    for name in _FLAGS:
        if not isinstance(flag := group.get(name), (bool, int, numpy.bool_, type(None))):
            yield PolicyError(f"{name} is {in_words(flag)}", where=where, why="it is on or off", write=f"{name}=True")
    betas = group.get("betas", (0.0, 0.0))
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_number(b, 0.0, 1.0) for b in betas)):
        why = "each is from 0 to below 1"
        yield PolicyError(f"betas are {betas!r}", where=where, why=why, write="betas=(0.9, 0.999)")
    if group.get("nesterov") and (not group.get("momentum") or group.get("dampening")):
        yield PolicyError(
            "nesterov needs momentum and no dampening",
            where=f"momentum={group.get('momentum')}, dampening={group.get('dampening')}",
            write="momentum=0.9, dampening=0, nesterov=True",
        )
    if group["state_dtype"] not in _STATE_DTYPES:
        wrong = str(group["state_dtype"])
        write = f'state_dtype="{closest(wrong, _STATE_DTYPES) or "bfloat16"}"'
        yield PolicyError(f"unknown state_dtype {wrong!r}", why=nearest(wrong, _STATE_DTYPES), write=write)
    yield from wrong_weights(group.get("params"))


def _is_number(value: Any, least: float, end: float) -> bool:
    """Whether a value is from ``least`` to below ``end``. A tensor off the CPU is not asked, which would wait."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not _holds_numbers(value):
            return False
        if value.device.type != "cpu":
            return True
        value = in_host_memory(value)
    if not isinstance(value, Real):  # NumPy's are
        return False
    try:
        number = float(value)
    except OverflowError:  # a whole number may be beyond it
        return False
    return math.isfinite(number) and least <= number < end


def in_host_memory(number: Tensor) -> float:
    """Return what a tensor of one number in host memory holds, also while a graph is captured."""
    return float(number.detach().double().reshape(()).numpy())


def wrong_weights(params: Any) -> Iterator[PolicyError]:
    """Yield what stands against weights in dtypes that no storage takes.

    Those that are not trained may be anything, quantised for instance.

    Args:
        params: A list of parameters, or of names with parameters; of anything else nothing is said.
    """
    wrong = []
    for each in params if isinstance(params, (list, tuple)) else ():
        name, param = each if isinstance(each, tuple) else ("a parameter", each)
        if (
            isinstance(param, Tensor)
            and param.dtype not in CASTABLE
            and (param.requires_grad or param.grad is not None)
        ):
            wrong.append(f"{name} ({dtype_name(param.dtype)}, shape {tuple(param.shape)})")
    if wrong:
        yield PolicyError(
            "weights in a format that no optimizer of mezzo's updates",
            where=some_of(wrong),
            why="weights are float32, float16 or bfloat16",
            write="model.float() first; or requires_grad_(False) for what is not trained",
        )


def check_state(state_dict: Mapping[str, Any], rule: str) -> None:
    """Refuse what is no optimizer's state, or the state of one that decays weights in another way.

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
    if wrong := list(_malformed(state_dict, tuple(RULES[rule].states))):
        raise StateError("this is no optimizer's state", where=some_of(wrong), write=write)
    for number, group in enumerate(state_dict["param_groups"]):
        decoupled = group.get("decoupled_weight_decay")
        if not _is_number(decay := group.get("weight_decay", 0.0), 0.0, math.inf):
            continue  # which every group is asked about later
        if rule in ("adam", "adamw") and decay and decoupled not in (None, rule == "adamw"):
            raise StateError(
                f"the saved weight decay is {'' if decoupled else 'not '}decoupled, and this optimizer's is "
                f"{'not' if decoupled else ''}".rstrip(),
                where=f"group {number}, weight_decay={decay}",
                why="one is added to the gradient, the other taken off the weight",
                write=f"mezzo.optim.{'AdamW' if decoupled else 'Adam'}",
            )


def _malformed(state_dict: Mapping[str, Any], moments: Sequence[str]) -> Iterator[str]:
    """Yield what no optimizer has written: containers, counts and moments of another kind."""
    state, groups = state_dict["state"], state_dict["param_groups"]
    yield from _no_mapping("state", state)
    yield from _no_list("param_groups", groups)
    for number, group in enumerate(groups if isinstance(groups, (list, tuple)) else ()):
        at = f"param_groups[{number}]"
        yield from _no_mapping(at, group)
        if not isinstance(group, Mapping):
            continue
        params = group.get("params")
        yield from _no_list(f"{at}.params", params, (int, str))
        for index in params if isinstance(params, (list, tuple)) and isinstance(state, Mapping) else ():
            if isinstance(index, (int, str)) and index in state:
                yield from _malformed_entry(state[index], f"state[{index!r}]", moments)


def _no_mapping(at: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{at} is {in_words(value)}, not a mapping"


def _no_list(at: str, value: Any, kinds: tuple[type, ...] = (object,)) -> Iterator[str]:
    if not isinstance(value, (list, tuple)):
        yield f"{at} is {in_words(value)}, not a list"
    elif wrong := [each for each in value if not isinstance(each, kinds)]:
        yield f"{at} has {in_words(wrong[0])}"


def _malformed_entry(entry: Any, at: str, moments: Sequence[str]) -> Iterator[str]:
    yield from _no_mapping(at, entry)
    for name, value in entry.items() if isinstance(entry, Mapping) else ():
        if name == "step" and not _is_count(value):
            yield f"{at}.step is {in_words(value)}, not a count"
        # torch's SGD has kept None for a momentum that is yet to come.
        if name in moments and value is not None and not _holds_numbers(value):
            yield f"{at}.{name} is {in_words(value)}, not a dense tensor of real numbers"


def _is_count(value: Any) -> bool:
    """Whether a value is one number that a whole number can be made of; which one it is, is asked later."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and _holds_numbers(value)
    return abs(value) < 2**63 if isinstance(value, int) else isinstance(value, Real)


def _holds_numbers(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return is_dense and not value.is_quantized and not value.is_complex()


def in_words(value: Any) -> str:
    """Write a value that a saved state should not have: of a tensor what it is, of a container only that it is one."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f"{dtype_name(value.layout)} "
        kind = "quantized " if value.is_quantized else layout
        return f"a {kind}tensor, {described(value)}{' on meta' if value.is_meta else ''}"
    return shown(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


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
                "a parameter was resized after the optimizer made its state",
                where=f"{tuple(value.shape)} → {tuple(param.shape)}, {name}",
                write="a new optimizer over the new parameters",
            )
        if value.device != param.device:
            raise StateError(
                "a parameter was moved after the optimizer made its state",
                where=f"{value.device} → {param.device}, shape {tuple(param.shape)}",
                write="model.to(device) before the optimizer is made, or optimizer.load_state_dict after it",
            )


def check_scales(param: Tensor, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse moments of which some are codes and others are not, and codes whose scales are not theirs.

    Raises:
        StateError: With both.
    """
    there = [name for name in names if name in state]
    if not any(moments.is_coded(state[name].dtype) for name in there):
        return
    for name in there:
        codes, beside = state[name], moments.scale_of(name)
        scales, count = state.get(beside), moments.num_groups(local(codes).numel())
        are_scales = isinstance(scales, Tensor) and (scales.dtype, scales.shape) == (torch.bfloat16, (count,))
        if codes.dtype != moments.codes_of(name) or not are_scales or state[beside].device != local(param).device:
            raise StateError(
                f"{name} and its scales are not what the optimizer made",
                where=f"{described(codes)}, {beside}: {in_words(scales)}, a parameter of shape {tuple(param.shape)}",
                why=f"codes are {dtype_name(moments.codes_of(name))}, and {moments.GROUP} neighbours share a scale, "
                f"{count} in all",
                write="optimizer.load_state_dict(saved), not entries of optimizer.state",
            )


def kept_of(state: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return what this rank keeps of the moments of a parameter, as an update takes it."""
    found: list[Tensor] = []
    for name in names:
        found.append(local(state[name]))
        if moments.is_coded(state[name].dtype):
            found.append(state[moments.scale_of(name)])
    return tuple(found)


# Hyper-parameters where kernels read them, following ``param_groups`` where schedulers change them.


def changes_nothing(groups: Iterable[Mapping[str, Any]], gradients: Iterable[Tensor]) -> bool:
    """Whether learning rates and gradients are all zero, as where ``torch.distributed.checkpoint`` has state made.

    The gradients are looked at, which waits for the device, and for other ranks where they are shards, only where every
    rate is a zero in host memory.
    """
    rates = [group.get("lr") for group in groups]
    if any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates):
        return False
    found = list(gradients)
    changes = any((shard._values() if shard.is_sparse else shard).any() for shard in map(local, found))
    if not any(map(is_distributed, found)):
        return not changes
    return not flags_of_all(torch.tensor([changes], device=found[0].device), found).any()


class Hypers:
    """One group's hyper-parameters as 0-d float64 tensors of one device.

    Args:
        names: Which, as the update rule calls them: ``beta1`` and ``beta2`` are the two of ``betas``.
        device: Where they live.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.tensors = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self._uploaded: dict[str, float] = {}

    def upload(self, group: Mapping[str, Any], where: str = "") -> None:
        """Bring over what changed, without waiting for the device.

        Tensors in host memory count as the numbers that they hold, so that a graph captured meanwhile copies nothing
        from there.

        Args:
            group: The parameter group.
            where: Which it is, for errors.

        Raises:
            PolicyError: A value that no update can work with was written to the group; nothing was uploaded of it.
        """
        for name, tensor in self.tensors.items():
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                tensor.copy_(value, non_blocking=True)
                self._uploaded.pop(name, None)
                continue
            number: Any = in_host_memory(value) if isinstance(value, Tensor) else value
            if name not in self._uploaded or self._uploaded[name] != number:
                check_group({**group, "params": None, **({} if name.startswith("beta") else {name: number})}, where)
                self._uploaded.pop(name, None)  # until it is there: an interrupt may come in between
                tensor.fill_(float(number))  # of NumPy's, say
                self._uploaded[name] = float(number)


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
            if theirs.get("state_dtype") == "int8":
                _require_codes(its, rule_of(group).states)
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
    """Return state as it is saved.

    The count is a float64 tensor, which is exact to 2^53. Scales of shards are one for each element: so they are loaded
    over any number of ranks.
    """
    step = state.get("step")
    found = {**state, "step": step.to(torch.float64)} if isinstance(step, Tensor) else dict(state)
    return with_spread_scales(found) if any(map(is_distributed, state.values())) else found


def with_spread_scales(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with one scale for each code, which lie over the ranks as the codes do."""
    found = dict(state)
    for name, codes in state.items():
        scales = state.get(moments.scale_of(name))
        are_codes = isinstance(codes, Tensor) and moments.is_coded(codes.dtype)
        if are_codes and isinstance(scales, Tensor) and scales.shape != codes.shape:
            found[moments.scale_of(name)] = sharded_as(moments.spread(scales, local(codes)), codes)
    return found


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
    # torch's SGD has kept None for a momentum that is yet to come.
    saved = {name: value for name, value in saved.items() if name not in names or isinstance(value, Tensor)}
    _require_whole(saved, update_rule, param)
    scales, state = set(map(moments.scale_of, names)), dict[str, Any]()
    for name, value in saved.items():
        if name == "step":
            state[name] = torch.as_tensor(value).to(param.device, torch.int64).reshape(()).clone()
        elif name in names:
            state |= _moment(name, value, saved.get(moments.scale_of(name)), param, state_dtype)
        elif name not in scales:  # a note of the user's
            state[name] = value.to(param.device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
    if "step" not in state and any(name in state for name in names):
        # torch's SGD counts nothing: a momentum is there from its first step on. Other libraries' Lion is alike.
        state["step"] = torch.ones((), dtype=torch.int64, device=param.device)
    return state


def _require_codes(saved: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse moments that are codes in another dtype, as where a checkpoint of codes is read into FP32 tensors.

    Raises:
        StateError: Every element of a moment is a whole number that a code can be, and not all are zero.
    """
    for name in names:
        value = saved.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            codes = local(value)
            if codes.count_nonzero() and ((codes == codes.round()) & (codes.abs() <= 255)).all():
                raise StateError(
                    f"the saved {name} is codes without their scales",
                    where=f"{described(codes)}, whole numbers",
                    why="a checkpoint of int8 moments was read into the tensors of an optimizer that keeps others",
                    write='state_dtype="int8" where it is read; that optimizer\'s state_dict() loads into any other',
                )


def _moment(name: str, value: Tensor, scales: Any, param: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what is kept of a saved moment.

    Args:
        name: The moment's.
        value: The moment, or its codes.
        scales: Of the codes.
        param: Whose moment it is.
        dtype: Of the moments from now on: ``torch.int8`` for codes.

    Raises:
        StateError: Another shape, or codes that scales do not fit.
    """
    if value.shape != param.shape:
        raise StateError(
            f"the saved {name} belongs to another parameter",
            where=f"{tuple(value.shape)} → {tuple(param.shape)}",
            write="the same model and optimizer",
        )
    made, beside = moments.zeros(name, param, dtype), moments.scale_of(name)
    if moments.is_coded(value.dtype):
        each, codes = _scale_of_each(name, value, scales), local(value)
        if dtype == torch.int8 and sharding(value) == sharding(param) and flat(codes, local(made[name])) is not None:
            its = moments.gathered(local(each), codes)
            if its is not None and moments.fit(codes, its):  # else groups were cut otherwise
                local(made[name]).copy_(codes)
                made[beside].copy_(its)
                return made
        decoded = sharded_as(moments.valued(codes, local(each)), value)
        return _moment(name, decoded, None, param, dtype)
    if dtype != torch.int8:
        return {name: made[name].copy_(placed(value, param))}
    wide = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    codes, found = moments.encode(local(wide.copy_(placed(value, param))), moments.codes_of(name))
    local(made[name]).copy_(codes)
    made[beside].copy_(found)
    return made


def _scale_of_each(name: str, codes: Tensor, scales: Any) -> Tensor:
    """Return the scales of saved codes, one for each of them.

    Raises:
        StateError: There are none, or they do not belong to the codes.
    """
    write = "the state as optimizer.state_dict() returned it"
    if not _holds_numbers(scales) or not scales.is_floating_point():
        raise StateError(
            f"the saved {name} has codes without scales",
            where=f"{moments.scale_of(name)}: {in_words(scales)}",
            write=write,
        )
    count = moments.num_groups(codes.numel())
    shapes = (codes.shape,) if is_distributed(codes) else (codes.shape, (count,))
    if codes.dtype != moments.codes_of(name) or scales.shape not in shapes:
        raise StateError(
            f"the saved {name} is in codes of another form",
            where=f"{described(codes)} with scales {list(scales.shape)}, {list(shapes[-1])} expected",
            why=f"its codes are {dtype_name(moments.codes_of(name))}, and {moments.GROUP} neighbours share a scale",
            write=write,
        )
    if scales.shape == codes.shape:
        return placed(scales.to(torch.bfloat16), codes)
    if not moments.fit(codes, scales):
        raise StateError(
            f"the saved {name} and its scales are not those of one state",
            where=f"{described(codes)}, {moments.scale_of(name)}",
            why="in some group no element is as large as its scale says: they are damaged, or the codes were brought "
            "into another order, as those of a channels-last model are where a file keeps no strides",
            write="the state as optimizer.state_dict() returned it, saved by torch.save; or amp.stateful()",
        )
    return moments.spread(scales.to(torch.bfloat16), codes if flat(codes) else codes.contiguous())


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
