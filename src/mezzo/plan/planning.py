"""``mezzo.plan.plan``: a captured model, its costs, and the placement of its casts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, require_extra, shown
from mezzo.explanation.explaining import arguments
from mezzo.plan import heuristics
from mezzo.plan.balance import balance_of
from mezzo.plan.costs import Costs, Crossing
from mezzo.plan.cut import cheapest
from mezzo.plan.export import rules_for
from mezzo.plan.graph import Graph, GraphOp, capture, require_choice, value_of
from mezzo.plan.planned import Decider, Plan, PlannedCast, PlannedOp
from mezzo.policy import Policy
from mezzo.policy.ops import OPS
from mezzo.policy.rules import format_rules
from mezzo.tensors import dtype_name, tensors

Objective = Literal["time", "memory"] | float


def plan(
    model: nn.Module,
    *inputs: Any,
    policy: Policy | str | os.PathLike[str],
    objective: Objective = "time",
    fused: bool = False,
) -> Plan:
    """Decide which ops run low where a policy leaves that open, so that a step is cheapest: a minimum cut.

    The policy's rules and lists hold: what must be low is low, what must be FP32 is FP32. All else (sums, activations,
    pooling, norms that compute in FP32 inside) may be either, and each tensor that is wanted in the other precision is
    cast once. Costs are counted by running each op on fake tensors of the real shapes, forward and, where gradients are
    on, backward: what its kernels read and write, and what the arithmetic of products takes beside that on a device
    of this kind, from a table (:mod:`mezzo.plan.balance`). No clock is asked: the same machine gives the same plan.

    Nothing of the model runs, and nothing of it is changed. A dtype that the program reads from a tensor
    (``h.to(x.dtype)``) counts as what it is without a policy, FP32; in a region it may be low.

    Args:
        model: The model, in the state in which it is to run: ``train()`` or ``eval()``.
        *inputs: Its positional arguments. A single tuple stands for all of them, a single mapping for keywords.
        policy: A policy that casts ops (O1 or O2), its text, or the path of a policy file.
        objective: ``"time"``: bytes moved in a step; ``"memory"``: bytes that it keeps for the backward pass; or a
            number between 0 (time) and 1 (memory) by which a byte kept counts, and one moved by the rest. Of placements
            that are equal, the better one in what was not asked for, and then the one with fewer low ops.
        fused: Whether kernels are those of a compiler that fuses what lies between products, as torch.compile does:
            casts there cost nothing. Otherwise each op reads and writes what it works on.

    Returns:
        The plan, with what torch.autocast, Paddle and TensorFlow would do beside it.

    Raises:
        PolicyError: The policy casts no op, or bans one that the model has; the model takes no such inputs; the
            objective is none.
        StateError: The model is prepared: plan before that.
        UnsupportedError: Dynamo cannot capture the model as one graph; or scipy is not installed.

    **Cost**: that of capturing (seconds for a large model), then some 10 ms for each kind of op.

    Example:
        >>> import torch, mezzo.plan
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> made = mezzo.plan.plan(model, torch.ones(8, 64), policy="O1,bf16,emulate=true")
        >>> [(each.op, each.dtype, each.decided) for each in made.ops]
        [('linear', 'bfloat16', 'list'), ('gelu', 'bfloat16', 'cut'), ('linear', 'bfloat16', 'list')]

    References:
        The cut, and the algorithm, are in :mod:`mezzo.plan.cut`.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(f"a model must be an nn.Module, not {type(model).__name__}", write="plan(model, …)")
    given_policy = Policy.of(policy)
    require_choice(given_policy)
    require_extra("plan", "a plan needs scipy", "scipy.sparse.csgraph")
    number = objective_number(objective)
    args, kwargs = arguments(inputs, "mezzo.plan.plan")
    with autocast("O0"):  # a region around the call has no influence on the plan
        graph = capture(model, args, kwargs, given_policy)
        balance = balance_of(graph.device_type, given_policy.dtype, emulated="products" in graph.emulated)
        costs = Costs(graph, balance, objective=number, fused=fused)
    low = cheapest(costs.problem).low[: len(graph.ops)]
    result = planned(costs, low, objective=number, name=type(model).__name__)
    return replace(result, weights=_weights(model), inputs=_described((args, kwargs)))


def differences(plan: Plan, model: nn.Module, *inputs: Any) -> tuple[str, ...]:
    """Return how a model, its inputs or torch differ from those that a plan was made for.

    Args:
        plan: The plan.
        model: A model.
        *inputs: As :func:`plan` takes them.

    Returns:
        One text for each difference; empty where the plan is for them.
    """
    inputs_now = _described(arguments(inputs, "mezzo.plan.differences"))
    pairs = (
        ("model", plan.model, type(model).__name__),
        ("parameters", plan.weights, _weights(model)),
        ("inputs", ", ".join(plan.inputs), ", ".join(inputs_now)),
        ("torch", plan.torch, torch.__version__),
    )
    return tuple(f"{subject}: planned for {then}, and there is {now}" for subject, then, now in pairs if then != now)


def objective_number(objective: Objective) -> float:
    """Return an objective as a number: 0 for time, 1 for memory, or a number between.

    Raises:
        PolicyError: It is neither.
    """
    if objective in ("time", "memory"):
        return float(objective == "memory")
    if isinstance(objective, bool) or not isinstance(objective, int | float) or not 0 <= objective <= 1:
        raise PolicyError(
            f"the objective is {shown(objective)}",
            why='it is "time", "memory", or a number between 0 (time) and 1 (memory)',
            write='objective="time"',
        )
    return float(objective)


# From a placement to a plan --------------------------------------------------------------------------------------


def planned(costs: Costs, low: Sequence[bool], *, objective: float, name: str) -> Plan:
    """Return the plan of a placement.

    Args:
        costs: The costs of a graph.
        low: Whether each op is low.
        objective: The weight of memory against time.
        name: The name of the model.
    """
    graph = costs.graph
    as_listed, shown_ops = listed(graph), [op for op in graph.ops if op.role != "source"]
    rules, unsaid = rules_for(graph, low)
    indices = {op.index: index for index, op in enumerate(shown_ops)}
    placements = {"plan": tuple(low)} | {system: rule(as_listed) for system, rule in _RIVALS.items()}
    return Plan(
        model=name, weights="", inputs=(), base=str(graph.policy), objective=objective, fused=costs.fused,
        is_dynamic=any(isinstance(size, torch.SymInt) for node in graph.makers for size in _sizes(value_of(node))),
        device_type=graph.device_type, emulated=bool(graph.emulated), torch=torch.__version__, balance=costs.balance,
        ops=tuple(_row(graph, op, low, placements["torch.autocast"], indices) for op in shown_ops),
        casts=tuple(_cast(graph, crossing, low) for crossing in costs.casts(low)),
        totals={system: costs.totals(placement) for system, placement in placements.items()},
        rules=format_rules(rules), unsaid=unsaid,
    )  # fmt: skip


_RIVALS: Final[Mapping[str, Callable[[heuristics.Listed], tuple[bool, ...]]]] = {
    "torch.autocast": heuristics.promoted,
    "Paddle": heuristics.gray,
    "TensorFlow": heuristics.painted,
}

#: TensorFlow's clear list, in our names: ops whose results are numbers that they read.
_CLEAR: Final = frozenset(
    """
    abs ceil clamp floor neg round sign trunc maximum minimum fmax fmin max min amax amin relu relu6 max_pool1d
    max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d
    adaptive_max_pool2d cat stack hstack vstack where masked_fill pad gather index_select embedding
    """.split()
)


def listed(graph: Graph) -> heuristics.Listed:
    """Return a graph as the rules of other systems see it: the list of each op, and its producers."""
    lists = list[heuristics.Colour | None]()
    for op in graph.ops:
        fixed = op.fixed
        if op.role == "source" and fixed is False:
            lists.append(None)
        elif fixed is not None:
            lists.append("allow" if fixed else "deny")
        else:
            moves = op.name in OPS and OPS[op.name].reason == "data movement"
            lists.append("clear" if moves or op.name in _CLEAR else "infer")
    makers = [
        tuple(dict.fromkeys(maker for node in graph.promoting(op) if (maker := graph.makers[node].index) < op.index))
        for op in graph.ops
    ]
    return heuristics.Listed(tuple(lists), tuple(makers))


def _row(
    graph: Graph, op: GraphOp, low: Sequence[bool], by_autocast: Sequence[bool], indices: Mapping[int, int]
) -> PlannedOp:
    decided: Decider = "list"
    if op.decision is not None and op.decision.rule is not None:
        decided = "rule"
    elif op.role in ("free", "follow"):
        decided = "cut"
    elif op.role in ("asked", "own"):
        decided = "program" if op.role == "asked" else "left alone"
    reads = dict.fromkeys(graph.makers[node].index for node in op.reads)
    return PlannedOp(
        op=op.name, module=op.module, line=op.line, decided=decided,
        dtype=dtype_name(graph.dtype_of(op, low)), by_autocast=dtype_name(graph.dtype_of(op, by_autocast)),
        reason=op.reason, reads=tuple(indices[maker] for maker in reads if maker in indices and maker != op.index),
    )  # fmt: skip


def _cast(graph: Graph, crossing: Crossing, low: Sequence[bool]) -> PlannedCast:
    maker, of_all = graph.ops[crossing.maker], (*low, False, True)
    readers = [
        graph.ops[reader] for reader in crossing.readers if reader < len(low) and of_all[reader] != low[crossing.maker]
    ]
    wide, narrow = dtype_name(torch.float32), dtype_name(graph.policy.dtype)
    return PlannedCast(
        tensor=maker.name, module=maker.module, line=maker.line, is_source=maker.role == "source",
        given=narrow if low[maker.index] else wide, wanted=wide if low[maker.index] else narrow,
        readers=tuple(f"{op.name}@{op.module}" if op.module else op.name for op in readers),
        num_bytes=crossing.num_bytes,
    )  # fmt: skip


def _sizes(value: Any) -> Sequence[Any]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _weights(model: nn.Module) -> str:
    shapes = [(path, tuple(param.shape)) for path, param in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _described(inputs: Any) -> tuple[str, ...]:
    return tuple(f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in tensors(inputs))
