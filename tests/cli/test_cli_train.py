"""``mezzo train``: one policy, one row."""

import json

import pytest
import torch

from mezzo.policy import Policy

pytestmark = pytest.mark.usefixtures("emulating")


def test_one_policy_gives_one_row_and_a_run_directory(mezzo, tmp_path):
    code, out, err = mezzo(
        "train", "digits-cnn", "--policy", "O2,dtype=bfloat16", "--steps", "2", "--seed", "3", "--out", "run"
    )
    assert code == 0
    verdict, row = [line for line in out.splitlines() if line.startswith("O2,dtype=bfloat16")]
    assert verdict.startswith("O2,dtype=bfloat16: test accuracy ")
    assert " emulated " in row
    assert "for reference: commonest digit " in out
    assert "O2,dtype=bfloat16: finished, 2 steps in " in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["recipe"], summary["steps"], summary["seed"]) == ("digits-cnn", 2, 3)
    assert summary["policies"] == ["O2,dtype=bfloat16"]
    assert summary["rows"][0]["difference"] is None
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.parametrize("verb, name", [("train", "--policy"), ("inspect", "--policy"), ("compare", "--policies")])
def test_a_policy_file_that_tune_or_inspect_wrote_is_a_policy(mezzo, tmp_path, verb, name):
    policy = Policy.O1("bfloat16").low("softmax")
    policy.save("mine.policy")
    code, _, err = mezzo(verb, "digits-cnn", name, "mine.policy", "--steps", "1", "--out", "run")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["policies"] == [str(policy)]
    code, out, err = mezzo(verb, "digits-cnn", name, "other.policy", "--out", "other")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: there is no policy file 'other.policy'\n")
    assert not (tmp_path / "other").exists()


def test_the_default_policy_is_the_level_to_start_with_in_the_format_for_the_machine(mezzo, monkeypatch):
    for fast, other in (("bfloat16", "fp16"), ("float16", "bf16")):
        monkeypatch.setattr("mezzo.cli.output.fast_format", lambda kinds, fast=fast: getattr(torch, fast))
        code, out, err = mezzo("train", "digits-cnn", "--steps", "2", "--json", "--out", fast)
        assert code == 0
        assert [row["policy"] for row in json.loads(out)["rows"]] == [f"O1,dtype={fast}"]
        says = f"{fast} is the format for this machine (mezzo doctor says why); --policy O1,{other} for the other"
        assert says in err.splitlines()


def test_a_semicolon_does_not_make_two_policies(mezzo):
    code, out, err = mezzo("train", "digits-cnn", "--policy", "O0; O1", "--steps", "2")
    assert (code, out) == (2, "")
    assert err.startswith("mezzo: ")
    assert "'O0; O1'" in err


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("digits-cnn", "--policy", "O4"), "unknown level 'O4'"),
        (("digit-cnn",), "did you mean 'digits-cnn'?"),
        (("digits-cnn", "--steps", "-3"), "--steps"),
        ((), "RECIPE"),
    ],
)
def test_bad_input_is_a_usage_error_and_leaves_nothing(mezzo, tmp_path, words, complaint):
    code, out, err = mezzo("train", *words)
    assert (code, out) == (2, "")
    assert complaint.lower() in err.lower()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_refused(mezzo):
    words = ("train", "digits-cnn", "--policy", "O0", "--steps", "1", "--out", "run")
    assert mezzo(*words)[0] == 0
    code, _, err = mezzo(*words)
    assert code == 2
    assert "the run directory already holds a run" in err
    assert mezzo(*words, "--overwrite")[0] == 0


def test_help_leads_with_examples(mezzo):
    code, out, _ = mezzo("train", "--help")
    assert code == 0
    assert out.index("mezzo train digits-cnn") < out.index("--policy")
