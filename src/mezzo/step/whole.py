"""Work that happens whole or not at all, although Python can raise an interrupt between any two of its lines.

An interrupt (``KeyboardInterrupt``, or what a signal's handler raises) comes between two operations of Python code, and
never inside a function written in C. So what is written is written by such functions, several of them called from C
in one go, and everything else only computes what to write, and can be computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from typing import TypeAlias

__all__ = ["Call", "Piece", "Work", "at_once"]

#: A function of C's with its arguments, such as ``partial(tensor.copy_, value)``.
Call: TypeAlias = Callable[[], object]
#: Returns what is to be called in one go. It is asked again if an interrupt came before that, so that whatever it does
#: by itself must be right to do twice.
Piece: TypeAlias = Callable[[], Iterable[Call]]


def at_once(*calls: Call) -> None:
    """Call functions of C's with nothing in between where Python could raise an interrupt."""
    deque(map(call, calls), maxlen=0)


class Work:
    """Pieces of work in order, all of which are done before an interrupt goes on.

    Args:
        *pieces: The pieces.
    """

    __slots__ = ("_begun", "_enter", "_first", "_left")

    def __init__(self, *pieces: Piece) -> None:
        self._left = deque(pieces)
        self._begun: list[None] = []  # a list, which C can fill and clear
        self._enter = partial(self._begun.append, None)
        self._first: Piece | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._left

    @property
    def is_half_way(self) -> bool:
        """Whether something was done, or begun, and something is left."""
        return bool(self._begun) or (self._first is not None and not self.is_done and self._first is not self._left[0])

    def enter(self) -> None:
        """From here on a piece is not to be repeated."""
        self._enter()

    def leave(self) -> None:
        """Nothing of a piece has happened yet, or all of it."""
        self._begun.clear()

    def add(self, *pieces: Piece) -> None:
        """Have more pieces to do, all of these or none."""
        self._left.extend(pieces)

    def drop(self) -> None:
        """Do no more, and know of nothing."""
        self._left.clear()
        self._begun.clear()
        self._first = None

    def run(self) -> None:
        """Do what is left."""
        if self._first is None and self._left:
            self._first = self._left[0]
        while self._left:
            at_once(self._enter, *self._left[0](), self._left.popleft, self._begun.clear)
        self._first = None  # which holds gradients

    def finish(self) -> None:
        """Do what is left, to its end whatever is raised on the way, which then goes on.

        An error that comes again, or out of the calls of a piece, leaves the rest undone: :attr:`is_half_way` tells.
        """
        try:
            self.run()
        except BaseException:
            if not self._begun:
                self.run()
            raise
