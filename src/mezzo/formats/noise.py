"""Random bits as a hash of where and when, not a generator's.

Every executor gets the same ones, a captured step gets new ones each time, and a resumed run gets those it would have
had.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: 2^32 / golden ratio, as int32: multiples of it are far apart.
_GOLDEN: Final = 0x9E37_79B9 - (1 << 32)


def noise(index: Tensor, key: Tensor, slot: int = 0) -> Tensor:
    """Hash element numbers to 32 random bits each.

    Args:
        index: int32 element numbers.
        key: 0-d int32, such as :func:`mezzo.step.storage.keys` makes.
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


def drawn(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw a key of noise, 0-d int64 with 32 random bits.

    Args:
        device: Where the noise is made.
        generator: On that device; torch's own when omitted.
    """
    return torch.randint(-(1 << 31), 1 << 31, (), dtype=torch.int64, device=device, generator=generator)


def seeded(seed: int) -> int:
    """Return the number from which a seed's keys start."""
    return _wrapped(seed * _GOLDEN)


def _wrapped(number: int) -> int:
    """The int32 with the low 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
