"""Who asked: the op behind a torch function or kernel, the line of the user's code, mezzo's own casts."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, Literal

from mezzo.cast.notes import notes
from mezzo.errors import PolicyError
from mezzo.policy.ops import resolve

Doing = Literal["emulation", "cast", "buffer", "region", "other"]


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


def user_line(until: int = 0) -> str | None:
    """Return ``file:line`` of the innermost code that is neither torch's nor mezzo's.

    ``None`` where there is none: ``nn.Sequential`` of torch's layers runs
    no line of the user's.

    Args:
        until: The frame that runs the model, as :func:`here` names it. What called it is no line of the model's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) != until:
        name = str(frame.f_globals.get("__name__", ""))
        if not is_from(name, "torch") and not is_from(name, "mezzo"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def here() -> int:
    """Name the frame that calls, for as long as it runs; it is not kept alive by its name."""
    return id(sys._getframe(1))


def doing() -> Doing:
    """Say what mezzo does around a function or kernel: emulate, cast, widen a buffer, only decide, or nothing."""
    taken = notes()
    inner = (note.kind for note in reversed(taken) if note.kind != "op")
    return next(inner, "region" if taken else "other")


def is_from(name: str, package: str) -> bool:
    """Whether a module belongs to a package."""
    return name == package or name.startswith(f"{package}.")
