"""Timing in turns, ratios pair by pair, the dated file, and what the scripts in benchmarks/ make of them."""

import json
import sys
from pathlib import Path

import pytest
import torch

from harness import in_turns, write_dated
from stepping import timing
from stepping.facts import facts
from stepping.timing import Spread, against

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


class Clock:
    """A clock that only work moves."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def work(self, *seconds):
        """Return a call that takes so long, each time the next of these, and the last of them from then on."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    import harness

    monkeypatch.setattr(harness, "DEVICE", "cpu")
    return harness


def test_what_makes_ready_and_the_first_rounds_do_not_count(clock):
    calls = {"a": (clock.work(100.0), clock.work(9.0, 9.0, 1.0, 2.0)), "b": (clock.work(100.0), clock.work(3.0))}
    assert in_turns(calls, CPU, repetitions=3, warm_up=2) == {"a": [1.0, 2.0, 2.0], "b": [3.0, 3.0, 3.0]}


def test_ratios_are_taken_pair_by_pair():
    # The machine is disturbed in every second pair, and both alike: each ratio is 2.
    assert against([2.0, 20.0, 2.0, 20.0], [1.0, 10.0, 1.0, 10.0]) == Spread(median=2.0, p10=2.0, p90=2.0)


def test_a_pair_of_loops(clock, harness):
    comparison = harness.paired(clock.work(*[50.0] * 3, *[1.0] * 8, 3.0), clock.work(2.0), repetitions=10)
    assert comparison == {"ratio": 0.5, "ratio_p10": 0.5, "ratio_p90": 1.5, "mezzo_ms": 1000.0, "rival_ms": 2000.0}


def test_a_dated_file_replaces_the_one_before(tmp_path):
    result = {**facts(CPU), "value": "10–90 %"}
    target = write_dated(tmp_path / "new", "step", result)
    assert target.name == f"step-cpu-{result['date']}.json"
    assert write_dated(tmp_path / "new", "step", [result, result]) == target
    assert json.loads(target.read_text()) == [result, result]
    assert "10–90 %" in target.read_text()
    assert list(target.parent.iterdir()) == [target]  # what was written beside was renamed


def test_on_a_cpu_it_is_the_host_s_clock(clock):
    assert timing.Behind(CPU)(clock.work(2.0)) == timing.Taken(seconds=2.0, host_seconds=2.0, ahead=False)
