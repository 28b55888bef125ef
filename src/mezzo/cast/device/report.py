"""What was found out about a device, as values with a form that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from mezzo.tensors import dtype_name

__all__ = ["FAST_ENOUGH", "FORMATS", "DeviceReport", "FormatSupport", "Status"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`

Status = Literal["native", "crashes", "unsupported"]

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
        status: ``"native"`` if every case ran; ``"crashes"`` if one of them killed its process, or might
            because it could not be tried; ``"unsupported"`` if torch has no kernel for one of them.
        fast: Whether ``speed_ratio`` reaches ``FAST_ENOUGH``.
        speed_ratio: Time of FP32 over time of this format, above 1 is faster, in the slowest of the
            matrix products and convolutions; None if nothing was timed.
        cases: The status of each case that was tried; after a missing kernel the rest is not tried.
        speeds: The ratio of each case that was timed.
        detail: The reason for the status, or which case is the slowest, in words.
    """

    dtype: torch.dtype
    status: Status
    fast: bool
    speed_ratio: float | None
    cases: Mapping[str, Status] = field(hash=False)
    speeds: Mapping[str, float] = field(hash=False)
    detail: str

    def __post_init__(self) -> None:
        # Reports are shared by everybody who asks, so their insides must not change either.
        object.__setattr__(self, "cases", MappingProxyType(dict(self.cases)))
        object.__setattr__(self, "speeds", MappingProxyType(dict(self.speeds)))

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
        >>> support = FormatSupport(dtype=torch.float16, status="native", fast=False, speed_ratio=0.02,
        ...     cases={"gemm": "native"}, speeds={"gemm": 0.02}, detail="slowest: gemm")
        >>> report = DeviceReport(device_type="cpu", name="a CPU", formats={torch.float16: support},
        ...     needs_isa_limit=False)
        >>> DeviceReport.from_dict(report.to_dict()) == report
        True
    """

    device_type: str
    name: str
    formats: Mapping[torch.dtype, FormatSupport] = field(hash=False)
    needs_isa_limit: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "formats", MappingProxyType(dict(self.formats)))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {
            "device_type": self.device_type,
            "name": self.name,
            "needs_isa_limit": self.needs_isa_limit,
            "formats": [
                {
                    "dtype": dtype_name(support.dtype),
                    "status": support.status,
                    "fast": support.fast,
                    "speed_ratio": support.speed_ratio,
                    "cases": dict(support.cases),
                    "speeds": dict(support.speeds),
                    "detail": support.detail,
                }
                for support in self.formats.values()
            ],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DeviceReport:
        """Rebuild a report.

        Args:
            stored: What :meth:`to_dict` returned.

        Returns:
            An equal report.

        Raises:
            ValueError: If anything is missing or is not what :meth:`to_dict` writes.
        """
        try:
            supports = [_support(entry) for entry in stored["formats"]]
            report = cls(
                device_type=_checked(stored["device_type"], str),
                name=_checked(stored["name"], str),
                formats={support.dtype: support for support in supports},
                needs_isa_limit=_checked(stored["needs_isa_limit"], bool),
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise ValueError(f"not a device report: {fault!r}") from fault
        return report


def _support(entry: Mapping[str, Any]) -> FormatSupport:
    ratio = entry["speed_ratio"]
    support = FormatSupport(
        dtype=_checked(getattr(torch, entry["dtype"]), torch.dtype),
        status=_status(entry["status"]),
        fast=_checked(entry["fast"], bool),
        speed_ratio=None if ratio is None else _speed(ratio),
        cases={case: _status(status) for case, status in entry["cases"].items()},
        speeds={case: _speed(speed) for case, speed in entry["speeds"].items()},
        detail=_checked(entry["detail"], str),
    )
    found = set(support.cases.values())
    follows = next(status for status in ("crashes", "unsupported", "native") if status in found or status == "native")
    if found and support.status != follows:
        raise TypeError(f"{dtype_name(support.dtype)} is said to be {support.status}, and its cases are {follows}")
    if support.fast != (support.speed_ratio is not None and support.speed_ratio >= FAST_ENOUGH):
        raise TypeError(f"fast is {support.fast} at {ratio} times FP32's speed")
    return support


def _speed(value: object) -> float:
    speed = _checked(value, float)
    if not 0 < speed < math.inf:
        raise TypeError(f"{speed} is no ratio of speeds")
    return speed


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _status(value: object) -> Status:
    if value not in get_args(Status):
        raise TypeError(f"{value!r} is not a status")
    return cast(Status, value)
