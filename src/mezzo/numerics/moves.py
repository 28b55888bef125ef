"""Updates that vanish: added to a weight in some storage format, they round away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mezzo.errors import PolicyError, shown
from mezzo.formats import Format, by_name
from mezzo.tensors import dtype_name

#: Weights at least so many times as large as their update lose it in FP16: an addition shifts it out.
BEYOND: Final = 2048.0
#: What is counted before the formats: elements that are updated; of these, those whose weight is :data:`BEYOND`;
#: elements with a gradient; of these, those that are not updated.
FIELDS: Final = 4
#: Elements that torch's operations look at at a time.
_ON_CPU, _ON_GPU = 1 << 16, 1 << 22
#: Elements that are widened at a time, to bound the scratch memory.
_CHUNK: Final = 1 << 21


class Move(NamedTuple):
    """A weight and what a step adds to it, as vectors of one device.

    Attributes:
        weight: Float32 or float64; in a storage format it is the nearest value.
        update: Of its dtype.
        gradient: Any floating dtype; ``None`` for zeros.
        row: (FIELDS + formats) int64: where the numbers are added.
    """

    weight: Tensor
    update: Tensor
    gradient: Tensor | None
    row: Tensor


def count_moves(moves: Iterable[Move], formats: Sequence[Format]) -> None:
    """Count of each update :data:`FIELDS`, then for each format how many elements it swallows.

    An update is swallowed where it is not zero, and less than half of the gap between the stored weight and its
    neighbour on that side; an exact half goes to the even one of the two. The sum itself is never rounded before it is
    judged.

    Args:
        moves: The updates, of one device.
        formats: The storage formats.

    **Cost**: no host sync; some ten kernels of torch's for each format, for small tensors together.
    """
    batch: list[Move] = []
    size = 0
    for move in moves:
        most = _ON_CPU if move.weight.device.type == "cpu" else _ON_GPU
        known = torch.zeros_like(move.update) if move.gradient is None else move.gradient
        for weight, update, gradient in zip(*(torch.split(each, most) for each in (*move[:2], known)), strict=True):
            if batch and size + weight.numel() > most:
                _count(batch, formats)
                batch, size = [], 0
            batch.append(Move(weight, update, gradient, move.row))
            size += weight.numel()
    if batch:
        _count(batch, formats)


def _count(batch: Sequence[Move], formats: Sequence[Format]) -> None:
    gradient = torch.cat([move.gradient != 0 for move in batch if move.gradient is not None])
    masks = _masks(torch.cat([move.weight for move in batch]), torch.cat([move.update for move in batch]), formats)
    moves, beyond, *lost = masks
    together = torch.stack([moves, beyond, gradient, gradient & ~moves, *lost])
    for part, move in zip(torch.split(together, [move.update.numel() for move in batch], dim=1), batch, strict=True):
        move.row.add_(part.sum(1))


def _masks(weight: Tensor, update: Tensor, formats: Sequence[Format]) -> list[Tensor]:
    """Say of each element whether it is updated, whether its weight is beyond, and which formats swallow it."""
    moves, size = update != 0, update.abs()
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
