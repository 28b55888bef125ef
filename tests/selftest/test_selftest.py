"""`mezzo.selftest`: which devices, processes that die, and the verdict in words."""

import dataclasses
import json
from dataclasses import asdict

import pytest
import torch

from mezzo.documents import jsonable
from mezzo.errors import PolicyError, UnsupportedError
from mezzo.selftest import Measured, SelfTest, Trial, TrialResult, chosen, run, selftest
from mezzo.selftest.run import TRIALS, faults
from mezzo.selftest.trial import Reference

TRIAL = Trial(level="O1", dtype="float16", optimizer="torch")
GOOD = Measured(
    trial=TRIAL,
    arithmetic="native",
    low_share=0.99,
    loss=0.131,
    fp32_loss=0.13,
    gradient_error=1e-3,
    skipped=True,
    scale=65536.0,
    next_scale=32768.0,
    backoff=0.5,
    resumed="bit for bit",
    notes=(),
    seconds=1.0,
)


def changed(**changes):
    return dataclasses.replace(GOOD, **changes)


# What is wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"low_share": 0.5}, "only 50 % of its products' operations ran in float16"),
        (
            {"gradient_error": 0.1},
            "its first gradient is 10 % of its norm away from FP32's; rounding explains 0.39 %",
        ),
        (
            {"gradient_error": float("nan")},
            "its first gradient is nan % of its norm away from FP32's; rounding explains 0.39 %",
        ),
        ({"loss": 0.2}, "its last losses are 0.2 in the mean, FP32's 0.13"),
        ({"loss": float("nan")}, "its last losses are nan in the mean, FP32's 0.13"),
        ({"skipped": False}, "a step with infinite gradients was not skipped, or wrote something"),
        (
            {"next_scale": 65536.0},
            "after an overflow the loss scale went from 65536 to 65536, not to 32768",
        ),
        ({"backoff": None}, "after an overflow the loss scale went from 65536 to 32768, not to 65536"),
        ({"resumed": "otherwise"}, "a run that is resumed from its checkpoint goes on otherwise"),
    ],
)
def test_each_fault_has_its_words(changes, fault):
    assert faults(changed(**changes)) == [fault]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"low_share": 0.9},
        {"loss": 0.1338},
        {"loss": 0.1262},
        {"gradient_error": 3.9e-3},
        {"trial": dataclasses.replace(TRIAL, dtype="bfloat16"), "gradient_error": 0.031},
        {"backoff": None, "next_scale": 65536.0},
        {"resumed": "not repeatable"},
    ],
)
def test_what_rounding_explains_is_no_fault(changes):
    assert faults(changed(**changes)) == []


def test_faults_do_not_hide_each_other():
    everything = changed(
        low_share=0.0, loss=9.0, gradient_error=1.0, skipped=False, next_scale=1.0, resumed="otherwise"
    )
    assert len(faults(everything)) == 6


# The verdict --------------------------------------------------------------------------------------------------------


def result(device="cpu", dtype="float16", **fields):
    trial = dataclasses.replace(TRIAL, dtype=dtype)
    if "trouble" not in fields:
        fields = {"measured": changed(trial=trial, **fields)}
    return TrialResult(device=device, trial=trial, **fields)


def verdict(*results):
    found = SelfTest(data="handwritten digits", results=results)
    return found.works, found.is_supported, found.verdict


def test_all_is_well():
    assert verdict(result(), result("cuda:0", "bfloat16", arithmetic="emulated", low_share=1.0)) == (
        True,
        True,
        [
            "mixed precision works here",
            "cpu: float16 works, natively: 99 % of the products' operations ran low, losses within 0.77 % of FP32's",
            "cuda:0: bfloat16 works, emulated in FP32, which saves no time: 100 % of the products' operations ran low, "
            "losses within 0.77 % of FP32's",
        ],
    )


def test_a_failure_is_named_and_what_works_beside_it_too():
    works, is_supported, lines = verdict(result(), result(skipped=False), result(dtype="bfloat16"))
    assert (works, is_supported) == (False, True)
    assert lines[:2] == [
        "mixed precision fails here",
        "cpu: float16 fails in 1 of 2 trainings; O1 with torch's optimizer: a step with infinite gradients was not "
        "skipped, or wrote something",
    ]
    assert lines[2].startswith("cpu: bfloat16 works, natively")


def test_what_a_device_cannot_do_is_no_failure():
    refused = result(trouble="no float16 here", is_unsupported=True)
    assert refused.faults == []
    assert not refused.works
    assert verdict(refused, result(dtype="bfloat16"))[:2] == (True, True)
    assert verdict(refused) == (
        True,
        False,
        ["mixed precision is not supported here", "cpu: float16 is not supported: no float16 here"],
    )


def test_a_trial_that_killed_its_process_has_failed():
    works, _, lines = verdict(result(trouble="the process that tried it ended with exit code -4"))
    assert not works
    assert lines[1].endswith("O1 with torch's optimizer: the process that tried it ended with exit code -4")


def test_json_holds_the_verdict_and_the_evidence():
    found = SelfTest(data="made digits", results=(result(loss=float("nan")), result(trouble="it died")))
    told = json.loads(json.dumps(jsonable(found.to_dict()), allow_nan=False))
    assert (told["works"], told["is_supported"], told["data"]) == (False, True, "made digits")
    first, second = told["results"]
    assert (first["device"], first["measured"]["loss"], first["works"]) == ("cpu", "nan", False)
    assert first["measured"]["trial"] == {"level": "O1", "dtype": "float16", "optimizer": "torch"}
    assert (second["measured"], second["trouble"], second["faults"]) == (None, "it died", ["it died"])


# Which devices and formats ------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    present = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: present)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.parametrize(
    "device, devices",
    [(None, ["cpu", "cuda:0", "cuda:1"]), ("cpu", ["cpu"]), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"])],
)
def test_each_device_is_tried(two_gpus, device, devices):
    tried = chosen(device)
    assert tried == [(each, trial) for each in devices for trial in TRIALS]
    assert len(set(TRIALS)) == 8


def test_one_format_is_tried():
    assert {trial.dtype for _, trial in chosen("cpu", "bfloat16")} == {"bfloat16"}


@pytest.mark.parametrize("device, words", [("cuda:2", "cuda:2"), ("cuda:x", "cuda:x"), ("xpu", "xpu")])
def test_a_device_that_is_absent(two_gpus, device, words):
    with pytest.raises(UnsupportedError, match=f"there is no .*{words}"):
        chosen(device)


@pytest.mark.parametrize("device", ["gpu", "", "cdua:0"])
def test_a_word_that_names_no_device(device):
    with pytest.raises(PolicyError, match=f"unknown device type '{device.partition(':')[0]}'"):
        selftest(device)


def test_a_word_that_names_no_format():
    with pytest.raises(PolicyError, match="did you mean 'bfloat16'"):
        selftest("cpu", "bflaot16")


# Processes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def children(monkeypatch):
    """Children that carry out what they are told to, and what each was asked."""
    asked = []

    def play(deadly=(), reference_dies=False, forgets=()):
        def ask(module, arguments, told, *, timeout_s, variables):
            assert module == run.__name__
            asked.append(arguments)
            if reference_dies:
                return "the process that tried it ended with exit code 1: no device"
            told({"data": "handwritten digits"})
            for word in arguments[1:]:
                level, dtype, optimizer = word.split(",")
                if word in forgets:
                    return ""
                if word in deadly:
                    return "the process that tried it ended with exit code -4"
                trial = Trial(level=level, dtype=dtype, optimizer=optimizer)
                told(jsonable({"measured": asdict(changed(trial=trial)), "trouble": "", "is_unsupported": False}))
            return ""

        monkeypatch.setattr(run, "ask", ask)
        return asked

    return play


def test_all_trials_of_a_device_run_in_one_process(children, two_gpus):
    asked, told = children(), []
    found = selftest(told=told.append)
    assert found.works
    assert found.data == "handwritten digits"
    assert [arguments[0] for arguments in asked] == ["cpu", "cuda:0", "cuda:1"]
    assert list(found.results) == told
    assert [(each.device, each.trial) for each in told] == chosen()
    assert all(each.measured.trial == each.trial for each in told)


def test_behind_a_trial_that_kills_its_process_the_next_goes_on(children):
    asked = children(deadly=["O2,float16,torch", "O2,bfloat16,mezzo"])
    found = selftest("cpu")
    assert [len(arguments) - 1 for arguments in asked] == [8, 5]
    dead = [each for each in found.results if each.trouble]
    assert [each.trial.policy for each in dead] == ["O2,dtype=float16", "O2,dtype=bfloat16"]
    assert {each.trouble for each in dead} == {"the process that tried it ended with exit code -4"}
    assert len([each for each in found.results if each.works]) == 6
    assert not found.works


def test_where_fp32_itself_does_not_train_nothing_is_tried_again(children):
    asked = children(reference_dies=True)
    found = selftest("cpu")
    assert len(asked) == 1
    assert len(found.results) == 8
    assert {each.trouble for each in found.results} == {"the process that tried it ended with exit code 1: no device"}
    assert not found.works


def test_a_child_that_says_nothing_of_a_trial_has_not_passed_it(children):
    children(forgets=["O1,bfloat16,torch"])
    (silent,) = (each for each in selftest("cpu").results if not each.works)
    assert silent.faults == ["the process that tried it said nothing of it"]


@pytest.fixture
def child(monkeypatch, capsys):
    """Be the child in this process: what it tells. It trains two steps."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for name, number in {"STEPS": 2, "COMPARED": 1, "CHECKPOINT": 1}.items():
        monkeypatch.setattr(f"mezzo.selftest.trial.{name}", number)
    monkeypatch.setattr(run, "COMPARED", 1)
    told = []
    monkeypatch.setattr(run, "tell", told.append)

    def be(*words):
        run.main("cpu", *words)
        return told

    return be


def test_a_fault_of_one_trial_leaves_the_others(child, monkeypatch):
    errors = iter([UnsupportedError("no float16 here", why="it is old"), RuntimeError("CUDA error: …")])

    def measured(trial, data, fp32):
        if trial.dtype == "float16":
            raise next(errors)
        return GOOD

    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr(run, "_LEARNED", 2.0)
    data, *said = child("O1,float16,torch", "O1,float16,mezzo", "O1,bfloat16,torch")
    assert data == {"data": "handwritten digits"}
    assert said == [
        {"measured": None, "trouble": "no float16 here", "is_unsupported": True},
        {"measured": None, "trouble": "RuntimeError: CUDA error: …", "is_unsupported": False},
        {"measured": asdict(GOOD), "trouble": "", "is_unsupported": False},
    ]


@pytest.mark.parametrize("losses", [[3.0, 2.9], [3.0, float("nan")], [float("nan"), 1.0]])
def test_fp32_must_learn(child, monkeypatch, losses):
    monkeypatch.setattr(run, "reference", lambda data: Reference(losses, torch.zeros(1)))
    with pytest.raises(SystemExit, match=r"FP32 itself does not learn here: its loss goes from \w+"):
        child("O1,float16,torch")


@pytest.mark.slow  # a process that trains for ten seconds, more on a busy machine
def test_the_real_thing():
    found = selftest("cpu")
    assert found.verdict[0] == "mixed precision works here", found.verdict
    assert [(each.device, each.trial) for each in found.results] == chosen("cpu")
    assert all(each.works for each in found.results)
    assert {each.measured.resumed for each in found.results} == {"bit for bit"}
