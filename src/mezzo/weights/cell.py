"""The state that a tensor in halves shares with its views and with optimizers, and the error for its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.policy.rules import both, exact
from mezzo.releases import private

_COUNT: Final = private("torch._C._storage_Use_Count")
#: The references to the memory of a tensor that has no view: the tensor's own, and the storage object's that counts.
_ALONE: Final = 2


class Cell:
    """The state that a tensor in halves shares with its views.

    Attributes:
        decoded: The values in FP32 memory, which holds them for now while both halves are stale; usually ``None``.
            Element ``start + n`` of the high half's storage is element ``decoded.storage_offset() + n`` of this one's.
        start: The offset, in the high half's storage, of the tensor whose views share this cell.
        is_lent: Whether ``decoded`` was made for a reader of addresses or of a state dict: the next cast or step
            stores it in halves.
        uses: How often a cast returned the high half while gradients were recorded, and how often another operation
            read the values, since the session last reset both.
    """

    __slots__ = ("decoded", "is_lent", "start", "uses")

    def __init__(self, start: int | torch.SymInt, decoded: Tensor | None = None) -> None:
        self.start, self.decoded, self.is_lent, self.uses = start, decoded, False, [0, 0]

    def is_left(self) -> bool:
        """Whether no other tensor uses the decoded values' memory: a tensor assigned to ``param.data``, or a view."""
        return self.decoded is not None and lies_alone(self.decoded)


class _Step(threading.local):
    """The function that carries out kernels over lists of parameters, while an optimizer steps in this thread."""

    parts: Callable[[Any, Any, Any], bool] | None = None


STEP: Final = _Step()


def lies_alone(tensor: Tensor) -> bool:
    """Whether no other tensor lies in a tensor's memory."""
    storage = tensor.untyped_storage()  # which counts itself
    return int(_COUNT(storage._cdata)) <= _ALONE


def no_memory(name: str, asker: str) -> UnsupportedError:
    """Build the error for a reader of FP32 memory that a tensor in halves does not have.

    Args:
        name: The parameter's.
        asker: What reads the memory.
    """
    subject = f"the parameter {name}" if name else "a parameter"
    return UnsupportedError(
        f"{subject} has no FP32 memory that a kernel could read",
        where=asker,
        why="it is stored in two halves of 16 bits",
        write=f"{both('fp32_param=' + exact(name or '…'))}: stores it plainly; or its clone()",
    )
