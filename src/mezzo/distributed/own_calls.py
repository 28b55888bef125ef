"""``torch.distributed.fsdp.fully_shard`` as a program calls it, module by module, in the dtypes that a policy says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mezzo.cast.model.prepare import with_pinned_classes
from mezzo.cast.model.refusals import wanted_storage
from mezzo.distributed.wrapping import Unit, planned
from mezzo.policy import Policy
from mezzo.tensors import LOW

__all__ = ["shard_as"]


def shard_as(
    policy: Policy, plain: Callable[..., Any], root: nn.Module, modules: Iterable[nn.Module], **kwargs: Any
) -> None:
    """Shard modules of a model together, as a program asks for, but for what the policy keeps in another dtype.

    A program's own ``mp_policy`` says nothing about dtypes, as its own ``torch.autocast`` does not; but that its
    ``reduce_dtype`` holds where the policy leaves it to the parameters.

    Args:
        policy: The policy.
        plain: torch's ``fully_shard``.
        root: The model that all of it is part of, by whose paths rules speak.
        modules: The modules that are to be gathered together.
        **kwargs: As torch's takes them.

    Raises:
        MezzoError: As :func:`mezzo.fully_shard`. Nothing was sharded.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    own = kwargs.pop("mp_policy", None) or MixedPrecisionPolicy()
    reduced = own.reduce_dtype if policy.reduce == "param" else getattr(torch, policy.reduce)
    policy = with_pinned_classes(root, policy)
    storage = wanted_storage(root, policy)
    paths = {module: path for path, module in root.named_modules()}
    together = dict[torch.dtype, list[nn.Module]]()
    alone = list[Unit]()
    for module in modules:
        *inner, last = planned(module, storage, policy.param_dtype, set(), paths[module])
        alone += inner
        together.setdefault(last.dtype, []).append(module)

    def shard(given: nn.Module | list[nn.Module], dtype: torch.dtype) -> None:
        low = dtype if dtype in LOW else None
        plain(given, mp_policy=MixedPrecisionPolicy(low, reduced, cast_forward_inputs=False), **kwargs)

    for unit in alone:
        shard(unit.module, unit.dtype)
    for dtype, few in together.items():
        shard(few if len(few) > 1 else few[0], dtype)
