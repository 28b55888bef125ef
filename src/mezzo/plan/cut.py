"""The cheapest placement of two precisions, and of the casts between them: a minimum cut.

Pure: costs come in, in any unit, and a placement comes out. The maximum flow is scipy's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mezzo.errors import PolicyError, raise_together, require_extra, shown

#: scipy's maximum flow takes int32; a residual capacity is the sum of two.
_LARGEST: Final = 2**30 - 1
#: Bits of the sum of all finite costs: of integers at most, of others after scaling, which is what float64 has.
_MOST_BITS: Final = 60
_BITS: Final = 52
#: How many times a cut the bound of its search may be before roundings matter.
_NEAR: Final = 64


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor between ops: its producer, its consumers, and the costs of its casts.

    Attributes:
        producer: The op that makes it, by index.
        consumers: The ops that read it; one that reads it twice may stand here twice. Without any, it costs nothing.
        down: The cost of the cast to low precision, from 0; infinite where it is forbidden. All consumers share it.
        up: The same of the cast to FP32.
    """

    producer: int
    consumers: tuple[int, ...]
    down: float
    up: float

    def __post_init__(self) -> None:
        raise_together(self._problems())

    def _problems(self) -> Iterator[PolicyError]:
        if not _is_index(self.producer):
            yield PolicyError(
                f"producer is {shown(self.producer)}", where="Edge", why="it is the index of an op, from 0"
            )
        consumers: object = self.consumers
        if not isinstance(consumers, tuple):
            why = "they are a tuple of indices of ops"
            yield PolicyError(
                f"consumers are {shown(consumers)}", where="Edge", why=why, write="Edge(0, (1,), 2.0, 2.0)"
            )
        elif wrong := [consumer for consumer in consumers if not _is_index(consumer)]:
            yield PolicyError(f"a consumer is {shown(wrong[0])}", where="Edge", why="it is the index of an op, from 0")
        for name, value in (("down", self.down), ("up", self.up)):
            if not _is_cost(value) or value < 0:
                yield PolicyError(
                    f"{name} is {shown(value)}",
                    where="Edge",
                    why="a cast costs a number from 0, or inf where forbidden",
                )


@dataclass(frozen=True, slots=True)
class Problem:
    """The cost of each op in either precision, and the tensors between ops.

    Attributes:
        high: The cost of each op in FP32; infinite where that is forbidden, negative where it saves.
        low: The cost of each op in low precision, likewise.
        tensors: The tensors that an op makes and others read, in any order. An op of several results makes several.
    """

    high: Sequence[float]
    low: Sequence[float]
    tensors: Sequence[Edge]

    def __post_init__(self) -> None:
        raise_together(self._problems())

    def _problems(self) -> Iterator[PolicyError]:
        for name in ("high", "low", "tensors"):
            if not isinstance(getattr(self, name), list | tuple):
                yield PolicyError(
                    f"{name} is {shown(getattr(self, name))}", where="Problem", why="it is a tuple or a list, in order"
                )
                return
        if len(self.high) != len(self.low):
            yield PolicyError(
                f"there are {len(self.high)} high costs and {len(self.low)} low ones",
                where="Problem",
                why="each op has one of each",
            )
        for name, costs in (("high", self.high), ("low", self.low)):
            for index, value in enumerate(costs):
                if not _is_cost(value):
                    why = "a cost is a number, or inf where this precision is forbidden"
                    yield PolicyError(f"{name}[{index}] is {shown(value)}", where="Problem", why=why)
        tensors: Sequence[object] = self.tensors
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Edge):
                yield PolicyError(f"tensors[{index}] is {shown(tensor)}", where="Problem", why="it is an Edge")
            elif (last := max((tensor.producer, *tensor.consumers))) >= len(self.high):
                yield PolicyError(
                    f"tensors[{index}] names op {last}", where="Problem", why=f"there are {len(self.high)} ops, from 0"
                )
        if not _is_finite_sum(self):
            yield PolicyError(
                "the costs come to more than float64 holds", where="Problem", write="costs in a larger unit"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """A precision for each op.

    Attributes:
        low: Whether the op runs in low precision.
        cost: What :func:`cost` returns for it.
    """

    low: tuple[bool, ...]
    cost: float


def cost(problem: Problem, low: Sequence[bool]) -> float:
    """Return the cost of a placement by definition: the sum is exact, and rounded once.

    The cost is the sum of ``low[i]`` or ``high[i]`` over all ops, and for each tensor of ``down`` where the producer
    runs in FP32 and a consumer low, and of ``up`` where the producer runs low and a consumer in FP32.

    Args:
        problem: The costs.
        low: Whether each op runs in low precision.

    Returns:
        The cost, infinite where the placement asks for what is forbidden.

    Raises:
        PolicyError: ``low`` is no sequence of booleans, one for each op.

    Example:
        >>> inf = math.inf
        >>> problem = Problem((0, 5, 0), (inf, 1, inf), (Edge(0, (1,), 1, 1), Edge(1, (2,), 1, 1)))
        >>> [cost(problem, low) for low in ((False, True, False), (False, False, False), (True, True, False))]
        [3.0, 5.0, inf]
    """
    if len(low) != len(problem.high) or not all(isinstance(choice, bool) for choice in low):
        why = f"it has True or False for each of {len(problem.high)} ops"
        raise PolicyError(f"low is {shown(low)}", where="cost", why=why)
    terms = [problem.low[index] if is_low else problem.high[index] for index, is_low in enumerate(low)]
    for tensor in problem.tensors:
        is_low = low[tensor.producer]
        if any(low[consumer] != is_low for consumer in tensor.consumers):
            terms.append(tensor.up if is_low else tensor.down)
    return math.fsum(terms)


def cheapest(problem: Problem) -> Placement:
    """Return the cheapest placement; of several that cost the same, the one with the fewest low ops.

    Ops are nodes, and a placement cuts them in two: those on the source's side run low.

    - An op whose low cost is higher by *d* has an arc of capacity *d* to the sink; one whose FP32 cost is,
      an arc of *d* from the source.
    - A tensor has two nodes of its own, so that a cast is paid once. Its consumers have infinite arcs to the one,
      which has an arc of ``down`` to the producer. The producer has an arc of ``up`` to the other, which has infinite
      arcs to the consumers. With a single consumer both arcs are direct.

    Minimal cuts are a lattice. What the source still reaches after a maximum flow is the least of them, whatever the
    flow.

    scipy's flow is in int32. It is called on the leading 29 bits of the capacities, and then on the leading bits of
    what they leave, until nothing crosses the cut that it finds. No more can flow than crosses that cut, which is less
    than one unit of the last bit for each arc of it. Costs that are integers are exact so. Others are rounded to
    2⁻⁵² of their sum. Where the cut comes to less than a 64th of the sum, it is looked for once more,
    without the arcs that cost more than the whole cut.

    Args:
        problem: The costs.

    Returns:
        The placement. With integer costs below 2^53 whose sum is below 2^60 it is exactly the least of the cheapest;
        otherwise its cost is the least but for roundings.

    Raises:
        PolicyError: No placement is allowed; the message names ops that contradict each other.
        UnsupportedError: scipy is not installed.

    **Cost**: 10,000 ops take less than a second, most of it in scipy.

    Example:
        >>> inf = math.inf
        >>> tensors = [Edge(i, (i + 1,), 1, 1) for i in range(4)]
        >>> cheapest(Problem(high=(4, 0, 4, 0, 4), low=(0, 1, 0, inf, 0), tensors=tensors))
        Placement(low=(True, True, True, False, True), cost=3.0)

    References:
        Picard and Queyranne, On the structure of all minimum cuts in a network and applications, Mathematical
        Programming Study 13 (1980). Edmonds and Karp, Theoretical improvements in algorithmic efficiency for network
        flow problems, JACM 19 (1972): capacities by scaling.
    """
    require_extra("plan", "the cheapest placement needs scipy", "scipy.sparse.csgraph")
    network = _Network.of(problem)
    _refuse_conflicts(problem, network)
    low = tuple(network.least()[: len(problem.high)].tolist())
    return Placement(low, cost(problem, low))


# The network ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Network:
    """Arcs from tails to heads. The ops come first, then two nodes for each tensor, the source and the sink."""

    nodes: int
    tails: np.ndarray[Any, Any]
    heads: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]  # float64, infinite where an arc cannot be cut

    @property
    def source(self) -> int:
        return self.nodes - 2

    @property
    def sink(self) -> int:
        return self.nodes - 1

    @classmethod
    def of(cls, problem: Problem) -> _Network:
        ops, tensors = len(problem.high), len(problem.tensors)
        nodes = ops + 2 * tensors + 2
        source, sink = nodes - 2, nodes - 1
        arcs: dict[tuple[int, int], float] = defaultdict(int)
        for op, (high, low) in enumerate(zip(problem.high, problem.low, strict=True)):
            if math.isinf(high):
                arcs[source, op] = math.inf
            if math.isinf(low):
                arcs[op, sink] = math.inf
            if math.isfinite(high) and math.isfinite(low):
                arcs[(op, sink) if low > high else (source, op)] = abs(low - high)
        for index, tensor in enumerate(problem.tensors):
            consumers = [consumer for consumer in dict.fromkeys(tensor.consumers) if consumer != tensor.producer]
            lowered, raised = ops + 2 * index, ops + 2 * index + 1
            if len(consumers) == 1:  # no cast is shared, so that the tensor needs no nodes of its own
                lowered = raised = consumers[0]
            arcs[lowered, tensor.producer] += tensor.down if consumers else 0
            arcs[tensor.producer, raised] += tensor.up if consumers else 0
            if len(consumers) > 1:
                arcs.update({(consumer, lowered): math.inf for consumer in consumers})
                arcs.update({(raised, consumer): math.inf for consumer in consumers})
        arc_nodes = np.array(list(arcs), np.int32).reshape(-1, 2)
        return cls(nodes, arc_nodes[:, 0], arc_nodes[:, 1], np.array(list(arcs.values()), np.float64))

    def matrix(self, values: np.ndarray[Any, Any]) -> Any:
        from scipy.sparse import csr_matrix

        return csr_matrix((values, (self.tails, self.heads)), shape=(self.nodes, self.nodes))

    def least(self) -> np.ndarray[Any, Any]:
        """Return which nodes are on the source's side of the least minimal cut."""
        bound = math.fsum(self.sizes[np.isfinite(self.sizes)])
        while True:
            capacities, is_exact = self._integers(bound)
            inside = self._reached(capacities)
            is_cut = inside[self.tails] & ~inside[self.heads]
            size = math.fsum(self.sizes[is_cut])
            if is_exact or _NEAR * size >= bound:
                return inside
            bound = size  # a cheaper cut goes through no arc that is larger

    def _integers(self, bound: float) -> tuple[np.ndarray[Any, Any], bool]:
        """Return int64 capacities, infinite above a bound, and whether the others are the sizes themselves."""
        is_counted = np.isfinite(self.sizes) & (self.sizes <= bound)
        counted = self.sizes[is_counted]
        total = math.fsum(counted)
        is_exact = total < 2.0**_MOST_BITS and bool((counted == np.rint(counted)).all())
        scale = 0 if is_exact else _BITS - math.frexp(total)[1]
        capacities = np.zeros(len(self.sizes), np.int64)
        capacities[is_counted] = np.rint(np.ldexp(counted, scale)).astype(np.int64)
        capacities[~is_counted] = int(capacities.sum()) + 1
        return capacities, is_exact

    def _reached(self, capacities: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return which nodes the source reaches in the residual graph of a maximum flow."""
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        residual = self.matrix(capacities)
        most = int(capacities.max(initial=0))  # what can flow at most: the finite capacities come to less
        while True:
            shift = max(0, most.bit_length() - 29)
            leading = residual.copy()
            leading.data = np.minimum(leading.data >> shift, _LARGEST).astype(np.int32)
            leading.eliminate_zeros()
            flow = maximum_flow(leading, self.source, self.sink, method="dinic").flow
            residual = residual - flow.astype(np.int64) * (1 << shift)
            leading = leading - flow
            leading.eliminate_zeros()
            inside = np.zeros(self.nodes, bool)
            inside[breadth_first_order(leading, self.source, return_predecessors=False)] = True
            arcs = residual.tocoo()
            most = int(arcs.data[inside[arcs.row] & ~inside[arcs.col]].sum())
            if not most:
                return inside


def _refuse_conflicts(problem: Problem, network: _Network) -> None:
    """Raise where infinite arcs lead from the source to the sink: those cannot be cut."""
    from scipy.sparse.csgraph import breadth_first_order

    forbidding = network.matrix(np.isinf(network.sizes).astype(np.int32))
    forbidding.eliminate_zeros()
    _, before = breadth_first_order(forbidding, network.source)
    if before[network.sink] < 0:
        return
    path = [network.sink]
    while path[-1] != network.source:
        path.append(int(before[path[-1]]))
    ops = [node for node in reversed(path) if node < len(problem.high)]
    if len(ops) == 1:
        raise PolicyError(
            f"op {ops[0]} is forbidden in both precisions", where="cheapest", why="high and low are infinite for it"
        )
    raise PolicyError(
        f"op {ops[0]} must be low, op {ops[-1]} in FP32, and no cast is allowed between them"
        f" ({' → '.join(map(str, ops))})",
        where="cheapest",
        why="high is infinite for the first and low for the last; the casts of the tensors between them are infinite",
        write="a finite down or up of a tensor on the way",
    )


# Checks -----------------------------------------------------------------------------------------------


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_cost(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > -math.inf  # NaN is not


def _is_finite_sum(problem: Problem) -> bool:
    """Whether the sum of all finite costs is finite; values that are no costs are left out."""
    casts = [value for tensor in problem.tensors if isinstance(tensor, Edge) for value in (tensor.down, tensor.up)]
    sizes = [abs(value) for value in (*problem.high, *problem.low, *casts) if _is_cost(value) and value != math.inf]
    try:
        return math.isfinite(math.fsum(sizes) * 2)
    except OverflowError:
        return False
