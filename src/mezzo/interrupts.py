"""What comes between two lines: signals wait while a step writes; what threads share changes as a whole.

So Ctrl-C leaves a whole step behind.
"""

from __future__ import annotations

import signal
import threading

# What ``signal.signal`` and ``signal.getsignal`` call: these look each handler up in enumerations, 10 µs a block.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")  # Python 3.11 has no `class Shared[T]`

#: Signals that people, job queues and notebooks send, or that a timeout is made of.
_NAMES: Final = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_NUMBERS: Final = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
_NOTHING: Final = nullcontext()
_interrupt: Final[Callable[[int], None]] = interrupt_main  # type: ignore[assignment] # any number will do


def uninterrupted() -> AbstractContextManager[None]:
    """Hold back the signals that Python handles until a block is done, and have them handled then.

    Held are SIGINT, SIGTERM, SIGALRM, SIGHUP, SIGUSR1 and SIGUSR2, where their handlers are Python's. Such a handler
    runs in the main thread, between any two operations of Python code, and may raise. Around what writes a step it is
    called once the step is whole; one that raises does so at the end of the block. Several signals of one kind count as
    one, as they do in the kernel.

    The block is whole or has not begun, wherever a signal comes. It is never put around a user's code: a loop that
    does not end could not be ended.

    Returns:
        A context manager for one ``with``. Inside another block, and in other threads, which no signal interrupts,
        it does nothing.

    **Cost**: 3 µs of host time, and nothing for a nested block.

    Example:
        >>> import signal
        >>> before = signal.signal(signal.SIGTERM, lambda *_: print("handled"))
        >>> with uninterrupted():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print("written")
        written
        handled
        >>> _ = signal.signal(signal.SIGTERM, before)
    """
    if _BLOCK.is_under_way or threading.get_ident() != threading.main_thread().ident:
        return _NOTHING
    return _BLOCK


class _Block(AbstractContextManager[None]):
    """The outermost block of the main thread: there is one of it, as there is one handler of each signal.

    A signal may come at each of these lines and end it with what its handler raises. So the block begins with one
    assignment, after all else is ready, and ends with one, before all else. Where it is not under way our handler
    calls the one of before at once: a handler of ours that was left behind changes nothing, and the next block puts it
    right.

    Attributes:
        is_under_way: Whether signals are held back now.
        numbers: The signals that have come in the block.
        before: The handlers that ours has replaced, by number.
        ours: Our handler, as one object, so that ``is`` recognises it.
    """

    def __init__(self) -> None:
        self.is_under_way = False
        self.numbers: list[int] = []
        self.before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.ours = self.hold

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self.is_under_way:
            self.before.get(number, signal.default_int_handler)(number, frame)
        elif number not in self.numbers:
            self.numbers.append(number)

    def __enter__(self) -> None:
        try:
            self.replace_handlers()  # a call: Python 3.13 has no jump of a loop, where signals come, inside this `try`
            self.numbers = []
            self.is_under_way = True
        except BaseException:
            self.restore()
            raise

    def __exit__(self, *_: object) -> None:
        numbers, waiting = self.numbers, map(_interrupt, ())
        try:
            # Two assignments with nothing in between. Whatever raises below, ``waiting`` knows what is left to handle.
            waiting, self.is_under_way = map(_interrupt, numbers), False
            self.restore()
            if numbers:
                self.handle(waiting, len(numbers))
        finally:
            if self.before:
                self.restore()
            if numbers:
                self.handle(waiting, len(numbers))

    def handle(self, waiting: Iterator[None], count: int) -> None:
        """Raise so many signals, one after another, although their handlers may raise."""
        try:
            next(waiting, None)  # one function of C's takes it and has it come; its handler is called behind that
        finally:
            if count > 1:
                self.handle(waiting, count - 1)

    def replace_handlers(self) -> None:
        """Replace each handler that is a Python function by ours."""
        for number in _NUMBERS:
            handler = getsignal(number)
            if callable(handler) and handler is not self.ours:
                self.before[number] = handler  # first: ours may be called as soon as it is there
                set_handler(number, self.ours)

    def restore(self) -> None:
        """Restore the handlers of before."""
        for number in tuple(self.before):
            if getsignal(number) is self.ours:
                set_handler(number, self.before[number])
            self.before.pop(number, None)


_BLOCK: Final = _Block()


class Members(Generic[T]):
    """An ordered collection that threads, signal handlers and finalizers change while other code iterates over it.

    Each change makes a new tuple, so that an iteration goes on over the former one. A list would change under it:
    ``tuple(a_list)`` collects garbage in Python 3.11, and the process dies where a finalizer shortens the list.

    Attributes:
        now: The present members.
    """

    def __init__(self) -> None:
        self.now: tuple[T, ...] = ()
        self._changing = threading.RLock()

    def add(self, member: T) -> None:
        """Add a member at the end."""
        self._change(lambda before: (*before, member))

    def remove(self, removed: T) -> None:
        """Remove a member, if it is present."""
        self._change(lambda before: tuple([member for member in before if member is not removed]))

    def _change(self, changed: Callable[[tuple[T, ...]], tuple[T, ...]]) -> None:
        with self._changing:
            while True:
                members = self.now
                new_members = changed(members)
                if self.now is members:  # no garbage that was collected meanwhile has changed them
                    self.now = new_members
                    return
