"""Weights that the user's code has written: a clamp, a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mezzo.step.storage import FULL
from mezzo.tensors import marks

__all__ = ["Edits", "take_over"]


class Edits:
    """Tell which tensors were written in place, or given other memory, since they were last seen.

    What goes through ``.data`` leaves no trace, and is not seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[int, int], Tensor]] = {}  # by id: hashing a tensor is a Python call

    def see(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors as they are now."""
        self._seen.update(zip(map(id, tensors), zip(marks(tensors), tensors, strict=True), strict=True))

    def since(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those that have changed; one never seen before has not."""
        known = [tensor for tensor in tensors if id(tensor) in self._seen]
        pairs = zip(known, marks(known), strict=True)
        return [tensor for tensor, now in pairs if self._seen[id(tensor)][0] != now]


@torch.no_grad()
def take_over(weight: Tensor, master: Tensor) -> None:
    """Let an FP32 master follow its weight, element by element, wherever it does not round to it any more."""
    rounded = FULL.write(master, weight.dtype, lambda: master)[0].to(weight.dtype)
    master.copy_(torch.where(rounded == weight, master, weight.to(torch.float32)))
