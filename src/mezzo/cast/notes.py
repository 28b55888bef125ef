"""What this room is doing at the moment, said for those who watch a pass: ``mezzo.explain`` and ``locate``.

Products below sixteen bits say what they quantise, too, to listeners: what a recorder counts.

While a watcher is there, each function of torch that is carried out, each cast and each piece of emulated arithmetic
is a note on a stack of its thread. Otherwise nothing is noted, and ``WATCHERS`` is all that is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mezzo.formats import Quantized
from mezzo.interrupts import Members

Event = Literal["op", "cast", "emulation", "quantised", "widened"]


class Quantising(NamedTuple):
    """A product whose operands are quantised.

    Attributes:
        formats: Names of the operands' formats.
        emulated: Whether it is computed in FP32.
    """

    formats: tuple[str, ...]
    emulated: bool


class Note(NamedTuple):
    """What a thread is doing, for those who watch kernels.

    Attributes:
        event: ``op``: a region decides about a function of torch. ``cast``: a tensor is given the policy's dtype.
            ``emulation``: a product is computed in FP32 from rounded operands. ``quantised``: a product is computed
            from operands below sixteen bits. ``widened``: an op without a low kernel runs in FP32. ``buffer``: a low
            buffer is widened for its first write.
        about: The function that runs. Where emulation runs in a backward pass, the autograd node; of a quantised
            product its :class:`Quantising`.
    """

    event: Event
    about: Any


class _Stack(threading.local):
    def __init__(self) -> None:
        self.notes: list[Note] = []


#: One entry for each watcher, in whatever thread: appending is atomic.
WATCHERS: Final[list[None]] = []
_STACK: Final = _Stack()


@contextmanager
def watched() -> Iterator[None]:
    """Record notes inside the block."""
    WATCHERS.append(None)
    try:
        yield
    finally:
        WATCHERS.pop()


def during(event: Event, about: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Run a function under a note; only asked for while ``WATCHERS`` is not empty."""
    _STACK.notes.append(Note(event, about))
    try:
        return run(*args)
    finally:
        _STACK.notes.pop()


def product_beside(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices; to those who watch a pass it is a part of a cast, and no product of the model's."""
    out: Tensor = during("cast", torch.float32, torch.matmul, a, b) if WATCHERS else torch.matmul(a, b)
    return out


def notes() -> list[Note]:
    """Return what this thread is doing, outermost first."""
    return _STACK.notes


class ProductListener(Protocol):
    """Receives the operands of one call of a product below sixteen bits, in eager code, in the thread that runs it."""

    def quantised(self, role: str, operand: Tensor, made: Quantized) -> None:
        """An operand was quantised, rotated before where it is: ``activation``, ``weight`` or ``gradient``."""

    def differentiated(self, kept: Quantized | Tensor | None) -> None:
        """A backward pass has used the call. The gradient that was quantised last was multiplied by ``kept``.

        The product is the weight's gradient; ``None`` where that is not asked for, or computed from no quantised
        gradient.
        """


#: Functions that return a listener for a weight's products, or ``None``. They are called with the weight as the
#: program has it: a parameter, or a view of one. Compiled code calls none of them: graphs do not depend on them.
LISTENING: Final[Members[Callable[[Tensor], ProductListener | None]]] = Members()


@contextmanager
def listening(listener_of: Callable[[Tensor], ProductListener | None]) -> Iterator[None]:
    """Register, inside the block, a function that returns the listener of a weight's products, or ``None``."""
    LISTENING.add(listener_of)
    try:
        yield
    finally:
        LISTENING.remove(listener_of)


def listeners(weight: Tensor) -> list[ProductListener]:
    """Return what listens to a call of a weight's product."""
    return [listener for ask in LISTENING.now if (listener := ask(weight)) is not None]
