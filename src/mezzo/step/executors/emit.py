"""Source of pass 2 from its one pure function, operation by operation, in whatever language has a table of them.

:func:`mezzo.step.passes.updated` is traced to a graph of aten operations, and each becomes a line. What is written by
hand is where elements lie (:mod:`.cpp_source`, :mod:`.triton_source`), and nothing about rules, storages or rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, fx

from mezzo.errors import UnsupportedError
from mezzo.step.passes import stepped
from mezzo.step.rounding import key_of
from mezzo.step.storage import Storage
from mezzo.step.update import UpdateRule
from mezzo.tensors import LOW

__all__ = ["ALIKE", "Dialect", "Lines", "expression", "key_lines", "update_name", "written"]

#: What every language spells alike.
ALIKE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aten.lt.Scalar": "{0} < {1}",
        "aten.le.Scalar": "{0} <= {1}",
        "aten.gt.Scalar": "{0} > {1}",
        "aten.ne.Tensor": "{0} != {1}",
        "aten.bitwise_and.Scalar": "{0} & {1}",
        "aten.bitwise_or.Scalar": "{0} | {1}",
        "aten.bitwise_or.Tensor": "{0} | {1}",
        "aten.bitwise_xor.Tensor": "{0} ^ {1}",
        "aten.__lshift__.Scalar": "{0} << {1}",
        "aten.__rshift__.Scalar": "{0} >> {1}",
        "aten.scalar_tensor.default": "{0}",
        "aten.detach.default": "{0}",
    }
)

#: Options that change no value beyond the result's dtype.
_CAST: Final = ("dtype", "layout", "device", "pin_memory", "memory_format")
_CLAMP: Final = "aten.clamp.default"
_COPY: Final = "aten._to_copy.default"
#: What torch computes in the dtype of the result, whatever that of an argument is.
_PROMOTING: Final = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a language spells what updates consist of.

    Args:
        name: Of the language.
        types: What elements are called, in memory and in between.
        operations: A template for each aten operation: its arguments by number, and ``dtype``, the result's. One that
                is spelled otherwise for a dtype, or with an option, has a line of its own: ``aten.div.Tensor of
                torch.float64``, ``aten.add.Tensor, alpha=-1``.
        widened: A template from a stored low-precision element to FP32.
        narrowed: A template from an FP32 value on a low format's grid to the element to store; of the other dtypes
            what ``_to_copy`` makes.
        assigned: A line that names a value: ``type``, ``name``, ``value``.
        stored: A line that writes a value: ``target``, ``value``.
        literal: Spells a number among values of a dtype.
    """

    name: str
    types: Mapping[torch.dtype, str]
    operations: Mapping[str, str]
    widened: Mapping[torch.dtype, str]
    narrowed: Mapping[torch.dtype, str]
    assigned: str
    stored: str
    literal: Callable[[float, torch.dtype], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """One element's update in some language.

    Args:
        names: What the elements in memory are called: the gradient's, then the parts' and the states'.
        body: A line for each operation, and one for each target to store.
        random: Whether the key is used.
    """

    names: list[str]
    body: list[str]
    random: bool


def update_name(rule: UpdateRule, storage: Storage) -> str:
    """Return what profilers call the kernel of a rule with its options and a storage."""
    return "_".join((rule.name, *sorted(rule.options), storage.name))


def written(rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...], dialect: Dialect) -> Lines:
    """Write the update of one element.

    What is not stored goes by the names of ``rule.numbers``, ``multiplier``, ``key`` and ``order``.

    Args:
        rule: What to do.
        storage: How weights are stored.
        dtypes: The gradient's, then the parts' and the states'.
        dialect: The language.

    Raises:
        UnsupportedError: The rule or the storage uses an operation that is not in the language's table.
    """
    first_state = len(dtypes) - len(rule.states)
    names = ["gradient", *(f"part{i}" for i in range(first_state - 1)), *(f"{name}_state" for name in rule.states)]
    graph = _traced(rule, storage, dtypes)
    key = list(graph.nodes)[len(names) + 2]
    return Lines(names=names, body=_body(graph, names, rule, dtypes[1:], dialect), random=bool(key.users))


def key_lines(dialect: Dialect) -> tuple[list[str], str]:
    """Write what makes the key of a parameter out of ``tensor``, ``when`` and ``start`` (:func:`key_of`).

    Args:
        dialect: The language.

    Returns:
        The lines, and what the key is called then.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    ones = [torch.ones((), dtype=torch.int32, device="cpu") for _ in range(3)]  # one alone would be traced as one input
    graph = make_fx(key_of, tracing_mode="fake")(*ones).graph
    known: dict[fx.Node, str] = {}
    given = iter(["tensor", "when", "start"])
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op != "output":
            known[node] = f"key_{node.name}"
            value, kind = expression(node, known, "the random keys", dialect), dialect.types[torch.int32]
            lines.append(dialect.assigned.format(type=kind, name=known[node], value=value))
    return lines, list(known.values())[-1]


def _traced(rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...]) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    gradient, *targets = (torch.ones(2, dtype=dtype, device="cpu") for dtype in dtypes)
    parts, states = targets[: len(targets) - len(rule.states)], targets[len(targets) - len(rule.states) :]
    scalars, one, order = (torch.ones(size, dtype=torch.float32, device="cpu") for size in (len(rule.numbers), (), 2))
    key, order = one.to(torch.int32), order.to(torch.int32)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        gradient, *targets = tensors[:-4]
        return stepped(
            rule, storage, gradient, tuple(targets[: len(parts)]), tuple(targets[len(parts) :]), *tensors[-4:]
        )

    make: Callable[..., Any] = make_fx(step, tracing_mode="fake")
    with torch.no_grad():
        graph: fx.Graph = make(gradient, *parts, *states, scalars, one, key, order).graph
    graph.eliminate_dead_code()
    return graph


def _body(
    graph: fx.Graph, names: list[str], rule: UpdateRule, dtypes: tuple[torch.dtype, ...], dialect: Dialect
) -> list[str]:
    """Write one line for each operation, and one store for each target."""
    lines: list[str] = []
    known: dict[fx.Node, str] = {}
    given = iter([*names, "scalars", "multiplier", "key", "order"])
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "output":
            for target, dtype, value in zip(names[1:], dtypes, node.args[0], strict=True):
                copied = dialect.operations[_COPY]
                stored = dialect.narrowed.get(dtype, copied).format(known[value], dtype=dialect.types[dtype])
                lines.append(dialect.stored.format(target=target, value=stored))
        elif str(node.target) == "aten.unbind.int":
            known[node] = "scalars"
        elif known.get(node.args[0]) == "scalars":
            known[node] = rule.numbers[node.args[1]]
        else:
            known[node] = node.name
            value, dtype = expression(node, known, f"the update rule {rule.name}", dialect), node.meta["val"].dtype
            lines.append(dialect.assigned.format(type=dialect.types[dtype], name=node.name, value=value))
    return lines


def expression(node: fx.Node, known: Mapping[fx.Node, str], where: str, dialect: Dialect) -> str:
    """Write one operation.

    Args:
        node: Of a traced graph.
        known: What its arguments are called.
        where: Whose operation it is, for errors.
        dialect: The language.

    Raises:
        UnsupportedError: The operation is not in the language's table.
    """
    operation, dtype = str(node.target), node.meta["val"].dtype
    args = node.args
    if operation == _CLAMP and len(args) < 3:
        operation, args = "aten.clamp_min.default", args[:2]
    elif operation == _CLAMP and args[1] is None:
        operation, args = "aten.clamp_max.default", (args[0], args[2])
    sources = [arg.meta["val"].dtype for arg in args if isinstance(arg, fx.Node)]
    options = {name: value for name, value in node.kwargs.items() if value is not None and name not in _CAST}
    spelling = ", ".join([operation, *(f"{name}={value}" for name, value in options.items())])
    template = dialect.operations.get(f"{spelling} of {dtype}", dialect.operations.get(spelling))
    if operation == _COPY and sources[0] in dialect.widened:
        template = dialect.widened[sources[0]]
    elif operation != _COPY and any(each in LOW for each in sources):
        template = None  # arithmetic in low precision, of which no update consists
    if template is None:
        raise UnsupportedError(
            f"no {dialect.name} for {operation}",
            where=f"{where}: {node.format_node()}",
            why="kernels are written from a table of the operations that updates consist of",
            write=f"a line in {dialect.name}'s table beside mezzo.step.executors.emit",
        )
    among = sources[-1] if sources else dtype  # of `where` the last is a value, and the first a condition
    among = dtype if operation == "aten.masked_fill.Scalar" else among

    def word(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            source = arg.meta["val"].dtype
            if operation in _PROMOTING and source != dtype:
                return dialect.operations[_COPY].format(known[arg], dtype=dialect.types[dtype])
            return known[arg]
        return dialect.literal(arg, among) if isinstance(arg, int | float) else ""

    return template.format(*map(word, args), dtype=dialect.types.get(dtype, ""))
