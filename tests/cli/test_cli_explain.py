"""``mezzo explain``: a recipe or a factory, a table or JSON, one policy or two."""

import json
import sys

import pytest

from mezzo.cli import main
from mezzo.explanation import Explanation

FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return torch.softmax(self.head(x), -1)


def plain():
    return Net(), torch.ones(4, 8)


def with_loss():
    return Net(), (torch.ones(4, 8),), lambda output: output.float().square().sum()


def nothing():
    return None


def alone():
    return (Net(),)


def wrong_loss():
    return Net(), torch.ones(4, 8), 3.0


def fails():
    raise KeyError("the user's own error")


number = 3
"""


@pytest.fixture
def mezzo(capsys, tmp_path, monkeypatch):
    """Run the command line beside a module with factories: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explained_models.py").write_text(FACTORY)
    (tmp_path / "explained_broken.py").write_text("import a_package_that_is_not_there\n")
    path = list(sys.path)

    def run(*words):
        with pytest.raises(SystemExit) as leaving:
            main(["explain", *words])
        captured = capsys.readouterr()
        assert sys.path == path
        return leaving.value.code or 0, captured.out, captured.err

    yield run
    sys.modules.pop("explained_models", None)


EMULATED = "O1,dtype=bfloat16,emulate=true"


def test_a_factory_of_the_user_s(mezzo):
    code, out, err = mezzo("explained_models:plain", "--policy", EMULATED)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith(f"Net under {EMULATED} on cpu, products emulated in FP32, torch ")
    (linear,) = [line for line in lines if line.split()[:2] == ["head", "linear"] and "gemm" in line]
    assert linear.split()[2:8] == ["1", "float32", "bfloat16,", "emulated", "bfloat16", "low"]
    assert linear.endswith("  explained_models.py:12")
    assert "M 4 · N 5 · K 8" in out
    assert "M 4 → 8, N 5 → 8" in out
    assert lines[-1] == "findings: none"
    assert not any(line.endswith(" ") for line in lines)


def test_json_is_the_explanation(mezzo):
    code, out, _ = mezzo("explained_models:with_loss", "--policy", EMULATED, "--json")
    assert code == 0
    explanation = Explanation.from_json(out)
    assert explanation.policy == EMULATED
    assert [(row.module, row.op) for row in explanation.rows] == [
        ("head", "linear"), ("", "softmax"), ("(loss)", "square"), ("(loss)", "sum"),
    ]  # fmt: skip


def test_two_policies(mezzo):
    other = f"{EMULATED},low=softmax"
    code, out, _ = mezzo("explained_models:plain", "--policy", EMULATED, "--against", other)
    assert code == 0
    head, *rest = [line for line in out.splitlines() if line.strip() and "─" not in line]
    assert head.split() == ["about", "where", EMULATED, other]
    assert [line.split()[:3] for line in rest if line.split()[0] == "op"] == [["op", "(model)", "softmax"]]
    assert "low by low=softmax" in out
    assert mezzo("explained_models:plain", "--policy", EMULATED, "--against", EMULATED)[1] == (
        f"{EMULATED} and {EMULATED} explain the same\n"
    )


def test_differences_as_json(mezzo):
    words = ("explained_models:plain", "--policy", EMULATED, "--against", "O0", "--json")
    found = json.loads(mezzo(*words)[1])
    assert found[0] == {"about": "policy", "where": "policy", "this": EMULATED, "other": "O0"}
    assert {each["about"] for each in found} == {"policy", "run", "op", "casts", "alignment"}


def test_a_recipe(mezzo):
    code, out, _ = mezzo("digits-cnn", "--policy", "O2,dtype=float16,emulate=true", "--json")
    assert code == 0
    explanation = Explanation.from_json(out)
    rows = {(row.module, row.op): row for row in explanation.rows}
    assert rows["stem", "conv2d"].computes_in == ("float16",)
    assert rows["stem_norm", "batch_norm"].computes_in == ("float16", "float32")
    assert rows["stem", "conv2d"].line.rpartition(":")[0].endswith("recipes/digits_cnn.py")
    assert rows["(loss)", "cross_entropy"].returns == ("float32",)
    assert {(entry.module, pad.dimension) for entry in explanation.misaligned for pad in entry.paddings} == {
        ("stem", "channels in"), ("head", "N"),
    }  # fmt: skip
    assert explanation.findings == ()


def test_help_leads_with_examples(mezzo):
    code, out, _ = mezzo("--help")
    assert code == 0
    assert out.index("mezzo explain digits-cnn") < out.index("A factory takes no argument")
    assert "--against" in out


@pytest.mark.parametrize(
    "subject, what, hint",
    [
        ("digits-cn", "unknown recipe 'digits-cn'", "did you mean 'digits-cnn'?"),
        ("no_such_package.models:tiny", "there is no module 'no_such_package.models'", "No module named"),
        ("explained_models:plane", "explained_models has no 'plane'", "did you mean 'plain'?"),
        ("explained_models:", "explained_models has no ''", "def factory():"),
        (":plain", "':plain' names no module", "mezzo explain package.module:factory"),
        (".models:plain", "'.models:plain' names no module", "mezzo explain package.module:factory"),
        ("explained_models:number", "explained_models:number is no function but of type int", "def factory():"),
        ("explained_models:nothing", "explained_models:nothing returned NoneType", "return model, inputs"),
        ("explained_models:alone", "explained_models:alone returned ('Net',)", "return model, inputs"),
        (
            "explained_models:wrong_loss",
            "the loss that explained_models:wrong_loss returned is a float",
            "lambda output",
        ),
    ],
)
def test_what_cannot_be_explained(mezzo, subject, what, hint):
    code, out, err = mezzo(subject)
    assert (code, out) == (2, "")
    assert err.startswith(f"mezzo: {what}")
    assert hint in err


def test_a_wrong_policy_is_found_before_anything_is_imported(mezzo):
    code, _, err = mezzo("no_such_package:tiny", "--policy", "O9")
    assert code == 2
    assert "unknown level 'O9'" in err
    code, _, err = mezzo("no_such_package:tiny", "--against", "O9")
    assert "unknown level 'O9'" in err


def test_the_user_s_own_errors_pass_through(mezzo):
    with pytest.raises(KeyError, match="the user's own error"):
        main(["explain", "explained_models:fails"])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        main(["explain", "explained_broken:tiny"])
