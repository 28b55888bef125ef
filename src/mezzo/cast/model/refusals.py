"""What stands against converting a model, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo.cast import accumulators
from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, some_of
from mezzo.policy import Policy
from mezzo.tensors import dtype_name

__all__ = ["cannot_convert", "require_module"]

_CONVERTS_NOTHING: Final = "O1 without rules for parameters, which converts nothing"


def require_module(model: Any) -> None:
    """Refuse to prepare what is no model."""
    if not isinstance(model, nn.Module):
        raise PolicyError(
            f"a model must be an nn.Module, not {type(model).__name__}",
            write='mezzo.prepare(model, "O1"): the model first, then the policy; one call for each model',
        )


def cannot_convert(model: nn.Module, policy: Policy, converting: Mapping[Tensor, torch.dtype]) -> Iterator[MezzoError]:
    """Yield all that stands against giving tensors other dtypes.

    Args:
        model: The model that they are of.
        policy: The policy that says so.
        converting: At least one parameter or buffer, each with its new dtype.

    **Cost**: a pass over the tensors, and one host sync.
    """
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    # A weight that trains would have no FP32 value to begin with; the other format may hold a frozen one exactly.
    params: dict[Tensor, torch.dtype] = {t: d for t, d in converting.items() if isinstance(t, nn.Parameter)}
    moving = {t for t, d in params.items() if torch.float32 not in (t.dtype, d)}
    lost, inexact = _flags(converting, moving)
    if low := [t for t in converting if t in moving and (t.requires_grad or t in inexact)]:
        targets = ", ".join(sorted({dtype_name(converting[t]) for t in low}))
        yield UnsupportedError(
            f"parameters are already in a low precision that {policy.level} would change",
            where=some_of([f"{names[t]} ({dtype_name(t.dtype)})" for t in low]),
            why=f"one 16-bit format does not hold what another does; the policy says {targets}",
            write="model.float() first, or a policy with the parameters' own dtype",
        )
    if overflowing := [t for t in converting if t in lost]:
        dtype = converting[overflowing[0]]
        yield UnsupportedError(
            f"values do not fit {dtype_name(dtype)}",
            where=some_of([names[t] for t in overflowing]),
            why=f"they are beyond {torch.finfo(dtype).max:g} and would become infinite",
            write=f"policy.keep_fp32(params=[{names[overflowing[0]]!r}]), or dtype=bfloat16",
        )
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        yield StateError(
            f"{policy.level} cannot convert a model that DistributedDataParallel already wraps",
            why="its buckets were laid out for the parameters' old dtype",
            write=f"prepare first, then DistributedDataParallel(model); or {_CONVERTS_NOTHING}",
        )
    elif dist.is_available() and dist.is_initialized() and (kept := accumulators.kept(params)):
        yield StateError(
            f"{policy.level} cannot convert parameters whose gradients are collected already",
            where=some_of([names[t] for t in kept]),
            why="a wrapper around this model, such as DistributedDataParallel, was made for their old dtype and would "
            "reduce no gradient;\nor a loss or output of an earlier forward pass is kept",
            write="prepare first, then DistributedDataParallel(model), and the session with the model inside;\n"
            f"del loss, output; or {_CONVERTS_NOTHING}",
        )
    held = [names[t] for t in params if t.grad is not None]
    if held:
        yield StateError(
            "parameters hold gradients in the dtype they are about to leave",
            where=some_of(held),
            write="optimizer.zero_grad(set_to_none=True) first",
        )


def _flags(converting: Mapping[Tensor, torch.dtype], moving: set[Tensor]) -> tuple[set[Tensor], set[Tensor]]:
    """Return the tensors with finite values that would become infinite, and those of some that would change at all."""
    asked = [*converting, *moving]
    flags = [(t.isfinite() & ~t.detach().to(dtype).isfinite()).any() for t, dtype in converting.items()]
    flags += [(t.detach().to(converting[t]).to(t.dtype) != t.detach()).any() for t in moving]
    found = torch.stack([flag.to(asked[0].device) for flag in flags]).tolist()
    chosen = [t for t, is_so in zip(asked, found, strict=True) if is_so]
    num_lost = sum(found[: len(converting)])
    return set(chosen[:num_lost]), set(chosen[num_lost:])
