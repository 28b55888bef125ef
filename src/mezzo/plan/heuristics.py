"""The placements of other systems, as pure functions of lists and inputs, to compare plans with.

They go by the list that an op is on and by the ops that it reads from; none counts a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from mezzo.errors import PolicyError, raise_together, shown, unknown_word

Colour = Literal["allow", "infer", "clear", "deny"]
_COLOURS: Final = get_args(Colour)


@dataclass(frozen=True, slots=True)
class Listed:
    """Ops with the list that each is on, and the producers of what it reads.

    Attributes:
        lists: In TensorFlow's words: ``"allow"`` runs low, ``"deny"`` in FP32; ``"infer"`` is safe in low precision,
            unless what it reads comes from a denied op; ``"clear"`` is safe everywhere, as a reshape is. None is a
            source, such as a weight, or an op that is on no list.
        inputs: The producers of the floating tensors that each op reads, by index; one may stand there twice. A source
            has none.
    """

    lists: Sequence[Colour | None]
    inputs: Sequence[tuple[int, ...]]

    def __post_init__(self) -> None:
        raise_together(self._problems())

    def _problems(self) -> Iterator[PolicyError]:
        for name in ("lists", "inputs"):
            if not isinstance(getattr(self, name), list | tuple):
                why = "it is a tuple or a list, in order"
                yield PolicyError(f"{name} is {shown(getattr(self, name))}", where="Listed", why=why)
                return
        if len(self.lists) != len(self.inputs):
            headline = f"there are {len(self.lists)} lists and inputs of {len(self.inputs)} ops"
            yield PolicyError(headline, where="Listed", why="each op has one of each")
        for colour in self.lists:
            if colour is not None and colour not in _COLOURS:
                yield unknown_word("list", colour, _COLOURS)
        inputs: Sequence[object] = self.inputs
        for op, producers in enumerate(inputs):
            if not isinstance(producers, tuple) or not all(self._is_op(index) for index in producers):
                why = f"they are a tuple of indices of the {len(self.lists)} ops"
                yield PolicyError(f"inputs[{op}] are {shown(producers)}", where="Listed", why=why)

    def _is_op(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self.lists)

    def consumers(self) -> list[list[int]]:
        """Return the ops that read what each makes, each once."""
        readers: list[list[int]] = [[] for _ in self.lists]
        for op, producers in enumerate(self.inputs):
            for producer in dict.fromkeys(producers):
                readers[producer].append(op)
        return readers


def promoted(graph: Listed) -> tuple[bool, ...]:
    """Return which ops run low under ``torch.autocast``: each op by itself, in the order of the program.

    An allowed op runs low and a denied one in FP32. Every other op runs in the widest type that it reads: low where
    all that it reads is low, and in FP32 where it reads nothing. Paddle's level O1 with ``use_promote=True`` does the
    same to its gray ops.

    Args:
        graph: Ops in topological order.

    Raises:
        PolicyError: An op reads what a later one makes.

    Example:
        >>> promoted(Listed((None, "allow", "infer", "infer"), ((), (0,), (1,), (2, 0))))
        (False, True, True, False)

    References:
        pytorch/pytorch aten/src/ATen/autocast_mode.h at 013b3895b673: ``lower_precision_fp``, ``fp32``, ``promote``.
        PaddlePaddle/Paddle python/paddle/static/amp/fp16_utils.py at a883f87f4598: ``get_promote_dtype``.
    """
    _check_order(graph)
    low = list[bool]()
    for colour, producers in zip(graph.lists, graph.inputs, strict=True):
        reads_low = bool(producers) and all(low[maker] for maker in producers)
        low.append(colour == "allow" or (colour != "deny" and reads_low))
    return tuple(low)


def gray(graph: Listed) -> tuple[bool, ...]:
    """Return which ops run low under Paddle's static AMP at level O1: gray ops follow their inputs.

    An allowed (white) op runs low. A denied (black) op, and one on no list, runs in FP32 and is marked black. An op
    that is inferred or clear (gray) is marked black if it reads from a black op, otherwise low if it reads from a low
    one; otherwise it has no mark, runs as its inputs are, in FP32, and marks no other. Sources have no mark.

    Paddle has one gray list for what TensorFlow infers and clears. Where an op reads both, black wins; in the newer
    ``cast_model_to_fp16`` the input that is looked at last does, and a gray op without marked inputs runs low.

    Args:
        graph: Ops in topological order.

    Raises:
        PolicyError: An op reads what a later one makes.

    Example:
        >>> gray(Listed((None, "allow", "infer", "deny", "infer"), ((), (0,), (1, 0), (2,), (1, 3))))
        (False, True, True, False, False)

    References:
        PaddlePaddle/Paddle python/paddle/static/amp/fp16_utils.py at 0aaf20c4ff78: ``rewrite_program``; the newer one
        at a883f87f4598: ``get_amp_dst_dtype``.
    """
    _check_order(graph)
    marks = list[Literal["low", "black"] | None]()
    for colour, producers in zip(graph.lists, graph.inputs, strict=True):
        read = {marks[maker] for maker in producers}
        if colour == "allow":
            marks.append("low")
        elif colour == "deny" or (colour is None and producers):
            marks.append("black")
        elif colour is None:
            marks.append(None)
        else:
            marks.append("black" if "black" in read else "low" if "low" in read else None)
    return tuple(mark == "low" for mark in marks)


def painted(graph: Listed) -> tuple[bool, ...]:
    """Return which ops run low under TensorFlow's graph rewrite: paint spreads in both directions.

    1. Allowed ops are painted low.
    2. Denied ops are painted FP32, and with them what lies on a way from a denied op to a denied or inferred one, its
       end included, through inferred and clear ops.
    3. Inferred and clear ops without paint that lie on a way between two allowed ops are painted low.
    4. Clear ops without paint that touch a low op, or are joined to one through such clear ops, are painted low.

    All others stay in FP32. An op of TensorFlow's that must be preserved (fetched, on another device, a read of a
    variable), or has no kernel in low precision, is on no list here. Groups of ops on one TensorList, edges of loops
    and casts that are in the graph already are left out.

    Args:
        graph: Ops in any order.

    Example:
        >>> painted(Listed((None, "clear", "allow", "infer", "deny"), ((), (0,), (1,), (2,), (3,))))
        (False, True, True, False, False)

    References:
        tensorflow/tensorflow tensorflow/core/grappler/optimizers/auto_mixed_precision.cc at 0059df7512d0: ``Optimize``
        and the passes that it calls.
    """
    lists, producers, consumers = graph.lists, graph.inputs, graph.consumers()
    allowed, denied, inferred, clear = ({op for op, colour in enumerate(lists) if colour == name} for name in
                                        ("allow", "deny", "infer", "clear"))  # fmt: skip
    before_denied = _spread(denied | inferred, lambda op: producers[op], clear)
    fp32 = _spread(denied, lambda op: consumers[op], before_denied)
    free = (inferred | clear) - fp32
    after_allowed = _spread(allowed, lambda op: consumers[op], free)
    low = _spread(allowed, lambda op: producers[op], after_allowed)
    low = _spread(low, lambda op: (*producers[op], *consumers[op]), clear - fp32)
    return tuple(op in low for op in range(len(lists)))


def _spread(roots: set[int], neighbours: Callable[[int], Iterable[int]], through: set[int]) -> set[int]:
    """Return the roots, and the ops of ``through`` that are reached from them by way of such ops."""
    reached, waiting = set(roots), list(roots)
    while waiting:
        for op in neighbours(waiting.pop()):
            if op in through and op not in reached:
                reached.add(op)
                waiting.append(op)
    return reached


def _check_order(graph: Listed) -> None:
    for op, producers in enumerate(graph.inputs):
        if late := [maker for maker in producers if maker >= op]:
            raise PolicyError(
                f"op {op} reads what op {late[0]} makes",
                where="Listed",
                why="precisions follow the order of the program: what an op reads is made before it",
                write="the ops in topological order",
            )
