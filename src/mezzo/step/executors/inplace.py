"""Storages spelled for speed in eager mode: in place on cache-sized blocks, no temporaries, no masks of bools.

Each pair agrees bit for bit with its storage's ``read`` and ``write`` (``test_contract.py``). What is slow in
eager mode is left out: ``where`` and comparisons take four times as long as an addition, an operation into a third
tensor twice as long as one in place; 16-bit operations take half as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from mezzo.step.rounding import one_nan
from mezzo.step.storage import Parts

__all__ = ["INPLACE", "Inplace", "Scratch"]

_FP16_SMALLEST_NORMAL: Final = 0x0400
_FP16_INFINITY: Final = 0x7C00
#: In FP32 spacings, which remainders count where a weight is normal.
_FP16_HALF_SPACING: Final = 0x1000
#: FP32's spacing is 1 here: adding it rounds to the nearest integer, which then stands in the low bits.
_UNIT_SPACING: Final = torch.tensor(1.5 * 2**23)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Reusable vectors: two of FP32 and three of int16, 14 bytes an element."""

    wide: Tensor
    other: Tensor
    small: Tensor
    mask: Tensor
    fixed: Tensor

    @classmethod
    def allocate(cls, size: int) -> Scratch:
        """Make vectors of ``size`` elements."""
        wide, short = torch.empty(2, size), torch.empty(3, size, dtype=torch.int16)
        return cls(*wide.unbind(), *short.unbind())

    def of(self, size: int) -> Scratch:
        """Return the first ``size`` elements of each."""
        if size == len(self.wide):
            return self
        return Scratch(*(getattr(self, name)[:size] for name in self.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inplace:
    """A storage in place: ``load`` gives FP32 values to update in place, ``store`` puts them back."""

    load: Callable[[Parts, Scratch], Tensor]
    store: Callable[[Tensor, Parts, Scratch], None]


def _load_split(parts: Parts, scratch: Scratch) -> Tensor:
    weight, remainder = parts
    return _joined(weight, remainder, scratch)


def _load_planes(parts: Parts, scratch: Scratch) -> Tensor:
    weight, low, high = parts
    remainder, byte = scratch.small, scratch.mask
    remainder.copy_(high).bitwise_left_shift_(8).bitwise_or_(byte.copy_(low))
    return _joined(weight, remainder, scratch)


def _joined(weight: Tensor, remainder: Tensor, scratch: Scratch) -> Tensor:
    wide, other = scratch.wide.copy_(weight), scratch.other
    if weight.dtype == torch.bfloat16:
        negative = torch.clamp(remainder, max=0, out=scratch.fixed)
        foreign = negative.bitwise_and_(_magnitude(weight, scratch).clamp_(max=1).sub_(1))  # beside a weight of zero
        own = torch.sub(remainder, foreign, out=scratch.small)
        wide.view(torch.int32).add_(other.view(torch.int32).copy_(own))
        return wide
    fixed = _subnormal(_magnitude(weight, scratch)).bitwise_and_(remainder)
    direct = torch.sub(remainder, fixed, out=scratch.small).clamp_(-_FP16_HALF_SPACING, _FP16_HALF_SPACING)
    wide.view(torch.int32).add_(other.view(torch.int32).copy_(direct))
    # Negated, so that −0.0 stays: −0.0 + 0.0 is 0.0.
    return wide.add_(other.copy_(fixed.neg_()), alpha=-(2.0**-39))


def _store_split(wide: Tensor, parts: Parts, scratch: Scratch) -> None:
    weight, remainder = parts
    _halve(wide, weight, remainder, scratch)


def _store_planes(wide: Tensor, parts: Parts, scratch: Scratch) -> None:
    weight, low, high = parts
    remainder = scratch.small
    _halve(wide, weight, remainder, scratch)
    low.copy_(torch.bitwise_and(remainder, 0xFF, out=scratch.mask))
    high.copy_(remainder.bitwise_right_shift_(8))


def _halve(wide: Tensor, weight: Tensor, remainder: Tensor, scratch: Scratch) -> None:
    """Split ``wide``, which is lost. ``remainder`` may be ``scratch.small``."""
    bits = wide.view(torch.int32)
    if weight.dtype == torch.bfloat16:
        _mend_nan(wide)
        remainder.copy_(bits)  # the low 16 bits, which is bits − rounded
        weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
        return
    weight.copy_(wide)
    high = scratch.other.copy_(weight)
    direct = remainder.copy_(bits).sub_(scratch.fixed.copy_(high.view(torch.int32)))  # modulo 2^16
    torch.add(_UNIT_SPACING, wide.sub_(high), alpha=2.0**39, out=wide)
    fixed = scratch.fixed.copy_(bits)
    magnitude = _magnitude(weight, scratch)
    finite = magnitude.max().item() < _FP16_INFINITY
    direct.bitwise_xor_(fixed.bitwise_xor_(direct).bitwise_and_(_subnormal(magnitude)))
    if not finite:
        remainder.masked_fill_(~weight.isfinite(), 0)


def _magnitude(weight: Tensor, scratch: Scratch) -> Tensor:
    """FP16 patterns without their sign, which are in the order of |w|."""
    return torch.bitwise_and(weight.view(torch.int16), 0x7FFF, out=scratch.mask)


def _subnormal(magnitude: Tensor) -> Tensor:
    """−1 where a weight is zero or subnormal, 0 elsewhere, in place."""
    return magnitude.clamp_(_FP16_SMALLEST_NORMAL - 1, _FP16_SMALLEST_NORMAL).sub_(_FP16_SMALLEST_NORMAL)


def _mend_nan(wide: Tensor) -> None:
    if not math.isfinite(wide.sum().item()):  # a NaN, perhaps
        wide.copy_(one_nan(wide))


def _store_full(wide: Tensor, parts: Parts, scratch: Scratch) -> None:
    weight, _ = parts
    if weight.dtype == torch.bfloat16:
        _mend_nan(wide)
        rounded = torch.add(wide.view(torch.int32), 0x8000, out=scratch.other.view(torch.int32))
        weight.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))
    else:
        weight.copy_(wide)


def _load_plain(parts: Parts, scratch: Scratch) -> Tensor:
    (weight,) = parts
    return weight if weight.dtype == torch.float32 else scratch.wide.copy_(weight)


def _store_plain(wide: Tensor, parts: Parts, scratch: Scratch) -> None:
    if wide is not parts[0]:
        parts[0].copy_(wide)


#: By the storage's name; the others keep no FP32 value that torch's kernels could work on.
INPLACE: Final[Mapping[str, Inplace]] = MappingProxyType(
    {
        "split": Inplace(load=_load_split, store=_store_split),
        "planes": Inplace(load=_load_planes, store=_store_planes),
        "full": Inplace(load=lambda parts, scratch: parts[1], store=_store_full),
        "plain": Inplace(load=_load_plain, store=_store_plain),
    }
)
