"""Model, optimizers and session as one value that ``torch.distributed.checkpoint`` saves and loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.cast.model.originals import do_not_fit
from mezzo.errors import StateError, shown
from mezzo.optim.optimizer import one_pass
from mezzo.session.core import Core
from mezzo.session.state import optimizers, saved
from mezzo.session.state.refusals import check
from mezzo.tensors import LOW, described, local, overflows

__all__ = ["Stateful"]


class Stateful:
    """Model, optimizers and session, as ``torch.distributed.checkpoint`` takes them.

    Its state is the same whatever the policy, the way of keeping masters and the number of ranks: FP32 weights and the
    optimizers' state by the names of parameters, as plain tensors or DTensors. So it loads with as many ranks, bit for
    bit, with more or fewer, sharded or not, and under another policy that stands for the same weights.

    Args:
        core: The session.

    Example:
        >>> import mezzo, tempfile, torch
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> amp = mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16")
        >>> path = f"{tempfile.mkdtemp()}/last.pt"
        >>> mezzo.save(amp.stateful().state_dict(), path)  # on several ranks dcp.save({"app": amp.stateful()}, …)
        >>> amp.stateful().load_state_dict(mezzo.load(path))
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``"model"`` and ``"optimizers"`` in tensors, and ``"session"``, which holds all the rest.

        Raises:
            StateError: An accumulation window is open: each rank has gradients of its own then.
            UnsupportedError: An optimizer that keeps what cannot be read back by name.

        **Cost**: a copy of the weights in FP32 and of the optimizers' state, and host syncs. The copy is what a
        checkpoint is read into, so that one that turns out to be damaged leaves the session as it was.
        """
        core = self._core
        core.require_open("stateful().state_dict")
        _refuse_window(core)
        for own in one_pass(core.optimizers):
            own.settle_ties()
        session = saved.save(core)
        names = core.weights.names()
        saved.refuse_nameless(core, names)
        masters, model = session["masters"], dict[str, Any]()
        for name, value in core.weights.named_state():
            exact = masters.get(names.get(id(value), name))
            if exact is None and isinstance(value, nn.Parameter):
                exact = core.weights.untrained.value_of(value)
            model[name] = exact if exact is not None else value.detach().clone() if isinstance(value, Tensor) else value
        pairs = [optimizers.saved(optimizer, lambda tensor: names[id(tensor)]) for optimizer in core.optimizers]
        session |= {
            "masters": {},
            "buffers": {},
            "parameters": {name: described(model[name]) for name, _ in core.weights.named_params()},
            "optimizers": [rest for _, rest in pairs],
        }
        states = {str(number): state for number, (state, _) in enumerate(pairs)}
        return {"model": model, "optimizers": states, "session": (session,)}  # a tuple is one entry of a checkpoint

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on however many ranks.

        Raises:
            StateError: The state of another model or optimizer, or none at all, on every rank; nothing was loaded.
            UnsupportedError: Weights that do not fit the dtype that this session stores.
        """
        core = self._core
        core.require_open("stateful().load_state_dict", whole=False)
        if core.writes.is_half_way:
            core.clear()
        _refuse_window(core)
        session = dict(_session_of(state_dict))
        model, states, rests = state_dict["model"], state_dict.get("optimizers", {}), session.pop("optimizers")
        names = core.weights.names()
        saved.refuse_nameless(core, names)

        def name_of(tensor: Tensor) -> str:
            return names[id(tensor)]

        triples = [(each, states.get(str(i), {}), rests[i]) for i, each in enumerate(core.optimizers) if i < len(rests)]
        others = [f"{len(rests)} optimizers → {len(core.optimizers)}"] if len(rests) != len(core.optimizers) else []
        others += _other_tensors(core, model)
        others += [line for triple in triples for line in optimizers.differences(triple[0], name_of, *triple[1:])]
        check(core, session, others)
        _refuse_overflows(core, model)
        for module in core.models:
            own = module.state_dict(keep_vars=True)
            module.load_state_dict(
                {k: optimizers.lying_as(model[name], own[k]) for name, k in core.weights.keys_of(module)}
            )
        for optimizer, state, rest in triples:
            optimizers.give(optimizer, name_of, state, rest)
        saved.load(core, session)
        core.writes.drop()


def _refuse_window(core: Core) -> None:
    if core.has_gradients_to_step:
        raise StateError(
            "an accumulation window is open",
            where="amp.stateful()",
            why="a checkpoint of all ranks has no place for the gradients, of which each rank may have its own",
            write="amp.step() or amp.zero_grad() first; in one process amp.state_dict() holds them",
        )


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


def _other_tensors(core: Core, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs from the saved state of the models, parameters apart."""
    params = {name for name, _ in core.weights.named_params()}
    mine = dict(core.weights.named_state())
    for name in dict.fromkeys((*model, *mine)):
        was, now = (_form(state[name]) if name in state else "missing" for state in (model, mine))
        if name not in params and was != now:
            yield f"{name}: {was} → {now}"


def _form(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else "no tensor"


def _refuse_overflows(core: Core, model: Mapping[str, Any]) -> None:
    """Refuse weights that would become infinite, on all ranks if on one."""
    low = [(name, param) for name, param in core.weights.named_params() if param.dtype in LOW]
    bad = [name for name, param in low if overflows(local(model[name]), param.dtype)]
    found = torch.tensor([float(len(bad))], device=core.device)
    if core.consensus is not None:
        found = core.consensus.largest(found)
    if found.item():
        raise do_not_fit(bad, core.policy.dtype)
