"""What a benchmark ran on."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.machine import describe

__all__ = ["checked_device", "facts"]


def checked_device(device: str | torch.device) -> torch.device:
    """Return a device that benchmarks can run on.

    Raises:
        PolicyError: No device's name.
        UnsupportedError: It is not there, or nothing is measured on it.
    """
    try:
        where = torch.device(device)
    except RuntimeError:
        raise PolicyError(f"unknown device {device!r}", why="torch has no such device", write="cpu or cuda") from None
    if where.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"nothing is measured on {where.type}", write="cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device here", write="cpu")
    return where


def facts(device: torch.device) -> dict[str, Any]:
    """Return date, device, machine and versions.

    Args:
        device: Where the benchmark runs.

    Example:
        >>> list(facts(torch.device("cpu")))
        ['date', 'device', 'machine', 'cores', 'threads', 'torch', 'python']
    """
    here = describe(device)
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "machine": here.get("gpu", here["cpu"]),
        **{name: here[name] for name in ("cores", "threads", "torch", "python")},
    }
