"""Scales and elements of block formats in torch's operations: the reference of compiled kernels, bit by bit.

A tensor comes as a contiguous matrix whose last dimension holds what shares scales, and is looked at as (bands, lines,
groups, width): ``lines × width`` elements share a scale, and there is one line but in blocks of two dimensions. All of
it is spelled out on bit patterns, additions and divisions of tensors, each rounded once in FP32, so that other
executors repeat it. (A division by a number is one by its reciprocal on a GPU.)
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mezzo.formats.blocks import BlockFormat
from mezzo.formats.definitions import Format
from mezzo.formats.noise import noise

#: Below it an amax counts as this much. No scale, no product of two and no reciprocal is subnormal or infinite then.
SMALLEST_AMAX: Final = 2.0**-100
#: Elements handled at a time: on the CPU so that temporaries stay within a cache, on others within a fraction of a GiB.
_CPU_CHUNK: Final = 1 << 16
_DEVICE_CHUNK: Final = 1 << 26

_SIZE: Final = 0x7FFF_FFFF
_EXPONENT: Final = 0x7F80_0000
#: Scales in E8M0 that are NaN.
_NO_SCALE: Final = 0xFF


class _Facts(NamedTuple):
    """What the arithmetic knows of a format of elements."""

    max: float
    mantissa_bits: int
    bias: int
    num_bits: int
    no_number: int


def _e4m3() -> _Facts:
    return _Facts(448.0, 3, 7, 8, 0x7F)


def _facts(element: Format) -> _Facts:
    # Written out, as the table has it: to torch.compile a number that an object holds may be a symbol.
    if element.dtype == torch.float8_e4m3fn:
        return _e4m3()
    if element.dtype == torch.float8_e5m2:
        return _Facts(57344.0, 2, 15, 8, 0x7E)
    return _Facts(6.0, 1, 1, 4, 0x7)


def encoded(
    blocks: Tensor, fmt: BlockFormat, key: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a tensor.

    Args:
        blocks: (bands, lines, groups, width), contiguous; float16, bfloat16 or float32.
        fmt: The format; its block has become the shape.
        key: 0-d integer tensor, of the noise of a stochastic rounding; None rounds to nearest.
        amax: What counts as the largest magnitude: 0-d, or (bands, 1, groups, 1). None where it is that of each group
            and, of a ``tensor_scale``, of the finite elements.

    Returns:
        Codes as uint8 in the shape of ``blocks``, in E2M1 two to a byte; scales (bands, groups), uint8 or FP32, 0-d
        where the whole tensor shares one; the scale of the tensor, or None.
    """
    element = _facts(fmt.element)
    packed = element.num_bits == 4
    bands, lines, groups, width = blocks.shape
    codes = blocks.new_empty((bands, lines, groups, width // 2 if packed else width), dtype=torch.uint8)
    whole = fmt.block is None
    scales = blocks.new_empty(
        () if whole else (bands, groups), dtype=torch.float32 if fmt.scale.dtype == torch.float32 else torch.uint8
    )
    chunks = _chunks(blocks)
    tops, top, tensor_scale = amax, None, None
    if fmt.tensor_scale:
        size = _largest(blocks, chunks, finite=True) if amax is None else amax
        tensor_scale, tops = _tensor_scale(size, fmt), None
    if whole:
        top = _largest(blocks, chunks, finite=False) if amax is None else amax
        shared, multiplier = _scales(top, fmt, None)
        scales.copy_(shared)
    for start, stop in chunks:
        x = blocks[start:stop].to(torch.float32)
        size = x.view(torch.int32) & _SIZE
        if not whole:
            top = _top(size) if tops is None else (tops if tops.dim() == 0 else tops[start:stop])
            shared, multiplier = _scales(top, fmt, tensor_scale)
            scales[start:stop] = shared.expand(stop - start, 1, groups, 1)[:, 0, :, 0]
        bits = None
        if key is not None:
            first = (start * lines * groups * width + (1 << 31)) % (1 << 32) - (1 << 31)
            order = torch.arange(x.numel(), dtype=torch.int32, device=x.device) + first
            bits = noise(order.view(x.shape), key.to(torch.int32))
        code = _elements(x, size, multiplier, element, bits)
        if packed:
            code = code[..., 0::2] | (code[..., 1::2] << 4)
        codes[start:stop] = code
    return codes, scales, tensor_scale


def decoded(codes: Tensor, scales: Tensor | None, tensor_scale: Tensor | None, fmt: BlockFormat) -> Tensor:
    """Return the values that codes stand for.

    Args:
        codes: uint8 (bands, lines, groups, width), in E2M1 half as wide.
        scales: uint8 or FP32, 0-d or (bands, groups); None leaves them out.
        tensor_scale: 0-d FP32, or None.
        fmt: The format.

    Returns:
        FP32 (bands, lines, groups, width): element × scale, which FP32 holds where the scale is E8M0, times the scale
        of the tensor.
    """
    if fmt.element.dtype is None:
        codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    values = _element_values(codes, fmt.element)
    if scales is None:
        return values
    shared = _scale_values(scales, fmt.scale)
    values = values * (shared[:, None, :, None] if shared.dim() else shared)
    return values if tensor_scale is None else values * tensor_scale


def _chunks(blocks: Tensor) -> list[tuple[int, int]]:
    """Cut bands into ranges; into one while torch traces, which unrolls loops."""
    bands = blocks.shape[0]
    if torch.compiler.is_compiling():
        return [(0, bands)]
    limit = _CPU_CHUNK if blocks.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, limit // max(1, blocks[:1].numel()))
    return [(start, min(start + step, bands)) for start in range(0, bands, step)]


def _top(size: Tensor) -> Tensor:
    """Return the largest magnitude of each group from its bits; infinities and NaN are larger than numbers."""
    if size.numel() == 0:
        return size.new_zeros((size.shape[0], 1, size.shape[2], 1)).view(torch.float32)
    return size.amax((1, 3), keepdim=True).view(torch.float32)


def _largest(blocks: Tensor, chunks: list[tuple[int, int]], *, finite: bool) -> Tensor:
    """Return the largest magnitude of a tensor, 0-d FP32; of its finite elements alone if so asked."""
    tops = [blocks.new_zeros((), dtype=torch.int32)]
    for start, stop in chunks:
        size = blocks[start:stop].to(torch.float32).view(torch.int32) & _SIZE
        if size.numel():
            tops.append((torch.where(size < _EXPONENT, size, 0) if finite else size).amax())
    return torch.stack(tops).amax().view(torch.float32)


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _tensor_scale(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Amax / (largest element · largest scale): then the largest scale of a block is the largest there is."""
    size = amax.abs()
    scale = size.clamp(min=SMALLEST_AMAX) / _number(_facts(fmt.element).max * _e4m3().max, amax)
    return torch.where(size < torch.inf, scale, torch.nan)


def _scales(top: Tensor, fmt: BlockFormat, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scales of groups, coded, and what their elements are multiplied by; both NaN if a top is no number."""
    size = top.view(torch.int32) & _SIZE
    wrong = size >= _EXPONENT
    element = _facts(fmt.element)
    if fmt.scale.dtype == torch.float8_e8m0fnu:
        # ⌊log2 top⌋ − emax, from the bits: the exponent field of a subnormal number is zero, and so is the code then.
        _, beyond = math.frexp(element.max)
        code = ((size >> 23) - (beyond - 1)).clamp(min=0)
        multiplier = ((254 - code) << 23).view(torch.float32)  # 2^-scale
        return torch.where(wrong, _NO_SCALE, code).to(torch.uint8), torch.where(wrong, torch.nan, multiplier)
    magnitude = size.view(torch.float32)
    if fmt.scale.dtype == torch.float32:
        multiplier = _number(element.max, top) / magnitude.clamp(min=SMALLEST_AMAX)
        if fmt.floored:
            multiplier = (multiplier.view(torch.int32) & _EXPONENT).view(torch.float32)
        multiplier = torch.where(wrong, torch.nan, multiplier)
        return multiplier.reciprocal(), multiplier
    exact = magnitude / _number(element.max, top)
    factor = _number(1.0, top)
    if tensor_scale is not None:
        exact, factor = exact / tensor_scale, tensor_scale
        wrong = wrong | (tensor_scale != tensor_scale)
    code = _magnitude(exact.clamp(max=_e4m3().max), _e4m3(), None)
    shared = code.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    multiplier = torch.where(shared > 0, (shared * factor).reciprocal(), 0.0)
    return torch.where(wrong, _e4m3().no_number, code).to(torch.uint8), torch.where(wrong, torch.nan, multiplier)


def _elements(x: Tensor, size: Tensor, multiplier: Tensor, element: _Facts, bits: Tensor | None) -> Tensor:
    """Return the codes of x · multiplier, saturated; of infinities, NaN and where the multiplier is NaN, of NaN."""
    scaled = (size.view(torch.float32) * multiplier).clamp(max=element.max)
    sign_at = element.num_bits - 1
    sign = (x.view(torch.int32) >> (31 - sign_at)) & (1 << sign_at)
    wrong = (size >= _EXPONENT) | (multiplier != multiplier)
    code = torch.where(wrong, element.no_number, _magnitude(scaled, element, bits) | sign)
    return code.to(torch.uint8)


def _magnitude(size: Tensor, element: _Facts, bits: Tensor | None) -> Tensor:
    """Return the codes, int32, of FP32 magnitudes up to the largest element: the nearest, ties to even, or at random.

    Random bits are added below the last bit that stays, before the rest is cut off: the chance to go up is what is
    cut off. Below the smallest normal number spacings are counted, to within 2⁻²⁷ of one.
    """
    kept = element.mantissa_bits
    smallest_normal, smallest = 2.0 ** (1 - element.bias), 2.0 ** (1 - element.bias - kept)
    drop = 23 - kept
    pattern = size.view(torch.int32)
    offset = (127 - element.bias) << kept
    if bits is None:
        normal = ((pattern + ((1 << drop - 1) - 1) + ((pattern >> drop) & 1)) >> drop) - offset
        # Beside this number FP32's spacing is the element's: the addition rounds, and its last bits are the code.
        coarse = smallest * 2.0**23
        base = (math.frexp(coarse)[1] + 126) << 23  # its bits
        small = (size + coarse).view(torch.int32) - base
    else:
        normal = ((pattern + (bits & ((1 << drop) - 1))) >> drop) - offset
        fixed = 30 - kept
        steps = size.clamp(max=smallest_normal) * (2.0**fixed / smallest)
        small = (steps.to(torch.int32) + (bits & ((1 << fixed) - 1))) >> fixed
    return torch.where(size < smallest_normal, small, normal)


def _element_values(codes: Tensor, element: Format) -> Tensor:
    """Return FP32 values of codes."""
    if element.dtype is not None:
        return codes.view(element.dtype).to(torch.float32)
    _, kept, bias, num_bits, _ = _facts(element)
    sign_at = num_bits - 1
    wide = codes.to(torch.int32)
    size = wide & ((1 << sign_at) - 1)
    normal = ((size << (23 - kept)) + ((127 - bias) << 23)).view(torch.float32)
    value = torch.where(size < 1 << kept, size.to(torch.float32) * 2.0 ** (1 - bias - kept), normal)
    return (value.view(torch.int32) | (wide >> sign_at << 31)).view(torch.float32)


def _scale_values(scales: Tensor, scale: Format) -> Tensor:
    """Return FP32 values of scales."""
    if scale.dtype == torch.float32:
        return scales
    if scale.dtype == torch.float8_e4m3fn:
        return scales.view(torch.float8_e4m3fn).to(torch.float32)
    code = scales.to(torch.int32)
    value = torch.where(code == 0, 1 << 22, code << 23).view(torch.float32)  # 2^-127 is subnormal in FP32
    return torch.where(code == _NO_SCALE, torch.nan, value)
