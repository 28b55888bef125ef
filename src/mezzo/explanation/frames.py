"""Who asked: the op behind a torch function or kernel, the line of the user's code, mezzo's own casts.

Read from the Python stack, so that nothing has to be patched and casts made in a backward pass are told apart too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

from mezzo.errors import PolicyError
from mezzo.policy.ops import resolve

__all__ = ["LAST_FRAME", "Maker", "is_from", "kernel_name", "maker", "op_name", "user_line"]

#: The module whose frame ends the search for the user's line: what called it is the explaining script, not the model.
LAST_FRAME = "mezzo.explanation.run"

Maker = Literal["emulation", "cast", "region", "other"]


@functools.lru_cache(maxsize=4096)
def op_name(function: Any) -> str:
    """Return the base name of a torch function's op, as rules and the op table have it.

    Args:
        function: What a ``TorchFunctionMode`` is given: a function, a method, a property's getter, an op of
            ``torch.ops``.

    Example:
        >>> import torch
        >>> op_name(torch.nn.functional.linear), op_name(torch.Tensor.__matmul__), op_name(torch.Tensor.add_)
        ('linear', 'matmul', 'add_')
        >>> op_name(torch.linalg.inv), op_name(torch.ops.aten.convolution)
        ('linalg_inv', 'convolution')
    """
    qualified = getattr(function, "_qualified_op_name", None) or getattr(getattr(function, "_schema", None), "name", "")
    name = str(qualified or getattr(function, "__name__", type(function).__name__))
    return _known(name.removeprefix("aten::")) or name.strip("_") or name


@functools.lru_cache(maxsize=4096)
def kernel_name(kernel: Any) -> str:
    """Return the base name that fits an aten kernel best: ``softmax`` for ``aten::_softmax``.

    Example:
        >>> import torch
        >>> kernel_name(torch.ops.aten._softmax.default), kernel_name(torch.ops.aten.addmm.default)
        ('softmax', 'addmm')
    """
    name = str(kernel._schema.name)
    if not name.startswith("aten::"):
        return name
    bare = name.removeprefix("aten::").removesuffix("_")
    stems = (bare, *(bare.removeprefix(prefix) for prefix in ("_", "_safe_", "native_")), bare.removesuffix("_forward"))
    return next((known for stem in stems if (known := _known(stem)) is not None), bare)


def _known(name: str) -> str | None:
    try:
        return resolve(name, in_place=True)
    except PolicyError:
        return None


def user_line() -> str | None:
    """Return ``file:line`` of the innermost code that is neither torch's nor mezzo's, inside the explained model.

    Code of mezzo's recipes counts as a user's. ``None`` where there is none: ``nn.Sequential`` of torch's layers runs
    no line of the user's.
    """
    for frame in _frames():
        name = _module_of(frame)
        if name == LAST_FRAME:
            return None
        if not is_from(name, "torch") and (not is_from(name, "mezzo") or is_from(name, "mezzo.recipes")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return None


def maker() -> Maker:
    """Say who runs the current function or kernel: emulation, a cast of mezzo's, a region around it, or none."""
    found: Maker = "other"
    for frame in _frames():
        name = _module_of(frame)
        if name == "mezzo.cast.emulate":
            return "emulation"
        if is_from(name, "mezzo.cast"):
            if "cast" in frame.f_code.co_name:
                return "cast"
            found = "region"
        elif not is_from(name, "torch") and not is_from(name, "mezzo.explanation"):
            break
    return found


def is_from(name: str, package: str) -> bool:
    """Whether a module belongs to a package."""
    return name == package or name.startswith(f"{package}.")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
