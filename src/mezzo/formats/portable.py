"""Tensors in block formats by torch's operations: the reference of compiled kernels, bit by bit.

A tensor comes as a contiguous matrix whose last dimension holds what shares scales, and is looked at as (bands, lines,
groups, width): ``lines × width`` elements share a scale, and there is one line but in blocks of two dimensions. What
happens to an element and to a group is said in :mod:`mezzo.formats.rules`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mezzo.formats.blocks import BlockFormat
from mezzo.formats.noise import noise
from mezzo.formats.rules import EXPONENT, SIZE, code_of, scale_of, scale_value_of, tensor_scale_of, value_of

#: Elements handled at a time: on the CPU so that temporaries stay within a cache, on others within a fraction of a GiB.
_CPU_CHUNK: Final = 1 << 16
_DEVICE_CHUNK: Final = 1 << 26


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
    is_packed = fmt.element.dtype is None
    bands, lines, groups, width = blocks.shape
    codes = blocks.new_empty((bands, lines, groups, width // 2 if is_packed else width), dtype=torch.uint8)
    is_whole = fmt.block is None
    scale_dtype = torch.float32 if fmt.scale.dtype == torch.float32 else torch.uint8
    scales = blocks.new_empty(() if is_whole else (bands, groups), dtype=scale_dtype)
    chunks = _chunks(blocks)
    amax_bits = None if amax is None else amax.view(torch.int32) & SIZE
    tensor_scale = None
    if fmt.tensor_scale:
        tensor_scale = tensor_scale_of(_amax(blocks, chunks, finite=True) if amax_bits is None else amax_bits, fmt)
        amax_bits = None
    factor = torch.ones((), dtype=torch.float32, device=blocks.device) if tensor_scale is None else tensor_scale
    if is_whole:
        whole_amax = _amax(blocks, chunks, finite=False) if amax_bits is None else amax_bits
        shared, multiplier = scale_of(whole_amax, factor, fmt)
        scales.copy_(shared)
    for start, stop in chunks:
        bits = blocks[start:stop].to(torch.float32).view(torch.int32)
        if not is_whole:
            if amax_bits is None:
                group_amax = _amax_of_groups(bits & SIZE)
            else:
                group_amax = amax_bits[start:stop] if amax_bits.dim() else amax_bits
            shared, multiplier = scale_of(group_amax, factor, fmt)
            scales[start:stop] = shared.to(scale_dtype).expand(stop - start, 1, groups, 1)[:, 0, :, 0]
        random_bits = None
        if key is not None:
            first = (start * lines * groups * width + (1 << 31)) % (1 << 32) - (1 << 31)
            order = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device) + first
            random_bits = noise(order.view(bits.shape), key.to(torch.int32))
        code = code_of(bits, multiplier, random_bits, fmt.element).to(torch.uint8)
        if is_packed:
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
        values = value_of(codes.to(torch.int32), fmt.element)
    else:
        values = codes.view(fmt.element.dtype).to(torch.float32)  # one operation of torch's, where the rule takes nine
    if scales is None:
        return values
    shared = scale_value_of(scales if scales.dtype == torch.float32 else scales.to(torch.int32), fmt.scale)
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


def _amax_of_groups(size: Tensor) -> Tensor:
    """Return the bits of each group's largest magnitude; infinities and NaN are larger than numbers."""
    if size.numel() == 0:
        return size.new_zeros((size.shape[0], 1, size.shape[2], 1))
    return size.amax((1, 3), keepdim=True)


def _amax(blocks: Tensor, chunks: list[tuple[int, int]], *, finite: bool) -> Tensor:
    """Return the bits of a tensor's largest magnitude, 0-d; of its finite elements alone if so asked."""
    largest = [blocks.new_zeros((), dtype=torch.int32)]
    for start, stop in chunks:
        size = blocks[start:stop].to(torch.float32).view(torch.int32) & SIZE
        if size.numel():
            largest.append((torch.where(size < EXPONENT, size, 0) if finite else size).amax())
    return torch.stack(largest).amax()
