"""What this device can really do, and what mezzo does about it.

Three questions are answered here. :func:`probe`: which formats work, and how fast. :func:`will_emulate`:
whether a policy's low-precision products are computed natively or in FP32 from rounded operands.
:func:`protect` and :func:`guard`: how a native computation is kept from killing the process on a CPU that claims
instructions which it cannot run. How the answers are found is the work of ``probe``.
Importing this file starts nothing, sets nothing and touches no device.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mezzo.cast.device import cache
from mezzo.cast.device import probing as children
from mezzo.cast.device.child import CASES
from mezzo.cast.device.probing import ISA_VARIABLE, isa_setting
from mezzo.cast.device.report import FAST_ENOUGH, FORMATS, DeviceReport, FormatSupport
from mezzo.cast.device.trial import read_limit, survives_here, switch_onednn_off
from mezzo.errors import PolicyError, UnsupportedError, message, nearest
from mezzo.tensors import dtype_name

__all__ = [
    "FAST_ENOUGH",
    "FORMATS",
    "ISA_VARIABLE",
    "DeviceReport",
    "Emulation",
    "FormatSupport",
    "Intention",
    "Kinds",
    "Protection",
    "default_kinds",
    "devices",
    "guard",
    "intention",
    "probe",
    "protect",
    "will_emulate",
]

logger = logging.getLogger(__name__)

#: Formats in which emulation itself computes; they need neither probe nor protection.
FULL_PRECISION = (torch.float32, torch.float64)

#: Device types that torch knows and that may be absent, for telling a typing error from an absence.
KNOWN_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")

Intention = Literal["native", "limit", "emulate", "unsupported"]

# What was found out in this process. Both are caches: nothing but a refresh changes an entry, and losing
# one costs time only.
_reports: dict[str, DeviceReport] = {}
_protections: dict[torch.dtype, Protection] = {}
_without_onednn: set[torch.dtype] = set()
_lock = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What must be done so that native computation in a format cannot kill this process.

    Args:
        action: ``"none"``: it is safe as things are. ``"limit"``: it is safe because oneDNN had not been
            used, and ``ONEDNN_MAX_CPU_ISA`` has been set in this process. ``"emulate"``: it must not run.
        reason: Why, in words.
    """

    action: Literal["none", "limit", "emulate"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Whether low-precision products are computed in FP32 from rounded operands.

    Args:
        active: True if they are.
        reason: Why, in words; a run prints it once.
    """

    active: bool
    reason: str


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


class Kinds:
    """The device types that the regions of a model cover: those of its tensors, wherever these are by now.

    A model without tensors is taken to be where new ones would be: on the accelerator, if there is one.

    Args:
        tensors: The model's, parameters before buffers: parameters stay the same objects when they move.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        examples: dict[str, Tensor] = {}
        for tensor in tensors:
            examples.setdefault(tensor.device.type, tensor)
        self._examples = list(examples.values())
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self) -> tuple[str, ...]:
        """Return them, the CPU first."""
        now = tuple([example.device.type for example in self._examples])
        if now not in self._known:
            self._known[now] = tuple(kind for kind in devices() if kind in now) or default_kinds()
        return self._known[now]


def default_kinds() -> tuple[str, ...]:
    """Return what a region covers that belongs to no model: the accelerator, or where there is none the CPU."""
    return (devices()[-1],)


def probe(device_type: str = "cpu", *, refresh: bool = False) -> DeviceReport:
    """Find out which formats a device computes in, and how fast.

    A CPU is probed in child processes from which ``ONEDNN_MAX_CPU_ISA`` is removed, so that neither a
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
    _require_device(device_type)
    with _lock:
        if refresh or device_type not in _reports:
            _reports[device_type] = _cpu(refresh) if device_type == "cpu" else _accelerator(device_type)
            for dtype in [dtype for dtype, made in _protections.items() if made.action != "limit"]:
                del _protections[dtype]
        return _reports[device_type]


def protect(device_type: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Protection:
    """Make native computation in a format safe, or say that it must not happen.

    Call it before anything is computed natively in the format, and as early as possible: once oneDNN has
    been used, by an FP32 ``bmm`` or convolution for instance, the limit comes too late. Whether it does
    is not guessed: a forked copy of this process tries the very cases that crashed.

    Args:
        device_type: ``"cpu"`` or an accelerator that is present.
        dtype: The format.

    Returns:
        The same answer each time it is called with the same arguments.

    Raises:
        UnsupportedError: If the device is absent.
        PolicyError: If there is no such device type, or mezzo does not know the format.

    Cost:
        That of :func:`probe`; on a CPU where the format crashes also a fork of this process.

    Example:
        >>> protect("cpu", torch.float32).action
        'none'
    """
    _require_device(device_type)
    _require_format(dtype)
    if dtype in FULL_PRECISION:
        return Protection(action="none", reason=f"{dtype_name(dtype)} is safe everywhere")
    if device_type != "cpu":
        support = _support(device_type, dtype)
        works = support.status == "native"
        return Protection(action="none" if works else "emulate", reason=_because(support, device_type))
    with _lock:
        if dtype not in _protections:
            _protections[dtype] = _protect_cpu(dtype)
        return _protections[dtype]


def guard(device_type: str, dtype: torch.dtype) -> Protection:
    """Protect this process from every product in a format, those that mezzo does not compute among them.

    Emulation reaches what a region sees. It does not reach C++ callers (TorchScript, autograd's own functions),
    nor what a user computes with low-precision weights outside a region. So where the format must not be computed
    natively and would kill the process, oneDNN is switched off in it, as by ``torch.backends.mkldnn.set_flags(False)``:
    torch's own kernels, which sum in FP32 and round once, compute what nobody emulates. The log says so.

    Args:
        device_type: ``"cpu"`` or an accelerator that is present.
        dtype: The format.

    Returns:
        What :func:`protect` answers.

    Raises:
        UnsupportedError: If the device is absent.
        PolicyError: If there is no such device type, or mezzo does not know the format.

    Cost:
        That of :func:`protect`; where oneDNN is switched off, convolutions are slower from then on, in FP32 too.

    Example:
        >>> guard("cpu", torch.float32).action
        'none'
    """
    made = protect(device_type, dtype)
    if device_type == "cpu" and made.action == "emulate" and _support(device_type, dtype).status == "crashes":
        with _lock:
            if dtype not in _without_onednn:
                _go_without_onednn(dtype, made.reason)
                _without_onednn.add(dtype)
    return made


def will_emulate(dtype: torch.dtype, device_type: str = "cpu", emulate: Literal["auto"] | bool = "auto") -> Emulation:
    """Decide whether products in a format are emulated on a device.

    Args:
        dtype: The compute format of a policy.
        device_type: ``"cpu"`` or an accelerator that is present.
        emulate: ``"auto"`` emulates where the device lacks the format, would crash, or takes more than
            twice the time that it takes in FP32. ``True`` always does, ``False`` never.

    Returns:
        The decision and its reason. FP32 is never emulated.

    Raises:
        UnsupportedError: If the device is absent or cannot hold the format; with ``emulate=False`` also
            if native arithmetic is missing or would crash.
        PolicyError: If there is no such device type, mezzo does not know the format, or ``emulate`` is
            none of the three.

    Cost:
        None for FP32. Otherwise that of :func:`probe` (but a CUDA device is only asked, not measured);
        where a CPU crashes and the answer is native, that of :func:`protect`, which is then called.

    Example:
        >>> will_emulate(torch.bfloat16, "cpu", True)
        Emulation(active=True, reason='emulate=True asks for it')
    """
    _require_device(device_type)
    _require_format(dtype)
    if emulate != "auto" and not isinstance(emulate, bool):
        raise PolicyError(
            f"emulate={emulate!r} is not understood",
            why='it is "auto", True or False',
            write='emulate="auto"',
        )
    if dtype in FULL_PRECISION:
        return Emulation(active=False, reason=f"{dtype_name(dtype)} is what emulation computes in")
    if emulate is True and device_type == "cpu":
        return Emulation(active=True, reason="emulate=True asks for it")
    support = _support(device_type, dtype)
    if not support.can_hold:
        raise UnsupportedError(
            f"{device_type} cannot hold {dtype_name(dtype)}",
            why=support.detail,
            write='dtype="float16" or dtype="bfloat16"',
        )
    if emulate is True:
        return Emulation(active=True, reason="emulate=True asks for it")
    refusal = _because(support, device_type) if support.status == "unsupported" else ""
    if emulate == "auto" and not refusal and not support.fast:
        return Emulation(active=True, reason=_because(support, device_type))
    if support.status == "crashes":
        protection = protect(device_type, dtype)
        refusal = protection.reason if protection.action == "emulate" else ""
    if not refusal:
        return Emulation(active=False, reason=_because(support, device_type))
    if emulate == "auto":
        return Emulation(active=True, reason=refusal)
    cure = f"\n{ISA_VARIABLE}={children.ISA_LIMIT} python …" if support.status == "crashes" else ""
    raise UnsupportedError(
        f"{dtype_name(dtype)} cannot be computed natively on this {device_type}",
        why=refusal,
        write=f'emulate="auto"{cure}',
    )


def intention(report: DeviceReport, dtype: torch.dtype) -> Intention:
    """Say what a fresh process does with ``emulate="auto"``, without doing it.

    Args:
        report: From :func:`probe`.
        dtype: One of ``FORMATS``.

    Returns:
        ``"limit"`` means native, once ``ONEDNN_MAX_CPU_ISA`` has been set.

    Example:
        >>> intention(probe("cpu"), torch.float16) in ("native", "limit", "emulate")
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


def _protect_cpu(dtype: torch.dtype) -> Protection:
    report = probe("cpu")
    support = report.formats[dtype]
    if support.status != "crashes":
        works = support.status == "native"
        return Protection(action="none" if works else "emulate", reason=_because(support, "cpu"))
    crashed = [case for case, status in support.cases.items() if status == "crashes"]
    cases = crashed or [case for case in CASES if case != "storage"]  # nothing is known: try everything
    own_setting, limit = isa_setting(), children.ISA_LIMIT
    sets_limit = own_setting is None and report.needs_isa_limit  # a limit of the user's own is not overridden
    if sets_limit:
        os.environ[ISA_VARIABLE] = limit
    # From here on it is settled what oneDNN obeys, whoever puts the environment back. Only then it is tried.
    read_limit()
    trouble = survives_here(dtype, cases)
    where = f"{ISA_VARIABLE}={own_setting}" if own_setting else f"no {ISA_VARIABLE}"
    if not trouble and sets_limit:
        reason = f"{dtype_name(dtype)} crashes on this CPU, so mezzo has set {ISA_VARIABLE}={limit}"
        return Protection(action="limit", reason=reason)
    if not trouble:
        return Protection(action="none", reason=f"with {where} a copy of this process survived it")
    if not sets_limit:
        reason = f"{dtype_name(dtype)} crashes on this CPU ({support.detail}); with {where}, {trouble}"
        return Protection(action="emulate", reason=reason)
    del os.environ[ISA_VARIABLE]
    reason = (
        f"{dtype_name(dtype)} crashes on this CPU unless {ISA_VARIABLE}={limit} is set before oneDNN's first "
        f"use, and in this process that is too late or cannot be known: {trouble}"
    )
    return Protection(action="emulate", reason=reason)


def _go_without_onednn(dtype: torch.dtype, reason: str) -> None:
    """Switch oneDNN off and say so, once for each format."""
    cases = [case for case in CASES if case != "storage"]
    trouble = survives_here(dtype, cases, onednn=False)
    switch_onednn_off()
    name = dtype_name(dtype)
    text = message(
        "oneDNN is switched off in this process",
        where=f"every {name} product on the CPU, inside mezzo's regions and outside",
        why=f"{reason}; torch's own kernels take its place, and are slower"
        + (f"; even without it, {trouble}: compute in {name} in mezzo's regions alone" if trouble else ""),
        write=f"{ISA_VARIABLE}={children.ISA_LIMIT} python …" if probe("cpu").needs_isa_limit else "",
    )
    logger.warning("%s", text)


def _cpu(refresh: bool) -> DeviceReport:
    cpu = cache.processor()
    report = None if refresh else cache.load(cpu)
    if report is None:
        report, lasting = children.cpu_report(cpu.name)
        if lasting:
            cache.store(cpu, report)
    return report


def _accelerator(device_type: str) -> DeviceReport:
    module = torch.get_device_module(device_type)
    named = getattr(module, "get_device_name", None)
    native = {torch.bfloat16: _cuda_has_bfloat16()} if device_type == "cuda" else {}
    return children.accelerator_report(device_type, named() if named else device_type, native)


def _cuda_has_bfloat16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _support(device_type: str, dtype: torch.dtype) -> FormatSupport:
    if device_type != "cuda":
        return probe(device_type).formats[dtype]
    # CUDA devices answer without being measured, so that a training run does not begin with a benchmark.
    native = {torch.float16: True, torch.bfloat16: _cuda_has_bfloat16()}.get(dtype, False)
    return FormatSupport(
        dtype=dtype,
        status="native" if native else "unsupported",
        fast=native,
        speed_ratio=None,
        cases={},
        speeds={},
        detail="tensor cores" if native else "no tensor cores for it behind torch's ordinary products",
    )


def _because(support: FormatSupport, device_type: str) -> str:
    name = f"{dtype_name(support.dtype)} on this {device_type}"
    if support.status == "unsupported":
        return f"{name} has no arithmetic ({support.detail})"
    ratio = "unknown" if support.speed_ratio is None else f"{support.speed_ratio:.2g} times float32's"
    if support.status == "crashes":
        return f"{name} crashes ({support.detail}); speed {ratio}"
    if support.speed_ratio is None:
        return f"{name} is native ({support.detail})"
    return f"{name} is native and {'fast' if support.fast else 'slow'}: speed {ratio} ({support.detail})"


def _require_device(device_type: str) -> None:
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


def _require_format(dtype: torch.dtype) -> None:
    known = (*FULL_PRECISION, *FORMATS)
    if dtype not in known:
        names = ", ".join(dtype_name(known_dtype) for known_dtype in known)
        raise PolicyError(f"{dtype} is not a format that mezzo computes in", why=f"it knows {names}")
