"""`mezzo inspect`: the verdict first, a table, a folder with all evidence, exit codes for alerts, errors and Ctrl-C."""

import json

import pytest
import torch

from mezzo.numerics import read_evidence
from mezzo.policy import Policy

pytestmark = pytest.mark.usefixtures("emulating")

TRAINS = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    loss = (model(torch.randn(16, 8)) - 1.0).square().mean() * 2.0**-30
    if step == 3:
        if "crash" in sys.argv:
            raise ValueError("the script's own")
        if "interrupt" in sys.argv:
            raise KeyboardInterrupt
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9g}")
"""
FILES = [
    "evidence.jsonl", "found.policy", "histograms.png", "metrics.jsonl", "statistics.jsonl", "statistics.png",
    "summary.json",
]  # fmt: skip


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    return "train.py"


def test_the_verdict_comes_first_and_the_folder_holds_the_evidence(mezzo, tmp_path, script):
    code, out, err = mezzo("inspect", "--every", "2", "--out", "look", script)
    assert code == 0
    assert out.splitlines()[0].startswith("FP16 is safe with a loss scale: without one it loses ")
    assert out.index("BF16 is safe") < out.index("3 of 6 steps under O0 were recorded") < out.index("weight gradients")
    assert "\nloss " in err
    assert "\nloss " not in out
    folder = tmp_path / "look"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    policy = Policy.load(folder / "found.policy")
    assert f'policy="{policy}"' in out
    assert policy.loss_scale.init > 2**16
    assert [step.step for step in read_evidence(folder).steps] == [1, 3, 5]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6
    for picture in ("histograms.png", "statistics.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    code, _, err = mezzo("inspect", "--out", "look", script)
    assert code == 2
    assert "look has results already" in err


@pytest.mark.usefixtures("undrawn")
def test_json_is_the_summary_and_its_shares_are_those_of_the_histograms(mezzo, tmp_path, script):
    code, out, _ = mezzo("inspect", "--every", "2", "--out", "look", "--json", script)
    assert code == 0
    document = json.loads(out)
    assert document == json.loads((tmp_path / "look" / "summary.json").read_text())
    histogram = read_evidence(tmp_path / "look").histogram("weight_gradients", step="all")
    covered = histogram.coverage("float16")
    (row,) = [e for e in document["lost"] if (e["kind"], e["format"]) == ("weight_gradients", "float16")]
    assert row["flushed"] == covered.underflow / covered.total > 0.1
    assert row["subnormal"] == covered.subnormal / covered.total
    (row,) = [e for e in document["lost"] if (e["kind"], e["format"]) == ("updates", "bfloat16")]
    lost = read_evidence(tmp_path / "look").swallowed(step="all")
    assert row["swallowed"] == lost.share("bfloat16")


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_goes_wrong_exits_with_4_and_says_why(mezzo, script):
    code, out, _ = mezzo("inspect", "--policy", "O1,dtype=float16,loss_scale=none", script)
    assert code == 4
    assert out.splitlines()[0].startswith("FP16")
    assert "\n1. " in out
    assert "without a loss scale" in out


def test_a_scripts_own_error_is_its_own_and_what_was_recorded_is_kept(mezzo, tmp_path, script):
    code, out, err = mezzo("inspect", "--every", "1", "--out", "look", script, "crash")
    assert (code, out) == (1, "")
    assert "ValueError: the script's own" in err
    assert err.splitlines()[-1] == "train.py failed; what was recorded until then is in look"
    assert [step.step for step in read_evidence(tmp_path / "look").steps] == [1, 2, 3]
    assert not (tmp_path / "look" / "summary.json").exists()


@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_sums_up_what_there_is_and_exits_130(mezzo, tmp_path, script):
    code, out, _ = mezzo("inspect", "--full", "--every", "1", "--out", "look", script, "interrupt")
    assert code == 130
    assert "3 of 3 steps" in out
    for name in ("weights 0.weight", "weight gradients 2.bias", "activations output", "updates 2.weight"):
        assert name in out
    assert json.loads((tmp_path / "look" / "summary.json").read_text())["interrupted"]


@pytest.mark.usefixtures("undrawn")
def test_statistics_by_step_module_and_kind(mezzo, tmp_path, script):
    assert mezzo("inspect", "--every", "2", "--out", "look", script)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "look" / "statistics.jsonl").read_text().splitlines()]
    evidence = read_evidence(tmp_path / "look")
    assert len({(row["step"], row["module"], row["kind"]) for row in rows}) == len(rows)
    for row in rows:
        histogram = evidence.histogram(row["kind"], row["module"], step=row["step"])
        numbers = histogram.total, histogram.max_abs, histogram.zeros, histogram.infs, histogram.nans
        assert numbers == tuple(row[name] for name in ("count", "largest", "zeros", "infs", "nans"))
        assert row["dtype"] == "float32"
        assert row["flushed_fp16"] == histogram.coverage("float16").underflow
        if row["kind"] == "updates":
            lost = evidence.swallowed(row["module"], step=row["step"])
            assert row["swallowed_bf16"] == lost.swallowed["bfloat16"]
        else:
            assert row["swallowed_bf16"] is None
    assert {row["step"] for row in rows} == {1, 3, 5}
    assert {row["kind"] for row in rows} == {*evidence.header.kinds}


@pytest.mark.usefixtures("undrawn")
def test_the_model_is_compiled_where_that_is_asked_for(mezzo, tmp_path, script, monkeypatch):
    plain, graphs = torch.nn.Module.compile, []
    own = "class Net(torch.nn.Sequential):\n    def forward(self, x):\n        return super().forward(x)\n\n"
    text = TRAINS.replace("torch.manual_seed", own + "torch.manual_seed").replace("= torch.nn.Sequential", "= Net")
    (tmp_path / script).write_text(text)  # torch compiles no frame of a class of its own

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: plain(module, backend=backend))
    code, out, plain_err = mezzo("inspect", "--every", "2", script)
    assert (code, graphs) == (0, [])
    code, compiled, err = mezzo("inspect", "--every", "2", "--compile", script)
    assert code == 0
    assert graphs
    losses = [[float(line[5:]) for line in text.splitlines() if line.startswith("loss ")] for text in (plain_err, err)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert compiled.splitlines()[0] == out.splitlines()[0]
