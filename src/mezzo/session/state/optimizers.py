"""The state of optimizers by the names of parameters: the same whatever the policy, the keeper and the sharding."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import UnsupportedError, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.optim.state import EXTRAS, WEIGHT_DTYPES
from mezzo.shards import placed
from mezzo.tensors import tensors

__all__ = ["differences", "give", "lying_as", "saved"]

NameOf: TypeAlias = Callable[[Tensor], str]
#: What a parameter group is saved without: its parameters have names, and FP32 weights no other half.
_NOT_SAVED: Final = ("params", "param_names", WEIGHT_DTYPES)


# Saving ---------------------------------------------------------------------------------------------------


def saved(optimizer: Optimizer, name_of: NameOf) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return an optimizer's tensors by the names of its parameters, and all the rest.

    What an optimizer makes only in its first step is there before, too, so that a checkpoint can be read into a new
    session; the rest says which parameters have not begun yet. Nothing of the optimizer is changed.

    Raises:
        UnsupportedError: State that cannot be read back by name.

    **Cost**: a copy of the state.
    """
    packed = optimizer.state_dict()
    pairs = list(zip(optimizer.param_groups, packed["param_groups"], strict=True))
    params = {i: param for mine, group in pairs for param, i in zip(mine["params"], group["params"], strict=True)}
    halved = {id(param) for param in own.stored(in_fp32=True)} if (own := as_one_pass(optimizer)) is not None else set()
    found: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Any] = {"groups": [], "fresh": [], "values": {}}
    for mine, group in pairs:
        options = {key: _plain(value) for key, value in group.items() if key not in _NOT_SAVED}
        rest["groups"].append({"names": [name_of(param) for param in mine["params"]], "options": options})
    for index, param in params.items():
        name, state = name_of(param), packed["state"].get(index, {})
        if not state and param.requires_grad:
            state = _first_state(optimizer, param)
            rest["fresh"].append(name)
        state = {key: value for key, value in state.items() if key not in EXTRAS or id(param) not in halved}
        found[name] = {key: value.detach().clone() for key, value in state.items() if isinstance(value, Tensor)}
        rest["values"][name] = values = {key: value for key, value in state.items() if key not in found[name]}
        if nested := [key for key, value in values.items() if next(tensors(value), None) is not None]:
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps tensors in nested containers",
                where=f"{name}: {some_of(nested)}",
                why="there may be another number of them where they are loaded",
                write="mezzo.save and mezzo.load of the state dicts of model, optimizer and session, in one process",
            )
    return found, rest


def _plain(value: Any) -> Any:
    """Return an option as a number where it is a tensor only because kernels read it there."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _first_state(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """Return state as an optimizer makes it for a parameter in its first step, of which only the form counts.

    Its class takes that step with zeros in the parameter's place, and with none of its hooks.
    """
    kind: Any = type(optimizer)
    trial = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if not (callable(value) and hasattr(kind, name)):  # step and the like, as schedulers and frameworks bind them
            setattr(trial, name, OrderedDict() if name.endswith("_hooks") else value)
    zeros = torch.zeros_like(param, requires_grad=True)
    zeros.grad = torch.zeros_like(param)
    group = next(group for group in optimizer.param_groups if any(param is each for each in group["params"]))
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [zeros]}]
    step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step  # nor hooks of all optimizers
    try:
        with torch.no_grad():
            step(trial)
    except Exception as error:
        raise UnsupportedError(
            "the optimizer does not say what it keeps before its first step",
            where=f"{kind.__name__}, a parameter of shape {tuple(param.shape)}",
            why=f"{type(error).__name__}: {error}".partition("\n")[0],
            write="one step of the session first",
        ) from error
    found: dict[str, Any] = trial.state[zeros]
    return found


# Loading --------------------------------------------------------------------------------------------------


def differences(
    optimizer: Optimizer, name_of: NameOf, state: Mapping[str, Any], rest: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why a saved state is not this optimizer's."""
    mine = {frozenset(map(name_of, group["params"])) for group in optimizer.param_groups}
    theirs = {frozenset(group["names"]) for group in rest["groups"]}
    yield from (f"a parameter group of {some_of(names)} → none" for names in sorted(map(sorted, theirs - mine)))
    yield from (f"no parameter group → one of {some_of(names)}" for names in sorted(map(sorted, mine - theirs)))
    for name, param in _named(optimizer, name_of):
        held = optimizer.state.get(param, {})
        for key, value in state.get(name, {}).items():
            if isinstance(mine_now := held.get(key), Tensor) and value.shape != mine_now.shape:
                yield f"{key} of {name}: {list(value.shape)} → {list(mine_now.shape)}"


def give(optimizer: Optimizer, name_of: NameOf, state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Give an optimizer a saved state in which :func:`differences` finds nothing."""
    options = {frozenset(group["names"]): group["options"] for group in rest["groups"]}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        held = {key: value for key, value in group.items() if key != "params"}
        loaded = options[frozenset(map(name_of, group["params"]))]
        groups.append({**held, **{key: _as(value, held.get(key)) for key, value in loaded.items()}})
        start = sum(len(each["params"]) for each in groups[:-1])
        groups[-1]["params"] = list(range(start, start + len(group["params"])))
    packed: dict[int, Any] = {}
    for place, (name, param) in enumerate(_named(optimizer, name_of)):
        if name not in rest["fresh"]:
            # Copies: torch's optimizers would share memory with what was loaded.
            found = {key: lying_as(value, param).clone() for key, value in state.get(name, {}).items()}
            if values := copy.deepcopy(rest["values"].get(name, {})) | found:
                packed[place] = values
    optimizer.load_state_dict({"state": packed, "param_groups": groups})
    for place, (_, param) in enumerate(_named(optimizer, name_of) if as_one_pass(optimizer) is None else ()):
        held = optimizer.state.get(param, {})
        for key, value in packed.get(place, {}).items():  # numbers, which torch casts to the parameter's dtype
            if isinstance(value, Tensor) and value.dim() == 0 and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def _named(optimizer: Optimizer, name_of: NameOf) -> Iterator[tuple[str, Tensor]]:
    return ((name_of(param), param) for group in optimizer.param_groups for param in group["params"])


def _as(value: Any, mine: Any) -> Any:
    """Return an option in the form that the optimizer has it in."""
    return torch.full_like(mine, value) if isinstance(mine, Tensor) and not isinstance(value, Tensor) else value


def lying_as(value: Any, mine: Any) -> Any:
    """Return a saved tensor sharded as one here is; numbers, and tensors of another shape, as they are."""
    both = isinstance(value, Tensor) and isinstance(mine, Tensor)
    return placed(value, mine) if both and value.shape == mine.shape else value
