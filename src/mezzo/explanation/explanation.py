"""An explanation as a whole: what :func:`mezzo.explain` returns, its answer in words and its tables."""

from __future__ import annotations

import dataclasses
import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable, some_of
from mezzo.explanation.rows import (
    Cast,
    Explained,
    Fold,
    Misaligned,
    Product,
    Row,
    byte_text,
    counted,
    folded,
    format_text,
    share_text,
)
from mezzo.files import jsonable
from mezzo.policy import Policy
from mezzo.tensors import dtype_name
from mezzo.trace.function_calls import MODEL, place_text

# An explanation as tables of text: the few rows that matter with alike modules folded, or all rows.

#: Columns that hold numbers.
NUMBERS: Final = frozenset("count,calls,bytes,share,flops,of FLOPs,multiple of".split(","))
#: Columns that hold words, which may be folded.
WORDS: Final = frozenset("what,because,decided by,shape,pad".split(","))
#: Rows of a table that is sorted by cost, before the rest is added up.
_MOST_ROWS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table.

    Attributes:
        title: What it lists.
        heads: The columns.
        rows: The cells; paths below the working directory are relative to it.
        rest: What is left out, in words; ``""`` where nothing is.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rest: str = ""


# The few rows that matter ---------------------------------------------------------------------------------


def few_rows(explained: Explained) -> Iterator[Section]:
    """Yield the tables that have rows: what costs most first, then what each op got."""
    low = dtype_name(Policy.parse(explained.policy).dtype)
    yield from _dearest(
        f"products that do not run in {format_text([low])}",
        "where,op,runs in,of FLOPs,because".split(","),
        folded((p for p in explained.products if p.dtype != low), _module, lambda p: (p.op, p.dtype, p.why)),
        cost=lambda product: product.flops,
        whole=sum(product.flops for product in explained.products),
        cells=lambda product, cost, share: (product.op, format_text([product.dtype]), share, product.why),
    )
    yield from _dearest(
        "casts, forward and backward",
        "where,for,what,by,bytes,share".split(","),
        folded(
            (cast for cast in explained.casts if cast.by != "emulation"),
            _module,
            lambda cast: (cast.op, cast.phase, cast.what, cast.before, cast.after, cast.by),
        ),
        cost=lambda cast: cast.num_bytes,
        whole=explained.moved_bytes,
        cells=lambda cast, cost, share: (
            cast.op or "–",
            f"{cast.what} {format_text([cast.before])} → {format_text([cast.after])}, {cast.phase}",
            cast.by, byte_text(cost), share,
        ),
    )  # fmt: skip
    pads = folded(explained.misaligned, _module, lambda each: (each.op, each.shape))
    yield from _section(
        "products whose dimensions tensor cores do not like",
        "where,op,shape,pad".split(","),
        ((_where(fold), fold.rows[0].op, _shape(fold.rows[0]), fold.rows[0].pads) for fold in pads),
    )
    # Products in FP32 are in a table of their own, above.
    findings = (each for each in explained.findings if each.kind != "FP32 product")
    yield from _section(
        "findings", "kind,where,what".split(","), ((each.kind, each.where, each.text) for each in findings)
    )
    ops = folded(explained.rows, _module, lambda row: replace(row, module=""))
    yield from _section("ops, forward", "where,op,calls,precision,decided by".split(","), map(_folded_op, ops))


def _dearest(
    title: str,
    heads: Sequence[str],
    folds: Sequence[Fold[Any]],
    *,
    cost: Callable[[Any], int],
    whole: int,
    cells: Callable[[Any, int, str], tuple[str, ...]],
) -> Iterator[Section]:
    """Yield a table sorted by what its rows cost together, the cheap end of it added up."""
    costs = sorted(((sum(map(cost, fold.rows)), fold) for fold in folds), key=lambda pair: -pair[0])
    # One row more says no less than a line about it.
    num_shown = len(costs) if len(costs) <= _MOST_ROWS + 1 else _MOST_ROWS
    rows = ((_where(fold), *cells(fold.rows[0], size, share_text(size, whole))) for size, fold in costs[:num_shown])
    left = costs[num_shown:]
    rest = f"and {len(left)} more rows, {share_text(sum(size for size, _ in left), whole)} together" if left else ""
    yield from _section(title, heads, rows, rest)


def _section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], rest: str = "") -> Iterator[Section]:
    here = f"{os.getcwd()}{os.sep}"
    cells = tuple(tuple(cell.replace(here, "") for cell in row) for row in rows)
    if cells:
        yield Section(title=title, heads=tuple(heads), rows=cells, rest=rest)


def _module(row: Any) -> str:
    return str(row.module)


def _where(fold: Fold[Any]) -> str:
    return fold.text or MODEL


def _folded_op(fold: Fold[Row]) -> tuple[str, ...]:
    row = fold.rows[0]
    return _where(fold), row.op, str(sum(each.count for each in fold.rows)), _precision(row), _decider(row)


def _precision(row: Row) -> str:
    """Write what a row is given, computes in and returns: ``FP16 → FP32``."""
    steps = [format_text(dtypes) for dtypes in (row.given, row.computes_in, row.returns)]
    return " → ".join(step for number, step in enumerate(steps) if number == 0 or step != steps[number - 1])


def _decider(row: Row) -> str:
    mark = " (!)" if row.disagreement else ""
    if row.rule is None:
        return f"{row.source}: {row.treatment}, {row.reason}{mark}"
    own = "" if row.reason == f"the rule {row.rule} matches first" else f": {row.reason}"
    return f"rule {row.rule}{own}{mark}"


# All rows ---------------------------------------------------------------------------------------------------


def all_rows(explained: Explained) -> Iterator[Section]:
    """Yield every table with every row, empty ones too."""
    for title, heads, rows in (
        ("ops, forward", "module,op,count,given,computes in,returns,treatment,decided by,because,line".split(","),
         map(_op, explained.rows)),
        ("products, forward", "module,op,count,runs in,flops,because,line".split(","),
         ((p.module or MODEL, p.op, str(p.count), p.dtype, f"{p.flops:,}", p.why, p.line or "–")
          for p in explained.products)),
        (_casts_title(explained), "module,for,phase,what,from,to,by,count,bytes".split(","),
         map(_cast, explained.casts)),
        ("products whose dimensions tensor cores do not like",
         "module,op,count,format,shape,multiple of,pad,line".split(","), map(_product, explained.misaligned)),
        ("findings", "kind,where,what".split(","), ((each.kind, each.where, each.text) for each in explained.findings)),
    ):  # fmt: skip
        section = next(_section(title, heads, rows), None)
        yield section or Section(title=f"{title}: none", heads=(), rows=())


def _op(row: Row) -> Sequence[str]:
    computes = "+".join(row.computes_in) or "–"
    return (
        row.module or MODEL, row.op, str(row.count), "+".join(row.given) or "–",
        f"{computes}, emulated" if row.emulated else computes, "+".join(row.returns) or "–",
        f"{row.treatment} (!)" if row.disagreement else row.treatment,
        f"rule {row.rule}" if row.rule else row.source, row.reason, row.line or "–",
    )  # fmt: skip


def _casts_title(explained: Explained) -> str:
    if not explained.casts:
        return "casts"
    title = f"casts: {explained.num_casts()}, {byte_text(explained.cast_bytes())} read and written"
    if emulation := explained.num_casts(by="emulation"):
        title += f"; and {emulation} by emulation, which a device with the arithmetic does not do"
    return title


def _cast(cast: Cast) -> Sequence[str]:
    where = (cast.module or MODEL, cast.op or "–", cast.phase, cast.what, cast.before, cast.after, cast.by)
    return (*where, str(cast.count), byte_text(cast.num_bytes))


def _product(entry: Misaligned) -> Sequence[str]:
    counts = (str(entry.count), entry.dtype, _shape(entry), str(entry.multiple))
    return (entry.module or MODEL, entry.op, *counts, entry.pads, entry.line or "–")


def _shape(entry: Misaligned) -> str:
    return " · ".join(f"{name} {size}" for name, size in entry.shape)


# What an explanation comes to, in words: what runs low, what does not and why, what casts cost, what to write.

#: Why products are in another format: that many reasons are told apart.
_MOST_REASONS: Final = 2
_UNLISTED: Final = "no list names this op"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An explanation in words.

    Attributes:
        headline: How many products run in the policy's format, and their share of the FLOPs.
        points: A sentence for each thing to know: products in another format, casts, dimensions, findings.
        write: The policy to use instead; ``""`` where there is nothing to change.
        why: What it changes.
    """

    headline: str
    points: tuple[str, ...]
    write: str
    why: str


def answer_to(explained: Explained) -> Answer:
    """Say in words what an explanation comes to."""
    policy = Policy.parse(explained.policy)
    low = dtype_name(policy.dtype)
    others = [each for each in explained.products if each.dtype != low]
    points = (
        *_other_products(explained, others), *_casts(explained), *_weights(explained), *_paddings(explained),
        *_found(explained),
    )  # fmt: skip
    write, why = _advice(explained, policy, others)
    return Answer(headline=_headline(explained, low, others), points=points, write=write, why=why)


# Products -----------------------------------------------------------------------------------------------


def _headline(explained: Explained, low: str, others: list[Product]) -> str:
    total, wide = _count(explained.products), _count(others)
    products, under = f"{counted(total, 'product')} of {explained.model}", f"under {explained.policy}"
    if not total:
        return f"{explained.model} {under}: no matrix product or convolution was counted"
    every = f"All {products} run" if total > 1 else f"The {products} runs"
    if low == "float32" and not others:
        return f"{every} in FP32 {under}, which asks for nothing lower"
    if not others:
        return f"{every} in {format_text([low])} {under}: 100 % of {'their' if total > 1 else 'its'} FLOPs"
    if wide == total:
        return f"No product of {explained.model} runs in {format_text([low])} {under}"
    share = share_text(_flops(explained.products) - _flops(others), _flops(explained.products))
    return f"{total - wide:,} of {products} run in {format_text([low])} {under}: {share} of their FLOPs"


def _other_products(explained: Explained, others: list[Product]) -> Iterator[str]:
    """Say of products in another format where they are, and why."""
    reasons: defaultdict[tuple[str, str], list[Product]] = defaultdict(list)
    for each in others:
        reasons[each.dtype, each.why].append(each)
    dearest = sorted(reasons.items(), key=lambda each: -_flops(each[1]))
    for (dtype, why), products in dearest[:_MOST_REASONS]:
        share = share_text(_flops(products), _flops(explained.products))
        folds = folded(products, lambda each: each.module, lambda each: each.op)
        where = some_of([place_text(fold.text, fold.rows[0].op) for fold in folds], 1)
        yield f"{_count(products):,} in {format_text([dtype])}, {share} of the FLOPs: {where} ({why})"
    if rest := [each for _, products in dearest[_MOST_REASONS:] for each in products]:
        share = share_text(_flops(rest), _flops(explained.products))
        yield f"{_count(rest):,} more for other reasons, {share} of the FLOPs"


def _count(products: Iterable[Product]) -> int:
    return sum(each.count for each in products)


def _flops(products: Iterable[Product]) -> int:
    return sum(each.flops for each in products)


# Casts --------------------------------------------------------------------------------------------------


def _casts(explained: Explained) -> Iterator[str]:
    kinds: Counter[str] = Counter()
    for cast in explained.casts:
        if cast.by != "emulation":
            kinds[f"{cast.what}s {format_text([cast.before])} → {format_text([cast.after])}"] += cast.num_bytes
    if not kinds:
        yield "no casts"
        return
    total = explained.cast_bytes()
    dearest = ", ".join(f"{kind} {byte_text(size)}" for kind, size in kinds.most_common(2))
    text = f"{counted(explained.num_casts(), 'cast')} read and write {byte_text(total)}{_of_all(explained, total)}"
    yield f"{text}; the dearest: {dearest}"


def _weights(explained: Explained) -> Iterator[str]:
    if explained.weights:
        yield f"weights: {explained.weights}"


def _of_all(explained: Explained, size: int) -> str:
    return f", {share_text(size, explained.moved_bytes)} of all bytes" if explained.moved_bytes else ""


def _paddings(explained: Explained) -> Iterator[str]:
    if explained.misaligned:
        first = explained.misaligned[0]
        count = counted(sum(entry.count for entry in explained.misaligned), "product")
        yield f"{count} with dimensions that tensor cores do not like, such as {first.pads}"


def _found(explained: Explained) -> Iterator[str]:
    """Count what the findings below say, products apart, which are said above."""
    kinds = Counter(each.kind for each in explained.findings if each.kind != "FP32 product")
    if kinds:
        yield f"findings below: {', '.join(f'{kind} ×{count}' if count > 1 else kind for kind, count in kinds.items())}"


# What to write ------------------------------------------------------------------------------------------


def _advice(explained: Explained, policy: Policy, others: list[Product]) -> tuple[str, str]:
    """Return a better policy, and what it changes; only what costs no accuracy in itself."""
    unlisted = list(dict.fromkeys(each.op for each in others if each.why == _UNLISTED))
    if policy.dtype == torch.float32 or not unlisted:
        return "", ""
    return str(policy.low(*unlisted)), f"products that no list names run low: {some_of(unlisted)}"


# An explanation as text: the answer first, then tables that fit the terminal and are never cut.

#: The columns that the answer and its few rows take at most.
WIDEST: Final = 120
#: What a column of words is left at least, if paths are not to be folded.
_NARROWEST: Final = 10


def plain(parts: Iterable[RenderableType], width: int | None = WIDEST) -> str:
    """Write text without colours.

    Args:
        parts: What to write.
        width: In which lines are folded; ``None`` puts each row in one line, however long, so that ``grep`` works.
    """
    parts, file = list(parts), io.StringIO()
    console = Console(file=file, no_color=True, force_terminal=False, width=width or WIDEST)
    if width is None:
        wide = console.options.update(width=100_000)
        console.width = max(WIDEST, *(Measurement.get(console, wide, part).maximum for part in parts))
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def table(
    heads: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: Container[str] = (),
    stiff: Container[str] = (),
    **options: Any,
) -> Table:
    """Return a table of texts, none of which is cut, or taken for markup: rules and messages may hold brackets.

    Args:
        heads: Of its columns.
        rows: The cells.
        right: Heads of columns of numbers.
        stiff: Heads of columns that are folded last.
        **options: Of rich's table.
    """
    made = Table(box=box.SIMPLE_HEAD, **options)
    for head in heads:
        justify: Literal["left", "right"] = "right" if head in right else "left"
        made.add_column(Text(printable(head)), justify=justify, overflow="fold", no_wrap=head in stiff)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def renderables(explanation: Explained, *, full: bool = False) -> Iterator[RenderableType]:
    """Yield the answer, then the few rows that matter, or all of them.

    Args:
        explanation: The explanation.
        full: Whether to show every row.
    """
    yield from _answer(answer_to(explanation))
    yield Text(f"{printable(terms(explanation))}\n", style="dim")
    yield from map(_rendered, all_rows(explanation) if full else few_rows(explanation))


def terms(explanation: Explained) -> str:
    """Say on what an explanation was measured."""
    arithmetic = "native arithmetic"
    if explanation.emulated:
        families = " and ".join(each.family for each in explanation.emulated)
        reasons = "; ".join(dict.fromkeys(each.why for each in explanation.emulated))
        arithmetic = f"{families} emulated in FP32 ({reasons})"
    devices = "+".join(explanation.devices) or "no device"
    return f"measured in one step on {devices}, {arithmetic}, torch {explanation.torch}"


def _answer(answer: Answer) -> Iterator[RenderableType]:
    yield Text(printable(answer.headline), style="bold", overflow="fold")
    lines = Table.grid(padding=(0, 2))
    for point in answer.points:
        lines.add_row(Text("·"), Text(printable(point), overflow="fold"))
    yield Padding(lines, (0, 0, 0, 2))
    if answer.write:
        advice = Table.grid(padding=(0, 2))
        for label, text in (("write", answer.write), ("", answer.why)):
            advice.add_row(Text(label), Text(printable(text), overflow="fold"))
        yield Padding(advice, (0, 0, 0, 2))


def _rendered(section: Section) -> RenderableType:
    # The title is no part of the table, within whose width it would be folded. A table ends with an empty line.
    parts: Sequence[RenderableType] = (
        Text(section.title, style="bold"),
        _Fitted(section) if section.rows else Text(),
        *([Text(f"  {section.rest}\n")] if section.rest else ()),
    )
    return Group(*parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fitted:
    """A table in which words are folded before paths are, wherever the width allows it; nothing is cut."""

    section: Section

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(stiff=False))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = zip(self.section.heads, *self.section.rows, strict=True)
        stiff = sum(max(map(cell_len, column)) for column in columns if column[0] not in WORDS)
        num_words = sum(head in WORDS for head in self.section.heads)
        # Three columns lie between the columns, and at the ends together.
        room = options.max_width - 3 * len(self.section.heads) - _NARROWEST * num_words
        yield self._table(stiff=stiff <= room)

    def _table(self, *, stiff: bool) -> Table:
        paths = {*self.section.heads} - WORDS if stiff else ()
        return table(self.section.heads, self.section.rows, right=NUMBERS, stiff=paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Explained):
    """Which precision each op in each module gets, and why: what :func:`mezzo.explain` returns.

    It prints the answer in words and the few rows that matter, and compares by value.

    Attributes:
        model: Class of the model.
        policy: The policy's text.
        devices: Types of the devices that held tensors.
        torch: The torch version.
        emulated: The families of products that the model has and that were computed in FP32 from rounded operands.
        rows: Every op that read or made floating numbers in the forward pass, in the order of first use.
        casts: Every conversion between floating dtypes, forward and backward, largest first.
        misaligned: Products and convolutions in a low format whose dimensions should be padded.
        findings: What else there is to know.
        products: The matrix products and convolutions of the forward pass, those with the most operations first.
        moved_bytes: What all kernels of both passes read and write, casts included.
        weights: How many bytes of the parameters lie where; empty where none is stored in halves.
    """

    @property
    def answer(self) -> Answer:
        """What it comes to, in words: a headline, a sentence for each thing to know, and what to write."""
        return answer_to(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them; the answer is among them."""
        found: dict[str, Any] = jsonable({"answer": dataclasses.asdict(self.answer), **dataclasses.asdict(self)})
        return found

    def text(self, *, full: bool = False, width: int | None = WIDEST) -> str:
        """Return the answer and its tables as plain text.

        Args:
            full: Whether to show every row, as ``mezzo explain --full``; else alike modules are folded into one row.
            width: In which lines are folded; ``None`` puts each row in one line, so that ``grep`` works.
        """
        return plain(renderables(self, full=full), width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        answer = self.answer
        return f"<Explanation: {'; '.join((answer.headline, *answer.points))}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        yield from renderables(self)
