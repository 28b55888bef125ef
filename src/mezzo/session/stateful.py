"""Model, optimizers and session as one value that ``torch.distributed.checkpoint`` saves and loads."""

from __future__ import annotations
from typing import Any

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import StateError, UnsupportedError, shown, some_of
from mezzo.optim.optimizer import as_one_pass, one_pass
EXTRAS: Any = ()
WEIGHT_DTYPES: Any = ()
from mezzo.policy import Policy
from mezzo.session.state import check, load_checked, require_between_steps, save
from mezzo.shards import placed
from mezzo.tensors import described, local, overflows, tensors

if TYPE_CHECKING:
    from mezzo.session.engine import Engine

__all__ = ["Stateful"]

_NameOf: TypeAlias = Callable[[Tensor], str]
#: What a parameter group is saved without: its parameters have names, and FP32 weights no other half.
_NOT_SAVED: Final = ("params", "param_names", WEIGHT_DTYPES)


class Stateful:
    """Model, optimizers and session, as ``torch.distributed.checkpoint`` takes them.

    Its state is the same whatever the policy, the way of keeping FP32 values and the number of ranks: FP32 weights and
    the optimizers' state by the names of parameters, as plain tensors or DTensors. So it loads with as many ranks, bit
    for bit, with more or fewer, sharded or not, and under another policy that stands for the same weights.

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
        for own in one_pass(weights.optimizers):
            own.settle_ties()
        session, names = save(engine, self._policy), weights.names()
        exact, model = session["masters"], dict[str, Any]()
        for name, value in weights.named_state():
            wide = exact.get(names.get(id(value), name))
            if wide is None and isinstance(value, nn.Parameter):
                wide = weights.value_of(value)
            model[name] = wide if wide is not None else value.detach().clone() if isinstance(value, Tensor) else value
        pairs = [_saved(optimizer, lambda tensor: names[id(tensor)]) for optimizer in weights.optimizers]
        session |= {
            "masters": {},
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
        names = weights.names()

        def name_of(tensor: Tensor) -> str:
            return names[id(tensor)]

        known = weights.optimizers
        triples = [(each, states.get(str(i), {}), rests[i]) for i, each in enumerate(known) if i < len(rests)]
        others = [f"{len(rests)} optimizers → {len(known)}"] if len(rests) != len(known) else []
        others += _other_tensors(engine, model)
        others += [line for triple in triples for line in _differences(triple[0], name_of, *triple[1:])]
        check(engine, session, others)
        for module in weights.models:
            own, keys = module.state_dict(keep_vars=True), weights.keys_of(module)
            module.load_state_dict({key: _lying_as(model[name], own[key]) for key, name in keys.items()})
        for optimizer, state, rest in triples:
            _give(optimizer, name_of, state, rest)
        load_checked(engine, self._policy, session)


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


def _saved(optimizer: Optimizer, name_of: _NameOf) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
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


def _differences(
    optimizer: Optimizer, name_of: _NameOf, state: Mapping[str, Any], rest: Mapping[str, Any]
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


def _give(optimizer: Optimizer, name_of: _NameOf, state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Give an optimizer a saved state in which :func:`_differences` finds nothing."""
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
            found = {key: _lying_as(value, param).clone() for key, value in state.get(name, {}).items()}
            if values := copy.deepcopy(rest["values"].get(name, {})) | found:
                packed[place] = values
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _named(optimizer: Optimizer, name_of: _NameOf) -> Iterator[tuple[str, Tensor]]:
    return ((name_of(param), param) for group in optimizer.param_groups for param in group["params"])


def _as(value: Any, mine: Any) -> Any:
    """Return an option in the form that the optimizer has it in."""
    return torch.full_like(mine, value) if isinstance(mine, Tensor) and not isinstance(value, Tensor) else value


def _lying_as(value: Any, mine: Any) -> Any:
    """Return a saved tensor sharded as one here is; numbers, and tensors of another shape, as they are."""
    both = isinstance(value, Tensor) and isinstance(mine, Tensor)
    return placed(value, mine) if both and value.shape == mine.shape else value
