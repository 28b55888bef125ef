"""The table of a comparison, for a terminal, a page of markdown and one of HTML: the same cells in each."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable
from mezzo.explanation.words import byte_text, scale_text, share_text
from mezzo.report.verdict import Row, number, rows
from mezzo.script.comparison import Comparison

__all__ = ["cells", "table", "to_markdown"]


def cells(comparison: Comparison, *, full: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows as text.

    Args:
        comparison: The comparison.
        full: With losses that were not finite, products that ran low, and the peak of memory.
    """
    found = rows(comparison)
    base = found[0] if found else None
    unit = f", {comparison.metric.unit}".rstrip(", ")
    heads = [
        "policy",
        "verdict",
        f"{comparison.metric.name}{unit}",
        "− FP32 (95 %)",
        "loss",
        "ms/step",
        "held",
        "saved",
    ]
    heads += ["skipped", "scale"]
    heads += ["not finite", "ran low", "peak"] if full else []
    return heads, [_cells(row, base, full) for row in found]


def _cells(row: Row, base: Row | None, full: bool) -> list[str]:
    difference = "" if row.difference is None else number(row.difference, sign=True)
    if row.interval is not None:
        difference += f" ({number(row.interval[0], sign=True)} … {number(row.interval[1], sign=True)})"
    shown = [
        row.policy,
        "FP32" if row.verdict == "reference" else row.verdict,
        number(row.metric),
        difference,
        number(row.loss),
        "–" if row.step_ms is None else f"{row.step_ms:.3g}",
        _size(row.held_bytes, None if base is row or base is None else base.held_bytes),
        _size(row.saved_bytes, None if base is row or base is None else base.saved_bytes),
        str(row.skipped),
        scale_text(row.scale),
    ]
    if full:
        low = "–" if row.low_share is None else share_text(row.low_share, 1)
        shown += [str(row.nonfinite), low, _size(row.peak_bytes, None)]
    return shown


def _size(num_bytes: int | None, base: int | None) -> str:
    if num_bytes is None:
        return "–"
    return byte_text(num_bytes) + (f" ({num_bytes / base:.2f}×)" if base else "")


def table(comparison: Comparison, *, full: bool = False) -> Table:
    """Return the table for a terminal."""
    heads, found = cells(comparison, full=full)
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for place, head in enumerate(heads):
        shown.add_column(Text(head), justify="left" if place < 2 else "right", overflow="fold")
    for row in found:
        shown.add_row(*(Text(printable(each)) for each in row))
    return shown


def to_markdown(comparison: Comparison, *, full: bool = False) -> str:
    """Return the table as markdown."""
    heads, found = cells(comparison, full=full)
    lines: list[Sequence[str]] = [heads, ["---" if place < 2 else "---:" for place in range(len(heads))], *found]
    return "".join(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in line)} |\n" for line in lines)
