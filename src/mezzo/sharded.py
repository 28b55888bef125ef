"""Tensors and models that lie in shards on several ranks: DTensors, and what ``fully_shard`` did to a model.

The one file that takes private names of FSDP2's and of DTensor's, which have no public way to ask for these facts.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.releases import PRIVATE, require

_OF_DTENSOR: Final = tuple(name for name in PRIVATE["sharded.py"] if ".DTensor." in name)
_OF_FSDP: Final = tuple(name for name in PRIVATE["sharded.py"] if ".fsdp." in name)

# Tensors ------------------------------------------------------------------------------------------------


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank holds a shard."""
    # A program that has none need not import them, which takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a ``DTensor``, in the same memory, without communication; any other as it is."""
    if not is_distributed(tensor):
        return tensor
    require(*_OF_DTENSOR)
    held: Any = tensor
    shard: Tensor = held._local_tensor
    return shard if type(shard) is Tensor else _arrived(shard)


def _arrived(shard: Any) -> Tensor:
    """Wait for a shard that a collective is still writing."""
    found: Tensor = shard.trigger_wait() if hasattr(shard, "trigger_wait") else shard
    return found


_PLAIN: Final = {Tensor, nn.Parameter}


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return :func:`local` of each of many tensors: the same list where none is a DTensor."""
    kinds, module = {*map(type, tensors)}, sys.modules.get("torch.distributed.tensor")
    if kinds <= _PLAIN or module is None or not any(issubclass(kind, module.DTensor) for kind in kinds):
        return tensors
    return list(map(local, tensors))


def sharded_as(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor that is sharded over ranks as another one is, from this rank's shard of it.

    Args:
        shard: Of any dtype, in the shape of ``local(whole)``.
        whole: Any tensor; where it is no DTensor the shard is all there is.

    **Cost**: a copy of the shard, where ``whole`` is a DTensor. No communication.
    """
    return held_as(shard.clone(), whole) if is_distributed(whole) else shard


def held_as(shard: Tensor, whole: Tensor) -> Tensor:
    """Return :func:`sharded_as`, in the memory of the shard that is given."""
    if not is_distributed(whole):
        return shard
    made = torch.empty_like(whole, dtype=shard.dtype, requires_grad=False)
    hold_locally(made, shard)
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


def hold_locally(tensor: Any, shard: Tensor) -> None:
    """Have a DTensor hold another tensor as this rank's shard, of the same shape and dtype."""
    require(*_OF_DTENSOR)
    tensor._local_tensor = shard


def give(tensor: Any, data: Any) -> None:
    """Give a tensor data of another dtype, and gradients of that dtype if they had the tensor's until now."""
    follows = isinstance(tensor, nn.Parameter) and tensor.grad_dtype == tensor.dtype
    tensor.data = data
    if is_distributed(tensor):  # torch gives it the other's dtype, but not what it holds
        require(*_OF_DTENSOR)
        tensor._local_tensor, tensor._spec = data._local_tensor, data._spec
    if follows and tensor.grad_dtype != data.dtype:  # torch keeps one that was ever set, whatever the tensor becomes
        tensor.grad_dtype = data.dtype


def give_back(tensor: Any, data: Any) -> None:
    """Give a tensor data in the dtype that it had, and its gradient with it; one that has it is left alone."""
    if tensor.dtype != data.dtype:
        gradient, tensor.grad = tensor.grad, None
        give(tensor, data)
        tensor.grad = None if gradient is None else gradient.to(data.dtype)


def flags_of_all(flags: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Return 0-1 flags that are set where they are on any rank of the meshes that shard some parameters.

    Args:
        flags: On the parameters' device; every rank has as many.
        params: DTensors, or others, which are on no mesh.
    """
    found = flags.to(torch.int32)
    meshes: list[Any] = [mesh for param in params if (mesh := getattr(param, "device_mesh", None)) is not None]
    groups = {id(group): group for mesh in meshes for dim in range(mesh.ndim) for group in [mesh.get_group(dim)]}
    for group in groups.values():
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.bool()


# Models -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A parameter of which each rank holds a part.

    Attributes:
        param: The part, which optimizers update: a DTensor.
        cast: The dtype that it is cast to while it is gathered; its own where there is none.
        unit: The module that was given to ``fully_shard``, whose parameters are gathered together.
    """

    param: nn.Parameter
    cast: torch.dtype | None
    unit: nn.Module

    @property
    def gathered(self) -> torch.dtype:
        """The dtype of the whole parameter, in which forward passes read it."""
        return self.param.dtype if self.cast is None else self.cast


def units(model: nn.Module) -> list[Any]:
    """Return the modules of a model that were given to ``fully_shard``, the model itself first if it was."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before it is imported
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def shards(model: nn.Module) -> list[Shard]:
    """Return the parameters of a model that ``fully_shard`` has sharded."""
    found = []
    for unit, group in _groups(units(model)):
        low = group.mp_policy.param_dtype
        for each in group.fsdp_params:
            param = each.sharded_param
            found.append(Shard(param, low if param.is_floating_point() else None, unit))
    return found


def reshard(units: Iterable[Any]) -> None:
    """Let go of what is gathered: a forward pass leaves the parameters of the root so, for a backward pass to come."""
    for unit in units:
        unit.reshard()


def refresh(model: nn.Module) -> None:
    """Let torch know that shards were given other memory, or another dtype; what was gathered of them is forgotten.

    It looks at both by itself before its first forward pass.
    """
    reshard(units(model))  # a pass without a backward one leaves what torch would take for shards
    for _, group in _groups(units(model)):
        for each in group.fsdp_params:
            each._sharded_param_data = None  # which it would ask for its address
            each.reset_sharded_param()
            each._init_extensions()
            each.all_gather_outputs = []
            vars(each).pop("_unsharded_param", None)
        if group._reset_sharded_params:  # torch has looked at the dtypes already
            group._init_mp_dtypes()


def gathered(model: nn.Module) -> dict[Tensor, Tensor]:
    """Return the tensors that stand in a model while its parameters are gathered, by their part.

    **Cost**: one gathering of each group that none was needed of yet; every rank takes part.
    """
    for unit in units(model):
        if any(not hasattr(each, "_unsharded_param") for group in _groups_of(unit) for each in group.fsdp_params):
            unit.unshard()
            unit.reshard()
    every = (each for _, group in _groups(units(model)) for each in group.fsdp_params)
    return {each.sharded_param: each._unsharded_param for each in every}


def parts_of(units: Iterable[Any]) -> dict[Tensor, Tensor]:
    """Return the part of each parameter, by the tensor that stands in its model while it is gathered."""
    every = (each for _, group in _groups(units) for each in group.fsdp_params)
    return {each._unsharded_param: each.sharded_param for each in every if hasattr(each, "_unsharded_param")}


# Gradients that wait to be reduced ----------------------------------------------------------------------


def _waiting(units: Iterable[Any]) -> Iterator[Any]:
    """Yield what holds gradients of whole parameters, after ``set_requires_gradient_sync(False)``."""
    for _, group in _groups(units):
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                yield each


def has_unreduced(units: Sequence[Any]) -> bool:
    """Whether gradients of earlier backward passes wait for one that reduces them."""
    partial = any(group._partial_reduce_output is not None for _, group in _groups(units))
    return partial or next(_waiting(units), None) is not None


def forget_gradients(units: Sequence[Any]) -> None:
    """Clear gradients that wait for a backward pass that reduces them, which ``zero_grad`` does not reach."""
    for each in _waiting(units):
        each.unsharded_accumulated_grad = each._unsharded_param.grad = None
    for _, group in _groups(units):
        group._partial_reduce_output = None


# torch 2.11 to 2.14: the groups of parameters that are gathered and reduced together ----------------------


def _groups_of(unit: Any) -> list[Any]:
    """Return the parameter groups of a sharded module: those whose parameters are gathered and reduced together."""
    require(*_OF_FSDP)
    state = unit._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def _groups(units: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter group once, with the first of the modules that it was made for."""
    seen: set[int] = set()
    for unit in units:
        for group in _groups_of(unit):
            if id(group) not in seen:
                seen.add(id(group))
                yield unit, group
