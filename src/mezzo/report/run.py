"""Reading a run directory back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mezzo.errors import StateError

__all__ = ["Run", "Series", "read"]

#: The version of ``summary.json`` that this module understands.
SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The steps of one policy, column by column.

    Attributes:
        step: Step numbers, from 1.
        loss: Training loss; may be infinite or NaN.
        scale: Loss scale used.
        skipped: Whether the step left the weights alone.
        evaluated: Steps after which the metric was measured.
        metric: Its values there.
    """

    step: tuple[int, ...]
    loss: tuple[float, ...]
    scale: tuple[float, ...]
    skipped: tuple[bool, ...]
    evaluated: tuple[int, ...]
    metric: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory in memory.

    Attributes:
        path: The directory.
        summary: What ``summary.json`` holds.
        series: The steps by policy, in the order of the summary's rows.
    """

    path: Path
    summary: Mapping[str, Any]
    series: Mapping[str, Series]


def read(directory: Path | str) -> Run:
    """Read a run directory.

    Args:
        directory: What ``mezzo compare --out`` wrote.

    Returns:
        The summary and every step.

    Raises:
        StateError: There is no run, it cannot be read, or another version wrote it.
    """
    path = Path(directory)
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except FileNotFoundError as error:
        raise StateError(
            "there is no finished run here",
            where=str(path),
            why=f"{Path(error.filename).name} is missing",
            write=f"mezzo compare digits-cnn --out {path}",
        ) from error
    except json.JSONDecodeError as error:
        raise StateError("the run cannot be read", where=str(path), why=f"a file is not JSON: {error}") from error
    schema = summary.get("schema") if isinstance(summary, dict) else None
    if schema != SCHEMA:
        raise StateError(
            f"the run has schema {schema!r}",
            where=str(path),
            why=f"this version of mezzo reads schema {SCHEMA}",
        )
    names = [row["policy"] for row in summary["rows"]]
    series = {name: _series([r for r in records if r["policy"] == name]) for name in names}
    return Run(path=path, summary=summary, series=series)


def _series(records: list[dict[str, Any]]) -> Series:
    scored = [record for record in records if record["metric"] is not None]
    return Series(
        step=tuple(record["step"] for record in records),
        # float() also reads the texts "nan", "inf" and "-inf" that stand for what JSON cannot write
        loss=tuple(float(record["loss"]) for record in records),
        scale=tuple(float(record["scale"]) for record in records),
        skipped=tuple(record["skipped"] for record in records),
        evaluated=tuple(record["step"] for record in scored),
        metric=tuple(float(record["metric"]) for record in scored),
    )
