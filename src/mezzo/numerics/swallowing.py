"""Updates that vanish: added to a weight in some storage format, they round away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.formats import Format, by_name
from mezzo.tensors import dtype_name

__all__ = ["BEYOND", "masks_of", "swallowed"]

#: Weights at least so many times as large as their update lose it in FP16: an addition shifts it out.
BEYOND: Final = 2048.0
#: Elements that are looked at at a time, to bound the scratch memory.
_CHUNK: Final = 1 << 21


def swallowed(weight: Tensor, update: Tensor, dtype: str | torch.dtype | Format) -> float:
    """Return the share of updates that vanish when they are added to a weight stored in some format.

    Among the elements with ``update != 0``, those where ``round(weight + update) == weight`` in the format: the weight
    does not move, however many such steps are taken. An update that is NaN moves it.

    Args:
        weight: Any floating dtype; rounded to the format first where it is not on its grid.
        update: What a step adds, of the weight's shape.
        dtype: The storage: any of ``mezzo.formats``, a name or a dtype of one.

    Returns:
        A share from 0 to 1; NaN where no element is updated.

    Raises:
        PolicyError: The shapes differ, or a dtype is not floating.

    **Cost**: one host sync, at the end; less than 128 MiB of scratch memory, whatever the size.

    Example:
        >>> import torch
        >>> swallowed(torch.tensor([1.0, 1.0]), torch.tensor([1e-3, 1e-2]), "bfloat16")
        0.5
    """
    target = by_name(dtype)
    for tensor in (weight, update):
        if not tensor.is_floating_point():
            raise PolicyError(
                f"{dtype_name(tensor.dtype)} tensors swallow no updates",
                why="a weight and its update are real floating-point numbers",
                write="swallowed(weight, new_weight - weight, dtype)",
            )
    if weight.shape != update.shape:
        raise PolicyError(
            "a weight and its update differ in shape",
            where=f"weight {tuple(weight.shape)}, update {tuple(update.shape)}",
            write="swallowed(weight, new_weight - weight, dtype)",
        )
    counts = torch.zeros(3, dtype=torch.int64, device=weight.device)
    pairs = zip(*(torch.split(each.detach().reshape(-1), _CHUNK) for each in (weight, update)), strict=True)
    for stored, change in pairs:
        wide = torch.float64 if torch.float64 in (stored.dtype, change.dtype) else torch.float32
        counts += torch.stack(masks_of(stored.to(wide), change.to(wide), [target])).sum(1)
    updated, _, lost = counts.tolist()
    return lost / updated if updated else math.nan


def masks_of(weight: Tensor, update: Tensor, formats: Sequence[Format]) -> list[Tensor]:
    """Say of each element whether it is updated, whether its weight is :data:`BEYOND`, and which formats swallow it.

    An update is swallowed where it is less than half of the gap between the stored weight and its neighbour on that
    side; an exact half goes to the even one of the two. The sum itself is never rounded before it is judged.

    Args:
        weight: 1-d, float32 or float64.
        update: Of its shape and dtype.
        formats: The storage formats.

    Returns:
        2 + formats masks of (elements,) bool.

    **Cost**: some ten kernels for each format, no host sync.
    """
    moves = update != 0
    size = update.abs()
    masks = [moves, moves & (weight.abs() >= BEYOND * size)]
    twice = size * 2
    for target in formats:
        stored = target.round(weight)
        total = stored + update
        if target.dtype == weight.dtype:  # what is added in the format itself is rounded once
            masks.append(moves & (total == stored))
            continue
        gap = _power(torch.nextafter(stored, total)).clamp_(min=target.smallest_normal).mul_(target.eps)
        stays = (twice < gap) | ((twice == gap) & (target.round(total) == stored))
        masks.append(stays.logical_and_(moves).logical_and_(total == total))  # a weight that is NaN is none
    return masks


def _power(values: Tensor) -> Tensor:
    """Return the largest power of two that each magnitude reaches; 0 for subnormals."""
    if values.dtype == torch.float64:
        return (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return (values.view(torch.int32) & 0x7F80_0000).view(torch.float32)
