"""What the probe finds: deaths, hangs and refusals are blamed on the right case, and harm no other process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

from mezzo.cast.device import child, probing
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport

GEMMS = ("gemm", "gemm_backward", "matmul", "matmul_backward")
LIMIT = "AVX512_CORE_FP16"


class Death(BaseException):
    """The end of a copy, with its exit code."""


@pytest.fixture
def told(monkeypatch):
    """Have the child's work done in this process, where it suffers on command; return the commander.

    ``dies``, ``hangs``, ``killed``, ``raises``, ``starves`` and ``refuses`` hold "dtype case" or "dtype"; ``cure`` is
    the limit under which nothing dies, and ``seconds`` what is timed. The commander's ``tried`` is what was tried:
    limit, format and case. What a real copy does is tested in test_device.py.
    """
    spec, tried = {}, []
    monkeypatch.delenv(child.ISA_VARIABLE, raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)

    def run_case(case, dtype, device="cpu", sizes=()):
        name, setting = str(dtype).removeprefix("torch."), os.environ.get(child.ISA_VARIABLE)

        def hit(kind):
            return {name, f"{name} {case}"} & set(spec.get(kind, ()))

        tried.append((setting, name, case))
        if hit("dies") and (setting is None or setting != spec.get("cure")):
            raise Death(-signal.SIGILL)
        if hit("hangs"):
            raise Death(-signal.SIGALRM)
        if hit("killed") or (hit("killed once") and tried.count((setting, name, case)) == 1):
            raise Death(-signal.SIGKILL)
        if hit("raises"):
            raise Death(1)
        if hit("starves"):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 524288 bytes")
        if hit("refuses"):
            raise RuntimeError(f"no kernel for {name}\nand more")

    def time_case(case, dtype, device="cpu", size=0):
        name, seconds = str(dtype).removeprefix("torch."), spec.get("seconds", {})
        return seconds.get(f"{name} {case}", seconds.get(name, 1.0))

    def in_copy(work, timeout_s):
        try:
            with mock.patch.dict(os.environ):
                return json.loads(json.dumps(work())), child.Ended("itself")
        except Death as death:
            return None, child._ended(death.args[0], timeout_s)

    def run(command, env, **_):
        with mock.patch.dict(os.environ, env, clear=True):
            found = json.dumps(child.main(**json.loads(command[-1])), default=dataclasses.asdict)
        return subprocess.CompletedProcess(command, 0, f"chatter\n{child.PREFIX}{found}\nmore".encode(), b"")

    for place, stand_in in ((child, run_case), (child, time_case), (child, in_copy), (subprocess, run)):
        monkeypatch.setattr(place, stand_in.__name__, stand_in)

    def suffer(**commands):
        tried.clear()
        spec.clear()
        spec.update(commands)

    suffer.tried = tried
    return suffer


def test_a_healthy_cpu_is_tried_once_and_gets_ratios_to_float32(told):
    told(seconds={"float32": 3.0, "bfloat16": 1.5, "bfloat16 matmul": 2.0, "float16": 30.0})
    report, lasting = probing.cpu_report("a CPU")
    assert lasting
    assert report.name == "a CPU"
    assert not report.needs_isa_limit
    bfloat16, float16 = report.formats[torch.bfloat16], report.formats[torch.float16]
    assert (bfloat16.status, bfloat16.fast, bfloat16.speed_ratio) == ("native", True, 1.5)
    assert bfloat16.detail == "slowest: matmul"
    assert tuple(bfloat16.cases) == child.CASES
    assert (float16.status, float16.fast, float16.speed_ratio) == ("native", False, 0.1)
    assert len(told.tried) == len({*told.tried}) == 5 * len(child.CASES)
    assert {setting for setting, *_ in told.tried} == {None}


def test_the_worst_of_all_products_decides_what_is_fast(told):
    for number, case in enumerate(child.TIMED_CASES):
        seconds = (2.0, 2.01)[number % 2]
        told(seconds={"float16": 0.1, f"float16 {case}": seconds})
        report, _ = probing.cpu_report("a CPU")
        assert report.formats[torch.float16].fast is (seconds == 2.0), case
        assert report.formats[torch.float16].speed_ratio == pytest.approx(1 / seconds)


def test_each_death_is_blamed_on_its_case_and_the_rest_still_runs(told):
    told(dies=[f"bfloat16 {case}" for case in GEMMS], seconds={"float32": 2.0}, cure=LIMIT)
    report, lasting = probing.cpu_report("a CPU")
    bfloat16, float16 = report.formats[torch.bfloat16], report.formats[torch.float16]
    assert bfloat16.status == "crashes"
    assert {case for case, status in bfloat16.cases.items() if status == "crashes"} == {"gemm", "matmul"}
    assert {case for case, status in bfloat16.cases.items() if status == "native"} == {
        "storage", "convolution", "convolution_backward", "attention", "attention_backward"
    }  # fmt: skip
    assert bfloat16.detail == (
        "gemm: the process was killed by an illegal instruction (SIGILL); "
        "works with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    )
    assert report.needs_isa_limit
    assert lasting
    # Timed under the limit, because that is how a user's process will run.
    assert (bfloat16.fast, bfloat16.speed_ratio) == (True, 2.0)
    assert (float16.status, tuple(float16.cases)) == ("native", child.CASES)
    assert {setting for setting, *_ in told.tried} == {None, LIMIT}
    assert (None, "bfloat16", "gemm_backward") not in told.tried, "it would only die in its forward pass"
    assert (None, "bfloat16", "matmul") in told.tried


def test_a_crash_that_the_limit_does_not_cure_or_only_in_part(told):
    told(dies=["bfloat16 attention"])
    report, _ = probing.cpu_report("a CPU")
    support = report.formats[torch.bfloat16]
    assert not report.needs_isa_limit
    assert (support.status, support.fast, support.speed_ratio) == ("crashes", False, None)
    assert support.detail == "attention: the process was killed by an illegal instruction (SIGILL)"
    told(dies=["bfloat16 gemm"], refuses=["bfloat16 matmul"], cure=LIMIT)
    assert not probing.cpu_report("a CPU")[0].needs_isa_limit


def test_one_missing_kernel_settles_a_format(told):
    told(refuses=["float8_e4m3fn convolution", "float8_e5m2 storage"])
    report, lasting = probing.cpu_report("a CPU")
    support = report.formats[torch.float8_e4m3fn]
    assert (support.status, support.fast, support.speed_ratio) == ("unsupported", False, None)
    assert dict(support.cases) == {"storage": "native", "convolution": "unsupported"}
    assert support.detail == "convolution: no kernel for float8_e4m3fn"
    assert support.can_hold
    assert lasting
    assert not report.formats[torch.float8_e5m2].can_hold


@pytest.mark.parametrize(
    "suffering, status, detail",
    [
        ("hangs", "crashes", "the process did not finish in 60 s"),
        ("killed", "crashes", "the process was killed by SIGKILL"),
        ("raises", "crashes", "the process ended with exit code 1"),
        ("starves", "unsupported", "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_what_stops_a_try_from_outside_is_no_verdict_for_later_processes(told, suffering, status, detail):
    told(**{suffering: ["bfloat16 gemm"]}, cure=LIMIT)
    report, lasting = probing.cpu_report("a CPU")
    bfloat16, float16 = report.formats[torch.bfloat16], report.formats[torch.float16]
    assert not lasting, "a busy machine must not be condemned for ever"
    assert bfloat16.status == status
    assert bfloat16.detail.startswith(f"gemm: {detail}")
    assert "matmul" not in bfloat16.cases, "one such case is enough waiting for a format"
    assert not report.needs_isa_limit, "no limit cures what the processor has not done"
    assert float16.status == "native"
    assert {setting for setting, *_ in told.tried} == {None}


def test_a_case_that_is_killed_once_is_tried_again(told):
    told(**{"killed once": ["bfloat16 gemm"]})
    report, lasting = probing.cpu_report("a CPU")
    assert lasting
    assert report.formats[torch.bfloat16].status == "native"
    assert tuple(report.formats[torch.bfloat16].cases) == child.CASES


@pytest.mark.parametrize(
    "command, reason",
    [
        (("/nonexistent/python",), "a child process could not be started"),
        ((sys.executable, "-S", "-c", "import sys; sys.exit(7)"), "ended with exit code 7 before it had said anything"),
        ((sys.executable, "-S", "-c", "pass"), "ended with exit code 0 before it had said anything"),
        (None, "this Python has no executable of its own to start a child process with"),
    ],
)  # fmt: skip
def test_without_a_child_everything_is_treated_as_a_crash(monkeypatch, command, reason):
    if command is None:  # a frozen program's executable is the program
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))
    else:
        monkeypatch.setattr(probing, "CHILD_COMMAND", command)
    report, lasting = probing.cpu_report("a CPU")
    assert not lasting
    assert not report.needs_isa_limit
    for support in report.formats.values():
        assert (support.status, support.fast, support.speed_ratio) == ("crashes", False, None)
        assert reason in support.detail
        assert support.detail.endswith("so it is treated as if it crashed")


def test_a_format_is_tried_without_a_limit_and_its_speed_is_that_of_the_users_setting(told, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert probing.cpu_report("a CPU")[0].formats[torch.bfloat16].speed_ratio == 1.0
    assert [setting for setting, dtype, case in told.tried if (dtype, case) == ("bfloat16", "gemm")] == [None, "AVX2"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    told(dies=["bfloat16 gemm"], cure=LIMIT)
    report, _ = probing.cpu_report("a CPU")
    assert report.needs_isa_limit
    assert not report.formats[torch.bfloat16].fast, "where it still crashes it has no speed"
    settings = [setting for setting, dtype, case in told.tried if (dtype, case) == ("bfloat16", "gemm")]
    assert settings == [None, LIMIT, "ALL"]


def test_the_child_sees_no_limit_no_verbosity_and_no_warning_filters(monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_VERBOSE", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "2")
    seen = []

    def run(command, env, **_):
        seen.append((json.loads(command[-1]), env))
        return subprocess.CompletedProcess(command, 1, b"", b"")

    monkeypatch.setattr(subprocess, "run", run)
    probing.cpu_report("a CPU")
    ((arguments, environment),) = seen
    assert arguments["setting"] == "2"
    assert arguments["dtypes"][0] == "float32"
    assert not {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_VERBOSE", "PYTHONWARNINGS"} & {*environment}


def test_the_older_name_of_the_variable_counts_when_the_newer_is_absent(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert probing.isa_setting() == "AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert probing.isa_setting() == "AVX512_CORE"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("DNNL_MAX_CPU_ISA")
    assert probing.isa_setting() is None


@pytest.mark.slow  # the whole probe is run for real in test_device.py
def test_the_real_child_agrees_with_float32_about_which_cases_exist():
    """The real program without the variable, in the two formats that are measured soonest."""
    environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    arguments = json.dumps({"dtypes": ["float32", "float8_e5m2"], "setting": None, "limit": LIMIT})
    done = subprocess.run(
        [*probing.CHILD_COMMAND, arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.removeprefix(child.PREFIX))
    assert found["free"] == found["limited"] == found["used"]
    float32, float8 = found["free"]["float32"], found["free"]["float8_e5m2"]
    assert tuple(float32) == child.CASES
    assert {outcome["status"] for outcome in float32.values()} == {"native"}
    assert tuple(float8) == ("storage", "convolution")
    assert float32["gemm"]["seconds"] > 0
    assert float32["attention"]["seconds"] is None
    assert "not implemented" in float8["convolution"]["detail"]


# The work itself ----------------------------------------------------------------------------------------


def test_an_accelerator_is_tried_in_process_and_imitations_do_not_count(monkeypatch):
    # The CPU stands in for an accelerator: what is tested is how the answers are put together.
    monkeypatch.setattr(probing, "ACCELERATOR_SIZES", (16, 32))
    monkeypatch.setattr(child, "TIME_BUDGET_S", 0.0)
    report = probing.accelerator_report("cpu", "stand-in", {torch.bfloat16})
    assert report.formats[torch.bfloat16].status == "unsupported"
    assert report.formats[torch.bfloat16].detail == "gemm: torch only imitates it on this device"
    assert report.formats[torch.float16].status == "native"
    assert set(report.formats[torch.float16].speeds) == set(child.TIMED_CASES)
    assert report.formats[torch.float8_e4m3fn].status == "unsupported"


def test_the_cases_compute_what_they_say(monkeypatch):
    """Count the kernels that each case reaches, forward and backward, so that none is empty."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def reached(case):
        with Count() as count:
            child.run_case(case, torch.bfloat16, "meta", sizes=(128,))
        return count.names

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    assert reached("gemm").count("mm") == 1
    assert reached("gemm_backward").count("mm") == 3
    assert reached("matmul_backward").count("mm") == 3
    assert "convolution" in reached("convolution")
    assert "convolution_backward" in reached("convolution_backward")
    assert any("attention" in name or name == "bmm" for name in reached("attention"))
    assert len(reached("attention_backward")) > len(reached("attention"))
    assert "_to_copy" in reached("storage")


def test_work_in_process_leaves_the_random_state_and_the_grad_mode_alone():
    before = torch.get_rng_state()
    with torch.no_grad():
        child.run_case("gemm_backward", torch.float32, sizes=(16,))
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_what_other_programs_take_of_the_processor_makes_no_format_slow(monkeypatch):
    """A child that waits is measured as one that does not: a busy machine's verdict would be kept for good."""
    shapes, _ = child.FAMILIES["gemm"]
    monkeypatch.setitem(child.FAMILIES, "gemm", (shapes, lambda *_: time.sleep(0.02)))
    assert child.time_case("gemm", torch.float32) < 0.01


# Reports ------------------------------------------------------------------------------------------------


def test_a_format_is_what_its_cases_are_together():
    def support(*statuses, speeds=()):
        cases = dict(zip(child.CASES, statuses, strict=False))
        return FormatSupport(dtype=FORMATS[0], cases=cases, speeds=dict(zip(cases, speeds, strict=False)), detail="")

    assert support("native", "native").status == "native"
    assert support("native", "unsupported").status == "unsupported"
    assert support("native", "crashes", "unsupported").status == "crashes"
    assert support().status == "crashes", "nothing could be tried"
    assert support("native", "native", speeds=(2.0, 0.5)).speed_ratio == 0.5
    assert support("native", "native", speeds=(2.0, 0.5)).fast
    assert not support("native", "native", speeds=(2.0, 0.499)).fast
    assert support("native").speed_ratio is None
    assert not support("native").fast
    assert support("crashes", "native", speeds=(2.0,)).fast, "as it will be under the limit"
    assert support("native", "unsupported", speeds=(2.0,)).speed_ratio is None


def test_reports_cannot_be_changed_and_survive_json():
    support = FormatSupport(dtype=torch.bfloat16, cases={"gemm": "crashes"}, speeds={"gemm": 2.5}, detail="why")
    report = DeviceReport(device_type="cpu", name="a CPU", formats={torch.bfloat16: support}, needs_isa_limit=True)
    assert DeviceReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    with pytest.raises(TypeError):
        report.formats[torch.bfloat16].cases["gemm"] = "native"
    with pytest.raises(AttributeError):
        report.name = "another"
