"""``export``: a state dict in 16 bits of what the products of a trained model read, for an engine that generates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.compiling import INSIDE, inside
from mezzo.errors import NumericsError, PolicyError, nearest, some_of
from mezzo.policy.rules import both, exact
from mezzo.sharded import flags_of_all, held_as, is_distributed, local, reshard, units
from mezzo.step.storage import is_beyond
from mezzo.tensors import CASTABLE, LOW, dtype_name, dtype_of
from mezzo.weights.halves import Halves

#: The attribute of modules whose parameters, by their names in it, a policy's rules have in FP32.
_FP32: Final = "_mezzo_fp32"


@torch.no_grad()
def export(model: nn.Module, dtype: str | torch.dtype = "bfloat16") -> dict[str, Any]:
    """Return a state dict in 16 bits, for an engine that generates: what the products of a trained model read.

    Of a weight in halves of this dtype that is the high half, bit by bit; ``state_dict()`` cast to the dtype is not,
    where a value lies in the middle between two. Other parameters get the nearest values. What rules of the model's
    policy have in FP32 by module or parameter stays in FP32, and so do buffers and what is no FP32, FP16 or BF16.

    Args:
        model: The model: plain, under a policy, or a session's. Of a sharded one each rank calls it.
        dtype: ``"bfloat16"`` or ``"float16"``.

    Returns:
        Copies, whole on every rank, by the names of the model without wrappers. Tied weights are one tensor, in FP32 if
        a rule says so of any of their names.

    Raises:
        PolicyError: Another dtype.
        NumericsError: Values beyond FP16's range, by name.

    **Cost**: 2 bytes a weight; for FP16 one host sync a parameter.

    Example:
        >>> import mezzo, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> handle = mezzo.prepare(model, "O2,bf16,fp32_module=1")
        >>> {name: tensor.dtype for name, tensor in mezzo.weights.export(model).items() if "weight" in name}
        {'0.weight': torch.bfloat16, '1.weight': torch.float32}
    """
    low_dtype = dtype_of(dtype)
    if low_dtype not in LOW:
        raise PolicyError(
            f"weights are not exported in {dtype!r}",
            why=nearest(str(dtype), map(dtype_name, LOW)),
            write='mezzo.weights.export(model, "bfloat16"); in FP32 model.state_dict() is it',
        )
    reshard(units(model))
    model = unwrapped(model)
    in_fp32 = {
        id(module._parameters[name])
        for module in model.modules()
        for name in vars(module).get(_FP32, ())
        if name in module._parameters
    }
    state = {name.replace(f"{INSIDE}.", ""): value for name, value in model.state_dict(keep_vars=True).items()}
    wanted = {
        name: (torch.float32 if id(value) in in_fp32 else low_dtype) if value.dtype in CASTABLE else value.dtype
        for name, value in state.items()
        if isinstance(value, nn.Parameter)
    }
    if low_dtype == torch.float16:
        _refuse_beyond({name: state[name] for name, wanted_dtype in wanted.items() if wanted_dtype == low_dtype})
    copies: dict[int, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = _whole(value.detach(), wanted.get(name, value.dtype))
    return {name: copies.get(id(value), value) for name, value in state.items()}


def mark_fp32(names: Mapping[nn.Module, Collection[str]]) -> Callable[[], None]:
    """Mark parameters that a policy has in FP32 by its rules, which exports keep; return what undoes it."""
    undo = ExitStack()
    for module, own_names in names.items():
        vars(module)[_FP32] = frozenset(own_names)
        undo.callback(vars(module).pop, _FP32, None)
    return undo.close


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what torch.compile and DDP have wrapped; any other model as it is."""
    while hasattr(model, INSIDE) or isinstance(model, DistributedDataParallel):
        model = model.module if isinstance(model, DistributedDataParallel) else inside(model)
    return model


def _whole(tensor: Tensor, dtype: torch.dtype) -> Any:
    """Return a plain copy of a tensor in a dtype, gathered from all ranks."""
    values = local(tensor)
    if isinstance(values, Halves):
        # A cast is the high half, in the same memory until either is written.
        values = values.value().clone() if dtype == torch.float32 else values.to(dtype)
    else:
        values = values.to(dtype, copy=True)
    if not is_distributed(tensor):
        return values
    gathered: Any = held_as(values, tensor)
    return gathered.full_tensor()


def _refuse_beyond(params: Mapping[str, Any]) -> None:
    if not params:
        return
    tensors = [*params.values()]
    flags = torch.tensor([is_beyond(local(param.detach()), torch.float16) for param in tensors])
    # Of a sharded parameter each rank has looked at its shard.
    are_beyond = flags_of_all(flags.to(tensors[0].device), tensors).tolist()
    if names := [name for name, is_so in zip(params, are_beyond, strict=True) if is_so]:
        raise NumericsError(
            "weights are beyond the range of FP16",
            where=some_of(names),
            why="they would become infinite",
            write=f'mezzo.weights.export(model, "bfloat16"); or {both(f"fp32_param={exact(names[0])}")}',
        )
