"""What mezzo's own casting is doing around a kernel, read from the Python stack, so that it needs to tell nobody."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from mezzo.explanation.frames import is_from

__all__ = ["casting_frames", "function_around", "is_emulation"]


def casting_frames() -> list[FrameType]:
    """Return the frames of mezzo's casting between the running kernel and the user's code, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = _module(frame)
        if is_from(name, "mezzo.cast"):
            found.append(frame)
        elif not any(is_from(name, own) for own in ("torch", "mezzo.numerics", "mezzo.explanation")):
            break
        frame = frame.f_back
    return found


def function_around() -> Any:
    """Return the function that the user's code calls, where a region above this trace has taken it apart."""
    inner = (frame for frame in casting_frames() if _module(frame) == "mezzo.cast.carry")
    return next((frame.f_locals["func"] for frame in inner if frame.f_code.co_name == "__torch_function__"), None)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def is_emulation(frame: FrameType) -> bool:
    """Whether a frame belongs to emulated arithmetic."""
    return _module(frame) == "mezzo.cast.emulate"
