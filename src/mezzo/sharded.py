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
    """Return this rank's shard of a ``DTensor``, in the same memory, without communication; a plain tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    require(*_OF_DTENSOR)
    dtensor: Any = tensor
    shard: Tensor = dtensor._local_tensor
    return shard if type(shard) is Tensor else _arrived(shard)


def _arrived(shard: Any) -> Tensor:
    """Wait for a shard that a collective is still writing."""
    tensor: Tensor = shard.trigger_wait() if hasattr(shard, "trigger_wait") else shard
    return tensor


_PLAIN: Final = {Tensor, nn.Parameter}


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return :func:`local` of each of many tensors: the same list where none is a DTensor."""
    classes, module = {*map(type, tensors)}, sys.modules.get("torch.distributed.tensor")
    if classes <= _PLAIN or module is None or not any(issubclass(cls, module.DTensor) for cls in classes):
        return tensors
    return list(map(local, tensors))


def sharded_as(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor that is sharded over ranks as another one is, from this rank's shard of it.

    Args:
        shard: Of any dtype, in the shape of ``local(whole)``.
        whole: Any tensor; if it is no DTensor the shard is returned.

    **Cost**: a copy of the shard, where ``whole`` is a DTensor. No communication.
    """
    return held_as(shard.clone(), whole) if is_distributed(whole) else shard


def held_as(shard: Tensor, whole: Tensor) -> Tensor:
    """Return :func:`sharded_as`, in the memory of the shard itself."""
    if not is_distributed(whole):
        return shard
    dtensor = torch.empty_like(whole, dtype=shard.dtype, requires_grad=False)
    hold_locally(dtensor, shard)
    return dtensor


def placed(value: Any, whole: Any) -> Tensor:
    """Return a tensor with the placements of another one of its shape.

    Args:
        value: A DTensor, or the whole tensor on every rank.
        whole: Any tensor.

    **Cost**: communication only where ``value`` is a DTensor that lies otherwise.
    """
    result: Tensor = value
    meets = is_distributed(value) and is_distributed(whole) and value.device_mesh == whole.device_mesh
    if meets and value.placements == whole.placements:
        return result
    if is_distributed(value) and value.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return placed(value.view(torch.float16), whole).view(torch.int16)
    if meets:
        result = value.redistribute(placements=whole.placements)
    elif is_distributed(value):
        result = value.full_tensor()
    if meets or not is_distributed(whole):
        return result
    from torch.distributed.tensor import distribute_tensor

    # Every rank has all of it: none sends its own to the others.
    mesh = whole.device_mesh
    return distribute_tensor(result.detach().to(mesh.device_type), mesh, whole.placements, src_data_rank=None)


def whole_of(shard: Tensor, param: Any) -> Tensor:
    """Return a whole tensor from this rank's shard of it, which lies over the ranks as a parameter does.

    Args:
        shard: Of any dtype, in the shape of ``local(param)``.
        param: Any tensor; if it is no DTensor the shard is returned.

    **Cost**: one gathering, a collective, where ``param`` is a DTensor; then all ranks call it.
    """
    if not is_distributed(param):
        return shard
    whole: Any = held_as(shard.contiguous(), param)
    gathered_whole: Tensor = whole.full_tensor()
    return gathered_whole


def part_of(whole: Tensor, param: Any) -> Tensor:
    """Return this rank's shard of a tensor that every rank has the whole of; without communication."""
    return local(placed(whole, param))


def sharding(tensor: Any) -> Hashable:
    """Return a key of how a tensor is cut into shards, the same on all ranks; ``None`` for a plain tensor."""
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
    """Replace this rank's shard of a DTensor by another tensor of its shape and dtype."""
    require(*_OF_DTENSOR)
    tensor._local_tensor = shard


def set_data(tensor: Any, data: Any) -> None:
    """Set a tensor's data, of another dtype; gradients get that dtype, too, if they had the tensor's until now."""
    follows = isinstance(tensor, nn.Parameter) and tensor.grad_dtype == tensor.dtype
    tensor.data = data
    if is_distributed(tensor):  # torch gives it the other's dtype, but not what it holds
        require(*_OF_DTENSOR)
        tensor._local_tensor, tensor._spec = data._local_tensor, data._spec
    if follows and tensor.grad_dtype != data.dtype:  # torch keeps one that was ever set, whatever the tensor becomes
        tensor.grad_dtype = data.dtype


def restore_data(tensor: Any, data: Any) -> None:
    """Set a tensor's data, and cast its gradient to their dtype; a tensor of that dtype is left as it is."""
    if tensor.dtype != data.dtype:
        gradient, tensor.grad = tensor.grad, None
        set_data(tensor, data)
        tensor.grad = None if gradient is None else gradient.to(data.dtype)


def flags_of_all(flags: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Return 0-1 flags that are set where they are on any rank of the meshes that shard some parameters.

    Args:
        flags: On the parameters' device; every rank has as many.
        params: DTensors, or others, which are on no mesh.
    """
    set_anywhere = flags.to(torch.int32)
    meshes: list[Any] = [mesh for param in params if (mesh := getattr(param, "device_mesh", None)) is not None]
    groups = {id(group): group for mesh in meshes for dim in range(mesh.ndim) for group in [mesh.get_group(dim)]}
    for group in groups.values():
        dist.all_reduce(set_anywhere, dist.ReduceOp.MAX, group)
    return set_anywhere.bool()


# Models -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A parameter of which each rank holds a part.

    Attributes:
        param: The shard, which optimizers update: a DTensor.
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
    cls = getattr(fsdp, "FSDPModule", None)
    return [] if cls is None else [module for module in model.modules() if isinstance(module, cls)]


def shards(model: nn.Module) -> list[Shard]:
    """Return the parameters of a model that ``fully_shard`` has sharded."""
    params = []
    for unit, group in _groups(units(model)):
        gathered_dtype = group.mp_policy.param_dtype
        for fsdp_param in group.fsdp_params:
            param = fsdp_param.sharded_param
            params.append(Shard(param, gathered_dtype if param.is_floating_point() else None, unit))
    return params


def cut_by_others(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that stay DTensors while their modules run: tensor parallelism has cut or copied them.

    What ``fully_shard`` alone has cut is whole while its module runs.
    """
    distributed = {param for param in model.parameters() if is_distributed(param)}
    params = (param for _, group in _groups(units(model)) for param in group.fsdp_params) if distributed else ()
    return distributed - {param.sharded_param for param in params if not param.is_dtensor}


def reshard(units: Iterable[Any]) -> None:
    """Free gathered parameters: a forward pass leaves those of the root gathered, for its backward pass."""
    for unit in units:
        unit.reshard()


def refresh(model: nn.Module) -> None:
    """Reset FSDP's state after shards got other memory, or another dtype; gathered parameters are discarded.

    Before its first forward pass FSDP reads both by itself.
    """
    reshard(units(model))  # a pass without a backward one leaves what torch would take for shards
    for _, group in _groups(units(model)):
        for fsdp_param in group.fsdp_params:
            fsdp_param._sharded_param_data = None  # FSDP would read its address
            fsdp_param.reset_sharded_param()
            fsdp_param._init_extensions()
            fsdp_param.all_gather_outputs = []
            vars(fsdp_param).pop("_unsharded_param", None)
        if group._reset_sharded_params:  # torch has looked at the dtypes already
            group._init_mp_dtypes()


def gathered(model: nn.Module) -> dict[Tensor, Tensor]:
    """Return the tensors that a model has while its parameters are gathered, by their shard.

    **Cost**: one gathering of each group that was never gathered; a collective, which all ranks call.
    """
    for unit in units(model):
        if any(not hasattr(param, "_unsharded_param") for group in _groups_of(unit) for param in group.fsdp_params):
            unit.unshard()
            unit.reshard()
    params = (param for _, group in _groups(units(model)) for param in group.fsdp_params)
    return {param.sharded_param: param._unsharded_param for param in params}


def parts_of(units: Iterable[Any]) -> dict[Tensor, Tensor]:
    """Return the shard of each parameter, by the tensor that the model has while it is gathered."""
    params = (param for _, group in _groups(units) for param in group.fsdp_params)
    return {param._unsharded_param: param.sharded_param for param in params if hasattr(param, "_unsharded_param")}


# Gradients that wait to be reduced ----------------------------------------------------------------------


def _waiting(units: Iterable[Any]) -> Iterator[Any]:
    """Yield FSDP's parameters that hold unreduced gradients, after ``set_requires_gradient_sync(False)``."""
    for _, group in _groups(units):
        for fsdp_param in group.fsdp_params:
            whole = getattr(fsdp_param, "_unsharded_param", None)
            if fsdp_param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                yield fsdp_param


def has_unreduced(units: Sequence[Any]) -> bool:
    """Whether gradients of earlier backward passes wait for one that reduces them."""
    partial = any(group._partial_reduce_output is not None for _, group in _groups(units))
    return partial or next(_waiting(units), None) is not None


def forget_gradients(units: Sequence[Any]) -> None:
    """Clear gradients that wait for a backward pass that reduces them, which ``zero_grad`` does not reach."""
    for fsdp_param in _waiting(units):
        fsdp_param.unsharded_accumulated_grad = fsdp_param._unsharded_param.grad = None
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
