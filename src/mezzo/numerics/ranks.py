"""What several ranks count of one step: whether all of them record it, and what their counts come to together."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from mezzo.numerics.subject import Choices
from mezzo.numerics.watches import Place
from mezzo.trace.observe import LARGEST

logger = logging.getLogger(__name__)

#: How many steps this process has announced, by what is recorded of them.
_ANNOUNCED: Final = Counter[str]()


class Attendance:
    """Which ranks record the steps of a recorder.

    A rank that records by itself would wait for ever in a reduction that the others never enter, or take their next one
    for it. So each says in the group's store that it records, before the step's own exchange, and reads after it how
    many have: all of them find the same number.

    Args:
        choices: What the recorder was asked for.
    """

    def __init__(self, choices: Choices) -> None:
        subject = choices.subject
        self._about = f"{type(subject.model).__name__} {len(subject.modules)} {choices.every} {[*choices.kinds]}"
        self._key = ""  # of the step that is announced
        self._has_warned = False

    def announce(self, group: Any) -> None:
        """Say once that this rank records the step; ``None`` for a group of one."""
        if group is not None and not self._key:
            _ANNOUNCED[self._about] += 1
            self._key = f"mezzo recorder {self._about} {_ANNOUNCED[self._about]}"
            group.get_group_store().add(self._key, 1)

    def is_complete(self, group: Any) -> bool:
        """Whether all ranks record the step that was announced, which then is over. One warning says if not."""
        present = group.get_group_store().add(self._key, 0) if self._key else 1
        self._key = ""
        if present != group.size() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of %d ranks record, so that each counts its own share alone; make a Recorder on every rank for the "
                "counts of all",
                present, group.size(),
            )  # fmt: skip
        return bool(present == group.size())


#: A tensor's dtype, and its row on the host.
Counted = tuple[str, Tensor]


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
