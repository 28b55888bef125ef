"""The benchmark of placements: what it counts is the cut's gain, what it runs is what it says, and what came out."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import mezzo
import plan as bench

POLICY = mezzo.Policy.parse(bench.POLICY)
RESULT = json.loads(max((Path(bench.__file__).parent / "results").glob("plan-cpu-*.json")).read_text())


def tiny(size):
    return bench.Block(32, 2), (torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 32))


@pytest.fixture
def tiny_model(monkeypatch):
    monkeypatch.setattr(bench, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(bench, "KERNELS", {"eager": "eager", "compiled": "aot_eager"})


def test_on_the_chain_the_cut_is_cheaper_than_each_of_the_others():
    counts = bench.counted("conv–log chain", "small", POLICY)
    eager = counts["eager"]
    assert all(eager[bench.CUT]["cost"] < sums["cost"] for whose, sums in eager.items() if whose != bench.CUT)
    compiled = counts["compiled"]
    assert all(compiled[bench.CUT]["cost"] <= sums["cost"] for sums in compiled.values())


def test_the_placement_of_autocast_runs_as_autocast_does(tiny_model):
    with mezzo.autocast("O0"):
        mine = bench.step_of("tiny", "small", bench.Placed(POLICY, bench.PLACEMENTS[bench.AUTOCAST], "eager"))
        rival = bench.step_of("tiny", "small", region=lambda: torch.autocast(bench.DEVICE, dtype=POLICY.dtype))
        assert all(map(torch.equal, bench.gradients(mine), bench.gradients(rival)))
        assert bench.error(bench.gradients(mine), bench.gradients(bench.step_of("tiny", "small"))) > 0


def test_an_error_is_that_of_the_worst_parameter():
    exact = [torch.tensor([3.0, 4.0]), torch.tensor([1.0]), torch.zeros(1)]
    assert bench.error([exact[0] * 1.5, exact[1] * 0.75, exact[2]], exact) == pytest.approx(0.5)


def test_the_command_writes_one_dated_file(tmp_path, monkeypatch, capsys, tiny_model):
    monkeypatch.setattr(bench, "Gpt", partial(bench.Gpt, layers=1, width=32, heads=2))
    monkeypatch.setattr(sys, "argv", ["plan.py", "--repetitions=2", f"--out={tmp_path}"])
    bench.main()
    (path,) = tmp_path.iterdir()
    assert f"written to {path}" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert set(written["counts"]["tiny"]["eager"]) == set(bench.PLACEMENTS)
    cases = {(row["kernels"], row["placement"]): row for row in written["rows"]}
    assert {("eager", "FP32"), ("compiled", bench.AUTOCAST), ("compiled", bench.CUT)} <= set(cases)
    assert cases["compiled", bench.AUTOCAST]["ratio"] == 1
    assert cases["eager", "FP32"]["gradient_error"] == 0 < cases["eager", bench.CUT]["gradient_error"]


# What was measured -----------------------------------------------------------------------------------------


def test_the_cut_was_never_dearer_than_another_placement():
    for counts in RESULT["counts"].values():
        for kernels in bench.KERNELS:
            cut, *others = (counts[kernels][whose]["cost"] for whose in (bench.CUT, *bench.PLACEMENTS))
            assert all(cut <= other * (1 + 1e-9) for other in others)


def test_gpt2_small_was_planned_within_two_seconds():
    assert max(RESULT["gpt2_small"][f"{kernels}_planning_s"] for kernels in bench.KERNELS) < 2


def test_every_model_was_measured_in_both_ways():
    assert {(row["model"], row["kernels"]) for row in RESULT["rows"]} == {
        (name, kernels) for name in bench.MODELS for kernels in bench.KERNELS
    }
