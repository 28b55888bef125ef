"""What a result was measured on: a time without this is no evidence."""

from __future__ import annotations

import os
import platform

import torch

import mezzo
from mezzo.cast.device import processor

__all__ = ["default_device", "describe"]


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def describe(device: torch.device) -> dict[str, str | int | bool]:
    """Describe the machine, as it goes into ``summary.json``.

    Args:
        device: Where the training ran.

    Returns:
        Processor, cores, threads, versions; on a GPU its name and whether FP32 products use TF32, since an
        FP32 baseline means something else when they do.

    Example:
        >>> sorted(describe(torch.device("cpu")))
        ['cores', 'cpu', 'device', 'mezzo', 'python', 'threads', 'torch']
    """
    facts: dict[str, str | int | bool] = {
        "device": device.type,
        "cpu": processor().name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mezzo": mezzo.__version__,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["tf32_matmul"] = torch.backends.cuda.matmul.allow_tf32
        facts["tf32_convolution"] = torch.backends.cudnn.allow_tf32
    return facts
