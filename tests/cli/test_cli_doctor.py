"""``mezzo doctor`` prints what the probe found and what mezzo will do about it."""

import json
import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from mezzo.cli.machine import doctor as doctor_module
from stepping.layers import LayerSteps, Spread

from mezzo.cast.device import Action, DeviceReport, FormatSupport, decide, probing
from mezzo.cast.device.probing import Status
from mezzo.cli import main

CRASHING = DeviceReport(
    device_type="cpu",
    name="a crashing CPU",
    formats={
        torch.float16: FormatSupport(status="right", speed_ratio=0.027, detail="slowest: matmul"),
        torch.bfloat16: FormatSupport(status="dead", speed_ratio=2.1, detail="it was [killed] by SIGILL"),
    },
    needs_isa_limit=True,
)


def speed(median):
    return Spread(median=median, p10=0.9 * median, p90=1.1 * median)


STEPS = {
    torch.float16: LayerSteps(speeds={}, trouble="the process that tried it ended with exit code -4"),
    torch.bfloat16: LayerSteps(speeds={128: speed(0.66), 2048: speed(2.4)}),
}


@pytest.fixture(autouse=True)
def crashing(monkeypatch, tmp_path):
    monkeypatch.setattr(decide, "_reports", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    probed = []

    def cpu_report(*, refresh):
        probed.append(refresh)
        return CRASHING

    monkeypatch.setattr(probing, "cpu_report", cpu_report)
    monkeypatch.setattr(doctor_module, "layer_steps", lambda _, dtypes: {each: STEPS[each] for each in dtypes})
    return probed


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    assert stopped.value.code == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_the_table_says_what_works_what_crashes_and_what_follows(capsys):
    out = run(capsys)
    assert not any(len(line) > 120 for line in out.splitlines())
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert rows["float16"] == "right 0.027× – – emulate in FP32 slowest: matmul"
    assert rows["bfloat16"].startswith("dead 2.1× 0.66× (0.59–0.73) 2.4× (2.2–2.6) set ")
    words = " ".join(out.split())
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in words
    assert "[killed]" in words
    assert rows["cpu:"] == "a crashing CPU"
    assert rows["torch"] == torch.__version__
    assert rows["python"] == platform.python_version()
    assert rows["threads"] == str(torch.get_num_threads())
    assert "TF32" not in out, "there is no GPU"
    assert "\x1b" not in out
    assert not os.environ["ONEDNN_MAX_CPU_ISA"], "the doctor looks, and changes nothing"


def test_the_answer_comes_first(capsys):
    lines = run(capsys).split("\n\n")[0].split("cpu: ")[1:]
    assert [" ".join(line.split()) for line in lines] == [
        "float16: no training step could be timed; the process that tried it ended with exit code -4; mezzo will "
        "emulate in FP32",
        "bfloat16 pays at width 2048 only: training steps 0.66× as fast as in FP32 at width 128, 2.4× at width 2048; "
        "mezzo will set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16, then compute natively",
    ]


def test_quick_times_no_steps(capsys, monkeypatch):
    monkeypatch.setattr(doctor_module, "layer_steps", None)
    out = run(capsys, "--quick")
    assert out.startswith(
        "cpu: float16: products 0.027× as fast as in FP32, slowest: matmul; mezzo will emulate in FP32\n"
    )
    assert "steps, 128" not in out
    assert "steps" not in json.loads(run(capsys, "--quick", "--json"))["devices"][0]["formats"][0]


@pytest.mark.parametrize("columns", [80, 100])
def test_a_terminal_is_never_too_narrow(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit):
        main(["doctor"])
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert columns - 20 < max(map(len, plain.splitlines())) <= columns
    assert "…" not in plain
    assert "0.66×" in plain


def test_json_holds_the_same_facts(capsys):
    found = json.loads(run(capsys, "--json"))
    assert found["torch"] == torch.__version__
    assert found["tf32"] is None
    assert found["isa_setting"] is None
    (cpu,) = found["devices"]
    assert (cpu["device_type"], cpu["needs_isa_limit"]) == ("cpu", True)
    assert {entry["dtype"]: entry["intention"] for entry in cpu["formats"]} == {
        "float16": "emulate", "bfloat16": "limit"
    }  # fmt: skip
    steps = {entry["dtype"]: entry.pop("steps", None) for entry in cpu["formats"]}
    assert LayerSteps.from_dict(steps["bfloat16"]) == STEPS[torch.bfloat16]
    assert steps["float16"] == {"speeds": {}, "trouble": STEPS[torch.float16].trouble}
    for entry in cpu["formats"]:
        del entry["intention"]
    assert cpu == CRASHING.to_dict()


def test_refresh_probes_again(capsys, crashing):
    run(capsys)
    run(capsys)
    assert crashing == [False]
    run(capsys, "--refresh")
    assert crashing == [False, True]


def test_a_limit_in_the_environment_is_shown(capsys, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    out = run(capsys)
    assert "limit    ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in out
    assert "set ONEDNN_MAX_CPU_ISA" not in out


def test_every_intention_has_its_words():
    assert set(doctor_module.WHAT_MEZZO_DOES) == {*get_args(Action)}


def test_on_a_gpu_the_header_states_tf32(capsys, monkeypatch):
    present = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: present)
    gpu = DeviceReport(device_type="cuda", name="a GPU", formats=CRASHING.formats)
    monkeypatch.setattr(probing, "cuda_report", lambda: gpu)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="ieee"))
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision="tf32"))
    out = run(capsys)
    assert "TF32     products off, convolutions on (float32 is measured so)" in out
    assert "cuda: a GPU" in out


@pytest.mark.slow  # the probe itself is run for real in tests/cast/test_device.py
def test_the_real_thing_without_the_variable(tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    done = subprocess.run(
        [sys.executable, "-c", "from mezzo.cli import main; main(['doctor', '--quick', '--json'])"],
        env={**environment, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    cpu = found["devices"][0]
    assert [entry["dtype"] for entry in cpu["formats"]] == ["float16", "bfloat16"]
    assert all(entry["status"] in get_args(Status) for entry in cpu["formats"])
    assert cpu["formats"][0]["speed_ratio"] > 0
