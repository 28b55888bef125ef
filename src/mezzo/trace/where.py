"""Where a watched pass is: in which module and call, forward or backward, and on which of the user's lines.

In the backward pass the running autograd node says where, by its sequence number: the numbers that nodes got while a
module or a call ran are noted here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from mezzo.trace.calls import OpCall
from mezzo.trace.frames import user_line

#: How the model itself is called where people read, for its path is empty.
MODEL: Final = "(model)"
#: The module path of what the loss function does.
LOSS: Final = "(loss)"


def place_text(module: str, op: str, line: str | None = None) -> str:
    """Write where an op is, for people.

    Example:
        >>> place_text("", "linear", "model.py:7")
        '(model) linear (model.py:7)'
    """
    return f"{module or MODEL} {op}{f' ({line})' if line else ''}"


@dataclass(slots=True)
class Place:
    """In a module, and in one call of a torch function or between calls."""

    module: str
    call: OpCall | None = None

    @property
    def path(self) -> str | None:
        """The module as rules have it: outside of the model there is none."""
        return None if self.module == LOSS else self.module


class Where:
    """The place of a pass, and of the forward pass that its backward nodes come from.

    Args:
        until: The frame beyond which no line is the model's; see :func:`~mezzo.trace.frames.user_line`.
        instead: The line to name where there is none.

    Attributes:
        is_backward: Whether the backward pass has begun: calls are recomputation.
        modules_run: Paths of the modules that have been called.
    """

    def __init__(self, until: int = 0, instead: str | None = None) -> None:
        self.is_backward = False
        self.modules_run: set[str] = set()
        self._until, self._instead = until, instead
        self._places = [Place(LOSS)]
        self._level = 1  # how many places there were when the backward pass began
        self._is_inner = False
        self._timeline: list[tuple[int, Place]] = []
        self._owners: dict[int, str] = {}

    def learn_owners(self, model: nn.Module) -> None:
        """Learn to which module each parameter belongs, whose gradient may be cast where it is accumulated."""
        self._owners = {id(p): n.rpartition(".")[0] for n, p in model.named_parameters()}

    @property
    def now(self) -> Place:
        """Where the program is, forward."""
        return self._places[-1]

    def line(self) -> str | None:
        """Return the user's line."""
        return user_line(self._until) or self._instead

    def enter(self, place: Place) -> None:
        """Be in a module, or in a call."""
        self._places.append(place)
        self._mark()

    def leave(self, place: Place) -> None:
        """Be where the program was before, whatever lies between."""
        if any(each is place for each in self._places):
            while self._places.pop() is not place:
                pass
            self._mark()

    def _mark(self) -> None:
        """Note from which autograd node on the program is in this place."""
        number = torch._C._autograd._get_sequence_nr()
        if self._timeline and self._timeline[-1][0] == number:
            self._timeline.pop()
        self._timeline.append((number, self._places[-1]))

    @contextmanager
    def inner_backward(self) -> Iterator[None]:
        """Watch ``torch.autograd.grad`` inside the forward pass, a gradient penalty's for example."""
        before = self.is_backward, self._level, self._is_inner
        self.is_backward, self._level, self._is_inner = True, len(self._places), True
        try:
            yield
        finally:
            self.is_backward, self._level, self._is_inner = before

    @property
    def is_gradient(self) -> bool:
        """Whether gradients are computed: in the backward pass, but not where a checkpoint recomputes inside it."""
        # A graph made of an inner backward pass needs gradients too, and is none.
        recomputes = len(self._places) > self._level or (torch.is_grad_enabled() and not self._is_inner)
        return self.is_backward and not recomputes

    def place(self) -> Place:
        """Return where a kernel belongs: to the running module, or to the one whose backward pass runs."""
        if not self.is_backward or len(self._places) > self._level:
            return self.now
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self.now
        if (variable := getattr(node, "variable", None)) is not None:
            return Place(self._owners.get(id(variable), ""))
        return self.of_node(node)

    def of_node(self, node: Any) -> Place:
        """Return where an autograd node was made."""
        found = bisect_right(self._timeline, node._sequence_nr(), key=lambda mark: mark[0])
        return self._timeline[found - 1][1] if found else self.now
