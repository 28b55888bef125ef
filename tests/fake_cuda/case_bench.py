"""Parts of ``make gpu`` where nothing is computed: their code for CUDA runs, and figures mean nothing."""

import importlib
import sys
import types

import pytest
import torch

from mezzo import checkup
from stepping import contenders, timing

from .machine import Graph


class Event:
    """An event of a clock that goes on by a millisecond each time one is recorded."""

    now = 0

    def record(self):
        Event.now += 1
        self.at = Event.now

    def query(self):
        return False

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def measured(machine, monkeypatch):
    """Measure a part on the fake device, dry."""
    gpu = {name: importlib.import_module(f"gpu.{name}") for name in ("plan", "parts", "steps", "ceilings", "variants")}
    monkeypatch.setattr(timing, "_event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU that computes nothing")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(contenders.torch, "Generator", lambda _: types.SimpleNamespace(manual_seed=lambda seed: None))
    captured = importlib.import_module("mezzo.session.capture")
    monkeypatch.setattr(captured, "CudaGraph", lambda device: Graph(machine))

    def on_device(call, device):
        with machine.watched() as record:
            call()
        large = {name: [100.0] * record.triton.count(name) for name in record.triton}
        return {**large, **{name: [2.0] * record.small.count(name) for name in record.small}}

    for name in ("steps", "variants"):
        monkeypatch.setattr(gpu[name], "on_device", on_device)
    monkeypatch.setattr(gpu["variants"], "_same", lambda one, other: True)
    for module in (gpu["steps"], importlib.import_module("stepping.bench")):
        monkeypatch.setattr(module, "shapes", lambda name: [(64, 64), (64,)])
    plan = gpu["plan"].Plan(device=torch.device("cuda", 0), dry=True)
    yield lambda part: gpu["parts"].PARTS[part].measure(plan)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpu"]:
        del sys.modules[name]


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_steps_are_timed_by_events_and_their_kernels_listed(measured, dtype):
    results = measured(f"step-{dtype}")
    assert results["device"] == "cuda"
    assert all(row["step_ms"] == 1.0 and row["ahead"] for row in results["rows"])
    split, moments, codes = results["kernels"]
    assert split["large_us"] == {"squares": 100.0, "roots": 100.0, "adamw_split": 100.0, "adamw_plain": 100.0}
    assert 0 < split["small"] < 80
    assert split["small_us"] == 2 * split["small"]
    assert moments["name"].endswith("BF16 moments")
    assert codes["name"].endswith("int8 moments")
    assert codes["large_us"] == split["large_us"]


def test_variants_are_compiled_for_the_device(measured):
    rows = measured("variants")
    assert not [row for row in rows if "error" in row]
    assert {row["us"] for row in rows} == {100.0}
    assert len(rows) == 4


@pytest.mark.parametrize("dtype", ["float16"])
def test_the_doctor_s_steps_run_and_read_nothing(machine, dtype):
    reads = []

    def clock(step):
        with machine.watched() as record:
            step()
        reads.append(record.reads)
        return 1.0

    speeds = checkup.speeds(torch.device("cuda"), dtype, widths=(8,), repetitions=1, clock=clock)
    assert speeds == {8: checkup.Speed(median=1.0, p10=1.0, p90=1.0)}
    assert reads[-2:] == [[], []]
