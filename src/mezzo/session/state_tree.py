"""A session's state between two steps: a plain tree, checked against a table before anything is changed."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.cast.products import ROLES, Memory
from mezzo.errors import Fields, MezzoError, StateError, UnsupportedError, misfits, shown, some_of
from mezzo.optim.optimizer import as_one_pass
from mezzo.optim.state_dicts import with_spread_scales
from mezzo.policy import Policy
from mezzo.policy.rules import both
from mezzo.scale import LossScale
from mezzo.scale.config import one_number
from mezzo.scale.state import FIELDS, ScaleState, is_count
from mezzo.session.stats import Stats
from mezzo.sharded import local, placed
from mezzo.step.gradients import any_gradient
from mezzo.tensors import LOW, described, dtype_name, overflows, tensors
from mezzo.weights.halves import in_halves

if TYPE_CHECKING:
    from mezzo.session.engine import Engine


logger = logging.getLogger(__name__)

#: Of the form of a state; others are refused by their number.
VERSION: Final = 5
#: An older version with the same contents: FP32 values were the models' then, too.
_READ: Final = (4, VERSION)


# Saving ---------------------------------------------------------------------------------------------------


def passes_since_step(engine: Engine) -> int:
    """Return the most backward passes since the last step whose gradients a parameter still has.

    Asked are the parameters that optimizers have now: since the last pass others may have taken their places.
    """
    return max(
        (
            window.now.passes
            for window in engine.windows
            if any(any_gradient(engine.weights.leaves(optimizer)) for optimizer in window.plan.optimizers)
        ),
        default=0,
    )


def require_between_steps(engine: Engine, what: str) -> None:
    """Refuse to save or load inside an accumulation window, whose gradients a state does not hold.

    Raises:
        StateError: A backward pass has been made since the last step.
    """
    if passes := passes_since_step(engine):
        raise StateError(
            f"{what} inside an accumulation window",
            where=f"after {passes} backward pass(es) since the last step",
            why="a state holds weights, scale and counts, and no gradients",
            write="amp.step() first; or amp.zero_grad()",
        )


def save(engine: Engine, *, in_window: bool = False) -> dict[str, Any]:
    """Return a session's state.

    Args:
        engine: The session's.
        in_window: Whether it may be inside an accumulation window, as where a loop that is the user's own saves.

    Raises:
        StateError: Inside an accumulation window.

    **Cost**: a host sync.
    """
    if not in_window:
        require_between_steps(engine, "state_dict()")
    engine.next_scale()  # commits the scale, which a step may have left open
    named = list(engine.weights.named_params())
    memories = engine.weights.memories()
    return {
        "version": VERSION,
        "policy": str(engine.weights.policy),
        "parameters": {name: described(param) for name, param in named},
        "loss_scale": engine.scaler.state_dict(),
        "stats": engine.account.state_dict(),
        **({"products": _remembered(engine, memories)} if memories else {}),
        **({"inner_scales": rows} if (rows := engine.inner_scales.rows()) else {}),
    }


def _remembered(engine: Engine, memories: list[Memory]) -> dict[str, Any]:
    """Return what products below sixteen bits remember."""
    names = engine.weights.names()
    pairs = [pair for memory in memories for pair in memory.histories()]
    histories = {names[id(weight)]: history.clone() for weight, history in pairs}
    return {"histories": histories, "draws": [int(memory.draws) for memory in memories]}


# Loading --------------------------------------------------------------------------------------------------


def load(engine: Engine, state: Any) -> None:
    """Load what :func:`save` returned, or another system's scaler; all is checked before anything is changed.

    Raises:
        StateError: It is none, damaged, of another model or of another release; or inside an accumulation window.
            Nothing was loaded.
    """
    if not engine.writes.broken:
        require_between_steps(engine, "load_state_dict()")
    if (other := _of_another_system(state)) is not None:
        if engine.weights.policy.loss_scale.mode == "dynamic":
            engine.scaler.load_state_dict({**engine.scaler.state_dict(), **other})
        engine.account.load_state_dict(engine.account.state_dict(), float(engine.scaler.state.scale))
        return
    check(engine, state)
    load_checked(engine, state)


def steps_of(state: Any) -> int | None:
    """Return how many steps a session's state says were begun; ``None`` where it is none."""
    stats = state.get("stats") if isinstance(state, Mapping) else None
    steps = stats.get("steps") if isinstance(stats, Mapping) else None
    return steps if is_count(steps) else None


def load_checked(engine: Engine, state: Mapping[str, Any]) -> None:
    """Load a state in which :func:`check` has found nothing."""
    policy, state, saved = engine.weights.policy, {**_ABSENT, **state}, Policy.parse(state["policy"])
    if changes := saved.differences(policy):
        logger.info("the state was saved under another policy: %s", "; ".join(changes))
    engine.clear()
    engine.writes.broken = ""
    engine.ranks.is_behind = False
    named = dict(engine.weights.named_params())
    if saved.loss_scale.mode == policy.loss_scale.mode == "dynamic":
        numbers = within(state["loss_scale"], policy.loss_scale)
        engine.scaler.hold(ScaleState.checked(numbers, engine.device), in_graph=False)
        engine.inner_scales.load(state["inner_scales"], engine.device)
    remembered = state["products"]
    histories = {id(named[name]): history for name, history in remembered["histories"].items() if name in named}
    memories = engine.weights.memories()
    for memory, draws in zip(memories, [*remembered["draws"], *[0] * len(memories)], strict=False):
        memory.load(histories, draws)
    engine.account.load_state_dict(state["stats"], float(engine.scaler.state.scale))


def within(saved: Mapping[str, Any], now: LossScale) -> dict[str, Any]:
    """Return the state of a dynamic loss scale within the bounds of other rules.

    Args:
        saved: The state, in numbers.
        now: The rules.
    """
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


def _by_name(key_class: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(key, key_class) for key in value.values())


def _is_history(value: Tensor) -> bool:
    """Whether a tensor holds the largest values of some steps."""
    is_read = value.dtype == torch.float32 and value.layout == torch.strided and not value.is_meta
    if not is_read or value.dim() != 2 or value.shape[0] != len(ROLES) or not value.shape[1]:
        return False
    return bool((value.isfinite() & (value >= 0)).all())


def _is_remembered(value: Any) -> bool:
    """Whether something is what :func:`_remembered` returns."""
    return (
        isinstance(value, Mapping)
        and _by_name(Tensor)(value.get("histories"))
        and all(map(_is_history, value["histories"].values()))
        and isinstance(value.get("draws"), list)
        and all(map(is_count, value["draws"]))
    )


def _are_rows(value: Any) -> bool:
    """Whether something is what ``InnerScales.rows`` returns."""
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and len(row) == 2 and all(map(FIELDS["scale"][0], row)) for row in rows)


#: Entries that a state may lack; what they count begins anew.
_ABSENT: Final[Mapping[str, Any]] = {"products": {"histories": {}, "draws": []}, "inner_scales": []}
#: For each field of a state a test of its values, and the values in words.
_FIELDS: Final[Fields] = {
    "policy": (_is_policy, "the text of a policy"),
    "parameters": (_by_name(str), "texts by name"),
    **{f"loss_scale.{name}": field for name, field in FIELDS.items()},
    **{
        f"stats.{field.name}": (is_count, "a count") if isinstance(field.default, int) else (_is_number, "a number")
        for field in fields(Stats)
    },
    "products": (_is_remembered, "histories and draws"),
    "inner_scales": (_are_rows, "two numbers for each"),
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
    if (version := state["version"]) not in _READ:
        raise StateError(
            f"the state has version {shown(version)}",
            why=f"this mezzo reads versions {_READ[0]} and {VERSION}, and no others",
            write="the release that has written it; or the model's and optimizer's own states, without the session's",
        )
    if damaged := [*misfits({**_ABSENT, **state}, _FIELDS)]:
        raise StateError(
            "the state of the session is damaged", where="\n".join(damaged[:5]), write="an older checkpoint"
        )
    _check_histories(engine, state)
    differing = [*_differences(engine, state), *(others or ())]
    if differing:
        raise StateError(
            "the state is that of another model or optimizer",
            where=some_of(differing),
            why="saved → here",
            write="the model, optimizer and policy that it was saved with",
        )


def _check_histories(engine: Engine, state: Mapping[str, Any]) -> None:
    """Refuse amax histories of another length."""
    lengths = {history.shape[-1] for history in state.get("products", _ABSENT["products"])["histories"].values()}
    here = next((memory.history.shape[-1] for memory in engine.weights.memories() if memory.names), None)
    for length in [*lengths - {here}][:1] if here is not None else ():
        raise StateError(
            "the amax histories of the state have another length",
            where=f"fp8_history={length} → {here}",
            why="the largest value of other steps would set the scales",
            write=both(f"fp8_history={length}"),
        )


def _differences(engine: Engine, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield each parameter that differs from the saved one."""
    before, params = state["parameters"], dict(engine.weights.named_params())
    for name in dict.fromkeys((*before, *params)):
        was = before.get(name, "missing")
        now = described(params[name]) if name in params else "missing"
        if was.partition(" ")[2] != now.partition(" ")[2] or name not in params:
            yield f"parameter {name}: {was} → {now}"


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


# Model, optimizers and session as one value that ``torch.distributed.checkpoint`` saves and loads.

#: What a parameter group is saved without: its parameters have names.
_NOT_SAVED: Final = ("params", "param_names")


class Stateful:
    """Model, optimizers and session, as ``torch.distributed.checkpoint`` takes them.

    Its state is the same whatever the policy and the number of ranks: FP32 weights and the optimizers' state by the
    names of parameters, as plain tensors or DTensors. So it loads with as many ranks, bit for bit, with more or fewer,
    sharded or not, and under another policy that stands for the same weights. Moments in codes load into codes; here
    they have a scale for each element, and take more than those in BF16.

    Args:
        engine: The session's.

    Example:
        >>> import mezzo, tempfile, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16")
        >>> path = f"{tempfile.mkdtemp()}/last.pt"
        >>> mezzo.save(path, app=amp.stateful())  # on several ranks dcp.save({"app": amp.stateful()}, …)
        >>> amp.stateful().load_state_dict(mezzo.load(path)["app"])
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``"model"`` and ``"optimizers"`` in tensors, and ``"session"``, which holds all the rest.

        Raises:
            StateError: Inside an accumulation window.
            UnsupportedError: An optimizer that keeps what cannot be read back by name.

        **Cost**: a copy of the weights in FP32 and of the optimizers' state, and host syncs. The copy is what a
        checkpoint is read into, so that one that turns out to be damaged leaves the session as it was.
        """
        engine, weights = self._engine, self._engine.weights
        require_between_steps(engine, "stateful().state_dict()")
        session, names = save(engine, in_window=True), weights.names()
        model = {name: _exact(value) for name, value in weights.named_state()}
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
        if not engine.writes.broken:
            require_between_steps(engine, "stateful().load_state_dict()")
        session = dict(_session_of(state_dict))
        model, states, rests = state_dict["model"], state_dict.get("optimizers", {}), session.pop("optimizers")
        names, optimizers = weights.names(), weights.optimizers
        triples = [
            (optimizer, states.get(str(i), {}), rests[i]) for i, optimizer in enumerate(optimizers) if i < len(rests)
        ]
        differences = [f"{len(rests)} optimizers → {len(optimizers)}"] if len(rests) != len(optimizers) else []
        differences += _other_tensors(engine, model)
        differences += [line for triple in triples for line in _state_differences(triple[0], names, *triple[1:])]
        check(engine, session, differences)
        for module in weights.models:
            own, keys = module.state_dict(keep_vars=True), weights.keys_of(module)
            module.load_state_dict({key: _lying_as(model[name], own[key]) for key, name in keys.items()})
        for optimizer, state, rest in triples:
            _give(optimizer, names, state, rest)
        load_checked(engine, session)


def _exact(value: Any) -> Any:
    """Return a copy of what a state dict holds, at least in FP32 if it has low parameters' dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(torch.float32, copy=True) if value.dtype in LOW else value.detach().clone()


def _session_of(state: Any) -> Mapping[str, Any]:
    """Return the part of a state that is not in tensors; raise where there is none."""
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
        elif name in params and name in model and overflows(local(model[name]), _dtype_in(params[name])):
            dtype = _dtype_in(params[name])
            yield f"{name}: values beyond {torch.finfo(dtype).max:g} → {dtype_name(dtype)}"


def _dtype_in(param: Tensor) -> torch.dtype:
    """Return the dtype whose range a parameter has: that of its high half, where it is stored in halves."""
    halves = in_halves(param)
    return param.dtype if halves is None else halves.hi.dtype


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
    saved: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Any] = {"groups": [], "fresh": [], "values": {}}
    for current_group, group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        options = {key: _plain(value) for key, value in group.items() if key not in _NOT_SAVED}
        rest["groups"].append({"names": _named(current_group, names), "options": options})
        for name, param, index in zip(
            _named(current_group, names), current_group["params"], group["params"], strict=True
        ):
            state = packed["state"].get(index, {})
            if not state and param.requires_grad:
                state = _first_state(optimizer, current_group, param)
                rest["fresh"].append(name)
            state = _of_any_ranks(optimizer, state)
            saved[name] = {key: value.detach().clone() for key, value in state.items() if isinstance(value, Tensor)}
            rest["values"][name] = values = {key: value for key, value in state.items() if key not in saved[name]}
            if nested := [key for key, value in values.items() if next(tensors(value), None) is not None]:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps tensors in nested containers",
                    where=f"{name}: {some_of(nested)}",
                    why="there may be another number of them where they are loaded",
                    write="mezzo.save and mezzo.load of the state dicts of model, optimizer and session: one process",
                )
    return saved, rest


def _of_any_ranks(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a parameter in tensors that are cut into shards as the parameter is."""
    return state if as_one_pass(optimizer) is None else with_spread_scales(state)


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
    if as_one_pass(optimizer) is not None:
        trial.__setstate__(optimizer.__getstate__())  # and with nothing of what the optimizer has built
    else:
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
    first_state: dict[str, Any] = trial.state[zeros]
    return first_state


def _state_differences(
    optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any], rest: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why a saved state is not this optimizer's."""
    mine = {frozenset(_named(group, names)) for group in optimizer.param_groups}
    theirs = {frozenset(group["names"]) for group in rest["groups"]}
    yield from (f"a parameter group of {some_of(group)} → none" for group in sorted(map(sorted, theirs - mine)))
    yield from (f"no parameter group → one of {some_of(group)}" for group in sorted(map(sorted, mine - theirs)))
    for param, raw in optimizer.state.items():
        expected = _of_any_ranks(optimizer, raw)
        for key, value in state.get(name := names.get(id(param), ""), {}).items():
            if isinstance(mine_now := expected.get(key), Tensor) and value.shape != mine_now.shape:
                yield f"{key} of {name}: {list(value.shape)} → {list(mine_now.shape)}"


def _give(optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Load a saved state, in which :func:`_differences` finds nothing, into an optimizer."""
    options = {frozenset(group["names"]): group["options"] for group in rest["groups"]}
    packed = optimizer.state_dict()
    packed["state"] = {}
    for current_group, group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        loaded = options[frozenset(_named(current_group, names))]
        group.update({key: _as(value, current_group.get(key)) for key, value in loaded.items()})
        for name, param, index in zip(
            _named(current_group, names), current_group["params"], group["params"], strict=True
        ):
            # Copies: torch's optimizers would share memory with what was loaded.
            new_state = {key: _lying_as(value, param).clone() for key, value in state.get(name, {}).items()}
            values = copy.deepcopy(rest["values"].get(name, {})) | new_state
            if values and name not in rest["fresh"]:
                packed["state"][index] = values
    optimizer.load_state_dict(packed)


def _as(value: Any, current: Any) -> Any:
    """Return an option in the form that the optimizer has it in."""
    return torch.full_like(current, value) if isinstance(current, Tensor) and not isinstance(value, Tensor) else value


def _lying_as(value: Any, current: Any) -> Any:
    """Return a saved tensor sharded as one here is; numbers, and tensors of another shape, as they are."""
    both = isinstance(value, Tensor) and isinstance(current, Tensor)
    return placed(value, current) if both and value.shape == current.shape else value
