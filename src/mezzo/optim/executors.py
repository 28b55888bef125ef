"""Which executor carries the passes out, by device and size."""

from __future__ import annotations

import functools
import shutil
from typing import Final

import torch

from mezzo.step.kernels import Blocked
from mezzo.step.passes import Executor

__all__ = ["executor_for"]

#: Elements from which on compiling (some seconds, once) is worth its time on a CPU.
_WORTH_COMPILING: Final = 1 << 22


def executor_for(device: torch.device, elements: int) -> Executor:
    """Return the executor for so many elements on a device.

    Args:
        device: Where the parameters are.
        elements: How many there are altogether.
    """
    if device.type == "cpu":
        return _compiled() if elements >= _WORTH_COMPILING and _has_compiler() else _blocked()
    return _compiled()


@functools.cache
def _blocked() -> Executor:
    return Blocked()


@functools.cache
def _compiled() -> Executor:
    from mezzo.step.kernels.compiled import Compiled

    return Compiled()


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
