"""Collectives on tensors in halves: which arguments they write, which their schemas do not say, and when."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mezzo.dispatch import OpOverload
from mezzo.releases import private
from mezzo.tensors import mapped

_FINISHED_WORK: Final = private("torch._C._distributed_c10d._create_work_from_future")

#: Of ``torch.distributed``'s own operations, whose schemas mark nothing: those that write their first argument.
_WRITING: Final = frozenset(
    """_allgather_base_ _reduce_scatter_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_
    allreduce_ allreduce_coalesced_ alltoall_ alltoall_base_ broadcast_ gather_ gather_into_tensor_ recv_
    recv_any_source_ reduce_ reduce_scatter_ reduce_scatter_tensor_coalesced_ scatter_""".split()
)
#: Those that only read.
_READING: Final = frozenset({"barrier", "check_for_nan", "monitored_barrier_", "send"})
#: Those whose schemas say what they write.
_FUNCTIONAL: Final = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"})


def is_collective(func: OpOverload[..., Any]) -> bool:
    """Whether an operation is a collective whose written arguments are known."""
    name = func._schema.name.rpartition(":")[2]
    return func.namespace in _FUNCTIONAL or (func.namespace == "c10d" and name in _WRITING | _READING)


def writes_first(func: OpOverload[..., Any]) -> bool:
    """Whether an operation writes its first argument, and its schema does not say so."""
    return func.namespace == "c10d" and func._schema.name.rpartition(":")[2] in _WRITING


def ended(out: Any) -> Any:
    """Wait until a collective has written; the current stream waits, where there are streams.

    Args:
        out: The collective's result.

    Returns:
        The same, with finished work: gloo waits for ever where a receive is waited for again.
    """
    return mapped(out, _ended, (Tensor, torch.ScriptObject))


def _ended(result: Any) -> Any:
    if isinstance(result, Tensor):
        return torch.ops._c10d_functional.wait_tensor(result)
    torch.distributed.Work.unbox(result).wait()
    future: Any = torch.futures.Future()
    future.set_result([])
    return _FINISHED_WORK(future).boxed()
