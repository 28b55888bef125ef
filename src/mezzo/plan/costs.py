"""What ops and casts cost in each precision: bytes read and written, and bytes kept for the backward pass.

Each call of a captured graph is run once in each precision on fake tensors, which have shapes and no memory, forward
and backward; its kernels are what is counted. So there is no table of ops here: what torch runs is what costs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx import Node

from mezzo.dispatch import FakeTensorMode
from mezzo.plan.balance import Balance
from mezzo.plan.cut import Edge, Problem, cost
from mezzo.plan.graph import Graph, GraphOp, hint, is_floating, memory_of, num_elements, trains, value_of
from mezzo.policy.ops import OPS
from mezzo.tensors import mapped, tensors
from mezzo.trace.kernels import read_bytes
from mezzo.trace.recording import KernelTeller
from mezzo.trace.table import KernelRecord

#: What the other of time and memory counts for, where one alone is asked for: it decides between what is equal.
_HARDLY: Final = 2.0**-20

# What one call moves ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one call moves and keeps in one precision, forward and backward.

    Attributes:
        num_bytes: What its kernels read and write.
        work: The same, or more where a product's arithmetic takes longer.
        keeps: Which of its tensors it keeps for the backward pass: places among the node's inputs.
        keeps_result: Whether it keeps what it gives.
        kept_bytes: What else it keeps: masks, statistics.
        dtype: What it gives.
        is_product: Whether any of its kernels is a product, a convolution or attention.
    """

    num_bytes: int
    work: float
    keeps: tuple[int, ...]
    keeps_result: bool
    kept_bytes: int
    dtype: torch.dtype | None
    is_product: bool


class Meter:
    """Run calls of a graph on fake tensors, each kind of call once.

    Args:
        graph: The graph.
        balance: What arithmetic costs on its device.
    """

    def __init__(self, graph: Graph, balance: Balance) -> None:
        self.graph, self.balance = graph, balance
        self._fake = FakeTensorMode()
        self._known: dict[Any, Moved | Exception] = {}

    def moved(self, op: GraphOp, node: Node, *, low: bool) -> Moved:
        """Measure a call.

        Args:
            op: The op it is a part of.
            node: The call.
            low: In which precision.

        Raises:
            Exception: What torch raises on fake tensors of this precision.
        """
        key = (node.target, op.kind, op.is_wide_inside, low, trains(node), _described(node, op))
        if key not in self._known:
            try:
                self._known[key] = self._measure(op, node, low)
            except Exception as error:  # of any kind: it is torch's, or a custom op's
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _measure(self, op: GraphOp, node: Node, low: bool) -> Moved:
        dtype = self.graph.policy.dtype if low else torch.float32
        reads = {id(each) for each in op.reads}
        kernels, packed = list[KernelRecord](), list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        device = self.graph.device_type
        inside = torch.autocast(device, dtype=self.graph.policy.dtype, enabled=op.kind == "inside")
        with torch.enable_grad(), self._fake, inside:
            leaves, made = list[Tensor](), dict[Node, Any]()
            for each in node.all_input_nodes:
                casts = op.kind != "inside" and (id(each) in reads or self.graph.makers.get(each) is op)
                wanted = torch.float32 if each in op.wide_reads else dtype if casts else None
                made[each] = _fake_of(value_of(each), wanted, leaves if trains(node) else None)
            with KernelTeller(kernels.append), torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
                results = _run(
                    node, made, dtype if op.is_wide_inside and low and not self.graph.emulates(op.name) else None
                )
                floats = [each for each in tensors(results) if each.is_floating_point()]
                self._backward(floats, leaves)
        given = {memory_of(each): place for place, each in enumerate(made.values()) if isinstance(each, Tensor)}
        own = {memory_of(each) for each in floats}
        kept = {memory_of(each): each for each in packed}
        flops = [0 if record.flops is None else record.flops[0] for record in kernels]
        is_low = low or op.kind == "inside"
        work = (self.balance.work(each.num_bytes, n, low=is_low) for each, n in zip(kernels, flops, strict=True))
        return Moved(
            num_bytes=sum(each.num_bytes for each in kernels), work=sum(work), is_product=any(flops),
            keeps=tuple(sorted(given[each] for each in kept if each in given)),
            keeps_result=any(each in own and each not in given for each in kept),
            kept_bytes=sum(read_bytes(each) for key, each in kept.items() if key not in given and key not in own),
            dtype=floats[0].dtype if floats else None,
        )  # fmt: skip

    def _backward(self, results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        starts = [each for each in results if each.requires_grad]
        if starts and leaves:
            torch.autograd.grad(starts, leaves, [torch.empty_like(each) for each in starts], allow_unused=True)


def _described(node: Node, op: GraphOp) -> Any:
    """Return what tells calls of one function apart: what they are given."""

    def told(each: Node) -> Any:
        value = value_of(each)
        if not isinstance(value, Tensor):
            return str(value)
        is_own = (each in op.reads, each in op.wide_reads, each in op.nodes)
        sizes, strides = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
        return f"<{sizes} {strides} {value.dtype} {value.requires_grad} {value.device} {is_own}>"

    return str(fx.map_arg((node.args, node.kwargs), told))


def _fake_of(value: Any, dtype: torch.dtype | None, leaves: list[Tensor] | None) -> Any:
    """Make a fake tensor like one of Dynamo's, with the first shapes for sizes; leaves that need gradients are kept.

    Args:
        value: Dynamo's.
        dtype: Another dtype for floating tensors.
        leaves: Where to keep them; None where no gradients are taken.
    """
    if isinstance(value, tuple | list):
        return type(value)([_fake_of(each, dtype, leaves) for each in value])
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, Tensor):
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    sizes, strides = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
    leaf = torch.empty_strided(sizes, strides, dtype=wanted, device=value.device)
    if leaves is None or not (value.requires_grad and value.is_floating_point()):
        return leaf
    leaves.append(leaf.requires_grad_())
    return leaf.clone()  # which may be written to


def _run(node: Node, made: Mapping[Node, Any], rounds_to: torch.dtype | None) -> Any:
    """Run a call; in FP32 from rounded operands, with what it gives rounded, where a dtype is named."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: made[each])

    def widened(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    if rounds_to is not None:
        args, kwargs = mapped((args, kwargs), functools.partial(widened, dtype=torch.float32))
    if node.op == "call_method":
        out = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        out = node.target(*args, **kwargs)  # type: ignore[operator]
    return out if rounds_to is None else mapped(out, functools.partial(widened, dtype=rounds_to))


# The problem ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """A tensor that ops may want in another precision than it has: where a cast is made, if one is.

    Attributes:
        node: The tensor that is cast.
        maker: The op that it belongs to.
        readers: The ops that read it, or a view of it, in their own precision.
        num_elements: How many elements it has.
        trains: Whether its gradient is cast back.
    """

    node: Node
    maker: int
    readers: tuple[int, ...]
    num_elements: int
    trains: bool

    @property
    def num_bytes(self) -> int:
        """What one cast reads and writes, with that of the gradient."""
        return self.num_elements * (4 + 2) * (1 + self.trains)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a placement comes to, in one step.

    Attributes:
        casts: How many tensors are cast, in the forward pass, by kernels of their own; what torch's type promotion
            widens is one of these, as it is on a CPU.
        cast_bytes: What these casts, and those of gradients, read and write.
        moved_bytes: What everything reads and writes, casts included; infinite where a rule does not hold.
        kept_bytes: What is kept for the backward pass, but for weights and inputs in the precision that they have.
        cost: In the unit of the objective.
    """

    casts: int
    cast_bytes: int
    moved_bytes: float
    kept_bytes: float
    cost: float


class Costs:
    """The costs of a graph's ops and casts.

    Ops that cannot be tried in low precision are left alone from here on.

    Args:
        graph: The graph; what its ops may be is corrected by what they do.
        balance: What arithmetic costs on its device.
        objective: What to make small: 0 is the time of a step, 1 what it keeps for the backward pass. Of placements
            that are equal in the one, the one that is better in the other.
        fused: Whether a compiler fuses what lies between products: what is made and read there is not written, and a
            cast that such an op reads through or writes through costs nothing.

    Attributes:
        problem: What to solve; the last two of its ops are no ops, and always FP32 and low.
    """

    def __init__(self, graph: Graph, balance: Balance, *, objective: float, fused: bool) -> None:
        self.graph, self.balance, self.fused = graph, balance, fused
        meter = Meter(graph, balance)
        self._moved = [_both(meter, op) for op in graph.ops]
        self._kept = tuple(_kept(graph, self._moved))
        self._crossings = tuple(_crossings(graph))
        self._keeps = [not any(map(graph.is_run_again, op.nodes)) for op in graph.ops]
        self._is_apart = tuple(self._has_own_kernel(op) for op in graph.ops)
        self._stages = _stages(graph, self._is_apart)
        time, memory = max(1 - objective, _HARDLY), max(objective, _HARDLY)
        self.problem = self._problem(time, memory, lambda moved: moved.work)
        self._bytes = self._problem(1.0, 0.0, lambda moved: moved.num_bytes)
        self._memory = self._problem(0.0, 1.0, lambda moved: 0)

    def totals(self, low: Sequence[bool]) -> Totals:
        """Add up a placement.

        Args:
            low: Whether each op of the graph is low.
        """
        made, of_all = list(self.casts(low)), (*low, False, True)
        return Totals(
            casts=len(made),
            cast_bytes=sum(each.num_bytes for each in made),
            moved_bytes=cost(self._bytes, of_all),
            kept_bytes=cost(self._memory, of_all),
            cost=cost(self.problem, of_all),
        )

    def casts(self, low: Sequence[bool]) -> Iterator[Crossing]:
        """Yield the casts of a placement that are kernels of their own: each tensor's, once."""
        of_all = (*low, False, True)
        for each in self._crossings:
            if any(of_all[reader] != low[each.maker] for reader in self._apart(each)):
                yield each

    def _apart(self, crossing: Crossing) -> tuple[int, ...]:
        """Return the readers for which a cast would be a kernel of its own."""
        if not self.fused:
            return crossing.readers
        if not self._is_apart[crossing.maker]:
            return ()
        return self._own_kernels(crossing)

    def _own_kernels(self, crossing: Crossing) -> tuple[int, ...]:
        is_apart = (*self._is_apart, True, True)
        return tuple(reader for reader in crossing.readers if is_apart[reader])

    def _has_own_kernel(self, op: GraphOp) -> bool:
        """Whether a compiler leaves an op a kernel of its own: products, and what it does not know."""
        products = any(each.is_product for each in self._moved[op.index][True])
        is_gemm = op.name in OPS and OPS[op.name].reason == "gemm"
        return products or is_gemm or op.kind in ("own", "inside", "source")

    def _problem(self, time: float, memory: float, of: Callable[[Moved], float]) -> Problem:
        """Write the problem.

        Args:
            time: What a byte counts that is moved.
            memory: What a byte counts that is kept.
            of: What a call moves.
        """
        counted = [not self.fused or apart for apart in self._is_apart]
        sides = [
            [
                (time * sum(map(of, side)) if counts else 0.0) + memory * keeps * sum(each.kept_bytes for each in side)
                for side in calls
            ]
            for calls, counts, keeps in zip(self._moved, counted, self._keeps, strict=True)
        ]
        edges = list(self._casts_or_traffic(time, sides) if time else ())
        always_high, always_low = len(sides), len(sides) + 1
        for kept in self._kept if memory else ():
            edges.append(Edge(always_high, kept.readers, memory * kept.low, 0.0))
            edges.append(Edge(always_low, kept.readers, 0.0, memory * kept.high))
        for op in self.graph.ops:
            if op.kind == "follow":
                makers = dict.fromkeys(self.graph.makers[node].index for node in op.reads)
                only = math.inf if len(makers) == 1 else 0.0  # of several, which are low, no cut can say
                edges += [Edge(maker, (op.index,), math.inf, only) for maker in makers if maker != op.index]
        fixed = [op.fixed for op in self.graph.ops]
        high = [math.inf if is_low is True else side[False] for is_low, side in zip(fixed, sides, strict=True)]
        low = [math.inf if is_low is False else side[True] for is_low, side in zip(fixed, sides, strict=True)]
        return Problem((*high, 0.0, math.inf), (*low, math.inf, 0.0), tuple(edges))

    def _casts_or_traffic(self, time: float, sides: list[list[float]]) -> Iterator[Edge]:
        """Yield what casts cost; where ops are fused, add to ``sides`` what lies between clusters and is read there."""
        always_high, always_low = len(sides), len(sides) + 1
        for each in self._crossings:
            if not self.fused:
                yield Edge(each.maker, each.readers, time * each.num_bytes, time * each.num_bytes)
                continue
            low, high = (time * size * each.num_elements * (1 + each.trains) for size in (2, 4))
            own = self._own_kernels(each)
            stages = {self._stages[reader] for reader in set(each.readers) - set(own)}
            if self._is_apart[each.maker]:
                yield Edge(each.maker, own, time * each.num_bytes, time * each.num_bytes)
                passes = len(stages)  # what has a kernel of its own has its writing counted
            elif later := stages - {self._stages[each.maker]}:
                yield Edge(each.maker, own, low, high)  # written once more in the other precision
                passes = 1 + len(later)
            else:  # written as it is wanted
                yield Edge(always_high, own, low, 0.0)
                yield Edge(always_low, own, 0.0, high)
                continue
            if self.graph.ops[each.maker].kind != "source":
                sides[each.maker][False] += passes * high
                sides[each.maker][True] += passes * low


def _stages(graph: Graph, is_apart: Sequence[bool]) -> list[int]:
    """Return after how many ops with kernels of their own each op runs: only ops of one stage are fused."""
    stages = list[int]()
    for op in graph.ops:
        makers = (graph.makers[node] for node in op.reads)
        before = [
            stages[each.index] + (is_apart[each.index] and each.kind != "source")
            for each in makers
            if each.index < op.index
        ]
        stages.append(max(before, default=0))
    return stages


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor that is kept for the backward pass, in each precision in which an op that keeps it runs."""

    readers: tuple[int, ...]
    low: int
    high: int


def _both(meter: Meter, op: GraphOp) -> tuple[tuple[Moved, ...], tuple[Moved, ...]]:
    """Measure an op in FP32 and in the low format; what cannot be tried is left alone, or has one precision."""
    if op.kind in ("source", "own", "asked"):
        return (), ()
    try:
        high = tuple(meter.moved(op, node, low=False) for node in op.nodes)
    except Exception as error:
        op.kind, op.reason = "own", f"it cannot be tried: {_first(error)}"
        return (), ()
    if op.kind == "inside":
        op.dtype = high[0].dtype or op.dtype
        return high, high
    if op.kind == "fp32":
        return high, high
    try:
        low = tuple(meter.moved(op, node, low=True) for node in op.nodes)
    except Exception as error:
        if op.kind != "low":
            op.kind, op.reason = "fp32", f"it cannot be tried in the low format: {_first(error)}"
            return high, high
        op.kind, op.reason = "own", f"it cannot be tried in the low format: {_first(error)}"
        return (), ()
    if op.kind != "low" and low[0].dtype not in (None, meter.graph.policy.dtype):
        op.kind, op.reason = "fp32", "it gives FP32 whatever it reads"
    return high, low


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _crossings(graph: Graph) -> Iterator[Crossing]:
    """Find the tensors that ops read in their own precision, each with all of its readers."""
    readers: dict[Node, dict[int, None]] = {}
    trained = set[Node]()
    placed = (torch.float32, graph.policy.dtype)
    for op in graph.ops:
        if op.kind == "inside":
            continue
        for node in (*op.reads, *op.wide_reads):  # of a source: what is written to it
            if value_of(node).dtype not in placed or op.dtype not in placed:
                continue  # float64: the program casts it by itself
            # What is left alone takes each tensor as it is without a policy.
            reader = op.index if op.kind != "own" else len(graph.ops) + (value_of(node).dtype != torch.float32)
            reader = len(graph.ops) if node in op.wide_reads else reader
            if graph.makers[node] is not op:
                readers.setdefault(graph.cast_at(node), {})[reader] = None
                if value_of(node).requires_grad and any(map(trains, op.nodes)):
                    trained.add(graph.cast_at(node))
    for node, found in readers.items():
        yield Crossing(node, graph.makers[node].index, tuple(found), num_elements(node), node in trained)


def _kept(graph: Graph, moved: Sequence[tuple[tuple[Moved, ...], tuple[Moved, ...]]]) -> Iterator[_KeptTensor]:
    """Find what is kept for the backward pass, each tensor with the ops that keep it."""
    readers: dict[tuple[GraphOp, int], dict[int, None]] = {}
    nodes: dict[tuple[GraphOp, int], dict[Node, None]] = {}

    def keep(node: Node, reader: int) -> None:
        maker, own = graph.makers[node], memory_of(value_of(node))  # views, and what was written to, are one memory
        while maker.kind == "asked" and maker.reads and memory_of(value_of(maker.reads[0])) == own:
            maker = graph.makers[maker.reads[0]]  # a cast to what it is already
        memory = maker, own
        readers.setdefault(memory, {})[reader] = None
        nodes.setdefault(memory, {})[graph.cast_at(node)] = None

    for op in graph.ops:
        for node, call in zip(op.nodes, moved[op.index][True], strict=False):
            if graph.is_run_again(node):
                continue
            inputs = node.all_input_nodes
            for place in call.keeps:
                if inputs[place] in graph.makers and is_floating(inputs[place]):
                    keep(inputs[place], op.index)
            if call.keeps_result and is_floating(node):
                keep(node, op.index)
    for node in graph.checkpoints:  # which keep what they are given, as it is
        for each in node.all_input_nodes:
            if each in graph.makers and is_floating(each) and trains(node):
                keep(each, graph.makers[each].index)
    for (maker, _), found in readers.items():
        of_one = nodes[maker, _]
        size = min(sum(map(num_elements, of_one)), max(map(_num_stored, of_one)))
        low, high = 2 * size, 4 * size
        if maker.kind == "source":  # which is there anyway, as it is
            low, high = (low, 0) if maker.dtype == torch.float32 else (0, high)
        yield _KeptTensor(tuple(found), low, high)


def _num_stored(node: Node) -> int:
    value = value_of(node)
    return hint(value.untyped_storage().nbytes()) // int(value.element_size())
