"""An explanation as a whole: what :func:`mezzo.explain` returns, its answer in words and its tables."""

from __future__ import annotations

import dataclasses
import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import torch
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mezzo.errors import PolicyError, printable, some_of
from mezzo.explanation.rows import (
    Cast,
    Emulated,
    Finding,
    Misaligned,
    Product,
    Row,
    byte_text,
    counted,
    folded,
    format_text,
    share_text,
    summed,
)
from mezzo.files import jsonable
from mezzo.policy import Policy
from mezzo.tensors import dtype_name
from mezzo.trace.function_calls import MODEL, location_text

# An explanation as tables of text: the few rows that matter with alike modules folded, or all rows.

#: Columns that hold numbers.
NUMBERS: Final = frozenset("count,calls,bytes,share,flops,of FLOPs,multiple of".split(","))
#: Columns that hold words, which may be folded.
WORDS: Final = frozenset("what,because,decided by,shape,pad".split(","))
#: Rows of a table that is sorted by cost, before the rest is added up.
_MOST_ROWS: Final = 8

#: The cells of a table, by the heads of its columns: an attribute of a row, or what writes it.
_Columns = Mapping[str, str | Callable[[Any], str]]


class Section(NamedTuple):
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
    rest: str


def few_rows(of: Explanation) -> Iterator[Section]:
    """Yield the tables that have rows: what costs most first, then what each op got."""
    low_dtype, flops = dtype_name(Policy.parse(of.policy).dtype), _flops(of.products)
    tables = (
        _section(
            f"products that do not run in {format_text([low_dtype])}",
            _folded_rows((product for product in of.products if product.dtype != low_dtype), "op dtype why"),
            {
                "where": _module, "op": "op", "runs in": lambda product: format_text([product.dtype]),
                "of FLOPs": lambda product: share_text(product.flops, flops), "because": "why",
            },
            cost="flops", total_cost=flops,
        ),
        _section(
            "casts, forward and backward",
            _folded_rows((cast for cast in of.casts if cast.by != "emulation"), "op phase what before after by"),
            {
                "where": _module, "for": "op",
                "what": lambda cast: f"{cast.what} {_conversion(cast)}, {cast.phase}",
                "by": "by", "bytes": _bytes, "share": lambda cast: share_text(cast.num_bytes, of.moved_bytes),
            },
            cost="num_bytes", total_cost=of.moved_bytes,
        ),
        _section(_PADDED, _folded_rows(of.misaligned, "op shape"), _columns("where,op,shape,pad")),
        # Products in FP32 are in a table of their own, above.
        _section("findings", (finding for finding in of.findings if finding.kind != "FP32 product"), _FOUND),
        _section(
            "ops, forward",
            _folded_rows(of.rows, " ".join(field.name for field in dataclasses.fields(Row) if field.name != "module")),
            {"where": _module, "op": "op", "calls": "count", "precision": _precision, "decided by": _decider},
        ),
    )  # fmt: skip
    return (table for table in tables if table.rows)


def all_rows(of: Explanation) -> tuple[Section, ...]:
    """Return every table with every row, empty ones too."""
    ops: _Columns = {
        **_columns("module,op,count,given"), "computes in": _computes_in, "returns": "returns",
        "treatment": lambda row: f"{row.treatment} (!)" if row.disagreement else row.treatment,
        "decided by": lambda row: f"rule {row.rule}" if row.rule else row.source, "because": "reason", "line": "line",
    }  # fmt: skip
    return (
        _section("ops, forward", of.rows, ops),
        _section("products, forward", of.products, _columns("module,op,count,runs in,flops,because,line")),
        _section(_casts_title(of), of.casts, _columns("module,for,phase,what,from,to,by,count,bytes")),
        _section(_PADDED, of.misaligned, _columns("module,op,count,format,shape,multiple of,pad,line")),
        _section("findings", of.findings, _FOUND),
    )


def _section(title: str, rows: Iterable[Any], columns: _Columns, *, cost: str = "", total_cost: int = 0) -> Section:
    """Return a table. With a cost its rows are sorted by that, and the cheapest rows are added up in one line."""
    rows, rest = list(rows), ""
    if cost:
        rows.sort(key=attrgetter(cost), reverse=True)
        # One row takes no more room than a line that says one row was left out.
        left = rows[_MOST_ROWS:] if len(rows) > _MOST_ROWS + 1 else []
        rows = rows[: len(rows) - len(left)]
        share = share_text(sum(map(attrgetter(cost), left)), total_cost)
        rest = f"and {len(left)} more rows, {share} together" if left else ""
    here = f"{os.getcwd()}{os.sep}"
    cells = tuple(tuple(_cell(row, column).replace(here, "") for column in columns.values()) for row in rows)
    return Section(title, tuple(columns), cells, rest)


def _folded_rows(rows: Iterable[Any], fields: str) -> Iterator[Any]:
    """Yield one row, with the sums, for all rows of alike modules that agree in some fields."""
    for fold in folded(rows, attrgetter("module"), attrgetter(*fields.split())):
        yield replace(summed(fold.rows), module=fold.text)


def _cell(row: Any, column: str | Callable[[Any], str]) -> str:
    value = getattr(row, column) if isinstance(column, str) else column(row)
    text = f"{value:,}" if isinstance(value, int) else "+".join(value) if isinstance(value, tuple) else value
    return text or "–"


def _columns(heads: str) -> _Columns:
    return {head: _CELLS.get(head, head) for head in heads.split(",")}


def _module(row: Any) -> str:
    return row.module or MODEL


def _bytes(cast: Cast) -> str:
    return byte_text(cast.num_bytes)


def _conversion(cast: Cast) -> str:
    return f"{format_text([cast.before])} → {format_text([cast.after])}"


def _precision(row: Row) -> str:
    """Write what a row is given, computes in and returns: ``FP16 → FP32``."""
    steps = [format_text(dtypes) for dtypes in (row.given, row.computes_in, row.returns)]
    return " → ".join(step for number, step in enumerate(steps) if number == 0 or step != steps[number - 1])


def _decider(row: Row) -> str:
    mark = " (!)" if row.disagreement else ""
    if row.rule is None:
        return f"{row.source}: {row.treatment}, {row.reason}{mark}"
    reason = "" if row.reason == f"the rule {row.rule} matches first" else f": {row.reason}"
    return f"rule {row.rule}{reason}{mark}"


def _computes_in(row: Row) -> str:
    return f"{'+'.join(row.computes_in) or '–'}{', emulated' if row.emulated else ''}"


def _casts_title(of: Explanation) -> str:
    if not of.casts:
        return "casts"
    title = f"casts: {of.num_casts()}, {byte_text(of.cast_bytes())} read and written"
    if emulation := of.num_casts(by="emulation"):
        title += f"; and {emulation} by emulation, which a device with the arithmetic does not do"
    return title


_PADDED: Final = "products whose dimensions tensor cores do not like"
#: What stands in columns whose heads are no attributes of their rows.
_CELLS: Final[_Columns] = {
    "module": _module,
    "where": _module,
    "for": "op",
    "runs in": "dtype",
    "format": "dtype",
    "because": "why",
    "from": "before",
    "to": "after",
    "bytes": _bytes,
    "multiple of": "multiple",
    "pad": "pads",
    "shape": lambda product: " · ".join(f"{name} {size}" for name, size in product.shape),
}
_FOUND: Final[_Columns] = {"kind": "kind", "where": "where", "what": "text"}

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


def answer_to(of: Explanation) -> Answer:
    """Return the answer of an explanation in words."""
    policy = Policy.parse(of.policy)
    not_low = [product for product in of.products if product.dtype != dtype_name(policy.dtype)]
    # A better policy costs no accuracy in itself.
    unlisted = list(dict.fromkeys(product.op for product in not_low if product.why == _UNLISTED))
    is_better = policy.dtype != torch.float32 and bool(unlisted)
    return Answer(
        headline=_headline(of, dtype_name(policy.dtype), not_low),
        points=(*_other_products(of, not_low), *_points(of)),
        write=str(policy.low(*unlisted)) if is_better else "",
        why=f"products that no list names run low: {some_of(unlisted)}" if is_better else "",
    )


def _headline(of: Explanation, low_dtype: str, not_low: list[Product]) -> str:
    total, wide = _count(of.products), _count(not_low)
    products, under = f"{counted(total, 'product')} of {of.model}", f"under {of.policy}"
    if not total:
        return f"{of.model} {under}: no matrix product or convolution was counted"
    opening = f"All {products} run" if total > 1 else f"The {products} runs"
    if low_dtype == "float32" and not not_low:
        return f"{opening} in FP32 {under}, which asks for nothing lower"
    if not not_low:
        return f"{opening} in {format_text([low_dtype])} {under}: 100 % of {'their' if total > 1 else 'its'} FLOPs"
    if wide == total:
        return f"No product of {of.model} runs in {format_text([low_dtype])} {under}"
    share = share_text(_flops(of.products) - _flops(not_low), _flops(of.products))
    return f"{total - wide:,} of {products} run in {format_text([low_dtype])} {under}: {share} of their FLOPs"


def _other_products(of: Explanation, not_low: list[Product]) -> Iterator[str]:
    """Yield where products run in another format, and why, by reason."""
    reasons: defaultdict[tuple[str, str], list[Product]] = defaultdict(list)
    for product in not_low:
        reasons[product.dtype, product.why].append(product)
    dearest = sorted(reasons.items(), key=lambda reason: -_flops(reason[1]))
    for (dtype, why), products in dearest[:_MOST_REASONS]:
        share = share_text(_flops(products), _flops(of.products))
        where = some_of([location_text(product.module, product.op) for product in _folded_rows(products, "op")], 1)
        yield f"{_count(products):,} in {format_text([dtype])}, {share} of the FLOPs: {where} ({why})"
    if rest := [product for _, products in dearest[_MOST_REASONS:] for product in products]:
        share = share_text(_flops(rest), _flops(of.products))
        yield f"{_count(rest):,} more for other reasons, {share} of the FLOPs"


def _points(of: Explanation) -> Iterator[str]:
    """Yield what casts cost, where weights lie, what to pad, and the kinds of findings, products apart."""
    cast_bytes = Counter[str]()
    for cast in of.casts:
        if cast.by != "emulation":
            cast_bytes[f"{cast.what}s {_conversion(cast)}"] += cast.num_bytes
    total = of.cast_bytes()
    if cast_bytes:
        share = f", {share_text(total, of.moved_bytes)} of all bytes" if of.moved_bytes else ""
        dearest = ", ".join(f"{cast_name} {byte_text(size)}" for cast_name, size in cast_bytes.most_common(2))
        casts = f"{counted(of.num_casts(), 'cast')} read and write {byte_text(total)}{share}"
    yield f"{casts}; the dearest: {dearest}" if cast_bytes else "no casts"
    if of.weights:
        yield f"weights: {of.weights}"
    if of.misaligned:
        count = counted(_count(of.misaligned), "product")
        yield f"{count} with dimensions that tensor cores do not like, such as {of.misaligned[0].pads}"
    num_findings = Counter(finding.kind for finding in of.findings if finding.kind != "FP32 product")
    if num_findings:
        listed = (f"{name} ×{count}" if count > 1 else name for name, count in num_findings.items())
        yield f"findings below: {', '.join(listed)}"


def _count(products: Iterable[Product | Misaligned]) -> int:
    return sum(product.count for product in products)


def _flops(products: Iterable[Product]) -> int:
    return sum(product.flops for product in products)


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
    shown = Table(box=box.SIMPLE_HEAD, **options)
    for head in heads:
        justify: Literal["left", "right"] = "right" if head in right else "left"
        shown.add_column(Text(printable(head)), justify=justify, overflow="fold", no_wrap=head in stiff)
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def renderables(explanation: Explanation, *, full: bool = False) -> Iterator[RenderableType]:
    """Yield the answer, then the few rows that matter, or all of them.

    Args:
        explanation: The explanation.
        full: Whether to show every row.
    """
    answer = explanation.answer
    yield Text(printable(answer.headline), style="bold", overflow="fold")
    yield _grid(("·", point) for point in answer.points)
    if answer.write:
        yield _grid([("write", answer.write), ("", answer.why)])
    yield Text(f"{printable(terms(explanation))}\n", style="dim")
    yield from map(_rendered, all_rows(explanation) if full else few_rows(explanation))


def terms(explanation: Explanation) -> str:
    """Return on which devices and with which arithmetic an explanation was measured."""
    arithmetic = "native arithmetic"
    if explanation.emulated:
        families = " and ".join(family.family for family in explanation.emulated)
        reasons = "; ".join(dict.fromkeys(family.why for family in explanation.emulated))
        arithmetic = f"{families} emulated in FP32 ({reasons})"
    devices = "+".join(explanation.devices) or "no device"
    return f"measured in one step on {devices}, {arithmetic}, torch {explanation.torch}"


def _grid(rows: Iterable[tuple[str, str]]) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    for label, text in rows:
        lines.add_row(Text(label), Text(printable(text), overflow="fold"))
    return Padding(lines, (0, 0, 0, 2))


def _rendered(section: Section) -> RenderableType:
    if not section.rows:
        return Text(f"{section.title}: none\n", style="bold")
    # The title is no part of the table, within whose width it would be folded. A table ends with an empty line.
    rest = [Text(f"  {section.rest}\n")] if section.rest else []
    return Group(Text(section.title, style="bold"), _Fitted(section), *rest)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fitted:
    """A table that folds columns of words before columns of paths, where the width allows; no cell is cut."""

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
class Explanation:
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

    model: str
    policy: str
    devices: tuple[str, ...]
    torch: str
    emulated: tuple[Emulated, ...]
    rows: tuple[Row, ...]
    casts: tuple[Cast, ...]
    misaligned: tuple[Misaligned, ...]
    findings: tuple[Finding, ...]
    products: tuple[Product, ...] = ()
    moved_bytes: int = 0
    weights: str = ""

    def num_casts(self, **fields: str) -> int:
        """Count the casts whose fields have these values, emulation left out unless ``by="emulation"``.

        Args:
            **fields: Attributes of :class:`Cast`, such as ``phase="backward"``.
        """
        return sum(cast.count for cast in self._chosen(fields))

    def cast_bytes(self, **fields: str) -> int:
        """Add up the bytes that casts read and write, chosen as in :meth:`num_casts`."""
        return sum(cast.num_bytes for cast in self._chosen(fields))

    def _chosen(self, fields: Mapping[str, str]) -> Iterable[Cast]:
        of_casts = {field.name for field in dataclasses.fields(Cast)}
        if unknown := [name for name in fields if name not in of_casts]:
            raise PolicyError(f"a cast has no {unknown[0]}", write=f"one of {', '.join(sorted(of_casts))}")
        return (
            cast
            for cast in self.casts
            if all(getattr(cast, name) == value for name, value in fields.items())
            and (cast.by != "emulation" or "by" in fields)
        )

    @property
    def answer(self) -> Answer:
        """The answer in words: a headline, sentences on what matters, and what to write."""
        return answer_to(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them; the answer is among them."""
        document: dict[str, Any] = jsonable({"answer": dataclasses.asdict(self.answer), **dataclasses.asdict(self)})
        return document

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
