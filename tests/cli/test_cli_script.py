"""Verbs on a script as it is: what its words mean, and what each verb makes of one."""

import contextlib
import json
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from mezzo.script.verbs import comparison, tuning

from mezzo import report
from mezzo.cli import main
from mezzo.policy import Policy
from mezzo.script import Program

from ..script.conftest import SCRIPTS

BF16 = "O1,dtype=bfloat16"
PLAIN = SCRIPTS / "plain.py"

NOISY = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(24):
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    if "crash" in sys.argv and model[0].weight.element_size() == 2 and step == 6:
        raise ValueError("the script's own")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9g}")
"""


MASKED = """
import torch
from torch.nn import functional


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qk, self.out = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        mask = torch.zeros(8, 8)
        mask[0] = -1e9
        self.register_buffer("mask", mask)

    def forward(self, x, *, scale):
        scores = self.qk(x) @ x.mT * scale
        return {"logits": self.out((scores + self.mask).softmax(-1) @ x).mean(1), "unused": scores}


torch.manual_seed(0)
batches = [(torch.randn(4, 8, 16), torch.randint(4, (4,))) for _ in range(3)]
model = Masked()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in batches * 2:
    functional.cross_entropy(model(x, scale=0.25)["logits"], y).backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


class Here:
    """A process that is none: the verb runs in this one, and what it prints goes to stderr."""

    def __init__(self, words, stdout):
        assert (words[:3], stdout) == ([sys.executable, "-m", "mezzo"], 2)
        with contextlib.redirect_stdout(sys.stderr), pytest.raises(SystemExit) as leaving:
            main(words[3:])
        self.code = leaving.value.code or 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait(self):
        return self.code


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(comparison, "subprocess", SimpleNamespace(Popen=Here))


@pytest.fixture
def noisy(tmp_path):
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return path


def losses(text):
    return [float(each) for each in re.findall("^loss (.*)$", text, re.MULTILINE)]


# The words ------------------------------------------------------------------------------------------------------


def test_options_behind_a_script_are_its_own_and_those_behind_a_recipe_mezzos(mezzo):
    code, out, _ = mezzo("explain", "--policy", BF16, SCRIPTS / "untrained.py", "--policy", "O9", "-m")
    assert (code, out) == (4, "__main__ ['--policy', 'O9', '-m'] True\n")
    code, out, err = mezzo("explain", "digits-cnn", "--policy", "O9")
    assert (code, out) == (2, "")
    assert "unknown level 'O9'" in err


def test_a_module_is_a_script_too(mezzo, tmp_path):
    (tmp_path / "own_training.py").write_text(PLAIN.read_text())
    assert mezzo("explain", "--policy", BF16, "-m", "own_training")[:2] == mezzo("explain", "--policy", BF16, PLAIN)[:2]


@pytest.mark.parametrize(
    "words, message",
    [
        (("absent.py",), "there is no script 'absent.py'"),
        (("absent",), "unknown recipe 'absent'"),
        (("digits-cnn", "train.py"), "digits-cnn takes no arguments: train.py"),
        (("docs-lm",), "docs-lm is a recipe, and there is a file of that name"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "compare", "inspect", "tune"])
def test_what_is_neither_recipe_nor_script_is_refused(mezzo, tmp_path, verb, words, message):
    (tmp_path / "docs-lm").touch()
    code, out, err = mezzo(verb, *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--against", "O2"),
        ("explain", "--html", "page.html"),
        ("compare", "--seed", "1"),
        ("compare", "--parallel", "ddp"),
        ("inspect", "--seed", "1"),
        ("tune", "--seed", "1"),
    ],
)
def test_options_that_only_a_recipe_has_are_refused(mezzo, tmp_path, words):
    code, out, err = mezzo(*words, PLAIN)
    assert (code, out) == (2, "")
    assert f"{words[1]}: not for a script" in err
    assert [*tmp_path.iterdir()] == []


# explain --------------------------------------------------------------------------------------------------------


def test_explaining_a_script_is_a_dry_run(mezzo):
    explained = mezzo("explain", "--policy", BF16, PLAIN)
    assert explained == mezzo("run", "--dry", "--policy", BF16, PLAIN)
    assert explained[0] == 0
    assert "run in BF16" in explained[1]


def test_every_row_of_a_script_can_be_asked_for(mezzo):
    few, full = (mezzo("explain", *words, "--policy", BF16, PLAIN)[1] for words in ((), ("--full",)))
    assert len(full.splitlines()) > len(few.splitlines())


def test_json_of_a_script_has_each_of_its_models(mezzo):
    code, out, _ = mezzo("explain", "--json", "--policy", BF16, SCRIPTS / "gan.py")
    assert code == 0
    found = json.loads(out)
    assert [each["model"] for each in found["models"]] == ["Sequential", "Sequential"]
    assert found["left_alone"] == {}


# compare --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_comparing_a_script_ends_with_a_verdict_a_table_and_a_run_directory(mezzo, noisy, tmp_path, capsys, pictures):
    code, out, err = mezzo("compare", "--policies", f"O2,dtype=bfloat16; {BF16}", "--out", "run", noisy)
    assert code == 0
    runpy.run_path(str(noisy), run_name="__main__")
    plain = capsys.readouterr().out
    printed = losses(err)
    assert printed[:24] == losses(plain)  # FP32 comes first, and is what the script is by itself
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["policies"] == ["O0", "O2,dtype=bfloat16", BF16]
    for place, row in enumerate(summary["rows"]):
        of_row = torch.tensor(printed[24 * place : 24 * place + 24])
        recorded = torch.tensor(report.read(tmp_path / "run").series[row["policy"]].loss)
        assert torch.allclose(recorded, of_row, rtol=1e-6)
        assert row["final_metric"] == pytest.approx(of_row[-3:].mean().item(), rel=1e-6)
        assert (row["steps"], row["skipped_steps"], row["status"]) == (24, 0, "finished")
        assert row["low_share"] == (place > 0)
        assert row["step_ms"]["median"] > 0
    first, params = summary["rows"][0], 8 * 16 + 16 + 16 + 1
    assert first["state_bytes"] == {
        "weights": 4 * params, "gradients": 4 * params, "remainders": 0, "optimizer": 8 * params + 4 * 4,
        "total": 16 * params + 16,
    }  # fmt: skip
    said, worst = out.splitlines()[0], max(row["difference"] for row in summary["rows"][1:])
    assert said.startswith("O0 reaches training loss ")
    assert ("no policy is worse than it" if worst <= 0 else f"the worst difference is {worst:+.1}"[:-1]) in said
    assert "that ran low" in out
    assert "24 steps\n" in out
    assert err.splitlines()[-1] == "run directory: run"
    assert {"curves.png", "report.html"} <= {each.name for each in (tmp_path / "run").iterdir()}


@pytest.mark.usefixtures("here")
def test_a_policy_under_which_a_script_fails_is_an_alert_with_the_scripts_own_traceback(mezzo, noisy):
    code, out, err = mezzo("compare", "--policies", "O2,dtype=bfloat16", noisy, "crash")
    assert code == 4
    assert "in <module>\n    raise ValueError(\"the script's own\")\nValueError: the script's own\n" in err
    assert "Training stopped after 6 steps." in out
    assert "The script ended with exit code 1." in out


@pytest.mark.usefixtures("here")
def test_json_of_a_comparison_is_all_that_stdout_has(mezzo, noisy):
    code, out, _ = mezzo("compare", "--policies", BF16, "--steps", "7", "--json", noisy)
    assert code == 0
    assert [row["steps"] for row in json.loads(out)["rows"]] == [7, 7]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name, code, message",
    [
        ("untrained", 2, "never trains: no optimizer over a module's parameters took a step"),
        ("functional_only", 2, "SGD over 1 tensor: no module holds what it updates"),
        ("crashes", 1, "crashes.py ended with exit code 1 in FP32"),
    ],
)
def test_a_script_without_a_run_in_fp32_cannot_be_compared(mezzo, tmp_path, name, code, message):
    found = mezzo("compare", "--policies", BF16, "--out", "run", SCRIPTS / f"{name}.py")
    assert found[:2] == (code, "")
    assert message in found[2]
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("here")
def test_a_policy_under_which_nothing_runs_low_is_an_alert(mezzo, noisy):
    code, out, _ = mezzo("compare", "--policies", f"{BF16},fp32_module=0,fp32_module=2", noisy)
    assert code == 4
    assert "Nothing ran in low precision." in out


@pytest.mark.slow
def test_each_run_of_a_script_is_a_process_of_its_own(mezzo, noisy):
    code, out, _ = mezzo("compare", "--policies", BF16, "--json", noisy)
    rows = json.loads(out)["rows"]
    assert (code, [row["policy"] for row in rows]) == (0, ["O0", BF16])
    assert rows[0]["final_loss"] != rows[1]["final_loss"]


# inspect --------------------------------------------------------------------------------------------------------


def test_inspecting_a_script_records_its_numbers_and_leaves_a_policy_that_it_runs_under(mezzo, noisy, tmp_path, capsys):
    code, out, err = mezzo("inspect", "--every", "4", "--steps", "10", "--out", "run", noisy)
    assert code == 0
    assert out.startswith("FP16 ")
    assert err.splitlines()[-1] == "run directory: run"
    runpy.run_path(str(noisy), run_name="__main__")
    plain = losses(capsys.readouterr().out)
    run = report.read(tmp_path / "run")
    assert run.series["O0"].loss == pytest.approx(plain[:10])
    assert [step.step for step in run.evidence.steps] == [1, 5, 9]
    assert run.evidence.histogram("weights", "0", step="all").total == 3 * (8 * 16 + 16)
    assert mezzo("run", "--policy", tmp_path / "run" / "found.policy", noisy)[0] == 0


def test_json_of_an_inspection_is_all_that_stdout_has(mezzo, noisy, tmp_path):
    code, out, _ = mezzo("inspect", "--json", "--steps", "6", "--policy", BF16, "--out", "run", noisy)
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_script_that_fails_while_it_is_inspected_leaves_a_partial_run_and_its_own_traceback(mezzo, noisy, tmp_path):
    code, out, err = mezzo("inspect", "--policy", "O2,dtype=bfloat16", "--out", "run", noisy, "crash")
    assert (code, out) == (1, "")
    trace = err[err.index("Traceback") :]
    assert trace.count("  File ") == 1
    *_, last, said = trace.splitlines()
    assert last == "ValueError: the script's own"
    assert said == f"{noisy} failed; what was recorded until then is in run: mezzo report run"
    assert not (tmp_path / "run" / "summary.json").exists()
    code, out, _ = mezzo("report", "run")
    assert (code, "(O2,dtype=bfloat16: 6 steps)" in out) == (0, True)


@pytest.mark.parametrize("name", ["untrained", "functional_only"])
def test_a_script_that_never_trains_cannot_be_inspected(mezzo, tmp_path, name):
    code, out, err = mezzo("inspect", "--out", "run", SCRIPTS / f"{name}.py")
    assert (code, out) == (2, "")
    assert "never trains: no optimizer over a module's parameters took a step" in err
    assert not (tmp_path / "run").exists()


# tune -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("emulating", "here")
def test_tuning_a_script_finds_what_tuning_its_model_finds_and_the_script_runs_under_it(mezzo, tmp_path):
    (tmp_path / "masked.py").write_text(MASKED)
    code, out, err = mezzo("tune", "--no-compare", "--dtype", "fp16", "masked.py")
    assert code == 0
    assert out.startswith("float16: 1 of ")
    assert err.splitlines()[-1] == "policy file: masked-float16.policy"
    assert "done" not in out + err  # it ended once three calls had gradients
    assert [str(rule) for rule in Policy.load("masked-float16.policy").rules] == ["fp32=softmax"]
    code, out, err = mezzo("run", "--policy", "masked-float16.policy", "masked.py")
    assert (code, out) == (0, "done\n")
    assert "  steps        6, none skipped" in err


def test_trials_begin_with_the_scripts_own_gradients(noisy, monkeypatch):
    kept = {}

    def tuned(model, loss_fn, batches, *, optimizer, **options):
        loss_fn(model, batches[0]).backward()
        kept.update(model=model, batches=batches, optimizer=optimizer(model.parameters()), options=options)

    monkeypatch.setattr(tuning, "tuned", tuned)
    tuning.tune(Program(name=str(noisy)), steps=2, after=3)
    model, (x,) = kept["model"], kept["batches"][0].args
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    assert all(
        torch.allclose(a, param.grad, rtol=1e-5, atol=1e-7) for a, param in zip(found, model.parameters(), strict=True)
    )
    assert isinstance(kept["optimizer"], torch.optim.AdamW)
    assert (kept["optimizer"].param_groups[0]["lr"], len(kept["batches"])) == (1e-2, 2)
    assert kept["options"] == {"dtype": "float16", "steps": 2, "objective": "speed"}
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    assert not torch.equal(model[0].weight, first[0].weight)  # it has taken three steps


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("gan",), 3, "tuning finds rules for one model"),
        (("untrained",), 2, "never trains"),
        (("crashes",), 1, "ValueError: the script's own"),
        (("plain", "--out", "absent/policy.policy"), 2, "there is no folder absent to save in"),
        (("plain", "--dtype", "float61"), 2, "nothing can be tuned in 'float61'"),
    ],
)
def test_a_script_that_cannot_be_tuned_is_refused_and_no_file_written(mezzo, tmp_path, words, code, message):
    name, *options = words
    found = mezzo("tune", "--no-compare", *options, SCRIPTS / f"{name}.py")
    assert found[:2] == (code, "")
    assert message in found[2]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.usefixtures("emulating", "here")
def test_what_was_found_for_a_script_is_compared(mezzo, noisy):
    code, out, _ = mezzo("tune", "--json", "--compare-steps", "8", noisy)
    assert code == 0
    assert [row["steps"] for row in json.loads(out)["comparison"]["rows"]] == [8, 8, 8]
