"""``mezzo::observe``: where a tensor's values lie on the scale of powers of two, counted in one operation.

The operation adds to a row of int64 numbers, which was made beforehand, and only where a flag in the device's memory
says so. So it lies in graphs of torch.compile and of CUDA as any other operation does, and what is recorded is chosen
without compiling or capturing anything again. A row holds

    BINS counts of the values 2^k < |x| < 2^(k+1), for k from FIRST on,
    BINS counts of the values |x| = 2^k exactly,
    zeros, infinities, NaNs, and the bits of the largest finite |x| as float32,
    of the tensor that was added last: when, on a clock of the host in nanoseconds; its dtype, as one more than the
    index in COUNTABLE; and the number that the program gave it as a name.

Powers of two are counted apart because the limits of number formats are powers of two, or lie between values that
are: only so it is known on which side of a limit the numbers that equal it fall.

:func:`slot_of` alone decides where a value is counted: torch runs it where there is no kernel, and the kernels have it
in C++ and in Triton.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.backward import runs_backward
from mezzo.compiled import CppKernel, built, threads
from mezzo.emit.cpp import CPP, headers
from mezzo.emit.tracing import Dialect, spelled
from mezzo.emit.triton import TRITON
from mezzo.errors import UnsupportedError
from mezzo.launched import Launch, has_triton, jitted, on
from mezzo.tensors import flat, moved

logger = logging.getLogger(__name__)

#: The exponent of the first bin, that of float32's smallest number; the last is 127.
FIRST: Final = -149
BINS: Final = 277
ZEROS, INFS, NANS, LARGEST, WHEN, DTYPE, NAME = range(2 * BINS, 2 * BINS + 7)
#: Numbers of a histogram, and of a row.
ROW: Final = LARGEST + 1
WIDTH: Final = NAME + 1

#: Dtypes whose every value is a float32.
COUNTABLE: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_INFINITE: Final = 0x7F80_0000
#: Elements that torch's operations count at a time: on the CPU they stay in its cache; on a GPU int32 counts them.
_ON_CPU, _ON_GPU = 1 << 16, 1 << 24
#: Elements of a Triton program at a time, and programs for each multiprocessor.
_BLOCK: Final = 1 << 12
_PROGRAMS: Final = 4


def slot_of(bits: Tensor) -> Tensor:
    """Return the index in a row at which values are counted. Pure: the emitter writes it in other languages.

    Args:
        bits: Magnitudes of float32 numbers, as int32.
    """
    mantissa = bits & 0x7F_FFFF
    small = mantissa.float().view(torch.int32)  # the bits of a subnormal times 2^149
    is_small = bits < 0x80_0000
    binade = torch.where(is_small, (small >> 23) - 127, (bits >> 23) - (127 + FIRST))
    rest = torch.where(is_small, small & 0x7F_FFFF, mantissa)
    slot = torch.where(rest > 0, binade, binade + BINS)
    slot = slot.masked_fill(bits < 1, ZEROS).masked_fill(bits > _INFINITE - 1, INFS)
    return slot.masked_fill(bits > _INFINITE, NANS)


# The operation -----------------------------------------------------------------------------------------------

_LIBRARY: Final[Any] = torch.library.Library("mezzo", "FRAGMENT")  # type: ignore[no-untyped-call]
# Of any strides: torch.compile would else copy tensors to those that they have in eager mode.
for _NAME in ("observe", "observe_once"):
    _LIBRARY.define(
        f"{_NAME}(Tensor x, Tensor(a!) row, Tensor flag, Tensor? factor, int name) -> ()",
        tags=(torch.Tag.flexible_layout,),
    )


_LIBRARY.define("move_row(Tensor row, Tensor(a!) into) -> ()")


def observe(x: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None = None, name: int = 0) -> None:
    """Add what a tensor holds to a row, where a flag is set.

    It has no gradient and returns nothing: a call of it anywhere changes no value of the program's.

    Args:
        x: Of a dtype in :data:`COUNTABLE`, of any strides.
        row: (WIDTH or more,) int64, on the tensor's device, a storage of its own.
        flag: (1,) int32, on the tensor's device: 0 leaves the row as it is.
        factor: 0-d float32, on the tensor's device: what to multiply the values by in FP32; ``None`` for 1.
        name: A number for the tensor, which the row records.

    **Cost**: one kernel, which reads the tensor once; for a million elements in one thread of a CPU 0.6 ms of 16 bits,
    2 ms of 32. Without the flag one launch that returns at once; on a CPU no memory is touched. No host sync.
    """
    torch.ops.mezzo.observe(x, row, flag, factor, name)


def observe_once(x: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None = None, name: int = 0) -> None:
    """Count as :func:`observe` does, but nothing while a backward pass runs: checkpointing calls a graph once more."""
    torch.ops.mezzo.observe_once(x, row, flag, factor, name)


def move_row(row: Tensor, into: Tensor) -> None:
    """Add what a row holds to another one, and leave it empty. No host sync."""
    torch.ops.mezzo.move_row(row, into)


def _move_row(row: Tensor, into: Tensor) -> None:
    into[:LARGEST].add_(row[:LARGEST])
    largest = into[LARGEST:WIDTH]
    torch.maximum(largest, row[LARGEST:WIDTH], out=largest)
    row.data.zero_()  # for a further backward pass through the same graph, where torch would refuse a change of it


def _on_cpu(x: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None, name: int) -> None:
    if not flag.item():  # host memory
        return
    vector = _vector(x)
    kernel = _cpp(vector.dtype)
    if kernel is None:
        _portable(vector, row, flag, factor, *_details(x, name))
    else:
        multiplier = 0 if factor is None else factor
        kernel(vector, vector.numel(), row, multiplier, *_details(x, name), threads(vector.numel()))


def _on_gpu(x: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None, name: int) -> None:
    vector = _vector(x)
    launch = _triton(vector.dtype)
    if launch is None:
        _portable(vector, row, flag, factor, *_details(x, name))
        return
    bits = vector.view(torch.int16) if vector.dtype == torch.bfloat16 else vector
    most = _PROGRAMS * _multiprocessors(x.device)
    programs = max(1, min(-(-vector.numel() // _BLOCK), most))
    factors = (vector, 0) if factor is None else (factor, 1)
    with on(x.device):
        launch(programs, x.device, bits, vector.numel(), row, flag, *factors, *_details(x, name))


def _vector(x: Tensor) -> Tensor:
    """Return the values as a vector, in any order, of a dtype that kernels are written for."""
    vectors = flat(x.detach())
    vector = x.detach().reshape(-1) if vectors is None else vectors[0]
    return vector.float() if vector.dtype.itemsize == 1 else vector


def _once(form: Callable[..., None]) -> Callable[..., None]:
    """Return an implementation that does nothing while a backward pass runs."""

    def run(*arguments: Any) -> None:
        if not runs_backward():
            form(*arguments)

    return run


def _fake(*arguments: Any) -> None:
    return None


for _KEY, _FORM in (("CPU", _on_cpu), ("CUDA", _on_gpu)):
    _LIBRARY.impl("observe", _FORM, _KEY)
    _LIBRARY.impl("observe_once", _once(_FORM), _KEY)
    _LIBRARY.impl("move_row", _move_row, _KEY)
for _NAME in ("observe", "observe_once", "move_row"):
    torch.library.register_fake(f"mezzo::{_NAME}", _fake, lib=_LIBRARY)


def _details(x: Tensor, name: int) -> tuple[int, int, int]:
    """Return the numbers that a row has from :data:`WHEN` on: time, dtype, name."""
    return time.monotonic_ns(), COUNTABLE.index(x.dtype) + 1, name


# Without a kernel --------------------------------------------------------------------------------------------


def _portable(vector: Tensor, row: Tensor, flag: Tensor, factor: Tensor | None, *details: int) -> None:
    """Add to a row by torch's operations. No host sync on a GPU."""
    for column, number in enumerate(details, WHEN):
        row[column : column + 1].masked_fill_(flag != 0, number)
    for part in torch.split(vector, _ON_CPU if vector.device.type == "cpu" else _ON_GPU):
        if part.numel():
            values = part.float() if factor is None else part.float() * moved(factor, part.device)
            bits = values.view(torch.int32) & 0x7FFF_FFFF
            row[:LARGEST].add_(_occurrences(slot_of(bits)) * flag)
            largest = bits.masked_fill_(bits >= _INFINITE, 0).max() * flag[0]
            row[LARGEST : LARGEST + 1].clamp_(min=largest.long())


def _occurrences(slots: Tensor) -> Tensor:
    """Return how often each slot occurs."""
    if slots.device.type == "cpu":
        return torch.bincount(slots, minlength=LARGEST)
    return torch.histc(slots, LARGEST, 0, LARGEST).long()  # on a GPU bincount waits for the host to learn its length


# Kernels ---------------------------------------------------------------------------------------------------


@cache
def _cpp(dtype: torch.dtype) -> CppKernel | None:
    """Return the kernel for a dtype; ``None`` without a compiler, which the log says once."""
    try:
        return built(cpp_source(dtype))
    except UnsupportedError as error:
        logger.info("values are counted by torch's own operations, since %s", error)
        return None


@cache
def _triton(dtype: torch.dtype) -> Launch | None:
    """Return the launch for a dtype; ``None`` without Triton."""
    if not has_triton():
        return None
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    return Launch(jitted(triton_source(dtype), "observe"), options, BLOCK=_BLOCK)


@cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


# The source of the kernels: of slot_of in both languages, and by hand the loops around it ----------------------

#: Values that are widened, and whose slots are found, before any is counted: those loops have no branch.
_ROW: Final = 512
#: Neighbours are counted apart, since most values lie in few bins: an addition would wait for the one before.
_APART: Final = 4
#: From so many values of 16 bits on, the repeats of each magnitude are counted first, and each magnitude once then.
_MANY: Final = 1 << 16

_CPP: Final = """\
#include <vector>

static inline int32_t slot_of(int32_t magnitude) {{
    {lines}
    return {result};
}}

// Where values are repeated, `times` has how often each occurs.
template <bool repeated> static void count(
    const {type}* values, const int64_t* times, int64_t number, int64_t* row, const float* factor, int64_t threads
) {{
    int64_t largest = row[{largest}];
    #pragma omp parallel num_threads(threads) reduction(max : largest)
    {{
        uint64_t counts[{apart}][{slots}];
        std::memset(counts, 0, sizeof counts);
        alignas(64) float values_row[{row}];
        alignas(64) int32_t slots[{row}];
        #pragma omp for schedule(static)
        for (int64_t first = 0; first < number; first += {row}) {{
            const int64_t some = first + {row} < number ? {row} : number - first;
            {widen}
            if (factor)  // a process may have set subnormals to count as zero in products
                for (int64_t i = 0; i < some; ++i) values_row[i] *= *factor;
            int32_t top = 0;
            #pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < some; ++i) {{
                const int32_t bits_of = bits<int32_t>(values_row[i]) & 0x7FFFFFFF;
                const bool is_finite = bits_of < 0x7F800000 && (!repeated || times[first + i]);
                const int32_t finite = is_finite ? bits_of : 0;
                top = finite > top ? finite : top;
                slots[i] = slot_of(bits_of);
            }}
            largest = top > largest ? top : largest;
            for (int64_t i = 0; i < some; ++i) counts[i % {apart}][slots[i]] += repeated ? times[first + i] : 1;
        }}
        #pragma omp critical
        for (int64_t apart = 0; apart < {apart}; ++apart)
            for (int64_t slot = 0; slot < {slots}; ++slot) row[slot] += int64_t(counts[apart][slot]);
    }}
    row[{largest}] = largest;
}}

extern "C" void kernel(
    const {type}* values, int64_t number, int64_t* row, const float* factor, int64_t when, int64_t dtype, int64_t name,
    int64_t threads
) {{
    row[{when}] = when;
    row[{dtype}] = dtype;
    row[{name}] = name;
    {shorten}
    count<false>(values, nullptr, number, row, factor, threads);
}}
"""

#: Numbers of 16 bits have few magnitudes: counting them first takes one addition for each value.
_SHORTEN: Final = """\
if (number >= {many}) {{
        std::vector<{type}> magnitudes(1 << 15);
        std::vector<int64_t> times(1 << 15);
        #pragma omp parallel num_threads(threads)
        {{
            std::vector<int64_t> local(1 << 15);
            #pragma omp for schedule(static)
            for (int64_t i = 0; i < number; ++i) ++local[values[i] & 0x7FFF];
            #pragma omp critical
            for (int64_t bits = 0; bits < 1 << 15; ++bits) times[bits] += local[bits];
        }}
        for (int64_t bits = 0; bits < 1 << 15; ++bits) magnitudes[bits] = {type}(bits);
        return count<true>(magnitudes.data(), times.data(), 1 << 15, row, factor, 1);
    }}"""

_TRITON: Final = '''\
@triton.jit
def slot_of(magnitude):
    {lines}
    return {result}


@triton.jit(
    do_not_specialize=["count", "has_factor", "when", "dtype", "name"],
    do_not_specialize_on_alignment=["x", "row", "flag", "factor"],
)
def observe(x, count, row, flag, factor, has_factor, when, dtype, name, BLOCK: tl.constexpr):
    """Count blocks of a vector; program p of n takes blocks p, p + n, p + 2n, …."""
    if tl.load(flag) != 0:
        multiplier = 1.0
        if has_factor != 0:
            multiplier = tl.load(factor.to(tl.pointer_type(tl.float32)))
        block = tl.program_id(0).to(tl.int64)
        slots = tl.arange(0, 1024)
        counts = tl.full((1024,), 0, tl.int32)
        largest = tl.full((BLOCK,), 0, tl.int32)
        while block * BLOCK < count:
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < count
            value = tl.load(x + offsets, mask=mask, other=0)
            bits = ({widened} * multiplier).to(tl.int32, bitcast=True) & 2147483647
            counts += tl.histogram(slot_of(bits), 1024, mask=mask)
            largest = tl.maximum(largest, tl.where(mask & (bits < 2139095040), bits, 0))
            block += tl.num_programs(0)
        tl.atomic_add(row + slots, counts.to(tl.int64), mask=(slots < {slots}) & (counts > 0))
        tl.atomic_max(row + {largest}, tl.max(largest).to(tl.int64))
        if tl.program_id(0) == 0:
            tl.store(row + {when}, when)
            tl.store(row + {dtype}, dtype)
            tl.store(row + {name}, name)
'''


def _slot_in(dialect: Dialect) -> tuple[list[str], str]:
    """Return the lines of :func:`slot_of` in a language, and the word for its result."""
    bits = torch.ones((), dtype=torch.int32, device="cpu")
    spelled_slot = spelled(lambda magnitude: (slot_of(magnitude),), [bits], ["magnitude"], dialect)
    return spelled_slot.body, str(spelled_slot.results[0].word)


@cache
def cpp_source(dtype: torch.dtype) -> str:
    """Return the source of the kernel for values of a dtype.

    ``kernel`` takes the values, their number, a row, a factor or null, the row's three details, and the number of
    threads.
    """
    lines, result = _slot_in(CPP)
    value = CPP.widened.get(dtype, "{0}").format("values[first + i]")
    widen = f"for (int64_t i = 0; i < some; ++i) values_row[i] = {value};"
    return headers((dtype,)) + _CPP.format(
        lines="\n    ".join(lines),
        result=result,
        type=CPP.types[dtype],
        shorten=_SHORTEN.format(many=_MANY, type=CPP.types[dtype]) if dtype.itemsize == 2 else "",
        widen="widen(values + first, values_row, some);" if dtype == torch.float16 else widen,
        largest=LARGEST,
        slots=LARGEST,
        when=WHEN,
        dtype=DTYPE,
        name=NAME,
        row=_ROW,
        apart=_APART,
    )


@cache
def triton_source(dtype: torch.dtype) -> str:
    """Return the source of the kernel ``observe`` for values of a dtype, BF16 as its bits."""
    lines, result = _slot_in(TRITON)
    return _TRITON.format(
        lines="\n    ".join(lines),
        result=result,
        widened=TRITON.widened.get(dtype, "{0}.to(tl.float32)").format("value"),
        slots=LARGEST,
        largest=LARGEST,
        when=WHEN,
        dtype=DTYPE,
        name=NAME,
    )
