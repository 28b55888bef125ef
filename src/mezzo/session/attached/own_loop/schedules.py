"""Learning-rate schedulers that wait while the steps of their optimizer are skipped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mezzo.session.attached.own_loop.bound import Bound

__all__ = ["Schedules"]

#: Answers that wait on the device, one by one, for a scheduler that asks once an epoch.
_PENDING: Final = 64


class _Steps:
    """The steps of one optimizer.

    Attributes:
        total: How many there were.
    """

    def __init__(self) -> None:
        self.total = self._skipped = 0
        self._pending: list[Tensor] = []

    def add(self, skipped: Tensor) -> None:
        """Count one; no host sync."""
        self.total += 1
        self._pending.append(skipped.detach())
        if len(self._pending) == _PENDING:
            self._sum_up()

    def _sum_up(self) -> None:
        self._pending = [torch.stack([each.long() for each in self._pending]).sum()]

    def taken(self) -> int:
        """Return how many have updated something; waits for the device if there was one since it was asked last."""
        if len(self._pending) > 1:
            self._sum_up()  # one wait for all
        self._skipped += sum(map(int, self._pending))
        self._pending.clear()
        return self.total - self._skipped


class Schedules:
    """Hold ``scheduler.step()`` where each step of its optimizer since the scheduler's last one was skipped.

    One that steps once an epoch waits so for an epoch of which every step was skipped, and for no other.
    """

    def __init__(self) -> None:
        self._steps: dict[Optimizer, _Steps] = {}
        self._seen: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._runs = False

    def note(self, optimizers: Iterable[Optimizer], skipped: Tensor) -> None:
        """Take note of a step.

        Args:
            optimizers: Those that have stepped, or skipped.
            skipped: 0-d bool: which of both.
        """
        for optimizer in optimizers:
            self._steps.setdefault(optimizer, _Steps()).add(skipped)

    def waits(self, scheduler: Any) -> bool:
        """Whether a scheduler that is about to step is to wait.

        Args:
            scheduler: The scheduler; what it is told counts as told.
        """
        steps = self._steps.get(getattr(scheduler, "optimizer", None))  # type: ignore[arg-type]
        if steps is None:
            return False
        total, taken = self._seen.get(scheduler, (0, 0))
        now = self._seen[scheduler] = steps.total, steps.taken()
        begins = getattr(scheduler, "_is_initial", False) or getattr(scheduler, "last_epoch", 0) < 0
        return not begins and now[0] > total and now[1] == taken

    def bind(self, bound: Bound) -> None:
        """Have the schedulers of this process ask, those of classes that are made later too.

        Args:
            bound: What binds their ``step``.
        """
        self._bound = bound
        for kind in dict.fromkeys(_kinds(LRScheduler)):
            self._bind_step(kind)
        bound.replace(LRScheduler, "__init_subclass__", self._init_subclass)

    def _bind_step(self, kind: type) -> None:
        if "step" in vars(kind):
            self._bound.replace(kind, "step", self._step)

    def _init_subclass(self, plain: Callable[..., Any], cls: type, /, **kwargs: Any) -> None:
        plain(**kwargs)
        self._bind_step(cls)

    def _step(self, plain: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._runs:  # a scheduler of schedulers, or of a class above
            return plain(scheduler, *args, **kwargs)
        if self.waits(scheduler):
            return None
        self._runs = True
        try:
            return plain(scheduler, *args, **kwargs)
        finally:
            self._runs = False


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    below: type
    for below in kind.__subclasses__():
        yield from _kinds(below)
