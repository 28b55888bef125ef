"""Source of pure functions, operation by operation, in whatever language has a table of them.

The arithmetic of block formats, pass 2 of a step (:func:`mezzo.step.verdict.updated`) and the few numbers that all of a
step shares (its verdict, counts, a rule's numbers, the next loss scale) are pure functions. Each is traced to a graph
of aten operations on 0-d tensors, and each operation becomes a line. What is written by hand is where elements lie, in
the rooms that have kernels, and nothing about formats, rules, storages or rounding.

Releases of torch trace one function to different operations. Those that change no value are left out, whatever a
release calls them. An operation that a language has no line for is no error of a step's: :class:`NoKernel` says so
before anything is written, and torch's own operations compute the function instead.

Elements come in groups of neighbours where something is computed of a whole group: its largest (``aten.amax``). Then
lines are those of an element, or of a group, and what comes after a group's largest is a later phase.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from mezzo.errors import UnsupportedError

#: From tensors to tensors: without side effects, and without a branch on values.
Pure: TypeAlias = Callable[..., Sequence[Tensor]]
#: What a tensor is called: a 0-d one by its value's name, a vector that is taken apart by one name for each number.
Word: TypeAlias = str | Sequence[str]

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
        "aten.__rshift__.Scalar of torch.int32": "{0} >> {1}",
        "aten.__lshift__.Scalar of torch.int32": "{0} << {1}",
        "aten.scalar_tensor.default": "{0}",
    }
)

#: Options that change no value beyond the result's dtype.
_CAST: Final = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
_COPY: Final = "aten._to_copy.default"
#: Copies of all of a tensor, which keep its values where they keep its dtype and shape.
_COPIES: Final = (
    _COPY,
    "aten.clone.default",
    "aten.lift.default",
    "aten._unsafe_view.default",
    "prims.convert_element_type.default",
)
_STACK: Final = "aten.stack.default"
_UNBIND: Final = "aten.unbind.int"
_ITEM: Final = "<built-in function getitem>"
_LARGEST: Final = "aten.amax.default"
#: What to write of what no kernel is written of.
WRITE: Final = "nothing: torch's own operations compute the same; for a kernel, {}"
#: What is computed in. All others are dtypes of memory: a cast leaves them, and storages alone round to them.
_COMPUTED: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.bool})
#: What reads bits, whose dtype is not the result's.
_BITS: Final = "aten.view.dtype"
#: Operations that take a condition, and its index among the arguments: it is no value among the others.
_CONDITIONS: Final[Mapping[str, int]] = MappingProxyType({"aten.where.self": 0, "aten.masked_fill.Scalar": 1})
#: What bools are good for but for being copied: languages compute otherwise with them.
_LOGIC: Final = ("aten.bitwise_", "aten.where.", "aten.masked_fill.", "aten.eq.", "aten.ne.", "aten.scalar_tensor.")
_SHIFTS: Final = ("aten.__rshift__.Scalar", "aten.__lshift__.Scalar")
#: A right shift that puts in zeros, and no copies of the sign, where a language has a line for it.
_WITH_ZEROS: Final = f"{_SHIFTS[0]}, zeros=True"


class NoKernel(UnsupportedError):  # noqa: N818 - an error by its base
    """A kernel cannot be built; torch's own operations compute the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a language spells what pure functions consist of.

    Args:
        name: Of the language.
        types: What elements are called, in memory and in between.
        operations: A template for each aten operation: its arguments by number, all of the dtype that torch computes
                in, and ``dtype``, the result's. One that is spelled otherwise for a dtype of results, or only for one,
                or with an option, has a line of its own: ``aten.div.Tensor of torch.float64``, ``aten.add.Tensor,
                alpha=-1``.
        widened: A template from a stored low-precision element to FP32.
        narrowed: A template from an FP32 value on a low format's grid to the element to store; of the other dtypes
            what ``_to_copy`` makes.
        assigned: A line that names a value: ``type``, ``name``, ``value``.
        literal: Spells a number among values of a dtype.
        instructions: Lines of ``operations`` for whole functions of one FP32 tensor that the language computes at once;
            each is called as one of aten's with an option.
        stored: A line that writes a value of an element: ``target``, ``value``. This and what follows is of a walk over
            elements, which the room that has it adds to the language.
        stored_of_group: The same of a group.
        largest: A line that makes the largest of a group's values, none of which is negative: ``name``, ``value``.
        spread: A template from what a value of a group is called to what an element calls it.
    """

    name: str
    types: Mapping[torch.dtype, str]
    operations: Mapping[str, str]
    widened: Mapping[torch.dtype, str]
    narrowed: Mapping[torch.dtype, str]
    assigned: str
    literal: Callable[[float, torch.dtype], str]
    instructions: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    stored: str = ""
    stored_of_group: str = ""
    largest: str = ""
    spread: str = ""

    def element_of(self, value: Word, dtype: torch.dtype) -> str:
        """Return the element to store of an FP32 value on the grid of its dtype."""
        template = self.narrowed.get(dtype, self.operations[_COPY])
        return template.format(value, dtype=self.types[dtype])


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that a function returns: what it is called, and its dtype."""

    word: Word
    dtype: torch.dtype


class Of(IntEnum):
    """What has a value of its own."""

    STEP = 0
    LARGEST = 1  # of a group, made from its elements
    GROUP = 2
    ELEMENT = 3


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a function.

    Args:
        text: The line.
        of: What it is computed for.
        phase: How many times the largest of a group had to be known before.
        name: What it names, if anything.
        type: Of that.
        reads: Names that it reads, but for those of a step.
    """

    text: str
    of: Of = Of.STEP
    phase: int = 0
    name: str = ""
    type: str = ""
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """A function in some language.

    Args:
        names: What its tensors are called.
        used: Those of the names that its lines read.
        lines: A line for each operation.
        results: What it returns.
        places: What each name has a value for, and in which phase it is known.
    """

    names: Sequence[Word]
    used: set[Word]
    lines: list[Line]
    results: list[Result]
    places: Mapping[Any, tuple[Of, int]] = field(default_factory=dict)

    @property
    def body(self) -> list[str]:
        """All lines, in order."""
        return [line.text for line in self.lines]


def spelled(
    function: Pure,
    examples: Sequence[Tensor],
    names: Sequence[Word],
    dialect: Dialect,
    *,
    elements: Collection[Word] = (),
    groups: Collection[Word] = (),
) -> Spelled:
    """Write a function of 0-d tensors, and of vectors that it takes apart, or of which it takes the norm.

    Args:
        function: Pure.
        examples: Tensors as it takes them, whose values do not matter.
        names: What they are to be called.
        dialect: The language.
        elements: Those of the names that have a value for each element.
        groups: Those that have one for each group of elements.

    Raises:
        NoKernel: It uses an operation that is not in the language's table, or torch cannot trace it.
    """
    given, words_of, lines = iter(names), dict[fx.Node, Any](), list[Line]()
    used, results = set[Word](), list[Result]()
    graph = _traced(function, examples, dialect)
    places = _places(graph, names, elements, groups)

    def named(node: fx.Node, name: str, template: str, value: str) -> str:
        cls, (of, phase) = dialect.types[node.meta["val"].dtype], places[node]
        text = template.format(type=cls, name=name, value=value)
        read = [words_of[source] for source in node.all_input_nodes if places[source][0] != Of.STEP]
        lines.append(Line(text, of, phase, name, cls, tuple(read)))
        return name

    for node in graph.nodes:
        operation, example = str(node.target), node.meta.get("val")
        if node.op == "placeholder":
            words_of[node] = next(given)
            used |= {words_of[node]} if any(user.op != "output" for user in node.users) else set()
        elif node.op == "output":
            results = [Result(words_of[result], result.meta["val"].dtype) for result in node.args[0]]
        elif node.op != "call_function":
            raise _lacking("constant tensors (torch.tensor)", dialect)
        elif isinstance(example, Tensor) and example.dtype not in dialect.types:
            raise _lacking(f"{operation} of {example.dtype}", dialect)
        elif operation == _STACK:
            words_of[node] = [words_of[source] for source in node.args[0]]
        elif operation == _UNBIND and not isinstance(words_of[node.args[0]], str):
            words_of[node] = words_of[node.args[0]]
        elif operation == _ITEM:
            words_of[node] = words_of[node.args[0]][node.args[1]]
        elif operation == _COPY and isinstance(vector := words_of[node.args[0]], list):
            source = node.args[0].meta["val"].dtype
            copied = [_cast(word, source, example.dtype, dialect) for word in vector]
            words_of[node] = [
                named(node, f"{node.name}_{index}", dialect.assigned, value) for index, value in enumerate(copied)
            ]
        elif operation == _LARGEST:
            words_of[node] = named(node, node.name, dialect.largest, words_of[node.args[0]])
        else:
            spread = {
                source: dialect.spread.format(words_of[source])
                if Of.STEP < places[source][0] < places[node][0] == Of.ELEMENT
                else words_of[source]
                for source in node.all_input_nodes
            }
            words_of[node] = named(node, node.name, dialect.assigned, _expression(node, spread, dialect))
    of_words = {
        words_of[node]: of_and_phase for node, of_and_phase in places.items() if isinstance(words_of.get(node), str)
    }
    return Spelled(names=names, used=used, lines=lines, results=results, places=of_words)


def spelled_alone(function: Pure, parameters: Mapping[str, torch.dtype], dialect: Dialect) -> Spelled:
    """Write a function of 0-d tensors that are called as its parameters, for a function of the language."""
    examples = [torch.ones((), dtype=dtype, device="cpu") for dtype in parameters.values()]
    return spelled(function, examples, [*parameters], dialect)


def _places(
    graph: fx.Graph, names: Sequence[Word], elements: Collection[Word], groups: Collection[Word]
) -> dict[fx.Node, tuple[Of, int]]:
    """Return what each operation is computed for, and in which phase."""
    places, given = dict[fx.Node, tuple[Of, int]](), iter(names)
    for node in graph.nodes:
        sources = [places[source] for source in node.all_input_nodes]
        of, phase = (max(column) for column in zip(*sources, strict=True)) if sources else (Of.STEP, 0)
        if node.op == "placeholder":
            name = next(given)
            of = Of.ELEMENT if name in elements else Of.GROUP if name in groups else Of.STEP
        elif str(node.target) == _LARGEST:
            of, phase = Of.LARGEST, phase + 1
        elif of == Of.LARGEST:
            of = Of.GROUP
        places[node] = Of(of), phase
    # What is computed of an element waits for the phase that needs it: random bits, say, are not kept until then.
    for node in reversed(graph.nodes):
        of, phase = places[node]
        if node.op == "call_function" and of == Of.ELEMENT and not {"output"} & {user.op for user in node.users}:
            places[node] = of, min(places[user][1] - (str(user.target) == _LARGEST) for user in node.users)
    return places


def _traced(function: Pure, examples: Sequence[Tensor], dialect: Dialect) -> fx.Graph:
    """Return a function's operations, without those that change no value.

    Raises:
        NoKernel: torch cannot trace it.
    """
    pure: Callable[..., Any] = torch.func.functionalize(lambda *tensors: tuple(function(*tensors)))
    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        with torch.no_grad():
            graph: fx.Graph = make_fx(pure, tracing_mode="fake")(*examples).graph
        for node in graph.nodes:
            _view_itself(node)
            if _WITH_ZEROS in dialect.operations:
                _shift_zeros_in(node)
        # All are found before any goes: a view of a copy lies otherwise than what was copied.
        for node in [node for node in graph.nodes if _keeps_values(node)]:
            node.replace_all_uses_with(node.all_input_nodes[0])
        graph.eliminate_dead_code()
        for spelling, composed in dialect.instructions.items():
            if spelling in dialect.operations:
                _replace_composed(graph, composed, spelling, dialect)
        graph.eliminate_dead_code()
    except Exception as error:  # whatever a release of torch's fails with, it may still compute the function
        reasons = [line for line in str(error).splitlines() if line.strip()]
        raise NoKernel(
            f"torch {torch.__version__} does not trace what an optimizer computes",
            why=reasons[0] if reasons else type(error).__name__,
            write=WRITE.format("an issue for mezzo with this message"),
        ) from error
    return graph


def _view_itself(node: fx.Node) -> None:
    """Turn a copy of a view (``aten.alias_copy``, ``aten.view_copy``) into the view, which has the same values."""
    is_copy = torch.Tag.view_copy in getattr(node.target, "tags", ())
    if is_copy and all("val" in source.meta for source in node.all_input_nodes):  # but of constants
        namespace, name, overload = str(node.target).split(".")
        view = getattr(getattr(getattr(torch.ops, namespace), name.removesuffix("_copy")), overload)
        args, options = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        node.target, node.meta["val"] = view, view(*args, **options)


def _replace_composed(graph: fx.Graph, composed: Callable[[Tensor], Tensor], spelling: str, dialect: Dialect) -> None:
    """Make one operation of all that a function consists of, wherever it occurs.

    Args:
        graph: With the operations of another function, in which it may occur.
        composed: The function, of one FP32 tensor.
        spelling: Of the operation: the name of one of aten's, and an option.
        dialect: The language.
    """
    from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

    one = torch.ones((), device="cpu")
    pattern = _traced(lambda value: (composed(value),), [one], replace(dialect, instructions={}))
    name, option, value = re.split(", |=", spelling)
    namespace, operation, overload = name.split(".")
    (argument,) = (node for node in pattern.nodes if node.op == "placeholder")
    for match in SubgraphMatcher(pattern).match(graph):
        (result,) = match.returning_nodes
        result.target = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
        result.args, result.kwargs = (match.nodes_map[argument],), {option: value}


def _shift_zeros_in(node: fx.Node) -> None:
    """Make one operation of a right shift of int32 and a mask that clears the bits which the shift has put in."""
    match str(node.target), node.args:
        case "aten.bitwise_and.Scalar", (fx.Node(args=(value, int(number))) as shift, int(mask)) if (
            str(shift.target) == _SHIFTS[0]
            and shift.meta["val"].dtype == torch.int32
            and mask == (1 << (32 - number)) - 1
        ):
            node.target, node.args, node.kwargs = shift.target, (value, number), {"zeros": True}


def _keeps_values(node: fx.Node) -> bool:
    """Whether an operation returns the values of the one tensor that it takes.

    Of a copy of all of a tensor those are the values in the same dtype. Of a view, whatever its name, those are the
    same elements in the same order: another dtype would read their bits as other numbers, another offset would be
    other elements, and torch's ``_neg_view`` only marks them as negated.
    """
    if len(node.all_input_nodes) != 1:
        return False
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return False
    if (source.dtype, source.shape) != (result.dtype, result.shape):
        return False
    if str(node.target) in _COPIES:
        return True
    layouts = [(t.stride(), t.storage_offset(), t.is_neg(), t.is_conj()) for t in (source, result)]
    return getattr(node.target, "is_view", False) and layouts[0] == layouts[1]


def _expression(node: fx.Node, words_of: Mapping[fx.Node, Any], dialect: Dialect) -> str:
    """Write one operation."""
    operation, example, args = str(node.target), node.meta.get("val"), node.args
    options = {name: value for name, value in node.kwargs.items() if value is not None and name not in _CAST}
    spelling = ", ".join([operation, *(f"{name}={value}" for name, value in options.items())])
    if not isinstance(example, Tensor) or example.dim():
        raise _lacking(f"{spelling} of vectors", dialect)
    if spelling == _COPY and isinstance(source := args[0], fx.Node):
        return _cast(words_of[source], source.meta["val"].dtype, example.dtype, dialect)
    template = dialect.operations.get(f"{spelling} of {example.dtype}", dialect.operations.get(spelling))
    if template is None:
        has_others = any(line.startswith(f"{spelling} of ") for line in dialect.operations)
        raise _lacking(f"{spelling} of {example.dtype}" if has_others else spelling, dialect)
    if not _fits(template, args) or not _in_range(operation, args, example.dtype):
        raise _lacking(spelling + "".join(f", {arg}" for arg in args[1:] if not isinstance(arg, fx.Node)), dialect)
    among = _computed_in(node, spelling, dialect)

    def word(index: int, arg: Any) -> str:
        if not isinstance(arg, fx.Node):
            return dialect.literal(arg, among) if isinstance(arg, int | float) else ""
        source: torch.dtype = arg.meta["val"].dtype
        is_value = operation != _BITS and index != _CONDITIONS.get(operation)
        return _cast(words_of[arg], source, among, dialect) if is_value and source != among else str(words_of[arg])

    return template.format(*itertools.starmap(word, enumerate(args)), dtype=dialect.types[example.dtype])


def _computed_in(node: fx.Node, spelling: str, dialect: Dialect) -> torch.dtype:
    """Return the dtype of an operation's values and numbers: as torch promotes them, the result's or what is compared.

    Raises:
        NoKernel: They are of dtypes that no language computes in as torch does.
    """
    operation, result = str(node.target), node.meta["val"].dtype
    condition = _CONDITIONS.get(operation)
    values = [arg.meta["val"] for at, arg in enumerate(node.args) if isinstance(arg, fx.Node) and at != condition]
    numbers = [arg for arg in node.args if isinstance(arg, int | float)]
    dtypes = {value.dtype for value in values}
    if stored := [dtype for dtype in (*(value.dtype for value in values), result) if dtype not in _COMPUTED]:
        raise _lacking(f"{spelling} of {stored[0]}", dialect)  # of which no update consists
    # Of two floating dtypes torch takes that of the elements before that of a number, which is none here.
    classes = [(dtype.is_floating_point, dtype == torch.bool) for dtype in dtypes]
    if len(set(classes)) < len(classes):
        raise _lacking(f"{spelling} of {' and '.join(sorted(map(str, dtypes)))}", dialect)
    among: torch.dtype = result
    if result == torch.bool and values:
        among = functools.reduce(torch.promote_types, dtypes)
        among = functools.reduce(
            torch.promote_types, (torch.result_type(values[0], number) for number in numbers), among
        )
    is_exact = among.is_floating_point or all(
        isinstance(number, int) and (among == torch.bool or _holds(among, number)) for number in numbers
    )
    if not is_exact or among not in dialect.types or (among == torch.bool and not operation.startswith(_LOGIC)):
        raise _lacking(f"{spelling} of {' and '.join([*sorted(map(str, dtypes)), *map(str, numbers)])}", dialect)
    return among


def _holds(dtype: torch.dtype, number: int) -> bool:
    """Whether an integer is one of a dtype's."""
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _cast(word: str, source: torch.dtype, target: torch.dtype, dialect: Dialect) -> str:
    """Write a cast: from any dtype to one that is computed in.

    Raises:
        NoKernel: To a dtype of memory. Languages would cut values off, or move bits; storages round before they store.
    """
    keys = f"{_COPY} of {target} from {source}", f"{_COPY} of {target}", _COPY
    own = next((dialect.operations[key] for key in keys if key in dialect.operations), None)
    template = dialect.widened.get(source, own)
    if template is None or target not in _COMPUTED:
        raise _lacking(f"{_COPY} of {target}", dialect)
    if source in dialect.widened and target != torch.float32:
        raise _lacking(f"{_COPY} from {source} to {target}", dialect)
    return template.format(word, dtype=dialect.types[target])


def _in_range(operation: str, args: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether numbers among arguments are such that templates mean what torch does."""
    numbers = [arg for arg in args if isinstance(arg, int | float)]
    if operation in _SHIFTS:
        return all(0 <= number < 8 * dtype.itemsize for number in numbers)
    return not operation.startswith("aten.clamp") or bool(numbers[0] <= numbers[-1])  # else torch's bounds are NaN, say


def _fits(template: str, args: Sequence[Any]) -> bool:
    """Whether a template has a place for each number among arguments, and an argument for each place."""
    places = {int(name) for _, name, _, _ in string.Formatter().parse(template) if name and name.isdigit()}
    given = {index for index, arg in enumerate(args) if arg is not None}
    numbers = {index for index in given if not isinstance(args[index], fx.Node | torch.dtype)}
    return numbers <= places <= given


def _lacking(operation: str, dialect: Dialect) -> NoKernel:
    """Return the error for an operation, whose text is the same wherever the operation occurs: it is logged once."""
    return NoKernel(
        f"no {dialect.name} for {operation} of torch {torch.__version__}",
        why="kernels are written from a table of the operations on numbers that steps consist of",
        write=WRITE.format(f"a line in {dialect.name}'s table beside mezzo.emit.tracing"),
    )
