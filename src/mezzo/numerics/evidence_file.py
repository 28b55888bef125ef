r"""How evidence is kept in a file: one JSON object a line, so that a run can be followed while it goes on.

The file is called ``evidence.jsonl`` in a run directory, and ``evidence.jsonl.partial`` until the run has ended. Its
lines, by example (wrapped here):

The first says of what it is::

    {"schema": 1, "mezzo": "0.1.0", "model": "ByteGPT", "policy": "O1", "compute_dtype": "float16",
     "loss_scale": "dynamic", "every": 50, "kinds": ["weights", …], "formats": ["float16", …],
     "modules": [{"path": "blocks.0.up", "type": "Linear", "parameters": {"weight": "float32"},
                  "same_as": "blocks.1.up" or null, "tied": {"weight": "embed.weight"}}, …]}

then one for each recorded step::

    {"step": 51, "loss_scales": [65536.0], "skipped": false, "tensors": [
      {"kind": "updates", "module": "blocks.0.up", "name": "weight", "dtype": "float32",
       "counts": {"-12": 4031, …}, "powers": {"-12": 2, …}, "zeros": 0, "infs": 0, "nans": 0, "max_abs": 0.0025,
       "swallowed": {"updated": 65536, "beyond": 120, "with_gradient": 65536, "unmoved": 0,
                     "by_format": {"bfloat16": 7031, …}} (of updates)}, …]}

and at the end of a run that was not interrupted::

    {"end": true, "num_steps": 1200}

``counts`` has the values with floor(log2\|x\|) == exponent. ``powers`` has those of them that are exactly a power of
two: formats end at such numbers, and only so is it known on which side of a limit they lie. Exponents without values
are left out. Numbers that JSON cannot write are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import torch

from mezzo.documents import built, jsonable
from mezzo.errors import StateError, shown
from mezzo.files import growing, opened, regular_or_new, whole
from mezzo.formats import by_name
from mezzo.numerics.counting import BINS, FIRST, INFS, LARGEST, NANS, ROW, ZEROS
from mezzo.numerics.evidence import (
    KINDS,
    Evidence,
    EvidenceHeader,
    RecordedStep,
    RecordedTensor,
    SwallowedUpdates,
)
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy

__all__ = ["FILE", "PARTIAL", "SCHEMA", "EvidenceStream", "read", "write"]

FILE: Final = "evidence.jsonl"
#: What the file's name ends with while its run goes on, and ever after where it was interrupted.
PARTIAL: Final = ".partial"
SCHEMA: Final = 1

T = TypeVar("T")


# Writing ----------------------------------------------------------------------------------------------------


def write(evidence: Evidence, path: str | os.PathLike[str]) -> None:
    """Write a file that :func:`read` reads; it appears whole or not at all.

    Args:
        evidence: What to write.
        path: The file.

    Raises:
        OSError: It cannot be written.
    """
    lines = [_header_line(evidence.header), *map(_step_line, evidence.steps)]
    if not evidence.is_partial:
        lines.append(_end_line(evidence.num_steps))
    with whole(path) as file:
        file.writelines(line.encode() for line in lines)


class EvidenceStream:
    """A file of evidence that grows line by line, and gets its name at the end.

    Args:
        path: The file, or a run directory for it. Until the end its name has :data:`PARTIAL` behind it.

    Raises:
        OSError: No file can be written there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        self._path = file / FILE if file.is_dir() else file
        self._partial = self._path.with_name(self._path.name + PARTIAL)
        for each in (self._path, self._partial):
            regular_or_new(each)
        self._lines: IO[str] | None = None

    def begin(self) -> None:
        """Open the file, under its partial name.

        Raises:
            OSError: It cannot be written, or another stream, perhaps another rank's, has it open.
        """
        self._lines = growing(self._partial)

    def write(self, header: EvidenceHeader, step: RecordedStep | None = None) -> None:
        """Write a step, after the header if it is the first; the line is handed to the system at once."""
        assert self._lines is not None, "begin() has opened it"
        if not self._lines.tell():
            self._lines.write(_header_line(header))
        if step is not None:
            self._lines.write(_step_line(step))

    def end(self, header: EvidenceHeader, num_steps: int) -> None:
        """Say that the run has ended, and give the file its name."""
        self.write(header)
        assert self._lines is not None, "begin() has opened it"
        self._lines.write(_end_line(num_steps))
        self.close()
        with whole(self._path) as file, self._partial.open("rb") as partial:
            shutil.copyfileobj(partial, file)
        self._partial.unlink()

    def close(self) -> None:
        """Leave the file as it is, under its partial name, or none where nothing was written."""
        if self._lines is not None:
            if not self._lines.tell():
                self._partial.unlink(missing_ok=True)
            self._lines.close()


def _header_line(header: EvidenceHeader) -> str:
    """Return the first line of a file."""
    return _line({"schema": SCHEMA, **dataclasses.asdict(header)})


def _step_line(step: RecordedStep) -> str:
    """Return the line of a recorded step."""
    return _line(
        {
            "step": step.step,
            "loss_scales": jsonable(step.loss_scales),
            "skipped": step.skipped,
            "tensors": [_tensor(each) for each in step.tensors],
        }
    )


def _end_line(num_steps: int) -> str:
    """Return the last line of a run that was not interrupted."""
    return _line({"end": True, "num_steps": num_steps})


def _tensor(recorded: RecordedTensor) -> dict[str, Any]:
    numbers, histogram = recorded.histogram.numbers, recorded.histogram
    powers = {str(FIRST + place): count for place, count in enumerate(numbers[BINS : 2 * BINS]) if count}
    counts = {str(FIRST + p): numbers[p] + numbers[BINS + p] for p in range(BINS) if numbers[p] or numbers[BINS + p]}
    found: dict[str, Any] = {
        "kind": recorded.kind, "module": recorded.module, "name": recorded.name, "dtype": recorded.dtype,
        "counts": counts, "powers": powers, "zeros": histogram.zeros, "infs": histogram.infs, "nans": histogram.nans,
        "max_abs": histogram.max_abs,
    }  # fmt: skip
    if recorded.swallowed is not None:
        lost = dataclasses.asdict(recorded.swallowed)
        lost["by_format"] = lost.pop("swallowed")
        found["swallowed"] = lost
    return found


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


# Reading ----------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Evidence:
    """Read what a recorder wrote.

    A last line that is cut off, or no line that says that the run has ended, makes the evidence partial.

    Args:
        path: The file, or the run directory that holds it.

    Raises:
        StateError: There is no such file, it is broken, or a newer version of mezzo wrote it; the message names file
            and line.
    """
    file = Path(path)
    if file.is_dir():
        ended = file / FILE
        file = ended if ended.exists() or not (file / (FILE + PARTIAL)).exists() else file / (FILE + PARTIAL)
    try:
        with opened(file) as stream:
            text = stream.read()
    except FileNotFoundError as error:
        raise StateError(
            "there is no evidence here",
            where=str(file),
            write="with Recorder(model, optimizer, stream=path) as recorder: …, or recorder.save(path)",
        ) from error
    except OSError as error:
        raise StateError("the evidence cannot be read", where=str(file), why=str(error)) from error
    return _parsed(file, text)


def _parsed(file: Path, text: bytes) -> Evidence:
    lines = list(_values(file, text))
    if not lines:
        raise _broken(file, 1, "it has no whole first line, which says what was recorded")
    header = _checked(file, 1, _header, lines[0])
    num_steps, is_partial = 0, True
    steps: list[RecordedStep] = []
    for number, value in enumerate(lines[1:], start=2):
        if not is_partial:
            raise _broken(file, number, "the line before it ends the file")
        if "end" in value:
            num_steps, is_partial = _checked(file, number, partial(built, _EndLine), value).num_steps, False
            continue
        step = _checked(file, number, _step, value)
        if steps and step.step <= steps[-1].step:
            raise _broken(file, number, f"step {step.step} after step {steps[-1].step}")
        steps.append(step)
    last = steps[-1].step if steps else 0
    return Evidence(header=header, steps=tuple(steps), num_steps=max(num_steps, last), is_partial=is_partial)


def _values(file: Path, text: bytes) -> Iterator[dict[str, Any]]:
    """Yield what the lines hold; one that a run was interrupted in is left out."""
    lines = text.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line:
            return
        try:
            value = json.loads(line.decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # without a line break: cut off
                return
            raise _broken(file, number, f"it is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise _broken(file, number, f"it is {shown(value)}, not an object")
        yield value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _broken(file: Path, line: int, why: str) -> StateError:
    return StateError("the evidence cannot be read", where=f"{file}, line {line}", why=why)


def _checked(file: Path, line: int, make: Callable[[dict[str, Any]], T], value: dict[str, Any]) -> T:
    try:
        return make(value)
    except ValueError as wrong:
        raise _broken(file, line, str(wrong).partition("\n")[0]) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LostLine:
    """What a line has for :class:`SwallowedUpdates`."""

    updated: int
    beyond: int
    with_gradient: int
    unmoved: int
    by_format: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorLine:
    """What a line has for a :class:`RecordedTensor`."""

    kind: str
    module: str
    name: str
    dtype: str
    counts: Mapping[str, int]
    powers: Mapping[str, int]
    zeros: int
    infs: int
    nans: int
    max_abs: float
    swallowed: _LostLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepLine:
    """The line of a :class:`RecordedStep`."""

    step: int
    loss_scales: tuple[float, ...]
    skipped: bool
    tensors: tuple[_TensorLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndLine:
    """The last line."""

    end: bool
    num_steps: int


def _header(line: dict[str, Any]) -> EvidenceHeader:
    if (schema := line.pop("schema", None)) != SCHEMA:
        raise ValueError(f"it has schema {shown(schema)}, and this version of mezzo reads schema {SCHEMA}")
    header = built(EvidenceHeader, line)
    Policy.parse(header.policy or "O0")  # raises if it is none
    _require_kinds(header.kinds)
    return dataclasses.replace(header, formats=tuple(by_name(each).name for each in header.formats))


def _require_kinds(kinds: Iterable[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{shown(kind)} is no kind of tensors")


def _step(line: dict[str, Any]) -> RecordedStep:
    found = built(_StepLine, line)
    tensors = tuple(_recorded(each) for each in found.tensors)
    return RecordedStep(step=found.step, loss_scales=found.loss_scales, skipped=found.skipped, tensors=tensors)


def _recorded(line: _TensorLine) -> RecordedTensor:
    _require_kinds([line.kind])
    lost = None
    if line.kind == "updates":
        if line.swallowed is None:
            raise ValueError(f"it has no swallowed of {shown(line.name)}")
        fields = dataclasses.asdict(line.swallowed)
        lost = SwallowedUpdates(swallowed=fields.pop("by_format"), **fields)
    named = {name: getattr(line, name) for name in ("kind", "module", "name", "dtype")}
    return RecordedTensor(histogram=_histogram(line), swallowed=lost, **named)


def _histogram(line: _TensorLine) -> ExponentHistogram:
    numbers = [0] * ROW
    for place, count in _bins("counts", line.counts):
        numbers[place] = count
    for place, count in _bins("powers", line.powers):
        if count > numbers[place]:
            raise ValueError(f"2^{FIRST + place} has {count} powers of two among {numbers[place]} values")
        numbers[place], numbers[BINS + place] = numbers[place] - count, count
    numbers[ZEROS], numbers[INFS], numbers[NANS] = line.zeros, line.infs, line.nans
    largest = torch.tensor(line.max_abs, dtype=torch.float32)
    if not 0.0 <= largest < math.inf:
        raise ValueError(f"max_abs is {line.max_abs}, not a finite magnitude")
    numbers[LARGEST] = int(largest.view(torch.int32))
    return ExponentHistogram(torch.tensor(numbers, dtype=torch.int64))


def _bins(name: str, counts: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    for exponent, count in counts.items():
        try:
            place = int(exponent) - FIRST
        except ValueError:
            place = -1
        if not 0 <= place < BINS:
            raise ValueError(
                f"{name} has the exponent {shown(exponent)}, which is not from {FIRST} to {FIRST + BINS - 1}"
            )
        yield place, count
