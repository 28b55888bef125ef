"""A script in FP32 and under policies: what is run, what is read, what is kept, what is refused."""

import fcntl
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mezzo.cast.device import decide
from mezzo.errors import PolicyError, StateError
from mezzo.policy import Policy
from mezzo.script import Program, comparison
from mezzo.script.comparison import SUMMARY, ablations, compare, default_policies, parse_policies

from ..support.refusals import refused
from .processes import HERE, InThisProcess

pytestmark = pytest.mark.usefixtures("emulating")

#: A stranger's script, which writes down each time that it runs.
TRAIN = """
import argparse, os, sys, torch

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
with open("ran.txt", "a") as file:
    file.write(f"{args.seed} ")
torch.manual_seed(args.seed)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4 * args.epochs):
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"test loss: {loss.item():.6f} nats")
"""
POLICIES = ("O1,bf16", "O2,bf16")


@pytest.fixture(scope="session")
def first(tmp_path_factory, emulated):
    """One comparison for all: (its folder, what it came to, the words of each run)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decide._reports, "cpu", emulated)
        folder = tmp_path_factory.mktemp("comparison")
        patch.chdir(folder)
        patch.setattr(comparison, "subprocess", HERE)
        InThisProcess.started.clear()
        (folder / "train.py").write_text(TRAIN)
        result = compare(Program(name="train.py"), POLICIES, out=Path("out"), seeds=2)
        return folder, result, list(InThisProcess.started)


@pytest.fixture
def here(first, tmp_path, monkeypatch):
    """A copy of that folder to go on in: (compare with other options, seeds of the runs that this took)."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "subprocess", HERE)
    Path("ran.txt").unlink()

    def again(*policies, arguments=(), **options):
        program = Program(name="train.py", arguments=arguments)
        return compare(program, policies or POLICIES, out=Path("out"), **{"seeds": 2} | options)

    return again, lambda: Path("ran.txt").read_text().split() if Path("ran.txt").exists() else []


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Compare a script that is a change of the stranger's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "subprocess", HERE)

    def run(*changes, policies=POLICIES[:1], **options):
        text = TRAIN
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        Path("train.py").write_text(text)
        return compare(Program(name="train.py"), policies, out=Path("out"), **options)

    return run


def losses_of(run):
    return [json.loads(line)["loss"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_runs_are_those_of_the_script_and_numbers_those_of_its_files(first, monkeypatch, capsys):
    folder, finished, started = first
    monkeypatch.chdir(folder)
    policies = ["O0", "O1,dtype=bfloat16", "O2,dtype=bfloat16"]
    assert [(run.seed, run.policy) for run in finished.runs] == [
        (seed, policy) for seed in (0, 1) for policy in policies
    ]
    assert [words[words.index("--policy") + 1] for words in started] == policies * 2
    assert [words[-3:] for words in started] == [["train.py", "--seed", str(seed)] for seed in (0, 0, 0, 1, 1, 1)]
    assert (folder / "ran.txt").read_text().split()[:6] == list("000111")
    assert (finished.seeds, finished.script, finished.interrupted) == (2, "train.py", False)
    assert (finished.metric.name, finished.metric.unit, finished.metric.better) == ("test loss", "nats", "lower")
    for run in finished.runs:
        assert run.metric == pytest.approx(losses_of(run)[-1], abs=1e-6)
        assert (run.folder / "output.txt").read_text() == f"test loss: {run.metric:.6f} nats\n"
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "1"])
    runpy.run_path("train.py", run_name="__main__")  # by itself
    alone = capsys.readouterr().out
    base = next(run for run in finished.runs if run.seed == 1)
    assert base.metric == pytest.approx(float(alone.split()[2]), rel=1e-4)
    for run in finished.runs:
        losses = losses_of(run)
        assert (list(run.losses), run.steps) == (losses, 12)
        assert run.loss == pytest.approx(sum(losses[-2:]) / 2)  # a tenth of twelve, rounded up
        assert (run.code, run.skipped, run.nonfinite) == (0, 0, 0)
    # 161 weights in FP32: they, their gradients, and two moments; a step count for each of four tensors
    assert base.held_bytes == 4 * 161 * 4 + 4 * 4
    assert [run.low_share for run in finished.runs[:3]] == [0.0, 1.0, 1.0]


def test_more_seeds_and_policies_run_alone(here):
    again, ran = here
    result = again("O2,bf16", "O1,bf16", "O1,fp16", seeds=3)
    assert ran() == ["0", "1", "2", "2", "2", "2"]
    assert len(result.runs) == 12


def test_a_run_that_was_killed_or_into_which_two_have_written_is_repeated_alone(here):
    again, ran = here
    folder = Path("out/O1,dtype=bfloat16-seed1")
    for number, damage in enumerate(("no summary", "no code", "killed", "written twice")):
        file = folder / SUMMARY
        summary = json.loads(file.read_text())
        match damage:
            case "no summary":
                file.unlink()
            case "no code":
                file.write_text(json.dumps({key: value for key, value in summary.items() if key != "code"}))
            case "killed":
                file.write_text(json.dumps({"code": -signal.SIGKILL}))
            case "written twice":
                metrics = folder / "metrics.jsonl"
                metrics.write_bytes(b"\0" * 40 + metrics.read_bytes())
        result = again()
        assert ran() == ["1"] * (number + 1), damage
        assert all(run.went_well for run in result.runs), damage
    assert again().runs == result.runs  # and what has finished is not
    assert len(ran()) == 4


def test_a_folder_of_another_script_is_refused_and_kept(here):
    again, ran = here
    for change, text, why in (
        ({"arguments": ("--epochs", "2")}, "", "with another arguments"),
        ({}, "print(1)\n", "with another text"),
        ({"steps": 5}, "", "with another steps"),
    ):
        Path("train.py").write_text(TRAIN + text)
        words = "out has results of train.py", why, "--overwrite to begin anew"
        with refused(PolicyError, *words, parts=[Path("out")]):
            again(**change)
        assert ran() == []
    again(steps=5, overwrite=True)
    assert ran() == list("000111")


def test_a_folder_belongs_to_one_comparison_at_a_time(here):
    again, ran = here
    folder = os.open("out", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(PolicyError, match="out is in use by another comparison"):
        again()
    os.close(folder)
    again()
    assert ran() == []


def test_results_of_another_verb_and_of_neighbours_are_not_touched(here):
    again, ran = here
    Path("out").rename("mine")
    other, neighbour = Path("out") / SUMMARY, Path("out/neighbour") / SUMMARY
    neighbour.parent.mkdir(parents=True)
    for file in (other, neighbour):
        file.write_text("{}")
    with pytest.raises(PolicyError, match="out has results of something else"):
        again()
    other.unlink()
    again("O1,bf16", seeds=None)
    again("O1,bf16", seeds=None, overwrite=True)
    assert neighbour.read_text() == "{}"
    assert len(ran()) == 4


def test_a_metric_by_words(here):
    again, ran = here
    assert again(metric="TEST LOSS").runs[0].metric == again().runs[0].metric
    assert ran() == []
    with pytest.raises(StateError, match="prints no number behind 'accuracy'") as error:
        again(metric="accuracy")
    assert "its last line is 'test loss: " in str(error.value)
    with pytest.raises(PolicyError, match="is a higher or a lower 'quality' better"):
        again(metric="quality")


def test_without_a_metric_line_it_is_the_training_loss(ran):
    result = ran(('print(f"test loss: {loss.item():.6f} nats")', 'print("done in 3 s")'), steps=5)
    assert [run.steps for run in result.runs] == [5, 5]
    assert result.metric.name == "training loss"
    assert [run.metric for run in result.runs] == [run.loss for run in result.runs]
    assert result.seeds is None


def test_a_policy_at_which_mezzo_alarms_has_not_failed(ran):
    result = ran(policies=["O1,bf16,fp32_module=0,fp32_module=2"])
    assert [(run.code, run.low_share) for run in result.runs] == [(0, 0.0)] * 2


def test_a_policy_under_which_the_loss_diverges(ran):
    result = ran((".square().mean()", ".mul(1e4).square().mean()"), policies=("O3,fp16,loss_scale=none",))
    assert math.isfinite(result.runs[0].loss)
    assert not math.isfinite(result.runs[1].loss)


def test_a_policy_that_fails_by_itself_ends_nothing(ran):
    failing = 'if model[0].weight.dtype != torch.float32: raise ValueError("not low")'
    change = ("    optimizer.zero_grad()\n", f"    {failing}\n    optimizer.zero_grad()\n")
    result = ran(change, policies=("O3,bf16", "O1,bf16"))
    assert [run.code for run in result.runs] == [0, 1, 0]
    assert result.runs[1].metric is None
    assert "ValueError: not low" in (result.runs[1].folder / "errors.txt").read_text()


REFUSED = {
    "never trains": (("    optimizer.step()\n", ""), {}, PolicyError, "train.py never trains"),
    "an error of its own": (("    loss.backward()\n", '    raise KeyError("mine")\n'), {}, StateError,
        "train.py ended with exit code 1 in FP32"),
    "the code of an alarm": (('print(f"test loss: {loss.item():.6f} nats")', "sys.exit(4)"), {}, StateError,
        "train.py ended with exit code 4 in FP32"),
    "no --seed": (('parser.add_argument("--seed", type=int, default=0)', "parser.set_defaults(seed=0)"), {"seeds": 2},
        PolicyError, "train.py takes no --seed"),
    "a seed that changes nothing": (("torch.manual_seed(args.seed)", "torch.manual_seed(0)"), {"seeds": 2}, PolicyError,
        "takes no --seed that changes anything"),
    "a later seed that fails": (("torch.manual_seed", "assert args.seed < 1\ntorch.manual_seed"), {"seeds": 2},
        StateError, "ended with exit code 1 in FP32 with --seed 1"),
    "input": (("torch.manual_seed", "input()\ntorch.manual_seed"), {}, StateError, "ended with exit code 1 in FP32"),
}  # fmt: skip
SAID = {
    "an error of its own": "KeyError: 'mine'",
    "no --seed": "unrecognized arguments: --seed 0",
    "a later seed that fails": "with --out out to try again: what has finished there stays",
    "a seed that changes nothing": "seeds 0 and 1 have the same losses in FP32",
}


def test_a_script_that_cannot_be_compared_is_refused_in_one_sentence(ran):
    for name, (change, options, error_class, message) in REFUSED.items():
        shutil.rmtree("out", ignore_errors=True)
        with pytest.raises(error_class) as error:
            ran(change, ("default=3", "default=1"), **options)
        assert message in str(error.value).splitlines()[0], name
        assert SAID.get(name, "") in str(error.value), name


def test_a_module_is_known_by_its_own_text_and_a_folder_by_its_main(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = Path("package")
    package.mkdir()
    for name in ("__init__", "train", "__main__"):
        (package / f"{name}.py").write_text("import nothing_of_this_name\n")
    programs = [
        Program(name="package.train", is_module=True),
        Program(name="package", is_module=True),
        Program(name="package"),
    ]
    assert [program.file.name for program in programs] == ["train.py", "__main__.py", "__main__.py"]


def test_policies_begin_with_fp32_and_ablations_are_three_of_o2():
    for texts, message in (
        (["O1,flaot16"], "float16"),
        (["O1,fp16", "O1,dtype=float16"], "listed twice"),
        (["O0"], "no policy to compare with FP32"),
        ([], "no policy to compare with FP32"),
    ):
        with refused(PolicyError, message):
            parse_policies(texts)
    assert [str(policy) for policy in parse_policies(["O1,bf16", "O0"])] == ["O0", "O1,dtype=bfloat16"]
    assert {*default_policies()} == {"O0", *(f"{o},dtype={d}" for o in ("O1", "O2") for d in ("float16", "bfloat16"))}
    without_scale, fixed, without_master = map(Policy.of, ablations())
    assert (str(without_scale.loss_scale), str(fixed.loss_scale)) == ("none", "constant(8)")
    assert without_master == Policy.O3("float16", keep_batchnorm_fp32=True)


@pytest.mark.slow
def test_a_signal_keeps_what_has_finished_and_is_passed_on(tmp_path):
    """To the process alone, as kill sends it: a terminal's Ctrl-C reaches both."""
    text = TRAIN.replace(
        "    optimizer.step()\n", '    optimizer.step()\n    time.sleep(600 if "O1" in marker else 0)\n'
    )
    text = text.replace("import argparse,", "import time, argparse,")
    mark = 'marker = "O1" if open("ran.txt").read().count(" ") > 1 else ""\n'
    (tmp_path / "train.py").write_text(text.replace("torch.manual_seed", f"{mark}torch.manual_seed", 1))
    words = [sys.executable, "-m", "mezzo", "compare", "--policies", "O1,bf16", "--out", "out", "train.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "out/O1,dtype=bfloat16/metrics.jsonl").exists() or not (
            (tmp_path / "out/O1,dtype=bfloat16/metrics.jsonl").read_text()
        ):
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Not run: O1,bf16." in out
    assert "the same command with --out goes on there" in err
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["interrupted"], [run["policy"] for run in summary["runs"]]) == (True, ["O0"])
    assert (tmp_path / "out/report.html").stat().st_size > 10_000
    assert (tmp_path / "out/curves.png").exists()


def test_runs_below_sixteen_bits_are_recorded_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "subprocess", HERE)
    middle = "torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)"
    text = TRAIN.replace("torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)", middle)
    Path("train.py").write_text(text)
    policies = ("O1,bf16", "O1,bf16,nvfp4_module=2")
    result = compare(Program(name="train.py"), policies, out=Path("out"))
    assert [len(run.operands) for run in result.runs] == [0, 0, 3]
    rows = {operand["role"]: operand for operand in result.runs[-1].operands}
    assert {operand["module"] for operand in rows.values()} == {"2"}
    assert rows["gradient"]["below_noise"] in (0.0, 1.0)  # the first of twelve steps alone is recorded
    assert rows["weight"]["below_noise"] is None
    assert {operand["steps"] for operand in rows.values()} == {1}
    assert "operands" not in result.runs[-1].to_dict(), "they stand once, by policy"
