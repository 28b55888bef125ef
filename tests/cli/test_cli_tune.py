"""`mezzo tune`: the answer first, a policy file with reasons, a comparison, and honest exit codes."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from mezzo import recipes
from mezzo.numerics import tune
from mezzo.policy import Policy

pytestmark = pytest.mark.usefixtures("emulating")

QUICK = ("tune", "digits-cnn", "--dtype", "fp16", "--steps", "1")


def test_the_answer_the_file_and_the_comparison(mezzo, tmp_path):
    code, out, err = mezzo(*QUICK, "--compare-steps", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "float16: all 23 ops run low, nothing needs FP32; the loss scale starts at 2^15"
    policy = Policy.load(tmp_path / "digits-cnn-float16.policy")
    assert str(policy) == "O1,dtype=float16,loss_scale=dynamic(init=32768,ceiling=32768),low=cross_entropy"
    assert policy.rules[0].reason.startswith("the worst gradient of 1 step: ")
    assert "policy file: digits-cnn-float16.policy" in err
    rows = [line.split()[0] for line in lines if " native " in line or " emulated " in line]
    assert rows[:2] == ["O0", "O1,dtype=float16"]
    assert rows[2].startswith("O1,dtype=float16,loss_scale=dynamic(init=32768")
    assert "run directory: runs/digits-cnn-" in err
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert "\x1b" not in out + err


def test_json_is_one_document(mezzo):
    code, out, _ = mezzo(*QUICK, "--no-compare", "--json", "--out", "here.policy", "--objective", "memory")
    assert code == 0
    data = json.loads(out)
    assert data["file"] == "here.policy"
    assert Policy.parse(data["policy"]) == Policy.load("here.policy")
    assert data["rules"].keys() == {"low=cross_entropy"}
    assert data["evidence"]["objective"] == "memory"
    assert [each["kept"] for each in data["evidence"]["candidates"]] == [False] * 23
    assert "comparison" not in data
    code, out, _ = mezzo(*QUICK, "--json", "--out", "there.policy", "--compare-steps", "1")
    assert json.loads(out)["comparison"]["policies"][2] == data["policy"]


def test_nothing_is_overwritten_or_run_where_it_cannot_be(mezzo, tmp_path):
    (tmp_path / "digits-cnn-float16.policy").write_text("mine")
    for words, said in (
        (QUICK, "there is a file digits-cnn-float16.policy already"),
        ((*QUICK, "--out", "none/x.policy"), "there is no folder none to save in"),
        (("tune", "digits-cn"), "did you mean 'digits-cnn'?"),
        (("tune", "digits-cnn", "--dtype", "float61"), "nothing can be tuned in 'float61'"),
        (("tune", "digits-cnn", "--out", "x.policy", "--objective", "spede"), "did you mean 'speed'?"),
    ):
        code, out, err = mezzo(*words, "--no-compare")
        assert (code, out) == (2, ""), words
        assert said in err, words
    assert [each.name for each in tmp_path.iterdir()] == ["digits-cnn-float16.policy"]
    assert (tmp_path / "digits-cnn-float16.policy").read_text() == "mine"
    assert mezzo(*QUICK, "--no-compare", "--overwrite")[0] == 0
    assert Policy.load(tmp_path / "digits-cnn-float16.policy").level == "O1"


def test_gradients_that_stay_far_from_fp32_are_an_alert(mezzo, monkeypatch):
    def far(*args, **kwargs):
        found = tune(nn.Linear(8, 4), lambda model, batch: model(batch).sum(), [torch.ones(2, 8)], steps=1)
        worse = dataclasses.replace(found.evidence.result, sqnr_db=10.0)
        return dataclasses.replace(found, evidence=dataclasses.replace(found.evidence, result=worse))

    monkeypatch.setattr(recipes, "tune", far)
    code, out, _ = mezzo(*QUICK, "--no-compare", "--out", "x.policy")
    assert code == 4
    assert "the worst gradient stays at 10 dB: no rule raises it by 3 dB" in out


def test_training_that_goes_wrong_under_the_policy_that_was_found_is_an_alert(mezzo, monkeypatch):
    real = recipes.tune

    def too_large(*args, **kwargs):
        found = real(*args, **kwargs)
        return dataclasses.replace(found, policy=Policy.O1("float16", loss_scale=2.0**24))

    monkeypatch.setattr(recipes, "tune", too_large)
    code, out, _ = mezzo(*QUICK, "--compare-steps", "4")
    assert code == 4
    assert "all 23 ops run low" in out
    assert "4 of 4 steps were skipped." in out
