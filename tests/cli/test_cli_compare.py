"""`mezzo compare`: the verdict first, one table, a folder that holds the rest, and honest exit codes."""

import json
import re
from pathlib import Path

import pytest

from mezzo.script import comparison

from ..script.processes import HERE, InThisProcess

pytestmark = pytest.mark.usefixtures("emulating")

TRAIN = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--width", type=int, default=8)
args = parser.parse_args()
torch.manual_seed(args.seed)
model = torch.nn.Sequential(torch.nn.Linear(8, args.width), torch.nn.Tanh(), torch.nn.Linear(args.width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(8):
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"test loss {loss.item():.4f}")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Runs in this process; a script in the folder of the test."""
    monkeypatch.setattr(comparison, "subprocess", HERE)
    InThisProcess.started.clear()
    (tmp_path / "train.py").write_text(TRAIN)


def test_the_answer_a_table_and_a_folder(mezzo, tmp_path, request):
    words = ("compare", "--seeds", "2", "--policies", "O2,bf16; O1,bf16", "--margin", "9", "--out", "out", "train.py")
    code, out, err = mezzo(*words, "--width", "6")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("FP32 reaches test loss ")
    assert [line.split(",")[0] for line in lines[1:3]] == ["O2", "O1"]
    assert all("bf16: equal, " in line for line in lines[1:3])
    assert [line.split()[0] for line in lines if re.match(r"O\d", line)][2:] == ["O0", "O2,bf16", "O1,bf16"]
    assert max(map(len, lines)) <= 120
    assert "1 of 6: O0, seed 0: " in err
    assert "results: out" in err
    assert "\x1b" not in out + err
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "comparison.json", "summary.json", "curves.png", "report.html",
    }  # fmt: skip
    assert len(list(folder.glob("*/metrics.jsonl"))) == 6
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["verdict"] == lines[: lines.index("")]
    assert [row["verdict"] for row in summary["rows"]] == ["reference", "equal", "equal"]
    assert [run["policy"] for run in summary["runs"]][:2] == ["O0", "O2,dtype=bfloat16"]
    assert (summary["script"], summary["margin"], summary["seeds"]) == ("train.py --width 6", 9.0, 2)
    # the same again repeats nothing, and prints the same as JSON
    InThisProcess.started.clear()
    request.getfixturevalue("undrawn")
    code, out, _ = mezzo(*words[:-1], "--json", "train.py", "--width", "6")
    assert (code, InThisProcess.started) == (0, [])
    again = json.loads(out)
    assert again["rows"] == summary["rows"]
    assert again == json.loads((folder / "summary.json").read_text())
    refused = mezzo(*words, "--width", "7")
    assert (refused[0], refused[1]) == (2, "")
    assert "out has results of train.py" in refused[2]
    assert json.loads((folder / "summary.json").read_text()) == again


@pytest.mark.usefixtures("undrawn")
def test_a_policy_that_diverges_is_an_alert_and_without_a_metric_the_training_loss_tells(mezzo, tmp_path):
    (tmp_path / "train.py").write_text(
        TRAIN.replace(".square()", ".mul(1e4).square()") + 'print("saved to model_2.pt")\n'
    )
    code, out, err = mezzo("compare", "--policies", "O3,fp16", "--out", "out", "train.py")
    assert code == 4
    assert out.startswith("FP32 reaches training loss ")
    assert "O3,fp16: diverged: " in out
    assert "its last line, 'saved to model_2.pt', has no metric in words, number and unit" in err
    assert '--metric "test accuracy"' in err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["verdict"] for row in summary["rows"]] == ["reference", "diverged"]


@pytest.mark.usefixtures("undrawn")
def test_ablations_come_behind_the_policies(mezzo, tmp_path):
    code, out, _ = mezzo("compare", "--policies", "O1,bf16", "--ablate", "--steps", "2", "--json", "train.py")
    assert code in (0, 4)
    assert json.loads(out)["policies"] == [
        "O0",
        "O1,dtype=bfloat16",
        "O2,dtype=float16,loss_scale=none",
        "O2,dtype=float16,loss_scale=constant(8)",
        "O3,dtype=float16,keep_batchnorm_fp32=true",
    ]
    (folder,) = (tmp_path / "runs").iterdir()  # without --out
    assert re.fullmatch(r"train-\d{8}-\d{6}", folder.name)


def test_an_error_of_the_script_has_its_own_traceback(mezzo, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("loss.backward()", "loss.backwards()"))
    code, out, err = mezzo("compare", "--policies", "O1,bf16", "train.py")
    assert (code, out) == (1, "")
    assert "train.py ended with exit code 1 in FP32" in err
    assert "loss.backwards()" in err
    assert "AttributeError: 'Tensor' object has no attribute 'backwards'" in err
    assert str(Path(comparison.__file__).parent) not in err


@pytest.mark.usefixtures("undrawn")
def test_options_behind_the_script_are_the_verbs_where_the_script_has_none_of_that_name(mezzo):
    words = "--policies", "O1,bf16", "--margin", "9", "--json"
    code, out, err = mezzo("compare", *words, "train.py", "--seeds", "3", "--width", "6", "--steps=2")
    assert code == 0, err
    assert (code, json.loads(out)["seeds"]) == (0, 3)
    assert err.count("--seeds 3 --steps=2 is taken as mezzo compare's: train.py has no such option\n") == 1
    assert [run[-5:] for run in InThisProcess.started] == [
        ["train.py", "--width", "6", "--seed", str(seed)] for seed in (0, 1, 2) for _ in range(2)
    ]
