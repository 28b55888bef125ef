"""Find out what a device can do: in child processes for a CPU, in process for an accelerator.

On some virtual machines the processor advertises AMX, and oneDNN's AMX path dies with an illegal
instruction on any BF16 product wider than about 64, because the hypervisor hides a CPUID leaf. No query
tells beforehand; only trying does, and only another process may try. Deciding what follows from the
answer is the work of ``device.py``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezzo.cast.device.child import CASES, PREFIX, REFUSALS, TIMED_CASES, run_case, time_case
from mezzo.cast.device.report import FAST_ENOUGH, FORMATS, DeviceReport, FormatSupport, Status
from mezzo.tensors import dtype_name

__all__ = [
    "ISA_LIMIT",
    "ISA_VARIABLE",
    "accelerator_report",
    "cpu_report",
    "how_it_ended",
    "isa_setting",
]

logger = logging.getLogger(__name__)

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"

#: All of AVX-512 with FP16 and BF16, but not AMX.
ISA_LIMIT = "AVX512_CORE_FP16"

#: The program that runs the cases. It gets the jobs as JSON in one more argument. ``-P`` keeps the folder
#: of this file, with names like ``modules``, off its import path.
CHILD_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("child.py")))

#: A child needs about four seconds; on a busy machine with a cold disk, many times that.
CHILD_TIMEOUT_S = 90.0

#: Large enough for a GPU to be busy, small enough to fit beside a model.
ACCELERATOR_SIZES = (128, 4096)

Job = tuple[str, str]  # (name of a dtype, case)


#: Exit codes of a process that the processor refused to go on with; the last two are how Windows reports them.
FAULTS = frozenset(
    {-getattr(signal, name) for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE") if hasattr(signal, name)}
    | {0xC000001D, 0xC0000005}
)

#: How torch says that memory ran out, which says nothing of a format.
NO_MEMORY = ("allocate memory", "out of memory")


class CannotProbeError(Exception):
    """The children said nothing at all."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One child that has ended."""

    facts: list[dict[str, Any]]
    how: str  # the rest of a sentence
    hung: bool = False  # it had to be stopped
    faulted: bool = False  # by the processor


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one job ended."""

    status: Status
    seconds: float | None = None
    detail: str = ""
    accident: bool = False  # it is no answer: the child was stopped from outside, ran out of time or of memory


def isa_setting() -> str | None:
    """Return the limit on oneDNN's instructions that this process has in its environment."""
    # oneDNN still reads the older name when the newer one is absent.
    return os.environ.get(ISA_VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA") or None


def cpu_report(name: str) -> tuple[DeviceReport, bool]:
    """Run every case in child processes and put the answers together.

    Args:
        name: The processor's name.

    Returns:
        The report, and whether it is worth keeping: an answer that is missing, because no child could
        be started, or one was too slow or stopped from outside, may be there the next time.

    Cost:
        About four seconds; twice that if the environment limits oneDNN or if a case crashes, and another
        second and a half per crash.
    """
    setting = isa_setting()
    try:
        free = _outcomes(None)
        crashed = {
            dtype for (dtype, _), outcome in free.items() if outcome.status == "crashes" and not outcome.accident
        }
        limited = _outcomes(ISA_LIMIT) if crashed or setting == ISA_LIMIT else free
        # Speed is a matter of the environment that the user has, or will have once mezzo has set the limit.
        timed = limited if setting in (None, ISA_LIMIT) else _outcomes(setting)
    except CannotProbeError as reason:
        logger.info("the CPU could not be probed: %s", reason)
        return _unprobed(name, str(reason)), False
    cured = bool(crashed) and all(
        outcome.status == "native" for (dtype, _), outcome in limited.items() if dtype in crashed
    )
    note = f"; works with {ISA_VARIABLE}={ISA_LIMIT}" if cured else ""
    formats = {dtype: _summary(dtype, free, timed, note) for dtype in FORMATS}
    report = DeviceReport(device_type="cpu", name=name, formats=formats, needs_isa_limit=cured)
    return report, not any(outcome.accident for outcome in (*free.values(), *limited.values(), *timed.values()))


def accelerator_report(device_type: str, name: str, native: Mapping[torch.dtype, bool]) -> DeviceReport:
    """Run every case on an accelerator, in this process.

    Args:
        device_type: An accelerator that is present.
        name: Its name.
        native: Where known, whether a format is native; kernels that only pretend do not count.

    Returns:
        The report. FP32 is timed as this process has set it, TF32 included.

    Cost:
        A second or two, many synchronisations, and about 0.5 GiB of device memory for their duration.
    """
    outcomes: dict[Job, Outcome] = {}
    for dtype in (torch.float32, *FORMATS):
        for case in CASES:
            outcome = _try_accelerator(case, dtype, device_type)
            if native.get(dtype, True) is False and case == "gemm" and outcome.status == "native":
                outcome = Outcome("unsupported", detail="torch only imitates it on this device")
            outcomes[dtype_name(dtype), case] = outcome
            if outcome.status != "native":
                break
    formats = {dtype: _summary(dtype, outcomes, outcomes) for dtype in FORMATS}
    return DeviceReport(device_type=device_type, name=name, formats=formats, needs_isa_limit=False)


def _outcomes(setting: str | None) -> dict[Job, Outcome]:
    """Run every job, in as many children as it takes."""
    jobs: list[Job] = [(dtype_name(dtype), case) for case in CASES for dtype in (torch.float32, *FORMATS)]
    outcomes: dict[Job, Outcome] = {}
    tried_again: set[Job] = set()
    while jobs:
        child = _run_child(jobs, setting)
        running: Job | None = None
        for fact in child.facts:
            if "begin" in fact:
                running = (fact["begin"][0], fact["begin"][1])
            elif running is not None:
                status: Status = "unsupported" if fact["error"] else "native"
                no_memory = any(words in fact["error"] for words in NO_MEMORY)
                outcomes[running] = Outcome(status, fact["seconds"], fact["error"], accident=no_memory)
                running = None
        if running is not None:
            if child.faulted or child.hung or running in tried_again:
                outcomes[running] = Outcome("crashes", detail=f"the process {child.how}", accident=not child.faulted)
            tried_again.add(running)  # once: what stopped it from outside may be over
        elif not any(job in outcomes for job in jobs) or child.hung:
            raise CannotProbeError(f"a child process {child.how} before it had tried anything")
        jobs = [job for job in jobs if job not in outcomes and not _is_settled(job, outcomes)]
        if running is None and jobs:
            raise CannotProbeError(f"a child process {child.how} between two cases")
    return outcomes


def _is_settled(job: Job, outcomes: Mapping[Job, Outcome]) -> bool:
    # A missing kernel or an accident settles a format; a crash settles the backward pass that begins
    # with the same work.
    dtype, case = job
    own = [outcome for key, outcome in outcomes.items() if key[0] == dtype]
    forward = outcomes.get((dtype, case.removesuffix("_backward")))
    return any(outcome.status == "unsupported" or outcome.accident for outcome in own) or (
        forward is not None and forward.status == "crashes"
    )


def _run_child(jobs: Sequence[Job], setting: str | None) -> Ended:
    """Start one child, and wait for its end."""
    if not sys.executable or getattr(sys, "frozen", False):
        # A frozen program's executable is the program: starting it would run the user's work again.
        raise CannotProbeError("this Python has no executable of its own to start a child process with")
    try:
        done = subprocess.run(
            [*CHILD_COMMAND, json.dumps(jobs)],
            env=_environment(setting),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHILD_TIMEOUT_S,
            check=False,
        )
        how = how_it_ended(done.returncode)
        logger.debug("probe child %s; stderr: %s", how, done.stderr.decode(errors="replace")[-2000:])
        return Ended(_facts(done.stdout), how, faulted=done.returncode in FAULTS)
    except subprocess.TimeoutExpired as late:
        return Ended(_facts(late.stdout or b""), f"did not finish in {CHILD_TIMEOUT_S:.3g} s", hung=True)
    except (OSError, ValueError, subprocess.SubprocessError) as fault:
        raise CannotProbeError(f"a child process could not be started ({fault})") from fault


def _facts(said: bytes) -> list[dict[str, Any]]:
    facts = []
    for line in said.decode(errors="replace").splitlines():
        if line.startswith(PREFIX):
            with contextlib.suppress(json.JSONDecodeError):  # a line that death cut off
                facts.append(json.loads(line.removeprefix(PREFIX)))
    return facts


def _environment(setting: str | None) -> dict[str, str]:
    # The user's limits must not hide a crash, their verbosity not flood the pipe, and their warning
    # filters not turn a deprecation inside torch into a failed probe.
    unwanted = {ISA_VARIABLE, "DNNL_MAX_CPU_ISA", "ONEDNN_VERBOSE", "DNNL_VERBOSE", "PYTHONWARNINGS"}
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    # The child must find the torch that this process found, wherever that was.
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    if setting is not None:
        environment[ISA_VARIABLE] = setting
    return environment


def how_it_ended(code: int) -> str:
    """Say how a process ended, as the rest of a sentence.

    Args:
        code: As in ``subprocess``: negative for a signal.

    Example:
        >>> how_it_ended(3)
        'ended with exit code 3'
    """
    if code in (-signal.SIGILL, 0xC000001D):  # the second is how Windows reports the same
        return "was killed by an illegal instruction (SIGILL)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _try_accelerator(case: str, dtype: torch.dtype, device_type: str) -> Outcome:
    try:
        run_case(case, dtype, device_type, ACCELERATOR_SIZES)
        if case not in TIMED_CASES:
            return Outcome("native")
        return Outcome("native", time_case(case, dtype, device_type, ACCELERATOR_SIZES[-1]))
    except REFUSALS as refusal:
        return Outcome("unsupported", detail=str(refusal).splitlines()[0])


def _summary(
    dtype: torch.dtype, free: Mapping[Job, Outcome], timed: Mapping[Job, Outcome], note: str = ""
) -> FormatSupport:
    """Draw the conclusion for one format from the outcomes of its cases."""
    tried = {case: free[dtype_name(dtype), case] for case in CASES if (dtype_name(dtype), case) in free}
    speeds: dict[str, float] = {}
    if not any(key[0] == dtype_name(dtype) and outcome.status == "crashes" for key, outcome in timed.items()):
        for case in TIMED_CASES:
            base, own = timed.get(("float32", case)), timed.get((dtype_name(dtype), case))
            if base and own and base.seconds and own.seconds:
                speeds[case] = base.seconds / own.seconds
    troubles = {
        status: [f"{case}: {outcome.detail}" for case, outcome in tried.items() if outcome.status == status]
        for status in ("crashes", "unsupported")
    }
    status: Status = "native"
    if troubles["crashes"]:
        status, detail = "crashes", troubles["crashes"][0] + note
    elif troubles["unsupported"]:
        status, detail = "unsupported", troubles["unsupported"][0]
    else:
        slowest = min(speeds, key=speeds.__getitem__, default="")
        detail = f"slowest: {slowest}" if slowest else "nothing was timed"
    ratio = min(speeds.values(), default=None) if status != "unsupported" else None
    return FormatSupport(
        dtype=dtype,
        status=status,
        fast=ratio is not None and ratio >= FAST_ENOUGH,
        speed_ratio=ratio,
        cases={case: outcome.status for case, outcome in tried.items()},
        speeds=speeds,
        detail=detail,
    )


def _unprobed(name: str, reason: str) -> DeviceReport:
    formats = {
        dtype: FormatSupport(
            dtype=dtype,
            status="crashes",
            fast=False,
            speed_ratio=None,
            cases={},
            speeds={},
            detail=f"{reason}, so it is treated as if it crashed",
        )
        for dtype in FORMATS
    }
    return DeviceReport(device_type="cpu", name=name, formats=formats, needs_isa_limit=False)
