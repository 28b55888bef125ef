"""The costs of ops and casts in each precision: bytes read and written, and bytes kept for the backward pass.

Each call of a captured graph runs once in each precision on fake tensors, which have shapes and no memory, forward and
backward; the costs are those of the kernels that torch runs. So no table of ops is needed.
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

#: The weight of memory where time is the objective, and of time where memory is: it decides between equal placements.
_TIE_BREAK: Final = 2.0**-20

# The costs of one call -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCosts:
    """The costs of one call in one precision, forward and backward.

    Attributes:
        num_bytes: The bytes that its kernels read and write.
        work: The same, or more where a product's arithmetic takes longer.
        keeps: The inputs that it keeps for the backward pass, by their indices among the node's inputs.
        keeps_result: Whether it keeps its result.
        kept_bytes: The bytes of other tensors that it keeps: masks, statistics.
        dtype: The dtype of its result.
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
    """Measures calls of a graph on fake tensors, like calls once.

    Args:
        graph: The graph.
        balance: The speed of arithmetic against that of memory on its device.
    """

    def __init__(self, graph: Graph, balance: Balance) -> None:
        self.graph, self.balance = graph, balance
        self._fake = FakeTensorMode()
        self._costs_by_call: dict[Any, CallCosts | Exception] = {}

    def costs_of(self, op: GraphOp, node: Node, *, low: bool) -> CallCosts:
        """Return the costs of a call.

        Args:
            op: The op that it is a part of.
            node: The call.
            low: Whether it runs in low precision.

        Raises:
            Exception: The call cannot run on fake tensors of this precision.
        """
        key = (node.target, op.role, op.is_wide_inside, low, trains(node), _described(node, op))
        if key not in self._costs_by_call:
            try:
                self._costs_by_call[key] = self._measure(op, node, low)
            except Exception as error:  # torch and custom ops raise errors of any class
                self._costs_by_call[key] = error
        result = self._costs_by_call[key]
        if isinstance(result, Exception):
            raise result
        return result

    def _measure(self, op: GraphOp, node: Node, low: bool) -> CallCosts:
        dtype = self.graph.policy.dtype if low else torch.float32
        reads = {id(read) for read in op.reads}
        kernels, packed = list[KernelRecord](), list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        device = self.graph.device_type
        autocast = torch.autocast(device, dtype=self.graph.policy.dtype, enabled=op.role == "inside")
        with torch.enable_grad(), self._fake, autocast:
            leaves, inputs = list[Tensor](), dict[Node, Any]()
            for read in node.all_input_nodes:
                casts = op.role != "inside" and (id(read) in reads or self.graph.makers.get(read) is op)
                wanted = torch.float32 if read in op.wide_reads else dtype if casts else None
                inputs[read] = _fake_of(value_of(read), wanted, leaves if trains(node) else None)
            rounds_to = dtype if op.is_wide_inside and low and not self.graph.emulates(op.name) else None
            with KernelTeller(kernels.append), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = [tensor for tensor in tensors(_run(node, inputs, rounds_to)) if tensor.is_floating_point()]
                self._backward(outputs, leaves)
        input_of = {memory_of(value): index for index, value in enumerate(inputs.values()) if isinstance(value, Tensor)}
        output_memories = {memory_of(output) for output in outputs}
        saved = {memory_of(tensor): tensor for tensor in packed}
        others = [
            tensor for memory, tensor in saved.items() if memory not in input_of and memory not in output_memories
        ]
        flops = [0 if record.flops is None else record.flops[0] for record in kernels]
        is_low = low or op.role == "inside"
        work = (self.balance.work(record.num_bytes, n, low=is_low) for record, n in zip(kernels, flops, strict=True))
        return CallCosts(
            num_bytes=sum(record.num_bytes for record in kernels), work=sum(work), is_product=any(flops),
            keeps=tuple(sorted(input_of[memory] for memory in saved if memory in input_of)),
            keeps_result=any(memory in output_memories and memory not in input_of for memory in saved),
            kept_bytes=sum(map(read_bytes, others)), dtype=outputs[0].dtype if outputs else None,
        )  # fmt: skip

    def _backward(self, results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        starts = [result for result in results if result.requires_grad]
        if starts and leaves:
            torch.autograd.grad(starts, leaves, [torch.empty_like(result) for result in starts], allow_unused=True)


def _described(node: Node, op: GraphOp) -> Any:
    """Return the arguments of a call as text: like calls have equal ones."""

    def description(read: Node) -> Any:
        value = value_of(read)
        if not isinstance(value, Tensor):
            return str(value)
        relation = (read in op.reads, read in op.wide_reads, read in op.nodes)
        sizes, strides = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
        return f"<{sizes} {strides} {value.dtype} {value.requires_grad} {value.device} {relation}>"

    return str(fx.map_arg((node.args, node.kwargs), description))


def _fake_of(value: Any, dtype: torch.dtype | None, leaves: list[Tensor] | None) -> Any:
    """Return a fake tensor like one of Dynamo's, with the sizes of the first call.

    Args:
        value: Dynamo's value.
        dtype: Another dtype for floating tensors.
        leaves: Gets the leaves that need gradients; None for a call without gradients.
    """
    if isinstance(value, tuple | list):
        return type(value)([_fake_of(member, dtype, leaves) for member in value])
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
    return leaf.clone()  # a leaf that needs gradients may not be written to, its clone may


def _run(node: Node, inputs: Mapping[Node, Any], rounds_to: torch.dtype | None) -> Any:
    """Return the result of a call; if a dtype is given, computed in FP32 and rounded to that dtype."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: inputs[read])

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
    """A tensor that some ops may read in another precision than it has, so that it may be cast.

    Attributes:
        node: The tensor to cast.
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
        """The bytes that its cast, and that of its gradient, read and write."""
        return self.num_elements * (4 + 2) * (1 + self.trains)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The costs of a placement, in one step.

    Attributes:
        casts: How many tensors are cast, in the forward pass, by kernels of their own. A tensor that torch's type
            promotion widens counts, since it is cast so on a CPU.
        cast_bytes: The bytes that these casts, and those of gradients, read and write.
        moved_bytes: The bytes that all kernels read and write, casts included; infinite where a rule does not hold.
        kept_bytes: The bytes kept for the backward pass, without weights and inputs in their present precision.
        cost: In the unit of the objective.
    """

    casts: int
    cast_bytes: int
    moved_bytes: float
    kept_bytes: float
    cost: float


class Costs:
    """The costs of a graph's ops and casts.

    An op that fails in low precision on fake tensors gets another role: it is left alone, or FP32.

    Args:
        graph: The graph; the roles of its ops are corrected by the measurements.
        balance: The speed of arithmetic against that of memory on its device.
        objective: 0 for the time of a step, 1 for the bytes that it keeps for the backward pass, or between. Placements
            that are equal in one are compared by the other.
        fused: Whether a compiler fuses ops between products: tensors that are made and read inside a fused kernel are
            not written, and casts inside cost nothing.

    Attributes:
        problem: The problem to solve. Two ops stand behind those of the graph: one always FP32, one always low.
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
        time, memory = max(1 - objective, _TIE_BREAK), max(objective, _TIE_BREAK)
        self.problem = self._problem(time, memory, lambda moved: moved.work)
        self._bytes = self._problem(1.0, 0.0, lambda moved: moved.num_bytes)
        self._memory = self._problem(0.0, 1.0, lambda moved: 0)

    def totals(self, low: Sequence[bool]) -> Totals:
        """Return the costs of a placement.

        Args:
            low: Whether each op of the graph is low.
        """
        casts, of_all = list(self.casts(low)), (*low, False, True)
        return Totals(
            casts=len(casts),
            cast_bytes=sum(crossing.num_bytes for crossing in casts),
            moved_bytes=cost(self._bytes, of_all),
            kept_bytes=cost(self._memory, of_all),
            cost=cost(self.problem, of_all),
        )

    def casts(self, low: Sequence[bool]) -> Iterator[Crossing]:
        """Yield the tensors that a placement casts by kernels of their own."""
        of_all = (*low, False, True)
        for crossing in self._crossings:
            if any(of_all[reader] != low[crossing.maker] for reader in self._apart(crossing)):
                yield crossing

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
        """Whether a compiler gives an op a kernel of its own, as products and unknown ops get."""
        products = any(call.is_product for call in self._moved[op.index][True])
        is_gemm = op.name in OPS and OPS[op.name].reason == "gemm"
        return products or is_gemm or op.role in ("own", "inside", "source")

    def _problem(self, time: float, memory: float, of: Callable[[CallCosts], float]) -> Problem:
        """Return the problem of the minimum cut.

        Args:
            time: The weight of a byte that is moved.
            memory: The weight of a byte that is kept.
            of: The bytes that a call moves.
        """
        counted = [not self.fused or apart for apart in self._is_apart]
        sides = [
            [
                (time * sum(map(of, side)) if counts else 0.0) + memory * keeps * sum(call.kept_bytes for call in side)
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
            if op.role == "follow":
                makers = dict.fromkeys(self.graph.makers[node].index for node in op.reads)
                only = (
                    math.inf if len(makers) == 1 else 0.0
                )  # that all of several makers are low is no condition of a cut
                edges += [Edge(maker, (op.index,), math.inf, only) for maker in makers if maker != op.index]
        fixed = [op.fixed for op in self.graph.ops]
        high = [math.inf if is_low is True else side[False] for is_low, side in zip(fixed, sides, strict=True)]
        low = [math.inf if is_low is False else side[True] for is_low, side in zip(fixed, sides, strict=True)]
        return Problem((*high, 0.0, math.inf), (*low, math.inf, 0.0), tuple(edges))

    def _casts_or_traffic(self, time: float, sides: list[list[float]]) -> Iterator[Edge]:
        """Yield the costs of casts. Where ops are fused, add to ``sides`` the traffic between fused kernels."""
        always_high, always_low = len(sides), len(sides) + 1
        for crossing in self._crossings:
            if not self.fused:
                yield Edge(crossing.maker, crossing.readers, time * crossing.num_bytes, time * crossing.num_bytes)
                continue
            low, high = (time * size * crossing.num_elements * (1 + crossing.trains) for size in (2, 4))
            apart = self._own_kernels(crossing)
            stages = {self._stages[reader] for reader in set(crossing.readers) - set(apart)}
            if self._is_apart[crossing.maker]:
                yield Edge(crossing.maker, apart, time * crossing.num_bytes, time * crossing.num_bytes)
                passes = len(stages)  # the maker's own kernel already counts the writing
            elif later := stages - {self._stages[crossing.maker]}:
                yield Edge(crossing.maker, apart, low, high)  # written once more in the other precision
                passes = 1 + len(later)
            else:  # the maker's fused kernel writes it in the dtype that readers want
                yield Edge(always_high, apart, low, 0.0)
                yield Edge(always_low, apart, 0.0, high)
                continue
            if self.graph.ops[crossing.maker].role != "source":
                sides[crossing.maker][False] += passes * high
                sides[crossing.maker][True] += passes * low


def _stages(graph: Graph, is_apart: Sequence[bool]) -> list[int]:
    """Return how many ops with kernels of their own precede each op on a path: ops of one stage are fused."""
    stages = list[int]()
    for op in graph.ops:
        makers = (graph.makers[node] for node in op.reads)
        before = [
            stages[maker.index] + (is_apart[maker.index] and maker.role != "source")
            for maker in makers
            if maker.index < op.index
        ]
        stages.append(max(before, default=0))
    return stages


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor that is kept for the backward pass: the ops that keep it, and its bytes in either precision."""

    readers: tuple[int, ...]
    low: int
    high: int


def _both(meter: Meter, op: GraphOp) -> tuple[tuple[CallCosts, ...], tuple[CallCosts, ...]]:
    """Return the costs of an op's calls in FP32 and in the low format; an op that fails gets another role."""
    if op.role in ("source", "own", "asked"):
        return (), ()
    try:
        high = tuple(meter.costs_of(op, node, low=False) for node in op.nodes)
    except Exception as error:
        op.role, op.reason = "own", f"it cannot be tried: {_first(error)}"
        return (), ()
    if op.role == "inside":
        op.dtype = high[0].dtype or op.dtype
        return high, high
    if op.role == "fp32":
        return high, high
    try:
        low = tuple(meter.costs_of(op, node, low=True) for node in op.nodes)
    except Exception as error:
        if op.role != "low":
            op.role, op.reason = "fp32", f"it cannot be tried in the low format: {_first(error)}"
            return high, high
        op.role, op.reason = "own", f"it cannot be tried in the low format: {_first(error)}"
        return (), ()
    if op.role != "low" and low[0].dtype not in (None, meter.graph.policy.dtype):
        op.role, op.reason = "fp32", "it gives FP32 whatever it reads"
    return high, low


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _crossings(graph: Graph) -> Iterator[Crossing]:
    """Yield the tensors that ops read in their own precision, each with all of its readers."""
    readers: dict[Node, dict[int, None]] = {}
    trained = set[Node]()
    placed = (torch.float32, graph.policy.dtype)
    for op in graph.ops:
        if op.role == "inside":
            continue
        for node in (*op.reads, *op.wide_reads):  # the reads of a source are tensors written to it
            if value_of(node).dtype not in placed or op.dtype not in placed:
                continue  # float64: the program casts it by itself
            # An op that is left alone reads each tensor in the dtype that it has without a policy.
            reader = op.index if op.role != "own" else len(graph.ops) + (value_of(node).dtype != torch.float32)
            reader = len(graph.ops) if node in op.wide_reads else reader
            if graph.makers[node] is not op:
                readers.setdefault(graph.cast_at(node), {})[reader] = None
                if value_of(node).requires_grad and any(map(trains, op.nodes)):
                    trained.add(graph.cast_at(node))
    for node, readers_of in readers.items():
        yield Crossing(node, graph.makers[node].index, tuple(readers_of), num_elements(node), node in trained)


def _kept(graph: Graph, moved: Sequence[tuple[tuple[CallCosts, ...], tuple[CallCosts, ...]]]) -> Iterator[_KeptTensor]:
    """Yield the tensors that are kept for the backward pass, each with the ops that keep it."""
    keepers: dict[tuple[GraphOp, int], dict[int, None]] = {}
    nodes: dict[tuple[GraphOp, int], dict[Node, None]] = {}

    def keep(node: Node, reader: int) -> None:
        maker, memory = graph.makers[node], memory_of(value_of(node))  # of a view, and after a write, the same memory
        while maker.role == "asked" and maker.reads and memory_of(value_of(maker.reads[0])) == memory:
            maker = graph.makers[maker.reads[0]]  # a cast to the dtype that the tensor has already
        key = maker, memory
        keepers.setdefault(key, {})[reader] = None
        nodes.setdefault(key, {})[graph.cast_at(node)] = None

    for op in graph.ops:
        for node, call in zip(op.nodes, moved[op.index][True], strict=False):
            if graph.is_run_again(node):
                continue
            inputs = node.all_input_nodes
            for number in call.keeps:
                if inputs[number] in graph.makers and is_floating(inputs[number]):
                    keep(inputs[number], op.index)
            if call.keeps_result and is_floating(node):
                keep(node, op.index)
    for node in graph.checkpoints:  # a checkpoint keeps its inputs, in their own dtypes
        for read in node.all_input_nodes:
            if read in graph.makers and is_floating(read) and trains(node):
                keep(read, graph.makers[read].index)
    for (maker, memory), ops in keepers.items():
        stored = nodes[maker, memory]
        size = min(sum(map(num_elements, stored)), max(map(_num_stored, stored)))
        low, high = 2 * size, 4 * size
        if maker.role == "source":  # it exists anyway, in its own dtype
            low, high = (low, 0) if maker.dtype == torch.float32 else (0, high)
        yield _KeptTensor(tuple(ops), low, high)


def _num_stored(node: Node) -> int:
    value = value_of(node)
    return hint(value.untyped_storage().nbytes()) // int(value.element_size())
