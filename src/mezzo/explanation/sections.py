"""An explanation as tables of text: the few rows that matter with alike modules folded, or all rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mezzo.explanation.fold import Fold, folded
from mezzo.explanation.rows import Cast, Explained, Misaligned, Row
from mezzo.explanation.words import byte_text, format_text, share_text
from mezzo.policy import Policy
from mezzo.tensors import dtype_name
from mezzo.trace.where import MODEL

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
