"""What a script's run tells of each step, and the file that holds it."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mezzo.documents import jsonable
from mezzo.errors import PolicyError

__all__ = ["METRICS", "StepRecord", "never_trains", "read_steps", "require_one_process", "step_ms"]

#: The file with one line of JSON a step, in a folder of results.
METRICS: Final = "metrics.jsonl"
#: Steps at the start that are not timed: allocators, thread pools and kernel choices settle in them.
UNTIMED_STEPS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, as one line of ``metrics.jsonl``.

    Attributes:
        step: From 1.
        loss: The training loss before the step, unscaled.
        scale: The loss scale used in this step.
        skipped: Whether the weights were left alone because a gradient was not finite.
        grad_norm: Global norm of the unscaled gradients before clipping.
        ms: Wall time since the step before, in milliseconds.
    """

    step: int
    loss: float
    scale: float
    skipped: bool
    grad_norm: float
    ms: float

    @property
    def line(self) -> str:
        """The record as a line of JSON, with its end; numbers that are not finite are texts."""
        return f"{json.dumps(jsonable(dataclasses.asdict(self)), allow_nan=False)}\n"


def read_steps(path: Path) -> list[StepRecord]:
    """Read a file of :attr:`StepRecord.line`; of one whose writer was killed, all whole lines."""
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            read = json.loads(line)
            numbers = {name: float(read[name]) for name in ("loss", "scale", "grad_norm", "ms")}  # "nan" and "inf", too
            records.append(StepRecord(**read | numbers))
    return records


def step_ms(records: Sequence[StepRecord]) -> tuple[float, float, float] | None:
    """Return the 10th, 50th and 90th percentile of the time of a step; ``None`` for a run too short to have one."""
    times = [record.ms for record in records if record.step > UNTIMED_STEPS]
    if len(times) < 2:
        return None
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[0], statistics.median(times), tenths[-1]


def never_trains(program: str, left_alone: Mapping[str, str]) -> PolicyError:
    """Return the error of a script without a step, with what was left alone and why."""
    return PolicyError(
        f"{program} never trains: no optimizer over a module's parameters took a step",
        why="\n".join(f"{what}: {why}" for what, why in left_alone.items()),
        write="a script that calls loss.backward() and optimizer.step()",
    )


def require_one_process(verb: str) -> None:
    """Refuse a verb that works in one process where several were started.

    Raises:
        PolicyError: They would do the same work, and write the same files.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise PolicyError(
            f"mezzo {verb} works in one process, and {size} were started",
            where=f"rank {os.environ.get('RANK', '0')} of {size}",
            why="all of them would do the same, and write the same files",
            write=f"mezzo {verb} …, without torchrun",
        )
