"""Products below sixteen bits on devices that have them: torch's ``scaled_mm``, and whether it is right here.

A kind of product is tried once on each device, small and against emulation, before a region uses it: which kinds there
are depends on the device, on torch and on how it was built.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from mezzo.dispatch import DisableTorchFunction
from mezzo.formats import BlockFormat, Quantized, quantized
from mezzo.formats.definitions import E2M1

#: Of the operands that a product is tried with: the least that every kernel takes.
_SIZE: Final = 128
#: How far a product may be from emulation: of its result, and of the sum of magnitudes, since tensor cores keep some
#: 14 bits of a partial sum (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2).
OF_RESULT: Final = 2.0**-8
OF_SUM: Final = 2.0**-12


class Support(NamedTuple):
    """What is known of a kind of product on a device.

    Attributes:
        lacks: Why it is emulated; nothing where it is there.
        output: What its kernel returns: FP16 is rounded from BF16 where there is no kernel that returns it.
    """

    lacks: str
    output: torch.dtype


def scaled_mm(a: Quantized, b: Quantized, dims: tuple[int, int], bias: Tensor | None, output: torch.dtype) -> Tensor:
    """Return the product of two quantised matrices, summed in FP32 by the device: ``use_fast_accum`` stays off.

    Args:
        a: (n, k) or (k, n).
        b: (m, k) or (k, m).
        dims: Which dimension of each is k.
        bias: (m,), which is added before the rounding.
        output: What is returned.

    Returns:
        (n, m).
    """
    left, right = (_along(operand, dim) for operand, dim in zip((a, b), dims, strict=True))
    scales = [_scales(operand, dim) for operand, dim in zip((a, b), dims, strict=True)]
    product: Tensor = functional.scaled_mm(
        left, right.t(), *scales[0][:2], *scales[1][:2], scales[0][2], scales[1][2], bias, output
    )
    return product


def _along(operand: Quantized, dim: int) -> Tensor:
    """Return values with the summed dimension last, also in memory."""
    if operand.dim == dim:
        return operand.values.movedim(dim, -1)
    turned = operand.values if operand.format.element != E2M1 else _repacked(operand)
    return turned.movedim(dim, -1).contiguous()


def _repacked(operand: Quantized) -> Tensor:
    """Return values of four bits packed along the other dimension of a matrix."""
    codes = operand.values.view(torch.uint8).movedim(operand.dim, -1)  # (other, dim / 2)
    apart = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2).mT  # (dim, other)
    packed = (apart[:, 0::2] | (apart[:, 1::2] << 4)).view(torch.float4_e2m1fn_x2)
    return packed.movedim(-1, 1 - operand.dim)


def _scales(operand: Quantized, dim: int) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Return scales as ``scaled_mm`` takes them of one operand: tensors, what each is of, and how each lies."""
    form, scales, plain = operand.format, operand.scales, SwizzleType.NO_SWIZZLE
    if form.block is None:
        return [scales.reshape(1)], [ScalingType.TensorWise], [plain]
    scales = scales.movedim(dim, -1)  # (lines, groups)
    if form.block == -1:
        return [scales.contiguous()], [ScalingType.RowWise], [plain]
    if isinstance(form.block, tuple):  # lines of a block share their scales
        scales = scales.view(torch.uint8).repeat_interleave(form.block[1 - dim], 0).view(scales.dtype)
    if operand.tensor_scale is None:
        return [swizzled(scales)], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    scalings, swizzles = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [SwizzleType.SWIZZLE_32_4_4, plain]
    return [swizzled(scales), operand.tensor_scale.reshape(1)], scalings, swizzles


def swizzled(scales: Tensor) -> Tensor:
    """Lay scales out as Blackwell's tensor cores read them.

    Args:
        scales: (lines, groups), eight bits each.

    Returns:
        One dimension: tiles of 128 lines and four groups, padded with zeros, each as 32 rows of four lines' groups.

    References:
        https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    lines, groups = scales.shape
    tall, wide = -(-lines // 128), -(-groups // 4)
    padded = torch.zeros(tall * 128, wide * 4, dtype=torch.uint8, device=scales.device)
    padded[:lines, :groups] = scales.view(torch.uint8)
    tiles = padded.view(tall, 4, 32, wide, 4)  # (tile, quarter, line, tile, group)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


@functools.cache
def support_on(device_type: str, left: BlockFormat, right: BlockFormat, dtype: torch.dtype) -> Support:
    """Find out whether a device has a kind of product.

    Args:
        device_type: Where.
        left: The format of one operand.
        right: That of the other.
        dtype: What is to be returned.

    **Cost**: on an accelerator a small product the first time, and a wait for it.
    """
    if device_type != "cuda":
        why = "torch's own on a CPU take longer than emulation" if device_type == "cpu" else "torch has none there"
        return Support(why, dtype)
    lacks = _tried(left, right, dtype)
    if lacks and dtype == torch.float16 and not _tried(left, right, torch.bfloat16):
        return Support("", torch.bfloat16)
    return Support(lacks, dtype)


def _tried(left: BlockFormat, right: BlockFormat, dtype: torch.dtype) -> str:
    """Return why a product is not there, or not right; nothing where it is."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(_SIZE, _SIZE, generator=generator).cuda() for _ in range(2)]
    with DisableTorchFunction(), torch.no_grad():
        a, b = (quantized(x, form, 1) for x, form in zip(drawn, (left, right), strict=True))
        try:
            got = scaled_mm(a, b, (1, 1), None, dtype).double()
        except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError) as refusal:
            return str(refusal).strip().partition("\n")[0] or type(refusal).__name__
        values = [operand.wide().double() for operand in (a, b)]
        want, total = values[0] @ values[1].mT, values[0].abs() @ values[1].abs().mT
        is_right = bool(((got - want).abs() <= OF_RESULT * want.abs() + OF_SUM * total).all())
    return "" if is_right else f"its products in {left} are wrong"
