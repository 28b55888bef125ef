"""An explanation for people: tables that are as wide as they need to be, and never cut."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable
from mezzo.explanation.differences import differences
from mezzo.explanation.rows import Cast, Explained, Misaligned, Row
from mezzo.trace.where import MODEL

__all__ = ["byte_text", "difference_table", "differences_json", "plain", "renderables"]

#: Wide enough for most tables in one line where no terminal sets the width, so that `grep` works.
PLAIN_WIDTH: Final = 160

_OPS: Final = "module,op,count,given,computes in,returns,treatment,decided by,because,line".split(",")
_CASTS: Final = "module,phase,what,from,to,by,count,bytes".split(",")
_MISALIGNED: Final = "module,op,count,format,shape,multiple of,pad,line".split(",")
_FINDINGS: Final = ("kind", "where", "what")
_NUMBERS: Final = ("count", "bytes", "multiple of")


def plain(parts: Iterable[RenderableType]) -> str:
    """Write tables as text without colours, each row in one line, however long."""
    file = io.StringIO()
    console = Console(file=file, no_color=True, force_terminal=False, width=PLAIN_WIDTH)
    parts = list(parts)
    wide = console.options.update(width=100_000)
    console.width = max(PLAIN_WIDTH, *(Measurement.get(console, wide, part).maximum for part in parts))
    console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def renderables(explanation: Explained) -> Iterator[RenderableType]:
    """Yield the heading, the tables that have rows, and the findings."""
    yield Text(printable(_heading(explanation)), style="bold")
    for title, heads, rows in (
        ("ops, forward", _OPS, map(_op, explanation.rows)),
        (_casts_title(explanation), _CASTS, map(_cast, explanation.casts)),
        ("products whose dimensions tensor cores do not like", _MISALIGNED, map(_product, explanation.misaligned)),
        ("findings", _FINDINGS, ((each.kind, each.where, each.text) for each in explanation.findings)),
    ):
        table = _table(heads, rows)
        # The title is no part of the table, within whose width it would be folded.
        yield Text(title if table.rows else f"{title}: none", style="bold")
        if table.rows:
            yield table


def difference_table(first: Explained, second: Explained) -> RenderableType:
    """Show two explanations side by side, only where they differ."""
    found = differences(first, second)
    if not found:
        return Text(printable(f"{first.policy} and {second.policy} explain the same"))
    heads = ("about", "where", first.policy, second.policy)
    return _table(heads, ((each.about, each.where, each.this, each.other) for each in found))


def differences_json(first: Explained, second: Explained) -> str:
    """Write the differences as a JSON list."""
    found = [dataclasses.asdict(each) for each in differences(first, second)]
    return json.dumps(found, indent=2, ensure_ascii=False)


def byte_text(count: int) -> str:
    """Write a number of bytes with its unit.

    Example:
        >>> byte_text(864), byte_text(3 * 2**20)
        ('864 B', '3 MiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _heading(explanation: Explained) -> str:
    arithmetic = "products emulated in FP32" if explanation.emulated else "native arithmetic"
    devices = "+".join(explanation.devices) or "no device"
    return f"{explanation.model} under {explanation.policy} on {devices}, {arithmetic}, torch {explanation.torch}"


def _op(row: Row) -> Sequence[str]:
    computes = "+".join(row.computes_in) or "–"
    return (
        row.module or MODEL, row.op, str(row.count), "+".join(row.given) or "–",
        f"{computes}, emulated" if row.emulated else computes, "+".join(row.returns) or "–",
        f"{row.treatment} (!)" if row.disagreement else row.treatment,
        f"rule {row.rule}" if row.rule else row.source, row.reason, row.line or "–",
    )  # fmt: skip


def _casts_title(explanation: Explained) -> str:
    if not explanation.casts:
        return "casts"
    title = f"casts: {explanation.num_casts()}, {byte_text(explanation.cast_bytes())} read and written"
    if emulation := explanation.num_casts(by="emulation"):
        title += f"; and {emulation} by emulation, which a device with the arithmetic does not do"
    return title


def _cast(cast: Cast) -> Sequence[str]:
    where = (cast.module or MODEL, cast.phase, cast.what, cast.before, cast.after, cast.by)
    return (*where, str(cast.count), byte_text(cast.num_bytes))


def _product(entry: Misaligned) -> Sequence[str]:
    shape = " · ".join(f"{name} {size}" for name, size in entry.shape)
    pads = ", ".join(f"{pad.dimension} {pad.size} → {pad.padded}" for pad in entry.paddings)
    counts = (str(entry.count), entry.dtype, shape, str(entry.multiple))
    return (entry.module or MODEL, entry.op, *counts, pads, entry.line or "–")


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for head in heads:
        # Long words are folded in a narrow terminal: nothing is cut. As Text, for rules may hold brackets.
        table.add_column(Text(printable(head)), justify="right" if head in _NUMBERS else "left", overflow="fold")
    here = f"{os.getcwd()}{os.sep}"
    for row in rows:
        table.add_row(*(Text(printable(cell.replace(here, ""))) for cell in row))
    return table
