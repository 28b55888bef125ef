"""``Plan``: which ops of a model run low, and what that costs; as words, tables, JSON and a picture."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self

import torch
from rich.console import RenderableType
from rich.text import Text

from mezzo.errors import StateError, printable
from mezzo.explanation.explanation import WIDEST, plain, table
from mezzo.explanation.rows import byte_text, counted, folded, format_text, share_text
from mezzo.files import json_text, made_of
from mezzo.plan.balance import Balance
from mezzo.plan.costs import Totals
from mezzo.policy import Policy
from mezzo.tensors import dtype_name

logger = logging.getLogger(__name__)

#: What decides about an op: a rule of the policy, a list of the op table, the cut, or the program; ``left alone`` if
#: nothing does.
Decider = Literal["rule", "list", "cut", "program", "left alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """One op of a plan.

    Attributes:
        op: Its base name.
        module: Path of the module in which it runs.
        line: ``file:line`` of the program.
        dtype: The dtype of its result; of its operands, if the result has no floating numbers.
        by_autocast: The same under torch.autocast.
        decided: What decided.
        reason: Why, in words.
        reads: The ops whose tensors it reads, by their indices in the plan.
    """

    op: str
    module: str
    line: str
    dtype: str
    by_autocast: str
    decided: Decider
    reason: str
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCast:
    """One cast of a plan, which all of its readers share.

    Attributes:
        tensor: What is cast: the path of a parameter, or the op that makes it.
        module: Path of the module in which the tensor is made.
        line: ``file:line`` of the op that makes it.
        given: The dtype before the cast.
        wanted: The dtype after it.
        is_source: Whether the tensor is a parameter, a buffer or an input, and no op's result.
        readers: The ops that read the cast, each as ``op`` or ``op@module``.
        num_bytes: What the cast reads and writes, with that of the gradient.
    """

    tensor: str
    module: str
    line: str
    given: str
    wanted: str
    is_source: bool
    readers: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which ops of a model run low where either precision would do: what :func:`plan` returns.

    It prints the answer in words and the few rows that matter, compares by value, and is kept as JSON.

    Attributes:
        model: Class of the model.
        weights: A hash of the paths and shapes of its parameters.
        inputs: Shape and dtype of each tensor that it was called with.
        base: The text of the policy that was asked.
        objective: 0 for time, 1 for memory, or between.
        fused: Whether costs are those of kernels that a compiler fuses.
        is_dynamic: Whether sizes vary; costs are those of the first call.
        device_type: Where it runs.
        emulated: Whether any family of products is emulated there; costs are those of native kernels all the same.
        torch: The torch version.
        balance: The speed of arithmetic against that of memory on a device of this type.
        ops: The ops, in the order in which they run.
        casts: The casts that are kernels of their own, in the order of first use.
        totals: The costs of a step: ``"plan"``; and for comparison ``"torch.autocast"``, ``"Paddle"``, whose
            gray list follows inputs, and ``"TensorFlow"``, which paints.
        rules: What to add to the policy's rules, as its text has them: see :meth:`policy`.
        unsaid: What no rule can say, in words.
    """

    model: str
    weights: str
    inputs: tuple[str, ...]
    base: str
    objective: float
    fused: bool
    is_dynamic: bool
    device_type: str
    emulated: bool
    torch: str
    balance: Balance
    ops: tuple[PlannedOp, ...]
    casts: tuple[PlannedCast, ...]
    totals: Mapping[str, Totals]
    rules: str
    unsaid: tuple[str, ...]

    def policy(self) -> Policy:
        """Return the policy that was asked, with rules behind its own that give the same placement.

        Rules name ops, and modules in which they run. Where a module runs an op twice, once in each precision, none can
        say so: such ops are in :attr:`unsaid`, and get what the policy without them gives.

        Example:
            >>> import torch, mezzo.plan
            >>> class Scaled(torch.nn.Linear):
            ...     def forward(self, x):
            ...         return super().forward(x) * x
            >>> made = mezzo.plan.plan(Scaled(64, 64), torch.ones(64, 64), policy="O1,bf16,emulate=true")
            >>> print(made.policy())
            O1,dtype=bfloat16,emulate=true,low=mul
        """
        return Policy.parse(",".join(filter(None, (self.base, self.rules))))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON can hold it."""
        return asdict(replace(self, totals=dict(self.totals)))

    def to_json(self) -> str:
        """Return the plan as text that :meth:`from_json` reads."""
        return json_text(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote; a plan of another torch version says so in the log.

        Raises:
            StateError: It is no plan's.
        """
        try:
            plan: Self = made_of(cls, json.loads(text))
            plan.policy()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError("this text is no plan", why=str(error), write="what plan.to_json() gave") from error
        if plan.torch != torch.__version__:
            logger.warning("a plan was made with torch %s, and this is %s", plan.torch, torch.__version__)
        return plan

    def dot(self) -> str:
        """Return the graph in Graphviz's language: ops in their precision's colour, casts on their edges."""
        return dot(self)

    def text(self, *, full: bool = False, width: int | None = WIDEST) -> str:
        """Return the plan as text.

        Args:
            full: Whether to show every op and every cast.
            width: In which lines are folded; ``None`` for one line for each row.
        """
        return plain(self.parts(full=full), width)

    def parts(self, *, full: bool = False) -> list[RenderableType]:
        """Return what is printed, for rich."""
        return list(renderables(self, full=full))

    def __str__(self) -> str:
        return self.text()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[RenderableType]:
        yield from self.parts()


# The answer, and the few rows that matter --------------------------------------------------------------------------

#: Rows of ops that are left alone, and texts of :attr:`Plan.unsaid`, beyond which the rest is counted.
_MOST_ROWS: Final = 8
_MOST_UNSAID: Final = 4


def headline(plan: Plan) -> str:
    """Return the line on top: what a plan saves against torch.autocast, and between which ops its casts are."""
    mine, autocast = plan.totals["plan"], plan.totals["torch.autocast"]
    fewer = autocast.casts - mine.casts
    casts = f"{counted(abs(fewer), 'cast')} {'fewer' if fewer > 0 else 'more'}" if fewer else "as many casts"
    parts = [casts, _less("bytes moved", mine.moved_bytes, autocast.moved_bytes)]
    if plan.objective:
        parts.append(_less("bytes kept", mine.kept_bytes, autocast.kept_bytes))
    if mine == autocast:
        num_casts = counted(mine.casts, "cast")
        return f"{plan.model}: torch.autocast's placement is the cheapest: {num_casts}, {_crossing(plan)}"
    return f"{plan.model}: {', '.join(parts)} than torch.autocast; {_crossing(plan)}"


def _less(unit: str, mine: float, other: float) -> str:
    if mine == other:
        return f"as many {unit}"
    share = share_text(abs(other - mine), other)
    return f"{share} {'fewer' if mine < other else 'more'} {unit}"


def _crossing(plan: Plan) -> str:
    """Return the part of the headline on the casts of tensors between ops."""
    between_ops = [cast for cast in plan.casts if not cast.is_source]
    folds = sorted(_folded(between_ops), key=lambda fold: -sum(cast.num_bytes for cast in fold[1]))
    names = [name for name, _ in folds[:3]]
    if not names:
        return "no tensor between ops is cast"
    return f"the cut runs through {', '.join(names)}" + (f" and {len(folds) - 3} more" if len(folds) > 3 else "")


def _folded(casts: list[PlannedCast]) -> list[tuple[str, tuple[PlannedCast, ...]]]:
    folds = folded(casts, lambda cast: cast.module, lambda cast: (cast.tensor, cast.given))
    return [(_of(fold.rows[0].tensor, fold.text), fold.rows) for fold in folds]


def _of(name: str, module: str) -> str:
    return f"{name} of {module}" if module else name


def renderables(plan: Plan, *, full: bool) -> Iterator[RenderableType]:
    """Yield the answer, then the few rows that matter, or all of them."""
    yield Text(printable(headline(plan)), style="bold", overflow="fold")
    yield Text(printable(_terms(plan)), style="dim")
    yield _totals(plan)
    if full:
        yield Text("ops", style="bold")
        yield table(("op", "module", "precision", "decided by", "because", "line"), map(_full_row, plan.ops))
        yield Text("casts", style="bold")
        yield table(_CAST_HEADS, map(_cast_row, plan.casts), right={"bytes"})
        yield Text(picture(plan))
    else:
        yield from _few(plan)
    if plan.rules:
        yield Text(printable(f"write  plan.policy(), the text {plan.base},{plan.rules}"), overflow="fold")
    for text in plan.unsaid[: None if full else _MOST_UNSAID]:
        yield Text(printable(f"no rule can say that {text}; mezzo.compile_backend does it"), overflow="fold")
    if not full and len(plan.unsaid) > _MOST_UNSAID:
        yield Text(f"nor what {len(plan.unsaid) - _MOST_UNSAID} more texts of plan.unsaid say", overflow="fold")


def _terms(plan: Plan) -> str:
    """Return the line on the conditions of a plan: policy, objective, device."""
    objective = {0.0: "time", 1.0: "memory"}.get(plan.objective, f"{plan.objective:g} of memory, the rest time")
    kernels = "fused kernels" if plan.fused else "single kernels"
    parts = [f"{plan.base}, for {objective}, {kernels} on {plan.device_type}, torch {plan.torch}"]
    if plan.emulated:
        parts.append("products are emulated here, and costs are those of native ones")
    if plan.is_dynamic:
        parts.append("sizes vary, and costs are those of the first call")
    return "; ".join(parts)


def _totals(plan: Plan) -> RenderableType:
    heads = ("placement", "casts", "cast bytes", "moved", "kept for backward", "cost")
    best = plan.totals["plan"].cost
    rows = [
        (
            name if name != "plan" else "this plan",
            f"{total.casts:,}",
            byte_text(total.cast_bytes),
            *(
                ("breaks a rule", "", "")
                if math.isinf(total.cost)
                else (byte_text(int(total.moved_bytes)), byte_text(int(total.kept_bytes)), _ratio(total.cost, best))
            ),
        )
        for name, total in plan.totals.items()
    ]
    return table(heads, rows, right=set(heads[1:]))


def _ratio(cost: float, best: float) -> str:
    return f"{cost / best:.3f}" if best else "1.000" if cost == best else "–"


def _few(plan: Plan) -> Iterator[RenderableType]:
    if chosen := _folded_rows(plan, "cut", lambda op: format_text([op.dtype])):
        yield Text("chosen", style="bold")
        yield table(("op", "module", "precision"), chosen)
    rounding = Counter(op.op for op in plan.ops if op.dtype != op.by_autocast == "float32")
    if rounding:
        names = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in rounding.items())
        keep = "+".join(rounding)
        text = f"{names}: 16 bits here, and FP32 under torch.autocast; fp32={keep} in the policy keeps it"
        yield Text(printable(text), overflow="fold")
    if left := _folded_rows(plan, "left alone", lambda op: op.reason):
        rest = f", and {len(left) - _MOST_ROWS} more rows" if len(left) > _MOST_ROWS else ""
        yield Text(f"left alone{rest}", style="bold")
        yield table(("op", "module", "because"), left[:_MOST_ROWS])


def _folded_rows(plan: Plan, decided: Decider, last: Callable[[PlannedOp], str]) -> list[tuple[str, str, str]]:
    """Return a row for each group of like ops: those of modules that differ in an index, and those of one module."""
    ops = [op for op in plan.ops if op.decided == decided]
    folds = folded(ops, lambda op: op.module, lambda op: (op.op, last(op)))
    rows = Counter((fold.rows[0].op, fold.text or "the model itself", last(fold.rows[0])) for fold in folds)
    return [(f"{op} ×{count}" if count > 1 else op, where, why) for (op, where, why), count in rows.items()]


_CAST_HEADS: Final = ("tensor", "module", "from", "to", "bytes", "for", "line")


def _cast_row(cast: PlannedCast) -> tuple[str, ...]:
    formats = format_text([cast.given]), format_text([cast.wanted])
    return cast.tensor, cast.module, *formats, byte_text(cast.num_bytes), ", ".join(cast.readers), cast.line


def _full_row(op: PlannedOp) -> tuple[str, ...]:
    return op.op, op.module, format_text([op.dtype]), op.decided, op.reason, op.line


# Pictures --------------------------------------------------------------------------------------------------------


def picture(plan: Plan) -> str:
    """Draw the ops in two columns, FP32 at the left and the low format at the right, in the order in which they run.

    A line between ops is where the precision changes: ``╲`` down, ``╱`` up.
    """
    names = [f"{op.op} {op.module}".rstrip() for op in plan.ops]
    low = dtype_name(Policy.parse(plan.base).dtype)
    width = max((len(name) for name, op in zip(names, plan.ops, strict=True) if op.dtype != low), default=0)
    width = max(width, len("FP32"))
    lines, before = [f"{'FP32':>{width}}   {format_text([low])}"], None
    for name, op in zip(names, plan.ops, strict=True):
        is_low = op.dtype == low
        if before is not None and before != is_low:
            lines.append(f"{'':>{width}} {'╲' if is_low else '╱'}")
        lines.append(f"{'':>{width}} │ {name}" if is_low else f"{name:>{width}} │")
        before = is_low
    return "\n".join(lines)


def dot(plan: Plan) -> str:
    """Write the graph in Graphviz's language."""
    colours, low = {True: "#8ecae6", False: "#ffb703"}, dtype_name(Policy.parse(plan.base).dtype)
    lines = ["digraph plan {", "  rankdir=TB; node [shape=box, style=filled, fontname=Helvetica];"]
    for index, op in enumerate(plan.ops):
        label = json.dumps("\n".join(filter(None, (op.op, op.module, format_text([op.dtype])))))
        lines.append(f"  o{index} [label={label}, fillcolor={json.dumps(colours[op.dtype == low])}];")
        for maker in op.reads:
            casts = plan.ops[maker].dtype != op.dtype
            lines.append(f"  o{maker} -> o{index}{' [color=red, penwidth=2, label=cast]' if casts else ''};")
    return "\n".join([*lines, "}"])
