"""The host's time of a step: the line through it, turns, and the whole script on a device that computes nothing."""

from pathlib import Path

import numpy as np
import pytest

import host

SCRIPT = Path(host.__file__)


def test_a_line_is_what_any_step_takes_and_each_tensor():
    sizes, times = [20, 150, 600], [0.5, 1.3, 3.2]
    slope, base = np.polyfit(sizes, times, 1)
    assert host.line(sizes, times) == pytest.approx((base, 1e3 * slope))


def test_of_a_round_the_least_counts_and_each_is_first_in_turn():
    order, clock = [], iter(range(1000))

    def step(name):
        return lambda: order.append(name) or next(clock)

    taken = host.in_turns({"one": step("one"), "other": step("other")}, 2)
    first = 2 * host.WARM_UP
    assert order[first:] == ["other"] * host.STEPS + ["one"] * 2 * host.STEPS + ["other"] * host.STEPS
    starts = [1e3 * (first + turn * host.STEPS) for turn in range(4)]
    assert taken == {"one": starts[1:3], "other": [starts[0], starts[3]]}
