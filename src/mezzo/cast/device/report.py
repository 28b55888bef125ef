"""What was found out about a device, as values with a form that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from mezzo.cast.device.child import Status
from mezzo.tensors import dtype_name

__all__ = ["FAST_ENOUGH", "FORMATS", "DeviceReport", "FormatSupport"]

#: The formats that a report covers; FP32 is what they are measured against.
FORMATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

#: A format counts as fast from this share of FP32's speed on. Emulation costs an FP32 product and the
#: rounding of its operands and result, and native storage halves the memory, so a somewhat slower native
#: product is still the better bargain; one that takes more than twice FP32's time no longer is.
FAST_ENOUGH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSupport:
    """What one device can do in one format.

    Args:
        dtype: The format.
        cases: The status of each case that was tried; after a missing kernel the rest is not tried.
        speeds: Time of FP32 over time of this format in each case that was timed, above 1 is faster.
        detail: The reason for the status, or which case is the slowest, in words.
    """

    dtype: torch.dtype
    cases: Mapping[str, Status] = field(hash=False)
    speeds: Mapping[str, float] = field(hash=False)
    detail: str

    def __post_init__(self) -> None:
        # One report is handed to all who ask, so its insides must not change either; frozen dataclasses are filled so.
        object.__setattr__(self, "cases", MappingProxyType(dict(self.cases)))
        object.__setattr__(self, "speeds", MappingProxyType(dict(self.speeds)))

    @property
    def status(self) -> Status:
        """What the cases say together: ``"crashes"`` if one killed its process, or none could be tried."""
        found = set(self.cases.values())
        if "crashes" in found or not found:
            return "crashes"
        return "unsupported" if "unsupported" in found else "native"

    @property
    def speed_ratio(self) -> float | None:
        """The smallest of the speeds; None if nothing was timed, or a kernel is missing."""
        return None if self.status == "unsupported" else min(self.speeds.values(), default=None)

    @property
    def fast(self) -> bool:
        """Whether :attr:`speed_ratio` reaches ``FAST_ENOUGH``."""
        return self.speed_ratio is not None and self.speed_ratio >= FAST_ENOUGH

    @property
    def can_hold(self) -> bool:
        """Whether the device can at least store the format, without which emulation fails too."""
        return self.cases.get("storage") != "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What one device can do.

    Args:
        device_type: As in ``torch.device``.
        name: The maker's name of the processor.
        formats: dtype -> support, for each of ``FORMATS``.
        needs_isa_limit: Whether formats crash on this CPU, and all of them work once oneDNN is kept from
            the instructions that the machine claims to have but cannot run.

    Example:
        >>> support = FormatSupport(dtype=torch.float16, cases={"gemm": "native"}, speeds={"gemm": 0.02},
        ...     detail="slowest: gemm")
        >>> support.status, support.fast
        ('native', False)
        >>> report = DeviceReport(device_type="cpu", name="a CPU", formats={torch.float16: support},
        ...     needs_isa_limit=False)
        >>> DeviceReport.from_dict(report.to_dict()) == report
        True
    """

    _OWN: ClassVar = ("device_type", "name", "needs_isa_limit")

    device_type: str
    name: str
    formats: Mapping[torch.dtype, FormatSupport] = field(hash=False)
    needs_isa_limit: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "formats", MappingProxyType(dict(self.formats)))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it, with what follows from it."""
        said = ("status", "fast", "speed_ratio", "detail")
        formats = [
            {"dtype": dtype_name(support.dtype), "cases": dict(support.cases), "speeds": dict(support.speeds)}
            | {name: getattr(support, name) for name in said}
            for support in self.formats.values()
        ]
        return {name: getattr(self, name) for name in self._OWN} | {"formats": formats}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DeviceReport:
        """Rebuild a report from what :meth:`to_dict` returned."""
        kept = ("cases", "speeds", "detail")
        formats = {getattr(torch, entry["dtype"]): {name: entry[name] for name in kept} for entry in stored["formats"]}
        supports = {dtype: FormatSupport(dtype=dtype, **values) for dtype, values in formats.items()}
        return cls(**{name: stored[name] for name in cls._OWN}, formats=supports)
