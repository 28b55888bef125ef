"""Tensors in a block format, and the way there and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from mezzo.dispatch import is_transformed, num_dispatch_modes
from mezzo.errors import PolicyError, nearest, shown
from mezzo.formats import cpp, portable, triton
from mezzo.formats.blocks import BlockFormat, block_format
from mezzo.formats.definitions import Format
from mezzo.formats.noise import drawn

Rounding: TypeAlias = Literal["nearest", "stochastic"]

#: What is quantised; all of it embeds in FP32.
QUANTIZABLE: Final = (torch.float16, torch.bfloat16, torch.float32)
#: What has one kernel for it all, by where tensors are.
_KERNELS: Final = {"cpu": cpp, "cuda": triton}
_ROUNDINGS: Final = ("nearest", "stochastic")
#: The longest line that a tensor with one scale is cut into.
_LINE: Final = 1 << 12


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A tensor in a block format: element × scale, × the tensor's scale.

    ``values`` and ``scales`` lie in memory with ``dim`` last, as scaled products want both operands:
    ``values.movedim(dim, -1)`` is contiguous, whatever the layout of what was quantised.

    Args:
        values: The elements, of the shape of what was quantised; E2M1 as ``float4_e2m1fn_x2``, two to an element, the
            first in the low four bits, and so ``dim`` is half as long.
        scales: What elements are multiplied by, of the shape with ``dim`` divided by the block (both last dimensions by
            a pair), 1 in rows; 0-d where the whole tensor has one scale.
        tensor_scale: 0-d FP32, of formats with a ``tensor_scale``; else None.
        format: The block format.
        dim: The dimension along which neighbours share a scale, counted from the first.
        shape: The shape of what was quantised.
        dtype: The dtype of what was quantised.
    """

    values: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    format: BlockFormat
    dim: int
    shape: torch.Size
    dtype: torch.dtype

    def wide(self) -> Tensor:
        """Return the values in FP32.

        Returns:
            A new tensor that lies in memory with ``dim`` last. Where scales are E8M0 it is the very values; elsewhere
            the product with an FP32 scale is rounded once. A block whose scale is NaN is NaN. On a CPU with a C++
            compiler one kernel makes it.
        """
        return self._read(is_scaled=True)

    def elements(self) -> Tensor:
        """Return the elements in FP32, without any scale: a new tensor that lies in memory with ``dim`` last."""
        return self._read(is_scaled=False)

    def _read(self, *, is_scaled: bool) -> Tensor:
        moved = _bytes(self.values).movedim(self.dim, -1)
        shape = [*self.shape]
        shape.append(shape.pop(self.dim))
        bands, lines, groups, width = cut = _cut(shape, self.format, self.dim)
        on_cpu = self.values.device.type == "cpu" and _is_plain(self.values)
        scales = tensor_scale = None
        if is_scaled:
            scales, tensor_scale = self.scales, self.tensor_scale
            scales = scales if scales.dtype == torch.float32 else _bytes(scales)
            if scales.dim():
                scales = scales.movedim(self.dim, -1).reshape(bands, groups)
        values = cpp.decoded(moved, scales, tensor_scale, self.format, cut) if on_cpu else None
        if values is None:
            codes = moved.reshape(bands, lines, groups, width // 2 if self.format.element.dtype is None else width)
            values = portable.decoded(codes, scales, tensor_scale, self.format)
        return values.view(shape).movedim(-1, self.dim)

    def dequantize(self) -> Tensor:
        """Return the values in the dtype of what was quantised.

        Where scales are floored, what is next to the dtype's end can be infinite: float16's 65504 rounds to 65536.

        Example:
            >>> quantize(torch.tensor([1.0, -0.3]), "e4m3").dequantize()
            tensor([ 1.0000, -0.2857])
        """
        return self.wide().to(self.dtype)


@torch.no_grad()
def quantize(
    x: Tensor,
    fmt: str | torch.dtype | Format | BlockFormat,
    dim: int = -1,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized:
    """Round a tensor to a block format.

    With amax the largest magnitude of the elements that share a scale, and max the largest element:

    - E8M0 scales are 2 to the power clamp(⌊log₂ amax⌋ − ⌊log₂ max⌋, −127, 127), as
      the OCP specification has it: what lies between max and the power of two above it, in these units, saturates.
      (Transformer Engine and cuBLAS round amax / max *up* to a power of two: nothing saturates, and where that is more,
      small elements have a bit less.)
    - FP32 scales are 1 / m with m = max / amax, rounded in FP32 each, m floored to a power of two where ``floored``:
      torchao's and Transformer Engine's scaling. An amax below 2⁻¹⁰⁰ counts as 2⁻¹⁰⁰ (torchao: 10⁻¹²).
    - With a ``tensor_scale`` (NVFP4) it is s = amax of the tensor's finite elements / (max · 448), and the scale of a
      block (amax / max) / s, rounded to the nearest E4M3. One that rounds to zero makes its elements zero.

    Elements are x · m, or x · (1 / (scale · s)), rounded and saturated at max. A zero keeps its sign. A block that
    holds NaN or an infinity is NaN: its scale is, and so are its elements where their format has NaN.

    Args:
        x: float16, bfloat16 or float32, any shape, layout and device.
        fmt: A block format or its name; a format of at most eight bits has one FP32 scale for the whole tensor.
        dim: Along which neighbours share a scale, and which lies last in memory. With blocks of two dimensions one of
            the last two.
        rounding: ``"nearest"``, ties to even; or ``"stochastic"``, up or down at random, so that the mean is the value
            (to within 2⁻²⁷ of a spacing). Scales are never rounded at random.
        generator: On the device of ``x``; stochastic rounding draws one key from it, torch's default one when None. The
            noise is a hash of the key and an element's place in ``values.movedim(dim, -1)``, the same on every device.

    Returns:
        Values and scales, outside autograd.

    Raises:
        PolicyError: One of these is something else, or a block does not divide its dimension.

    **Cost**: no host sync. On a CPU with a C++ compiler, and on NVIDIA's GPUs with Triton, one kernel that reads ``x``
    once, or twice where the whole tensor has a scale (there two launches); the first of a kind takes a second to
    compile, and is kept on disk. Elsewhere, and for blocks that are no powers of two on a GPU, about 30 element-wise
    kernels.

    Example:
        >>> found = quantize(torch.linspace(-1, 1, 64).view(2, 32), "mxfp8_e4m3")
        >>> found.values.dtype, found.scales.float().tolist()
        (torch.float8_e4m3fn, [[0.00390625], [0.00390625]])
        >>> quantize(torch.tensor([[6.0, 0.4, -1.6, 2.5] * 8]), "mxfp4").dequantize()[0, :4]
        tensor([ 6.0000,  0.5000, -1.5000,  2.0000])

    References:
        OCP Microscaling Formats (MX) Specification 1.0, section 6.3. NVIDIA, Pretraining Large Language Models with
        NVFP4, https://arxiv.org/abs/2509.25149, appendix C.
    """
    target = block_format(fmt)
    _check(x, target, dim)
    if rounding not in _ROUNDINGS:
        raise PolicyError(
            f"unknown rounding {shown(rounding)}",
            why=nearest(rounding if isinstance(rounding, str) else "", _ROUNDINGS),
            write='rounding="nearest" or rounding="stochastic"',
        )
    key = None
    if not isinstance(generator, torch.Generator | None):
        raise PolicyError(
            f"{shown(generator)} is no generator",
            why="the key of the noise is drawn from one",
            write=f'generator=torch.Generator("{x.device}").manual_seed(0)',
        )
    if generator is not None and generator.device != x.device:
        raise PolicyError(
            f"a generator on {generator.device} for a tensor on {x.device}",
            why="the key of the noise is drawn where the tensor is, so that nothing waits",
            write=f'generator=torch.Generator("{x.device}")',
        )
    if rounding == "stochastic":
        key = drawn(x.device, generator)
    return quantized(x, target, dim, key=key)


def quantized(
    x: Tensor, fmt: BlockFormat, dim: int = -1, *, key: Tensor | None = None, amax: Tensor | None = None
) -> Quantized:
    """Round a tensor to a block format, as :func:`quantize` does, without its checks.

    Args:
        x: float16, bfloat16 or float32, with at least one dimension; blocks divide it.
        fmt: The format.
        dim: As for :func:`quantize`.
        key: 0-d int32 or int64 on the device of ``x``: the key of a stochastic rounding. None rounds to nearest.
        amax: FP32 on the device of ``x``, what counts as the largest magnitude: 0-d, or of the shape of the scales.
            Finite elements beyond it saturate, an infinity or NaN is NaN by itself (E2M1 has none: 6). In formats with
            a ``tensor_scale`` it is 0-d, the tensor's, and blocks have their own.
    """
    x = x.detach()
    last_dim = x.dim() - 1
    dim %= last_dim + 1
    moved = x if dim == last_dim else x.movedim(dim, -1)
    *before, last = moved.shape
    down, across = _block(fmt, last_dim + 1, dim, last)
    if amax is not None and amax.dim() and dim != last_dim:
        amax = amax.movedim(dim, -1)
    kernels = _KERNELS.get(x.device.type) if _is_plain(x) else None
    parts = None if kernels is None else kernels.encoded(moved, fmt, (down, across), key, amax)
    if parts is None:
        blocks = moved.contiguous().view(_cut(moved.shape, fmt, dim))
        bands, _, groups, _ = blocks.shape
        tops = amax.reshape(bands, 1, groups, 1) if amax is not None and amax.dim() else amax
        parts = portable.encoded(blocks, fmt, key, tops)
    codes, scales, tensor_scale = parts
    values = codes.view(*before, last // 2 if fmt.element.dtype is None else last)
    values = values.view(fmt.element.dtype or torch.float4_e2m1fn_x2)
    if fmt.scale.dtype != torch.float32:
        scales = scales.view(fmt.scale.dtype or torch.uint8)
    if fmt.block is not None:
        if down > 1:
            before[-1] //= down
        scales = scales.view(*before, last // across if across else 1)
    if dim != last_dim:
        values = values.movedim(-1, dim)
        scales = scales.movedim(-1, dim) if fmt.block is not None else scales
    return Quantized(
        values=values,
        scales=scales,
        tensor_scale=tensor_scale,
        format=fmt,
        dim=dim,
        shape=x.shape,
        dtype=x.dtype,
    )


def _is_plain(x: Tensor) -> bool:
    """Whether a kernel may read a tensor at its address: it is not empty, and nothing traces or transforms it."""
    return (
        type(x) is Tensor
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and num_dispatch_modes() == 0
    )


def _block(fmt: BlockFormat, ndim: int, dim: int, last: int) -> tuple[int, int]:
    """Return how many lines and how many of ``dim``'s elements share a scale, with ``dim`` moved last."""
    block = fmt.block
    if isinstance(block, tuple):
        return block if dim == ndim - 1 else (block[1], block[0])
    return 1, last if block is None or block == -1 else block


def _cut(shape: torch.Size | list[int], fmt: BlockFormat, dim: int) -> tuple[int, int, int, int]:
    """Return (bands, lines, groups, width) of a tensor whose ``dim`` was moved last."""
    last = shape[-1]
    count = math.prod(shape)
    if fmt.block is None:
        width = math.gcd(count, _LINE)
        return (count // width if width else 0), 1, 1, width
    lines, width = _block(fmt, len(shape), dim, last)
    if lines == 1:
        return (count // width if width else math.prod(shape[:-1])), 1, 1, width
    rows = math.prod(shape[:-1])
    return rows // lines, lines, last // width, width


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _check(x: object, fmt: BlockFormat, dim: object) -> None:
    """Refuse what cannot be quantised so."""
    if not isinstance(x, Tensor):
        raise PolicyError(f"{shown(x)} cannot be quantised", write="quantize(torch.tensor([1.0, 2.0]), 'e4m3')")
    what = f"a tensor of {tuple(x.shape)} in {fmt}"
    where = f"{x.dtype} on {x.device}, dim {shown(dim)}"
    if x.dtype not in QUANTIZABLE or x.layout != torch.strided:
        raise PolicyError(
            f"{x.dtype} tensors cannot be quantised"
            if x.layout == torch.strided
            else f"{x.layout} cannot be quantised",
            where=f"tensor of shape {tuple(x.shape)} on {x.device}",
            why="it takes dense float16, bfloat16 and float32, which FP32 holds",
            write="quantize(x.to_dense(), …)" if x.layout != torch.strided else "quantize(x.float(), …)",
        )
    if x.dim() == 0:
        raise PolicyError(what, why="a tensor without dimensions has no neighbours", write="quantize(x.reshape(1), …)")
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise PolicyError(
            what,
            where=where,
            why=f"there is no such dimension of {x.dim()}",
            write=f"dim=-1, or from 0 to {x.dim() - 1}",
        )
    index = dim % x.dim()
    if isinstance(fmt.block, tuple):
        if x.dim() < 2 or index < x.dim() - 2:
            raise PolicyError(
                what,
                where=where,
                why="blocks of two dimensions lie in the last two, and one of them is last in memory",
                write="dim=-1 or dim=-2" if x.dim() > 1 else f"{fmt.element.name} with a block of one dimension",
            )
        sizes = {x.dim() - 2: fmt.block[0], x.dim() - 1: fmt.block[1]}
    else:
        sizes = {} if fmt.block is None or fmt.block == -1 else {index: fmt.block}
    for dimension, size in sizes.items():
        if x.shape[dimension] % size:
            short = -x.shape[dimension] % size
            raise PolicyError(
                what,
                where=where,
                why=f"blocks of {size} do not divide dimension {dimension}, which has {x.shape[dimension]}",
                write=f"{short} zeros more in dimension {dimension} (torch.nn.functional.pad), or another dim",
            )
    if fmt.element.dtype is None and x.shape[index] % 2:
        raise PolicyError(
            what, where=where, why=f"two elements share a byte, and dimension {index} is odd", write="an even dimension"
        )
