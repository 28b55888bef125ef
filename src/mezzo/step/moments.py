"""Moments in 8 bits: a code for each element, and one BF16 scale for each group of 32 neighbours in memory.

:func:`coded` and :func:`valued` are the one definition, free of branches, that executors trace and kernels repeat. Both
are element-wise but for the largest element of a group, which sets its scale. :func:`encode` and :func:`decode` are the
same for whole tensors of any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.step.storage import stochastic
from mezzo.step.update import SQUARES
from mezzo.tensors import described, flat

#: What is kept of one moment: the moment itself, or its codes and their scales.
Kept: TypeAlias = tuple[Tensor, ...]

#: Elements that share a scale.
GROUP: Final = 32
#: Codes from zero to the scale: of a moment with a sign, and of one that is never negative.
STEPS: Final = {torch.int8: 127, torch.uint8: 255}
#: The fraction that rounds to the nearest code.
NEAREST: Final = 0.5

_INFINITE: Final = 0x7F80_0000
_NAN: Final = 0x7FC0_0000
_LARGEST_BF16: Final = 0x7F7F_0000
#: 2^-64: scales below are lifted by 2^96 before anything is divided by them, since 2^133 is no FP32 value.
_SMALL: Final = 0x1F80_0000


def coded(moments: Tensor, dtype: torch.dtype, fraction: Tensor | float = NEAREST) -> tuple[Tensor, Tensor]:
    r"""Round groups of moments to codes.

    With the largest :math:`|m|` of a group, rounded up to BF16, as its scale :math:`s`, and :math:`n` codes between
    zero and it, a code :math:`c` stands for :math:`s\, (c / n)^2`: near zero, codes are close to each other. Between
    two neighbours, :math:`c^2 \le n^2 |m| / s < (c + 1)^2`, the upper one is taken from some fraction of the way on: at
    random, so that the mean is the moment, or from the middle on.

    - A zero is kept. A moment that is never negative and not zero gets no code 0: the root of its mean is divided by.
    - A group with an infinity or NaN becomes NaN.
    - What is kept lies less than a code from the moment, and with :data:`NEAREST` at most half a code: of :math:`s`,
      :math:`c / n^2` and half of it (and 1 / n² where the code would be 0). A moment beyond the largest BF16 value
      becomes that.

    Args:
        moments: FP32 (…, 32): groups, or a single element with 0 dimensions, which is one of its group.
        dtype: ``torch.int8``, or ``torch.uint8`` of moments that are never negative.
        fraction: FP32 of the same shape: random, from 0 to below 1; or :data:`NEAREST`.

    Returns:
        Codes as int32, and scales (…, 1) as FP32 on BF16's grid.
    """
    steps = STEPS[dtype]
    pattern = moments.view(torch.int32)
    sizes = pattern & 0x7FFF_FFFF  # of FP32 values of one sign the patterns are in order
    largest = sizes.amax(-1, keepdim=True)
    top = (largest.clamp(0, _LARGEST_BF16) + 0xFFFF) & -0x1_0000
    scale = torch.where(largest < _INFINITE, top, _NAN).view(torch.float32)
    lift = (top < _SMALL).to(torch.float32) * 2.0**96 + 1.0
    # 2^-60 only where all of a group is zero, or where the process counts subnormals as zero.
    gain = steps**2 / (top.view(torch.float32) * lift).clamp(2.0**-60, 2.0**127)
    # Minimum: in a group without a number, and beyond the largest BF16 value, every size is a number up to the scale.
    squares = (torch.minimum(sizes, top).view(torch.float32) * lift * gain).clamp(0.0, float(steps**2))
    low = squares.sqrt().to(torch.int32)
    below = low.to(torch.float32)
    codes = torch.where(squares - below * below > (below + below + 1.0) * fraction, low + 1, low)
    if dtype == torch.uint8:
        return torch.maximum(codes, (sizes > 0).to(torch.int32)), scale
    return torch.where(pattern < 0, -codes, codes), scale


def valued(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the FP32 moments that :func:`coded` rounded.

    Args:
        codes: int8 or uint8 (…, 32).
        scales: (…, 1), BF16 or FP32.
    """
    numbers = codes.to(torch.float32)
    return numbers * numbers.abs() * (1.0 / STEPS[codes.dtype] ** 2) * scales.to(torch.float32)


# What an update reads and writes -----------------------------------------------------------------------------


def is_coded(dtype: torch.dtype) -> bool:
    """Whether moments of a dtype are codes, each followed by its scales."""
    return dtype in STEPS


def apart(kept: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[tuple[Any, ...]]:
    """Cut what is kept of all moments of a weight into what is kept of each.

    Args:
        kept: Tensors, or what stands for them.
        dtypes: Of them.
    """
    each = 2 if dtypes and is_coded(dtypes[0]) else 1
    return [tuple(kept[place : place + each]) for place in range(0, len(kept), each)]


def read(kept: Kept) -> Tensor:
    """Return a moment in FP32."""
    return valued(*kept) if len(kept) == 2 else kept[0].to(torch.float32)


def write(kept: Kept, moment: Tensor, bits: Callable[[], Tensor]) -> Kept:
    """Return what to copy into what is kept of a moment: FP32 or int32, which a copy rounds no further.

    Args:
        kept: Where to.
        moment: FP32.
        bits: Makes random bits of the same shape, int32, for what is rounded.
    """
    if len(kept) == 2:
        return coded(moment, kept[0].dtype, (bits() & 0xFFFF).to(torch.float32) * 2.0**-16)
    return (moment if kept[0].dtype == torch.float32 else stochastic(moment, bits()),)


# Whole tensors -------------------------------------------------------------------------------------------------


def num_groups(count: int) -> int:
    """Return how many groups so many elements have; the last one may not be full."""
    return -(-count // GROUP)


def zeros(name: str, weight: Tensor, dtype: torch.dtype) -> Kept:
    """Return what is kept of a moment before the first step.

    Args:
        name: The moment's, as its rule calls it.
        weight: Whose moment it is; as it lies in memory, so does the moment.
        dtype: ``torch.float32`` or ``torch.bfloat16``; ``torch.int8`` for codes with scales.
    """
    dtype = torch.uint8 if dtype == torch.int8 and name in SQUARES else dtype
    moment = torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)
    if not is_coded(dtype):
        return (moment,)
    return moment, torch.zeros(num_groups(weight.numel()), dtype=torch.bfloat16, device=weight.device)


def in_groups(vector: Tensor) -> Tensor:
    """Return a vector as groups (groups, 32): the same memory, or a copy with zeros at its end."""
    rest = -len(vector) % GROUP
    return (torch.nn.functional.pad(vector, (0, rest)) if rest else vector).view(-1, GROUP)


@torch.no_grad()
def encode(moment: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Store a moment in codes and scales, rounded to nearest.

    Args:
        moment: FP32 or a low precision; any shape, layout and device.
        dtype: ``torch.int8``; ``torch.uint8`` of a moment that is never negative, whose sign would be lost.

    Returns:
        Codes of the moment's shape and layout, without gaps, and scales (groups,) in BF16. Neighbours of a group are
        so in memory.

    Raises:
        PolicyError: ``moment`` is something else, or another ``dtype``.

    **Cost**: some FP32 temporaries. No host sync.

    Example:
        >>> codes, scales = encode(torch.tensor([1.0, -0.1, 1e-3, 0.0]))
        >>> codes, scales
        (tensor([127, -40,   4,   0], dtype=torch.int8), tensor([1.], dtype=torch.bfloat16))
        >>> decode(codes, scales)
        tensor([ 1.0000, -0.0992,  0.0010,  0.0000])
    """
    if not moment.is_floating_point() or moment.dtype == torch.float64 or dtype not in STEPS:
        raise PolicyError(
            f"moments of {described(moment)} in codes of {dtype}",
            why="moments are float32, float16 or bfloat16, and codes int8 or uint8",
            write="encode(moment.float(), torch.int8)",
        )
    codes = torch.empty_like(moment, dtype=dtype, memory_format=torch.preserve_format)
    wide = torch.empty_like(codes, dtype=torch.float32).copy_(moment)
    vector, place = (found[0] for found in map(flat, (wide, codes)) if found is not None)
    found, scales = coded(in_groups(vector), dtype)
    place.copy_(found.view(-1)[: len(vector)])
    return codes, scales.view(-1).to(torch.bfloat16)


@torch.no_grad()
def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the FP32 moment that :func:`encode` stored, with the layout of its codes.

    Args:
        codes: int8 or uint8, without gaps.
        scales: BF16, one for each group.

    Raises:
        PolicyError: Other dtypes, or another number of scales.
    """
    vector = flat(codes)
    if codes.dtype not in STEPS or vector is None or scales.shape != (num_groups(codes.numel()),):
        raise PolicyError(
            f"codes of {described(codes)} with scales of {described(scales)}",
            why=f"codes are int8 or uint8, and every {GROUP} of them share a scale",
            write="decode(*encode(moment))",
        )
    moment = torch.empty_like(codes, dtype=torch.float32)
    values = valued(in_groups(vector[0]), scales.view(-1, 1))
    moment.copy_(values.view(-1)[: codes.numel()].as_strided(codes.shape, codes.stride()))
    return moment
