"""What ranks send each other, counted from the collectives themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.tensors import tensors

__all__ = ["Collective", "Traffic"]

#: By operation of torch's: what it is called here.
_KINDS: Final = MappingProxyType(
    {
        name: kind
        for kind, names in {
            "all-reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced",
            "all-gather": "_allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ "
            "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
            "reduce-scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_ "
            "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
            "all-to-all": "alltoall_ alltoall_base_ all_to_all_single",
            "broadcast": "broadcast_ broadcast",
            "other": "gather_ scatter_ reduce_ send recv_ recv_any_source_ barrier monitored_barrier_",
        }.items()
        for name in names.split()
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, as one rank sees it.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``broadcast`` or ``other``.
        dtype: Of the first tensor; ``None`` where there is none.
        whole_bytes: What is reduced, gathered or sent, as a whole: all ranks' parts together.
        ranks: How many take part.
    """

    kind: str
    dtype: torch.dtype | None
    whole_bytes: int
    ranks: int

    @property
    def wire_bytes(self) -> float:
        """What one rank sends where the ranks form a ring, as NCCL's and gloo's do: the mean over the ranks.

        Of n bytes on W ranks n·(W − 1)/W, and twice that for an all-reduce, which scatters and gathers.
        """
        times = 2 if self.kind == "all-reduce" else 1
        return times * self.whole_bytes * (self.ranks - 1) / self.ranks


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count, inside the block, the collectives that this rank takes part in.

    Those of ``DistributedDataParallel``'s reducer and of FSDP2 are seen as well as a session's, in forward and backward
    passes: all of them are operations of torch's dispatcher.

    Attributes:
        collectives: In their order.

    **Cost**: some microseconds of Python for each kernel.

    Example:
        >>> with Traffic() as traffic:
        ...     y = torch.ones(8).sum()  # one process talks to nobody
        >>> traffic.collectives, traffic.wire_bytes
        ([], 0)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []

    @property
    def wire_bytes(self) -> int:
        """What this rank sent, as :attr:`Collective.wire_bytes` counts it."""
        return round(sum(each.wire_bytes for each in self.collectives))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith("torch.distributed") for kind in types):
            return (
                NotImplemented  # the operations that a DTensor is made of, and so its collectives, come by one by one
            )
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname in _KINDS:
            self.collectives.append(_collective(_KINDS[func._opname], args, kwargs, out))
        return out


def _collective(kind: str, args: Any, kwargs: Any, out: Any) -> Collective:
    # Parts of ranks go in or out, and what they make up the other way: the larger of the two sides is the whole.
    sides = [[*tensors(side)] for side in (*args, *(kwargs or {}).values(), out)]
    sizes = [sum(each.numel() * each.element_size() for each in side) for side in sides]
    first = next((each for side in sides for each in side), None)
    return Collective(
        kind=kind,
        dtype=None if first is None else first.dtype,
        whole_bytes=max(sizes),
        ranks=next(_groups((*args, *(kwargs or {}).values())), 1),
    )


def _groups(arguments: tuple[Any, ...]) -> Iterator[int]:
    """Yield the sizes of the process groups among arguments: objects of TorchScript's, or their names."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    for each in arguments:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            yield dist.ProcessGroup.unbox(each).size()
    # The name of its group is the last text that a functional collective takes.
    names: list[Any] = [each for each in arguments if isinstance(each, str)]
    for each in reversed(names):
        yield _resolve_process_group(each).size()
