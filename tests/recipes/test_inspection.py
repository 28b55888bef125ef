"""A recorded run: the same training, its evidence whole however it ends, and nothing written for what is refused."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import PolicyError
from mezzo.explanation import Explanation
from mezzo.numerics import exponent_histogram, read_evidence
from mezzo.recipes import compare, inspect
from mezzo.recipes.inspection import recorded
from mezzo.recipes.run_directory import RunDirectory
from mezzo.report import page, read

pytestmark = pytest.mark.usefixtures("emulating")


class Stop:
    """Raises at one moment of the run."""

    def __init__(self, error, step):
        self.error, self.step = error, step

    def started(self, policy, steps):
        if self.step == 0:
            raise self.error

    def stepped(self, record):
        if record.step == self.step:
            raise self.error

    def ended(self, result):
        pass


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"])
def test_recording_does_not_change_the_training(tiny, tmp_path, policy):
    inspection = inspect(tiny, policy, every=3, out=tmp_path / "inspected")
    compare(tiny, [policy], out=tmp_path / "compared")
    runs = [read(tmp_path / name).series[str(mezzo.Policy.of(policy))] for name in ("inspected", "compared")]
    assert runs[0] == runs[1]
    assert [step.step for step in inspection.evidence.steps] == [1, 4, 7, 10, 13, 16, 19]
    assert inspection.evidence.header.policy == str(mezzo.Policy.of(policy))
    assert not inspection.evidence.is_partial


def test_the_directory_holds_what_is_returned(tiny, tmp_path):
    inspection = inspect(tiny, "O1,dtype=bfloat16", steps=4, every=2, out=tmp_path / "run")
    names = {each.name for each in (tmp_path / "run").iterdir()}
    assert names == {"evidence.jsonl", "explanation.json", "metrics.jsonl", "found.policy", "summary.json"}
    written = read_evidence(tmp_path / "run")
    assert written.header == inspection.evidence.header
    assert [step.step for step in written.steps] == [1, 3]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["every"] == 2
    assert Explanation.from_json((tmp_path / "run" / "explanation.json").read_text()) == inspection.explanation
    assert inspection.explanation.policy == "O1,dtype=bfloat16"


def test_without_a_directory_all_evidence_is_kept(tiny, tmp_path):
    inspection = inspect(tiny, steps=40, every=1)
    assert [step.step for step in inspection.evidence.steps] == list(range(1, 41))
    weights = tiny.build(0)[2].weight
    recorded_one = inspection.evidence.histogram("weights", "2", step=1, name="weight")
    assert recorded_one.total == weights.numel()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step, held", [(0, []), (1, [1]), (5, [1, 3, 5])])
def test_ctrl_c_sums_up_what_there_is(tiny, tmp_path, step, held):
    # An older whole run lies there: nothing of it may be taken for the new one.
    inspect(tiny, steps=3, every=1, out=tmp_path)
    inspection = inspect(tiny, steps=9, every=2, out=tmp_path, overwrite=True, watcher=Stop(KeyboardInterrupt(), step))
    assert inspection.run.interrupted
    assert [each.step for each in inspection.evidence.steps] == held
    run = read(tmp_path)
    assert run.summary["interrupted"]
    assert len(run.series["O0"].step if run.series else []) == step
    assert not [each.name for each in tmp_path.iterdir() if each.name.endswith(".partial")]
    assert (tmp_path / "evidence.jsonl").exists() == bool(held)
    if held:
        assert read_evidence(tmp_path).is_partial
    assert "This report is partial" in page(tmp_path).read_text()


def test_another_error_leaves_what_there_is_and_gives_the_model_back(tiny, tmp_path):
    models = []
    watched = dataclasses.replace(tiny, build=lambda seed: models.append(tiny.build(seed)) or models[-1])
    with pytest.raises(ZeroDivisionError):
        inspect(
            watched, "O2,dtype=bfloat16", steps=9, every=2, out=tmp_path / "run", watcher=Stop(ZeroDivisionError(), 4)
        )
    names = {each.name for each in (tmp_path / "run").iterdir()}
    assert names == {
        f"{name}.partial" for name in ("summary.json", "metrics.jsonl", "evidence.jsonl", "explanation.json")
    }
    assert [step.step for step in read_evidence(tmp_path / "run").steps] == [1, 3]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in models[-1].modules())
    assert "The process ended before the run was summed up" in page(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"policy": "O9"}, "unknown level 'O9'"),
        ({"steps": 0}, "steps must be a positive integer"),
        ({"every": 0}, "every is 0, not a number of steps"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(tiny, tmp_path, options, complaint):
    with pytest.raises(PolicyError, match=complaint):
        inspect(tiny, out=tmp_path / "run", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_replaced_only_when_asked(tiny, tmp_path):
    inspect(tiny, steps=1, out=tmp_path)
    with pytest.raises(PolicyError, match="the run directory already holds a run"):
        inspect(tiny, steps=1, out=tmp_path)


def test_any_loop_with_a_session_can_be_recorded(tmp_path):
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, "O0")

    def loop():
        for _ in range(3):
            amp.backward(model(torch.ones(2, 4)).square().sum())
            amp.step()
            amp.zero_grad()

    directory = RunDirectory(tmp_path / "run")
    evidence, interrupted = recorded(model, loop, every=1, directory=directory, kinds=("weights",))
    directory.close()
    amp.close()
    assert not interrupted
    assert [step.step for step in evidence.steps] == [1, 2, 3]
    (weight,) = (each for each in evidence.steps[0].tensors if each.name == "weight")
    assert weight.histogram.numbers == exponent_histogram(before).numbers
    assert read_evidence(tmp_path / "run").num_steps == 3
