"""Twenty steps held against FP32: right arithmetic passes, wrong arithmetic is found, a child that dies is reported."""

import json
import math
import os
import signal
import sys

import pytest
import torch
from torch.nn import functional

from mezzo import checkup
from mezzo.cast.device import child, probing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fp32():
    return checkup._trained("O0", CPU)


@pytest.mark.parametrize("level, dtype", [("O1", "float16"), ("O2", "bfloat16")])
def test_right_arithmetic_trains_as_fp32_does(fp32, level, dtype):
    assert fp32.losses[-1] < 0.95 * fp32.losses[0]
    assert len(fp32.losses) == checkup.STEPS
    training = checkup.train(f"{level},dtype={dtype}", CPU, fp32)
    assert training.faults == []
    assert training.weights_error > 0, "it really ran low"
    assert training.low_share > 0.99


def test_wrong_products_are_found(fp32, monkeypatch):
    """A device whose products are a tenth off: the loss hardly tells, the weights do."""
    linear = functional.linear
    monkeypatch.setattr(functional, "linear", lambda x, w, b=None: 1.1 * linear(x, w, b))
    training = checkup.train("O1,dtype=float16", CPU, fp32)
    assert any("its weights end" in fault for fault in training.faults)


def test_a_run_that_stays_in_fp32_is_found(fp32, monkeypatch):
    monkeypatch.setattr(checkup, "low_share", lambda flops, low: 0.0)
    (fault,) = checkup.train("O1,dtype=float16", CPU, fp32).faults
    assert fault == "O1,dtype=float16: only 0 % of its products' operations ran low"


def test_a_loss_that_is_not_fp32_s_is_wrong():
    for name, number in (("loss", math.nan), ("loss", math.inf), ("loss", 2.2), ("weights_error", math.nan)):
        good = {"loss": 2.0, "fp32_loss": 2.0, "weights_error": 0.0, "tolerance": 0.01, "low_share": 1.0}
        training = checkup.FormatTraining(policy="O1", is_emulated=False, **{**good, name: number})
        assert len(training.faults) == 1


# Children ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # each format in three trainings of a real child
def test_a_child_trains():
    report = checkup.checked("cpu", "bfloat16", timed=False)
    assert (report.status, report.trouble, report.speeds) == ("works", "", {})
    assert [training.policy for training in report.trainings] == ["O1,dtype=bfloat16", "O2,dtype=bfloat16"]


def test_a_child_that_dies_is_reported_and_nothing_else_dies(monkeypatch):
    code = f"import os; print('chatter'); os.kill(os.getpid(), {int(signal.SIGILL)})"
    real = probing.answered
    monkeypatch.setattr(probing, "answered", lambda command, *rest: real([sys.executable, "-c", code], *rest))
    report = checkup.checked("cpu", "float16")
    assert report.status == "failed"
    assert report.verdict == "does not train here: another process was killed by SIGILL and had said nothing"


def test_what_a_child_says_beside_is_not_heard(monkeypatch):
    code = f"import os; print('x'); print({child.PREFIX!r} + '{{\"trouble\": \"refused\"}}')"
    answer, ended, fault = probing.answered([sys.executable, "-c", code], os.environ, 60.0)
    assert (answer, ended, fault) == ({"trouble": "refused"}, "", "")


def test_a_format_that_torch_has_not_is_an_answer(monkeypatch, capsys):
    monkeypatch.setattr(child, "die_quietly", lambda: None)
    threads = torch.get_num_threads()
    try:
        checkup.main("cpu", "int8", "")
    finally:
        torch.set_num_threads(threads)
    assert json.loads(capsys.readouterr().out.removeprefix(child.PREFIX))["trouble"]


# Speed ---------------------------------------------------------------------------------------------------------------


def test_pairs_are_timed_in_turns_and_ratios_taken_pair_by_pair():
    times, calls = iter([9.0, 9.0] * 3 + [2.0, 1.0, 3.0, 1.0, 4.0, 1.0]), []

    def clock(step):
        calls.append(step)
        step()
        return next(times)

    speeds = checkup.speeds(CPU, "bfloat16", widths=(8,), repetitions=3, clock=clock)
    assert speeds == {8: checkup.Speed(median=3.0, p10=2.0, p90=4.0)}
    assert calls[::2] == [calls[0]] * 6
    assert calls[1::2] == [calls[1]] * 6


@pytest.mark.parametrize(
    "medians, says",
    [
        ({128: 2.0, 2048: 3.0}, "and pays: steps 2× at width 128, 3× at width 2048 FP32's speed"),
        ({128: 0.5, 2048: 3.0}, "and pays at width 2048 only: steps"),
        ({128: 0.5, 2048: 0.6}, "and saves no time: steps"),
        ({128: 1.0, 2048: 3.0}, "; unclear at width 128, where steps were now faster, now slower"),
    ],
)
def test_the_verdict_says_for_which_layers_a_format_pays(medians, says):
    good = checkup.FormatTraining(
        policy="O1", loss=2.0, fp32_loss=2.0, weights_error=0.001, tolerance=0.01, low_share=1.0, is_emulated=False
    )
    speeds = {width: checkup.Speed(median=m, p10=0.9 * m, p90=1.1 * m) for width, m in medians.items()}
    report = checkup.Checkup(device="cpu", dtype="float16", trainings=(good,), speeds=speeds)
    assert says in report.verdict
