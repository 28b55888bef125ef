"""A session under another policy, between two of its steps: all of it, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo import sharded
from mezzo.backward import runs_backward
from mezzo.cast.mode import acting_modes
from mezzo.cast.model.checks import Stored, is_alone, kept, lost_by
from mezzo.cast.model.prepare import Preparation, Prepared
from mezzo.compiling import forget_compiled, placed_in
from mezzo.errors import MezzoError, StateError, UnsupportedError, message, raise_together, some_of
from mezzo.interrupts import uninterrupted
from mezzo.optim.optimizer import one_pass
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.scale.state import ScaleState
from mezzo.session.engine import Engine
from mezzo.session.inner import InnerScales
from mezzo.session.refusals import check_optimizers
from mezzo.session.state_tree import passes_since_step, within
from mezzo.session.weights import widen_states
from mezzo.step.executors.choose import shared
from mezzo.tensors import LOW
from mezzo.weights.models import Form, of_halves

#: What ranks vote on.
_CALL: Final = "change(policy)"


def change(engine: Engine, policy: Policy) -> None:
    """Carry out another policy on a session from the next pass on: see :meth:`mezzo.MixedPrecision.change`.

    Args:
        engine: The session's.
        policy: The policy.

    Raises:
        MezzoError: See there. The former policy is in force.
    """
    weights, ranks, step = engine.weights, engine.ranks, engine.account.begun
    plans, staying, problem = list[Preparation](), list[Tensor](), None
    try:
        require_now(engine)
        plans, staying = _planned(engine, policy)
    except MezzoError as error:
        problem = error
    ranks.vote(_CALL, str(policy), problem, step=step)
    if policy == weights.policy:
        return
    pairs = list(zip(weights.prepared, plans, strict=True))
    try:  # what exchanges, now that all ranks are here
        for prepared, plan in pairs:
            raise_together(lost_by(prepared.model, plan.storage))
    except MezzoError as error:
        problem = error
    ranks.vote(f"{_CALL}, whose values fit", "", problem, step=step)
    with uninterrupted():
        _carry_out(engine, policy, pairs)
    if staying:
        text = message(
            "weights stay stored as they were beside DistributedDataParallel",
            where=f"change() to {policy}: {some_of(list(map(weights.name_of, staying)))}",
            why="it knows the parameters as they are; what is computed is the same, and so is the memory",
            write="the level of the whole run before DistributedDataParallel(model), where memory matters",
        )
        warnings.warn(text, stacklevel=4)


def _planned(engine: Engine, policy: Policy) -> tuple[list[Preparation], list[Tensor]]:
    """Plan the change, and change nothing; no rank asks another one.

    Returns:
        A plan for each model; and the weights that stay stored as they are.

    Raises:
        MezzoError: What stands against it.
    """
    weights = engine.weights
    if policy == weights.policy:
        return [], []
    if (placed := placed_in(weights.models)) is not None:
        raise StateError(
            "the model is compiled by a plan",
            where=f"its casts are placed under {placed}",
            why="they are in its graphs, whatever the session's policy is",
            write="torch.compile(model, backend=mezzo.compile_backend(policy)) and a new session",
        )
    sharded.reshard(weights.units)
    came_as: dict[Tensor, torch.dtype] = {}
    for prepared in weights.prepared:
        came_as = prepared.came_as() | came_as  # of two that share a tensor the first knows
    plans = [Preparation.of(it.model, policy, it.devices, came_as=came_as) for it in weights.prepared]
    staying = [tensor for plan in plans for tensor in _beside_wrappers(engine, plan.storage)]
    dtypes: dict[Tensor, torch.dtype] = {}
    for plan in plans:
        dtypes |= plan.storage.plain | dict.fromkeys(plan.storage.halves, torch.float32)
    check_optimizers(weights.models, weights.optimizers, policy, dtypes)
    return plans, staying


def _carry_out(engine: Engine, policy: Policy, pairs: list[tuple[Prepared, Preparation]]) -> None:
    """Carry the plans out, or nothing where this raises, on all ranks."""
    before, problem, step = [prepared.plan for prepared, _ in pairs], None, engine.account.begun
    with _without_gradients(engine), ExitStack() as undo:
        try:
            undo.callback(engine.plan_anew)
            for prepared, plan in pairs:
                prepared.change(plan, undo)
            for (prepared, _), earlier in zip(pairs, before, strict=True):
                prepared.remember(earlier)
            _tell(engine, policy, undo)
            _carry_scale(engine, policy.loss_scale, undo)
            engine.plan_anew()
        except BaseException as error:
            problem = error
        engine.ranks.vote(f"{_CALL}, which is carried out", "", problem, step=step)
        undo.pop_all()
    engine.changes += 1
    if not engine.plan.is_driven:
        engine.clear()
    torch.clear_autocast_cache()
    forget_compiled()
    for prepared, plan in pairs:
        plan.params.find_gathered(prepared.model)


def require_now(engine: Engine) -> None:
    """Refuse to change what is under way.

    Raises:
        StateError: An accumulation window is open; a region, a pass, a step or a captured step is under way; or an
            earlier update was ended half-way.
    """
    engine.writes.require_whole()
    device_types = {it for prepared in engine.weights.prepared for it in prepared.devices.kinds()}
    inside = (
        "a captured step" if engine.is_captured
        else "a step" if engine.writes.is_stepping
        else "a backward pass" if runs_backward()
        else "a region" if acting_modes() or any(map(torch.is_autocast_enabled, device_types))
        else ""
    )  # fmt: skip
    if inside:
        raise StateError(
            f"change() inside {inside}",
            why="what runs now has begun under the former policy",
            write="amp.change(policy) between two steps, outside of amp.autocast()",
        )
    passes = passes_since_step(engine)
    if passes or (engine.plan.units and sharded.has_unreduced(engine.plan.units)):
        raise StateError(
            "change() inside an accumulation window",
            where=f"after {passes} backward pass(es) since the last step",
            why="its gradients were made under the former policy",
            write="amp.step() or amp.zero_grad() first",
        )


def _beside_wrappers(engine: Engine, stored: Stored) -> list[Tensor]:
    """Leave weights as they are stored where ``DistributedDataParallel`` knows them; return these.

    Raises:
        StateError: The policy computes something else with them.
        UnsupportedError: Shards would have 16 bits alone, or have them.
    """
    moves = stored.moves()
    narrow = [it for it, form in moves.items() if not (form.is_wide and Form.of(it).is_wide)]
    if sharded_low := [it for it in narrow if not is_alone(it)]:
        raise UnsupportedError(
            "shards cannot become, or have been, 16 bits alone",
            where=some_of(list(map(engine.weights.name_of, sharded_low))),
            why="fully_shard was told of the dtypes in which it gathers and reduces",
            write="O0, O1 and O2 in place of O3; or a new model, mezzo.fully_shard(model, policy), a new session",
        )
    swapped = [
        tensor
        for tensor, form in moves.items()
        if isinstance(tensor, nn.Parameter) and is_alone(tensor) and not (form.in_halves and of_halves(tensor))
    ]
    if not swapped or not (dist.is_available() and dist.is_initialized()):
        return []
    models = engine.weights.models
    is_wrapped = any(isinstance(module, DistributedDataParallel) for model in models for module in model.modules())
    staying: list[Tensor] = [*swapped] if is_wrapped or engine.wrappers.are_there else [*kept(swapped)]
    ids = set(map(id, narrow))
    if in_16_bits := [it for it in staying if id(it) in ids]:
        raise StateError(
            "weights cannot become, or have been, 16 bits alone beside DistributedDataParallel",
            where=some_of(list(map(engine.weights.name_of, in_16_bits))),
            why="it knows the parameters as they were",
            write="O1 and O2 in place of O3; rules, recipes and dtype may change",
        )
    for tensor in staying:
        form = Form.of(tensor)
        stored.halves.pop(tensor, None)  # type: ignore[call-overload]
        stored.plain.pop(tensor, None)
        (stored.halves if form.in_halves else stored.plain)[tensor] = form.dtype  # type: ignore[index]
    return staying


@contextmanager
def _without_gradients(engine: Engine) -> Iterator[None]:
    """Remove gradients from their parameters inside the block; after it they are there again, the same tensors."""
    params = {param: param.grad for model in engine.weights.models for param in model.parameters()}
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, gradient in params.items():
            if gradient is not None and gradient.dtype != param.dtype:
                if param.dtype not in LOW and engine.plan.is_driven:
                    gradient = gradient.to(param.dtype)
                else:
                    param.grad_dtype = None  # as after a pass, so that any dtype may be assigned
            param.grad = gradient


def _tell(engine: Engine, policy: Policy, undo: ExitStack) -> None:
    """Set the policy for all who ask for it, and for optimizers."""
    weights = engine.weights
    undo.callback(setattr, weights, "policy", weights.policy)
    undo.callback(setattr, weights, "are_low", weights.are_low)
    if weights.are_low and policy.param_dtype not in LOW:
        states = [state for optimizer in weights.optimizers for state in optimizer.state.values()]
        for state in states:
            undo.callback(_put_back, state, dict(state))
        widen_states(weights.optimizers)
    weights.policy, weights.are_low = policy, policy.param_dtype in LOW
    for optimizer in one_pass(weights.optimizers):
        undo.callback(setattr, optimizer, "rounds", optimizer.rounds)
        optimizer.rounds = weights.are_low


def _put_back(state: dict[str, object], before: dict[str, object]) -> None:
    state.clear()
    state.update(before)


def _carry_scale(engine: Engine, config: LossScale, undo: ExitStack) -> None:
    """Keep a dynamic scale within the bounds of other rules; begin anew where there was none, or is none."""
    scaler, goes_on = engine.scaler, engine.scaler.config.mode == config.mode == "dynamic"
    scaler.leave()
    if scaler.config == config:
        return
    engine.update()
    rows = engine.inner_scales.rows() if goes_on else []
    undo.callback(engine.account.reconfigure, scaler.config, float(scaler.state.scale))
    undo.callback(setattr, engine, "inner_scales", engine.inner_scales)
    undo.callback(scaler.hold, scaler.state, in_graph=False)
    undo.callback(setattr, scaler, "config", scaler.config)
    scaler.reconfigure(config)
    if goes_on:
        numbers = scaler.state_dict()
        if (bounded := within(numbers, config)) != numbers:
            scaler.hold(ScaleState.checked(bounded, engine.device), in_graph=False)
    else:
        scaler.hold(config.start(engine.device), in_graph=False)
    engine.inner_scales = InnerScales(shared, config.interval)
    engine.inner_scales.load(rows, engine.device)
    engine.account.reconfigure(config, float(scaler.state.scale))
