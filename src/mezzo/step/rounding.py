"""Rounding FP32 to a low format's grid, element by element: to the nearest, or to a random neighbour.

Everything here is pure and spelled out on bit patterns and additions, because inductor removes
``w.to(low).to(float32)`` as pointless. Random bits are a hash of where and when, not a generator's: every executor
gets the same ones, a captured step gets new ones each time, and a resumed run gets those it would have had.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["key_of", "keys", "nearest", "noise", "one_nan", "seeded", "stochastic"]

SIGN: Final = -(1 << 31)
_EXPONENT: Final = 0x7F80_0000
_NAN: Final = 0x7FC0_0000
#: 2^32 / golden ratio, as int32: multiples of it are far apart.
_GOLDEN: Final = 0x9E37_79B9 - (1 << 32)


def one_nan(w: Tensor) -> Tensor:
    """Give every NaN the pattern 0x7FC00000 and its sign: 0x7FFFFFFF would round to −0.0 in BF16."""
    nan = ((w.view(torch.int32) & SIGN) | _NAN).view(torch.float32)
    return torch.where(w != w, nan, w)


def nearest(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values to the nearest of a low format, ties to even.

    Args:
        w: FP32, any shape.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Returns:
        FP32 values that a cast to ``dtype`` keeps, or turns into the infinity they stand for (FP16: from 65536 on).

    **Cost**: 9 element-wise operations, no sync; compilers fuse it whole.

    Example:
        >>> nearest(torch.tensor([0.1, 1 + 2**-9]), torch.bfloat16)
        tensor([0.1001, 1.0000])
    """
    if dtype == torch.bfloat16:
        bits = one_nan(w).view(torch.int32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    bits = w.view(torch.int32)
    # Next to `coarse` FP32's spacing is FP16's next to w, so that adding it rounds w to nearest even.
    coarse = _fp16_power(bits) * (1.5 * 2**13)
    rounded = ((w + coarse) - coarse).view(torch.int32)
    return (rounded | (bits & SIGN)).view(torch.float32)


def stochastic(w: Tensor, bits: Tensor) -> Tensor:
    """Round FP32 values to one of their two neighbours in BF16, at random, so that the mean is exactly the value.

    Args:
        w: FP32, any shape.
        bits: int32 of the same shape: random in their low 16 bits.

    Returns:
        FP32 values that a cast to BF16 keeps.

    Example:
        >>> eighths = torch.arange(8, dtype=torch.int32) << 13  # every eighth of 2^16
        >>> stochastic(torch.full((8,), 1 + 2**-9), eighths)
        tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0078, 1.0078])
    """
    pattern = one_nan(w).view(torch.int32)
    return ((pattern + (bits & 0xFFFF)) & -0x10000).view(torch.float32)


def noise(index: Tensor, key: Tensor, slot: int = 0) -> Tensor:
    """Hash element numbers to 32 random bits each.

    Args:
        index: int32 element numbers.
        key: 0-d int32, of :func:`keys`.
        slot: Tells apart the tensors of one parameter that are rounded in one step.

    Returns:
        int32 of ``index``'s shape: the "lowbias32" mixer, whose output bits are each flipped by about half of the
        input flips.

    References:
        Wellons, *Prospecting for Hash Functions*, https://nullprogram.com/blog/2018/07/31/.
    """
    mixed = index + (key + _wrapped(slot * _GOLDEN))
    mixed = (mixed ^ ((mixed >> 16) & 0xFFFF)) * 0x7FEB_352D
    mixed = (mixed ^ ((mixed >> 15) & 0x1_FFFF)) * _wrapped(0x846C_A68B)
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def keys(step: Tensor, count: int, seed: int = 0) -> Tensor:
    """Make the keys of :func:`noise` for one step.

    Args:
        step: 0-d int64 on the device: the step under way.
        count: How many parameters need one.
        seed: Ranks that hold different parts of a model give different seeds.

    Returns:
        (count,) int32 on the step's device.

    **Cost**: about 10 kernels over ``count`` numbers, no host sync.
    """
    order = torch.arange(count, dtype=torch.int32, device=step.device)
    return key_of(order, step.to(torch.int32), step.new_full((), seeded(seed), dtype=torch.int32))


def key_of(order: Tensor, step: Tensor, start: Tensor) -> Tensor:
    """Make the keys of some parameters, element-wise: what kernels repeat.

    Args:
        order: int32: which parameters of their bucket.
        step: 0-d int32: the step under way.
        start: 0-d int32, of :func:`seeded`.
    """
    return noise(order, noise(step, start), slot=-1)


def seeded(seed: int) -> int:
    """Return the number from which a seed's keys start."""
    return _wrapped(seed * _GOLDEN)


def _fp16_power(bits: Tensor) -> Tensor:
    """The power of two at or below |w|, from where FP16 is subnormal to where it is infinite."""
    return (bits & _EXPONENT).view(torch.float32).clamp(2.0**-14, 2.0**16)


def _wrapped(number: int) -> int:
    """The int32 with the low 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
