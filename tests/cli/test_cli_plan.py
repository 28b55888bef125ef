"""``mezzo plan SCRIPT``: the answer, JSON that is a plan again, a folder, objectives, what cannot be planned."""

import json

import pytest

from mezzo.plan import Plan
from mezzo.policy import Policy

BF16 = "O1,dtype=bfloat16,emulate=true"

#: Two sums of a residual stream that torch.autocast widens, and a global that only the script's own module has.
SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
WIDTH, BRANCHES = 64, len(sys.argv) > 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu() + x.view(-1, WIDTH)
            if BRANCHES and x.sum() > 1e9:
                x = x / 2
        return x


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(256, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_answer_comes_first_and_the_script_runs_one_step(mezzo, script):
    code, out, err = mezzo("plan", "--policy", BF16, script)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "step 0" or lines[0].startswith("Net: ")
    answer = next(line for line in lines if line.startswith("Net: "))
    assert "fewer bytes moved than torch.autocast; " in answer
    assert "step 1" not in out
    assert any(line.split()[:2] == ["torch.autocast", "12"] for line in lines), out
    assert f"write  plan.policy(), the text {BF16},low=add" in lines
    assert not any(line.endswith(" ") or len(line) > 120 for line in lines)
    full = mezzo("plan", "--full", "--policy", BF16, script)[1]
    assert "train.py:17" in full
    assert "│ linear layers.2" in full


def test_what_is_found_is_kept_as_json_and_as_a_graph(mezzo, script, tmp_path):
    words = "plan", "--policy", BF16, "--out", "why"
    assert mezzo(*words, script)[0] == 0
    code, out, _ = mezzo(*words, "--overwrite", "--json", script)
    assert code == 0
    (model,) = json.loads(out)["models"]
    text = (tmp_path / "why" / "plan.json").read_text()
    made = Plan.from_json(text)
    assert json.loads(text) == model
    assert made.policy() == Policy.parse(f"{BF16},low=add")
    summary = json.loads((tmp_path / "why" / "summary.json").read_text())
    assert summary["models"][0]["headline"] in made.text().replace("\n", " ")
    dot = (tmp_path / "why" / "plan.dot").read_text()
    assert dot.count(' [label="linear') == 3
    assert dot.count("label=cast") == 0  # of activations none is cast


def test_the_objective_is_a_word_or_a_number(mezzo, script):
    for word, number in (("memory", 1.0), ("0.25", 0.25)):
        out = mezzo("plan", "--json", "--objective", word, "--fused", "--policy", BF16, script)[1]
        (model,) = json.loads(out)["models"]
        assert (model["objective"], model["fused"]) == (number, True)
    for word in ("speed", "2", "nan"):
        code, out, err = mezzo("plan", "--objective", word, "--policy", BF16, script)
        assert (code, out) == (2, "")
        assert "the objective is" in err


def test_a_model_that_dynamo_cannot_capture_is_left_alone_with_the_line(mezzo, script):
    code, out, err = mezzo("plan", "--json", "--policy", BF16, script, "branch")
    assert code == 4
    (why,) = json.loads(out)["left_alone"].values()
    assert "train.py:18" in why
    assert "of each part of the model" in why
    assert "Net cannot be planned" in err
