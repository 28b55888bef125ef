"""Functions of a step's few shared numbers, written from their one definition as :mod:`.emit` writes updates.

The verdict, the count of steps, the numbers of a rule and the next loss scale are pure functions of 0-d tensors: run
with torch's operations each of their lines is a kernel of its own, and written out a function is one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from mezzo.errors import UnsupportedError
from mezzo.step.executors.emit import Dialect, expression

__all__ = ["Kind", "Pure", "Spelled", "kind", "one_by_one", "spelled"]

#: From what stays the same, and tensors, to tensors: without side effects, and without a branch on values.
Pure: TypeAlias = Callable[..., Sequence[Tensor]]
#: What code depends on of an argument: its dtype, and 0 or 1 dimensions; or FP32 and none for a Python number.
Kind: TypeAlias = tuple[torch.dtype, int | None]

_STACK: Final = "aten.stack.default"
_UNBIND: Final = "aten.unbind.int"
_ITEM: Final = "<built-in function getitem>"
_COPY: Final = "aten._to_copy.default"


def kind(value: Tensor | float) -> Kind:
    """Return what code depends on of an argument."""
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else (torch.float32, None)


def one_by_one(function: Pure, given: tuple[Hashable, ...], tensors: Sequence[Tensor | float]) -> Sequence[Tensor]:
    """Compute a function as it is, by torch's operations."""
    return function(*given, *tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tensor that a function returns.

    Args:
        dtype: Its elements'.
        values: What they are called at the end, one for each; of a 0-d tensor the one.
        is_vector: Whether it has one dimension.
        given: The number of the argument that it is, where it is one.
    """

    dtype: torch.dtype
    values: list[str]
    is_vector: bool
    given: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """A function in some language.

    Args:
        names: What its tensors are called: 0-d ones are their values.
        body: A line for each operation.
        results: What it returns.
    """

    names: list[str]
    body: list[str]
    results: list[Result]


def spelled(function: Pure, given: tuple[Hashable, ...], kinds: Sequence[Kind], dialect: Dialect) -> Spelled:
    """Write a function of numbers, 0-d tensors, and vectors of which it takes the norm.

    Args:
        function: Called with ``given`` and then the tensors.
        given: Its first arguments, which are no tensors.
        kinds: Of the tensors.
        dialect: The language.

    Raises:
        UnsupportedError: It uses an operation that is not in the language's table.
    """
    graph = _traced(function, given, kinds)
    names = [f"given{place}" for place in range(len(kinds))]
    known: dict[fx.Node, Any] = {}
    body: list[str] = []
    results: list[Result] = []
    where = f"the function {getattr(function, '__name__', function)}"
    left = iter(names)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(left)
        elif node.op == "output":
            results = [_result(each, known, names) for each in node.args[0]]
        elif str(node.target) == _STACK:
            known[node] = [known[each] for each in node.args[0]]
        elif str(node.target) == _ITEM:
            known[node] = known[node.args[0]][node.args[1]]
        elif isinstance(vector := known.get(node.args[0]), list) and str(node.target) in (_UNBIND, _COPY):
            known[node] = vector if str(node.target) == _UNBIND else _copied(node, vector, body, dialect)
        else:
            known[node] = str(node.name)
            dtype = node.meta["val"].dtype
            if node.meta["val"].dim():
                raise _of_vectors(node, where)
            value = expression(node, known, where, dialect)
            body.append(dialect.assigned.format(type=dialect.types[dtype], name=node.name, value=value))
    return Spelled(names=names, body=body, results=results)


def _of_vectors(node: fx.Node, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"no program for {node.target} of vectors",
        where=f"{where}: {node.format_node()}",
        why="a step's few shared numbers are computed one by one",
        write="0-d tensors, and of vectors their norm",
    )


def _traced(function: Pure, given: tuple[Hashable, ...], kinds: Sequence[Kind]) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    ones = [torch.ones((2,) * (dimensions or 0), dtype=dtype, device="cpu") for dtype, dimensions in kinds]
    pure: Callable[..., Any] = torch.func.functionalize(lambda *tensors: tuple(function(*given, *tensors)))
    with torch.no_grad():
        graph: fx.Graph = make_fx(pure, tracing_mode="fake")(*ones).graph
    graph.eliminate_dead_code()
    return graph


def _copied(node: fx.Node, vector: list[str], body: list[str], dialect: Dialect) -> list[str]:
    """Write the cast of each element."""
    dtype = dialect.types[node.meta["val"].dtype]
    names = [f"{node.name}_{place}" for place in range(len(vector))]
    for name, value in zip(names, vector, strict=True):
        copied = dialect.operations[_COPY].format(value, dtype=dtype)
        body.append(dialect.assigned.format(type=dtype, name=name, value=copied))
    return names


def _result(node: fx.Node, known: Mapping[fx.Node, Any], names: list[str]) -> Result:
    value, example = known[node], node.meta["val"]
    place = names.index(value) if value in names else None
    values = value if isinstance(value, list) else [value]
    return Result(dtype=example.dtype, values=values, is_vector=example.dim() > 0, given=place)
