"""What an update does to a weight, counted: whether it moves it, and in which storage formats it would not.

One definition and two executors: a kernel in C++ for float32 on a CPU, and torch's operations. They agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mezzo.formats import Format
from mezzo.numerics.counting import compiled
from mezzo.step.executors.cpp.build import CppKernel
from mezzo.step.executors.cpp.launch import threads

__all__ = ["BEYOND", "FIELDS", "Move", "count_moves"]

#: Weights at least so many times as large as their update lose it in FP16: an addition shifts it out.
BEYOND: Final = 2048.0
#: What is counted before the formats: elements that are updated; of these, those whose weight is :data:`BEYOND`;
#: elements with a gradient; of these, those that are not updated.
FIELDS: Final = 4
#: Elements that torch's operations look at at a time.
_ON_CPU, _ON_GPU = 1 << 16, 1 << 22

_CPP: Final = r"""
#include <cstdint>
#include <cstring>
#include <cmath>

constexpr int BLOCK = 1024, MOST = 16;

struct Format { double normal, eps, largest, beyond; };

// The nearest value of a format, ties to even. Without branches, so that compilers make vectors of it.
inline double rounded(double value, const Format& format) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    bits &= 0x7ff0000000000000u;
    double power;
    std::memcpy(&power, &bits, 8);
    power = power > format.normal ? power : format.normal;
    power = power < 0x1p200 ? power : 0x1p200;  // an infinity stays one
    const double magic = 0x1.8p52 * (power * format.eps);  // a sum with it has the format's grid
    const double found = value + magic - magic;
    return std::fabs(found) > format.largest ? std::copysign(format.beyond, found) : found;
}

extern "C" void kernel(int64_t weights, int64_t updates, int64_t gradients, int64_t length,
                       int64_t formats, int64_t count, int64_t row, int64_t threads) {
    const float* from = reinterpret_cast<const float*>(weights);
    const float* by = reinterpret_cast<const float*>(updates);
    const uint8_t* has = reinterpret_cast<const uint8_t*>(gradients);
    const Format* table = reinterpret_cast<const Format*>(formats);
    #pragma omp parallel num_threads(threads)
    {
        int64_t own[4 + MOST] = {};
        #pragma omp for schedule(static)
        for (int64_t start = 0; start < length; start += BLOCK) {
            const int64_t end = length - start < BLOCK ? length : start + BLOCK;
            int32_t moved = 0, beyond = 0, given = 0, unmoved = 0;
            for (int64_t at = start; at < end; ++at) {
                const bool moves = by[at] != 0.0f;
                moved += moves;
                beyond += moves & (std::fabs(from[at]) >= 2048.0f * std::fabs(by[at]));
                given += has[at];
                unmoved += has[at] & !moves;
            }
            own[0] += moved;
            own[1] += beyond;
            own[2] += given;
            own[3] += unmoved;
            for (int64_t each = 0; each < count; ++each) {
                const Format format = table[each];
                int64_t stays = 0;
                for (int64_t at = start; at < end; ++at) {
                    // Of two floats the sum in double is rounded so little that rounding it once more errs nowhere.
                    const double stored = rounded(from[at], format), update = by[at];
                    stays += (update != 0.0) & (rounded(stored + update, format) == stored);
                }
                own[4 + each] += stays;
            }
        }
        #pragma omp critical
        for (int64_t each = 0; each < 4 + count; ++each) reinterpret_cast<int64_t*>(row)[each] += own[each];
    }
}
"""


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
        formats: The storage formats, at most sixteen.

    **Cost**: no host sync. One pass in C++; else some ten kernels of torch's for each format, for small tensors
    together.
    """
    batch: list[Move] = []
    size = 0
    for weight, update, gradient, row in moves:
        has = torch.zeros_like(update, dtype=torch.bool) if gradient is None else gradient != 0
        parts = weight, update, has
        kernel = _kernel() if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
        if kernel is not None:
            given = (each.contiguous() for each in parts)
            kernel(*given, weight.numel(), _table(tuple(formats)), len(formats), row, threads(weight.numel()))
            continue
        most = _ON_CPU if weight.device.type == "cpu" else _ON_GPU
        for of_weight, of_update, of_gradient in zip(*(torch.split(each, most) for each in parts), strict=True):
            if batch and size + len(of_weight) > most:
                _count(batch, formats)
                batch, size = [], 0
            batch.append(Move(of_weight, of_update, of_gradient, row))
            size += len(of_weight)
    if batch:
        _count(batch, formats)


def _count(batch: Sequence[Move], formats: Sequence[Format]) -> None:
    weights, updates, gradients, rows = zip(*batch, strict=True)
    gradient, (moves, beyond, *lost) = torch.cat(gradients), _masks(torch.cat(weights), torch.cat(updates), formats)
    together = torch.stack([moves, beyond, gradient, gradient & ~moves, *lost])
    for part, row in zip(torch.split(together, [*map(len, updates)], dim=1), rows, strict=True):
        row.add_(part.sum(1))


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


@cache
def _table(formats: tuple[Format, ...]) -> Tensor:
    """Return what the kernel reads of some formats."""
    fields = [(each.smallest_normal, each.eps, each.max, math.inf if each.has_inf else math.nan) for each in formats]
    return torch.tensor(fields, dtype=torch.float64)


def _kernel() -> CppKernel | None:
    return compiled(_CPP, "updates")
