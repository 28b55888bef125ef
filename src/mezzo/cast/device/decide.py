"""What mezzo does about a format on a device: compute natively, or compute in FP32 from rounded operands.

Native computation must never kill the process, on a CPU that claims instructions which it cannot run either: the
decision is carried out as it is made. Importing this file starts nothing, sets nothing and touches no device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mezzo.cast.device import probing
from mezzo.cast.device.child import FAMILIES, Family
from mezzo.cast.device.probing import (
    FORMATS,
    ISA_VARIABLE,
    DeviceReport,
    FamilySupport,
    devices,
    isa_setting,
    require_device,
    survives_here,
)
from mezzo.errors import UnsupportedError, message
from mezzo.policy import Policy
from mezzo.releases import private
from mezzo.tensors import dtype_name

logger = logging.getLogger(__name__)

Action = Literal["native", "limit", "emulate"]

# What was found out in this process. All are caches: nothing but a refresh changes an entry, and losing one costs time
# only.
_reports: dict[str, DeviceReport] = {}
_revived: dict[torch.dtype, Choice] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the products of one family are computed in a format on a device.

    Args:
        action: ``"native"``; ``"limit"``: natively, since ``ONEDNN_MAX_CPU_ISA`` has been set in this process before
            oneDNN was used; ``"emulate"``: in FP32, from rounded operands.
        reason: Why, in words.
    """

    action: Action
    reason: str


def probe(device_type: str = "cpu", *, refresh: bool = False) -> DeviceReport:
    """Find out which formats a device computes in rightly, what it says of itself, and how fast they are.

    A CPU is asked in fresh interpreters, one for each format, so that neither a crash nor the first use of oneDNN
    happens in this process. Their answers are kept in ``$XDG_CACHE_HOME/mezzo`` (or ``~/.cache/mezzo``), in one file
    for each processor and torch version. CUDA is asked what the device is made for; other accelerators compute in this
    process.

    Args:
        device_type: ``"cpu"`` or an accelerator that is present.
        refresh: Ask again even if an answer is known.

    Returns:
        One :class:`FormatSupport` for each of ``FORMATS``.

    Raises:
        UnsupportedError: If the device is absent.
        PolicyError: If there is no such device type.

    Cost:
        On a CPU some seconds the first time, some milliseconds in later processes.

    Example:
        >>> list(probe("cpu").formats)
        [torch.float16, torch.bfloat16]
    """
    require_device(device_type)
    with _lock:
        if refresh or device_type not in _reports:
            match device_type:
                case "cpu":
                    _reports["cpu"] = probing.cpu_report(refresh=refresh)
                case "cuda":
                    _reports["cuda"] = probing.cuda_report()
                case _:
                    _reports[device_type] = probing.accelerator_report(device_type)
        return _reports[device_type]


def arithmetic(
    dtype: torch.dtype, device_type: str = "cpu", emulate: Literal["auto"] | bool = "auto"
) -> Mapping[Family, Choice]:
    """Decide how each family of products is computed in a format on a device, and make this process safe for it.

    Call it before anything is computed natively in the format, and as early as possible: once oneDNN has been used, by
    an FP32 ``bmm`` or convolution for instance, its limit comes too late. Then products are emulated, and the log says
    so once. Emulation reaches what a region sees; what a program computes in the format outside regions still dies.

    Args:
        dtype: The compute format of a policy.
        device_type: ``"cpu"`` or an accelerator that is present.
        emulate: ``"auto"`` emulates a family where the device lacks the format for it, computes it wrongly, would
            crash, or says of itself that it has nothing that computes in the format (``claims.py``). A measured speed
            overrules what it says only far from ``FAST_ENOUGH``: a format that it has and that takes eight times FP32's
            time is emulated, one that it does not name and that is twice as fast is not. ``True`` always emulates,
            ``False`` never does.

    Returns:
        For each family the decision and its reason. FP32 is never emulated.

    Raises:
        UnsupportedError: If the device is absent; with ``emulate=False`` also if native arithmetic is not right in a
            family.
        PolicyError: If there is no such device type.

    Cost:
        None for FP32. Otherwise that of :func:`probe`, and on a CPU where the format crashes a fork of this process.

    Example:
        >>> arithmetic(torch.float32)["products"]
        Choice(action='native', reason='float32 is what emulation computes in')
    """
    require_device(device_type)
    name = dtype_name(dtype)
    if dtype not in FORMATS:
        return dict.fromkeys(FAMILIES, Choice(action="native", reason=f"{name} is what emulation computes in"))
    report = probe(device_type)
    families = report.formats[dtype].families
    revived = _survived(dtype, report)
    cure = f"{ISA_VARIABLE}={probing.ISA_LIMIT} python …" if report.needs_isa_limit else ""
    if emulate is True:
        return dict.fromkeys(FAMILIES, Choice(action="emulate", reason="emulate=True asks for it"))
    reasons = {(support.status, support.why if support.is_usable else support.detail) for support in families.values()}
    are_alike = len(reasons) == 1
    called = {family: name if are_alike else f"{name} in {family}" for family in families}
    choices = {family: _safe(families[family], called[family], device_type, revived) for family in families}
    lacking = [family for family, choice in choices.items() if choice.action == "emulate"]
    if emulate is False and lacking:
        which = "" if len(lacking) == len(FAMILIES) else f": {', '.join(lacking)}"
        cannot = f"{name} cannot be computed natively on this {device_type}{which}"
        write = 'emulate="auto", the text emulate=auto'
        why = "; ".join(dict.fromkeys(choices[family].reason for family in lacking))
        raise UnsupportedError(cannot, why=why, write=write + (cure and f"\n{cure}"))
    if emulate is False:
        return choices
    loud = [family for family in lacking if families[family].status != "unsupported"]
    if loud:
        all_are = len(loud) == len(FAMILIES)
        which = f"{name} products are emulated" if all_are else f"{name} is emulated in {' and '.join(loud)}"
        why = "; ".join(dict.fromkeys(choices[family].reason for family in loud))
        _say_once(f"{which} on this {device_type}", why, cure)
    slow = {
        family: Choice(action="emulate", reason=f"{called[family]} on this {device_type} is slow: {support.why}")
        for family, support in families.items()
        if family not in lacking and not support.fast
    }
    return choices | slow


def emulated_families(
    dtype: torch.dtype, device_type: str, emulate: Literal["auto"] | bool = "auto"
) -> frozenset[Family]:
    """Return the families that :func:`arithmetic` emulates.

    Example:
        >>> emulated_families(torch.float32, "cpu", True)
        frozenset()
    """
    choices = arithmetic(dtype, device_type, emulate)
    return frozenset(family for family, choice in choices.items() if choice.action == "emulate")


def is_right(dtype: torch.dtype, device_type: str, family: Family) -> bool:
    """Return whether native arithmetic is right in a family, however slow, and make this process safe for it.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        device_type: ``"cpu"`` or an accelerator that is present.
        family: Of products.

    **Cost**: that of :func:`arithmetic`.
    """
    report = probe(device_type)
    support = report.formats[dtype].families[family]
    return _safe(support, dtype_name(dtype), device_type, _survived(dtype, report)).action != "emulate"


def _survived(dtype: torch.dtype, report: DeviceReport) -> Choice | None:
    """Return how this process lives on with a format that kills processes; None where it does not."""
    if report.formats[dtype].status != "dead":
        return None
    with _lock:
        choice = _revived[dtype] = _revived.get(dtype) or _revive(dtype, report)
    return choice


def _safe(support: FamilySupport, what: str, device_type: str, revived: Choice | None) -> Choice:
    """Return how a family is computed natively, or that it is emulated where it cannot be."""
    if revived is not None:
        unsafe = revived.action != "emulate" and not support.is_usable  # not right under the limit
        return Choice(action="emulate", reason=f"{what}: {support.detail}") if unsafe else revived
    is_right = support.status == "right"
    status = f"{what} on this {device_type} is {support.status} ({support.why if is_right else support.detail})"
    return Choice(action="native" if is_right else "emulate", reason=status)


def _revive(dtype: torch.dtype, report: DeviceReport) -> Choice:
    """Make native computation safe in a format that kills processes on this CPU, or say why it must not happen."""
    name, setting, support = dtype_name(dtype), isa_setting(), report.formats[dtype]
    dies = f"{name} kills the process on this CPU ({support.families['products'].detail})"
    if not any(family.is_usable for family in support.families.values()):  # under the limit, too
        return Choice(action="emulate", reason=dies)
    limit = setting or probing.ISA_LIMIT
    if setting is None:
        os.environ[ISA_VARIABLE] = limit
    # oneDNN reads it now, and obeys it whatever the environment becomes: unless it has read another before.
    private("torch.ops.mkldnn._is_mkldnn_bf16_supported")()
    if survives_here(dtype):
        whose = f"and {ISA_VARIABLE}={limit} is set" if setting else f"so mezzo has set {ISA_VARIABLE}={limit}"
        return Choice(action="native" if setting else "limit", reason=f"{dies}, {whose}")
    if setting is None:
        del os.environ[ISA_VARIABLE]
    return Choice(action="emulate", reason=f"{dies}, and this process has used oneDNN before that was set")


_said: set[str] = set()


def _say_once(what: str, why: str, cure: str) -> None:
    with _lock:
        if what in _said:
            return
        _said.add(what)
    where = "every region of mezzo's in this process; do not compute in the format outside them" if cure else ""
    logger.warning("%s", message(what, where=where, why=why, write=cure))


def intended(report: DeviceReport, dtype: torch.dtype) -> Mapping[Family, Action]:
    """Return what a fresh process does with ``emulate="auto"`` for each family, without doing it.

    Args:
        report: From :func:`probe`.
        dtype: One of ``FORMATS``.

    Returns:
        ``"limit"`` means native, once ``ONEDNN_MAX_CPU_ISA`` has been set.

    Example:
        >>> intended(probe("cpu"), torch.float16)["products"] in ("native", "limit", "emulate")
        True
    """

    def one(support: FamilySupport) -> Action:
        if not support.fast:
            return "emulate"
        return "native" if support.status == "right" or isa_setting() is not None else "limit"

    return {family: one(support) for family, support in report.formats[dtype].families.items()}


def fast_format(device_types: Container[str]) -> torch.dtype:
    """Return the low format to train in where none is chosen: BF16, or FP16 where the device is fast in that alone.

    What the device says of itself decides, as for :func:`arithmetic`: the same machine gives the same format.

    The family of linear layers and matrix products decides: nearly every model spends its time there.

    Args:
        device_types: Those of a model's tensors; an accelerator's answer counts before the CPU's.

    Cost:
        That of :func:`probe`.
    """
    present = devices()[::-1]
    formats = probe(next((device_type for device_type in present if device_type in device_types), present[0])).formats
    half, brain = (formats[dtype].families["products"] for dtype in (torch.float16, torch.bfloat16))
    return torch.float16 if half.fast and not brain.fast else torch.bfloat16


def usual_policy(device_types: Container[str]) -> Policy:
    """Return the policy where none is given, in every style: O1 in the fast format of this machine.

    Args:
        device_types: As for :func:`fast_format`.

    Cost:
        That of :func:`probe`.
    """
    policy = Policy.O1(fast_format(device_types))
    logger.info("no policy is given: %s, in the format for this machine (mezzo doctor says why)", policy)
    return policy
