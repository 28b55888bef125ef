"""The table of a comparison, for a terminal and for a page of markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mezzo.errors import printable
from mezzo.explanation.words import byte_text, counted, scale_text, share_text

__all__ = ["Column", "cell", "columns", "facts", "fitted", "results_tables", "seed_text", "to_markdown"]

Row = Mapping[str, Any]
_GAP = 2
#: A cell of what was not measured.
_UNKNOWN: Final = "–"
#: What a policy's text is left at least, before it is folded at a comma.
_LEAST: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its head, on one or two lines, and the text of a cell.

    Attributes:
        head: Lines of the heading.
        right: Whether its cells are numbers, aligned right.
        cell: From a row of the summary to the cell's text.
    """

    head: tuple[str, ...]
    right: bool
    cell: Callable[[Row], str]


def cell(key: str, write: Callable[[Any], str] = str) -> Callable[[Row], str]:
    """Return what writes a value of a row, where it is known."""
    return lambda row: _UNKNOWN if row.get(key) is None else write(row[key])


def columns(summary: Mapping[str, Any]) -> list[Column]:
    """Return the columns of a comparison's table.

    Args:
        summary: What ``summary.json`` holds, or :meth:`Comparison.to_dict` returns.

    Returns:
        Columns in the order in which they are shown; those of what was measured under no policy are left out.
    """
    metric = summary["metric"]
    base = next((row for row in summary["rows"] if row["policy"] == summary["reference"]), None)

    def value(key: str, sign: str = "") -> Callable[[Row], str]:
        return cell(key, lambda number: _number(float(number), f"{sign}z.{metric['decimals']}f"))

    def size(read: Callable[[Row], int | None]) -> Callable[[Row], str]:
        return lambda row: _size(read(row), None if base is None or row is base else read(base))

    name, unit = metric["name"], metric["unit"]
    found = [
        Column(head=("policy",), right=False, cell=_policy),
        Column(head=("arithmetic",), right=False, cell=cell("arithmetic")),
        Column(head=(name, f"final, {unit}".rstrip(", ")), right=True, cell=value("final_metric")),
        Column(head=("best,", unit), right=True, cell=value("best_metric")),
        Column(
            head=(f"final − {summary['reference']},", metric["unit_of_difference"]),
            right=True,
            cell=value("difference", "+"),
        ),
        Column(head=("ms per step,", "median (10–90 %)"), right=True, cell=cell("step_ms", _milliseconds)),
        Column(
            head=("weights + gradients", "+ optimizer"),
            right=True,
            cell=size(lambda row: row["state_bytes"] and row["state_bytes"]["total"]),
        ),
        Column(head=("saved for", "backward"), right=True, cell=size(lambda row: row["saved_bytes"])),
        Column(head=("products", "that ran low"), right=True, cell=cell("low_share", lambda n: share_text(n, 1))),
        Column(head=("peak", "allocated"), right=True, cell=size(lambda row: row["peak_bytes"])),
        Column(head=("steps", "skipped"), right=True, cell=cell("skipped_steps")),
        Column(head=("final", "scale"), right=True, cell=cell("final_scale", scale_text)),
        Column(head=("non-finite", "losses"), right=True, cell=cell("nonfinite_losses")),
    ]
    rows = summary["rows"]
    return [column for column in found if not rows or any(column.cell(row) != _UNKNOWN for row in rows)]


def results_tables(summary: Mapping[str, Any], width: int) -> list[Table]:
    """Make the table of a comparison for a terminal, in as many parts as its width asks for.

    Args:
        summary: What ``summary.json`` holds.
        width: Of the terminal, in characters. Numbers are never folded or cut: columns that do not fit go to a
            further part, which names the policies again. A policy that takes a third of the width is folded at commas.

    Returns:
        Rich tables, one row per policy that was trained.
    """
    return fitted(columns(summary), summary["rows"], width)


def fitted(shown: Sequence[Column], rows: Sequence[Row], width: int) -> list[Table]:
    """Make a table in as many parts as a width asks for; each begins with the first column."""
    given, *others = shown
    first = replace(given, cell=lambda row: _at_commas(given.cell(row), max(width // 3, _LEAST)))
    parts: list[list[Column]] = [[]]
    left = width - _width(first, rows)
    for column in others:
        needed = _GAP + _width(column, rows)
        if needed > left and parts[-1]:
            parts.append([])
            left = width - _width(first, rows)
        parts[-1].append(column)
        left -= needed
    return [_table([first, *part], rows) for part in parts]


def _table(shown: Sequence[Column], rows: Sequence[Row]) -> Table:
    # With a padding on the right of each cell but the last, and the box's own blank, columns are _GAP apart.
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold"
    )
    for column in shown:
        table.add_column(
            _text("\n".join(column.head)),
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *(_text(column.cell(row)) for column in shown),
            style="" if row.get("status", "finished") == "finished" else "dim",
        )
    return table


def _text(text: str) -> Text:
    """Show a text as it is: a policy's globs may hold brackets that rich would take for markup."""
    return Text(printable(text, keep="\n"))


def _width(column: Column, rows: Sequence[Row]) -> int:
    lines = [*column.head, *(line for row in rows for line in column.cell(row).split("\n"))]
    return max(cell_len(printable(line)) for line in lines)


def to_markdown(summary: Mapping[str, Any]) -> str:
    """Write the table of a comparison, and what it was measured on, as markdown.

    Args:
        summary: What ``summary.json`` holds.

    Returns:
        A table, an empty line, and the lines of :func:`facts` as one paragraph.
    """
    shown = columns(summary)
    lines = [
        [" ".join(column.head) for column in shown],
        ["---:" if column.right else "---" for column in shown],
        *(
            [printable(column.cell(row).replace("|", "\\|").replace("\n", " ")) for column in shown]
            for row in summary["rows"]
        ),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n" + "\\\n".join(facts(summary)) + "\n"


def facts(summary: Mapping[str, Any]) -> list[str]:
    """Say what a reader must know to judge the table.

    Args:
        summary: What ``summary.json`` holds.

    Returns:
        One line each: the task, the machine and date, reference values, layouts, arithmetic, interruptions.
    """
    rows: Sequence[Row] = summary["rows"]
    metric, machine = summary["metric"], summary["machine"]
    lines = [
        f"{summary['recipe']}: {summary['summary']}; {summary['steps']} steps{seed_text(summary)}",
        f"{_machine(machine)}; {summary['date'][:10]}",
    ]
    if summary.get("parallel"):
        lines.append(
            f"{counted(summary['ranks'], 'rank')} ({summary['parallel']}): times and bytes are those of rank 0"
        )
    for name, number in summary["references"].items():
        lines.append(f"for reference: {name} {float(number):.{metric['decimals']}f} {metric['unit']}")
    if any(row["memory_format"] == "channels-last" for row in rows):
        first = [row["policy"] for row in rows if row["memory_format"] != "channels-last"]
        but = f" but {'; '.join(first)}, which is contiguous (NCHW)" if first else ""
        lines.append(f"layout: channels-last (NHWC) in every policy{but}")
    if any(row["arithmetic"] == "emulated" for row in rows):
        lines.append(
            "emulated: products computed in FP32 from rounded operands, as this device lacks fast ones; "
            "their time says nothing about the format"
        )
    for row in rows:
        if row["note"]:
            lines.append(f"{row['policy']} stopped after {row['steps']} steps: {row['note'].splitlines()[0]}")
    missing = [policy for policy in summary["policies"] if policy not in {row["policy"] for row in rows}]
    if summary["interrupted"]:
        lines.append("interrupted" + (f" before {'; '.join(missing)}" if missing else ""))
    return [printable(line) for line in lines]


def seed_text(summary: Mapping[str, Any]) -> str:
    """Return the seed of a run, to go on with; nothing for a script, which seeds by itself."""
    return "" if summary["seed"] is None else f", seed {summary['seed']}"


def _policy(row: Row) -> str:
    if row["status"] == "finished":
        return str(row["policy"])
    return f"{row['policy']}\n({row['status']} at step {row['steps']})"


def _at_commas(text: str, width: int) -> str:
    """Fold lines behind commas where they are longer than a width; what has none stays in one piece."""
    lines = [""]
    for piece in re.split(r"(?<=,)|(\n)", text):
        if piece == "\n":
            lines.append("")
        elif piece:
            if lines[-1] and cell_len(lines[-1] + piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


def _number(number: float, form: str) -> str:
    return format(number, form) if math.isfinite(number) else str(number)


def _milliseconds(times: Mapping[str, Any]) -> str:
    low, middle, high = (f"{float(times[key]):#.3g}".rstrip(".") for key in ("p10", "median", "p90"))
    return f"{middle} ({low}–{high})"


def _size(num_bytes: int | None, base: int | None) -> str:
    if num_bytes is None:
        return _UNKNOWN
    return byte_text(num_bytes) + (f" ({num_bytes / base:.2f}×)" if base else "")


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [
        *([str(machine["gpu"])] if "gpu" in machine else []),
        f"{machine['cpu']}, {counted(machine['threads'], 'thread')}",
        f"torch {machine['torch']}",
        f"mezzo {machine['mezzo']}",
    ]
    if "tf32_matmul" in machine:
        states = (("products", machine["tf32_matmul"]), ("convolutions", machine["tf32_convolution"]))
        parts.append("TF32 " + ", ".join(f"{'on' if on else 'off'} in {what}" for what, on in states))
    return "; ".join(parts)
