"""Weights that the user's code has written: a clamp, a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mezzo.step.storage import FULL
from mezzo.tensors import mark

__all__ = ["Edits", "take_over"]


class Edits:
    """Tell which tensors were written in place, or given other memory, since they were last seen.

    What goes through ``.data`` leaves no trace, and is not seen.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int]] = {}

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors as they are now."""
        for tensor in tensors:
            self._seen[tensor] = mark(tensor)

    def since(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those that have changed; one never seen before has not."""
        return [t for t in tensors if t in self._seen and self._seen[t] != mark(t)]


@torch.no_grad()
def take_over(weight: Tensor, master: Tensor) -> None:
    """Let an FP32 master follow its weight, element by element, wherever it does not round to it any more."""
    rounded = FULL.write(master, weight.dtype, lambda: master)[0].to(weight.dtype)
    master.copy_(torch.where(rounded == weight, master, weight.to(torch.float32)))
