"""The table of a comparison, for a terminal, a page of markdown and one of HTML: the same cells in each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable
from mezzo.explanation.words import byte_text, scale_text, share_text
from mezzo.report.verdict import Row, number, rows, short
from mezzo.script.comparison import Comparison

#: Columns by what they are worth, the least first: final scale, saved, held, time, skipped steps, loss.
_LEAST: Final = (9, 7, 6, 5, 8, 4)
#: Characters of a policy on one line.
_POLICY: Final = 26

__all__ = ["cells", "table", "to_markdown"]


def cells(comparison: Comparison, *, full: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows as text.

    Args:
        comparison: The comparison.
        full: With bytes beside their ratio to FP32's, losses that were not finite, products that ran low, and the peak
            of memory.
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
    difference = "" if row.difference is None else number(row.difference, sign=True, digits=3)
    if row.interval is not None:
        low, high = (number(each, sign=True, digits=3) for each in row.interval)
        difference += f" ({low} … {high})"
    beside = row if base is None else base
    shown = [
        short(row.policy),
        "FP32" if row.verdict == "reference" else row.verdict,
        number(row.metric),
        difference,
        number(row.loss),
        "–" if row.step_ms is None else f"{row.step_ms:.3g}",
        _size(row.held_bytes, None if beside is row else beside.held_bytes, full),
        _size(row.saved_bytes, None if beside is row else beside.saved_bytes, full),
        str(row.skipped),
        scale_text(row.scale),
    ]
    if full:
        low = "–" if row.low_share is None else share_text(row.low_share, 1)
        shown += [str(row.nonfinite), low, _size(row.peak_bytes, None, full)]
    return shown


def _size(num_bytes: int | None, base: int | None, full: bool) -> str:
    if num_bytes is None:
        return "–"
    ratio = f"{num_bytes / base:.2f}×" if base else ""
    return f"{byte_text(num_bytes)} ({ratio})" if full and ratio else ratio or byte_text(num_bytes)


def table(comparison: Comparison, *, full: bool = False, width: int | None = None) -> Table:
    """Return the table for a terminal.

    Args:
        comparison: The comparison.
        full: See :func:`cells`.
        width: In characters. Columns that do not fit are left out, those least asked for first, and a caption says so.
    """
    heads, found = cells(comparison, full=full)
    found = [[_folded(row[0]), *row[1:]] for row in found]
    widths = [
        max(len(part) for each in column for part in each.split("\n")) for column in zip(heads, *found, strict=True)
    ]
    left_out = list[int]()
    for place in () if full else _LEAST:
        kept = [size + 2 for place, size in enumerate(widths) if place not in left_out]
        if width is not None and sum(kept) - 1 > width:
            left_out.append(place)
    caption = (
        f"left out: {', '.join(heads[place] for place in sorted(left_out))}; --full shows them" if left_out else None
    )
    shown = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
        caption=caption, caption_justify="left",
    )  # fmt: skip
    for place, head in enumerate(heads):
        if place not in left_out:
            shown.add_column(Text(head), justify="left" if place < 2 else "right", overflow="fold")
    for row in found:
        shown.add_row(*(Text(printable(each, keep="\n")) for at, each in enumerate(row) if at not in left_out))
    return shown


def _folded(policy: str) -> str:
    """Break a long policy behind commas."""
    lines = [""]
    for part in re.findall(r"[^,]*,?", policy):
        if lines[-1] and len(lines[-1] + part) > _POLICY:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def to_markdown(comparison: Comparison, *, full: bool = False) -> str:
    """Return the table as markdown."""
    heads, found = cells(comparison, full=full)
    lines: list[Sequence[str]] = [heads, ["---" if place < 2 else "---:" for place in range(len(heads))], *found]
    return "".join(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in line)} |\n" for line in lines)
