"""Tensors that lie in shards on several ranks (``torch.distributed.tensor.DTensor``): how they lie, and making them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from mezzo.tensors import is_distributed, local

__all__ = ["locals_of", "number_of_shard", "placed", "sharded_as", "sharding"]

_PLAIN: Final = {Tensor, nn.Parameter}


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return :func:`mezzo.tensors.local` of each of many tensors: the same list where none is a DTensor."""
    if {*map(type, tensors)} <= _PLAIN:
        return tensors
    found = list(map(local, tensors))
    return tensors if all(map(is_, found, tensors)) else found


def sharded_as(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor that is sharded over ranks as another one is, from this rank's shard of it.

    Args:
        shard: Of any dtype, in the shape of ``local(whole)``.
        whole: Any tensor; where it is no DTensor the shard is all there is.

    **Cost**: a copy of the shard, where ``whole`` is a DTensor. No communication.
    """
    if not is_distributed(whole):
        return shard
    made = torch.empty_like(whole, dtype=shard.dtype, requires_grad=False)
    local(made).copy_(shard)
    return made


def placed(value: Any, whole: Any) -> Tensor:
    """Return a tensor that lies over the ranks as another one of its shape does.

    Args:
        value: A DTensor, or the whole tensor on every rank.
        whole: Any tensor.

    **Cost**: communication only where ``value`` is a DTensor that lies otherwise.
    """
    found: Tensor = value
    meets = is_distributed(value) and is_distributed(whole) and value.device_mesh == whole.device_mesh
    if meets and value.placements == whole.placements:
        return found
    if is_distributed(value) and value.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return placed(value.view(torch.float16), whole).view(torch.int16)
    if meets:
        found = value.redistribute(placements=whole.placements)
    elif is_distributed(value):
        found = value.full_tensor()
    if meets or not is_distributed(whole):
        return found
    from torch.distributed.tensor import distribute_tensor

    # Every rank has all of it: none sends its own to the others.
    mesh = whole.device_mesh
    return distribute_tensor(found.detach().to(mesh.device_type), mesh, whole.placements, src_data_rank=None)


def sharding(tensor: Any) -> Hashable:
    """Return what tells apart how tensors are cut into shards, the same on all ranks: ``None`` of a plain tensor."""
    return (tensor.device_mesh, tuple(_cut(tensor))) if is_distributed(tensor) else None


def number_of_shard(tensor: Any) -> int:
    """Return the number of this rank's shard: copies of one shard have the same; 0 of a plain tensor."""
    number = 0
    if is_distributed(tensor) and (coordinate := tensor.device_mesh.get_coordinate()) is not None:
        for dim in _cut(tensor):
            number = number * tensor.device_mesh.size(dim) + coordinate[dim]
    return number


def _cut(tensor: Any) -> Sequence[int]:
    """Return the dims of the mesh along which a DTensor is cut."""
    return [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
