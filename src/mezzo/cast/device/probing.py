"""Find out what a device can do: in a child process for a CPU, in process for an accelerator; and keep the answer.

On some virtual machines the processor advertises AMX, and oneDNN's AMX path dies with an illegal
instruction on any BF16 product wider than about 64, because the hypervisor hides a CPUID leaf. No query
tells beforehand; only trying does, and only another process may try. What follows from the answer is
decided in ``decide.py``. Whether *this* process survives what kills others is tried in a copy of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezzo import files
from mezzo.cast.device import child
from mezzo.cast.device.child import ISA_VARIABLE, TIMED_CASES, Tried, run_case
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport
from mezzo.tensors import dtype_name

__all__ = ["ISA_LIMIT", "Processor", "accelerator_report", "cpu_report", "isa_setting", "load", "processor"]
__all__ += ["read_limit", "store", "survives_here", "switch_onednn_off"]

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

#: The work takes some 20 ms. A copy that waits for a lock which another thread held will wait for ever.
TRIAL_TIMEOUT_S = 20.0

#: Counted up whenever the cases or the meaning of a report change.
PROBE_VERSION = 4

#: What /proc/cpuinfo calls the things that decide which kernels run; the rest varies, like the clock.
IDENTIFYING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")

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
    free, limited = found["free"], found["limited"]
    crashed = [name for name, cases in free.items() if child.crashes(cases)]
    cured = bool(crashed) and all(o.status == "native" for name in crashed for o in limited[name].values())
    note = f"; works with {ISA_VARIABLE}={ISA_LIMIT}" if cured else ""
    formats = {dtype: _support(dtype, free, found["used"], note) for dtype in FORMATS}
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
            return child.try_case(case, dtype, device_type, ACCELERATOR_SIZES)

        outcomes[dtype_name(dtype)] = child.try_format(tried)
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
    said = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(child.PREFIX)]
    if done.returncode != 0 or not said:
        raise CannotProbeError(f"a child process ended with exit code {done.returncode} before it had said anything")
    return {
        setting: {dtype: {case: Tried(**fields) for case, fields in cases.items()} for dtype, cases in tried.items()}
        for setting, tried in json.loads(said[-1].removeprefix(child.PREFIX)).items()
    }


def _environment() -> dict[str, str]:
    # The user's limits must not hide a crash, their verbosity not flood the pipe, and their warning
    # filters not turn a deprecation inside torch into a failed probe.
    unwanted = {ISA_VARIABLE, "DNNL_MAX_CPU_ISA", "ONEDNN_VERBOSE", "DNNL_VERBOSE", "PYTHONWARNINGS"}
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    # The child must find the torch that this process found, wherever that was.
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return environment


def _support(dtype: torch.dtype, free: Table, used: Table, note: str = "") -> FormatSupport:
    """Draw the conclusion for one format from the outcomes of its cases."""
    own, fp32, tried = used[dtype_name(dtype)], used["float32"], free[dtype_name(dtype)]
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


# A copy of this process --------------------------------------------------------------------------------


def read_limit() -> None:
    """Have oneDNN read its environment now, if it has not done so yet; later changes of that mean nothing.

    A limit that is only set would be lost if the environment were put back before oneDNN's first use, as
    ``unittest.mock.patch.dict(os.environ)`` does.

    Cost:
        None: oneDNN is asked what the processor can do, and computes nothing.
    """
    if torch._C._has_mkldnn:
        torch.ops.mkldnn._is_mkldnn_bf16_supported()


def switch_onednn_off() -> None:
    """Have torch compute everything on the CPU without oneDNN: in any thread, and for C++ callers too."""
    torch._C._set_mkldnn_enabled(False)


def survives_here(dtype: torch.dtype, cases: Iterable[str], *, onednn: bool = True) -> str:
    """Try cases in a copy of this process, with whatever state oneDNN is in here.

    oneDNN reads its limit once, at its first use or at the first query of it, and torch has no call that
    tells whether that has happened: an FP32 ``bmm`` already does it. A forked copy has the same state, so
    what it survives, this process survives.

    Args:
        dtype: The format.
        cases: Some of ``child.CASES``.
        onednn: Whether the copy may use oneDNN; without it torch falls back on its own kernels.

    Returns:
        The empty string if the copy survived, otherwise why that cannot be said.

    Cost:
        A fork and some 20 ms.
    """

    def work() -> None:
        torch.set_num_threads(1)  # the threads of the pool are not copied
        if not onednn:
            switch_onednn_off()
        for case in cases:
            run_case(
                case, dtype, "cpu", child.SIZES if onednn else child.SIZES[:1]
            )  # without oneDNN a large product takes seconds

    try:
        _, ended = child.in_copy(work, TRIAL_TIMEOUT_S)
    except OSError as fault:
        return f"this process could not be copied to find out ({fault})"
    return ended.trouble and f"a copy of this process that tried it {ended.trouble}"


# What is kept on disk ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The CPU, as far as it matters which kernels run on it.

    Args:
        name: What to call it.
        digest: A hash of its model, its flags, and the machine that may hide some of them.
    """

    name: str
    digest: str


def processor() -> Processor:
    """Identify the CPU of this machine.

    Example:
        >>> processor() == processor()
        True
    """
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in IDENTIFYING:
                facts[key.strip()] = value.strip()
    name = facts.get("model name") or platform.processor() or platform.machine() or "unknown CPU"
    # A cluster shares a home folder among machines, and whether an advertised instruction really works is
    # a matter of the hypervisor, which only these give away.
    for source in ("sys_vendor", "product_name"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            facts[source] = Path("/sys/class/dmi/id", source).read_text().strip()
    facts["platform"] = f"{platform.machine()} {platform.system()} {platform.release()}"
    return Processor(name=name, digest=_digest(facts))


def load(cpu: Processor) -> DeviceReport | None:
    """Read the report of an earlier process, or None if there is none that fits and is as it was written.

    Args:
        cpu: The CPU of this machine.
    """
    key = _key(cpu)
    try:
        stored = json.loads(files.kept(_name(key)))
        if stored["key"] != key or stored["digest"] != _digest(stored["report"]):
            raise ValueError("it was written for another key, or changed since")
        return DeviceReport.from_dict(stored["report"])
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as fault:
        logger.info("ignoring the stored device report: %s", fault)
        return None


def store(cpu: Processor, report: DeviceReport) -> None:
    """Write a report for later processes; if that fails, later processes probe again.

    Args:
        cpu: The CPU of this machine.
        report: What the probe found.
    """
    key, found = _key(cpu), report.to_dict()
    try:
        # Several ranks may finish together: each file appears whole, so a reader sees one whole report.
        files.keep(_name(key), json.dumps({"key": key, "digest": _digest(found), "report": found}, indent=1).encode())
    except (OSError, RuntimeError) as fault:
        logger.info("the device report could not be stored: %s", fault)


def _key(cpu: Processor) -> dict[str, Any]:
    return {"probe": PROBE_VERSION, "torch": torch.__version__, "cpu": cpu.digest, "isa_setting": isa_setting()}


def _name(key: dict[str, Any]) -> str:
    return f"device-{_digest(key)}.json"


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
