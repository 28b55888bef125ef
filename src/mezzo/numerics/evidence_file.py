r"""How evidence is kept in a file: one JSON object a line, so that a run can be followed while it goes on.

The file is called ``evidence.jsonl`` in a run directory, and ``evidence.jsonl.partial`` until the run has ended. Its
lines, by example (wrapped here):

The first says of what it is::

    {"schema": 1, "mezzo": "0.1.0", "model": "ByteGPT", "policy": "O1", "compute_dtype": "float16",
     "loss_scale": "dynamic", "every": 50, "kinds": ["weights", …], "formats": ["float16", …],
     "modules": [{"path": "blocks.0.up", "type": "Linear", "parameters": {"weight": "float32"},
                  "same_as": "blocks.1.up" (optional), "tied": {"weight": "embed.weight"} (optional)}, …]}

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

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import torch

from mezzo.errors import PolicyError, StateError, shown
from mezzo.files import opened, regular_or_new, whole
from mezzo.formats import by_name
from mezzo.numerics.counting import BINS, FIRST, INFS, LARGEST, NANS, ROW, ZEROS
from mezzo.numerics.evidence import (
    KINDS,
    Evidence,
    EvidenceHeader,
    RecordedModule,
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

_SWALLOWED: Final = ("updated", "beyond", "with_gradient", "unmoved")

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

    def write(self, header: EvidenceHeader, step: RecordedStep | None = None) -> None:
        """Write a step, after the header if it is the first; the line is handed to the system at once."""
        if self._lines is None:
            self._lines = self._partial.open("w", buffering=1, encoding="utf-8")
            self._lines.write(_header_line(header))
        if step is not None:
            self._lines.write(_step_line(step))

    def end(self, header: EvidenceHeader, num_steps: int) -> None:
        """Say that the run has ended, and give the file its name."""
        self.write(header)
        assert self._lines is not None, "write() has opened it"
        self._lines.write(_end_line(num_steps))
        self.close()
        with whole(self._path) as file, self._partial.open("rb") as partial:
            shutil.copyfileobj(partial, file)
        self._partial.unlink()

    def close(self) -> None:
        """Leave the file as it is, under its partial name."""
        if self._lines is not None:
            self._lines.close()


def _header_line(header: EvidenceHeader) -> str:
    """Return the first line of a file."""
    modules = [
        {"path": each.path, "type": each.type, "parameters": dict(each.parameters)}
        | ({} if each.same_as is None else {"same_as": each.same_as})
        | ({"tied": dict(each.tied)} if each.tied else {})
        for each in header.modules
    ]
    plain = {name: getattr(header, name) for name in ("mezzo", "model", "policy", "compute_dtype", "loss_scale")}
    lists = {"kinds": list(header.kinds), "formats": list(header.formats), "modules": modules}
    return _line({"schema": SCHEMA, **plain, "every": header.every, **lists})


def _step_line(step: RecordedStep) -> str:
    """Return the line of a recorded step."""
    return _line(
        {
            "step": step.step,
            "loss_scales": [scale if math.isfinite(scale) else str(scale) for scale in step.loss_scales],
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
    if (lost := recorded.swallowed) is not None:
        plain = {name: getattr(lost, name) for name in _SWALLOWED}
        found["swallowed"] = {**plain, "by_format": dict(lost.swallowed)}
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
            num_steps, is_partial = _checked(file, number, lambda line: _count(line, "num_steps"), value), False
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
    except (_Wrong, PolicyError) as wrong:
        raise _broken(file, line, str(wrong).partition("\n")[0]) from None


class _Wrong(Exception):  # noqa: N818 - it never leaves this file
    """What is wrong with a line, in words."""


def _header(line: dict[str, Any]) -> EvidenceHeader:
    schema = _count(line, "schema")
    if schema != SCHEMA:
        raise _Wrong(f"it has schema {schema}, and this version of mezzo reads schema {SCHEMA}")
    Policy.parse("O0" if line.get("policy") is None else _text(line, "policy"))  # raises if it is none
    return EvidenceHeader(
        mezzo=_text(line, "mezzo"),
        model=_text(line, "model"),
        policy=None if line.get("policy") is None else _text(line, "policy"),
        compute_dtype=None if line.get("compute_dtype") is None else _text(line, "compute_dtype"),
        loss_scale=_text(line, "loss_scale"),
        every=_count(line, "every"),
        kinds=tuple(_kind(each) for each in _of(line, "kinds", list)),
        formats=tuple(by_name(_plain(each, str, "a format")).name for each in _of(line, "formats", list)),
        modules=tuple(_module(_plain(each, dict, "a module")) for each in _of(line, "modules", list)),
    )


def _module(value: dict[str, Any]) -> RecordedModule:
    return RecordedModule(
        path=_text(value, "path"),
        type=_text(value, "type"),
        parameters=_texts(value, "parameters"),
        same_as=_text(value, "same_as") if "same_as" in value else None,
        tied=_texts(value, "tied") if "tied" in value else {},
    )


def _step(line: dict[str, Any]) -> RecordedStep:
    return RecordedStep(
        step=_count(line, "step"),
        loss_scales=tuple(_number(each, "a loss scale") for each in _of(line, "loss_scales", list)),
        skipped=_of(line, "skipped", bool),
        tensors=tuple(_recorded(_plain(each, dict, "a tensor")) for each in _of(line, "tensors", list)),
    )


def _recorded(value: dict[str, Any]) -> RecordedTensor:
    kind = _kind(value.get("kind"))
    lost = _of(value, "swallowed", dict) if kind == "updates" else None
    return RecordedTensor(
        kind=kind,
        module=_text(value, "module"),
        name=_text(value, "name"),
        dtype=_text(value, "dtype"),
        histogram=_histogram(value),
        swallowed=None
        if lost is None
        else SwallowedUpdates(
            **{name: _count(lost, name) for name in _SWALLOWED},
            swallowed={name: _whole(count, name) for name, count in _of(lost, "by_format", dict).items()},
        ),
    )


def _histogram(value: dict[str, Any]) -> ExponentHistogram:
    numbers = [0] * ROW
    for place, count in _bins(value, "counts"):
        numbers[place] = count
    for place, count in _bins(value, "powers"):
        if count > numbers[place]:
            raise _Wrong(f"2^{FIRST + place} has {count} powers of two among {numbers[place]} values")
        numbers[place], numbers[BINS + place] = numbers[place] - count, count
    numbers[ZEROS], numbers[INFS], numbers[NANS] = (_count(value, name) for name in ("zeros", "infs", "nans"))
    largest = torch.tensor(_number(value.get("max_abs"), "max_abs"), dtype=torch.float32)
    if not 0.0 <= largest < math.inf:
        raise _Wrong(f"max_abs is {shown(value['max_abs'])}, not a finite magnitude")
    numbers[LARGEST] = int(largest.view(torch.int32))
    return ExponentHistogram(torch.tensor(numbers, dtype=torch.int64))


def _bins(value: dict[str, Any], name: str) -> Iterable[tuple[int, int]]:
    for exponent, count in _of(value, name, dict).items():
        try:
            place = int(exponent) - FIRST
        except ValueError:
            place = -1
        if not 0 <= place < BINS:
            raise _Wrong(f"{name} has the exponent {shown(exponent)}, which is not from {FIRST} to {FIRST + BINS - 1}")
        yield place, _whole(count, f"{name} of 2^{exponent}")


# Values of a line -------------------------------------------------------------------------------------------


def _of(value: dict[str, Any], name: str, kind: type[T]) -> T:
    if name not in value:
        raise _Wrong(f"it has no {name}")
    return _plain(value[name], kind, name)


def _plain(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind):
        words = {str: "text", list: "a list", dict: "an object", bool: "true or false"}
        raise _Wrong(f"{name} is {shown(value)}, not {words[kind]}")
    return value


def _text(value: dict[str, Any], name: str) -> str:
    return _of(value, name, str)


def _texts(value: dict[str, Any], name: str) -> dict[str, str]:
    return {key: _plain(each, str, f"{name} {key}") for key, each in _of(value, name, dict).items()}


def _kind(value: Any) -> str:
    if value not in KINDS:
        raise _Wrong(f"{shown(value)} is no kind of tensors")
    return str(value)


def _count(value: dict[str, Any], name: str) -> int:
    if name not in value:
        raise _Wrong(f"it has no {name}")
    return _whole(value[name], name)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _Wrong(f"{name} is {shown(value)}, not a count")
    return value


def _number(value: Any, name: str) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**1023:
        raise _Wrong(f"{name} is {shown(value)}, not a number")
    return float(value)
