"""Small tensors one behind the other in memory, so that a kernel can take many of them as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from mezzo.tensors import flat

__all__ = ["SHORT", "packed", "run", "stands_alone"]

#: Tensors up to this length are worth packing: gathering and scattering what does not lie together (a weight, its
#: gradient) costs less than a kernel's call for each of them.
SHORT: Final = 1 << 17


def packed(tensors: Sequence[Tensor], *, planes: bool = False) -> list[Tensor]:
    """Copy tensors of one dtype and device into one run of memory, in order.

    Args:
        tensors: Without gaps or overlaps.
        planes: Whether the first dimension counts planes; then each plane is a run of its own.

    Returns:
        Copies of the same shapes and strides, but for the stride between planes.

    Example:
        >>> import torch
        >>> one, other = packed([torch.zeros(2, 3), torch.ones(4)])
        >>> other.data_ptr() - one.data_ptr()
        24
    """
    rows = tensors[0].shape[0] if planes else 1
    lengths = [tensor.numel() // rows for tensor in tensors]
    memory = torch.empty(rows, sum(lengths), dtype=tensors[0].dtype, device=tensors[0].device)
    copies, offset = [], 0
    for tensor, length in zip(tensors, lengths, strict=True):
        strides = (memory.stride(0), *tensor.stride()[1:]) if planes else tensor.stride()
        copies.append(memory.as_strided(tensor.shape, strides, offset).copy_(tensor))
        offset += length
    return copies


def run(vectors: Sequence[Tensor]) -> Tensor | None:
    """View vectors that lie one behind the other as one vector; None where they do not."""
    end, storage = vectors[0].data_ptr(), vectors[0].untyped_storage().data_ptr()
    for vector in vectors:
        if vector.data_ptr() != end or vector.untyped_storage().data_ptr() != storage:
            return None
        end += vector.nbytes
    return vectors[0].as_strided((sum(map(len, vectors)),), (1,), vectors[0].storage_offset())


def stands_alone(tensor: Tensor, *, planes: bool = False) -> bool:
    """Whether a tensor fills memory of its own, without gaps, so that it may be packed with others."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and flat(tensor[0] if planes else tensor) is not None
