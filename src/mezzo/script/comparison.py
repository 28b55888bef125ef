"""``mezzo.script.compare``: one script under several policies, each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mezzo.errors import PolicyError, StateError
from mezzo.machine import default_device, describe
from mezzo.numerics.footprint import StateBytes
from mezzo.policy import Policy
from mezzo.recipes import Comparison, Metric, RunResult, StepRecord
from mezzo.recipes.comparison import parse_policies
from mezzo.recipes.parallel import require_one_process
from mezzo.recipes.run_directory import RunDirectory
from mezzo.recipes.training import step_ms
from mezzo.script.program import Program

__all__ = ["ScriptEnd", "begun", "compare", "never_trains", "result_of", "summed_up"]

#: The share of a run's steps, at its end, whose losses are averaged.
_TAIL: Final = 0.1
#: Digits of a loss that are shown.
_DIGITS: Final = 5
#: What ``mezzo run`` ends with besides the script's own codes: it went well, and it went well in FP32.
_WELL: Final = (0, 4)
_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """A run that has ended.

    Attributes:
        code: Its exit code.
        report: Its report, as JSON has it; empty where there is none.
        records: Its steps.
    """

    code: int
    report: dict[str, Any]
    records: list[StepRecord]


def compare(
    program: Program,
    policies: Sequence[Policy | str],
    *,
    steps: int | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    begins: Callable[[Policy], None] = lambda policy: None,
) -> Comparison:
    """Run a script in FP32 and under each policy, each time in a process of its own, and compare their losses.

    Each run is the script as the interpreter would run it, one after the other, in the same working directory and with
    the same arguments: it writes where the script writes, and is alike as far as the script seeds its random numbers.
    What it prints goes to stderr.

    Args:
        program: The script.
        policies: Policies, their texts, or paths of policy files, each once; FP32 is put in front if it is missing.
        steps: After how many steps each run is ended; by itself when omitted.
        out: Directory for ``summary.json`` and ``metrics.jsonl``; nothing is written when ``None``.
        overwrite: Whether a run that is in ``out`` may be replaced.
        begins: Told of each policy before its run.

    Returns:
        The comparison. Its metric is the mean of the losses that backward passes began with in the last tenth of the
        steps; ``seed`` is ``None``.

    Raises:
        PolicyError: Policies or directory make no sense, or the script never trains.
        StateError: The script does not come to its end in FP32.
    """
    require_one_process("compare")
    parsed = parse_policies(policies)
    if not any(str(policy) == "O0" for policy in parsed):
        parsed = [Policy.O0(), *parsed]
    directory = None if out is None else RunDirectory(out, overwrite=overwrite)
    comparison = begun(program, parsed, steps, directory)
    if directory is not None:
        directory.begin(comparison.to_dict())
    rows = list[RunResult]()
    try:
        for ended, row in _rows(program, parsed, steps, begins):
            if directory is not None:
                for record in ended.records:
                    directory.stepped(record)
            rows.append(row)
    finally:
        if directory is not None:
            directory.close()
    comparison = summed_up(comparison, rows)
    if directory is not None:
        directory.finish(comparison.to_dict())
    return comparison


def begun(
    program: Program, policies: Sequence[Policy], steps: int | None, directory: RunDirectory | None
) -> Comparison:
    """Return a comparison before its first step."""
    name = shlex.join([*(["-m"] if program.is_module else []), program.name, *program.arguments])
    return Comparison(
        recipe=name,
        summary="a script as it is; its final loss is the mean of the last tenth of the steps",
        metric=_metric(math.nan),
        steps=steps or 0,
        machine=describe(default_device()),
        policies=tuple(map(str, policies)),
        directory=None if directory is None else directory.path,
    )


def summed_up(comparison: Comparison, rows: Sequence[RunResult]) -> Comparison:
    """Return a comparison with its results; FP32's, or else the first, say how long it was and how large losses are."""
    base = next((row for row in rows if row.policy == "O0"), rows[0])
    return dataclasses.replace(comparison, steps=base.steps, metric=_metric(base.final_metric)).ended(tuple(rows))


def _rows(
    program: Program, policies: Sequence[Policy], steps: int | None, begins: Callable[[Policy], None]
) -> Iterator[tuple[ScriptEnd, RunResult]]:
    """Run the script under one policy after the other, FP32 first, until the user interrupts."""
    for policy in sorted(policies, key=lambda each: str(each) != "O0"):
        begins(policy)
        ended = _run(program, policy, steps)
        if str(policy) == "O0" and ended.code != _INTERRUPTED:
            _require_trained(program, ended)
        yield ended, result_of(str(policy), ended)
        if ended.code == _INTERRUPTED:
            return


def _run(program: Program, policy: Policy, steps: int | None) -> ScriptEnd:
    """Run ``mezzo run`` in a process of its own, and read what it has written."""
    with tempfile.TemporaryDirectory(prefix="mezzo-") as folder:
        report, metrics = Path(folder) / "report.json", Path(folder) / "metrics.jsonl"
        options = ["--policy", str(policy), "--json", str(report), "--metrics", str(metrics)]
        options += [] if steps is None else ["--steps", str(steps)]
        options += ["-m"] if program.is_module else []
        words = [sys.executable, "-m", "mezzo", "run", *options, program.name, *program.arguments]
        with subprocess.Popen(words, stdout=2) as process:  # where messages go
            try:
                code = process.wait()
            except KeyboardInterrupt:  # which the process has got, too
                process.wait()
                code = _INTERRUPTED
        return ScriptEnd(
            code=code,
            report=json.loads(report.read_text()) if report.exists() else {},
            records=list(map(_record, metrics.read_text().splitlines())) if metrics.exists() else [],
        )


def _record(line: str) -> StepRecord:
    read = json.loads(line)
    numbers = {name: float(read[name]) for name in ("loss", "scale", "grad_norm", "ms")}  # "nan" and "inf", too
    return StepRecord(**read | numbers)


def _require_trained(program: Program, ended: ScriptEnd) -> None:
    if ended.code not in _WELL:
        raise StateError(
            f"{program.name} ended with exit code {ended.code} in FP32",
            why="there is nothing to compare with; what the script says is above",
        )
    if not ended.records:
        raise never_trains(program, ended.report.get("left_alone", {}))


def never_trains(program: Program, left_alone: Mapping[str, str]) -> PolicyError:
    """Return the error of a script without a step, with what was left alone and why."""
    return PolicyError(
        f"{program.name} never trains: no optimizer over a module's parameters took a step",
        why="\n".join(f"{what}: {why}" for what, why in left_alone.items()),
        write="a script that calls loss.backward() and optimizer.step()",
    )


def result_of(policy: str, ended: ScriptEnd) -> RunResult:
    """Return what a run came to."""
    records, report = ended.records, ended.report
    losses = [record.loss for record in records]
    state = report.get("state_bytes")
    interrupted, failed = ended.code == _INTERRUPTED, ended.code not in _WELL
    return RunResult(
        policy=policy,
        status="interrupted" if interrupted else "stopped" if failed else "finished",
        note=f"The script ended with exit code {ended.code}." if failed and not interrupted else "",
        arithmetic="emulated" if report.get("flops", {}).get("emulated") else "native",
        memory_format="contiguous",
        steps=len(records),
        seconds=sum(record.ms for record in records) / 1e3,
        final_metric=statistics.fmean(losses[-math.ceil(_TAIL * len(losses)) :]) if losses else None,
        final_loss=losses[-1] if losses else None,
        step_ms=step_ms(records),
        state_bytes=None if state is None else StateBytes(**state),
        peak_bytes=report.get("peak_bytes"),
        skipped_steps=sum(record.skipped for record in records),
        final_scale=report.get("scale"),
        nonfinite_losses=sum(not math.isfinite(loss) for loss in losses),
        low_share=report.get("low_share"),
    )


def _metric(base: float | None) -> Metric:
    """Return what runs are judged by, with as many decimals as the loss in FP32 asks for."""
    known = base is not None and math.isfinite(base) and base != 0
    size = math.floor(math.log10(abs(base))) if known and base is not None else 0
    return Metric(
        name="training loss",
        unit="",
        unit_of_difference="",
        higher_is_better=False,
        decimals=min(max(_DIGITS - 1 - size, 0), 20),
    )
