"""What torch's ``fully_shard`` did to a model: which parameters are shards, and what they are gathered in.

The one place that reads torch's private state of it, which has no public way to ask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "Shard",
    "flags_of_all",
    "forget_gradients",
    "gathered",
    "has_unreduced",
    "parts_of",
    "refresh",
    "reshard",
    "shards",
    "units",
]


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
    """Let torch know that shards were given other memory, or another dtype.

    It looks at both by itself before its first forward pass. A gathered parameter stays the tensor that it is, so that
    the dtype in which it is gathered must stay.
    """
    reshard(units(model))  # a pass without a backward one leaves what torch would take for shards
    for _, group in _groups(units(model)):
        for each in group.fsdp_params:
            each.reset_sharded_param()
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


# What all ranks agree on --------------------------------------------------------------------------------


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


# torch's own, of 2.11 to 2.13 ---------------------------------------------------------------------------


def _groups_of(unit: Any) -> list[Any]:
    """Return the parameter groups of a sharded module: those whose parameters are gathered and reduced together."""
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
