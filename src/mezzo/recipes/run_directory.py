"""The files that a run leaves behind, and how they are written so that none is ever half there.

Streams, such as ``metrics.jsonl`` with one line a step, grow under another name and get their own at the end;
``summary.json`` is written beside and renamed. Whatever kills the process, a directory holds whole files or files
named ``.partial``; then ``summary.json.partial`` says what was to be trained. Numbers that JSON cannot write are the
texts ``"nan"``, ``"inf"`` and ``"-inf"``, which ``float()`` reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, Self

from mezzo.documents import jsonable
from mezzo.errors import PolicyError, some_of
from mezzo.files import is_partial, whole
from mezzo.numerics.evidence_file import FILE as EVIDENCE
from mezzo.numerics.evidence_file import PARTIAL
from mezzo.policy import Policy
from mezzo.recipes.rank_meter import RankStep
from mezzo.recipes.training import RunResult, StepRecord

__all__ = [
    "CURVES", "EVIDENCE", "EXPLANATION", "METRICS", "PAGE", "PARTIAL", "POLICY", "SUMMARY", "RankLog", "RunDirectory",
    "rank_files",
]  # fmt: skip

SUMMARY: Final = "summary.json"
METRICS: Final = "metrics.jsonl"
#: What only ``mezzo inspect`` writes beside the evidence: each op's precision; the policy.
EXPLANATION: Final = "explanation.json"
POLICY: Final = "found.policy"
#: Made from the others, again whenever they change.
CURVES: Final = "curves.png"
PAGE: Final = "report.html"
_FILES: Final = (SUMMARY, METRICS, EVIDENCE, EXPLANATION, POLICY, CURVES, PAGE)
#: What each rank of a parallel training writes for itself.
_RANK_FILE: Final = re.compile(r"metrics\.rank(\d{1,9})\.jsonl")


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
        self._steps: IO[str] | None = None
        self._begun: dict[str, str] = {}
        if path.exists() and not path.is_dir():
            raise PolicyError("the run directory is a file", where=str(path), write=f"--out {path}-run")
        names = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
        if foreign := [name for name in names if not _is_ours(name) and not is_partial(name)]:
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

    def begin(self, facts: Mapping[str, Any], texts: Mapping[str, str] = MappingProxyType({})) -> None:
        """Take what is known before the first step, with which it is written.

        Args:
            facts: The summary of no step at all, for readers of a run that is killed.
            texts: Further files, whole, by name.
        """
        self._begun = {SUMMARY: _text(facts), **texts}

    def started(self, policy: Policy, steps: int) -> None:
        """Write nothing: a directory is made for the first step."""

    def ended(self, result: RunResult) -> None:
        """Write nothing: results are written together, by :meth:`finish`."""

    def stepped(self, record: StepRecord) -> None:
        """Append one step; it is handed to the system at once."""
        self.open()
        assert self._steps is not None, "open() has opened it"
        self._steps.write(record_text(record))

    def finish(self, summary: Mapping[str, Any], made: Collection[str] = ()) -> None:
        """Write the summary, give every file its name, and remove what an older run left here.

        Args:
            summary: What ``summary.json`` holds.
            made: Files of this run that others wrote, and have given their names already.
        """
        self.open()
        self.close()
        # First the summary, so that none is ever beside files of another run; and pictures show old numbers.
        names = (*_FILES, *(name for _, name in rank_files(self.path)))
        for name in names:
            if name not in made:
                (self.path / name).unlink(missing_ok=True)
        for name in names:
            if name != SUMMARY and self._partial(name).exists():
                os.replace(self._partial(name), self.path / name)
        with whole(self.path / SUMMARY) as file:
            file.write(_text(summary).encode())
        self._partial(SUMMARY).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the steps' file; without :meth:`finish` it keeps its ``.partial`` name."""
        if self._steps is not None:
            self._steps.close()

    def open(self) -> Path:
        """Make the directory, if there is none yet, and write what is known; what a killed run left is gone."""
        if self._steps is not None:
            return self.path
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (*_FILES, *(name for _, name in rank_files(self.path))):
            self._partial(name).unlink(missing_ok=True)
        for name, text in self._begun.items():
            self._partial(name).write_text(text, encoding="utf-8")
        self._steps = _growing(self._partial(METRICS))
        return self.path

    def _partial(self, name: str) -> Path:
        return self.path / (name + PARTIAL)


def rank_files(directory: Path) -> Iterator[tuple[int, str]]:
    """Yield the ranks that left files in a directory, finished or not, with the files' names, in order."""
    names = {path.name.removesuffix(PARTIAL) for path in directory.glob("metrics.rank*")}
    found = [(int(match[1]), name) for name in names if (match := _RANK_FILE.fullmatch(name))]
    yield from sorted(found)


def _is_ours(name: str) -> bool:
    name = name.removesuffix(PARTIAL)
    return name in _FILES or _RANK_FILE.fullmatch(name) is not None


class RankLog:
    """The file of one rank's lines, which grows under another name until the run is summed up."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._steps = _growing(directory / f"metrics.rank{rank}.jsonl{PARTIAL}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.close()

    def write(self, record: RankStep) -> None:
        """Append one line; it is handed to the system at once."""
        self._steps.write(record_text(record))


def _growing(path: Path) -> IO[str]:
    return path.open("w", buffering=1, encoding="utf-8")


def record_text(record: StepRecord | RankStep) -> str:
    """Return one line of a stream, with its end."""
    return f"{json.dumps(jsonable(dataclasses.asdict(record)), allow_nan=False)}\n"


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(data), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
