"""``mezzo.script.inspect``: a script's run, recorded: what it does to numbers, and so in which formats it is safe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from mezzo.errors import StateError
from mezzo.formats import BF16, E4M3, E5M2, FP16
from mezzo.numerics import KINDS, Diagnosis, Evidence, ExponentHistogram, Recorder, SwallowedUpdates, diagnose
from mezzo.numerics.evidence_file import FILE
from mezzo.policy import Policy
from mezzo.script.program import Program
from mezzo.script.run import run
from mezzo.script.steps import METRICS, StepRecord, never_trains, require_one_process

__all__ = ["FORMATS", "Inspection", "Lost", "inspect"]

#: The formats that are looked at.
FORMATS: Final = (FP16, BF16, E4M3, E5M2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What one format would make of some values, unscaled, over all recorded steps.

    Attributes:
        kind: One of :data:`mezzo.numerics.KINDS`.
        tensor: Its path; empty for all of the kind together.
        format: The format's name.
        flushed: Values that become zero, as a share of all; ``None`` where there are none.
        subnormal: Values that lose digits.
        overflow: Finite values that become infinite.
        swallowed: The share of updates that vanish in weights of this format; ``None`` where it is not known.
    """

    kind: str
    tensor: str
    format: str
    flushed: float | None
    subnormal: float | None
    overflow: float | None
    swallowed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a script's recorded run came to.

    Attributes:
        program: The script.
        policy: What it ran under.
        every: Steps from one recorded step to the next.
        records: Its steps.
        is_interrupted: Whether Ctrl-C has ended it.
        evidence: What was recorded of its largest model.
        diagnosis: What that comes to.
    """

    program: str
    policy: str
    every: int
    records: tuple[StepRecord, ...]
    is_interrupted: bool
    evidence: Evidence
    diagnosis: Diagnosis

    @property
    def is_wrong(self) -> bool:
        """Whether the run itself went wrong under its policy."""
        return any(alert.level == "bad" for alert in self.diagnosis.alerts)

    def lost(self, *, by_tensor: bool = False) -> Iterator[Lost]:
        """Yield what each format would lose of each kind, or of each tensor."""
        groups: dict[tuple[str, str], list[tuple[ExponentHistogram, SwallowedUpdates | None]]] = {}
        for each in (tensor for step in self.evidence.steps for tensor in step.tensors):
            key = each.kind, each.path if by_tensor else ""
            groups.setdefault(key, []).append((each.histogram, each.swallowed))
        for kind, path in sorted(groups, key=lambda key: KINDS.index(key[0])):
            histogram = ExponentHistogram.total_of(each for each, _ in groups[kind, path])
            updates = [each for _, each in groups[kind, path] if each is not None]
            for target in FORMATS:
                found = histogram.coverage(target)
                shares = (found.underflow, found.subnormal, found.overflow - histogram.infs)
                flushed, subnormal, overflow = (n / found.total if found.total else None for n in shares)
                share = sum(updates[1:], updates[0]).share(target) if updates else math.nan
                yield Lost(
                    kind=kind, tensor=path, format=target.name, flushed=flushed, subnormal=subnormal,
                    overflow=overflow, swallowed=None if math.isnan(share) else share,
                )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        return {
            "program": self.program,
            "policy": self.policy,
            "every": self.every,
            "model": self.evidence.header.model,
            "steps": len(self.records),
            "skipped": sum(record.skipped for record in self.records),
            "loss": self.records[-1].loss,
            "scale": self.records[-1].scale,
            "recorded": [step.step for step in self.evidence.steps],
            "interrupted": self.is_interrupted,
            "diagnosis": self.diagnosis.to_dict(),
            "lost": [asdict(each) for each in self.lost()],
            "tensors": [asdict(each) for each in self.lost(by_tensor=True)],
        }


def inspect(
    program: Program,
    policy: Policy | str = "O0",
    *,
    steps: int | None = None,
    every: int = 50,
    out: Path | None = None,
) -> Inspection:
    """Run a script in this process under one policy, and record what that does to the numbers of its largest model.

    Args:
        program: The script.
        policy: A policy, its text, or the path of a policy file; in FP32 what other formats would lose is seen whole.
        steps: After how many steps the script is ended; by itself when omitted, or with Ctrl-C.
        every: Steps from one recorded step to the next; the first one is recorded.
        out: A folder that is there: recorded steps go to ``evidence.jsonl`` in it, and each step to ``metrics.jsonl``,
            while the script runs.

    Returns:
        The run, its evidence, and what that comes to.

    Raises:
        PolicyError: Policy or ``every`` make no sense, or the script never trains.
        BaseException: What the script raises; the folder then holds what was recorded until then.
    """
    require_one_process("inspect")
    chosen = Policy.of(policy)
    records, recorders = list[StepRecord](), list[Recorder]()

    @contextmanager
    def recording(models: list[nn.Module]) -> Iterator[None]:
        largest = max(models, key=lambda model: sum(param.numel() for param in model.parameters()))
        stream = None if out is None else out / FILE
        recorders.append(Recorder(largest, every=every, keep=None, formats=FORMATS, stream=stream))
        with recorders[0]:
            yield

    with ExitStack() as files:
        lines = None if out is None else files.enter_context((out / METRICS).open("w", buffering=1, encoding="utf-8"))

        def told(record: StepRecord) -> None:
            records.append(record)
            if lines is not None:
                lines.write(record.line)

        ended = run(program, chosen, steps=steps, told=told, around=recording)
    is_interrupted = bool(records) and isinstance(ended.error, KeyboardInterrupt)
    if ended.failure is not None and not is_interrupted:
        raise ended.failure
    if not records:
        raise never_trains(program.name, ended.report.left_alone)
    if not recorders:
        raise StateError(f"{program.name} has steps, and no model whose forward pass could be recorded")
    evidence = recorders[0].evidence
    return Inspection(
        program=program.name,
        policy=str(chosen),
        every=every,
        records=tuple(records),
        is_interrupted=is_interrupted,
        evidence=evidence,
        diagnosis=diagnose(evidence),
    )
