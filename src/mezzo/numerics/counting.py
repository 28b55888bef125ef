"""How many values of a tensor lie in each binade: one kernel in C++, one in Triton, and torch's operations.

All of them fill one row of int64 numbers, which stays on the tensor's device:

    BINS counts of the values 2^k < |x| < 2^(k+1), for k from FIRST on,
    BINS counts of the values |x| = 2^k exactly,
    zeros, infinities, NaNs, and the bits of the largest finite |x| as float32.

Powers of two are counted apart because the limits of number formats are powers of two, or lie between values that
are: on which side of a limit the numbers that hit it fall is known only so.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.choose import has_triton
from mezzo.step.executors.cpp.build import CppKernel, built
from mezzo.step.executors.cpp.launch import threads
from mezzo.step.executors.triton import source
from mezzo.tensors import flat

__all__ = ["BINS", "COUNTABLE", "FIRST", "INFS", "LARGEST", "NANS", "ROW", "ZEROS", "compiled", "count_into"]

logger = logging.getLogger(__name__)

#: The exponent of the first bin, that of float32's smallest number; the last is 127.
FIRST: Final = -149
BINS: Final = 277
ZEROS, INFS, NANS, LARGEST = range(2 * BINS, 2 * BINS + 4)
#: Numbers in a row.
ROW: Final = LARGEST + 1

#: Dtypes whose every value is a float32.
COUNTABLE: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

#: The dtypes that the kernel in C++ reads, with the width of their mantissa.
_MANTISSA: Final = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
#: Elements that are widened at a time where a kernel reads float32 only: 16 MiB of scratch.
_CHUNK: Final = 1 << 22

_CPP: Final = r"""
#include <cstdint>
#include <cstring>

constexpr int BINS = 277, SLOTS = 2 * BINS + 3, BLOCK = 1024;
// Tables of one thread: neighbours mostly fall into the same bin, and an addition waits for the one before it.
constexpr int TABLES = 8;

// How a dtype keeps a magnitude: the width of its mantissa, and the same number's bits as a float32.
struct Float32 {
    using Bits = uint32_t;
    static constexpr int MANTISSA = 23, FIELDS = 256, BIAS = 127;
    static uint32_t wide(uint32_t size) { return size; }
};
struct BFloat16 {
    using Bits = uint16_t;
    static constexpr int MANTISSA = 7, FIELDS = 256, BIAS = 127;
    static uint32_t wide(uint32_t size) { return size << 16; }
};
struct Float16 {
    using Bits = uint16_t;
    static constexpr int MANTISSA = 10, FIELDS = 32, BIAS = 15;
    static uint32_t wide(uint32_t size) {
        if (size >= 1u << 10) return (size << 13) + (size < 31u << 10 ? 112u << 23 : 224u << 23);
        const float value = float(size) * 5.9604644775390625e-8f;  // 2^-24
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return bits;
    }
};

// Where in a row a value is counted whose mantissa is zero, or that is subnormal as a float32.
inline int slot(uint32_t size) {
    const uint32_t mantissa = size & 0x7fffffu, field = size >> 23;
    if (field == 255) return 2 * BINS + (mantissa == 0 ? 1 : 2);
    if (field != 0) return int(field) + 22 + (mantissa == 0 ? BINS : 0);
    return 31 - __builtin_clz(mantissa) + ((mantissa & (mantissa - 1)) == 0 ? BINS : 0);
}

template <class Kind>
inline uint32_t is_rare(uint32_t size) {
    constexpr uint32_t MASK = (1u << Kind::MANTISSA) - 1;
    return ((size & MASK) == 0) & (size != 0) | (size - 1 < MASK);
}

template <class Kind>
void count(const typename Kind::Bits* values, int64_t length, int64_t* row, int64_t threads) {
    constexpr uint32_t MAGNITUDE = Kind::FIELDS * (1u << Kind::MANTISSA) - 1;
    constexpr uint32_t INFINITE = MAGNITUDE - ((1u << Kind::MANTISSA) - 1);
    #pragma omp parallel num_threads(threads)
    {
        // By sign and exponent field. Values that are counted one by one are taken off again.
        int32_t counts[TABLES][2 * Kind::FIELDS] = {};
        int64_t exact[SLOTS] = {};
        uint32_t largest = 0;
        #pragma omp for schedule(static)
        for (int64_t block = 0; block < (length + BLOCK - 1) / BLOCK; ++block) {
            const typename Kind::Bits* from = values + block * BLOCK;
            const int size = length - block * BLOCK < BLOCK ? int(length - block * BLOCK) : BLOCK;
            typename Kind::Bits highest = 0;
            uint32_t rare = Kind::MANTISSA < 23;
            for (int at = 0; at < size; ++at) {
                const typename Kind::Bits here = from[at] & MAGNITUDE, finite = here < INFINITE ? here : 0;
                highest = finite > highest ? finite : highest;
            }
            if (!rare)
                for (int at = 0; at < size; ++at) rare |= is_rare<Kind>(from[at] & MAGNITUDE);
            largest = highest > largest ? highest : largest;
            int at = 0;
            for (; at + TABLES <= size; at += TABLES)
                for (int table = 0; table < TABLES; ++table) counts[table][from[at + table] >> Kind::MANTISSA] += 1;
            for (; at < size; ++at) counts[0][from[at] >> Kind::MANTISSA] += 1;
            for (at = 0; rare && at < size; ++at)
                if (is_rare<Kind>(from[at] & MAGNITUDE)) {
                    exact[slot(Kind::wide(from[at] & MAGNITUDE))] += 1;
                    counts[0][from[at] >> Kind::MANTISSA] -= 1;
                }
        }
        const int64_t bits = Kind::wide(largest);
        #pragma omp critical
        {
            for (int at = 0; at < SLOTS; ++at) row[at] += exact[at];
            for (int table = 0; table < TABLES; ++table)
                for (int signed_field = 0; signed_field < 2 * Kind::FIELDS; ++signed_field) {
                    const int field = signed_field % Kind::FIELDS, is_nan = field == Kind::FIELDS - 1;
                    const int bin = is_nan ? 2 * BINS + 2 : field - Kind::BIAS + 149;
                    row[field == 0 ? 2 * BINS : bin] += counts[table][signed_field];
                }
            if (bits > row[2 * BINS + 3]) row[2 * BINS + 3] = bits;
        }
    }
}

extern "C" void kernel(int64_t values, int64_t mantissa, int64_t length, int64_t to, int64_t threads) {
    int64_t* row = reinterpret_cast<int64_t*>(to);
    if (mantissa == 23) count<Float32>(reinterpret_cast<const uint32_t*>(values), length, row, threads);
    if (mantissa == 10) count<Float16>(reinterpret_cast<const uint16_t*>(values), length, row, threads);
    if (mantissa == 7) count<BFloat16>(reinterpret_cast<const uint16_t*>(values), length, row, threads);
}
"""

_TRITON: Final = '''\
@triton.jit
def exponents(values, length, row, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the blocks that fall to this program, and add the counts to the row."""
    counts = tl.full((1024,), 0, tl.int32)
    largest = tl.full((BLOCK,), 0, tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < length:
        places = start + tl.arange(0, BLOCK)
        mask = places < length
        value = tl.load(values + places, mask=mask, other=0)
        value = (value.to(tl.int32) << 16) if BITS else value.to(tl.float32).to(tl.int32, bitcast=True)
        bits = value & 0x7FFFFFFF
        mantissa = bits & 0x7FFFFF
        field = bits >> 23
        subnormal = (field == 0) & (mantissa != 0)
        # As a float32, a subnormal's mantissa has the exponent that the bin is numbered by.
        low = (mantissa.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        power = tl.where(subnormal, (mantissa & (mantissa - 1)) == 0, mantissa == 0).to(tl.int32)
        slot = tl.where(subnormal, low, field + 22) + power * 277
        slot = tl.where(bits == 0, 554, slot)
        slot = tl.where(field == 255, tl.where(mantissa == 0, 555, 556), slot)
        counts += tl.histogram(tl.where(mask, slot, 1023), 1024)
        largest = tl.maximum(largest, tl.where(field == 255, 0, bits))
        start += tl.num_programs(0) * BLOCK
    slots = tl.arange(0, 1024)
    tl.atomic_add(row + slots, counts.to(tl.int64), mask=slots < 557)
    tl.atomic_max(row + 557, tl.max(largest).to(tl.int64))
'''
#: Elements a program of the Triton kernel counts at a time, and how many programs share a tensor at the most.
_BLOCK, _PROGRAMS = 2048, 1024


def count_into(row: Tensor, tensor: Tensor) -> None:
    """Add a tensor's counts to a row on its device, and raise the row's largest value.

    Args:
        row: (ROW,) int64, contiguous.
        tensor: Of a dtype in COUNTABLE, any shape and layout, outside autograd.

    **Cost**: reads the tensor once, without a host sync. One kernel for float32, float16 and bfloat16; 8-bit floats are
    widened in chunks of 4 M elements. Tensors with gaps or overlaps are copied first. Without a C++
    compiler, and on devices without Triton, about twenty kernels of torch's a chunk.
    """
    vectors = flat(tensor)
    values = vectors[0] if vectors else tensor.detach().reshape(-1)
    if not values.numel():
        return
    with torch.no_grad():
        if values.device.type == "cuda" and has_triton():
            _launched(row, values)
            return
        kernel = _kernel() if values.device.type == "cpu" else None
        if kernel is None:
            for chunk in torch.split(values, _CHUNK):
                _portable(row, chunk.float())
            return
        for chunk in (values,) if values.dtype in _MANTISSA else torch.split(values, _CHUNK):
            read = chunk if chunk.dtype in _MANTISSA else chunk.half()  # exact: float16 has more of everything
            kernel(read, _MANTISSA[read.dtype], read.numel(), row, threads(read.numel()))


@cache
def compiled(source: str, what: str) -> CppKernel | None:
    """Return the kernel of a source, or ``None`` where no compiler makes it, which the log says once.

    Args:
        source: In C++.
        what: What it counts.
    """
    try:
        return built(source)
    except UnsupportedError as error:
        logger.info("%s are counted by torch's operations: %s", what, error)
        return None


def _kernel() -> CppKernel | None:
    return compiled(_CPP, "exponents")


def _launched(row: Tensor, values: Tensor) -> None:
    if values.dtype.itemsize == 1:
        values = values.half()  # exact: float16 has more of everything
    bits = values.dtype == torch.bfloat16
    kernel: Any = source.jitted(_TRITON, "exponents")
    programs = min((values.numel() + _BLOCK - 1) // _BLOCK, _PROGRAMS)
    with source.on(values.device):
        kernel[(programs,)](
            values.view(torch.int16) if bits else values, values.numel(), row, BITS=bits, BLOCK=_BLOCK,
            enable_reflect_ftz=False,
        )  # fmt: skip


def _portable(row: Tensor, values: Tensor) -> None:
    """Count float32 values with torch's operations."""
    bits = values.view(torch.int32) & 0x7FFFFFFF
    mantissa, field = bits & 0x7FFFFF, bits >> 23
    subnormal = (field == 0) & (mantissa != 0)
    # As a float32, a subnormal's mantissa has the exponent that the bin is numbered by.
    low = (mantissa.float().view(torch.int32) >> 23) - 127
    power = torch.where(subnormal, mantissa & (mantissa - 1), mantissa) == 0
    slot = torch.where(subnormal, low, field + 22) + power * BINS
    slot = torch.where(bits == 0, ZEROS, slot)
    slot = torch.where(field == 255, torch.where(mantissa == 0, INFS, NANS), slot)
    if values.device.type == "cpu":
        row[:LARGEST] += torch.bincount(slot, minlength=LARGEST)
    else:  # there bincount asks the host how many bins there are
        row.scatter_add_(0, slot.long(), torch.ones((), dtype=torch.int64, device=row.device).expand(slot.shape))
    torch.maximum(row[LARGEST], torch.where(field == 255, 0, bits).max(), out=row[LARGEST])
