"""``mezzo explain``: a recipe or a factory; the answer, every row, a page or JSON; one policy or two."""

import json
import re
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
def mezzo(mezzo, tmp_path):
    """Run `mezzo explain` beside a module with factories: (exit code, stdout, stderr)."""
    (tmp_path / "explained_models.py").write_text(FACTORY)
    (tmp_path / "explained_broken.py").write_text("import a_package_that_is_not_there\n")
    path = list(sys.path)

    def run(*words):
        found = mezzo("explain", *words)
        assert sys.path == path
        return found

    yield run
    sys.modules.pop("explained_models", None)


EMULATED = "O1,dtype=bfloat16,emulate=true"


def test_the_answer_comes_first(mezzo):
    code, out, err = mezzo("explained_models:plain", "--policy", EMULATED)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == f"The 1 product of Net runs in BF16 under {EMULATED}: 100 % of its FLOPs"
    assert "measured in one step on cpu, products emulated in FP32, torch " in out
    assert ["head", "linear", "1", "FP32", "→", "BF16"] in [line.split()[:6] for line in lines]
    assert "M 4 · N 5 · K 8" in out
    assert "M 4 → 8, N 5 → 8" in out
    assert not any(line.endswith(" ") or len(line) > 120 for line in lines)


def test_every_row(mezzo):
    code, out, err = mezzo("explained_models:plain", "--policy", EMULATED, "--full")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (linear,) = [line for line in lines if line.split()[:2] == ["head", "linear"] and "table" in line]
    assert linear.split()[2:8] == ["1", "float32", "bfloat16,", "emulated", "bfloat16", "low"]
    assert linear.endswith("  explained_models.py:12")
    assert lines[-1] == "findings: none"
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize("columns, widest", [(80, 80), (100, 100), (400, 120)])
def test_a_terminal_is_never_too_narrow(mezzo, monkeypatch, columns, widest):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    words = ("explained_models:with_loss", "--policy", EMULATED)
    for more in ((), ("--against", f"{EMULATED},low=softmax")):
        _, out, _ = mezzo(*words, *more)
        plain = re.sub(r"\x1b\[[\d;]*m", "", out)
        assert plain != out
        assert widest - 30 < max(map(len, plain.splitlines())) <= widest
        assert "…" not in plain


def test_a_page(mezzo, tmp_path):
    words = ("explained_models:plain", "--policy", EMULATED, "--html", "page.html")
    code, out, err = mezzo(*words)
    assert (code, err) == (0, "page: page.html\n")
    page = (tmp_path / "page.html").read_text()
    assert out.splitlines()[0] in page
    code, out, err = mezzo(*words, "--against", "O0")
    assert (code, out) == (2, "")
    assert err == ("mezzo: there is a file page.html already\n  write  --overwrite, or --html with another name\n")
    assert (tmp_path / "page.html").read_text() == page
    assert mezzo(*words, "--against", "O0", "--overwrite")[0] == 0
    assert f"<h1>O0 instead of {EMULATED}: " in (tmp_path / "page.html").read_text()


def test_a_page_that_cannot_be(mezzo, tmp_path, monkeypatch):
    words = ("explained_models:plain", "--policy", EMULATED, "--html", "nowhere/page.html")
    code, out, err = mezzo(*words)
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: there is no folder nowhere to save in\n")
    (tmp_path / "folder").mkdir()
    code, out, err = mezzo(*words[:-1], "folder", "--overwrite")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: there is a folder folder\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Explanation, "save_html", full)
    code, out, err = mezzo(*words[:-1], "page.html")
    assert (code, out) == (2, "")
    assert err == "mezzo: the page page.html cannot be written\n  why    No space left on device\n"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, out, err = mezzo(*words)
    assert (code, out) == (3, "")
    assert 'write  pip install "jinja2>=3.1" "matplotlib>=3.9" "plotly>=6.0"' in err
    assert not list(tmp_path.glob("**/*.html"))


def test_json_is_the_explanation(mezzo):
    code, out, _ = mezzo("explained_models:with_loss", "--policy", EMULATED, "--json")
    assert code == 0
    explanation = Explanation.from_json(out)
    assert explanation.policy == EMULATED
    assert json.loads(out)["answer"]["headline"] == explanation.answer.headline
    assert [(row.module, row.op) for row in explanation.rows] == [
        ("head", "linear"), ("", "softmax"), ("(loss)", "square"), ("(loss)", "sum"),
    ]  # fmt: skip


def test_two_policies(mezzo):
    other = f"{EMULATED},low=softmax"
    code, out, _ = mezzo("explained_models:plain", "--policy", EMULATED, "--against", other)
    assert code == 0
    assert out.replace("\n", " ").startswith(f"{other} instead of {EMULATED}: 1 of 2 ops run in another precision ")
    assert ["(model)", "softmax", "BF16", "→", "FP32", "BF16"] in [line.split() for line in out.splitlines()]
    full = mezzo("explained_models:plain", "--policy", EMULATED, "--against", other, "--full")[1]
    assert "low by low=softmax" in full
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
