"""Timing in turns, so that what disturbs the machine disturbs every contender alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

__all__ = ["Behind", "Spread", "Taken", "against", "copying", "nothing", "rounds", "seconds", "spread"]

T = TypeVar("T")

#: For how long a GPU is kept busy before a call that the host has not been timed at yet, and at most.
_FIRST_SLEEP: Final = 0.02
_LONGEST_SLEEP: Final = 0.05
#: Cycles a second of a GPU's clock, or more: it then sleeps too long rather than too short.
_CLOCK_HZ: Final = 2.0e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median, and what 80 % of the values lie between."""

    median: float
    p10: float
    p90: float


def spread(values: list[float]) -> Spread:
    """Return median and tenths of some values."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return Spread(median=statistics.median(ordered), p10=ordered[tenth], p90=ordered[-1 - tenth])


def against(mine: list[float], rival: list[float]) -> Spread:
    """Return the spread of the ratios of times taken in turns, pair by pair; below 1 is faster than the rival.

    Example:
        >>> against([1.0, 3.0, 2.0], [2.0, 2.0, 2.0])
        Spread(median=1.0, p10=0.5, p90=1.5)
    """
    return spread([a / b for a, b in zip(mine, rival, strict=True)])


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes, the device's work included."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How long a call took.

    Attributes:
        seconds: From its first work on the device to its last.
        host_seconds: Until the host had issued all of it.
        ahead: Whether the device had all of it before it began, so that ``seconds`` hold no wait for the host. On a
            CPU, which is its own device, and around a call that reads the device it has not.
    """

    seconds: float
    host_seconds: float
    ahead: bool


class Behind:
    """A clock for what the device works, whatever the host takes to issue it.

    From an idle GPU, a call of many small launches shows the host's time and not the device's. This clock lets the GPU
    sleep first, twice as long as the same call took the host the last time, and takes the device's time from events
    that it records itself. On a CPU it is :func:`seconds`.

    Args:
        device: Whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[Callable[[], object], float] = {}

    def __call__(self, call: Callable[[], object]) -> Taken:
        """Time one call."""
        if self._device.type != "cuda":
            taken = seconds(call, self._device)
            return Taken(seconds=taken, host_seconds=taken, ahead=False)
        with torch.cuda.device(self._device):
            first, last = _event(), _event()
            _wait(self._device)
            sleep = min(2 * self._host.get(call, _FIRST_SLEEP / 2), _LONGEST_SLEEP)
            torch.cuda._sleep(int(max(sleep, 1e-3) * _CLOCK_HZ))  # type: ignore[no-untyped-call]
            first.record()
            start = time.perf_counter()
            call()
            self._host[call] = time.perf_counter() - start
            ahead = not first.query()  # type: ignore[no-untyped-call]
            last.record()
            _wait(self._device)
        return Taken(seconds=first.elapsed_time(last) / 1e3, host_seconds=self._host[call], ahead=ahead)


def rounds(
    calls: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    clock: Callable[[Callable[[], object]], T],
    repetitions: int,
    warm_up: int = 3,
) -> dict[str, list[T]]:
    """Time calls in turns.

    Args:
        calls: By name: what makes one ready, which is not timed, and the call.
        clock: Times one call: :class:`Behind`, or :func:`seconds` of a device for what a user waits for.
        repetitions: Rounds that count.
        warm_up: Rounds before, which compile what is to be compiled.
    """
    taken: dict[str, list[T]] = {name: [] for name in calls}
    for number in range(warm_up + repetitions):
        for name, (before, call) in calls.items():
            before()
            found = clock(call)
            if number >= warm_up:
                taken[name].append(found)
    return taken


def nothing() -> None:
    """Make a call ready that needs nothing: it starts where the one before it ended."""


def copying(device: torch.device, num_bytes: int) -> Callable[[], object]:
    """Return a call that copies so many random bytes, which moves twice as many: read and written."""
    source = torch.rand(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
