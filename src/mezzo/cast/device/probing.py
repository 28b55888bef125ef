"""Find out what a device can do: in a child process for a CPU, in process for an accelerator.

On some virtual machines the processor advertises AMX, and oneDNN's AMX path dies with an illegal
instruction on any BF16 product wider than about 64, because the hypervisor hides a CPUID leaf. No query
tells beforehand; only trying does, and only another process may try. What follows from the answer is
decided in ``decide.py``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Container, Mapping
from pathlib import Path

import torch

from mezzo.cast.device.child import ISA_VARIABLE, PREFIX, TIMED_CASES, Tried, try_case, try_format
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport
from mezzo.tensors import dtype_name

__all__ = ["ISA_LIMIT", "accelerator_report", "cpu_report", "isa_setting"]

logger = logging.getLogger(__name__)

#: All of AVX-512 with FP16 and BF16, but not AMX.
ISA_LIMIT = "AVX512_CORE_FP16"

#: The program that tries the formats. It gets its arguments as JSON. ``-P`` keeps the folder of this file,
#: with names like ``report``, off its import path.
CHILD_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("child.py")))

#: The child needs about four seconds, and stops what hangs by itself.
CHILD_TIMEOUT_S = 900.0

#: Large enough for a GPU to be busy, small enough to fit beside a model.
ACCELERATOR_SIZES = (128, 4096)

#: The cases of each format, by name.
Table = Mapping[str, Mapping[str, Tried]]


class CannotProbeError(Exception):
    """The child said nothing at all."""


def isa_setting() -> str | None:
    """Return the limit on oneDNN's instructions that this process has in its environment."""
    # oneDNN still reads the older name when the newer one is absent.
    return os.environ.get(ISA_VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA") or None


def cpu_report(name: str) -> tuple[DeviceReport, bool]:
    """Run every case in a child process and put the answers together.

    Args:
        name: The processor's name.

    Returns:
        The report, and whether it is worth keeping: an answer that is missing, because the child could not
        be started, or a copy of it was too slow or stopped from outside, may be there the next time.

    Cost:
        About four seconds; some more if the environment limits oneDNN or if a case crashes.
    """
    try:
        found = _ask_child()
    except CannotProbeError as reason:
        logger.info("the CPU could not be probed: %s", reason)
        detail = f"{reason}, so it is treated as if it crashed"
        nothing = {dtype: FormatSupport(dtype=dtype, cases={}, speeds={}, detail=detail) for dtype in FORMATS}
        return DeviceReport(device_type="cpu", name=name, formats=nothing, needs_isa_limit=False), False
    free, limited, timed = found["free"], found["limited"], found["timed"]
    crashed = [
        name for name, cases in free.items() if any(o.status == "crashes" and not o.accident for o in cases.values())
    ]
    cured = bool(crashed) and all(o.status == "native" for name in crashed for o in limited[name].values())
    note = f"; works with {ISA_VARIABLE}={ISA_LIMIT}" if cured else ""
    formats = {dtype: _support(dtype, free, timed, note) for dtype in FORMATS}
    report = DeviceReport(device_type="cpu", name=name, formats=formats, needs_isa_limit=cured)
    return report, not any(o.accident for tried in found.values() for cases in tried.values() for o in cases.values())


def accelerator_report(device_type: str, name: str, imitated: Container[torch.dtype]) -> DeviceReport:
    """Run every case on an accelerator, in this process.

    Args:
        device_type: An accelerator that is present.
        name: Its name.
        imitated: Formats whose kernels only pretend to compute in them, which does not count.

    Returns:
        The report. FP32 is timed as this process has set it, TF32 included.

    Cost:
        A second or two, many synchronisations, and about 0.5 GiB of device memory for their duration.
    """
    outcomes: dict[str, dict[str, Tried]] = {}
    for dtype in (torch.float32, *FORMATS):

        def tried(case: str, dtype: torch.dtype = dtype) -> Tried:
            if case == "gemm" and dtype in imitated:
                return Tried("unsupported", detail="torch only imitates it on this device")
            return try_case(case, dtype, device_type, ACCELERATOR_SIZES)

        outcomes[dtype_name(dtype)] = try_format(tried)
    formats = {dtype: _support(dtype, outcomes, outcomes) for dtype in FORMATS}
    return DeviceReport(device_type=device_type, name=name, formats=formats, needs_isa_limit=False)


def _ask_child() -> dict[str, Table]:
    """Start the child, and return the outcomes of every case: without a limit, with mezzo's own, and timed."""
    if not sys.executable or getattr(sys, "frozen", False):
        # A frozen program's executable is the program: starting it would run the user's work again.
        raise CannotProbeError("this Python has no executable of its own to start a child process with")
    dtypes = [dtype_name(dtype) for dtype in (torch.float32, *FORMATS)]
    arguments = json.dumps({"dtypes": dtypes, "setting": isa_setting(), "limit": ISA_LIMIT})
    try:
        done = subprocess.run(
            [*CHILD_COMMAND, arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHILD_TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as fault:
        raise CannotProbeError(f"a child process could not be started or did not end ({fault})") from fault
    logger.debug("stderr of the probe's child: %s", done.stderr.decode(errors="replace")[-2000:])
    said = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(PREFIX)]
    if done.returncode != 0 or not said:
        raise CannotProbeError(f"a child process ended with exit code {done.returncode} before it had said anything")
    return {
        setting: {dtype: {case: Tried(**fields) for case, fields in cases.items()} for dtype, cases in tried.items()}
        for setting, tried in json.loads(said[-1].removeprefix(PREFIX)).items()
    }


def _environment() -> dict[str, str]:
    # The user's limits must not hide a crash, their verbosity not flood the pipe, and their warning
    # filters not turn a deprecation inside torch into a failed probe.
    unwanted = {ISA_VARIABLE, "DNNL_MAX_CPU_ISA", "ONEDNN_VERBOSE", "DNNL_VERBOSE", "PYTHONWARNINGS"}
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    # The child must find the torch that this process found, wherever that was.
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return environment


def _support(dtype: torch.dtype, free: Table, timed: Table, note: str = "") -> FormatSupport:
    """Draw the conclusion for one format from the outcomes of its cases."""
    own, fp32, tried = timed[dtype_name(dtype)], timed["float32"], free[dtype_name(dtype)]
    speeds: dict[str, float] = {}
    for case in TIMED_CASES:
        base, seconds = (cases[case].seconds if case in cases else None for cases in (fp32, own))
        if base and seconds and not any(outcome.status == "crashes" for outcome in own.values()):
            speeds[case] = base / seconds
    slowest = min(speeds, key=speeds.__getitem__, default="")
    detail = f"slowest: {slowest}" if slowest else "nothing was timed"
    for status, and_more in (("unsupported", ""), ("crashes", note)):  # of both, a crash is what matters
        troubles = [f"{case}: {outcome.detail}" for case, outcome in tried.items() if outcome.status == status]
        detail = troubles[0] + and_more if troubles else detail
    cases = {case: outcome.status for case, outcome in tried.items()}
    return FormatSupport(dtype=dtype, cases=cases, speeds=speeds, detail=detail)
