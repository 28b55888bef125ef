"""The files a comparison leaves behind, and how they are written so that none is ever half there.

``metrics.jsonl``, one line a step, grows under another name and gets its own at the end; ``summary.json`` is
written beside and renamed. Whatever kills the process, a directory holds whole files or files named
``.partial``. Numbers that JSON cannot write are the texts ``"nan"``, ``"inf"`` and ``"-inf"``, which
``float()`` reads.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mezzo.errors import PolicyError, some_of
from mezzo.files import is_partial, whole
from mezzo.policy import Policy
from mezzo.recipes.training import RunResult, StepRecord

__all__ = ["CURVES", "METRICS", "SUMMARY", "RunDirectory", "jsonable"]

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
CURVES = "curves.png"
_PARTIAL = ".partial"
_OURS = frozenset((SUMMARY, METRICS, METRICS + _PARTIAL, CURVES))


class RunDirectory:
    """One directory that a comparison writes to, as a watcher of its trainings.

    Args:
        path: Made with its parents when the first step is written, if it is not there.
        overwrite: Whether an existing run may be replaced. Files of anything else are never touched.

    Raises:
        PolicyError: The path is taken: by a file, by files that no run wrote, or by a run that may not be
            replaced.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self._metrics: IO[str] | None = None
        if path.exists() and not path.is_dir():
            raise PolicyError("the run directory is a file", where=str(path), write=f"--out {path}-run")
        names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
        if foreign := [name for name in names if name not in _OURS and not is_partial(name)]:
            raise PolicyError(
                "the run directory holds files that no mezzo run wrote",
                where=str(path),
                why=f"{some_of(foreign)} would stand beside the results",
                write=f"--out {path / 'run'}",
            )
        if names and not overwrite:
            raise PolicyError(
                "the run directory already holds a run",
                where=str(path),
                why="its results would be lost",
                write=f"--out {path}-2, or --overwrite to replace it",
            )

    def started(self, policy: Policy, steps: int) -> None:
        """Write nothing: a directory is made for the first step."""

    def ended(self, result: RunResult) -> None:
        """Write nothing: results are written together, by :meth:`finish`."""

    def stepped(self, record: StepRecord) -> None:
        """Append one step; the line is handed to the system at once."""
        if self._metrics is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.path / (METRICS + _PARTIAL)).open("w", buffering=1, encoding="utf-8")
        self._metrics.write(json.dumps(jsonable(dataclasses.asdict(record)), allow_nan=False) + "\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and give both files their names."""
        self.path.mkdir(parents=True, exist_ok=True)
        # Pictures are drawn from these files: an old one must not stand beside new numbers.
        (self.path / CURVES).unlink(missing_ok=True)
        partial = self.path / (METRICS + _PARTIAL)
        if self._metrics is None:
            partial.touch()
        self.close()
        os.replace(partial, self.path / METRICS)
        text = json.dumps(jsonable(summary), indent=2, allow_nan=False, ensure_ascii=False)
        with whole(self.path / SUMMARY) as file:
            file.write(f"{text}\n".encode())

    def close(self) -> None:
        """Close the stream of steps; without :meth:`finish` it keeps its ``.partial`` name."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def jsonable(value: Any) -> Any:
    """Replace what JSON cannot write: non-finite numbers by their names, tuples by lists.

    Example:
        >>> jsonable({"loss": float("nan"), "ms": (1.5, float("-inf"))})
        {'loss': 'nan', 'ms': [1.5, '-inf']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    return value
