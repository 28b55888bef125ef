"""An explanation as tables of text: the few rows that matter with alike modules folded, or all rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mezzo.explanation.differences import differences
from mezzo.explanation.fold import Fold, folded
from mezzo.explanation.rows import Cast, Explained, Misaligned, RoundTrip, Row
from mezzo.explanation.words import byte_text, format_text, share_text
from mezzo.policy import Policy
from mezzo.tensors import dtype_name
from mezzo.trace.where import MODEL

__all__ = ["NUMBERS", "WORDS", "Section", "all_rows", "changed_ops", "different_rows", "few_rows"]

#: Columns that hold numbers.
NUMBERS: Final = frozenset("count,calls,bytes,share,flops,of FLOPs,multiple of".split(","))
#: Columns that hold words, which may be folded.
WORDS: Final = frozenset("what,because,decided by,asked for by,what saves it,shape,pad".split(","))
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


@dataclass(frozen=True, slots=True)
class Change:
    """What two explanations say about one thing; the path does not count where changes are compared."""

    path: str = field(compare=False)
    op: str
    this: str
    other: str


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
        "round trips: cast up, and the result down again",
        "where,asked for by,bytes,share,what saves it".split(","),
        folded(explained.round_trips, _module, lambda trip: (trip.asked_by, trip.low, trip.write, trip.by)),
        cost=lambda trip: trip.num_bytes,
        whole=explained.moved_bytes,
        cells=lambda trip, cost, share: (trip.asked_by, byte_text(cost), share, _cure(trip)),
    )
    yield from _dearest(
        "casts, forward and backward",
        "where,what,by,bytes,share".split(","),
        folded(
            (cast for cast in explained.casts if cast.by != "emulation"),
            _module,
            lambda cast: (cast.phase, cast.what, cast.before, cast.after, cast.by),
        ),
        cost=lambda cast: cast.num_bytes,
        whole=explained.moved_bytes,
        cells=lambda cast, cost, share: (
            f"{cast.what} {format_text([cast.before])} → {format_text([cast.after])}, {cast.phase}",
            cast.by, byte_text(cost), share,
        ),
    )  # fmt: skip
    pads = folded(explained.misaligned, _module, lambda each: (each.op, each.shape, each.paddings))
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


def _cure(trip: RoundTrip) -> str:
    if not trip.write:
        return "no rule; the kernel has no low form" if trip.ops else f"no rule; {trip.line or 'the code'} converts"
    return f"{trip.write}, at the risk of: {trip.risk}" if trip.risk else trip.write


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
        (_casts_title(explained), "module,phase,what,from,to,by,count,bytes".split(","), map(_cast, explained.casts)),
        ("round trips", "module,asked for by,low,by,count,bytes,what saves it,line".split(","),
         ((t.module or MODEL, t.asked_by, t.low, t.by, str(t.count), byte_text(t.num_bytes), _cure(t), t.line or "–")
          for t in explained.round_trips)),
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
    where = (cast.module or MODEL, cast.phase, cast.what, cast.before, cast.after, cast.by)
    return (*where, str(cast.count), byte_text(cast.num_bytes))


def _product(entry: Misaligned) -> Sequence[str]:
    counts = (str(entry.count), entry.dtype, _shape(entry), str(entry.multiple))
    return (entry.module or MODEL, entry.op, *counts, entry.pads, entry.line or "–")


def _shape(entry: Misaligned) -> str:
    return " · ".join(f"{name} {size}" for name, size in entry.shape)


# Two explanations -------------------------------------------------------------------------------------------


def different_rows(first: Explained, second: Explained, *, full: bool = False) -> Iterator[Section]:
    """Yield what differs between two explanations: precisions and costs of casts, or with ``full`` every difference."""
    heads = ("where", first.policy, second.policy)
    if not full:
        changes = [Change(path, op, *both) for (path, op, _), both in changed_ops(first, second).items()]
        folds = folded(changes, lambda change: change.path, lambda change: change)
        cells = ((f"{_where(fold)} {fold.rows[0].op}", fold.rows[0].this, fold.rows[0].other) for fold in folds)
        yield from _section("ops in another precision", heads, cells)
        yield from _changed_casts(first, second, heads)
    found = [each for each in differences(first, second) if full or each.about not in ("policy", "op", "casts")]
    for about in dict.fromkeys(each.about for each in found):
        rows = ((each.where, each.this, each.other) for each in found if each.about == about)
        yield from _section(about, heads, rows)


def changed_ops(first: Explained, second: Explained) -> dict[tuple[str, str, str | None], tuple[str, str]]:
    """Return the precisions of the ops that run in another one, by module, op and line."""
    sides = _precisions(first), _precisions(second)
    pairs = {key: (sides[0].get(key, "–"), sides[1].get(key, "–")) for key in dict.fromkeys((*sides[0], *sides[1]))}
    return {key: both for key, both in pairs.items() if both[0] != both[1]}


def _precisions(explained: Explained) -> dict[tuple[str, str, str | None], str]:
    found: dict[tuple[str, str, str | None], dict[str, None]] = {}
    for row in explained.rows:
        found.setdefault((row.module, row.op, row.line), {})[_precision(row)] = None
    return {key: ", ".join(precisions) for key, precisions in found.items()}


def _changed_casts(first: Explained, second: Explained, heads: tuple[str, ...]) -> Iterator[Section]:
    sizes: dict[tuple[str, str], list[int]] = {}
    for side, explained in enumerate((first, second)):
        for cast in explained.casts:
            if cast.by != "emulation":
                sizes.setdefault((cast.module, f"{cast.what}, {cast.phase}"), [0, 0])[side] += cast.num_bytes
    changed = [key for key, both in sizes.items() if both[0] != both[1]]
    folds = folded(changed, lambda key: key[0], lambda key: key[1])
    sums = [(fold, [sum(sizes[key][side] for key in fold.rows) for side in (0, 1)]) for fold in folds]
    sums.sort(key=lambda each: -abs(each[1][0] - each[1][1]))
    num_shown = len(sums) if len(sums) <= _MOST_ROWS + 1 else _MOST_ROWS
    cells = ((f"{_where(fold)} {fold.rows[0][1]}", *map(byte_text, both)) for fold, both in sums[:num_shown])
    rest = f"and {len(sums) - num_shown} more rows, which differ by less" if len(sums) > num_shown else ""
    yield from _section("what casts read and write", heads, cells, rest)
