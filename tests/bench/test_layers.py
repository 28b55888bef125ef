"""For which layers a format pays: real steps under an injected clock, and a child that may die."""

import importlib
import json
import subprocess
import sys

import pytest
import torch

from mezzo.bench import children, layers
from mezzo.bench.layers import LayerSteps, Spread, layer_steps, measured


def speed(median, spread=0.05):
    return Spread(median=median, p10=median * (1 - spread), p90=median * (1 + spread))


def test_steps_are_timed_in_turns_and_a_ratio_above_one_is_faster():
    """FP32 takes 2 s a step here, the format 1 s at width 8 and 4 s at width 16; warming up does not count."""
    durations = {8: [2.0, 1.0], 16: [2.0, 4.0]}
    calls = []

    def clock(step):
        step()
        width = 8 if len(calls) < 2 * (3 + 2) else 16
        calls.append(width)
        return durations[width][(len(calls) - 1) % 2]

    found = measured("cpu", torch.bfloat16, widths=(8, 16), repetitions=2, clock=clock)
    assert {width: each.median for width, each in found.items()} == {8: 2.0, 16: 0.5}
    assert calls == [8] * 10 + [16] * 10


def test_a_step_trains_as_fp32_does():
    """The step that is timed is a whole one: losses fall, and in both alike."""
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    nets = [layers._net(8, torch.device("cpu")) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    before = [each.clone() for each in nets[0].parameters()]
    for step in (layers._plain_step(nets[0], x), layers._session_step(nets[1], x, "O1,dtype=bfloat16,emulate=true")):
        step()
    for old, plain, low in zip(before, nets[0].parameters(), nets[1].parameters(), strict=True):
        assert not torch.equal(old, plain)
        torch.testing.assert_close(old - low, old - plain, rtol=0.1, atol=1e-6)


@pytest.mark.parametrize(
    "speeds, words",
    [
        (
            {128: speed(1.2), 2048: speed(3.6)},
            "bfloat16 pays: training steps 1.2× as fast as in FP32 at width 128, 3",
        ),
        (
            {128: speed(0.66), 2048: speed(2.4)},
            "bfloat16 pays at width 2048 only: training steps 0.66× as fast as",
        ),
        ({128: speed(1.4), 2048: speed(0.9)}, "bfloat16 pays at width 128 only"),
        ({128: speed(0.5), 2048: speed(0.9)}, "bfloat16 saves no time here: training steps 0.5× as fast as in FP32"),
        ({128: speed(1.01), 2048: speed(1.5)}, "; unclear at width 128, where steps were now faster, now slower"),
        ({}, "bfloat16: no training step could be timed; it died"),
    ],
)
def test_the_verdict(speeds, words):
    assert words in LayerSteps(speeds=speeds, trouble="" if speeds else "it died").verdict("bfloat16")


def test_json_and_back():
    steps = LayerSteps(speeds={128: speed(0.66), 2048: speed(2.4)})
    assert LayerSteps.from_dict(json.loads(json.dumps(steps.to_dict()))) == steps


@pytest.fixture
def child(monkeypatch):
    """A child that tells of formats until one kills it, and what each was asked."""
    asked = []

    def ask(module, arguments, told, *, timeout_s):
        assert callable(importlib.import_module(module).main)
        asked.append(arguments)
        for name in arguments[1:]:
            if name == "float16":
                return "the process that tried it ended with exit code -4"
            told([name, LayerSteps(speeds={128: speed(2.0)}).to_dict()])
        return ""

    monkeypatch.setattr(layers, "ask", ask)
    return asked


def test_a_format_that_kills_its_process_is_named_and_the_others_are_timed(child):
    found = layer_steps("cpu", [torch.bfloat16, torch.float16, torch.float8_e5m2])
    assert found[torch.bfloat16] == found[torch.float8_e5m2] == LayerSteps(speeds={128: speed(2.0)})
    assert found[torch.float16] == LayerSteps(speeds={}, trouble="the process that tried it ended with exit code -4")
    assert child == [["cpu", "bfloat16", "float16", "float8_e5m2"], ["cpu", "float8_e5m2"]]


def test_a_child_that_cannot_be_started(monkeypatch):
    def popen(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", popen)
    found = layer_steps("cpu", [torch.bfloat16, torch.float16])
    assert {each.trouble for each in found.values()} == {
        "a child process could not be started: no more processes"
    }  # fmt: skip


def test_what_mezzo_refuses_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    layers.main("cpu", "float64")
    name, said = json.loads(capsys.readouterr().out.removeprefix(children._PREFIX))
    assert name == "float64"
    assert said["speeds"] == {}
    assert "float64" in said["trouble"]


@pytest.mark.slow  # half a minute on a busy machine
def test_the_real_child():
    found = layer_steps("cpu", [torch.bfloat16])[torch.bfloat16]
    assert set(found.speeds) == set(layers.WIDTHS)
    assert found.trouble == ""
    assert sys.executable
