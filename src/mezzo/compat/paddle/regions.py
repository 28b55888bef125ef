"""``auto_cast``: regions with Paddle's levels and lists."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

from mezzo.cast import autocast
from mezzo.cast.device import default_kinds
from mezzo.cast.region import Region
from mezzo.compat.paddle.lists import PADDLES_LEVELS, checked_names, policy_of
from mezzo.errors import PolicyError, not_switches, raise_together, unknown_word

__all__ = ["LOW", "auto_cast", "last_dtype", "word_of", "wrong_dtype", "wrong_words"]

LOW: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: The dtype of this thread's last ``auto_cast``, by which a ``GradScaler`` knows whether there is anything to scale.
last_dtype: Final = contextvars.ContextVar[torch.dtype]("last_dtype", default=torch.float16)


def auto_cast(
    enable: bool = True,
    custom_white_list: list[str] | tuple[str, ...] | set[str] | None = None,
    custom_black_list: list[str] | tuple[str, ...] | set[str] | None = None,
    level: str = "O1",
    dtype: str | torch.dtype = "float16",
    use_promote: bool = True,
) -> autocast:
    """Run ops in the precision that Paddle's level and lists give them: a context manager, and a decorator.

    ========  ==================  ==================  =================================
    level     on the white list   on the black list   on neither
    ========  ==================  ==================  =================================
    ``O0``    as they are         as they are         as they are
    ``OD``    ``dtype``           FP32                FP32
    ``O1``    ``dtype``           FP32                the widest of its inputs' dtypes
    ``O2``    ``dtype``           FP32 (fewer ops)    the same; without ``use_promote`` ``dtype``
    ========  ==================  ==================  =================================

    Inside, a model that was converted computes as this region says, whatever its weights are stored in.

    Args:
        enable: False is the level O0.
        custom_white_list: Ops to compute in ``dtype``, in Paddle's names: ``["softmax", "elementwise_add"]``.
        custom_black_list: Ops to compute in FP32.
        level: ``"O0"``, ``"OD"``, ``"O1"`` or ``"O2"``.
        dtype: ``"float16"`` or ``"bfloat16"``.
        use_promote: Whether, in O2, an op with an FP32 input computes in FP32.

    Returns:
        A region of mezzo's, for the accelerator, or where there is none the CPU; Paddle's does nothing on a CPU.

    Raises:
        PolicyError: An unknown level, dtype or op, with the nearest known one; an op in both lists.

    **Cost**: a function mode, and so Python for each torch function called; what a call means is worked out once.

    Example:
        >>> import torch
        >>> from mezzo.compat import paddle
        >>> x = torch.rand(4, 4)
        >>> with paddle.auto_cast(custom_white_list=["softmax"], dtype="bfloat16"):
        ...     torch.softmax(x, 0).dtype, x.mean().dtype, (x + x).dtype
        (torch.bfloat16, torch.float32, torch.float32)
    """
    problems = [*wrong_words(level, dtype), *not_switches(enable=enable, use_promote=use_promote)]
    names = []
    for key, given in (("custom_white_list", custom_white_list), ("custom_black_list", custom_black_list)):
        try:
            names.append(checked_names(key, given))
        except PolicyError as problem:
            problems.append(problem)
    raise_together(problems)
    low = LOW[word_of(dtype)]
    if enable:
        last_dtype.set(low)
    return autocast.of(_region(level.upper() if enable else "O0", low, use_promote, *names, default_kinds()))


@functools.lru_cache(maxsize=64)
def _region(
    level: str, dtype: torch.dtype, use_promote: bool, white: tuple[str, ...], black: tuple[str, ...], _: Any
) -> Region:
    """Plan a region; once for the same arguments and devices, as a loop asks for it in every iteration."""
    policy = policy_of(level, dtype, use_promote=use_promote, custom_white_list=white, custom_black_list=black)
    return dataclasses.replace(autocast(policy).region, holds_inside=level != "O0")


def wrong_words(level: Any, dtype: Any, levels: tuple[str, ...] = PADDLES_LEVELS) -> list[PolicyError]:
    """Return the problems of a level and a dtype, if there are any."""
    level_is_known = isinstance(level, str) and level.upper() in levels
    return [*([] if level_is_known else [unknown_word("level", level, levels)]), *wrong_dtype("dtype", dtype)]


def wrong_dtype(name: str, dtype: Any, known: Mapping[str, torch.dtype] = LOW) -> list[PolicyError]:
    """Return the problem of a dtype, if there is one: it is neither one of some words nor what torch has for one."""
    return [] if word_of(dtype) in known else [unknown_word(name, dtype, known)]


def word_of(dtype: Any) -> str:
    """Return Paddle's word for a dtype that is given by it, or as torch's own; nothing for anything else."""
    return str(dtype).removeprefix("torch.").lower() if isinstance(dtype, str | torch.dtype) else ""
