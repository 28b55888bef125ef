"""How many values of a tensor lie in each binade, in torch's operations.

What is counted fills one row of int64 numbers, which stays on the tensor's device:

    BINS counts of the values 2^k < |x| < 2^(k+1), for k from FIRST on,
    BINS counts of the values |x| = 2^k exactly,
    zeros, infinities, NaNs, and the bits of the largest finite |x| as float32.

Powers of two are counted apart because the limits of number formats are powers of two, or lie between values that
are: on which side of a limit the numbers that hit it fall is known only so.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from mezzo.tensors import flat

#: The exponent of the first bin, that of float32's smallest number; the last is 127.
FIRST: Final = -149
BINS: Final = 277
ZEROS, INFS, NANS, LARGEST = range(2 * BINS, 2 * BINS + 4)
#: Numbers in a row.
ROW: Final = LARGEST + 1

#: Dtypes whose every value is a float32.
COUNTABLE: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

#: Elements that are looked at a time: on the CPU they stay in its cache; on a GPU counts of int32 hold them.
_ON_CPU, _ON_GPU = 1 << 16, 1 << 24
_INFINITE: Final = 0x7F80_0000
#: Numbers of a magnitude's key: its exponent field twice, and one more where its mantissa is not zero.
_KEYS: Final = 512
#: Magnitudes of sixteen bits.
_SMALL: Final = 1 << 15


def count_into(row: Tensor, values: Tensor) -> None:
    """Add what a tensor holds to a row.

    Args:
        row: (ROW,) int64, on the tensor's device.
        values: Of a dtype in :data:`COUNTABLE`, strided.

    **Cost**: no host sync on a GPU. On a CPU three to nine times ``values.abs().max()`` in one thread.
    """
    vectors = flat(values.detach())
    vector = values.detach().reshape(-1) if vectors is None else vectors[0]
    is_on_cpu = vector.device.type == "cpu"
    if is_on_cpu and vector.itemsize == 2 and vector.numel() >= _SMALL:
        _count_small(row, vector)
        return
    for part in torch.split(vector, _ON_CPU if is_on_cpu else _ON_GPU):
        if part.numel():
            _count_wide(row, part.float())


def _count_small(row: Tensor, values: Tensor) -> None:
    """Count on a CPU how often each number of sixteen bits is there, and then the numbers."""
    counts = torch.bincount(values.view(torch.int16) & 0x7FFF, minlength=_SMALL)
    slots, bits = _small_slots(values.dtype)
    row.index_add_(0, slots, counts)
    torch.maximum(row[LARGEST], torch.where(counts > 0, bits, 0).max(), out=row[LARGEST])


@cache
def _small_slots(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return where each magnitude of sixteen bits is counted, and its bits as a float32; 0 where it is not finite."""
    bits = torch.arange(_SMALL, dtype=torch.int16).view(dtype).float().view(torch.int32)
    keys = _keys(bits)
    slots = torch.where(keys == 1, _key_slots("cpu", True)[_keys(_as_float(bits))], _key_slots("cpu", False)[keys])
    return slots, torch.where(bits < _INFINITE, bits, 0).long()


def _count_wide(row: Tensor, values: Tensor) -> None:
    """Count float32 values by their keys; those that are subnormal share one key, and are counted once more."""
    bits = values.view(torch.int32) & 0x7FFF_FFFF
    keys = _keys(bits)
    counts = _occurrences(keys)
    is_on_cpu = row.device.type == "cpu"
    if not is_on_cpu or counts[1]:  # a GPU is not asked
        small = _occurrences(_keys(_as_float(bits.masked_fill(keys != 1, 0))))
        small[:1].zero_()  # assigning a number to an element would copy it to a GPU, and wait
        counts[1:2].zero_()
        row.index_add_(0, _key_slots(str(row.device), True), small)
    row.index_add_(0, _key_slots(str(row.device), False), counts)
    if not is_on_cpu or counts[2 * 255 :].any():
        bits = bits.masked_fill(bits >= _INFINITE, 0)  # where() would copy its 0 to a GPU, and wait
    torch.maximum(row[LARGEST], bits.max(), out=row[LARGEST])


def _keys(bits: Tensor) -> Tensor:
    """Return the sum of a magnitude's bits / 2^23, rounded down, and the same rounded up."""
    up = torch.neg(bits).bitwise_right_shift_(23)
    return torch.sub(bits >> 23, up)


def _as_float(bits: Tensor) -> Tensor:
    """Return the bits of a subnormal's mantissa as a number, which is the subnormal times 2^149."""
    return bits.float().view(torch.int32)


def _occurrences(keys: Tensor) -> Tensor:
    """Return how often each key is there."""
    if keys.device.type == "cpu":
        return torch.bincount(keys, minlength=_KEYS)
    return torch.histc(keys, _KEYS, 0, _KEYS).long()  # there bincount asks the host how many there are


@cache
def _key_slots(device: str, is_subnormal: bool) -> Tensor:
    """Return where in a row each key is counted.

    Args:
        device: Of the row.
        is_subnormal: Whether keys are of subnormals times 2^149; else no subnormal is among them.
    """
    key = torch.arange(_KEYS, device=device)
    exponent = key // 2 - 127 + (FIRST if is_subnormal else 0)
    slots = (exponent - FIRST).clamp(0, BINS - 1) + (key % 2 == 0) * BINS
    if not is_subnormal:
        for place, slot in ((0, ZEROS), (2 * 255, INFS), (2 * 255 + 1, NANS)):
            slots[place : place + 1].fill_(slot)
    return slots
