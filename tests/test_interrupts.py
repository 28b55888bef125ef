"""A signal at each line, and each operation, of a block that holds signals back."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from mezzo import interrupts
from mezzo.interrupts import Members, uninterrupted

HELD = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
WATCHED = {__file__, interrupts.__file__, contextlib.__file__}


class Told(Exception):  # noqa: N818 - it is what a handler raises
    """A signal's handler has raised."""


class Handlers:
    """A handler of each signal, which notes the call and may raise."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.called: list[int] = []

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.called.append(number)
        if self.raises:
            raise Told(number)


@pytest.fixture(params=[False, True], ids=["returns", "raises"])
def handlers(request: pytest.FixtureRequest) -> Iterator[Handlers]:
    made = Handlers(raises=request.param)
    before = [(number, signal.signal(number, made)) for number in HELD]
    yield made
    for number, handler in before:
        signal.signal(number, handler)


def written(log: list[str], *inside: signal.Signals) -> None:
    """Write two lines, or none."""
    with uninterrupted():
        log.append("first")
        for number in inside:
            signal.raise_signal(number)
        with uninterrupted():
            log.append("second")


def events(call: Callable[[], Any], at: int | None, number: signal.Signals | None, *, by_operation: bool) -> int:
    """Raise a signal at one of the events of a call, or at none, and return how many events there are."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in WATCHED or frame.f_code is Handlers.__call__.__code__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = by_operation, True
        if event in ("line", "opcode"):
            seen += 1
            if seen - 1 == at and number is not None:
                signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen


def left_as_it_was(handlers: Handlers) -> bool:
    """Whether each handler is called as before, and nothing is held back any more."""
    if any(signal.getsignal(number) is not handlers for number in HELD):
        return False
    handlers.called.clear()
    for number in HELD:
        with contextlib.suppress(Told):
            signal.raise_signal(number)
    return handlers.called == HELD


@pytest.mark.parametrize("by_operation", [False, True], ids=["lines", "operations"])
def test_a_signal_anywhere_leaves_the_block_whole_or_not_begun(handlers: Handlers, by_operation: bool) -> None:
    count = events(lambda: written([]), None, None, by_operation=by_operation)
    assert count > 40
    befores = 0
    for at in range(count):
        log: list[str] = []
        with contextlib.suppress(Told):
            events(lambda log=log: written(log), at, signal.SIGTERM, by_operation=by_operation)  # type: ignore[misc]
        assert handlers.called == [signal.SIGTERM], at
        assert log in ([], ["first", "second"]), at
        befores += not log
        assert left_as_it_was(handlers), at
        handlers.called.clear()
    assert bool(befores) is handlers.raises  # it ends a block that has not begun


@pytest.mark.parametrize("by_operation", [False, True], ids=["lines", "operations"])
def test_two_signals_are_both_handled_wherever_the_second_comes(handlers: Handlers, by_operation: bool) -> None:
    count = events(lambda: written([]), None, None, by_operation=by_operation)
    for at in range(count):
        log: list[str] = []
        with contextlib.suppress(Told):
            call = lambda log=log: written(log, signal.SIGINT)  # noqa: E731
            events(call, at, signal.SIGUSR1, by_operation=by_operation)
        assert sorted(handlers.called) == ([signal.SIGINT, signal.SIGUSR1] if log else [signal.SIGUSR1]), at
        assert log in ([], ["first", "second"]), at
        assert left_as_it_was(handlers), at
        handlers.called.clear()


def test_all_that_came_in_a_block_is_handled_although_each_raises(handlers: Handlers) -> None:
    log: list[str] = []
    with pytest.raises(Told) if handlers.raises else contextlib.nullcontext():
        written(log, *HELD, *HELD)
    assert (log, handlers.called) == (["first", "second"], HELD)  # several of a kind count as one
    assert left_as_it_was(handlers)


def test_an_error_of_the_block_goes_on_behind_what_a_handler_raises() -> None:
    def write() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("its own")

    with pytest.raises(KeyboardInterrupt) as caught:
        write()
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_python_does_not_handle_are_left_alone() -> None:
    with uninterrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_left_behind_hands_on_and_the_next_block_puts_it_right() -> None:
    with uninterrupted():
        ours = signal.getsignal(signal.SIGINT)
    called: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: called.append(number))
    mine = signal.getsignal(signal.SIGINT)
    try:
        with uninterrupted():
            pass
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, ours)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert called == []
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_hold_nothing_back_and_need_no_handler(handlers: Handlers) -> None:
    inside, leave, log = threading.Event(), threading.Event(), []

    def work() -> None:
        with uninterrupted():
            inside.set()
            leave.wait(10)
            log.append("written")

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    assert all(signal.getsignal(number) is handlers for number in HELD)
    with pytest.raises(Told) if handlers.raises else contextlib.nullcontext():
        signal.raise_signal(signal.SIGTERM)
    assert handlers.called == [signal.SIGTERM]
    leave.set()
    thread.join(10)
    assert log == ["written"]


def test_members_stay_whole_whatever_garbage_and_threads_take_from_them():
    """Garbage that is collected in the midst of a change, or of a look, takes away what went with it."""

    class One:
        pass

    members, stop = Members(), threading.Event()
    kept = [object() for _ in range(5)]
    for member in kept:
        members.add(member)

    def churn():
        while not stop.is_set():
            one = One()
            one.itself = one  # garbage that only the collector finds
            members.add(weakref.ref(one, members.remove))

    before = gc.get_threshold()
    gc.set_threshold(1, 1_000_000, 1_000_000)  # of the youngest alone: all that torch has made takes long
    threads = [threading.Thread(target=churn) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(200):
            assert [member for member in members.now if member in kept] == kept
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        gc.set_threshold(*before)
    gc.collect()
    assert members.now == tuple(kept)
