"""C++ for the operations of pure functions, and what kernels in C++ begin with.

No header of torch's is included, so that a kernel compiles in a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from mezzo.emit.tracing import ALIKE, Dialect, Pure, spelled_alone

#: BF16 and FP16 are moved as their bits: compilers have no such type in C++ before GCC 13.
_TYPES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float32: "float",
        torch.float16: "uint16_t",
        torch.bfloat16: "uint16_t",
        torch.int32: "int32_t",
        torch.int16: "int16_t",
        torch.int8: "int8_t",
        torch.uint8: "uint8_t",
        torch.bool: "bool",
    }
)

#: C++ for each aten operation that occurs. Compiled without contraction, with integers that wrap.
_OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **ALIKE,
        "aten.ge.Scalar": "{0} >= {1}",
        "aten.ge.Tensor": "{0} >= {1}",
        "aten.add.Tensor": "{0} + {1}",
        "aten.sub.Tensor": "{0} - {1}",
        "aten.mul.Tensor": "{0} * {1}",
        "aten.neg.default": "-{0}",
        "aten.div.Tensor of torch.float32": "{0} / {1}",
        "aten.reciprocal.default of torch.float32": "1.0f / {0}",
        "aten.sqrt.default of torch.float32": "__builtin_sqrtf({0})",
        "aten.abs.default of torch.float32": "__builtin_fabsf({0})",
        "aten.abs.default of torch.int32": "__builtin_abs({0})",
        "aten.round.default of torch.float32": "__builtin_rintf({0})",
        "aten.sign.default of torch.float32": "float({0} > 0) - float({0} < 0)",
        "aten.maximum.default": "{0} > {1} || {0} != {0} ? {0} : {1}",
        "aten.clamp.default": "{0} < {1} ? {1} : {0} > {2} ? {2} : {0}",
        "aten.clamp_min.default": "{0} < {1} ? {1} : {0}",
        "aten.clamp_max.default": "{0} > {1} ? {1} : {0}",
        "aten.rsub.Scalar": "{1} - {0}",
        "aten.where.self": "{0} ? {1} : {2}",
        "aten.masked_fill.Scalar": "{1} ? {2} : {0}",
        "aten.view.dtype": "bits<{dtype}>({0})",
        "aten._to_copy.default": "{dtype}({0})",
        "aten._to_copy.default of torch.int32": "to_int32({0})",
    }
)


def _literal(value: float, dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return f"{_TYPES[dtype]}({int(value)})"
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))  # not twice, to digits and then to FP32
    if math.isnan(rounded):
        return '__builtin_nanf("")'
    return f"{rounded!r}f" if math.isfinite(rounded) else f"{'-' if rounded < 0 else ''}__builtin_inff()"


CPP: Final = Dialect(
    name="C++",
    types=_TYPES,
    operations=_OPERATIONS,
    widened=MappingProxyType({torch.bfloat16: "from_bfloat16({0})", torch.float16: "{0}"}),
    narrowed=MappingProxyType(
        {
            torch.bfloat16: "to_bfloat16({0})",
            torch.float16: "{0}",
            torch.int8: "int8_t({0})",
            torch.uint8: "uint8_t({0})",
        }
    ),
    assigned="const {type} {name} = {value};",
    literal=_literal,
)

_COMMON: Final = """\
#include <cstdint>
#include <cstring>

template <class To, class From> static inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "another size");
    To same;
    std::memcpy(&same, &value, sizeof same);
    return same;
}

// GCC takes float(int32_t(x)) for trunc(x), which makes -0.0 of -0.5; but not of what is no -0.0 any more.
template <class From> static inline int32_t to_int32(From value) { return int32_t(value); }
static inline int32_t to_int32(float value) { return int32_t(__builtin_truncf(value) + 0.0f); }

static inline float from_bfloat16(uint16_t value) { return bits<float>(uint32_t(value) << 16); }
static inline uint16_t to_bfloat16(float value) { return uint16_t(bits<uint32_t>(value) >> 16); }
"""

#: Exact both ways: values to store are on the format's grid. FP16 goes through a row of FP32, since compilers do not
#: find the processor's own conversion by themselves, and spelled out it takes as long as all of AdamW. There subnormals
#: are integers · 2⁻²⁴, so that none is a subnormal of FP32's on the way, which a process may have set to count as zero.
#: Only kernels that need it have this, for the header takes four times as long to compile as a kernel.
_FLOAT16: Final = """\
#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float from_float16(uint16_t value) {
    const int32_t magnitude = value & 0x7FFF, sign = int32_t(value & 0x8000) << 16;
    const int32_t normal = (magnitude << 13) + (magnitude < 0x7C00 ? 112 << 23 : 224 << 23);
    const int32_t subnormal = bits<int32_t>(float(magnitude) * 0x1p-24f);
    return bits<float>((magnitude < 0x0400 ? subnormal : normal) | sign);
}
static inline uint16_t to_float16(float value) {
    const int32_t pattern = bits<int32_t>(value), magnitude = pattern & 0x7FFFFFFF;
    const float size = bits<float>(magnitude);
    const int32_t subnormal = int32_t((size < 0x1p-14f ? size : 0.0f) * 0x1p24f);
    const int32_t finite = magnitude < (113 << 23) ? subnormal : (magnitude >> 13) - (112 << 10);
    const int32_t rest = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    return uint16_t((magnitude < (143 << 23) ? finite : rest) | ((pattern >> 16) & 0x8000));
}

static void widen(const uint16_t* __restrict from, float* __restrict to, int64_t count) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < count; ++i) to[i] = from_float16(from[i]);
}
static void narrow(const float* __restrict from, uint16_t* __restrict to, int64_t count) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT)
        );
#endif
    for (; i < count; ++i) to[i] = to_float16(from[i]);
}
"""


def headers(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return what kernels for elements of some dtypes begin with."""
    return _COMMON + (_FLOAT16 if torch.float16 in dtypes else "")


def function(name: str, rule: Pure, parameters: Mapping[str, torch.dtype]) -> str:
    """Write a C++ function of numbers.

    Args:
        name: Of the function.
        rule: What it computes, a pure function of 0-d tensors.
        parameters: Names of its parameters, and their dtypes.

    Returns:
        A function that returns the one result, or stores each of several at a pointer after the parameters.

    Raises:
        NoKernel: The rule uses an operation that is not in the table.
    """
    body = spelled_alone(rule, parameters, CPP)
    takes = [f"{_TYPES[dtype]} {parameter}" for parameter, dtype in parameters.items()]
    types = [_TYPES[result.dtype] for result in body.results]
    if len(types) == 1:
        returns, return_lines = types[0], [f"return {body.results[0].word};"]
    else:
        takes += [f"{cls}* result{index}" for index, cls in enumerate(types)]
        returns = "void"
        return_lines = [f"*result{index} = {result.word};" for index, result in enumerate(body.results)]
    lines = "\n    ".join([*body.body, *return_lines])
    # Always inlined: a loop that calls a function for each element is no loop of vectors.
    return f"__attribute__((always_inline)) static inline {returns} {name}({', '.join(takes)}) {{\n    {lines}\n}}\n"
