"""Updates that vanish: added to a weight in some storage format, they round away."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import PolicyError, shown
from mezzo.formats import Format, by_name
from mezzo.numerics.moves import FIELDS, Move, count_moves
from mezzo.tensors import dtype_name

__all__ = ["swallowed"]

#: Elements that are widened at a time, to bound the scratch memory.
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
        PolicyError: The shapes differ, or one is no tensor of a floating dtype.

    **Cost**: one host sync, at the end; less than 128 MiB of scratch memory, whatever the size.

    Example:
        >>> import torch
        >>> swallowed(torch.tensor([1.0, 1.0]), torch.tensor([1e-3, 1e-2]), "bfloat16")
        0.5
    """
    target = by_name(dtype)
    for tensor in (weight, update):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            wrong = f"{dtype_name(tensor.dtype)} tensors" if isinstance(tensor, Tensor) else shown(tensor)
            raise PolicyError(
                f"no updates are swallowed by {wrong}",
                why="a weight and its update are real floating-point numbers",
                write="swallowed(weight, new_weight - weight, dtype)",
            )
    if weight.shape != update.shape:
        raise PolicyError(
            "a weight and its update differ in shape",
            where=f"weight {tuple(weight.shape)}, update {tuple(update.shape)}",
            write="swallowed(weight, new_weight - weight, dtype)",
        )
    row = torch.zeros(FIELDS + 1, dtype=torch.int64, device=weight.device)
    wide = torch.float64 if torch.float64 in (weight.dtype, update.dtype) else torch.float32
    pairs = zip(*(torch.split(each.detach().reshape(-1), _CHUNK) for each in (weight, update)), strict=True)
    count_moves((Move(stored.to(wide), change.to(wide), None, row) for stored, change in pairs), [target])
    updated, *_, lost = row.tolist()
    return lost / updated if updated else math.nan
