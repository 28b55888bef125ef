"""The counts of several ranks in one step: whether all ranks record it, and the sum of their counts."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.numerics.subject import Choices
from mezzo.numerics.watches import TensorKey
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
        self._key, self._taken = "", ""  # in the store: of this recorder on all ranks, and of this rank alone
        self._is_announced = False
        self._has_warned = False
        self.of_session: Any = None

    def group(self) -> Any:
        """Return the ranks that train the model; ``None`` for one."""
        return self.of_session or self._subject.group()

    def announce(self) -> None:
        """Count this rank among those that record the coming step."""
        group = self.group()
        if group is None or self._is_announced:
            return
        if self._store is None:
            self._store, number, of_rank = group.get_group_store(), 1, f" of rank {group.rank()}"
            while self._store.add(f"{self._name}, {number}{of_rank}", 1) > 1:  # another recorder of this rank has it
                self._store.add(f"{self._name}, {number}{of_rank}", -1)
                number += 1
            self._key, self._taken = f"{self._name}, {number}", f"{self._name}, {number}{of_rank}"
        self._store.add(self._key, 1)
        self._is_announced = True

    def withdraw(self) -> None:
        """Count this rank no more: its step is over."""
        if self._is_announced:
            self._is_announced = False
            self._subtract(self._key)

    def end(self) -> None:
        """Free this rank's key in the store: it records no more steps."""
        self.withdraw()
        if self._store is not None:
            self._subtract(self._taken)
        self._store = None

    def _subtract(self, key: str) -> None:
        with suppress(RuntimeError):  # of a group that is gone
            self._store.add(key, -1)

    def summed(self, counted: dict[TensorKey, Counted]) -> dict[TensorKey, Counted]:
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


def summed(counted: dict[TensorKey, Counted], group: Any, device: torch.device) -> dict[TensorKey, Counted]:
    """Add up what all ranks of a group have counted.

    Args:
        counted: This rank's counts; other ranks may have counted other tensors.
        group: Their process group.
        device: A device that the group reduces on.

    **Cost**: a reduction, and before it one of the names.
    """
    rows_of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(
        rows_of_ranks, {key: (dtype, len(row)) for key, (dtype, row) in counted.items()}, group=group
    )
    shapes = {key: shape for rows in rows_of_ranks for key, shape in rows.items()}
    if not shapes:
        return counted
    width = next(iter(shapes.values()))[1]
    table = torch.zeros(len(shapes), width + len(rows_of_ranks), dtype=torch.int64)
    for number, key in enumerate(shapes):
        if key in counted:
            row = counted[key][1]
            table[number, :width] = row
            table[number, width + group.rank()] = row[LARGEST]  # a column for each rank: a sum keeps all of them
    table = table.to(device)
    dist.all_reduce(table, group=group)
    table = table.cpu()
    table[:, LARGEST] = table[:, width:].max(1).values
    return {key: (shapes[key][0], table[number, :width]) for number, key in enumerate(shapes)}
