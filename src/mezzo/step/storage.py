"""How a weight lies in memory: the tensor that the model computes with, and what may lie beside it.

A storage takes the stored tensors of a weight, its *parts*, to one FP32 value and back, element by element. Rules see
FP32 only; executors know no particular storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from mezzo.step import split
from mezzo.step.rounding import nearest

__all__ = ["PLAIN", "READ", "SPLIT", "Parts", "Storage"]

Parts: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One way to store weights.

    Args:
        name: What messages and compiled kernels call it.
        extra: Whether a second tensor lies beside each weight.
        read: ``(parts) -> w``: the FP32 value of stored elements. Pure and element-wise.
        write: ``(w, dtype) -> values``: what to copy into each part, as FP32 or int32. Pure and element-wise. None
            where an update reads weights and leaves them as they are.
    """

    name: str
    extra: bool
    read: Callable[[Parts], Tensor] = field(repr=False)
    write: Callable[[Tensor, torch.dtype], Parts] | None = field(repr=False)

    def parts(self, weight: Tensor, extra: Tensor | None) -> Parts:
        """Return the stored tensors of a weight, the model's first."""
        return (weight,) if extra is None else (weight, extra)


def _read_split(parts: Parts) -> Tensor:
    weight, remainder = parts
    return split.joined(weight.to(torch.float32), remainder.to(torch.int32), weight.dtype)


def _write_plain(w: Tensor, dtype: torch.dtype) -> Parts:
    return (w if dtype == torch.float32 else nearest(w, dtype),)


#: The high half of the FP32 value, and 16 remainder bits as int16 (:mod:`mezzo.step.split`): 4 bytes a weight.
SPLIT: Final = Storage(name="split", extra=True, read=_read_split, write=split.halves)
#: The same, for updates that read the weight and write other tensors alone.
READ: Final = Storage(name="read", extra=True, read=_read_split, write=None)
#: The weight is all there is: FP32, or low precision rounded to nearest after every update.
PLAIN: Final = Storage(name="plain", extra=False, read=lambda parts: parts[0].to(torch.float32), write=_write_plain)
