"""Model, optimizers and session as one value that ``torch.distributed.checkpoint`` saves and loads."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError, UnsupportedError, shown, some_of
from mezzo.policy import Policy
from mezzo.session.state import check, load_checked, require_between_steps, save
from mezzo.shards import placed
from mezzo.tensors import described, local, overflows, tensors
from mezzo.weights import Halves

if TYPE_CHECKING:
    from mezzo.session.engine import Engine

__all__ = ["Stateful"]

#: What a parameter group is saved without: its parameters have names.
_NOT_SAVED: Final = ("params", "param_names")


class Stateful:
    """Model, optimizers and session, as ``torch.distributed.checkpoint`` takes them.

    Its state is the same whatever the policy and the number of ranks: FP32 weights and the optimizers' state by the
    names of parameters, as plain tensors or DTensors. So it loads with as many ranks, bit for bit, with more or fewer,
    sharded or not, and under another policy that stands for the same weights.

    Args:
        engine: The session's.
        policy: The session's.

    Example:
        >>> import mezzo, tempfile, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16")
        >>> path = f"{tempfile.mkdtemp()}/last.pt"
        >>> mezzo.save(path, app=amp.stateful())  # on several ranks dcp.save({"app": amp.stateful()}, …)
        >>> amp.stateful().load_state_dict(mezzo.load(path)["app"])
    """

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine, self._policy = engine, policy

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``"model"`` and ``"optimizers"`` in tensors, and ``"session"``, which holds all the rest.

        Raises:
            StateError: Inside an accumulation window.
            UnsupportedError: An optimizer that keeps what cannot be read back by name.

        **Cost**: a copy of the weights in FP32 and of the optimizers' state, and host syncs. The copy is what a
        checkpoint is read into, so that one that turns out to be damaged leaves the session as it was.
        """
        engine, weights = self._engine, self._engine.weights
        session, names, halves = save(engine, self._policy, weights=False), weights.names(), weights.halves()
        require_between_steps(engine, "stateful().state_dict()")
        model = {name: _exact(value, halves) for name, value in weights.named_state()}
        pairs = [_saved(optimizer, names) for optimizer in weights.optimizers]
        session |= {
            "parameters": {name: described(model[name]) for name, _ in weights.named_params()},
            "optimizers": [rest for _, rest in pairs],
        }
        states = {str(number): state for number, (state, _) in enumerate(pairs)}
        return {"model": model, "optimizers": states, "session": (session,)}  # a tuple is one entry of a checkpoint

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on however many ranks.

        Raises:
            StateError: The state of another model or optimizer, weights that do not fit the dtype that this session
                stores, or none at all; nothing was loaded.
        """
        engine, weights = self._engine, self._engine.weights
        if not engine.broken:
            require_between_steps(engine, "stateful().load_state_dict()")
        session = dict(_session_of(state_dict))
        model, states, rests = state_dict["model"], state_dict.get("optimizers", {}), session.pop("optimizers")
        names, known = weights.names(), weights.optimizers
        triples = [(each, states.get(str(i), {}), rests[i]) for i, each in enumerate(known) if i < len(rests)]
        others = [f"{len(rests)} optimizers → {len(known)}"] if len(rests) != len(known) else []
        others += _other_tensors(engine, model)
        others += [line for triple in triples for line in _differences(triple[0], names, *triple[1:])]
        check(engine, session, others)
        for module in weights.models:
            own, keys = module.state_dict(keep_vars=True), weights.keys_of(module)
            module.load_state_dict({key: _lying_as(model[name], own[key]) for key, name in keys.items()})
        for optimizer, state, rest in triples:
            _give(optimizer, names, state, rest)
        load_checked(engine, self._policy, session)


def _exact(value: Any, halves: list[Halves]) -> Any:
    """Return a copy of what a state dict holds, in FP32 where it is stored low."""
    if not isinstance(value, Tensor):
        return value
    owner = next((each for each in halves if value in each), None)
    return value.detach().clone() if owner is None else owner.read(value)


def _session_of(state: Any) -> Mapping[str, Any]:
    """Return the part of a state that is not in tensors, or refuse what is none."""
    session = state.get("session") if isinstance(state, Mapping) else None
    session = session[0] if isinstance(session, (tuple, list)) and len(session) == 1 else None
    fits = isinstance(session, Mapping) and isinstance(session.get("optimizers"), list)
    if not fits or not isinstance(state.get("model"), Mapping):
        raise StateError(
            "this is not the state of amp.stateful()",
            where=shown(list(state)) if isinstance(state, Mapping) else shown(state),
            write='dcp.load({"app": amp.stateful()}, checkpoint_id=…), or amp.stateful().state_dict()',
        )
    return session  # type: ignore[return-value]


def _other_tensors(engine: Engine, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from the saved state of the models, and weights that do not fit; other parameters apart."""
    params, mine = dict(engine.weights.named_params()), dict(engine.weights.named_state())
    for name in dict.fromkeys((*model, *mine)):
        was, now = (_form(state[name]) if name in state else "missing" for state in (model, mine))
        if name not in params and was != now:
            yield f"{name}: {was} → {now}"
        elif name in params and name in model and overflows(local(model[name]), params[name].dtype):
            yield f"{name}: values beyond {torch.finfo(params[name].dtype).max:g} → {described(params[name])}"


def _form(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else "no tensor"


# The state of optimizers by the names of parameters -----------------------------------------------------------


def _saved(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return an optimizer's tensors by the names of its parameters, and all the rest.

    What an optimizer makes only in its first step is there before, too, so that a checkpoint can be read into a new
    session; the rest says which parameters have not begun yet. Nothing of the optimizer is changed, as it would be by
    the step that ``torch.distributed.checkpoint.state_dict`` lets it take.

    Raises:
        UnsupportedError: State that cannot be read back by name.

    **Cost**: a copy of the state.
    """
    packed = optimizer.state_dict()
    found: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Any] = {"groups": [], "fresh": [], "values": {}}
    for mine, group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        options = {key: _plain(value) for key, value in group.items() if key not in _NOT_SAVED}
        rest["groups"].append({"names": _named(mine, names), "options": options})
        for name, param, index in zip(_named(mine, names), mine["params"], group["params"], strict=True):
            state = packed["state"].get(index, {})
            if not state and param.requires_grad:
                state = _first_state(optimizer, mine, param)
                rest["fresh"].append(name)
            found[name] = {key: value.detach().clone() for key, value in state.items() if isinstance(value, Tensor)}
            rest["values"][name] = values = {key: value for key, value in state.items() if key not in found[name]}
            if nested := [key for key, value in values.items() if next(tensors(value), None) is not None]:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps tensors in nested containers",
                    where=f"{name}: {some_of(nested)}",
                    why="there may be another number of them where they are loaded",
                    write="mezzo.save and mezzo.load of the state dicts of model, optimizer and session: one process",
                )
    return found, rest


def _named(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    return [names[id(param)] for param in group["params"]]


def _plain(value: Any) -> Any:
    """Return an option as a number where it is a tensor only because kernels read it there."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return state as an optimizer makes it for a parameter in its first step, of which only the form counts.

    Its class takes that step with FP32 zeros in the parameter's place, and with none of its hooks.
    """
    zeros = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32), requires_grad=True)
    zeros.grad = torch.zeros_like(zeros)
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [zeros]}]
    try:
        with torch.no_grad():
            inspect.unwrap(type(trial).step)(trial)
    except Exception as error:
        raise UnsupportedError(
            "the optimizer does not say what it keeps before its first step",
            where=f"{type(optimizer).__name__}, a parameter of shape {tuple(param.shape)}",
            why=f"{type(error).__name__}: {error}".partition("\n")[0],
            write="one step of the session first",
        ) from error
    found: dict[str, Any] = trial.state[zeros]
    return found


def _differences(
    optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any], rest: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why a saved state is not this optimizer's."""
    mine = {frozenset(_named(group, names)) for group in optimizer.param_groups}
    theirs = {frozenset(group["names"]) for group in rest["groups"]}
    yield from (f"a parameter group of {some_of(group)} → none" for group in sorted(map(sorted, theirs - mine)))
    yield from (f"no parameter group → one of {some_of(group)}" for group in sorted(map(sorted, mine - theirs)))
    for param, held in optimizer.state.items():
        for key, value in state.get(name := names.get(id(param), ""), {}).items():
            if isinstance(mine_now := held.get(key), Tensor) and value.shape != mine_now.shape:
                yield f"{key} of {name}: {list(value.shape)} → {list(mine_now.shape)}"


def _give(optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Give an optimizer a saved state in which :func:`_differences` finds nothing."""
    options = {frozenset(group["names"]): group["options"] for group in rest["groups"]}
    packed = optimizer.state_dict()
    packed["state"] = {}
    for mine, group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        loaded = options[frozenset(_named(mine, names))]
        group.update({key: _as(value, mine.get(key)) for key, value in loaded.items()})
        for name, param, index in zip(_named(mine, names), mine["params"], group["params"], strict=True):
            # Copies: torch's optimizers would share memory with what was loaded.
            found = {key: _lying_as(value, param).clone() for key, value in state.get(name, {}).items()}
            values = copy.deepcopy(rest["values"].get(name, {})) | found
            if values and name not in rest["fresh"]:
                packed["state"][index] = values
    optimizer.load_state_dict(packed)


def _as(value: Any, mine: Any) -> Any:
    """Return an option in the form that the optimizer has it in."""
    return torch.full_like(mine, value) if isinstance(mine, Tensor) and not isinstance(value, Tensor) else value


def _lying_as(value: Any, mine: Any) -> Any:
    """Return a saved tensor sharded as one here is; numbers, and tensors of another shape, as they are."""
    both = isinstance(value, Tensor) and isinstance(mine, Tensor)
    return placed(value, mine) if both and value.shape == mine.shape else value
