"""What mezzo does about a format on a device: compute natively, compute in FP32 from rounded operands, or refuse.

Native computation must never kill the process, on a CPU that claims instructions which it cannot run either: the
decision is carried out as it is made. Importing this file starts nothing, sets nothing and touches no device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

import torch

from mezzo.cast.device import probing
from mezzo.cast.device.child import CASES, ISA_VARIABLE
from mezzo.cast.device.kinds import require_device
from mezzo.cast.device.probing import isa_setting, read_limit, survives_here, switch_onednn_off
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport
from mezzo.errors import PolicyError, UnsupportedError, message
from mezzo.tensors import dtype_name

__all__ = ["Action", "Choice", "arithmetic", "fast_format", "intended", "probe"]

logger = logging.getLogger(__name__)

#: Formats in which emulation itself computes; they need neither probe nor protection.
FULL_PRECISION = (torch.float32, torch.float64)

Action = Literal["native", "limit", "emulate", "unsupported"]

# What was found out in this process. All are caches: nothing but a refresh changes an entry, and losing
# one costs time only.
_reports: dict[str, DeviceReport] = {}
_native: dict[torch.dtype, Choice] = {}
_without_onednn: set[torch.dtype] = set()
_lock = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the products of a format are computed on a device.

    Args:
        action: ``"native"``; ``"limit"``: natively, since ``ONEDNN_MAX_CPU_ISA`` has been set in this process before
            oneDNN was used; ``"emulate"``: in FP32, from rounded operands; ``"unsupported"``: not at all.
        reason: Why, in words.
    """

    action: Action
    reason: str


def probe(device_type: str = "cpu", *, refresh: bool = False) -> DeviceReport:
    """Find out which formats a device computes in, and how fast.

    A CPU is probed in a child process from which ``ONEDNN_MAX_CPU_ISA`` is removed, so that neither a
    crash nor the first use of oneDNN happens in this one. The report is kept in this process, and for a
    CPU also in ``$XDG_CACHE_HOME/mezzo`` (or ``~/.cache/mezzo``), per processor, torch version and value
    of that variable.

    Args:
        device_type: ``"cpu"`` or an accelerator that is present.
        refresh: Probe again even if an answer is known.

    Returns:
        One :class:`FormatSupport` for each of ``FORMATS``.

    Raises:
        UnsupportedError: If the device is absent.
        PolicyError: If there is no such device type.

    Cost:
        On a CPU about four seconds the first time, some milliseconds in later processes. On an
        accelerator about two seconds in every process, with synchronisations.

    Example:
        >>> probe("cpu").formats[torch.bfloat16].dtype
        torch.bfloat16
    """
    require_device(device_type)
    with _lock:
        if refresh or device_type not in _reports:
            _reports[device_type] = _cpu(refresh) if device_type == "cpu" else _accelerator(device_type)
            for dtype in [dtype for dtype, made in _native.items() if made.action != "limit"]:
                del _native[dtype]
        return _reports[device_type]


def arithmetic(dtype: torch.dtype, device_type: str = "cpu", emulate: Literal["auto"] | bool = "auto") -> Choice:
    """Decide how the products of a format are computed on a device, and make this process safe for it.

    Call it before anything is computed natively in the format, and as early as possible: once oneDNN has
    been used, by an FP32 ``bmm`` or convolution for instance, the limit comes too late. Whether it does
    is not guessed: a forked copy of this process tries the very cases that crashed.

    Emulation reaches what a region sees. It does not reach C++ callers (TorchScript, autograd's own functions),
    nor what a user computes with low-precision weights outside a region. So where the format would kill the process
    and the limit comes too late, oneDNN is switched off in it, as by ``torch.backends.mkldnn.set_flags(False)``:
    torch's own kernels, which sum in FP32 and round once, compute what is not emulated. The log says so.

    Args:
        dtype: The compute format of a policy.
        device_type: ``"cpu"`` or an accelerator that is present.
        emulate: ``"auto"`` emulates where the device lacks the format, would crash, or takes more than
            twice the time that it takes in FP32. ``True`` always does, ``False`` never.

    Returns:
        The decision and its reason. FP32 is never emulated.

    Raises:
        UnsupportedError: If the device is absent or cannot hold the format; with ``emulate=False`` also
            if native arithmetic is missing or would crash. Nothing is changed then.
        PolicyError: If there is no such device type, mezzo does not know the format, or ``emulate`` is
            none of the three.

    Cost:
        None for FP32. Otherwise that of :func:`probe` (but a CUDA device is only asked, not measured); on a CPU where
        the format crashes also a fork of this process, and where oneDNN is switched off, slower convolutions.

    Example:
        >>> arithmetic(torch.float32)
        Choice(action='native', reason='float32 is what emulation computes in')
    """
    require_device(device_type)
    _require_known(dtype, emulate)
    if dtype in FULL_PRECISION:
        return Choice(action="native", reason=f"{dtype_name(dtype)} is what emulation computes in")
    if device_type == "cuda":
        return _on_cuda(dtype, emulate)
    support = probe(device_type).formats[dtype]
    native = Choice(action="native", reason=_because(support, device_type))
    if not support.can_hold:
        what = f"{device_type} cannot hold {dtype_name(dtype)}"
        raise UnsupportedError(what, why=support.detail, write='dtype="float16" or dtype="bfloat16"')
    if support.status == "unsupported":
        return _chosen(Choice(action="emulate", reason=native.reason), dtype, device_type, emulate)
    if support.status == "crashes" and device_type == "cpu":
        with _lock:
            native = _native[dtype] = _native.get(dtype) or _tried_here(dtype)
        if native.action == "emulate":
            _chosen(native, dtype, device_type, emulate)  # raises before anything is changed
            _go_without_onednn(dtype, native.reason)
    if emulate == "auto" and not support.fast:
        return Choice(action="emulate", reason=_because(support, device_type))
    return _chosen(native, dtype, device_type, emulate)


def intended(report: DeviceReport, dtype: torch.dtype) -> Action:
    """Say what a fresh process does with ``emulate="auto"``, without doing it.

    Args:
        report: From :func:`probe`.
        dtype: One of ``FORMATS``.

    Returns:
        ``"limit"`` means native, once ``ONEDNN_MAX_CPU_ISA`` has been set.

    Example:
        >>> intended(probe("cpu"), torch.float16) in ("native", "limit", "emulate")
        True
    """
    support = report.formats[dtype]
    if not support.can_hold:
        return "unsupported"
    if not support.fast or support.status == "unsupported":
        return "emulate"
    if support.status == "native" or isa_setting() is not None:
        return "native"
    return "limit" if report.needs_isa_limit else "emulate"


def _chosen(native: Choice, dtype: torch.dtype, device_type: str, emulate: Literal["auto"] | bool) -> Choice:
    """Return the choice under a user's ``emulate``, where ``native`` is the choice without it."""
    if emulate is True:
        return Choice(action="emulate", reason="emulate=True asks for it")
    if emulate is False and native.action == "emulate":
        crashes = device_type == "cpu" and probe("cpu").formats[dtype].status == "crashes"
        cure = f"\n{ISA_VARIABLE}={probing.ISA_LIMIT} python …" if crashes else ""
        what = f"{dtype_name(dtype)} cannot be computed natively on this {device_type}"
        raise UnsupportedError(what, why=native.reason, write=f'emulate="auto"{cure}')
    return native


def _on_cuda(dtype: torch.dtype, emulate: Literal["auto"] | bool) -> Choice:
    # Asked and not measured, so that a training run does not begin with a benchmark.
    name = f"{dtype_name(dtype)} on this cuda"
    if dtype == torch.float16 or (dtype == torch.bfloat16 and _cuda_has_bfloat16()):
        native = Choice(action="native", reason=f"{name} is native (tensor cores)")
    else:
        why = "no tensor cores for it behind torch's ordinary products"
        native = Choice(action="emulate", reason=f"{name} has no arithmetic ({why})")
    return _chosen(native, dtype, "cuda", emulate)


def _tried_here(dtype: torch.dtype) -> Choice:
    """Make native computation safe in a format that crashes on this CPU, or say why it must not happen."""
    report, name = probe("cpu"), dtype_name(dtype)
    support = report.formats[dtype]
    crashed = [case for case, status in support.cases.items() if status == "crashes"]
    cases = crashed or [case for case in CASES if case != "storage"]  # nothing is known: try everything
    own_setting, limit = isa_setting(), probing.ISA_LIMIT
    sets_limit = own_setting is None and report.needs_isa_limit  # a limit of the user's own is not overridden
    if sets_limit:
        os.environ[ISA_VARIABLE] = limit
    # oneDNN reads the variable once. It obeys that from here on, whatever the environment becomes, and can be tried.
    read_limit()
    trouble = survives_here(dtype, cases)
    where = f"{ISA_VARIABLE}={own_setting}" if own_setting else f"no {ISA_VARIABLE}"
    if not trouble and sets_limit:
        return Choice(action="limit", reason=f"{name} crashes on this CPU, so mezzo has set {ISA_VARIABLE}={limit}")
    if not trouble:
        return Choice(action="native", reason=f"with {where} a copy of this process survived it")
    if not sets_limit:
        reason = f"{name} crashes on this CPU ({support.detail}); with {where}, {trouble}"
        return Choice(action="emulate", reason=reason)
    del os.environ[ISA_VARIABLE]
    unless = f"{name} crashes on this CPU unless {ISA_VARIABLE}={limit} is set before oneDNN's first use"
    late = "in this process that is too late or cannot be known"
    return Choice(action="emulate", reason=f"{unless}, and {late}: {trouble}")


def _go_without_onednn(dtype: torch.dtype, reason: str) -> None:
    """Switch oneDNN off and say so, once for each format."""
    with _lock:
        if dtype in _without_onednn:
            return
        trouble = survives_here(dtype, [case for case in CASES if case != "storage"], onednn=False)
        switch_onednn_off()
        _without_onednn.add(dtype)
    name = dtype_name(dtype)
    text = message(
        "oneDNN is switched off in this process",
        where=f"every {name} product on the CPU, inside mezzo's regions and outside",
        why=f"{reason}; torch's own kernels take its place, and are slower"
        + (f"; even without it, {trouble}: compute in {name} in mezzo's regions alone" if trouble else ""),
        write=f"{ISA_VARIABLE}={probing.ISA_LIMIT} python …" if probe("cpu").needs_isa_limit else "",
    )
    logger.warning("%s", text)


def _cpu(refresh: bool) -> DeviceReport:
    cpu = probing.processor()
    report = None if refresh else probing.load(cpu)
    if report is None:
        report, lasting = probing.cpu_report(cpu.name)
        if lasting:
            probing.store(cpu, report)
    return report


def _accelerator(device_type: str) -> DeviceReport:
    named = getattr(torch.get_device_module(device_type), "get_device_name", None)
    imitated = {torch.bfloat16} if device_type == "cuda" and not _cuda_has_bfloat16() else set()
    return probing.accelerator_report(device_type, named() if named else device_type, imitated)


def fast_format(kinds: Container[str]) -> torch.dtype:
    """Return the low format to train in where none is chosen: BF16, or FP16 on a GPU without.

    Nothing is measured.

    Args:
        kinds: The device types of a model's tensors.
    """
    return torch.float16 if "cuda" in kinds and not _cuda_has_bfloat16() else torch.bfloat16


def _cuda_has_bfloat16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _because(support: FormatSupport, device_type: str) -> str:
    name = f"{dtype_name(support.dtype)} on this {device_type}"
    if support.status == "unsupported":
        return f"{name} has no arithmetic ({support.detail})"
    ratio = "unknown" if support.speed_ratio is None else f"{support.speed_ratio:.2g} times float32's"
    if support.status == "crashes":
        return f"{name} crashes ({support.detail}); speed {ratio}"
    return f"{name} is native and {'fast' if support.fast else 'slow'}: speed {ratio} ({support.detail})"


def _require_known(dtype: torch.dtype, emulate: object) -> None:
    known = (*FULL_PRECISION, *FORMATS)
    if dtype not in known:
        why = f"it knows {', '.join(map(dtype_name, known))}"
        raise PolicyError(f"{dtype} is not a format that mezzo computes in", why=why)
    if emulate != "auto" and not isinstance(emulate, bool):
        what = f"emulate={emulate!r} is not understood"
        raise PolicyError(what, why='it is "auto", True or False', write='emulate="auto"')
