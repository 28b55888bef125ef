r"""How evidence is kept in a file: one JSON object a line, so that a run can be followed while it goes on.

Its lines, by example (wrapped here). The first says of what it is::

    {"schema": 2, "mezzo": "0.1.0", "model": "ByteGPT", "policy": "O1", "compute_dtype": "float16",
     "loss_scale": "dynamic", "every": 50, "kinds": ["weights", …], "formats": ["float16", …],
     "modules": [{"path": "blocks.0.up", "type": "Linear", "parameters": {"weight": "float32"},
                  "same_as": "blocks.1.up" or null, "tied": {"weight": "embed.weight"}}, …]}

then one for each recorded step::

    {"step": 51, "loss_scales": [65536.0], "skipped": false, "tensors": [
      {"kind": "updates", "module": "blocks.0.up", "name": "weight", "dtype": "float32",
       "counts": {"-12": 4031, …}, "powers": {"-12": 2, …}, "zeros": 0, "infs": 0, "nans": 0, "max_abs": 0.0025,
       "swallowed": {"updated": 65536, "beyond": 120, "with_gradient": 65536, "unmoved": 0,
                     "swallowed": {"bfloat16": 7031, …}} (null but for updates)}, …]}

``counts`` has the values with 2^k < \|x\| < 2^(k+1), by k, and ``powers`` those that are exactly 2^k: formats end at
powers of two, and only so is it known on which side of a limit they lie. Exponents without values are left out. Numbers
that JSON cannot write are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from mezzo.documents import jsonable
from mezzo.errors import StateError
from mezzo.files import whole
from mezzo.numerics.counting import BINS, FIRST, INFS, LARGEST, NANS, ROW, ZEROS
from mezzo.numerics.evidence import (
    Evidence,
    EvidenceHeader,
    RecordedModule,
    RecordedStep,
    RecordedTensor,
    SwallowedUpdates,
)
from mezzo.numerics.histogram import ExponentHistogram

#: What the file is called in a folder of results.
FILE: Final = "evidence.jsonl"
SCHEMA: Final = 2


def write(evidence: Evidence, path: str | os.PathLike[str]) -> None:
    """Write a file that :func:`read` reads; it appears whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    lines = [_line({"schema": SCHEMA, **dataclasses.asdict(evidence.header)}), *map(_step_line, evidence.steps)]
    with whole(path) as file:
        file.writelines(line.encode() for line in lines)


def write_step(file: IO[str], header: EvidenceHeader, step: RecordedStep) -> None:
    """Write a step at the end of a file, after the header if it is the first; the system has it at once."""
    if not file.tell():
        file.write(_line({"schema": SCHEMA, **dataclasses.asdict(header)}))
    file.write(_step_line(step))
    file.flush()


def _step_line(step: RecordedStep) -> str:
    return _line(dataclasses.asdict(dataclasses.replace(step, tensors=())) | {"tensors": [*map(_tensor, step.tensors)]})


def _tensor(recorded: RecordedTensor) -> dict[str, Any]:
    numbers, histogram, lost = recorded.histogram.numbers, recorded.histogram, recorded.swallowed
    counts, powers = (
        {str(FIRST + place): count for place, count in enumerate(numbers[start : start + BINS]) if count}
        for start in (0, BINS)
    )
    return {
        "kind": recorded.kind, "module": recorded.module, "name": recorded.name, "dtype": recorded.dtype,
        "counts": counts, "powers": powers, "zeros": histogram.zeros, "infs": histogram.infs, "nans": histogram.nans,
        "max_abs": histogram.max_abs, "swallowed": None if lost is None else dataclasses.asdict(lost),
    }  # fmt: skip


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def read(path: str | os.PathLike[str]) -> Evidence:
    """Read what a recorder wrote; a last line that a run was killed in is left out.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        StateError: There is no such file, it is damaged, or another version of mezzo wrote it; the message names file
            and line.
    """
    file, number = Path(path), 1
    file = file / FILE if file.is_dir() else file
    try:
        first, *others = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
        header = _header(json.loads(first))
        steps = list[RecordedStep]()
        for number, line in enumerate(others, start=2):  # noqa: B007  (an error names it)
            if line.endswith("\n"):
                steps.append(_step(json.loads(line)))
    except OSError as error:
        write = "with Recorder(model, optimizer, stream=path) as recorder: …, or recorder.save(path)"
        raise StateError("there is no evidence here", where=str(file), why=str(error.strerror), write=write) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        where, why = f"{file}, line {number}", str(error).partition("\n")[0]
        raise StateError("the evidence cannot be read", where=where, why=why) from error
    return Evidence(header=header, steps=tuple(steps), num_steps=steps[-1].step if steps else 0)


def _header(line: dict[str, Any]) -> EvidenceHeader:
    if (schema := line.pop("schema", None)) != SCHEMA:
        raise ValueError(f"it has schema {schema!r}, and this version of mezzo reads schema {SCHEMA}")
    modules = tuple(RecordedModule(**each) for each in line["modules"])
    lists = {name: tuple(line[name]) for name in ("kinds", "formats")}
    return EvidenceHeader(**{**line, **lists, "modules": modules})


def _step(line: dict[str, Any]) -> RecordedStep:
    scales, tensors = tuple(map(float, line["loss_scales"])), tuple(map(_tensor_of, line["tensors"]))
    return RecordedStep(**{**line, "loss_scales": scales, "tensors": tensors})


def _tensor_of(line: dict[str, Any]) -> RecordedTensor:
    numbers = [0] * ROW
    for start, name in ((0, "counts"), (BINS, "powers")):
        for exponent, count in line[name].items():
            numbers[start + int(exponent) - FIRST] = count
    numbers[ZEROS], numbers[INFS], numbers[NANS] = line["zeros"], line["infs"], line["nans"]
    numbers[LARGEST] = int(torch.tensor(line["max_abs"], dtype=torch.float32).view(torch.int32))
    lost = line["swallowed"]
    return RecordedTensor(
        **{name: line[name] for name in ("kind", "module", "name", "dtype")},
        histogram=ExponentHistogram(torch.tensor(numbers, dtype=torch.int64)),
        swallowed=None if lost is None else SwallowedUpdates(**lost),
    )
