"""Moments in 8 bits: a code for each element, and one BF16 scale for each group of 32 neighbours in memory.

:func:`coded` and :func:`valued` are the one definition, free of branches, that executors trace and kernels repeat. Both
are element-wise but for the largest element of a group, which sets its scale. :func:`encode` and :func:`decode` apply
them to whole tensors of any shape.
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

#: The stored tensors of one moment: the moment itself, or its codes and their scales.
Stored: TypeAlias = tuple[Tensor, ...]

#: Elements that share a scale.
GROUP: Final = 32
#: Where the curve of codes begins: of a moment with a sign 2^-7, and of one that is never negative 2^-15.
START: Final = {torch.int8: 2.0**-7, torch.uint8: 2.0**-15}
#: Where it ends: its last code.
_END: Final = 2.0 - 2.0**-4
#: How many bits of an FP32 pattern codes leave out: 19 of 23 bits after the point.
_CUT: Final = 19
#: Random bits that round to the nearest code.
NEAREST: Final = 1 << (_CUT - 1)

_INFINITE: Final = 0x7F80_0000
_NAN: Final = 0x7FC0_0000
#: The pattern of 2^-126, the smallest scale: a smaller one could not be divided by.
_LEAST: Final = 0x0080_0000
#: So far below 1 that the largest element of a group, rounded up, has the last code, and the value of that code is not
#: beyond the scale: a moment that was rounded to nearest comes back as the same code and scale when it is coded again.
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
        return torch.maximum(codes, sizes.clamp_max(1)), scale
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


def apart(tensors: Sequence[Tensor]) -> list[Stored]:
    """Cut the stored tensors of all moments of a weight into those of each moment."""
    size = 2 if tensors and is_coded(tensors[0].dtype) else 1
    return [tuple(tensors[start : start + size]) for start in range(0, len(tensors), size)]


def read(stored: Stored) -> Tensor:
    """Return a moment in FP32."""
    return valued(*stored) if len(stored) == 2 else stored[0].to(torch.float32)


def write(stored: Stored, moment: Tensor, bits: Tensor | None, *, take_high: bool) -> Stored:
    """Return the values to copy into the stored tensors of a moment: FP32 or int32, which a copy rounds no further.

    Args:
        stored: The tensors to copy into.
        moment: FP32.
        bits: int32 of the same shape, random; None where no moment of the weight is rounded.
        take_high: Whether to round with their high bits, and not with the low ones.
    """
    if bits is None or stored[0].dtype == torch.float32:
        return (moment,)
    count = _CUT if len(stored) == 2 else 16
    random_bits = bits >> 32 - count if take_high else bits
    return coded(moment, stored[0].dtype, random_bits) if len(stored) == 2 else (stochastic(moment, random_bits),)


def fit(codes: Tensor, scales: Tensor) -> bool:
    """Whether scales may be those of codes: the largest element of a group has the last code, or the one before.

    Args:
        codes: int8 or uint8.
        scales: One for each group.

    **Cost**: a host sync.
    """
    (vector,) = flat(codes) or (codes.reshape(-1),)
    largest, last = in_groups(vector).to(torch.int32).abs().amax(-1), torch.iinfo(codes.dtype).max
    fp32_scales = scales.to(torch.float32)
    is_full = (largest == last) | (largest == last - 1) | (largest == 0)  # a program may have set all to zero
    # Groups of smaller moments have the scale 2^-126, too. Codes with a scale that is not finite may be any.
    is_full |= fp32_scales <= 2.0**-126
    return bool((is_full & (fp32_scales >= 0) | ~fp32_scales.isfinite()).all())


# Whole tensors -------------------------------------------------------------------------------------------------


def num_groups(count: int) -> int:
    """Return how many groups hold ``count`` elements; the last group may not be full."""
    return -(-count // GROUP)


def codes_of(name: str) -> torch.dtype:
    """Return the dtype of a moment's codes, by the name that its rule has for the moment."""
    return torch.uint8 if name in SQUARES else torch.int8


def name_of_codes(name: str) -> str:
    """Return the name of the codes of a moment, which other libraries do not read as the moment's."""
    return f"{name}_codes"


def scale_of(name: str) -> str:
    """Return the name of the scales of a moment."""
    return f"{name}_scale"


def zeros(name: str, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the stored tensors of a moment before the first step, by name.

    Args:
        name: The moment's, as its rule calls it.
        weight: The weight; its moment has the same layout in memory and over ranks.
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
    scale_of_code = torch.empty_like(codes, dtype=scales.dtype)
    (vector,) = flat(scale_of_code) or (scale_of_code.view(-1),)
    vector.copy_(scales.view(-1, 1).expand(-1, GROUP).reshape(-1)[: codes.numel()])
    return scale_of_code


def gathered(scale_of_code: Tensor, codes: Tensor) -> Tensor | None:
    """Return the scales (groups,) that :func:`spread` laid out; None where a group has several. A host sync."""
    vectors = flat(scale_of_code, codes)
    if vectors is None:
        return None
    scales, positions = in_groups(vectors[0]), torch.arange(GROUP, device=codes.device)
    last = torch.full((len(scales), 1), GROUP, device=codes.device)
    last[-1:] = codes.numel() - GROUP * (len(scales) - 1)
    is_same = (scales.view(torch.int16) == scales[:, :1].view(torch.int16)) | (positions >= last)
    return scales[:, 0].contiguous() if is_same.all() else None


def in_groups(vector: Tensor) -> Tensor:
    """Return a vector as groups (groups, 32): the same memory, or a copy with zeros at its end."""
    num_missing = -len(vector) % GROUP
    return (torch.nn.functional.pad(vector, (0, num_missing)) if num_missing else vector).view(-1, GROUP)


def elements(groups: Tensor, codes: Tensor) -> Tensor:
    """View groups (groups, 32) as a tensor with the layout of codes, whose vector :func:`in_groups` has cut."""
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
        PolicyError: ``moment`` is of another dtype, or ``dtype`` is none of these.

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
    decoded = torch.empty_like(codes, dtype=torch.float32).copy_(moment)
    (vector,) = flat(decoded) or (decoded.view(-1),)
    group_codes, scales = coded(in_groups(vector), dtype)
    return codes.copy_(elements(group_codes, codes)), scales.view(-1).to(torch.bfloat16)


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
