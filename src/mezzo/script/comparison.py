"""``mezzo.script.compare``: one script in FP32 and under policies, each run in a process of its own."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from mezzo.cast.device import default_device_types, fast_format
from mezzo.errors import PolicyError, StateError, raise_together
from mezzo.files import save_json
from mezzo.machine import default_device, describe
from mezzo.policy import Policy
from mezzo.script.metric import TRAINING_LOSS, Better, Metric, better_of, last_line, number_after, printed_last
from mezzo.script.program import METRICS, Program, StepRecord, never_trains, read_steps, require_one_process, step_ms
from mezzo.tensors import LOW, dtype_name

#: The last file of a run, and of a comparison: what has it is whole.
SUMMARY: Final = "summary.json"
#: What a run has printed.
OUTPUT: Final = "output.txt"
ERRORS: Final = "errors.txt"
#: The share of a run's steps, at its end, whose losses are averaged.
_TAIL: Final = 0.1
_INTERRUPTED: Final = 130
#: Seconds that a run has for its own answer to Ctrl-C.
_PATIENCE: Final = 3.0
#: What argparse and its like exit with where they do not know an option.
_WRONG_USAGE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of the script came to.

    Attributes:
        policy: The policy's text.
        seed: What it got as ``--seed``; ``None`` where it got none.
        code: Its exit code.
        metric: What it is judged by; ``None`` where that is not known.
        loss: The mean of the losses in the last tenth of its steps, without those that updated nothing; NaN where
            none of them did.
        steps: How many it took, skipped ones included.
        skipped: How many updated nothing.
        nonfinite: How many losses were infinite or NaN.
        step_ms: 10th, 50th and 90th percentile of the time of a step.
        held_bytes: Weights, gradients, low halves and optimizer state.
        saved_bytes: What was saved for one backward pass.
        peak_bytes: The most that was allocated at a time, on a GPU.
        scale: The loss scale at the end.
        low_share: The share of products that ran low.
        emulated: Whether products were computed in FP32 from rounded operands.
        left_alone: What of the script the policy did not reach, and why.
        operands: What its products below sixteen bits lost of their operands, every 50th step together: the fields of
            :class:`mezzo.numerics.OperandLosses`.
        losses: All of them, and ``scales``, the loss scale of each step, for pictures.
        scales: See ``losses``.
        folder: Where the run's files are.
    """

    policy: str
    seed: int | None
    code: int
    metric: float | None
    loss: float | None
    steps: int
    skipped: int
    nonfinite: int
    step_ms: tuple[float, float, float] | None
    held_bytes: int | None
    saved_bytes: int | None
    peak_bytes: int | None
    scale: float | None
    low_share: float | None
    emulated: bool
    left_alone: Mapping[str, str] = dataclasses.field(default_factory=dict)
    operands: tuple[Mapping[str, Any], ...] = ()
    losses: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    folder: Path

    @property
    def went_well(self) -> bool:
        """Whether the script came to its end."""
        return self.code == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the run as ``summary.json`` has it; its steps are in its own folder."""
        plain = dataclasses.asdict(self) | {"folder": self.folder.name}
        return {name: value for name, value in plain.items() if name not in ("losses", "scales", "operands")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A script under several policies.

    Attributes:
        script: The script and its arguments, as in a shell.
        metric: What runs are judged by.
        margin: How far from FP32 a policy may be to be called equal, in the metric's unit; ``None`` for 1 % of FP32's.
        policies: All that were asked for, FP32 first.
        seeds: How many; ``None`` where the script seeds by itself.
        steps: After how many each run was ended; ``None`` where by itself.
        date: When it ended, ISO 8601 with the time zone.
        machine: What it ran on.
        runs: One a policy and seed; fewer after an interruption.
        interrupted: Whether the user stopped it.
    """

    script: str
    metric: Metric
    margin: float | None
    policies: tuple[str, ...]
    seeds: int | None
    steps: int | None
    date: str
    machine: Mapping[str, str | int | bool]
    runs: tuple[Run, ...]
    interrupted: bool

    def of(self, policy: str) -> list[Run]:
        """Return a policy's runs."""
        return [run for run in self.runs if run.policy == policy]


def default_policies() -> tuple[str, ...]:
    """Return FP32, and O1 and O2 in both formats, that for this machine first.

    Example:
        >>> default_policies()[0], len(default_policies())
        ('O0', 5)
    """
    fast = fast_format(default_device_types())
    ordered = sorted(LOW, key=lambda dtype: dtype != fast)
    return ("O0", *(f"{level},dtype={dtype_name(dtype)}" for dtype in ordered for level in ("O1", "O2")))


def ablations() -> tuple[str, ...]:
    """Return O2 in FP16 without a loss scale, at a scale of 8, and without FP32 values of the weights.

    The last is at a scale of 1: gradients in FP16 cannot be unscaled in FP16.

    Example:
        >>> ablations()[0]
        'O2,dtype=float16,loss_scale=none'
    """
    without = Policy.O3("float16", keep_batchnorm_fp32=True)
    return ("O2,dtype=float16,loss_scale=none", "O2,dtype=float16,loss_scale=8", str(without))


def parse_policies(texts: Sequence[Policy | str]) -> list[Policy]:
    """Return the policies, FP32 first.

    Raises:
        PolicyError: Faulty and repeated policies, all of them together.
    """
    parsed, problems = list[Policy](), list[PolicyError]()
    for text in texts:
        try:
            policy = Policy.of(text)
        except PolicyError as error:
            problems.append(error)
            continue
        if policy in parsed:
            problems.append(PolicyError(f"the policy {policy} is listed twice", write="each policy once"))
        parsed.append(policy)
    raise_together(problems)
    if not any(str(policy) != "O0" for policy in parsed):
        raise PolicyError("no policy to compare with FP32", write='--policies "O1,bf16; O2,fp16"')
    return [Policy.O0(), *(policy for policy in parsed if str(policy) != "O0")]


def compare(
    program: Program,
    policies: Sequence[Policy | str],
    *,
    out: Path,
    seeds: int | None = None,
    steps: int | None = None,
    metric: str | None = None,
    better: Better | None = None,
    margin: float | None = None,
    overwrite: bool = False,
    ended: Callable[[Run, int, int], None] = lambda run, number, count: None,
) -> Comparison:
    """Run a script in FP32 and under each policy, each time in a process of its own.

    Each run is the script as the interpreter would run it, one after the other, in the same working directory and with
    the same arguments: it writes where the script writes, and is alike as far as the script seeds its random numbers.
    What has finished in ``out`` is not run again.

    Args:
        program: The script.
        policies: Policies, their texts, or paths of policy files, each once; FP32 is put in front if it is missing.
        out: The folder: one below it for each run, with ``metrics.jsonl``, ``output.txt`` and ``errors.txt``.
        seeds: Runs of each policy, with ``--seed 0``, ``--seed 1`` and so on behind the script's arguments.
        steps: After how many steps each run is ended; by itself when omitted.
        metric: The words before the number that runs are judged by; when omitted, those of the script's last line, and
            the training loss where that has no number.
        better: In which direction that is better; its words say it when omitted.
        margin: How far from FP32 a policy may be to be called equal, in the metric's unit; 1 % when omitted.
        overwrite: Whether other results in ``out`` may be replaced.
        ended: Told of each run, with its number and how many there are.

    Returns:
        The comparison; after Ctrl-C of what has finished.

    Raises:
        PolicyError: Policies or folder make no sense, the script never trains, takes no ``--seed``, or the metric's
            words do not say which direction is better.
        StateError: The script does not come to its end in FP32, or does not print the metric.
    """
    require_one_process("compare")
    parsed = parse_policies(policies)
    if metric is not None and better is None:
        better = better_of(metric)
    plan = _RunPlan(program, out, steps=steps, seeds=seeds)
    with plan.locked():
        plan.prepare(overwrite)
        wanted = [(seed, policy) for seed in plan.seeds for policy in parsed]
        runs, interrupted = list[Run](), False
        judged: tuple[str | None, Better | None] | None = None if metric is None else (metric, better)
        for number, (seed, policy) in enumerate(wanted, start=1):
            run = plan.run(policy, seed)
            if run.code == _INTERRUPTED:
                interrupted = True
                break
            if str(policy) == "O0":
                _require_trained(program, run, seeds, out)
            if judged is None:
                judged = _metric_of(run, better)
            run = dataclasses.replace(run, metric=_value(run, judged[0]))
            if metric is not None and run.metric is None and str(policy) == "O0":
                raise StateError(
                    f"{program.name} prints no number behind {metric!r}",
                    why=f"what it has printed is in {run.folder / OUTPUT}; its last line is {last_printed(run)!r}"
                    + ("; --steps ends it before it is through" if steps is not None else ""),
                    write="--metric with words that stand before a number, or none for the script's last line",
                )
            runs.append(run)
            ended(run, number, len(wanted))
            if str(policy) == "O0":
                _require_seeded(program, [run for run in runs if run.policy == "O0"])
    name, direction = judged or (None, None)
    judged_by = TRAINING_LOSS
    if name is not None:
        judged_by = Metric(name=name, unit=_unit(runs, name), better=direction or judged_by.better)
    return Comparison(
        script=shlex.join([*(["-m"] if program.is_module else []), program.name, *program.arguments]),
        metric=judged_by,
        margin=margin,
        policies=tuple(map(str, parsed)),
        seeds=seeds,
        steps=steps,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=describe(default_device()),
        runs=tuple(runs),
        interrupted=interrupted,
    )


class _RunPlan:
    """The runs of a comparison, each with a folder of its own, and which of them have finished."""

    def __init__(self, program: Program, out: Path, *, steps: int | None, seeds: int | None) -> None:
        self._program, self._out, self._steps = program, out, steps
        self.seeds: Sequence[int | None] = (None,) if seeds is None else range(seeds)

    def prepare(self, overwrite: bool) -> None:
        """Prepare the folder: an empty one, or one with runs of the same comparison, which stay.

        Raises:
            PolicyError: The folder has results of another script, of the same one as it was before, or of another verb.
        """
        identity_file, mine = self._out / "comparison.json", self._identity()
        is_ours, write = identity_file.exists(), "--out with another folder, or --overwrite to begin anew"
        if is_ours and not overwrite:
            theirs = json.loads(identity_file.read_text())
            if different := [name for name in mine if mine[name] != theirs.get(name)]:
                raise PolicyError(
                    f"{self._out} has results of {theirs.get('script')}",
                    why=f"with another {' and '.join(different)}",
                    write=write,
                )
            return
        if not is_ours and not overwrite and (self._out / SUMMARY).exists():
            raise PolicyError(f"{self._out} has results of something else than a comparison", write=write)
        with self._explaining_errors():
            runs = [output.with_name(SUMMARY) for output in self._out.glob(f"*/{OUTPUT}")] if is_ours else []
            for old in [*runs, self._out / SUMMARY]:
                old.unlink(missing_ok=True)
            save_json(mine, identity_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and lock it inside the block: two comparisons would overwrite each other's runs.

        Raises:
            PolicyError: The folder cannot be written, or another comparison has locked it.
        """
        with self._explaining_errors():
            self._out.mkdir(parents=True, exist_ok=True)
            folder = os.open(self._out, os.O_RDONLY)
        try:
            with self._explaining_errors():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(folder)

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            write = "--out with another folder; or wait for it"
            raise PolicyError(f"{self._out} is in use by another comparison", write=write) from error
        except OSError as error:
            why = error.strerror or str(error)
            raise PolicyError(f"{self._out} cannot be written", why=why, write="--out with another folder") from error

    def run(self, policy: Policy, seed: int | None) -> Run:
        """Return a run: read from its folder if it has finished before, else carried out in a process of its own."""
        folder = self._out / _folder_name(policy, seed)
        if not _has_finished(folder, is_base=str(policy) == "O0"):
            self._start_process(policy, seed, folder)
        return _read(folder, str(policy), seed)

    def _identity(self) -> dict[str, Any]:
        program, script_file = self._program, self._program.file
        text = script_file.read_bytes() if script_file is not None and script_file.is_file() else b""
        return {
            "script": program.name,
            "arguments": list(program.arguments),
            "text": hashlib.sha256(text).hexdigest(),
            "steps": self._steps,
        }

    def _start_process(self, policy: Policy, seed: int | None, folder: Path) -> None:
        program = self._program
        seeded = [] if seed is None else ["--seed", str(seed)]
        options = ["--policy", str(policy), "--out", str(folder), "--overwrite"]
        options += [] if self._steps is None else ["--steps", str(self._steps)]
        options += ["-m"] if program.is_module else []
        words = [sys.executable, "-m", "mezzo", "run", *options, program.name, *program.arguments, *seeded]
        folder.mkdir(parents=True, exist_ok=True)
        for old in (SUMMARY, METRICS, OUTPUT, ERRORS):  # a process that still writes keeps the old files to itself
            (folder / old).unlink(missing_ok=True)
        with (
            (folder / OUTPUT).open("wb") as output,
            (folder / ERRORS).open("wb") as errors,
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors) as process,
        ):
            try:
                code = process.wait()
            except KeyboardInterrupt:
                _interrupt(process)
                code = _INTERRUPTED
        summary_file = folder / SUMMARY
        summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
        if code != _INTERRUPTED:  # mezzo's alarm is no failure of the script
            code = summary.get("exit_code", code)
        save_json(summary | {"code": code}, summary_file)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Wait for a run to end after Ctrl-C; send it the signal if the terminal has not done so."""
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()


def _folder_name(policy: Policy, seed: int | None) -> str:
    text = str(policy)
    name = re.sub(r"[^\w.,=+-]+", "_", text)[:80]
    if name != text:  # two texts must not share a folder
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name if seed is None else f"{name}-seed{seed}"


def _has_finished(folder: Path, *, is_base: bool) -> bool:
    """Whether a run need not be repeated. One that failed before its first step, or failed in FP32, is run again."""
    summary_file = folder / SUMMARY
    if not summary_file.exists():
        return False
    summary = json.loads(summary_file.read_text())
    code = summary.get("code", _INTERRUPTED)
    try:
        read_steps(folder / METRICS) if (folder / METRICS).exists() else None
    except (ValueError, LookupError, TypeError):  # two processes have written into it
        return False
    return code == 0 or (code != _INTERRUPTED and not is_base and bool(summary.get("steps")))


def _read(folder: Path, policy: str, seed: int | None) -> Run:
    summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    records: list[StepRecord] = read_steps(folder / METRICS) if (folder / METRICS).exists() else []
    losses = [record.loss for record in records]
    last_losses = [record.loss for record in records[-math.ceil(_TAIL * len(records)) :] if not record.skipped]
    state, low_share = summary.get("state_bytes"), summary.get("low_share")
    scale = summary.get("scale")
    return Run(
        policy=policy,
        seed=seed,
        code=summary["code"],
        metric=None,
        loss=(statistics.fmean(last_losses) if last_losses else math.nan) if losses else None,
        steps=len(records),
        skipped=sum(record.skipped for record in records),
        nonfinite=sum(not math.isfinite(loss) for loss in losses),
        step_ms=step_ms(records),
        held_bytes=None if state is None else sum(state.values()),
        saved_bytes=summary.get("saved_bytes"),
        peak_bytes=summary.get("peak_bytes"),
        scale=None if scale is None else float(scale),
        low_share=low_share if summary.get("flops") else None,
        emulated="emulated" in summary.get("flops", {}),
        left_alone=summary.get("left_alone", {}),
        operands=tuple(summary.get("operands", ())),
        losses=tuple(losses),
        scales=tuple(record.scale for record in records),
        folder=folder,
    )


def last_printed(run: Run) -> str:
    """Return the last line that a run has printed."""
    return last_line(_printed(run))


def _printed(run: Run) -> str:
    return (run.folder / OUTPUT).read_text(errors="replace")


def _metric_of(run: Run, better: Better | None) -> tuple[str | None, Better | None]:
    """Return the words that a run's last line ends with, if their direction is known; else none: the training loss."""
    last_number = printed_last(_printed(run))
    if last_number is not None:
        try:
            return last_number[0], better or better_of(last_number[0])
        except PolicyError:  # its words are those of no metric
            pass
    return None, TRAINING_LOSS.better


def _value(run: Run, words: str | None) -> float | None:
    if words is None:
        return run.loss
    match = number_after(words, _printed(run))
    return None if match is None else match[0]


def _unit(runs: Sequence[Run], words: str) -> str:
    matches = (number_after(words, _printed(run)) for run in runs)
    return next((match[1] for match in matches if match is not None), "")


def _require_trained(program: Program, run: Run, seeds: int | None, out: Path) -> None:
    if not run.went_well:
        tail = (run.folder / ERRORS).read_text(errors="replace").rstrip().splitlines()[-30:]
        if seeds is not None and run.code == _WRONG_USAGE and any("--seed" in line for line in tail[-5:]):
            raise PolicyError(
                f"{program.name} takes no --seed",
                why="\n".join(["--seeds passes it, and the script ended with exit code 2:", *tail[-5:]]),
                write="a script that seeds its random numbers with --seed; or without --seeds",
            )
        seeded = f" with --seed {run.seed}" if run.seed is not None else ""
        raise StateError(
            f"{program.name} ended with exit code {run.code} in FP32{seeded}, so that there is nothing to compare with",
            why="\n".join(tail) or f"it printed nothing to stderr; {run.folder / OUTPUT} has the rest",
            write=f"the same command with --out {out} to try again: what has finished there stays" if run.seed else "",
        )
    if not run.steps:
        summary = json.loads((run.folder / SUMMARY).read_text())
        (run.folder / SUMMARY).unlink()
        raise never_trains(program.name, summary.get("left_alone", {}))


def _require_seeded(program: Program, runs: Sequence[Run]) -> None:
    """Refuse seeds that change nothing: intervals over them would be zero wide, and prove nothing."""
    if len(runs) > 1 and runs[-1].losses == runs[0].losses:
        raise PolicyError(
            f"{program.name} takes no --seed that changes anything",
            why=f"seeds {runs[0].seed} and {runs[-1].seed} have the same losses in FP32, to the last digit",
            write="torch.manual_seed(args.seed) in the script; or without --seeds",
        )


def summary_of(
    comparison: Comparison,
    rows: Iterator[dict[str, Any]],
    operands: Iterator[dict[str, Any]],
    verdict: Sequence[str],
) -> dict[str, Any]:
    """Return what ``summary.json`` holds."""
    plain = {name: getattr(comparison, name) for name in ("script", "margin", "policies", "seeds", "steps", "date")}
    return {
        **plain,
        "metric": dataclasses.asdict(comparison.metric),
        "interrupted": comparison.interrupted,
        "verdict": list(verdict),
        "rows": list(rows),
        "operands": list(operands),
        "runs": [run.to_dict() for run in comparison.runs],
        "machine": dict(comparison.machine),
    }
