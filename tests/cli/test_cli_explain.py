"""``mezzo explain SCRIPT``: the answer, every row, JSON, a folder; which step, which policies, how a script ends it."""

import json
import re

import pytest
import torch
import typer

from mezzo.cli.explain import explain_script
from mezzo.policy import Policy
from mezzo.script import Program, explained, rehearse

from ..script.conftest import SCRIPTS

BF16 = "O1,dtype=bfloat16,emulate=true"

#: Ten words, times up to 599, and a vocabulary whose logits are most of what casts read.
SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.time, self.head = nn.Embedding(800, 16), nn.Linear(2, 16), nn.Linear(16, 800, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x) + self.time(torch.arange(600).float()[:, None].expand(600, 2)))


model, criterion = Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if sys.argv[1:] == [str(step)]:
        raise KeyError("the script's own")
    x = torch.randint(800, (2, 600))
    criterion(model(x)[:, :-1].reshape(-1, 800), x[:, 1:].reshape(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_answer_comes_first(mezzo, script):
    code, out, err = mezzo("explain", "--policy", BF16, script)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"All 2 products of Net run in BF16 under {BF16}: 100 % of their FLOPs"
    assert ["time", "linear", "1", "FP32", "→", "BF16"] in [line.split()[:6] for line in lines]
    assert not any(line.endswith(" ") or len(line) > 120 for line in lines)
    full = mezzo("explain", "--full", "--policy", BF16, script)[1].splitlines()
    (linear,) = [line for line in full if line.split()[:2] == ["time", "linear"] and "table" in line]
    assert linear.endswith("  train.py:16")
    assert len(full) > len(lines)


def test_findings_of_a_script_and_of_the_loss_outside_its_model(mezzo, script):
    code, out, _ = mezzo("explain", "--json", "--policy", f"{BF16},fp32_module=embed", script)
    assert code == 0
    (model,) = json.loads(out)["models"]
    findings = {finding["kind"]: finding for finding in model["findings"]}
    assert set(findings) == {"lost integers", "logits", "tied weights"}
    assert findings["lost integers"]["where"] == f"time linear ({script}:16)"
    assert findings["logits"]["where"] == f"head linear ({script}:16)"
    size = 2 * 599 * 800 * 4  # the rows that the script's loss reads
    assert f"1,198×800, {size / 2**20:.2f} MiB in FP32" in findings["logits"]["text"]


def test_a_terminal_is_never_too_narrow(mezzo, monkeypatch, script):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    for columns, widest in ((80, 80), (400, 120)):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = mezzo("explain", "--policy", BF16, script)
        plain = re.sub(r"\x1b\[[\d;]*m", "", out)
        assert plain != out
        assert widest - 30 < max(map(len, plain.splitlines())) <= widest
        assert "…" not in plain


def test_the_step_that_is_asked_for_is_explained_and_no_other_runs(mezzo, script):
    for steps in (1, 3):
        code, out, _ = mezzo("explain", "--steps", steps, "--policy", BF16, script)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(steps - 1)]
        assert "All 2 products of Net" in out
    code, out, err = mezzo("explain", "--json", "--steps", "2", "--policy", BF16, script)
    assert (code, err) == (0, "step 0\n")  # beside JSON what a script prints goes to stderr
    assert json.loads(out)["program"] == str(script)
    code, out, _ = mezzo("explain", "--policy", "O0", script)
    assert code == 4
    assert "All 2 products of Net run in FP32 under O0" in out


def test_a_folder_has_each_explanation_and_a_summary(mezzo, script, tmp_path):
    words = ("--policy", BF16, "--out", "why", SCRIPTS / "gan.py")
    assert mezzo("explain", *words)[0] == 0
    folder = tmp_path / "why"
    assert {path.name for path in folder.iterdir()} == {"explanation-1.json", "explanation-2.json", "summary.json"}
    summary = json.loads((folder / "summary.json").read_text())
    assert [model["file"] for model in summary["models"]] == ["explanation-1.json", "explanation-2.json"]
    code, out, err = mezzo("explain", *words)
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: why has results already\n  write  --overwrite")
    assert mezzo("explain", "--policy", BF16, "--out", "why", "--overwrite", script)[0] == 0
    assert {path.name for path in folder.iterdir()} == {"explanation.json", "summary.json"}
    explanation = json.loads((folder / "explanation.json").read_text())
    (model,) = json.loads((folder / "summary.json").read_text())["models"]
    assert model == {
        "file": "explanation.json", "model": "Net", "policy": BF16, "headline": explanation["answer"]["headline"],
    }  # fmt: skip


def test_several_policies_and_one_run_of_the_script(script, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    policies = [Policy.of(text) for text in ("O0", BF16, "O2,dtype=float16,emulate=true")]
    with pytest.raises(typer.Exit) as left:
        explain_script(Program(name=str(script)), policies, steps=2, out=tmp_path / "three")
    assert left.value.exit_code == 0
    out = capsys.readouterr().out
    assert out.count("step 0") == 1
    headlines = [line for line in out.splitlines() if " products of Net run" in line]
    assert [f"under {policy}" in line for policy, line in zip(policies, headlines, strict=True)] == [True] * 3
    assert len(list((tmp_path / "three").glob("explanation-*.json"))) == 3


def test_a_model_is_explained_as_it_was_at_its_call(script):
    """What a step does to weights and random numbers does not show: twice the same, and the script's losses stay."""
    policy = Policy.of(BF16)
    first, second = (rehearse(Program(name=str(script)), policy, explained, steps=2).results for _ in range(2))
    assert first == second
    before = torch.nn.Module.__call__, torch.nn.functional.cross_entropy
    rehearse(Program(name=str(script)), policy, explained)
    assert (torch.nn.Module.__call__, torch.nn.functional.cross_entropy) == before


@pytest.mark.parametrize("steps, code", [(2, 0), (3, 1)])
def test_an_error_before_the_step_is_the_script_s(mezzo, script, steps, code):
    exit_code, out, err = mezzo("explain", "--steps", steps, "--policy", BF16, script, "2")
    assert exit_code == code
    assert ('KeyError: "the script\'s own"' in err) == (code == 1)
    assert ("All 2 products" in out) == (code == 0)
