"""``paddle.amp`` as its programs call it: ``auto_cast``, ``decorate`` and ``GradScaler``, over sessions of mezzo's.

``from mezzo.compat import paddle`` stands for ``paddle.amp``: models and optimizers are torch's, or mezzo's.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from typing import Any, Final, Literal

import torch

from mezzo.cast import autocast
from mezzo.cast.device import default_kinds
from mezzo.cast.region import Region
from mezzo.compat.paddle_lists import Gray, checked_names, rules
from mezzo.errors import PolicyError, nearest, shown
from mezzo.policy import Policy
from mezzo.policy.ops.lists import PADDLE

__all__ = ["auto_cast"]

Level = Literal["O0", "OD", "O1", "O2"]

_LEVELS: Final[tuple[Level, ...]] = ("O0", "OD", "O1", "O2")
_DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_EXTRA: Final = PADDLE["extra black list"]
#: What is computed in FP32 at each level, and what ops on neither list get.
_LISTS: Final[dict[str, tuple[frozenset[str], Gray]]] = {
    "OD": (frozenset(), "fp32"), "O1": (PADDLE["black list"] | _EXTRA, "promote"), "O2": (_EXTRA, "promote"),
}  # fmt: skip
#: The dtype of this thread's last ``auto_cast``, by which a ``GradScaler`` knows whether there is anything to scale.
_last_dtype: Final = contextvars.ContextVar[torch.dtype]("_last_dtype", default=torch.float16)


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
    lists = {"custom_white_list": custom_white_list, "custom_black_list": custom_black_list}
    problems = [*_wrong_words(level, dtype), *_no_switches(enable=enable, use_promote=use_promote)]
    names = []
    for key, given in lists.items():
        try:
            names.append(checked_names(key, given))
        except PolicyError as problem:
            problems.append(problem)
    if problems:
        raise PolicyError.together(problems)
    low = _dtype(dtype)
    if enable:
        _last_dtype.set(low)
    return autocast.of(_region(level.upper() if enable else "O0", low, use_promote, *names, default_kinds()))


@functools.lru_cache(maxsize=64)
def _region(
    level: str, dtype: torch.dtype, use_promote: bool, white: tuple[str, ...], black: tuple[str, ...], _: Any
) -> Region:
    """Plan a region; once for the same arguments and devices, as a loop asks for it in every iteration."""
    if level == "O0":
        return autocast(Policy.O0()).region
    listed, gray = _LISTS[level]
    made = rules(
        PADDLE["white list"],
        listed,
        gray if use_promote or level != "O2" else "low",
        custom_white_list=white,
        custom_black_list=black,
    )
    return dataclasses.replace(autocast(Policy.O1(dtype, rules=made)).region, holds_inside=True)


def _wrong_words(level: Any, dtype: Any, levels: tuple[str, ...] = _LEVELS) -> list[PolicyError]:
    problems = []
    if not isinstance(level, str) or level.upper() not in levels:
        why = nearest(level if isinstance(level, str) else shown(level), levels)
        problems.append(PolicyError(f"unknown level {shown(level)}", why=why, write='level="O1"'))
    if _dtype(dtype) is None:
        why = nearest(dtype if isinstance(dtype, str) else shown(dtype), _DTYPES)
        problems.append(PolicyError(f"unknown dtype {shown(dtype)}", why=why, write='dtype="bfloat16"'))
    return problems


def _dtype(dtype: Any) -> Any:
    word = str(dtype).removeprefix("torch.").lower() if isinstance(dtype, str | torch.dtype) else ""
    return _DTYPES.get(word)


def _no_switches(**switches: Any) -> list[PolicyError]:
    return [
        PolicyError(f"{name} is {shown(value)}", why="it is True or False", write=f"{name}=True")
        for name, value in switches.items()
        if not isinstance(value, bool)
    ]
