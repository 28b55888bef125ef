"""The ranks of a parallel training side by side: which is slow, which waits, which overflowed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from mezzo.explanation.words import byte_text, counted, share_text
from mezzo.numerics import Alert
from mezzo.recipes.training import UNTIMED_STEPS
from mezzo.report.run import Run
from mezzo.report.table import Column, cell, fitted

__all__ = ["rank_alerts", "rank_columns", "rank_lines", "rank_rows", "rank_tables"]

Row = Mapping[str, Any]
#: How much faster than the slowest a rank must be to be told of: less is noise.
_NOTABLE: Final = 0.05


def rank_rows(run: Run) -> list[Row]:
    """Sum up what each rank wrote, under each policy; the first steps, which settle, are not timed."""
    policies = dict.fromkeys(line["policy"] for lines in run.ranks.values() for line in lines)
    return [
        {"policy": policy, "rank": rank, **_summed([line for line in lines if line["policy"] == policy])}
        for policy in policies
        for rank, lines in run.ranks.items()
    ]


def _summed(lines: Sequence[Row]) -> dict[str, Any]:
    timed = [line for line in lines if line["step"] > UNTIMED_STEPS]
    ms, waiting = (sum(float(line[name]) for line in timed) for name in ("ms", "waiting_ms"))
    return {
        "steps": len(lines),
        "ms": statistics.median(float(line["ms"]) for line in timed) if timed else None,
        "own_ms": (ms - waiting) / len(timed) if timed else None,
        "waiting": (waiting, ms) if timed else None,
        "samples_per_s": statistics.median(float(line["samples_per_s"]) for line in timed) if timed else None,
        "wire_bytes": lines[-1]["wire_bytes"] if lines else None,
        "overflows": sum(line["overflowed"] for line in lines),
        "peak_bytes": max((line["peak_bytes"] for line in lines), default=None),
    }


def rank_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the ranks' table; the first one names the policy too if there are several."""
    several = len({row["policy"] for row in rows}) > 1
    named = Column(head=("rank, policy",), right=False, cell=lambda row: f"{row['rank']}, {row['policy']}")
    return [
        named if several else Column(head=("rank",), right=False, cell=cell("rank")),
        Column(head=("ms per step,", "median"), right=True, cell=cell("ms", _number)),
        Column(head=("its own work,", "mean ms"), right=True, cell=cell("own_ms", _number)),
        Column(head=("waiting for", "other ranks"), right=True, cell=cell("waiting", lambda pair: share_text(*pair))),
        Column(head=("samples", "per second"), right=True, cell=cell("samples_per_s", _number)),
        Column(head=("sent", "per step"), right=True, cell=cell("wire_bytes", byte_text)),
        Column(head=("losses not", "finite here"), right=True, cell=cell("overflows")),
        Column(head=("peak", "memory"), right=True, cell=cell("peak_bytes", byte_text)),
    ]


def _number(number: float) -> str:
    return f"{number:#.3g}".rstrip(".")


def rank_tables(run: Run, width: int) -> list[Table]:
    """Make the table of the ranks for a terminal; of a run in one process there is none."""
    rows = rank_rows(run)
    return fitted(rank_columns(rows), rows, width) if rows else []


def rank_lines(run: Run) -> Iterator[str]:
    """Say which rank the others wait for."""
    rows = [row for row in rank_rows(run) if row["own_ms"] is not None]
    own = {rank: statistics.fmean(row["own_ms"] for row in rows if row["rank"] == rank) for rank in run.ranks if rows}
    if len(own) < 2:
        return
    slow, fast = max(own, key=lambda rank: own[rank]), min(own, key=lambda rank: own[rank])
    if own[fast] > (1 - _NOTABLE) * own[slow]:
        yield f"{len(own)} ranks, equally fast: {own[slow]:.3g} ms of a step are a rank's own work."
        return
    pairs = [row["waiting"] for row in rows if row["rank"] == fast]
    share = share_text(sum(waiting for waiting, _ in pairs), sum(ms for _, ms in pairs))
    yield (
        f"{len(own)} ranks: rank {slow} is the slowest, {own[slow]:.3g} ms of a step are its own work; rank {fast} is "
        f"the fastest with {own[fast]:.3g} ms, and waits {share} of the time."
    )


def rank_alerts(run: Run) -> Iterator[Alert]:
    """Tell of a rank that overflows alone: all have the same weights, so its data or its device is at fault."""
    overflows = {rank: sum(line["overflowed"] for line in lines) for rank, lines in run.ranks.items()}
    guilty = [rank for rank, count in overflows.items() if count]
    if len(guilty) == 1 and len(overflows) > 1 and overflows[guilty[0]] > 1:
        (rank,) = guilty
        yield Alert(
            level="warn",
            what=f"Only rank {rank} overflowed, in {counted(overflows[rank], 'step')} of {len(run.ranks[rank])}.",
            where=f"metrics.rank{rank}.jsonl",
            why="All ranks have the same weights: look at its share of the data, or at its device.",
        )
