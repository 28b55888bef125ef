"""`mezzo test`: the verdict first, a table, JSON, and exit codes that a script can ask for."""

import json
import re

import pytest

from mezzo.cli.machine import check
from mezzo.errors import UnsupportedError
from mezzo.selftest import Measured, SelfTest, TrialResult, chosen


def measured(trial, **fields):
    standard = {
        "trial": trial, "arithmetic": "emulated", "low_share": 1.0, "loss": 0.131, "fp32_loss": 0.1311,
        "gradient_error": 6.1e-4, "skipped": True, "scale": 65536.0, "next_scale": 32768.0, "backoff": 0.5,
        "resumed": "bit for bit", "seconds": 1.0,
        "notes": ("steps run block by block, since no compiler\n  write  apt install g++\x1b",),
    }  # fmt: skip
    return Measured(**standard | fields)


@pytest.fixture
def told(monkeypatch):
    """Say what the trials of a device come to: all works where nothing else is said."""

    def play(make=lambda trial: {"measured": measured(trial)}):
        def selftest(device, dtype, *, told):
            results = tuple(
                TrialResult(device=each, trial=trial, **make(trial)) for each, trial in chosen(device, dtype)
            )
            for result in results:
                told(result)
            return SelfTest(data="handwritten digits", results=results)

        monkeypatch.setattr(check, "selftest", selftest)

    return play


def test_the_verdict_comes_first(mezzo, told):
    told()
    code, out, err = mezzo("test", "--device", "cpu")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "mixed precision works here"
    assert [line[:20] for line in lines[1:3]] == ["cpu: float16 works, ", "cpu: bfloat16 works,"]
    assert "cpu: handwritten digits, FP32's loss 0.1311" in out
    rows = [" ".join(line.split()) for line in lines if line.startswith("O")]
    assert len(rows) == 8
    assert rows[1] == "O1,dtype=float16, mezzo's emulated 100 % 0.1310 0.061 % skipped 65536 → 32768 bit for bit"
    assert out.count("\ncpu: steps run block by block, since no compiler\n  write  apt install g++") == 1
    assert max(len(line) for line in lines[3:]) <= 120
    assert "\x1b" not in out + err


def test_what_is_not_a_terminal_gets_a_line_for_each_training(mezzo, told):
    told()
    _, _, err = mezzo("test", "--device", "cpu", "--dtype", "float16")
    assert err.splitlines() == [
        f"cpu {level},dtype=float16, {name}'s optimizer: works" for level in ("O1", "O2") for name in ("torch", "mezzo")
    ]


def test_a_failure_is_exit_code_1(mezzo, told):
    def make(trial):
        if trial.optimizer == "mezzo":
            return {"measured": measured(trial, skipped=False, next_scale=65536.0)}
        return {"trouble": "the process that tried it ended with exit code -4\x1b[31m"}

    told(make)
    code, out, err = mezzo("test", "--device", "cpu", "--dtype", "float16")
    assert code == 1
    assert out.startswith("mixed precision fails here\ncpu: float16 fails in 4 of 4 trainings; O1 with torch's")
    assert "\n1. cpu O1,dtype=float16, torch's optimizer: the process that tried it ended with exit code -4" in out
    assert "\n2. cpu O1,dtype=float16, mezzo's optimizer: a step with infinite gradients was not skipped" in out
    assert "\n3. cpu O1,dtype=float16, mezzo's optimizer: after an overflow the loss scale went from 65536" in out
    assert "not skipped" in out
    assert "cpu O2,dtype=float16, mezzo's optimizer: fails: a step with" in err
    assert "\x1b" not in out + err


def test_what_cannot_be_done_here_is_exit_code_3(mezzo, told):
    told(lambda trial: {"trouble": "no float16 here", "is_unsupported": True})
    code, out, err = mezzo("test", "--device", "cpu", "--dtype", "float16")
    assert (code, out) == (
        3,
        "mixed precision is not supported here\ncpu: float16 is not supported: no float16 here\n",
    )
    assert err.splitlines()[0].endswith("torch's optimizer: not supported: no float16 here")


def test_json_is_one_object_and_has_the_same_exit_codes(mezzo, told):
    told()
    code, out, _ = mezzo("test", "--device", "cpu", "--json")
    found = json.loads(out)
    assert (code, found["works"], len(found["results"])) == (0, True, 8)
    assert found["verdict"][0] == "mixed precision works here"
    told(lambda trial: {"measured": measured(trial, loss=float("nan"))})
    code, out, _ = mezzo("test", "--device", "cpu", "--json")
    assert (code, json.loads(out)["results"][0]["measured"]["loss"]) == (1, "nan")


@pytest.mark.parametrize("columns", [80, 100])
def test_a_terminal_shows_a_bar_and_no_lines(mezzo, told, monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    told()
    code, out, err = mezzo("test", "--device", "cpu")
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out)
    assert code == 0
    assert max(map(len, plain.splitlines())) <= columns
    for cell in ("O2,dtype=bfloat16, mezzo's", "emulated", "100 %", "skipped", "65536 → 32768", "bit for bit"):
        assert plain.count(cell) >= 8 - 7 * cell.startswith("O2"), "no cell is folded or cut"
    assert "8 trainings" in err
    assert "\x1b[2K" in err, "the bar vanishes"


def test_an_interrupt_is_exit_code_130(mezzo, monkeypatch):
    def selftest(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "selftest", selftest)
    assert mezzo("test", "--device", "cpu")[:2] == (130, "")


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("--device", "cdua"), 2, "unknown device type 'cdua'"),
        (("--dtype", "fp61"), 2, "unknown format 'fp61'"),
        (("--device", "xpu"), 3, "there is no xpu device here"),
    ],
)
def test_what_cannot_be_asked_for(mezzo, words, code, said):
    found, out, err = mezzo("test", *words)
    assert (found, out) == (code, "")
    assert err.startswith(f"mezzo: {said}")


def test_an_error_on_the_way_is_an_error(mezzo, monkeypatch):
    def selftest(*_, **__):
        raise UnsupportedError("no processes here")

    monkeypatch.setattr(check, "selftest", selftest)
    assert mezzo("test", "--device", "cpu") == (3, "", "mezzo: no processes here\n")
