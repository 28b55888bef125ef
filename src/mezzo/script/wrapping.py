"""Models that a script wraps in ``DistributedDataParallel``, which has to find weights as the policy stores them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.cast import prepare
from mezzo.errors import MezzoError
from mezzo.policy import Policy
from mezzo.script.owners import name_of
from mezzo.script.report import Ledger
from mezzo.script.seams import Seams
from mezzo.tensors import LOW

__all__ = ["prepare_wrapped"]


def prepare_wrapped(policy: Policy, ledger: Ledger, seams: Seams) -> contextlib.ExitStack:
    """Prepare each model before it is wrapped, where the policy stores weights in low precision.

    Args:
        policy: The policy.
        ledger: What is written down.
        seams: Replaces names of torch.

    Returns:
        What undoes the preparations, once no session has these models.
    """
    undo = contextlib.ExitStack()
    if policy.param_dtype not in LOW:
        return undo
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
    return undo
