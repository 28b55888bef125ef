"""How gradients travel between ranks: the communication hook of one ``DistributedDataParallel``."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Wire", "registered"]


class Wire:
    """The state of a communication hook: what gradients travel in, and whether they are summed or averaged.

    Averages are torch's own: each rank divides before the sum. A sum divides nothing. What reads the gradients has to
    know of it, and so it is asked for before each backward pass.

    Args:
        ddp: The wrapper.
        dtype: What gradients travel in; as they are when omitted.

    Attributes:
        dtype: See above.
        ddp: The wrapper, weakly.
        ranks: How many ranks there are.
        is_sum: Whether the backward pass under way sums.
        is_finished: Whether all gradients were reduced since this was last set to False.
        looks: Whether the reducer finds out which parameters are used: it refuses to see no gradient on one of them.
        added: FP32 sums of earlier backward passes, by ``id`` of the parameter, that are rounded with the gradients.
        found: What came of gradients that travelled in FP32, by ``id`` of the parameter.
    """

    def __init__(self, ddp: DistributedDataParallel, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.ddp = ref(ddp)
        self._group = ddp.process_group
        self.ranks: int = self._group.size()
        self._is_static: bool = ddp.static_graph
        self.looks: bool = ddp.find_unused_parameters or ddp.static_graph
        self.is_sum = False
        self.is_finished = False
        self.added: dict[int, Tensor] = {}
        self.found: dict[int, Tensor] = {}

    def __reduce__(self) -> Any:
        return object, ()  # a copied wrapper has no hook, and a pickled one no process group

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce the gradients of one bucket.

        Args:
            bucket: A ``GradBucket``.

        Returns:
            The bucket's memory, once it holds them.
        """
        # In the first pass of a static graph all buckets are reduced at its end, and do not know their number.
        self.is_finished = self.is_finished or self._is_static or bucket.is_last()
        own: Tensor = bucket.buffer()
        dense = own.layout == torch.strided
        dtype = self.dtype if dense and self.dtype is not None else own.dtype
        # Places in memory are the same for all flat tensors.
        places = [(id(p), g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)] if dense else []
        adding = [(key, gradient) for key, gradient in places if key in self.added]
        travelling = own.to(torch.float32) if adding or dtype == torch.float32 else own
        for key, gradient in adding:
            _there(travelling, gradient, own).add_(self.added.pop(key))
        if not self.is_sum:
            travelling.mul_(1 / self.ranks)
        travelling = travelling.to(dtype)
        is_own = travelling is own
        kept = places if dtype != own.dtype and dtype == torch.float32 else []

        def arrived(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            (total,) = future.value()
            if not is_own:
                own.copy_(total)
            # Each with a version of its own, by which gradients that were written are told from others.
            self.found.update((key, _there(total, gradient, own).data) for key, gradient in kept)
            return own if dense else total

        work: Any = dist.all_reduce(travelling, group=self._group, async_op=True)
        reduced: torch.futures.Future[Tensor] = work.get_future().then(arrived)
        return reduced


def _there(flat: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """Return the piece of one flat tensor that has the places which a part has in another."""
    return flat.as_strided(part.shape, part.stride(), part.storage_offset() - whole.storage_offset())


def _on_the_wire(wire, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    return wire.reduce(bucket)


def registered(ddp: DistributedDataParallel, dtype: torch.dtype | None) -> Wire | None:
    """Register the hook of a wrapper; one that a session left there, which is closed by now, serves the next.

    Args:
        ddp: The wrapper.
        dtype: What gradients are to travel in; as they are when omitted.

    Returns:
        The hook's state; ``None`` where there is a hook of the user's, since torch takes only one.
    """
    others = [hook for hook, _ in ddp._comm_hooks if hook is not _on_the_wire]
    # The copy of a wrapper has a list of hooks too, of which none is registered.
    for _, state in ddp._comm_hooks:
        if isinstance(state, Wire) and state.ddp() is ddp:
            state.dtype = dtype
            return state
    told: Any = ddp
    if others or told._get_ddp_logging_data().get("comm_hook"):
        return None
    wire = Wire(ddp, dtype)
    ddp.register_comm_hook(wire, _on_the_wire)
    return wire
