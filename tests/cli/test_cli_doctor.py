"""``mezzo doctor``: the verdict first, one table, JSON for a bug report, and an exit code where a format fails."""

import json
import re
from typing import get_args

import pytest
import torch

from mezzo import releases
from mezzo.cast.device import FAMILIES, Action, Claim, DeviceReport, FamilySupport, FormatSupport, decide, probing
from mezzo.checkup import Checkup, FormatTraining, Speed
from mezzo.cli import doctor as doctor_module
from mezzo.cli import main

HAS = {
    dtype: Claim(has=(name,), words=f"it has {name}")
    for dtype, name in ((torch.float16, "avx512_fp16"), (torch.bfloat16, "avx512_bf16"))
}

CRASHING = DeviceReport(
    device_type="cpu",
    name="a crashing CPU",
    formats={
        torch.float16: FormatSupport(
            families={
                "products": FamilySupport(status="right", speed_ratio=0.91, detail="slowest: matmul"),
                "convolution": FamilySupport(status="right", speed_ratio=0.027, detail="slowest: convolution"),
                "attention": FamilySupport(status="wrong", detail="attention at width 128 is off by 0.3 of its norm"),
                "recurrent": FamilySupport(status="right", speed_ratio=1.5, detail="slowest: gru"),
            }
        ).claiming(HAS[torch.float16]),
        torch.bfloat16: FormatSupport.same_for_all(
            "dead", "it was [killed] by SIGILL", speed_ratio=2.1, claim=HAS[torch.bfloat16], is_cured=True
        ),
    },
    needs_isa_limit=True,
)


def training(policy, **changes):
    good = {"loss": 2.0, "fp32_loss": 2.0, "weights_error": 0.004, "tolerance": 0.04, "low_share": 1.0}
    return FormatTraining(policy=policy, is_emulated=False, **(good | changes))


def speed(median):
    return Speed(median=median, p10=0.9 * median, p90=1.1 * median)


GOOD = {
    dtype: Checkup(
        device="cpu",
        dtype=dtype,
        trainings=(training(f"O1,dtype={dtype}"), training(f"O2,dtype={dtype}", weights_error=0.02)),
        speeds={128: speed(0.66), 2048: speed(2.4)},
    )
    for dtype in ("float16", "bfloat16")
}
WRONG = Checkup(device="cpu", dtype="float16", trainings=(training("O1,dtype=float16", weights_error=float("nan")),))
DEAD = Checkup(device="cpu", dtype="float16", trouble="another process was killed by SIGILL and had said nothing")


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """What each format's checkup comes to, to be changed by a test."""
    families = dict(GOOD)
    monkeypatch.setattr(decide, "_reports", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(
        probing, "cpu_report", lambda *, refresh: families.setdefault("refreshed", []).append(refresh) or CRASHING
    )
    monkeypatch.setattr(doctor_module, "checked", lambda device, dtype: families[dtype])
    monkeypatch.setattr(doctor_module, "environment", lambda: {"machine": {"torch": torch.__version__}})
    return families


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    output = capsys.readouterr()
    assert output.err == ""
    return stopped.value.code or 0, output.out


def test_the_answer_comes_first_and_then_one_table(capsys, monkeypatch):
    code, out = run(capsys)
    assert code == 0
    assert not any(len(line) > 120 for line in out.splitlines())
    first, second = (" ".join(part.split()) for part in out.split("\n\n")[0].split("cpu: ")[1:])
    assert first == (
        "float16 trains as FP32 does (weights within 2 % of their way), and pays at width 2048 only: steps 0.66× at "
        "width 128, 2.4× at width 2048 FP32's speed; mezzo will compute natively, but emulate convolution and "
        "attention in FP32"
    )
    assert second.endswith("; mezzo will set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, then compute natively")
    assert out.count("family") == 2, "a column and its caption"
    words = " ".join(out.split())
    assert "a crashing CPU" in words
    assert "[killed]" in words
    assert "\x1b" not in out
    assert "O2,dtype=bfloat16" not in out
    assert "O2,dtype=bfloat16" in run(capsys, "--full")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            main(["doctor"])
        plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        assert max(map(len, plain.splitlines())) <= columns
        assert "…" not in plain


def test_a_format_that_fails_is_told_and_ends_with_its_code(capsys, results):
    for checkup, code, says in (
        (WRONG, 4, "trains wrongly here: O1,dtype=float16: its weights end nan %"),
        (DEAD, 3, "does not train here: another"),
    ):
        results["float16"] = checkup
        exit_code, out = run(capsys)
        assert exit_code == code
        words = " ".join(out.split())
        assert says in words
        assert "bfloat16 trains as FP32 does" in words, "the other format has its own process"


def test_what_is_wrong_weighs_more_than_what_died(capsys, results):
    results |= {"float16": DEAD, "bfloat16": WRONG}
    assert run(capsys)[0] == 4


def test_a_torch_that_is_newer_than_those_tested_is_said_to_be_with_what_it_lacks(capsys, monkeypatch):
    monkeypatch.setattr(releases, "NEWEST_TESTED", torch.__version__)
    assert "newer" not in run(capsys)[1]
    monkeypatch.setattr(torch, "__version__", "99.0.1+cpu")
    words = " ".join(run(capsys)[1].split())
    newest = doctor_module.NEWEST_TESTED
    assert f"newer than what was tested, {newest}: it has every private name that mezzo takes cpu:" in words
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    words = " ".join(run(capsys)[1].split())
    assert (
        f"newer than what was tested, {newest}: it lacks what these need "
        "torch._C._current_graph_task_id, to tell whether a backward pass runs cpu:"
    ) in words


def test_quick_trains_nothing(capsys, monkeypatch):
    monkeypatch.setattr(doctor_module, "checked", None)
    code, out = run(capsys, "--quick")
    assert code == 0
    first, second = (" ".join(part.split()) for part in out.split("\n\n")[0].split("cpu: ")[1:])
    assert first == (
        "float16 products 0.91×, convolution 0.027×, recurrent 1.5× as fast as in FP32; attention wrong: attention at "
        "width 128 is off by 0.3 of its norm; mezzo will compute natively, but emulate convolution and attention in "
        "FP32"
    )
    assert second.startswith("bfloat16 products 2.1×, convolution 2.1×, attention 2.1×, recurrent 2.1× as fast as")
    assert "steps, 128" not in out


def test_each_family_has_a_row_which_says_what_is_done_about_it(capsys):
    _, out = run(capsys, "--quick")
    rows = [line.split() for line in out.splitlines() if any(f" {family} " in line for family in FAMILIES)]
    lines = [" ".join(row) for row in rows]
    assert any("convolution right 0.027× emulate in FP32 slow; it was measured at 0.027" in line for line in lines)
    assert any("attention wrong – emulate in FP32 attention at width" in line for line in lines)
    assert any("recurrent right 1.5× compute natively it has avx512_fp16" in line for line in lines)
    words = " ".join(out.split())
    assert "slowest: gru" in words
    assert "although it has avx512_fp16" in words


def test_what_holds_for_all_families_is_said_once(capsys, monkeypatch):
    sm_75 = Claim(has=("sm_75",), words="it is sm_75")
    formats = {torch.float16: FormatSupport.same_for_all("right", "the device is made for it", claim=sm_75),
               torch.bfloat16: FormatSupport.same_for_all(
                   "unsupported", "torch only imitates it on this device")}  # fmt: skip
    made = DeviceReport(device_type="cpu", name="a GPU", formats=formats)
    monkeypatch.setattr(probing, "cpu_report", lambda *, refresh: made)
    first, second, *_ = run(capsys, "--quick")[1].splitlines()
    assert first == "cpu: float16 the device is made for it; mezzo will compute natively"
    assert second == "cpu: bfloat16 torch only imitates it on this device; mezzo will emulate in FP32"


def test_json_is_json_for_any_reader(capsys, results):
    results["float16"] = WRONG
    code, out = run(capsys, "--json")
    assert code == 4
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["machine"]["torch"] == torch.__version__
    assert len(document["verdict"]) == 2
    (cpu,) = document["devices"]
    half, brain = cpu["formats"]
    assert [family["family"] for family in half["families"]] == list(FAMILIES)
    assert [family["intention"] for family in half["families"]] == ["native", "emulate", "emulate", "native"]
    assert {family["intention"] for family in brain["families"]} == {"limit"}
    assert [family["fast"] for family in half["families"]] == [True, False, False, True]
    assert (half["status"], half["families"][2]["status"]) == ("wrong", "wrong")
    assert half["checkups"][0]["status"] == "wrong"
    assert half["checkups"][0]["trainings"][0]["weights_error"] == "nan"
    assert brain["checkups"][0]["speeds"]["2048"]["median"] == 2.4
    below = [
        (products["products"], products["dtype"], products["native"], products["output"])
        for products in cpu["below_sixteen_bits"]
    ]
    kinds = ("fp8, tensorwise", "fp8, rowwise", "mxfp8", "nvfp4")
    assert below == [(products, name, False, name) for name in ("float16", "bfloat16") for products in kinds]


def test_refresh_probes_again(capsys, results):
    run(capsys)
    run(capsys)
    run(capsys, "--refresh")
    assert results["refreshed"] == [False, True]


def test_every_intention_has_its_words():
    assert set(doctor_module.WHAT_MEZZO_DOES) == {*get_args(Action)}
