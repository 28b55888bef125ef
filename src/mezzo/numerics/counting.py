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
from mezzo.step.executors.cpp.build import CppKernel, built
from mezzo.step.executors.triton import source
from mezzo.tensors import flat

__all__ = ["BINS", "COUNTABLE", "FIRST", "INFS", "LARGEST", "NANS", "ROW", "ZEROS", "count_into"]

logger = logging.getLogger(__name__)

#: The exponent of the first bin, that of float32's smallest number; the last is 127.
FIRST: Final = -149
BINS: Final = 277
ZEROS, INFS, NANS, LARGEST = range(2 * BINS, 2 * BINS + 4)
#: Numbers in a row.
ROW: Final = LARGEST + 1

#: Dtypes whose every value is a float32.
COUNTABLE: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

#: Fewer elements are counted before another thread has started.
_WORTH_A_THREAD: Final = 1 << 16
#: Elements that are widened at a time where a kernel reads float32 only: 16 MiB of scratch.
_CHUNK: Final = 1 << 22

_CPP: Final = r"""
#include <cstdint>
#include <cstring>

// Four tables a thread: neighbours mostly fall into the same bin, and an addition waits for the one before it.
constexpr int TABLES = 4, FIELDS = 256, BINS = 277;

// A value as float32's bits without the sign: BF16 is float32's upper half.
inline uint32_t bits_of(uint32_t value) { return value & 0x7fffffffu; }
inline uint32_t bits_of(uint16_t value) { return (uint32_t(value) & 0x7fffu) << 16; }

template <class Value>
void count(const Value* values, int64_t length, int64_t* row, int64_t threads) {
    #pragma omp parallel num_threads(threads)
    {
        int64_t counts[TABLES][2 * FIELDS] = {}, subnormal[2][23] = {};
        uint32_t largest = 0;
        #pragma omp for schedule(static)
        for (int64_t block = 0; block < (length + 1023) / 1024; ++block) {
            const int64_t end = block * 1024 + 1024 < length ? block * 1024 + 1024 : length;
            for (int64_t at = block * 1024; at < end; ++at) {
                const uint32_t bits = bits_of(values[at]), mantissa = bits & 0x7fffffu, field = bits >> 23;
                counts[at % TABLES][field + (mantissa == 0 ? FIELDS : 0)] += 1;
                if (field == 0 && mantissa != 0)
                    subnormal[(mantissa & (mantissa - 1)) == 0][31 - __builtin_clz(mantissa)] += 1;
            }
            uint32_t highest = 0;
            for (int64_t at = block * 1024; at < end; ++at) {
                const uint32_t bits = bits_of(values[at]), finite = bits < 0x7f800000u ? bits : 0;
                highest = finite > highest ? finite : highest;
            }
            largest = highest > largest ? highest : largest;
        }
        #pragma omp critical
        {
            for (int power = 0; power < 2; ++power) {
                for (int bin = 0; bin < 23; ++bin) row[power * BINS + bin] += subnormal[power][bin];
                for (int table = 0; table < TABLES; ++table) {
                    const int64_t* from = counts[table] + power * FIELDS;
                    for (int field = 1; field < 255; ++field) row[power * BINS + 22 + field] += from[field];
                    if (power) row[2 * BINS] += from[0];
                    row[2 * BINS + (power ? 1 : 2)] += from[255];
                }
            }
            if (int64_t(largest) > row[2 * BINS + 3]) row[2 * BINS + 3] = largest;
        }
    }
}

extern "C" void kernel(int64_t values, int64_t bytes, int64_t length, int64_t row, int64_t threads) {
    if (bytes == 2)
        count(reinterpret_cast<const uint16_t*>(values), length, reinterpret_cast<int64_t*>(row), threads);
    else
        count(reinterpret_cast<const uint32_t*>(values), length, reinterpret_cast<int64_t*>(row), threads);
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

    **Cost**: reads the tensor once, without a host sync. One kernel for float32 and bfloat16, on a GPU for float16 too;
    other dtypes are widened in chunks of 4 M elements. Tensors with gaps or overlaps are copied first. Without a C++
    compiler, and on devices without Triton, about twenty kernels of torch's a chunk.
    """
    vectors = flat(tensor)
    values = vectors[0] if vectors else tensor.detach().reshape(-1)
    if not values.numel():
        return
    with torch.no_grad():
        if values.device.type == "cuda" and _has_triton():
            _launched(row, values)
            return
        kernel = _kernel() if values.device.type == "cpu" else None
        read = (torch.float32, torch.bfloat16) if kernel else ()
        for chunk in torch.split(values, values.numel() if values.dtype in read else _CHUNK):
            if kernel is None:
                _portable(row, chunk.float())
                continue
            counted = chunk if chunk.dtype in read else chunk.float()
            threads = max(1, min(torch.get_num_threads(), counted.numel() // _WORTH_A_THREAD))
            kernel(counted, counted.itemsize, counted.numel(), row, threads)


@cache
def _kernel() -> CppKernel | None:
    try:
        return built(_CPP)
    except UnsupportedError as error:
        logger.info("exponents are counted by torch's operations: %s", error)
        return None


@cache
def _has_triton() -> bool:
    try:
        source.jitted("", "triton")
    except ImportError:
        return False
    return True


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
