"""What an update does to a weight, counted: whether it moves it, and in which storage formats it would not.

One definition and two executors: a kernel in C++ for float32 on a CPU, and torch's operations. They agree bit for bit.
"""

from __future__ import annotations

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
constexpr uint32_t INFINITE = 0x7f800000u;

inline uint32_t bits_of(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
inline float float_of(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }

inline uint32_t when(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - uint32_t(condition);
    return (yes & mask) | (no & ~mask);
}

struct Format { int64_t mantissa; bool has_inf; float normal, smallest, largest; };

// How many updates a format swallows. Without branches, so that compilers make vectors of it.
int64_t stays_in(const Format& format, const float* weights, const float* updates, int64_t length) {
    const uint32_t shift = 23 - format.mantissa, low = (1u << shift) - 1, half = low >> 1;
    const uint32_t normal = bits_of(format.normal), over = format.has_inf ? INFINITE : 0x7fc00000u;
    const float magic = format.smallest * 12582912.0f;  // 1.5 * 2^23: a sum with it has the subnormals' grid
    const float largest = format.largest, eps = float_of((127u - uint32_t(format.mantissa)) << 23);
    uint32_t count = 0;
    for (int64_t at = 0; at < length; ++at) {
        const uint32_t bits = bits_of(weights[at]), size = bits & 0x7fffffffu;
        const uint32_t change = bits_of(updates[at]), step = change & 0x7fffffffu, inwards = (bits ^ change) >> 31;
        const float shifted = float_of(size) + magic;
        uint32_t stored = (size + half + ((size >> shift) & 1u)) & ~low;
        stored = when(size < normal, bits_of(shifted - magic), stored);
        stored = when(float_of(stored) > largest, over, stored);
        stored = when(size > INFINITE, size, stored);
        const uint32_t odd = when(stored < normal, bits_of(shifted), stored >> shift) & 1u;
        const uint32_t power = stored & INFINITE, is_power = (stored & 0x7fffffu) == 0;
        const uint32_t halved = inwards & when(stored > normal, is_power, 0);
        const float gap = float_of(when(power > normal, power, normal)) * eps;
        const float twice = float_of(step) * float_of(0x40000000u + (halved << 23));
        const uint32_t finite = (twice < gap) | ((twice == gap) & (odd ^ 1u));
        const uint32_t infinite = (step < INFINITE) | ((step == INFINITE) & (inwards ^ 1u));
        count += when(stored == INFINITE, infinite, finite) & (stored <= INFINITE) & (step != 0);
    }
    return count;
}

int64_t stays_in_float32(const float* weights, const float* updates, int64_t length) {
    uint32_t count = 0;
    for (int64_t at = 0; at < length; ++at) {
        const uint32_t stays = weights[at] + updates[at] == weights[at] ? 1u : 0u;
        count += updates[at] == 0.0f ? 0u : stays;
    }
    return count;
}

template <class Value>
void with_gradient(const Value* gradients, const float* updates, int64_t length, int64_t* row) {
    int32_t has = 0, rests = 0;
    const Value magnitude = Value(~Value(0)) >> 1;
    for (int64_t at = 0; at < length; ++at) {
        const bool is = (gradients[at] & magnitude) != 0;
        has += is;
        rests += is & (updates[at] == 0.0f);
    }
    row[2] += has;
    row[3] += rests;
}

extern "C" void kernel(int64_t weights, int64_t updates, int64_t gradients, int64_t bytes, int64_t length,
                       int64_t formats, int64_t count, int64_t row, int64_t threads) {
    const float* from = reinterpret_cast<const float*>(weights);
    const float* by = reinterpret_cast<const float*>(updates);
    const double* table = reinterpret_cast<const double*>(formats);
    #pragma omp parallel num_threads(threads)
    {
        int64_t own[4 + MOST] = {};
        #pragma omp for schedule(static)
        for (int64_t block = 0; block < (length + BLOCK - 1) / BLOCK; ++block) {
            const int64_t start = block * BLOCK, size = length - start < BLOCK ? length - start : BLOCK;
            int32_t moved = 0, beyond = 0;
            for (int64_t at = start; at < start + size; ++at) {
                const bool moves = by[at] != 0.0f;
                moved += moves;
                beyond += moves & (std::fabs(from[at]) >= 2048.0f * std::fabs(by[at]));
            }
            own[0] += moved;
            own[1] += beyond;
            if (bytes == 2) with_gradient(reinterpret_cast<const uint16_t*>(gradients) + start, by + start, size, own);
            if (bytes == 4) with_gradient(reinterpret_cast<const uint32_t*>(gradients) + start, by + start, size, own);
            for (int64_t each = 0; each < count; ++each) {
                const double* of = table + 5 * each;
                const Format format = {int64_t(of[0]), of[1] != 0, float(of[2]), float(of[3]), float(of[4])};
                own[4 + each] += format.mantissa == 23 ? stays_in_float32(from + start, by + start, size)
                                                       : stays_in(format, from + start, by + start, size);
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
    for move in moves:
        kernel = _kernel() if move.weight.device.type == "cpu" and move.weight.dtype == torch.float32 else None
        if kernel is not None:
            _launch(kernel, move, formats)
            continue
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


def _launch(kernel: CppKernel, move: Move, formats: Sequence[Format]) -> None:
    weight, update, gradient, row = move
    if gradient is not None and gradient.itemsize not in (2, 4):
        gradient = (gradient != 0).float()
    size = 0 if gradient is None else gradient.itemsize
    given = (each.contiguous() for each in (weight, update, update if gradient is None else gradient))
    kernel(*given, size, weight.numel(), _table(tuple(formats)), len(formats), row, threads(weight.numel()))


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


@cache
def _table(formats: tuple[Format, ...]) -> Tensor:
    """Return what the kernel reads of some formats."""
    fields = [
        (each.mantissa_bits, each.has_inf, each.smallest_normal, each.smallest_subnormal, each.max) for each in formats
    ]
    return torch.tensor(fields, dtype=torch.float64)


def _kernel() -> CppKernel | None:
    return compiled(_CPP, "updates")
