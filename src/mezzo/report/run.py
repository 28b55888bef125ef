"""Reading a run directory back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mezzo.errors import StateError, shown
from mezzo.files import opened
from mezzo.recipes.comparison import SCHEMA
from mezzo.recipes.run_directory import METRICS, SUMMARY

__all__ = ["Run", "Series", "read"]


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
        summary = json.loads(_text(path / SUMMARY))
        records = [json.loads(line) for line in _text(path / METRICS).splitlines()]
    except FileNotFoundError as error:
        raise StateError(
            "there is no finished run here",
            where=str(path),
            why=f"{Path(error.filename).name} is missing",
            write=f"mezzo compare digits-cnn --out {path}",
        ) from error
    except OSError as error:
        raise StateError("the run cannot be read", where=str(path), why=str(error)) from error
    except (ValueError, RecursionError) as error:
        raise StateError("the run cannot be read", where=str(path), why=f"a file is not JSON: {error}") from error
    schema = summary.get("schema") if isinstance(summary, dict) else None
    if schema != SCHEMA:
        raise StateError(
            f"the run has schema {shown(schema)}",
            where=str(path),
            why=f"this version of mezzo reads schema {SCHEMA}",
        )
    wrong = [*_wrong(summary, _SUMMARY, "summary.json")]
    for number, record in enumerate(records, start=1):
        wrong += _wrong(record, _RECORD, f"metrics.jsonl, line {number}")
    if wrong:
        raise StateError(
            "the run is not one that mezzo compare wrote",
            where=str(path),
            why="\n".join(wrong[:_MOST_WRONG]),
            write=f"mezzo compare digits-cnn --out {path}",
        )
    names = [row["policy"] for row in summary["rows"]]
    series = {name: _series([r for r in records if r["policy"] == name]) for name in names}
    return Run(path=path, summary=summary, series=series)


def _text(path: Path) -> str:
    with opened(path) as file:
        return file.read().decode()


# What tables and pictures read of a run ---------------------------------------------------------------------------

_Form = type | tuple[type, ...] | list[Any] | dict[str, Any] | str


def _wrong(value: Any, form: _Form, where: str) -> Iterator[str]:
    """Yield what is not as a form asks: a type, types, a list of one form, keys with their forms, or "number"."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            yield f"{where} is {shown(value)}, not an object"
            return
        for key, inner in form.items():
            optional = key.endswith("?")
            name = key.removesuffix("?")
            if name in value and not (optional and value[name] is None):
                yield from _wrong(value[name], inner, f"{where}, {name}")
            elif not optional:
                yield f"{where} has no {name}"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{where} is {shown(value)}, not a list"
            return
        for number, each in enumerate(value):
            yield from _wrong(each, form[0], f"{where} {number}")
    elif form == "number":
        if not _is_number(value):
            yield f"{where} is {shown(value)}, not a number"
    elif form == "numbers":
        if not isinstance(value, dict) or not all(map(_is_number, value.values())):
            yield f"{where} is {shown(value)}, not numbers by name"
    elif form == "decimals":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 20:
            yield f"{where} is {shown(value)}, not a number of decimals"
    elif form is int:
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
            yield f"{where} is {shown(value)}, not a count"
    elif not isinstance(form, str) and not isinstance(value, form):
        yield f"{where} is {shown(value)}, not {getattr(form, '__name__', form)}"


def _is_number(value: Any) -> bool:
    """Whether it is a number, or one of the texts that stand for those that JSON lacks."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 2**1023


_ROW: Final = {
    "policy": str, "status": str, "arithmetic": str, "final_metric?": "number", "best_metric?": "number",
    "difference?": "number", "step_ms?": {"p10": "number", "median": "number", "p90": "number"},
    "state_bytes?": {"total": int}, "saved_bytes?": int, "peak_bytes?": int, "skipped_steps": int,
    "final_scale?": "number", "nonfinite_losses": int, "steps": int, "note?": str, "memory_format": str,
}  # fmt: skip
_SUMMARY: Final = {
    "recipe": str, "summary": str, "steps": int, "seed": int, "date": str, "reference": str, "policies": [str],
    "interrupted": bool, "references": "numbers", "rows": [_ROW],
    "metric": {"name": str, "unit": str, "unit_of_difference": str, "decimals": "decimals"},
    "machine": {"cpu": str, "threads": int, "torch": str, "mezzo": str, "gpu?": str},
}  # fmt: skip
_RECORD: Final = {
    "policy": str, "step": int, "loss": "number", "scale": "number", "skipped": bool, "metric?": "number",
}  # fmt: skip
_MOST_WRONG: Final = 20


def _series(records: list[dict[str, Any]]) -> Series:
    scored = [record for record in records if record.get("metric") is not None]
    return Series(
        step=tuple(record["step"] for record in records),
        # float() also reads the texts "nan", "inf" and "-inf" that stand for what JSON cannot write
        loss=tuple(float(record["loss"]) for record in records),
        scale=tuple(float(record["scale"]) for record in records),
        skipped=tuple(record["skipped"] for record in records),
        evaluated=tuple(record["step"] for record in scored),
        metric=tuple(float(record["metric"]) for record in scored),
    )
