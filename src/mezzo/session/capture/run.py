"""One run of a train step for a graph: which sessions take part, and what their steps hand over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.errors import StateError, UnsupportedError
from mezzo.scale.scaler import Scaler
from mezzo.session.capture.snapshot import ONE_SYNC, Snapshot
from mezzo.session.core import Core, PlainRun, current, under_way
from mezzo.session.scale import StepOutcome
from mezzo.session.stats import Noted
from mezzo.session.verdict import Judged

__all__ = ["Elsewhere", "GraphRun"]


class Elsewhere(Exception):  # noqa: N818 - it never leaves this room
    """A session turned out to live on another kind of device than the graph."""


class GraphRun(PlainRun):
    """One run of a train step: a rehearsal, which changes nothing since each step is skipped, or the recorded one.

    Attributes:
        outcomes: What the steps left for the statistics, in order: the session, the outcome, and its numbers as a
            vector that each replay writes.

    Args:
        snapshots: The sessions that are known to take part; others join at their first call.
        device: The graph's.
        rehearsing: Whether steps are skipped.
    """

    def __init__(self, snapshots: dict[Core, Snapshot], device: torch.device, *, rehearsing: bool) -> None:
        self.outcomes: list[tuple[Core, StepOutcome, Tensor]] = []
        self._snapshots, self._device, self._rehearsing = snapshots, device, rehearsing

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Let sessions find this run, and allow only their optimizers to step."""
        hook = register_optimizer_step_pre_hook(self._refuse_foreign)
        try:
            with under_way(self):
                yield
        finally:
            hook.remove()

    def join(self, core: Core) -> None:
        """Take part, unless the session does already.

        Raises:
            Elsewhere: The session lives on another kind of device than the graph.
            UnsupportedError: Its steps cannot be captured; nothing was changed.
            StateError: An accumulation window is open.
        """
        if core not in self._snapshots:
            if core.device.type != self._device.type:
                raise Elsewhere(core.device)
            self._snapshots[core] = Snapshot(core, self._device)

    def begin(self, scaler: Scaler) -> None:
        """Leave the scale in the graph's tensors, where a replay finds the next one."""

    def refuse(self, core: Core, closure: Any, scheduler: Any) -> None:
        """Refuse a step that asks the host."""
        if closure is not None:
            raise UnsupportedError(
                "closure= cannot be captured",
                where="amp.step(closure=…) in a train step under mezzo.capture",
                why=f"whether an evaluation overflowed decides what the optimizer does next; {ONE_SYNC}",
                write="amp.backward(loss), then amp.step(); or the train step without mezzo.capture",
            )
        if scheduler is not None:
            raise UnsupportedError(
                "scheduler= cannot be captured",
                where="amp.step(scheduler=…) in a train step under mezzo.capture",
                why=f"it waits for whether the weights moved; {ONE_SYNC}",
                write="scheduler.step() after each call of the captured step",
            )

    def seen(self, judged: Judged) -> Judged:
        """Skip each step of a rehearsal, so that nothing is written."""
        return replace(judged, verdict=judged.verdict.skipped()) if self._rehearsing else judged

    def refuse_capture(self, what: str, **words: str) -> None:
        """Refuse a captured train step as part of another, or what ``words`` say of another call."""
        of_capture = {
            "why": "a graph cannot hold another",
            "write": "one function that does the work of both, captured once",
        }
        raise StateError(f"{what} inside a train step that is being captured", **(of_capture | words))

    def noted(self, core: Core, outcome: StepOutcome) -> Noted:
        """Keep an outcome for the replays; a run itself counts no step."""
        self.outcomes.append((core, outcome, core.stats.packed(outcome)))
        self._snapshots[core].stepped()
        return Noted([], lambda: None)

    def finish(self) -> None:
        """Leave the next loss scales where the next run finds them; the last thing a run does on the device."""
        for snapshot in self._snapshots.values() if not self._rehearsing else ():
            snapshot.finish()

    def _refuse_foreign(self, optimizer: Optimizer, *_: Any) -> None:
        if current() is self and not any(optimizer in core.optimizers for core in self._snapshots):
            raise StateError(
                "an optimizer that belongs to no session steps inside a captured train step",
                where=type(optimizer).__name__,
                why="it knows of no skipped step, and what it changes while the graph is made could not be undone",
                write="MixedPrecision(model, [optimizer, other], policy), and amp.step()",
            )
