"""Numbers on their way from one device to another."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["moved"]


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, without waiting unless it goes to the CPU.

    There the host would read memory that nothing has arrived in yet: ``non_blocking=True`` returns at once.

    References:
        https://github.com/pytorch/pytorch/issues/86264
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")
