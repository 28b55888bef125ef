"""Models that a script wraps or shards for several ranks, which has to be done to weights as the policy stores them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.cast import prepare
from mezzo.distributed.own_calls import shard_as
from mezzo.errors import MezzoError
from mezzo.policy import Policy
from mezzo.script.owners import name_of, outermost
from mezzo.script.report import Ledger
from mezzo.script.seams import Seams, is_script
from mezzo.tensors import LOW

__all__ = ["prepare_wrapped"]

_FSDP: Final = "torch.distributed.fsdp"


def prepare_wrapped(policy: Policy, ledger: Ledger, seams: Seams) -> contextlib.ExitStack:
    """Prepare models before they are wrapped, where weights are stored low, and shard them in the policy's dtypes.

    Args:
        policy: The policy.
        ledger: What is written down.
        seams: Replaces names of torch.

    Returns:
        What undoes the preparations, once no session has these models.
    """
    undo = contextlib.ExitStack()
    if policy.param_dtype in LOW:
        _replace_ddp(policy, ledger, seams, undo)
    if dist.is_available() and ("RANK" in os.environ or _FSDP in sys.modules):  # its import takes half a second
        _replace_fully_shard(policy, ledger, seams, undo)
    return undo


def _replace_ddp(policy: Policy, ledger: Ledger, seams: Seams, undo: contextlib.ExitStack) -> None:
    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            undo.callback(prepare(module, policy).remove)
        except MezzoError as error:
            ledger.left_alone[f"{name_of(module)} in DistributedDataParallel"] = str(error)
        else:
            ledger.intercepted["DistributedDataParallel, to store weights low before it wraps"] += 1
        plain(self, module, *args, **kwargs)

    seams.replace(DistributedDataParallel, "__init__", init)


def _replace_fully_shard(policy: Policy, ledger: Ledger, seams: Seams, undo: contextlib.ExitStack) -> None:
    place = importlib.import_module(_FSDP)
    plain, gathers_low = place.fully_shard, policy.param_dtype in LOW

    @functools.wraps(plain)
    def fully_shard(module: Any, **kwargs: Any) -> Any:
        if not is_script():
            return plain(module, **kwargs)
        modules = [module] if isinstance(module, nn.Module) else list(module)
        root = outermost(modules[0])
        own = kwargs.get("mp_policy", place.MixedPrecisionPolicy())
        if own.param_dtype not in (None, policy.param_dtype):
            ledger.intercepted["MixedPrecisionPolicy, whose dtypes are the policy's"] += 1
        try:
            shard_as(policy, plain, root, modules, **kwargs)
        except MezzoError as error:
            ledger.left_alone[f"{name_of(modules[0])} in fully_shard"] = str(error)
            return plain(module, **kwargs | {"mp_policy": place.MixedPrecisionPolicy()})
        if gathers_low:
            ledger.intercepted["fully_shard, to gather weights low"] += 1
        # What is called before there is a session, to evaluate for instance, needs its inputs cast as well.
        if gathers_low and root in modules and not any(param.is_meta for param in root.parameters()):
            undo.callback(prepare(root, policy).remove)
        return module

    seams.replace(place, "fully_shard", fully_shard)
