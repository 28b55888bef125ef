"""What stands against a policy in the way in which ``fully_shard`` has sharded a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.cast.model.sharding import Shard
from mezzo.errors import MezzoError, UnsupportedError, some_of
from mezzo.policy import Policy
from mezzo.tensors import dtype_name, is_distributed

__all__ = ["sharded_otherwise"]


def sharded_otherwise(
    model: nn.Module, policy: Policy, storage: Mapping[Tensor, torch.dtype], parts: Mapping[Tensor, Shard]
) -> Iterator[MezzoError]:
    """Yield what ``fully_shard`` did to a model that does not go with a policy."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    paths = {unit: path for path, unit in model.named_modules()}
    other: dict[tuple[str, torch.dtype, torch.dtype], list[str]] = {}
    for param, part in parts.items():
        wanted = storage.get(param, param.dtype)
        # A low one that nothing casts is simply widened.
        if part.gathered != wanted and not (part.cast is None and wanted == torch.float32):
            other.setdefault((paths[part.unit], part.gathered, wanted), []).append(names[param])
    for (path, gathered, wanted), few in other.items():
        low = wanted != torch.float32
        module = f"model.{path}" if path else "model"
        yield UnsupportedError(
            f"fully_shard gathers parameters in {dtype_name(gathered)}, and {policy.level} wants {dtype_name(wanted)}",
            where=f"{some_of(few, 3)}, of fully_shard({module})",
            write=f"mezzo.fully_shard(model, {str(policy)!r}), which does it all;\nor torch's: "
            + (
                f"fully_shard({module}, mp_policy=MixedPrecisionPolicy(param_dtype={wanted}))"
                if low
                else f"fully_shard({module}) without param_dtype"
                if policy.param_dtype == torch.float32
                else f"fully_shard(model.{few[0].rpartition('.')[0]}) without param_dtype, before that of {module}"
            ),
        )
    alone = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param not in parts and not is_distributed(param) and not _has_hooks(param)
    ]
    if alone:
        yield UnsupportedError(
            "gradients of some parameters would not be averaged over ranks",
            where=some_of(alone),
            why="no module that was given to fully_shard holds them, so that ranks would drift apart",
            write="fully_shard(model) last, after that of the modules inside it: it takes all that are left",
        )


def _has_hooks(param: Any) -> bool:
    """Whether a user looks after a parameter's gradient, to average it by hand for instance."""
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))
