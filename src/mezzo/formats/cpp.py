"""Block formats in C++ kernels: one that quantises and one that reads back, with :mod:`mezzo.formats.rules` in them.

The first is compiled for a format, a dtype and a rounding: amax, scale, rounding and packing in one pass. It reads a
tensor as it lies, and writes codes with ``dim`` last. The other reads them so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from mezzo.compiled import CppKernel, built, threads
from mezzo.emit.cpp import CPP, function, headers
from mezzo.errors import UnsupportedError
from mezzo.formats import rules
from mezzo.formats.blocks import BlockFormat
from mezzo.formats.definitions import E2M1, FP32
from mezzo.formats.rules import EXPONENT, SIZE

logger = logging.getLogger(__name__)

#: Elements of a tile, 16 KiB in FP32: a cache of the first level holds it, and its codes beside it.
TILE: Final = 1 << 12
#: Lines of a block that a tile has room for.
MOST_LINES: Final = 1 << 8


def encoded(
    moved: Tensor, fmt: BlockFormat, block: tuple[int, int], key: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Quantise a tensor on the CPU.

    Args:
        moved: What is quantised, as it lies in memory, its ``dim`` moved last.
        fmt: The format.
        block: How many lines and how many of the last dimension's elements share a scale.
        key: As for :func:`mezzo.formats.portable.encoded`.
        amax: 0-d, or one for each scale, as they lie.

    Returns:
        Codes (uint8, the shape of ``moved``), scales (uint8 or FP32; 0-d, or one after another) and the scale of the
        tensor; None where there is no kernel, or none for such a tensor.
    """
    lines, width = block
    strides = layout(moved) if lines <= MOST_LINES else None
    if strides is None or (kernel := _kernel(fmt, moved.dtype, key is not None, min(width, 65))) is None:
        return None
    count, last = moved.numel(), moved.shape[-1]
    *before, _ = moved.shape
    whole = fmt.block is None
    codes = torch.empty((*before, last // 2 if fmt.element == E2M1 else last), dtype=torch.uint8)
    shape = () if whole else (count // (lines * width),)
    scales = torch.empty(shape, dtype=torch.float32 if fmt.scale == FP32 else torch.uint8)
    tensor_scale = torch.empty((), dtype=torch.float32) if fmt.tensor_scale else None
    is_amax_of_groups = 0
    if amax is not None:
        amax, is_amax_of_groups = amax.contiguous(), int(amax.dim() > 0)
    kernel(
        moved,
        *strides,
        lines,
        width,
        scales,
        0 if tensor_scale is None else tensor_scale,
        codes,
        0 if amax is None else amax,
        is_amax_of_groups,
        0 if key is None else key,
        threads(count),
    )
    return codes, scales, tensor_scale


def layout(moved: Tensor) -> tuple[int, int, int, int, int, int] | None:
    """Return where elements lie, as (outer, stride, inner, stride, last, stride); None where that is not enough."""
    if moved.is_contiguous():
        count, last = moved.numel(), moved.shape[-1]
        return 1, 0, count // last, last, last, 1
    *sizes, last = moved.shape
    *strides, step = moved.stride()
    runs: list[list[int]] = []  # [size, stride] of dimensions that are one
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    if len(runs) > 2:
        return None
    (outer, outer_stride), (inner, inner_stride) = [[1, 0]] * (2 - len(runs)) + runs
    return outer, outer_stride, inner, inner_stride, last, step


@cache
def _kernel(fmt: BlockFormat, dtype: torch.dtype, is_random: bool, width: int) -> CppKernel | None:
    """Return the kernel, or None where none can be compiled; loops are compiled for a width of at most 64."""
    try:
        return built(source(fmt, dtype, is_random, width if width <= 64 else 0))
    except (UnsupportedError, OSError) as error:  # such as a full disk
        logger.info("tensors are quantised with torch's operations: %s", error)
        return None


def source(fmt: BlockFormat, dtype: torch.dtype, is_random: bool, width: int) -> str:
    """Write the program of a kernel; width 0 is any."""
    facts = {
        "EXPONENT": EXPONENT,
        "SIZE": SIZE,
        "IS_FP32": int(dtype == torch.float32),
        "PACKED": int(fmt.element == E2M1),
        "WHOLE": int(fmt.block is None),
        "TENSOR_SCALE": int(fmt.tensor_scale),
        "RANDOM": int(is_random),
        "WIDTH": width if fmt.block is not None else 0,
        "TILE": TILE,
    }
    types = {
        "Input": CPP.types[dtype],
        "Scale": "float" if fmt.scale == FP32 else "int32_t",
        "Code": "float" if fmt.scale == FP32 else "uint8_t",
    }
    value = torch.float32 if dtype == torch.float32 else torch.int32
    functions = (
        function("widened", lambda pattern: (rules.fp32_of(pattern, dtype),), {"pattern": value}),
        *(function(*part) for part in rules.quantising(fmt, is_random=is_random)),
    )
    return _program(facts, types, functions, _ENCODING)


def _program(facts: Mapping[str, int], types: Mapping[str, str], functions: Sequence[str], walk: str) -> str:
    """Return a program: what the walk over a tensor knows of a format, the rules' arithmetic, and the walk."""
    lines = [f"#define {name} {value}\n" for name, value in facts.items()]
    lines += [headers(()), *(f"typedef {name} {alias};\n" for alias, name in types.items())]
    return "".join([*lines, *functions, walk])


def decoded(
    codes: Tensor, scales: Tensor | None, tensor_scale: Tensor | None, fmt: BlockFormat, cut: tuple[int, int, int, int]
) -> Tensor | None:
    """Return the values that codes stand for, on the CPU.

    Args:
        codes: uint8, one after another in memory; in E2M1 two to a byte.
        scales: uint8 or FP32, 0-d or one after another; None leaves them out.
        tensor_scale: 0-d FP32, or None.
        fmt: The format.
        cut: (bands, lines, groups, width), of which (bands, groups) share a scale.

    Returns:
        FP32 in one dimension; None where there is no kernel.
    """
    bands, lines, groups, width = cut
    count = bands * lines * groups * width
    if scales is None or not scales.dim():
        bands, lines, groups, width = 1, 1, 1, count
    elif lines == 1:
        bands, groups = 1, bands * groups
    kernel = _decoding(fmt, scales is not None, width if width <= 64 else 0)
    if kernel is None or not codes.is_contiguous():
        return None
    values = torch.empty(count)
    none = values  # an address that is not read
    kernel(
        codes,
        none if scales is None else scales.contiguous(),
        none if tensor_scale is None else tensor_scale,
        values,
        bands * lines,
        lines,
        groups,
        width,
        threads(count),
    )
    return values


@cache
def _decoding(fmt: BlockFormat, is_scaled: bool, width: int) -> CppKernel | None:
    """Return the kernel, or None where none can be compiled; width 0 is any."""
    has_codes = fmt.scale != FP32
    facts = {
        "PACKED": int(fmt.element == E2M1),
        "SCALED": int(is_scaled),
        "TENSOR_SCALE": int(fmt.tensor_scale and is_scaled),
        "WIDTH": width,
        "TILE": TILE,
    }
    try:
        functions = (
            function("value_of", lambda code: (rules.value_of(code, fmt.element),), {"code": torch.int32}),
            function(
                "scale_value_of",
                lambda code: (rules.scale_value_of(code, fmt.scale),),
                {"code": torch.int32 if has_codes else torch.float32},
            ),
        )
        return built(_program(facts, {"Code": "uint8_t" if has_codes else "float"}, functions, _DECODING))
    except (UnsupportedError, OSError) as error:
        logger.info("tensors are read with torch's operations: %s", error)
        return None


_ENCODING: Final = r"""
// Codes of elements, as wide as what they are made of: so a vector of them is one even where a block is short.
static inline void elements(const float* values, int64_t count, float by, int32_t index, int32_t key, int32_t* to) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i)
        to[i] = code_of(bits<int32_t>(values[i]), by, RANDOM ? noise(index + int32_t(i), key) : 0);
}

static inline int32_t largest(const float* values, int64_t count, int32_t top) {
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; ++i) {
        const int32_t size = bits<int32_t>(values[i]) & SIZE;
        top = size > top ? size : top;
    }
    return top;
}

struct Places {
    const Input* x;
    int64_t outer, outer_stride, inner, inner_stride, last, step;
};

static inline int32_t counted(Input value) {
    const int32_t size = bits<int32_t>(widened(value)) & SIZE;
    return TENSOR_SCALE && size >= EXPONENT ? 0 : size;
}

// The largest magnitude of a whole tensor, or of its finite elements.
static int32_t top_of(const Places& at, int threads) {
    const bool turned = at.step > at.inner_stride && at.inner > 1;
    const int64_t rows = turned ? at.last : at.inner, down = turned ? at.step : at.inner_stride;
    const int64_t length = turned ? at.inner : at.last, along = turned ? at.inner_stride : at.step;
    const int64_t pieces = (length + TILE - 1) / TILE, jobs = at.outer * rows * pieces;
    int32_t top = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(max : top)
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t row = job / pieces, from = job % pieces * TILE;
        const int64_t count = length - from < TILE ? length - from : TILE;
        const Input* values = at.x + row / rows * at.outer_stride + row % rows * down + from * along;
        int32_t found = 0;
        if (along == 1) {
            for (int64_t i = 0; i < count; ++i) {
                const int32_t size = counted(values[i]);
                found = size > found ? size : found;
            }
        } else {
            for (int64_t i = 0; i < count; ++i) {
                const int32_t size = counted(values[i * along]);
                found = size > found ? size : found;
            }
        }
        top = found > top ? found : top;
    }
    return top;
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TURNS 1
typedef float Row __attribute__((vector_size(64)));

// 16 rows of 16 values become columns: each of four steps interleaves the upper rows with the lower ones.
static inline void turned(Row* rows) {
    for (int step = 0; step < 4; ++step) {
        Row next[16];
        for (int i = 0; i < 8; ++i) {
            const Row high = rows[i], low = rows[i + 8];
            next[2 * i] = __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                __builtin_shufflevector(high, low, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < 16; ++i) rows[i] = next[i];
    }
}
#endif
#endif

// Values of some lines, side by side: where they lie, or copied.
struct Tile {
    const float* values;
    int64_t pitch;
};

static inline Tile tile(const Places& at, int64_t slab, int64_t line, int64_t lines, int64_t from, int64_t count,
                        float* room) {
    const Input* x = at.x + slab * at.outer_stride + line * at.inner_stride + from * at.step;
#if IS_FP32
    if (at.step == 1) return {x, at.inner_stride};
#endif
    if (at.step == 1) {
        for (int64_t l = 0; l < lines; ++l)
            for (int64_t i = 0; i < count; ++i) room[l * count + i] = widened(x[l * at.inner_stride + i]);
#ifdef TURNS
    } else if (at.inner_stride == 1 && lines % 16 == 0 && count % 16 == 0) {
        for (int64_t i = 0; i < count; i += 16)
            for (int64_t l = 0; l < lines; l += 16) {
                Row rows[16];
                for (int k = 0; k < 16; ++k) {
                    float wide[16];
                    for (int e = 0; e < 16; ++e) wide[e] = widened(x[(i + k) * at.step + l + e]);
                    std::memcpy(rows + k, wide, sizeof wide);
                }
                turned(rows);
                for (int e = 0; e < 16; ++e) std::memcpy(room + (l + e) * count + i, rows + e, sizeof(Row));
            }
#endif
    } else {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t l = 0; l < lines; ++l) room[l * count + i] = widened(x[i * at.step + l * at.inner_stride]);
    }
    return {room, count};
}

static inline void stored(const int32_t* codes, int64_t count, int64_t place, uint8_t* to) {
#if PACKED
    to += place / 2;
    for (int64_t i = 0; i < count / 2; ++i) to[i] = uint8_t(codes[2 * i] | (codes[2 * i + 1] << 4));
#else
    to += place;
    for (int64_t i = 0; i < count; ++i) to[i] = uint8_t(codes[i]);
#endif
}

extern "C" void kernel(const Input* x, int64_t outer, int64_t outer_stride, int64_t inner, int64_t inner_stride,
                       int64_t last, int64_t step, int64_t block_lines, int64_t block_width, Code* scales,
                       float* tensor_scale, uint8_t* codes, const float* amax, int64_t amax_each,
                       const int32_t* key_at, int64_t threads) {
    Places at = {x, outer, outer_stride, inner, inner_stride, last, step};
    const int32_t key = RANDOM ? *key_at : 0;
    float tensor = 1.0f, whole = 1.0f;
    if (WHOLE || TENSOR_SCALE) {
        const int32_t top = amax ? bits<int32_t>(*amax) & SIZE : top_of(at, int(threads));
        if (WHOLE) {
            Scale scale;
            scale_of(top, 1.0f, &scale, &whole);
            *scales = Code(scale);
        } else {
            *tensor_scale = tensor = tensor_scale_of(top);
        }
    }
    const bool given = amax && !WHOLE && !TENSOR_SCALE;
    const int64_t width = WIDTH ? WIDTH : WHOLE ? last : block_width, down = WHOLE ? 1 : block_lines;
    const bool dense = outer == 1 && inner_stride == last && step == 1 && down == 1;
    if (dense) {  // one line, so that short ones are as fast as long ones
        at.last = inner * last;
        at.inner = 1;
    }
    // Lines of a tile: one, those of a block, or where neighbours in memory are on different lines, enough for them.
    const int64_t tall = at.step == 1 ? down : down * (32 / down > 1 ? 32 / down : 1);
    const int64_t room = TILE / tall > 8 ? TILE / tall : 8;
    const bool fits = !WHOLE && width <= room;
    const int64_t across = WHOLE ? room / 8 * 8 : fits ? room / width * width : width;
    const int64_t bands = (at.inner + tall - 1) / tall, segments = (at.last + across - 1) / across;
    const int64_t jobs = at.outer * bands * segments, groups = WHOLE ? 0 : at.last / width;
#pragma omp parallel num_threads(int(threads))
    {
        alignas(64) float values[TILE];
        alignas(64) int32_t line_codes[TILE];
        alignas(64) float multipliers[TILE];
        alignas(64) int32_t tops[TILE];
        alignas(64) Scale shared[TILE];
#pragma omp for schedule(static)
        for (int64_t job = 0; job < jobs; ++job) {
            const int64_t segment = job % segments, band = job / segments, slab = band / bands;
            const int64_t line = band % bands * tall, from = segment * across;
            const int64_t lines = at.inner - line < tall ? at.inner - line : tall;
            const int64_t count = at.last - from < across ? at.last - from : across;
            const int64_t row = slab * at.inner + line;
            if (WHOLE) {
                const Tile found = tile(at, slab, line, lines, from, count, values);
                for (int64_t l = 0; l < lines; ++l) {
                    const int64_t place = (row + l) * at.last + from;
                    elements(found.values + l * found.pitch, count, whole, int32_t(place), key, line_codes);
                    stored(line_codes, count, place, codes);
                }
                continue;
            }
            const int64_t piece = fits ? count : room / 8 * 8;
            const int64_t wide = fits ? count / width : 1, high = lines / down, many = wide * high;
            Tile seen = {values, 0};
            for (int64_t g = 0; g < many; ++g) tops[g] = 0;
            for (int64_t start = 0; start < count && !given; start += piece) {
                const int64_t length = count - start < piece ? count - start : piece;
                const Tile found = seen = tile(at, slab, line, lines, from + start, length, values);
                const int64_t part = fits ? width : length;
                for (int64_t l = 0; l < lines; ++l)
                    for (int64_t g = 0; g < wide; ++g) {
                        int32_t* top = tops + l / down * wide + g;
                        *top = largest(found.values + l * found.pitch + g * part, fits && WIDTH ? WIDTH : part, *top);
                    }
            }
            Code* scale = scales + row / down * groups + from / width;
            if (given)
                for (int64_t b = 0; b < high; ++b)
                    for (int64_t g = 0; g < wide; ++g) {
                        const float* top = amax + (amax_each ? scale - scales + b * groups + g : 0);
                        tops[b * wide + g] = bits<int32_t>(*top) & SIZE;
                    }
#pragma omp simd
            for (int64_t g = 0; g < many; ++g) scale_of(tops[g], tensor, shared + g, multipliers + g);
            for (int64_t b = 0; b < high; ++b)
                for (int64_t g = 0; g < wide; ++g) scale[b * groups + g] = Code(shared[b * wide + g]);
            for (int64_t start = 0; start < count; start += piece) {
                const int64_t length = count - start < piece ? count - start : piece;
                if (!fits || given) seen = tile(at, slab, line, lines, from + start, length, values);
                const Tile found = seen;
                const int64_t part = fits ? width : length;
                for (int64_t l = 0; l < lines; ++l) {
                    const int64_t place = (row + l) * at.last + from + start;
                    const float *now = found.values + l * found.pitch, *by = multipliers + l / down * wide;
                    for (int64_t g = 0; g < wide; ++g)
                        elements(now + g * part, fits && WIDTH ? WIDTH : part, by[g], int32_t(place + g * part), key,
                                 line_codes + g * part);
                    stored(line_codes, length, place, codes);
                }
            }
        }
    }
}
"""

_DECODING: Final = r"""
extern "C" void kernel(const uint8_t* codes, const Code* scales, const float* tensor_scale, float* to, int64_t rows,
                       int64_t lines, int64_t groups, int64_t any_width, int64_t threads) {
    const int64_t width = WIDTH ? WIDTH : any_width, all = rows * groups;
    const int64_t many = width < TILE ? TILE / width : 1;             // groups of a job
    const int64_t parts = width < TILE ? 1 : (width + TILE - 1) / TILE;  // jobs of a group
    const int64_t jobs = (all + many - 1) / many * parts;
    const float tensor = TENSOR_SCALE ? *tensor_scale : 1.0f;
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t first = job / parts * many, end = all - first < many ? all : first + many;
        const int64_t from = job % parts * TILE, rest = width - from < TILE ? width - from : TILE;
        const int64_t count = WIDTH ? WIDTH : rest, place = first * width + from, length = (end - first) * count;
        alignas(64) float values[TILE];
        alignas(64) float shared[TILE];
#if PACKED
        alignas(64) uint8_t now[TILE];
        for (int64_t i = 0; i < length / 2; ++i) {
            const uint8_t pair = codes[place / 2 + i];
            now[2 * i] = pair & 15;
            now[2 * i + 1] = pair >> 4;
        }
#else
        const uint8_t* now = codes + place;
#endif
        // Loops over what is of several sizes are long ones: there a vector of each is one.
        float* read = SCALED ? values : to + place;
#pragma omp simd
        for (int64_t i = 0; i < length; ++i) read[i] = value_of(now[i]);
        if (!SCALED) continue;
        for (int64_t g = first; g < end;) {
            const int64_t group = g % groups, left = end - g < groups - group ? end - g : groups - group;
            const Code* line = scales + g / groups / lines * groups + group;
#pragma omp simd
            for (int64_t i = 0; i < left; ++i) shared[g - first + i] = scale_value_of(line[i]);
            g += left;
        }
        for (int64_t g = 0; g < end - first; ++g) {
            const float scale = shared[g];
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
                const float scaled = values[g * count + i] * scale;
                to[place + g * count + i] = TENSOR_SCALE ? scaled * tensor : scaled;
            }
        }
    }
}
"""
