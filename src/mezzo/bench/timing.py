"""Timing in turns, so that what disturbs the machine disturbs every contender alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Spread", "against", "copying", "in_turns", "seconds", "spread"]


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


def in_turns(
    calls: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    device: torch.device,
    repetitions: int,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """Time calls in turns.

    Args:
        calls: By name: what makes one ready, which is not timed, and the call.
        device: Whose work to wait for.
        repetitions: Rounds that count.
        warm_up: Rounds before, which compile what is to be compiled.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warm_up + repetitions):
        for name, (before, call) in calls.items():
            before()
            elapsed = seconds(call, device)
            if number >= warm_up:
                taken[name].append(elapsed)
    return taken


def copying(device: torch.device, num_bytes: int) -> Callable[[], object]:
    """Return a call that copies so many bytes, which moves twice as many: read and written."""
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
