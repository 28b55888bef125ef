"""Moments in 8 bits: a code for each element, and one BF16 scale for each group of 32 neighbours in memory.

:func:`coded` and :func:`valued` are the one definition, free of branches, that executors trace and kernels repeat. Both
are element-wise but for the largest element of a group, which sets its scale. :func:`encode` and :func:`decode` are the
same for whole tensors of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.sharded import local
from mezzo.step.storage import SIGN, stochastic
from mezzo.step.update import SQUARES
from mezzo.tensors import described, flat

#: What is kept of one moment: the moment itself, or its codes and their scales.
Kept: TypeAlias = tuple[Tensor, ...]

#: Elements that share a scale.
GROUP: Final = 32
#: Where the curve of codes begins: of a moment with a sign 2^-7, and of one that is never negative 2^-15.
START: Final = {torch.int8: 2.0**-7, torch.uint8: 2.0**-15}
#: Where it ends: its last code.
_END: Final = 2.0 - 2.0**-4
#: What is left out of an FP32 pattern: 19 of 23 bits after the point.
_CUT: Final = 19
#: Random bits that round to the nearest code.
NEAREST: Final = 1 << (_CUT - 1)

_INFINITE: Final = 0x7F80_0000
_NAN: Final = 0x7FC0_0000
#: The pattern of 2^-126: by a smaller scale nothing is divided.
_LEAST: Final = 0x0080_0000
#: So far below 1 that the largest element of a group, rounded up, has the last code, and what that stands for is not
#: beyond the scale: what was rounded to nearest is kept again, with the same scale.
_BELOW: Final = 1.0 - 2.0**-22


def coded(moments: Tensor, dtype: torch.dtype, bits: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    r"""Round groups of moments to codes.

    The scale :math:`s` of a group is its largest :math:`|m|`, rounded up to BF16. Of
    :math:`y = a + (b - a)\, |m| / s` between :math:`a` = 2⁻⁷ or 2⁻¹⁵ and :math:`b` = 31/16 the code is the FP32 pattern
    down to its fourth bit after the point, less that of :math:`a`: 16 codes for each power of two, as μ-law telephones
    have them. Codes lie evenly next to zero, and farther up each is some 1/16 to 1/32 above the one before.

    - Zeros are kept. Of a moment that is never negative and not zero the code is not 0: its root is divided by.
    - What is rounded at random is one of the two neighbours, and in the mean the moment. What is rounded to
      :data:`NEAREST` is at most :math:`(|m| + a\, s) / 32` away from it (and :math:`a\, s / 30` where 0 is no code).
    - Scales are at least 2⁻¹²⁶. A group with an infinity or NaN becomes infinite or NaN, and so does one whose largest
      element is beyond the largest BF16 value.

    Args:
        moments: FP32 (…, 32): groups, or a single element with 0 dimensions, which is one of its group.
        dtype: ``torch.int8``, or ``torch.uint8`` of moments that are never negative.
        bits: int32 of the same shape, random in their low 19 bits; or :data:`NEAREST`.

    Returns:
        Codes as int32, and scales (…, 1) as FP32 on BF16's grid.

    References:
        ITU-T G.711, *Pulse code modulation of voice frequencies*, 1988: the curve.
    """
    start, pattern = START[dtype], moments.view(torch.int32)
    sizes = pattern & 0x7FFF_FFFF  # of FP32 values of one sign the patterns are in order
    largest = sizes.amax(-1, keepdim=True)
    top = ((largest + 0xFFFF) & -0x1_0000).clamp(_LEAST, _INFINITE)
    scale = torch.where(largest <= _INFINITE, top, _NAN).view(torch.float32)
    gain = ((_END - start) * _BELOW) / scale
    curve = (sizes.view(torch.float32) * gain + start).view(torch.int32)
    codes = (curve + (bits & (1 << _CUT) - 1) - _pattern(start)) >> _CUT
    if dtype == torch.uint8:
        return torch.maximum(codes, (sizes > 0).to(torch.int32)), scale
    sign = pattern >> 31
    return (codes ^ sign) - sign, scale


def valued(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the FP32 moments that :func:`coded` rounded.

    Args:
        codes: int8 or uint8 (…, 32).
        scales: (…, 1), BF16 or FP32.
    """
    start, numbers = START[codes.dtype], codes.to(torch.int32)
    curve = (((numbers.abs() if codes.dtype == torch.int8 else numbers) << _CUT) + _pattern(start)).view(torch.float32)
    sizes = (curve - start) * (scales.to(torch.float32) * (_BELOW / (_END - start)))
    return sizes if codes.dtype == torch.uint8 else (sizes.view(torch.int32) | (numbers & SIGN)).view(torch.float32)


def _pattern(power: float) -> int:
    """The FP32 pattern of a power of two."""
    return int(math.log2(power) + 127) << 23


# What an update reads and writes -----------------------------------------------------------------------------


def is_coded(dtype: torch.dtype) -> bool:
    """Whether moments of a dtype are codes, each followed by its scales."""
    return dtype in START


def apart(kept: Sequence[Tensor]) -> list[Kept]:
    """Cut what is kept of all moments of a weight into what is kept of each."""
    each = 2 if kept and is_coded(kept[0].dtype) else 1
    return [tuple(kept[place : place + each]) for place in range(0, len(kept), each)]


def read(kept: Kept) -> Tensor:
    """Return a moment in FP32."""
    return valued(*kept) if len(kept) == 2 else kept[0].to(torch.float32)


def write(kept: Kept, moment: Tensor, bits: Tensor | None, *, take_high: bool) -> Kept:
    """Return what to copy into what is kept of a moment: FP32 or int32, which a copy rounds no further.

    Args:
        kept: Where to.
        moment: FP32.
        bits: int32 of the same shape, random; None where no moment of the weight is rounded.
        take_high: Whether to take high bits of them, and not low ones.
    """
    if bits is None or kept[0].dtype == torch.float32:
        return (moment,)
    count = _CUT if len(kept) == 2 else 16
    own = bits >> 32 - count if take_high else bits
    return coded(moment, kept[0].dtype, own) if len(kept) == 2 else (stochastic(moment, own),)


def fit(codes: Tensor, scales: Tensor) -> bool:
    """Whether scales may be those of codes: the largest element of a group has the last code, or the one before.

    Args:
        codes: int8 or uint8.
        scales: One for each group.

    **Cost**: a host sync.
    """
    (vector,) = flat(codes) or (codes.reshape(-1),)
    largest, last = in_groups(vector).to(torch.int32).abs().amax(-1), torch.iinfo(codes.dtype).max
    wide = scales.to(torch.float32)
    is_full = (largest == last) | (largest == last - 1) | (largest == 0)  # somebody may have set all to zero
    # By a scale of 2^-126 smaller groups are divided, too; nothing is known of one that is not finite.
    is_full |= wide <= 2.0**-126
    return bool((is_full & (wide >= 0) | ~wide.isfinite()).all())


# Whole tensors -------------------------------------------------------------------------------------------------


def num_groups(count: int) -> int:
    """Return how many groups so many elements have; the last one may not be full."""
    return -(-count // GROUP)


def codes_of(name: str) -> torch.dtype:
    """Return the dtype of a moment's codes, by what its rule calls it."""
    return torch.uint8 if name in SQUARES else torch.int8


def name_of_codes(name: str) -> str:
    """Return what the codes of a moment are called: a name that nobody takes for the moment's."""
    return f"{name}_codes"


def scale_of(name: str) -> str:
    """Return what the scales of a moment are called beside its codes."""
    return f"{name}_scale"


def zeros(name: str, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what is kept of a moment before the first step, by name.

    Args:
        name: The moment's, as its rule calls it.
        weight: Whose moment it is; as it lies in memory and over ranks, so does the moment.
        dtype: ``torch.float32`` or ``torch.bfloat16``; ``torch.int8`` for codes with scales.
    """
    if dtype != torch.int8:
        return {name: torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)}
    codes = torch.zeros_like(weight, dtype=codes_of(name), memory_format=torch.preserve_format)
    shard = local(weight)  # groups end where shards do
    scales = torch.zeros(num_groups(shard.numel()), dtype=torch.bfloat16, device=shard.device)
    return {name_of_codes(name): codes, scale_of(name): scales}


def spread(scales: Tensor, codes: Tensor) -> Tensor:
    """Return the scale of each code, laid out as the codes are.

    Args:
        scales: (groups,).
        codes: Without gaps.
    """
    each = torch.empty_like(codes, dtype=scales.dtype)
    (vector,) = flat(each) or (each.view(-1),)
    vector.copy_(scales.view(-1, 1).expand(-1, GROUP).reshape(-1)[: codes.numel()])
    return each


def gathered(each: Tensor, codes: Tensor) -> Tensor | None:
    """Return the scales (groups,) of which :func:`spread` makes these; None where groups have several. A host sync."""
    vectors = flat(each, codes)
    if vectors is None:
        return None
    scales, places = in_groups(vectors[0]), torch.arange(GROUP, device=codes.device)
    last = torch.full((len(scales), 1), GROUP, device=codes.device)
    last[-1:] = codes.numel() - GROUP * (len(scales) - 1)
    is_same = (scales.view(torch.int16) == scales[:, :1].view(torch.int16)) | (places >= last)
    return scales[:, 0].contiguous() if is_same.all() else None


def in_groups(vector: Tensor) -> Tensor:
    """Return a vector as groups (groups, 32): the same memory, or a copy with zeros at its end."""
    rest = -len(vector) % GROUP
    return (torch.nn.functional.pad(vector, (0, rest)) if rest else vector).view(-1, GROUP)


def elements(groups: Tensor, codes: Tensor) -> Tensor:
    """View groups (groups, 32) as a tensor that lies in memory as codes do, which :func:`in_groups` was given."""
    return groups.view(-1)[: codes.numel()].as_strided(codes.shape, codes.stride())


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
        (tensor([127, -74,   4,   0], dtype=torch.int8), tensor([1.], dtype=torch.bfloat16))
        >>> decode(codes, scales)
        tensor([ 1.0000, -0.1012,  0.0010,  0.0000])
    """
    if not moment.is_floating_point() or moment.dtype == torch.float64 or dtype not in START:
        raise PolicyError(
            f"moments of {described(moment)} in codes of {dtype}",
            why="moments are float32, float16 or bfloat16, and codes int8 or uint8",
            write="encode(moment.float(), torch.int8)",
        )
    codes = torch.empty_like(moment, dtype=dtype, memory_format=torch.preserve_format)
    wide = torch.empty_like(codes, dtype=torch.float32).copy_(moment)
    (vector,) = flat(wide) or (wide.view(-1),)
    found, scales = coded(in_groups(vector), dtype)
    return codes.copy_(elements(found, codes)), scales.view(-1).to(torch.bfloat16)


@torch.no_grad()
def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the FP32 moment that :func:`encode` stored, with the layout of its codes.

    Args:
        codes: int8 or uint8, without gaps.
        scales: BF16, one for each group.

    Raises:
        PolicyError: Other dtypes, or another number of scales.
    """
    vectors = flat(codes)
    are_codes = codes.dtype in START and scales.is_floating_point()
    if vectors is None or not are_codes or scales.shape != (num_groups(codes.numel()),):
        raise PolicyError(
            f"codes of {described(codes)} with scales of {described(scales)}",
            why=f"codes are int8 or uint8, and every {GROUP} of them share a scale",
            write="decode(*encode(moment))",
        )
    values = valued(in_groups(vectors[0]), scales.view(-1, 1))
    return torch.empty_like(codes, dtype=torch.float32).copy_(elements(values, codes))
