"""``mezzo.script.inspect``: a script's run, recorded: what it does to numbers, and so in which formats it is safe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from torch import nn

from mezzo.numerics import Recorder, diagnose, read_evidence
from mezzo.policy import Policy
from mezzo.recipes import Inspection, StepRecord
from mezzo.recipes.inspection import DEFAULT_POLICY
from mezzo.recipes.parallel import require_one_process
from mezzo.recipes.run_directory import EVIDENCE, POLICY, RunDirectory
from mezzo.script.comparison import ScriptEnd, begun, never_trains, result_of, summed_up
from mezzo.script.program import Program
from mezzo.script.run import run

__all__ = ["inspect"]


def inspect(
    program: Program,
    policy: Policy | str = DEFAULT_POLICY,
    *,
    steps: int | None = None,
    every: int = 50,
    out: Path,
    overwrite: bool = False,
) -> Inspection:
    """Run a script in this process under one policy, and record what that does to the numbers of its largest model.

    Args:
        program: The script.
        policy: A policy, its text, or the path of a policy file; in FP32 what other formats would lose is seen whole.
        steps: After how many steps the script is ended; by itself when omitted, or with Ctrl-C.
        every: Steps from one recorded step to the next; the first one is recorded.
        out: Directory for the run.
        overwrite: Whether a run that is in ``out`` may be replaced.

    Returns:
        The run and its evidence, without an explanation.

    Raises:
        PolicyError: Policy, ``every`` or directory make no sense, or the script never trains.
        BaseException: What the script raises; the directory then holds what was recorded until then, as partial.
    """
    require_one_process("inspect")
    chosen = Policy.of(policy)
    directory = RunDirectory(out, overwrite=overwrite)
    comparison = begun(program, [chosen], steps, directory)
    directory.begin(comparison.to_dict() | {"every": every})
    records, recorders = list[StepRecord](), list[Recorder]()

    @contextmanager
    def recording(models: list[nn.Module]) -> Iterator[None]:
        largest = max(models, key=lambda model: sum(param.numel() for param in model.parameters()))
        recorders.append(Recorder(largest, every=every, keep=1, stream=directory.open() / EVIDENCE))
        with recorders[0]:
            yield

    def told(record: StepRecord) -> None:
        records.append(record)
        directory.stepped(record)

    with closing(directory):
        ended = run(program, chosen, steps=steps, told=told, around=recording)
        interrupted = isinstance(ended.error, KeyboardInterrupt)
        if ended.failure is not None and not interrupted:
            raise ended.failure
        if not records:
            raise never_trains(program, ended.report.left_alone)
    evidence = read_evidence(directory.path / EVIDENCE)
    code = 130 if interrupted else 0
    row = result_of(str(chosen), ScriptEnd(code=code, report=json.loads(ended.report.to_json()), records=records))
    row = dataclasses.replace(row, low_share=None)  # in FP32 nothing has to run low
    found = diagnose(evidence)
    inspection = Inspection(run=summed_up(comparison, [row]), evidence=evidence, explanation=None, diagnosis=found)
    directory.finish(inspection.to_dict(), made=[EVIDENCE])
    (found.policy or chosen).save(directory.path / POLICY)
    return inspection
