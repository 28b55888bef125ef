"""``DistributedDataParallel`` around a session's models: what it reduces, and what a session does beside it.

A wrapper may be older than its session or younger: it is found as a model runs in it. Its buckets have the dtype that
parameters had when it was made, and sums of micro-batches are FP32: they wait aside while it reduces the gradients of
the last micro-batch, and those that were not reduced are averaged then.
"""

from __future__ import annotations
from typing import Any

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from mezzo.hooks import OwnHook
from mezzo.distributed.exchange import Ranks, average, broadcast_first
Keeper: Any = ()
from mezzo.tensors import LOW

__all__ = ["Wrappers"]


@dataclass(slots=True)
class _Met:
    """What is known of a wrapper.

    Attributes:
        low: Its parameters in low precision that get gradients.
        reduces: Whether it reduces the gradients of the forward pass that has run in it last; ``None`` before one.
        is_local: Whether there are gradients since its last reduction that it has not reduced.
        follows: Whether FP32 values on all ranks are the first one's.
    """

    low: list[Tensor]
    reduces: bool | None = None
    is_local: bool = False
    follows: bool = False


class Wrappers:
    """The wrappers that models of a session run in.

    Args:
        ranks: Those that step together: a wrapper over others is refused.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._met: WeakKeyDictionary[DistributedDataParallel, _Met] = WeakKeyDictionary()
        self._paused: dict[DistributedDataParallel, bool] = {}
        self._pauses = 0

    def watch(self, models: Iterable[nn.Module]) -> Iterator[Callable[[], None]]:
        """Find wrappers as models run in them, where there are ranks; yield what ends it."""
        if dist.is_available() and dist.is_initialized():
            for model in models:
                inner = model.module if isinstance(model, DistributedDataParallel) else model
                yield inner.register_forward_pre_hook(OwnHook(self._enter)).remove

    @_disable_dynamo
    def _enter(self, model: nn.Module, *_: Any) -> None:
        wrapper = DistributedDataParallel._active_ddp_module
        if not torch.is_grad_enabled():
            return
        if wrapper is None:  # what comes back will not be reduced
            for each, met in self._met.items():
                met.is_local |= each.module is model
            return
        if wrapper not in self._met:
            self._ranks.require_within(wrapper.process_group, "DistributedDataParallel reduces over")
            low: list[Tensor] = [p for p in wrapper.parameters() if p.dtype in LOW and p.requires_grad]
            self._met[wrapper] = _Met(low)
        if self._pauses:
            self._pause(wrapper)
        self._met[wrapper].reduces = wrapper.require_backward_grad_sync

    @contextmanager
    def no_sync(self, models: Iterable[nn.Module], units: Collection[Any]) -> Iterator[None]:
        """Exchange no gradients of forward passes in here.

        Args:
            models: Those of the session.
            units: Modules that were given to torch's ``fully_shard``.
        """
        self._pauses += 1
        try:
            if self._pauses == 1:
                for wrapper in (*self._met, *(each for each in models if isinstance(each, DistributedDataParallel))):
                    self._pause(wrapper)
                for unit in units:
                    unit.set_requires_gradient_sync(False, recurse=False)
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                for wrapper, before in self._paused.items():
                    wrapper.require_backward_grad_sync = before
                self._paused.clear()
                for unit in units:
                    unit.set_requires_gradient_sync(True, recurse=False)

    def _pause(self, wrapper: DistributedDataParallel) -> None:
        # It looks at this at the end of its forward pass: the first one, which has found it, is not too late.
        self._paused.setdefault(wrapper, wrapper.require_backward_grad_sync)
        wrapper.require_backward_grad_sync = False

    # A backward pass --------------------------------------------------------------------------------------

    @property
    def has_low(self) -> bool:
        """Whether there are wrappers whose buckets are low: FP32 sums wait aside while they reduce."""
        return any(met.low for met in self._met.values())

    @property
    def finds_unused(self) -> bool:
        """Whether a wrapper looks for unused parameters: it wants a gradient of each that was used since it reduced."""
        return any(each.find_unused_parameters and met.reduces for each, met in self._met.items())

    def reduced_with(self, reached: set[int]) -> set[int]:
        """Add to parameters, by ``id``, those that a wrapper reduces with them: other ranks may have reached these."""
        for wrapper, met in self._met.items():
            if met.reduces and not reached.isdisjoint(mine := {id(param) for param in wrapper.parameters()}):
                reached = reached | mine
        return reached

    def averaged(self, leaves: Collection[Tensor], sums: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return FP32 sums that waited aside, those averaged over ranks that nothing has reduced yet.

        Args:
            leaves: The parameters whose gradients a backward pass has made, the same ones on all ranks.
            sums: By parameter, of passes before; in place.
        """
        mine = set(leaves)
        for wrapper, met in self._met.items():
            if met.reduces and met.is_local and (low := [param for param in met.low if param in mine]):
                there = {param: sums[param] for param in low if param in sums}
                sums |= average(low, there, wrapper.process_group)
        return sums

    def end_pass(self) -> None:
        """Take note of what a backward pass has reduced."""
        for met in self._met.values():
            if met.reduces is not None:
                met.is_local, met.reduces = not met.reduces, None

    # Weights ----------------------------------------------------------------------------------------------

    def follow_first(self, stored: Callable[[], Mapping[Tensor, Keeper]]) -> None:
        """Take the first rank's FP32 values, once for each wrapper: it gave the others rounded weights alone.

        Args:
            stored: Returns who keeps the FP32 value of each low parameter.
        """
        for wrapper, met in self._met.items():
            if not met.follows:
                met.follows, keepers = True, stored()
                values = {p: keepers[p].master_of(p).detach().clone() for p in wrapper.parameters() if p in keepers}
                broadcast_first(values.values(), wrapper.process_group)
                for param, value in values.items() if wrapper.process_group.rank() else ():
                    keepers[param].write(param, value)
