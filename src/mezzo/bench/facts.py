"""What a benchmark ran on, and the dated file that keeps it beside what was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from mezzo import files
from mezzo.cast.device import probe
from mezzo.errors import PolicyError, UnsupportedError

__all__ = ["checked_device", "facts", "write_dated"]


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
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else probe("cpu").name,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_dated(folder: Path, name: str, result: dict[str, Any] | list[dict[str, Any]]) -> Path:
    """Write a result to ``NAME-DEVICE-DATE.json``: beside, then renamed.

    Args:
        folder: Where; made if it is not there.
        name: Of the benchmark.
        result: What :func:`facts` says and what was measured; of several results the first one's facts count.

    Returns:
        The file.

    Example:
        >>> import tempfile
        >>> write_dated(Path(tempfile.mkdtemp()), "step", {"device": "cpu", "date": "2026-11-21"}).name
        'step-cpu-2026-11-21.json'
    """
    first = result[0] if isinstance(result, list) else result
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{first['device']}-{first['date']}.json"
    with files.whole(target) as file:
        file.write((json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return target
