"""What several ranks count of one step: whether all of them record it, and what their counts come to together."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.numerics.subject import Choices
from mezzo.numerics.watches import Place
from mezzo.trace.observe import LARGEST

logger = logging.getLogger(__name__)

#: A tensor's dtype, and its row on the host.
Counted = tuple[str, Tensor]


class Attendance:
    """The ranks that train a model, and which of them record a step.

    A rank that records by itself would wait for ever in a reduction that the others never enter, or take their next one
    for it. So each counts itself in the group's store before the step's own exchange, and reads after it how many
    record: all of them find the same number. Then it takes itself out again.

    Recorders find each other on other ranks by what they record. Of several alike the first to announce a step on one
    rank belongs to the first on another: in sessions and under DDP all ranks step their models in one order.

    Args:
        choices: What the recorder was asked for.

    Attributes:
        of_session: The ranks that a session steps with; ``None`` for one.
    """

    def __init__(self, choices: Choices) -> None:
        self._subject = choices.subject
        about = (choices.subject.modules, choices.every, choices.kinds, choices.formats)
        self._name = f"mezzo recorder {hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
        self._store: Any = None
        self._key, self._taken = "", ""  # in it: for this recorder on all ranks, and for those of this rank alone
        self._is_announced = False
        self._has_warned = False
        self.of_session: Any = None

    def group(self) -> Any:
        """Return the ranks that train the model; ``None`` for one."""
        return self.of_session or self._subject.group()

    def announce(self) -> None:
        """Say that this rank records the coming step."""
        group = self.group()
        if group is None or self._is_announced:
            return
        if self._store is None:
            self._store, number, own = group.get_group_store(), 1, f" of rank {group.rank()}"
            while self._store.add(f"{self._name}, {number}{own}", 1) > 1:  # another one of this rank has it
                self._store.add(f"{self._name}, {number}{own}", -1)
                number += 1
            self._key, self._taken = f"{self._name}, {number}", f"{self._name}, {number}{own}"
        self._store.add(self._key, 1)
        self._is_announced = True

    def withdraw(self) -> None:
        """Record the step no more."""
        if self._is_announced:
            self._is_announced = False
            self._leave(self._key)

    def end(self) -> None:
        """Record no step any more."""
        self.withdraw()
        if self._store is not None:
            self._leave(self._taken)
        self._store = None

    def _leave(self, key: str) -> None:
        with suppress(RuntimeError):  # of a group that is gone
            self._store.add(key, -1)

    def summed(self, counted: dict[Place, Counted]) -> dict[Place, Counted]:
        """Return what all ranks have counted of the step, if all of them record it. One warning says if not."""
        if (group := self.group()) is None:
            return counted
        present = self._store.add(self._key, 0) if self._is_announced else 1
        if present == group.size():
            return summed(counted, group, next(self._subject.model.parameters()).device)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of %d ranks record, so that each counts its own share alone; make a Recorder on every rank for the "
                "counts of all",
                present, group.size(),
            )  # fmt: skip
        return counted


def summed(counted: dict[Place, Counted], group: Any, device: torch.device) -> dict[Place, Counted]:
    """Add up what all ranks of a group have counted.

    Args:
        counted: What this one has; others may have counted other tensors.
        group: Their process group.
        device: One that it reduces on.

    **Cost**: a reduction, and before it one of the names.
    """
    known: list[Any] = [None] * group.size()
    dist.all_gather_object(known, {place: (dtype, len(row)) for place, (dtype, row) in counted.items()}, group=group)
    every = {place: told for each in known for place, told in each.items()}
    if not every:
        return counted
    width = next(iter(every.values()))[1]
    table = torch.zeros(len(every), width + len(known), dtype=torch.int64)
    for number, place in enumerate(every):
        if place in counted:
            row = counted[place][1]
            table[number, :width] = row
            table[number, width + group.rank()] = row[LARGEST]  # a column for each rank: a sum keeps all of them
    table = table.to(device)
    dist.all_reduce(table, group=group)
    table = table.cpu()
    table[:, LARGEST] = table[:, width:].max(1).values
    return {place: (every[place][0], table[number, :width]) for number, place in enumerate(every)}
