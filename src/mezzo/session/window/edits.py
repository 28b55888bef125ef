"""A hint for code that writes to gradients while they still carry the loss scale."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Final

from torch import Tensor

from mezzo.errors import message
from mezzo.step.gradients import mark

__all__ = ["EditWatch"]

logger = logging.getLogger(__name__)

#: Gradients looked at: clipping writes to all of them, and a model may have thousands.
_WATCHED: Final = 16


class EditWatch:
    """Sees by version counters that gradients were written in place since the last backward pass, and says so once."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, tuple[int, int]]] = []
        self._told = False

    def remember(self, leaves: Iterable[Tensor]) -> None:
        """Note the gradients, which carry a scale, as a backward pass left them.

        Args:
            leaves: The parameters that may have one.
        """
        if not self._told:
            there = ((leaf, leaf.grad) for leaf in leaves)
            found = ((leaf, mark(gradient)) for leaf, gradient in there if gradient is not None)
            self._seen = list(itertools.islice(found, _WATCHED))

    def look(self, *, carrying: bool) -> None:
        """Say it if a gradient was written since, and forget them.

        Args:
            carrying: Whether they carry a scale still, and nothing but their owner clips them.
        """
        seen, self._seen = self._seen, []
        if carrying and not self._told and any(_written(leaf, before) for leaf, before in seen):
            self._told = True
            # No warning: multiplying all gradients, or averaging them over ranks, is right with a scale too.
            logger.info(
                "%s",
                message(
                    "gradients were edited while they still carry the loss scale",
                    where="in place, between amp.backward() and the next amp.step() or amp.unscale_()",
                    why="clipping them there clips to a limit that is too small by the scale (multiplying all is fine)",
                    write="MixedPrecision(…, max_grad_norm=1.0); or amp.unscale_() before the edit",
                ),
            )


def _written(leaf: Tensor, before: tuple[int, int]) -> bool:
    if leaf.grad is None:
        return False
    version, address = mark(leaf.grad)
    return address == before[1] and version > before[0]
