"""`mezzo inspect`: the verdict first, a run directory with all evidence, and exit codes for alerts and Ctrl-C."""

import json

import pytest

from mezzo.policy import Policy
from mezzo.recipes import training

pytestmark = pytest.mark.usefixtures("emulating")


SHORT = ("digits-cnn", "--steps", "3", "--every", "2", "--out", "run")


def test_the_verdict_comes_first_and_the_run_directory_holds_the_evidence(mezzo, tmp_path, pictures):
    code, out, err = mezzo("inspect", *SHORT)
    assert code == 0
    assert out.splitlines()[0].startswith("FP16 ")
    policy = Policy.load(tmp_path / "run" / "found.policy")
    assert f'MixedPrecision(model, optimizer, "{policy}")' in out
    assert err.splitlines()[-1] == "run directory: run"
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == [
        "evidence.jsonl", "explanation.json", "found.policy", "metrics.jsonl", "report.html", "summary.json",
    ]  # fmt: skip
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Where the bits go" in page
    assert "Suggested policy" in page


def test_json_is_the_summary(mezzo, tmp_path):
    code, out, _ = mezzo("inspect", *SHORT, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_run_that_goes_wrong_exits_with_4_and_says_why(mezzo):
    code, out, _ = mezzo("inspect", *SHORT, "--policy", "O1,dtype=float16,loss_scale=16777216")
    assert code == 4
    assert "skipped" in out


def test_ctrl_c_sums_up_what_there_is_and_exits_130(mezzo, tmp_path, monkeypatch, pictures):
    step = training.Training._step

    def interrupted(self, number, **options):
        if number == 3:
            raise KeyboardInterrupt
        step(self, number, **options)

    monkeypatch.setattr(training.Training, "_step", interrupted)
    code, _, _ = mezzo("inspect", *SHORT)
    assert code == 130
    assert "This report is partial" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("--every", "0"), "--every"),
        (("--steps", "none"), "--steps"),
        (("--policy", "O9"), "unknown level 'O9'"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(mezzo, tmp_path, words, complaint):
    code, out, err = mezzo("inspect", "digits-cnn", *words)
    assert (code, out) == (2, "")
    assert complaint in err
    assert list(tmp_path.iterdir()) == []


def test_help_leads_with_examples(mezzo):
    code, out, _ = mezzo("inspect", "--help")
    assert code == 0
    assert out.index("mezzo inspect digits-cnn") < out.index("--every")
