"""Find out which devices there are and whether products in a format are right there; keep what a CPU's answer was.

On some virtual machines the processor advertises AMX, and oneDNN's AMX path dies with an illegal instruction on any
BF16 product wider than about 64, because the hypervisor hides a CPUID leaf. No query tells beforehand; only trying
does, and only another process may try. What follows from the answer is decided in ``decide.py``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from mezzo import files
from mezzo.cast.device import child, claims
from mezzo.cast.device.child import FAMILIES, Family
from mezzo.cast.device.claims import NOTHING, Claim
from mezzo.dispatch import DisableTorchFunction
from mezzo.errors import PolicyError, UnsupportedError, nearest
from mezzo.tensors import dtype_name

# Which device types are here, and which of them a region covers.

#: Device types that torch knows and that may be absent, for telling a typing error from an absence.
KNOWN_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")


def devices() -> list[str]:
    """List the device types that are present: the CPU and the current accelerator.

    Returns:
        Names as in ``torch.device``, the CPU first.

    Cost:
        None; no device is initialised.

    Example:
        >>> devices()[0]
        'cpu'
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def default_device_types() -> tuple[str, ...]:
    """Return the device types of a region that belongs to no model: the accelerator, or where there is none the CPU."""
    return (devices()[-1],)


def require_device(device_type: str) -> None:
    """Refuse a device type that is absent, or that there is none of."""
    present = devices()
    if device_type in present:
        return
    if device_type in KNOWN_DEVICE_TYPES:
        raise UnsupportedError(
            f"there is no {device_type} device here",
            why=f"torch {torch.__version__} finds {', '.join(present)}",
            write=f'device_type="{present[-1]}"',
        )
    vocabulary = dict.fromkeys((*KNOWN_DEVICE_TYPES, *present))
    raise PolicyError(f"unknown device type {device_type!r}", why=nearest(device_type, vocabulary))


logger = logging.getLogger(__name__)

#: The formats that a report covers.
FORMATS: Final = (torch.float16, torch.bfloat16)

ISA_VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
#: All of AVX-512 with FP16 and BF16, but not AMX.
ISA_LIMIT = "AVX512_CORE_FP16"

#: A format pays from this share of FP32's speed on. Emulation costs an FP32 product and the rounding of its operands
#: and result, and native storage halves the memory, so a somewhat slower native product is still the better bargain;
#: one that takes more than twice FP32's time no longer is.
FAST_ENOUGH: Final = 0.5
#: A measured speed overrules what the device says of itself only where it lies beyond this factor from ``FAST_ENOUGH``:
#: nearer to it a busy machine would decide, now so and now otherwise.
FAR: Final = 4

#: The program that examines a format, whose name it gets. ``-P`` keeps the folder of this file off its import path; no
#: warning filter of the user's turns a deprecation inside torch into a failed probe.
CHILD_COMMAND = [sys.executable, "-P", "-W", "ignore", str(Path(child.__file__))]
#: It needs a few seconds, and on a busy machine many times that. What ends here is a child that hangs.
CHILD_TIMEOUT_S = 1800.0

#: A copy of this process that waits for a lock which another thread held would do so for ever; it needs some 20 ms. One
#: that does not end is no answer: a new copy is made, and has longer.
TRIAL_TIMEOUTS_S = (20, 60, 180)

#: Counted up whenever the products or the meaning of an answer change.
_VERSION: Final = 7
#: What /proc/cpuinfo calls the things that decide which kernels run; the rest varies, like the clock.
_IDENTIFYING: Final = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")

Status = Literal["right", "wrong", "dead", "unsupported", "unknown"]


#: What a child says of a family.
_TOLD: Final = ("status", "speed_ratio", "detail")
#: From the best to the worst.
_WORSE: Final = ("right", "unknown", "unsupported", "wrong", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySupport:
    """What the products of one family in one format are on one device.

    Args:
        status: ``"right"``: they agree with FP32's from the same rounded operands; ``"wrong"``: they do not;
            ``"dead"``: products kill the process, whichever of them; ``"unsupported"``: torch has no kernel;
            ``"unknown"``: it could not be asked.
        speed_ratio: Time of FP32 over time of this format in the slowest product, above 1 is faster; None where that
            was not measured.
        detail: Why, in words.
        claim: What the device says of itself about the format.
        is_cured: Of a dead format, whether it is right under the limit on oneDNN that it will be used with.
    """

    status: Status
    speed_ratio: float | None = None
    detail: str
    claim: Claim = NOTHING
    is_cured: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether it is right, if need be under the limit."""
        return self.status == "right" or self.is_cured

    @property
    def overrules(self) -> bool:
        """Whether the measured speed lies so far from ``FAST_ENOUGH`` that it decides, and not the device's claim."""
        ratio = self.speed_ratio
        if ratio is None:
            return False
        return ratio > FAR * FAST_ENOUGH if not self.claim.has else FAR * ratio < FAST_ENOUGH

    @property
    def fast(self) -> bool:
        """Whether it is right, and the device says that it has the format, unless the measured speed overrules that."""
        return self.is_usable and bool(self.claim.has) != self.overrules

    @property
    def why(self) -> str:
        """What decided whether it is fast, in words: the device's claim, or the measured speed."""
        if not self.overrules:
            return self.claim.words
        measured = f"it was measured at {self.speed_ratio:.2g} times float32's speed ({self.detail})"
        return f"{measured}, although {self.claim.words}"

    @property
    def is_whole(self) -> bool:
        """Whether each value is one that it can have; what a file says may be anything."""
        is_ratio = isinstance(self.speed_ratio, int | float | None)
        return self.status in get_args(Status) and is_ratio and isinstance(self.detail, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSupport:
    """What products in one format are on one device, for each family of them.

    Args:
        families: Family -> support, for each of ``FAMILIES``.
    """

    families: Mapping[Family, FamilySupport] = field(hash=False)

    @classmethod
    def same_for_all(cls, status: Status, detail: str, **more: Any) -> FormatSupport:
        """Make the support of a format of which one thing holds for every family: what :class:`FamilySupport` takes."""
        return cls(families=dict.fromkeys(FAMILIES, FamilySupport(status=status, detail=detail, **more)))

    @classmethod
    def of_report(cls, report: Mapping[Family, Mapping[str, Any]]) -> FormatSupport:
        """Read the report of a child process, or of a file.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: It is no such report.
        """
        families = {family: FamilySupport(**{name: report[family][name] for name in _TOLD}) for family in FAMILIES}
        if odd := [family for family in families.values() if not family.is_whole]:
            raise ValueError(f"its file says {odd[0]}")
        return cls(families=families)

    def to_tell(self) -> dict[Family, dict[str, Any]]:
        """Return the report that :meth:`of_report` reads: results of trials, without the device's own claims."""
        return {family: {name: getattr(support, name) for name in _TOLD} for family, support in self.families.items()}

    def claiming(self, claim: Claim) -> FormatSupport:
        """Return the same with the device's own claims."""
        return FormatSupport(
            families={family: replace(support, claim=claim) for family, support in self.families.items()}
        )

    @property
    def worst(self) -> FamilySupport:
        """The family that is least right, and among those the slowest."""
        return max(
            self.families.values(),
            key=lambda support: (_WORSE.index(support.status), -(support.speed_ratio or float("inf"))),
        )

    @property
    def status(self) -> Status:
        """The worst of all families."""
        return self.worst.status

    def to_list(self) -> list[dict[str, Any]]:
        """Return the families as JSON can hold them."""
        return [
            {"family": family, **asdict(support), "fast": support.fast, "why": support.why}
            for family, support in self.families.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What one device can do.

    Args:
        device_type: As in ``torch.device``.
        name: The maker's name of the processor.
        formats: dtype -> support, for each of ``FORMATS``.
        needs_isa_limit: Whether a format kills its process on this CPU, and is right once oneDNN is kept from the
            instructions that the machine claims to have but cannot run.
    """

    device_type: str
    name: str
    formats: Mapping[torch.dtype, FormatSupport] = field(hash=False)
    needs_isa_limit: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        formats = [
            {"dtype": dtype_name(dtype), "status": support.status, "families": support.to_list()}
            for dtype, support in self.formats.items()
        ]
        names = ("device_type", "name", "needs_isa_limit")
        return {name: getattr(self, name) for name in names} | {"formats": formats}


def isa_setting() -> str | None:
    """Return the limit on oneDNN's instructions that this process has in its environment."""
    # oneDNN still reads the older name when the newer one is absent.
    return os.environ.get(ISA_VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA") or None


def cpu_report(*, refresh: bool = False) -> DeviceReport:
    """Examine each format in a fresh interpreter: without a limit on oneDNN, and as it will be used.

    It is used under the user's own limit; where there is none, under mezzo's if the format is dead without.

    Args:
        refresh: Forget what is kept on disk.

    Cost:
        A few seconds for each format and limit once on a machine, then that of reading a file.
    """
    cpu, setting, stored_formats = processor(), isa_setting(), dict[str, FormatSupport]()
    about = {**cpu, "torch": torch.__version__, "probe": _VERSION}
    file = f"device-{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]}.json"
    try:
        stored = {} if refresh else json.loads(files.kept(file).read_bytes())
        stored_formats = {key: FormatSupport.of_report(report) for key, report in stored.items()}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as fault:
        stored_formats = {}
        logger.info("nothing is known of this CPU: %s", fault)
    answers = dict(stored_formats)

    def support_of(dtype: torch.dtype, limit: str | None) -> FormatSupport:
        key = dtype_name(dtype) + (f" under {limit}" if limit else "")
        answers[key] = answers.get(key) or _ask_child(dtype, limit)
        return answers[key]

    formats, needs_isa_limit = {}, False
    for dtype in FORMATS:
        unlimited = support_of(dtype, None)
        dies = unlimited.status == "dead"
        cured = dies and any(family.status == "right" for family in support_of(dtype, ISA_LIMIT).families.values())
        limit = setting or (ISA_LIMIT if cured else None)
        used = support_of(dtype, limit).claiming(claims.of_processor(cpu, dtype, limit))
        formats[dtype] = _dead(used, unlimited.worst.detail, cured) if dies else used
        needs_isa_limit |= cured
    # What could not be asked, on a machine that is too busy for instance, may answer the next time.
    lasting = {key: support for key, support in answers.items() if support.status != "unknown"}
    if lasting != stored_formats:
        try:
            kept_now = {key: support.to_tell() for key, support in lasting.items()}
            files.keep(file, json.dumps(kept_now, indent=1).encode())
        except (OSError, RuntimeError) as fault:
            logger.info("what was found out of this CPU could not be kept: %s", fault)
    return DeviceReport(device_type="cpu", name=cpu["name"], formats=formats, needs_isa_limit=needs_isa_limit)


def _dead(used: FormatSupport, died: str, cured: bool) -> FormatSupport:
    """Return that a format kills processes, with each family's speed under the limit that it will be used with."""
    families = {}
    for family, support in used.families.items():
        under = "" if support.status == "right" else f" ({support.detail})"
        cure = f"; {support.status}{under} with {ISA_VARIABLE}={ISA_LIMIT}" if cured else ""
        families[family] = replace(support, status="dead", detail=died + cure, is_cured=support.status == "right")
    return FormatSupport(families=families)


def cuda_report() -> DeviceReport:
    """Return the report of a GPU: nothing is measured, so that a training run does not begin with a benchmark."""
    capability = None if torch.version.hip else torch.cuda.get_device_capability()
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    formats = {}
    for dtype in FORMATS:
        if dtype is torch.bfloat16 and not has_bfloat16:
            formats[dtype] = FormatSupport.same_for_all("unsupported", "torch only imitates it on this device")
        else:
            claim = claims.of_cuda(capability, dtype)
            formats[dtype] = FormatSupport.same_for_all(
                "right", "the device is made for it" if claim.has else claim.words, claim=claim
            )
    return DeviceReport(device_type="cuda", name=torch.cuda.get_device_name(), formats=formats)


def accelerator_report(device_type: str) -> DeviceReport:
    """Examine each format on another accelerator, in this process.

    Cost:
        A second or two, with synchronisations.
    """
    named = getattr(torch.get_device_module(device_type), "get_device_name", None)
    claim = claims.of_accelerator(device_type)
    with DisableTorchFunction():  # whatever region or mode is around
        reports = {dtype: child.examined(dtype, device_type) for dtype in FORMATS}
    formats = {dtype: FormatSupport.of_report(report).claiming(claim) for dtype, report in reports.items()}
    return DeviceReport(device_type=device_type, name=named() if named else device_type, formats=formats)


def _ask_child(dtype: torch.dtype, limit: str | None) -> FormatSupport:
    """Examine a format in a fresh interpreter, under a limit."""
    environment = {key: value for key, value in os.environ.items() if key not in (ISA_VARIABLE, "DNNL_MAX_CPU_ISA")}
    environment |= {ISA_VARIABLE: limit} if limit else {}
    report, ended, fault = answered([*CHILD_COMMAND, dtype_name(dtype)], environment, CHILD_TIMEOUT_S)
    if report is not None:
        return FormatSupport.of_report(report)
    if fault in child.FAULTS:
        return FormatSupport.same_for_all("dead", f"another process that tried it was killed by {fault}")
    return _unknown(ended)


def answered(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[dict[Any, Any] | None, str, str]:
    """Run another Python, which may die, and return what it printed for its parent.

    Args:
        command: The program: it prints one line that begins with ``child.PREFIX``, then JSON.
        environment: Its variables; it finds what this process imports from.
        timeout_s: After which it is ended.

    Returns:
        What it said, or None where it died or could not be started; how it ended, in words; and the signal by which it
        was killed, or ``""``.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        # A frozen program's executable is the program: starting it would run the user's work again.
        return None, "this Python has no executable of its own to start another with", ""
    try:
        # It must find the torch that this process found, wherever that was; imports pass over what is no text.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path if isinstance(folder, str))
        variables, nothing = {**environment, "PYTHONPATH": path}, subprocess.DEVNULL
        done = subprocess.run(command, env=variables, stdin=nothing, capture_output=True, timeout=timeout_s)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, f"another process could not be started or did not end ({error})", ""
    logger.debug("stderr of another process: %s", done.stderr.decode(errors="replace")[-2000:])
    fault = {number.value: number.name for number in signal.Signals}.get(-done.returncode, "")
    lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(child.PREFIX)]
    if done.returncode != 0 or not lines:
        ended = f"was killed by {fault}" if fault else f"ended with exit code {done.returncode}"
        return None, f"another process {ended} and had said nothing", fault
    answer: dict[Any, Any] = json.loads(lines[-1].removeprefix(child.PREFIX))
    return answer, "", ""


def _unknown(why: str) -> FormatSupport:
    return FormatSupport.same_for_all("unknown", f"it could not be asked: {why}")


# This process ------------------------------------------------------------------------------------------


def survives_here(dtype: torch.dtype) -> bool:
    """Try products in a forked copy of this process, with whatever state oneDNN is in here.

    oneDNN reads its limit once, at its first use or at the first query of it, and torch has no call that tells whether
    that has happened: an FP32 ``bmm`` already does it. What a copy survives, this process survives.

    Cost:
        A fork and some 20 ms.
    """
    if not hasattr(os, "fork"):
        return False
    with suppress(OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the threads that a fork leaves behind: the copy needs none of them
        for limit_s in TRIAL_TIMEOUTS_S:
            ended = os.waitpid(_copy_that_tries(dtype, limit_s), 0)[1]
            if not (os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGALRM):
                return ended == 0
    return False


def _copy_that_tries(dtype: torch.dtype, limit_s: int) -> int:
    """Start a copy of this process that tries products and ends, at the latest after some seconds; return its id."""
    copy = os.fork()
    if copy == 0:
        code = 1
        try:
            child.die_quietly()
            signal.alarm(limit_s)
            torch.set_num_threads(1)  # the threads of the pool are not copied
            with DisableTorchFunction():
                child.products(dtype)
            code = 0
        finally:
            os._exit(code)  # no exit handlers, no flushing of buffers that belong to the parent
    return copy


def processor() -> dict[str, str]:
    """Return the CPU's ``name``, and what tells it from others as far as it matters which kernels run on it."""
    facts: dict[str, str] = {}
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in _IDENTIFYING:
                facts[key.strip()] = value.strip()
    # A cluster shares a home folder among machines, and whether an advertised instruction really works is a matter of
    # the hypervisor, which only these give away.
    for source in ("sys_vendor", "product_name"):
        with suppress(OSError, UnicodeDecodeError):
            facts[source] = Path("/sys/class/dmi/id", source).read_text().strip()
    facts["platform"] = f"{platform.machine()} {platform.system()} {platform.release()}"
    return facts | {"name": facts.get("model name") or platform.processor() or platform.machine() or "unknown CPU"}
