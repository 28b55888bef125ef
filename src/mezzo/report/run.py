"""Reading a run directory back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mezzo.documents import is_count, is_number
from mezzo.errors import PolicyError, StateError, shown
from mezzo.files import opened
from mezzo.numerics import Evidence, read_evidence
from mezzo.recipes.comparison import SCHEMA
from mezzo.recipes.run_directory import EVIDENCE, METRICS, PARTIAL, SUMMARY, rank_files

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
        killed: Whether the process died before it could sum up: then there are no rows.
        evidence: What was recorded of it, if it was.
        ranks: The lines that each rank of a parallel training wrote of its own steps, in order.
    """

    path: Path
    summary: Mapping[str, Any]
    series: Mapping[str, Series]
    killed: bool = False
    evidence: Evidence | None = None
    ranks: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def file(self, name: str) -> Path | None:
        """Return where a further file of the run is, such as its evidence; ``None`` where it has none."""
        return _place(self.path, name, self.killed)


def read(directory: Path | str, *, killed: bool = False) -> Run:
    """Read a run directory.

    Args:
        directory: What ``mezzo compare --out``, ``train`` or ``inspect`` wrote.
        killed: Whether a run will do that was killed before it was summed up. A last line that is cut is left out.

    Returns:
        The summary and every step.

    Raises:
        PolicyError: There is no run.
        StateError: It is not whole, cannot be read, or another version wrote it.
    """
    path = Path(directory)
    killed = killed and not (path / SUMMARY).exists() and (path / (SUMMARY + PARTIAL)).exists()
    try:
        summary = json.loads(_text(path, SUMMARY, killed))
        records = _records(path, METRICS, killed)
        ranks = {rank: _records(path, name, killed) for rank, name in rank_files(path)}
    except (FileNotFoundError, NotADirectoryError) as error:
        begun = any((path / name).exists() for name in (SUMMARY, SUMMARY + PARTIAL))
        raise (StateError if begun else PolicyError)(
            "there is no finished run here",
            where=str(path),
            why=_missing(path, error),
            write="" if path.is_file() else f"mezzo compare digits-cnn --out {path}",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, OSError) else f"a file is not JSON: {error}"
        raise StateError("the run cannot be read", where=str(path), why=why) from error
    schema = summary.get("schema") if isinstance(summary, dict) else None
    if schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        raise StateError(
            f"the run has schema {shown(schema)}",
            where=str(path),
            why=f"this version of mezzo reads schema {SCHEMA}" + (": a newer one wrote the run" if newer else ""),
            write="pip install .  # in a newer clone of mezzo" if newer else "",
        )
    wrong = [*_wrong(summary, _SUMMARY, "summary.json")]
    streams = (METRICS, records, _RECORD), *((f"metrics.rank{n}.jsonl", ranks[n], _RANK_RECORD) for n in ranks)
    for name, lines, form in streams:
        for number, record in enumerate(lines, start=1):
            wrong += _wrong(record, form, f"{name}, line {number}")
    if wrong:
        raise StateError(
            "the run is not one that mezzo compare wrote",
            where=str(path),
            why="\n".join(wrong[:_MOST_WRONG]),
            write=f"mezzo compare digits-cnn --out {path}",
        )
    summary["rows"] = [_UNKNOWN | row for row in summary["rows"]]
    names = dict.fromkeys(each["policy"] for each in (records if killed else summary["rows"]))
    series = {name: _series([r for r in records if r["policy"] == name]) for name in names}
    place = _place(path, EVIDENCE, killed)
    evidence = None if place is None else read_evidence(place)
    return Run(path=path, summary=summary, series=series, killed=killed, evidence=evidence, ranks=ranks)


def _place(path: Path, name: str, killed: bool) -> Path | None:
    """Return where a file of a run is: a killed process may have died while it gave the files their names."""
    places = [path / (name + PARTIAL), path / name] if killed else [path / name]
    return next((place for place in places if place.exists()), None)


def _text(path: Path, name: str, killed: bool) -> str:
    with opened(_place(path, name, killed) or path / name) as file:
        return file.read().decode()


def _records(path: Path, name: str, killed: bool) -> list[Any]:
    """Read a stream; of a killed run without the last line, if that is cut."""
    lines = _text(path, name, killed).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") or not killed]


def _missing(path: Path, error: OSError) -> str:
    if not path.is_dir():
        return "this is a file, and a run is a directory" if path.exists() else "there is no such directory"
    if (path / (SUMMARY + PARTIAL)).exists():
        return f"it was killed before its end; mezzo report {path} shows what there is"
    return f"{Path(error.filename).name} is missing"


# What tables, pictures and pages read of a run ---------------------------------------------------------

_Form = str | list[Any] | dict[str, Any]


def _wrong(value: Any, form: _Form, where: str) -> Iterator[str]:
    """Yield what is not as a form asks: a word of ``_KINDS``, a list of one form, or keys with their forms."""
    container: type[Any] = type(form)
    if isinstance(form, str):
        fits, words = _KINDS[form]
        if not fits(value):
            yield f"{where} is {shown(value)}, not {words}"
    elif not isinstance(value, container):
        yield f"{where} is {shown(value)}, not {'an object' if isinstance(form, dict) else 'a list'}"
    elif isinstance(form, list):
        for number, each in enumerate(value):
            yield from _wrong(each, form[0], f"{where} {number}")
    else:
        for key, inner in form.items():
            name, optional = key.removesuffix("?"), key.endswith("?")
            if name in value and not (optional and value[name] is None):
                yield from _wrong(value[name], inner, f"{where}, {name}")
            elif not optional:
                yield f"{where} has no {name}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and is_count(abs(value))


_KINDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "text": (lambda value: isinstance(value, str), "str"),
    "flag": (lambda value: isinstance(value, bool), "bool"),
    "count": (_is_whole, "a count"),
    "decimals": (lambda value: is_count(value) and value <= 20, "a number of decimals"),
    "number": (is_number, "a number"),
    "numbers": (lambda value: isinstance(value, dict) and all(map(is_number, value.values())), "numbers by name"),
}
_ROW: Final = {
    "policy": "text", "status": "text", "arithmetic": "text", "final_metric?": "number", "best_metric?": "number",
    "difference?": "number", "step_ms?": {"p10": "number", "median": "number", "p90": "number"},
    "state_bytes?": {"total": "count"}, "saved_bytes?": "count", "peak_bytes?": "count", "skipped_steps": "count",
    "final_scale?": "number", "nonfinite_losses": "count", "steps": "count", "note?": "text", "memory_format": "text",
    "low_share?": "number",
}  # fmt: skip
_UNKNOWN: Final = {key.removesuffix("?"): None for key in _ROW if key.endswith("?")}
_SUMMARY: Final = {
    "recipe": "text", "summary": "text", "steps": "count", "seed?": "count", "date": "text", "reference": "text",
    "policies": ["text"], "interrupted": "flag", "references": "numbers", "rows": [_ROW],
    "metric": {
        "name": "text", "unit": "text", "unit_of_difference": "text", "decimals": "decimals", "higher_is_better": "flag"
    },
    "machine": {"cpu": "text", "threads": "count", "torch": "text", "mezzo": "text", "gpu?": "text"},
    "parallel?": "text", "ranks?": "count",
}  # fmt: skip
_RECORD: Final = {
    "policy": "text", "step": "count", "loss": "number", "scale": "number", "skipped": "flag", "metric?": "number",
}  # fmt: skip
_RANK_RECORD: Final = {
    "policy": "text", "step": "count", "ms": "number", "samples_per_s": "number", "waiting_ms": "number",
    "wire_bytes": "count", "overflowed": "flag", "peak_bytes": "count",
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
