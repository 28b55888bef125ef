"""The host's time of a step: the line through it, turns, and the whole script on a device that computes nothing."""

import json
import os
import subprocess
import sys
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


@pytest.mark.slow
def test_the_script_measures_every_case(tmp_path):
    if (reason := host.building.obstacle()) is not None:
        pytest.skip(reason)
    asked = [sys.executable, str(SCRIPT), "--tensors", "2", "4", "--rounds", "1", "--out", str(tmp_path)]
    folders = [str(SCRIPT.parents[1] / "src"), str(SCRIPT.parent)]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(asked, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    (file,) = tmp_path.glob("host-cpu-*.json")
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["rows"]] == list(host.CASES)
    assert all(row["ratio"] > 0 and len(row["mezzo_ms"]) == len(row["rival_ms"]) == 2 for row in result["rows"])
