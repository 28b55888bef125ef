"""The arithmetic of block formats, as pure functions of one element or of one group of elements.

This is its one definition. ``portable`` calls the functions on whole tensors. ``cpp`` and ``triton`` have them traced
on 0-d tensors and written in C++ and Triton (:mod:`mezzo.emit`); by hand they say only how to walk over a tensor.
Without a branch on values, the functions consist of operations on bit patterns and of additions and divisions of
tensors, each rounded once in FP32, so that all executors agree bit by bit. (A division by a number is a product with
its reciprocal on a GPU.)

Numbers of formats are closed over before a trace. A limit is written as ``clamp_min`` or ``clamp_max`` and a constant
as ``scalar_tensor``: tables of operations have lines for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mezzo.formats.blocks import BlockFormat
from mezzo.formats.definitions import E4M3, FP16, Format
from mezzo.formats.noise import noise

#: Below it an amax counts as this much. No scale, no product of two and no reciprocal is subnormal or infinite then.
SMALLEST_AMAX: Final = 2.0**-100
#: The bits of an FP32 value without its sign, and of its exponent: magnitudes from there on are infinite or NaN.
SIZE: Final = 0x7FFF_FFFF
EXPONENT: Final = 0x7F80_0000
#: The E8M0 code of NaN.
_E8M0_NAN: Final = 0xFF


class _Facts(NamedTuple):
    """What the arithmetic knows of a format: its largest number, that number's code, and the code that NaN becomes."""

    max: float
    max_code: int
    nan_code: int
    mantissa_bits: int
    bias: int
    num_bits: int


class Function(NamedTuple):
    """A function of a kernel: what :func:`mezzo.emit.cpp.function` and that of Triton write."""

    name: str
    rule: Callable[..., tuple[Tensor, ...]]
    parameters: Mapping[str, torch.dtype]


def _facts(element: Format) -> _Facts:
    # Written out, as the table has it: to torch.compile a number that an object holds may be a symbol.
    if element.dtype == torch.float8_e4m3fn:
        return _Facts(448.0, 0x7E, 0x7F, 3, 7, 8)
    if element.dtype == torch.float8_e5m2:
        return _Facts(57344.0, 0x7B, 0x7E, 2, 15, 8)
    if element.dtype == torch.float16:
        return _Facts(65504.0, 0x7BFF, 0x7E00, 10, 15, 16)
    return _Facts(6.0, 0x7, 0x7, 1, 1, 4)


def _constant(value: float, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.scalar_tensor(value, dtype=dtype, device=like.device)


def quantising(fmt: BlockFormat, *, is_random: bool) -> tuple[Function, ...]:
    """Return the functions that a quantising kernel consists of, in the order in which they are written."""

    def code(pattern: Tensor, multiplier: Tensor, noise: Tensor) -> tuple[Tensor]:
        return (code_of(pattern, multiplier, noise if is_random else None, fmt.element),)

    def scale(amax_bits: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
        return scale_of(amax_bits, tensor_scale, fmt)

    bits, value = torch.int32, torch.float32
    return (
        Function("noise", lambda index, key: (noise(index, key),), {"index": bits, "key": bits}),
        Function("code_of", code, {"pattern": bits, "multiplier": value, "noise": bits}),
        Function("scale_of", scale, {"amax_bits": bits, "tensor_scale": value}),
        Function("tensor_scale_of", lambda amax_bits: (tensor_scale_of(amax_bits, fmt),), {"amax_bits": bits}),
    )


def fp32_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return FP32 values of what is quantised, from its bits (int32) or, in FP32, from itself."""
    if dtype == torch.float32:
        return bits
    return (bits << 16).view(torch.float32) if dtype == torch.bfloat16 else value_of(bits, FP16)


def code_of(bits: Tensor, multiplier: Tensor, noise: Tensor | None, element: Format) -> Tensor:
    """Return the code of x · multiplier: saturated, NaN's of infinities, of NaN, and where the multiplier is NaN.

    Args:
        bits: int32: of x in FP32.
        multiplier: FP32, from :func:`scale_of`.
        noise: int32 random bits, one for each element; None rounds to nearest.
        element: The format of elements.

    Returns:
        int32.
    """
    facts = _facts(element)
    size, sign_at = bits & SIZE, facts.num_bits - 1
    scaled = (size.view(torch.float32) * multiplier).clamp_max(facts.max)
    sign = (bits >> (31 - sign_at)) & (1 << sign_at)
    # A multiplier belongs to a group: so written, a loop over the group's elements compares once.
    limit = torch.where(multiplier != multiplier, _constant(0, multiplier, torch.int32), EXPONENT)
    return torch.where(size >= limit, facts.nan_code, _magnitude_code(scaled, facts, noise) | sign)


def scale_of(amax_bits: Tensor, tensor_scale: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Return the scale of a group of elements, and what they are multiplied by; both NaN if the amax is no number.

    Args:
        amax_bits: int32: of the largest magnitude.
        tensor_scale: FP32, 1 where the format has none.
        fmt: The format.

    Returns:
        The scale's code, int32, or the scale itself, FP32, where the format has such; and the multiplier, FP32.
    """
    element = _facts(fmt.element)
    is_invalid = amax_bits >= EXPONENT
    if fmt.scale.dtype == torch.float8_e8m0fnu:
        # ⌊log2 amax⌋ − emax, from the bits: the exponent field of a subnormal number is zero, and so is the code then.
        _, exponent = math.frexp(element.max)
        code = ((amax_bits >> 23) - (exponent - 1)).clamp_min(0)
        multiplier = ((254 - code) << 23).view(torch.float32)  # 2^-scale
        return torch.where(is_invalid, _E8M0_NAN, code), torch.where(is_invalid, torch.nan, multiplier)
    amax = amax_bits.view(torch.float32)
    if fmt.scale.dtype == torch.float32:
        multiplier = _constant(element.max, amax) / amax.clamp_min(SMALLEST_AMAX)
        if fmt.floored:
            multiplier = (multiplier.view(torch.int32) & EXPONENT).view(torch.float32)
        multiplier = torch.where(is_invalid, torch.nan, multiplier)
        return multiplier.reciprocal(), multiplier
    scale = _facts(E4M3)
    exact = amax / _constant(element.max, amax) / tensor_scale
    is_invalid = torch.where(tensor_scale != tensor_scale, EXPONENT, amax_bits) >= EXPONENT
    code = _magnitude_code(exact.clamp_max(scale.max), scale, None)
    rounded = _value(code, scale, is_finite=True)
    multiplier = torch.where(rounded > 0, (rounded * tensor_scale).reciprocal(), 0.0)
    return torch.where(is_invalid, scale.nan_code, code), torch.where(is_invalid, torch.nan, multiplier)


def tensor_scale_of(amax_bits: Tensor, fmt: BlockFormat) -> Tensor:
    """Return amax / (largest element · largest scale): then the largest scale of a block is the largest there is."""
    amax = amax_bits.view(torch.float32).clamp_min(SMALLEST_AMAX)
    scale = amax / _constant(_facts(fmt.element).max * _facts(E4M3).max, amax)
    return torch.where(amax_bits < EXPONENT, scale, torch.nan)


def value_of(code: Tensor, element: Format) -> Tensor:
    """Return the FP32 value of a code, int32, of an element."""
    return _value(code, _facts(element), is_finite=element.dtype is None)


def scale_value_of(code: Tensor, scale: Format) -> Tensor:
    """Return the FP32 value of a scale's code, int32; of a scale in FP32, the scale."""
    if scale.dtype == torch.float32:
        return code
    if scale.dtype == torch.float8_e4m3fn:
        return value_of(code, scale)
    bits = torch.where(code < 1, 1 << 22, code << 23)  # 2^-127 is subnormal in FP32
    return torch.where(code < _E8M0_NAN, bits, 0x7FC0_0000).view(torch.float32)


def _magnitude_code(size: Tensor, facts: _Facts, noise: Tensor | None) -> Tensor:
    """Return the code, int32, of an FP32 magnitude up to the largest element: the nearest, ties to even, or at random.

    Random bits are added below the last bit that stays, before the rest is cut off: the chance to go up is what is
    cut off. Below the smallest normal number spacings are counted, to within 2⁻²⁷ of one.
    """
    kept = facts.mantissa_bits
    smallest_normal, spacing = 2.0 ** (1 - facts.bias), 2.0 ** (1 - facts.bias - kept)
    dropped = 23 - kept
    bits = size.view(torch.int32)
    offset = (127 - facts.bias) << kept
    if noise is None:
        normal = ((bits + ((1 << dropped - 1) - 1) + ((bits >> dropped) & 1)) >> dropped) - offset
        # Beside this number FP32's spacing is the element's: the addition rounds, and its last bits are the code.
        coarse = spacing * 2.0**23
        coarse_bits = (math.frexp(coarse)[1] + 126) << 23
        small = (size + coarse).view(torch.int32) - coarse_bits
    else:
        normal = ((bits + (noise & ((1 << dropped) - 1))) >> dropped) - offset
        fraction_bits = 30 - kept
        # By comparison: of NaN clamp_max would make NaN, which no integer holds.
        below = torch.where(size < smallest_normal, size, smallest_normal)
        spacings = (below * (2.0**fraction_bits / spacing)).to(torch.int32)
        small = (spacings + (noise & ((1 << fraction_bits) - 1))) >> fraction_bits
    return torch.where(size < smallest_normal, small, normal)


def _value(code: Tensor, facts: _Facts, *, is_finite: bool) -> Tensor:
    """Return the FP32 value of a code; where codes are finite, nothing is done about infinities and NaN."""
    kept, sign_at = facts.mantissa_bits, facts.num_bits - 1
    size = code & ((1 << sign_at) - 1)
    normal = (size << (23 - kept)) + ((127 - facts.bias) << 23)
    if not is_finite:
        normal = torch.where(size > facts.max_code, normal | EXPONENT, normal)
    small = (size.to(torch.float32) * 2.0 ** (1 - facts.bias - kept)).view(torch.int32)
    return (torch.where(size < 1 << kept, small, normal) | (code >> sign_at << 31)).view(torch.float32)
