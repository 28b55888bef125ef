"""The probe's children: deaths, hangs and refusals are blamed on the right case, and harm nobody."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from mezzo.cast.device import child as probe_child
from mezzo.cast.device import probing as probe_children
from mezzo.cast.device.report import DeviceReport, FormatSupport

# A child that needs no torch. It follows the same protocol and suffers on command: `dies`, `hangs` and
# `refuses` hold "dtype case" or "dtype"; the cure is a value of ONEDNN_MAX_CPU_ISA.
FAKE_CHILD = """
import json, os, signal, sys, time
spec, jobs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
setting = os.environ.get("ONEDNN_MAX_CPU_ISA")
with open(spec["log"], "a") as log:
    log.write(json.dumps({"setting": setting, "jobs": jobs, "environment": dict(os.environ)}) + "\\n")
say = lambda **facts: print("mezzo-probe " + json.dumps(facts), flush=True)
hit = lambda kind, dtype, case: {dtype, dtype + " " + case} & set(spec.get(kind, []))
refused = set()
for dtype, case in jobs:
    if dtype in refused:
        continue
    print("onednn_verbose,v1,somebody else's line")
    say(begin=[dtype, case])
    if hit("dies", dtype, case) and (setting is None or setting != spec.get("cure")):
        print("mezzo-probe {\\"end", end="", flush=True)  # cut off in the middle of a line
        os.kill(os.getpid(), signal.SIGILL)
    if hit("hangs", dtype, case):
        time.sleep(60)
    if hit("killed", dtype, case) or (hit("killed once", dtype, case) and not os.path.exists(spec["log"] + ".killed")):
        open(spec["log"] + ".killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if hit("raises", dtype, case):
        sys.exit(1)
    error = "no kernel for " + dtype if hit("refuses", dtype, case) else ""
    if hit("starves", dtype, case):
        error = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 524288 bytes"
    if error:
        refused.add(dtype)
    timed = case not in ("storage", "attention", "attention_backward") and not error
    seconds = spec.get("seconds", {}).get(dtype + " " + case, spec.get("seconds", {}).get(dtype, 1.0))
    say(end=[dtype, case], seconds=seconds if timed else None, error=error)
"""

GEMMS = {"gemm", "gemm_backward", "matmul", "matmul_backward"}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Make the probe start fake children; return a function that sets their suffering and reads their log."""
    log = tmp_path / "children.jsonl"
    monkeypatch.delenv(probe_children.ISA_VARIABLE, raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)

    def suffer(**spec):
        spec = json.dumps({"log": str(log), **spec})
        monkeypatch.setattr(probe_children, "CHILD_COMMAND", (sys.executable, "-c", FAKE_CHILD, spec))

    def children():
        return [json.loads(line) for line in log.read_text().splitlines()]

    suffer.children = children
    suffer()
    return suffer


def test_a_healthy_cpu_needs_one_child_and_gets_ratios_to_float32(fake):
    fake(seconds={"float32": 3.0, "bfloat16": 1.5, "bfloat16 matmul": 2.0, "float16": 30.0})
    report, lasting = probe_children.cpu_report("a CPU")
    assert lasting
    assert report.name == "a CPU"
    assert not report.needs_isa_limit
    bfloat16, float16 = report.formats[torch.bfloat16], report.formats[torch.float16]
    assert (bfloat16.status, bfloat16.fast, bfloat16.speed_ratio) == ("native", True, 1.5)
    assert bfloat16.detail == "slowest: matmul"
    assert set(bfloat16.cases) == set(probe_child.CASES)
    assert (float16.status, float16.fast, float16.speed_ratio) == ("native", False, 0.1)
    assert len(fake.children()) == 1


@pytest.mark.parametrize("seconds, fast", [(2.0, True), (2.01, False)])
@pytest.mark.parametrize("case", probe_child.TIMED_CASES)
def test_the_worst_of_all_products_decides_what_is_fast(fake, case, seconds, fast):
    fake(seconds={"float16": 0.1, f"float16 {case}": seconds})
    report, _ = probe_children.cpu_report("a CPU")
    assert report.formats[torch.float16].fast is fast
    assert report.formats[torch.float16].speed_ratio == pytest.approx(1 / seconds)


def test_each_death_is_blamed_on_its_case_and_the_rest_still_runs(fake):
    fake(dies=[f"bfloat16 {case}" for case in GEMMS], seconds={"float32": 2.0}, cure="AVX512_CORE_FP16")
    report, lasting = probe_children.cpu_report("a CPU")
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
    # The cured child was timed, because that is how a user's process will run.
    assert (bfloat16.fast, bfloat16.speed_ratio) == (True, 2.0)
    assert (float16.status, set(float16.cases)) == ("native", set(probe_child.CASES))
    # Two deaths cost two more children; one with the limit follows. None of the first three has it.
    assert [child["setting"] for child in fake.children()] == [None, None, None, "AVX512_CORE_FP16"]
    assert ["bfloat16", "gemm_backward"] not in fake.children()[1]["jobs"], "it would only die in its forward"


def test_a_crash_that_the_limit_does_not_cure(fake):
    fake(dies=["bfloat16 attention"])
    report, _ = probe_children.cpu_report("a CPU")
    support = report.formats[torch.bfloat16]
    assert not report.needs_isa_limit
    assert (support.status, support.fast, support.speed_ratio) == ("crashes", False, None)
    assert support.detail == "attention: the process was killed by an illegal instruction (SIGILL)"


def test_the_limit_is_no_cure_if_it_saves_only_one_of_two_cases(fake, monkeypatch):
    fake(dies=["bfloat16 gemm"], refuses=[], cure="AVX512_CORE_FP16")
    assert probe_children.cpu_report("a CPU")[0].needs_isa_limit
    spec = json.loads(probe_children.CHILD_COMMAND[-1])
    half_cured = FAKE_CHILD.replace(
        "setting != spec.get(\"cure\")", "setting != spec.get(\"cure\") or case == \"gemm_backward\""
    )  # fmt: skip
    spec["dies"] = ["bfloat16 gemm", "bfloat16 gemm_backward"]
    monkeypatch.setattr(probe_children, "CHILD_COMMAND", (sys.executable, "-c", half_cured, json.dumps(spec)))
    assert not probe_children.cpu_report("a CPU")[0].needs_isa_limit


def test_one_missing_kernel_settles_a_format(fake):
    fake(refuses=["float8_e4m3fn convolution"])
    report, lasting = probe_children.cpu_report("a CPU")
    support = report.formats[torch.float8_e4m3fn]
    assert (support.status, support.fast, support.speed_ratio) == ("unsupported", False, None)
    assert dict(support.cases) == {"storage": "native", "convolution": "unsupported"}
    assert support.detail == "convolution: no kernel for float8_e4m3fn"
    assert support.can_hold
    assert lasting
    assert len(fake.children()) == 1


def test_a_format_that_cannot_even_be_stored(fake):
    fake(refuses=["float8_e5m2 storage"])
    assert not probe_children.cpu_report("a CPU")[0].formats[torch.float8_e5m2].can_hold


def test_a_hang_counts_as_a_crash_but_is_not_kept(fake, monkeypatch):
    monkeypatch.setattr(probe_children, "CHILD_TIMEOUT_S", 1.0)
    fake(hangs=["float16 gemm"])
    report, lasting = probe_children.cpu_report("a CPU")
    float16, bfloat16 = report.formats[torch.float16], report.formats[torch.bfloat16]
    assert float16.status == "crashes"
    assert float16.detail == "gemm: the process did not finish in 1 s"
    assert "matmul" not in float16.cases, "one endless case is enough waiting for a format"
    assert bfloat16.status == "native"
    assert not lasting, "a busy machine must not be condemned for ever"


@pytest.mark.parametrize(
    "suffering, status, detail",
    [
        ("killed", "crashes", "the process was killed by SIGKILL"),
        ("raises", "crashes", "the process ended with exit code 1"),
        ("starves", "unsupported", "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_child_stopped_from_outside_is_no_verdict_for_later_processes(fake, suffering, status, detail):
    fake(**{suffering: ["bfloat16 gemm"]}, cure="AVX512_CORE_FP16")
    report, lasting = probe_children.cpu_report("a CPU")
    bfloat16, float16 = report.formats[torch.bfloat16], report.formats[torch.float16]
    assert not lasting
    assert bfloat16.status == status
    assert bfloat16.detail.startswith(f"gemm: {detail}")
    assert not report.needs_isa_limit, "no limit cures what the processor has not done"
    assert float16.status == "native"
    assert {child["setting"] for child in fake.children()} == {None}


def test_a_child_killed_once_is_asked_again(fake):
    fake(**{"killed once": ["bfloat16 gemm"]})
    report, lasting = probe_children.cpu_report("a CPU")
    assert lasting
    assert report.formats[torch.bfloat16].status == "native"
    assert set(report.formats[torch.bfloat16].cases) == set(probe_child.CASES)
    first, second = fake.children()
    assert second["jobs"][0] == ["bfloat16", "gemm"]
    assert len(second["jobs"]) < len(first["jobs"])


@pytest.mark.parametrize(
    "command, reason",
    [
        (("/nonexistent/python",), "a child process could not be started"),
        ((sys.executable, "-c", "import sys; sys.exit(7)"), "ended with exit code 7 before it had tried"),
        ((sys.executable, "-c", "pass"), "ended with exit code 0 before it had tried anything"),
    ],
)  # fmt: skip
def test_without_children_everything_is_treated_as_a_crash(fake, monkeypatch, command, reason):
    monkeypatch.setattr(probe_children, "CHILD_COMMAND", command)
    report, lasting = probe_children.cpu_report("a CPU")
    assert not lasting
    assert not report.needs_isa_limit
    for support in report.formats.values():
        assert (support.status, support.fast, support.speed_ratio) == ("crashes", False, None)
        assert reason in support.detail
        assert support.detail.endswith("so it is treated as if it crashed")


@pytest.mark.parametrize("attribute, value", [("executable", ""), ("frozen", True)])
def test_a_python_that_must_not_be_started_again_is_not(fake, monkeypatch, attribute, value):
    monkeypatch.setattr(sys, attribute, value, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))
    report, lasting = probe_children.cpu_report("a CPU")
    assert "no executable of its own" in report.formats[torch.bfloat16].detail
    assert not lasting


def test_the_first_child_never_sees_a_limit_and_speed_is_that_of_the_users_setting(fake, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX")
    monkeypatch.setenv("ONEDNN_VERBOSE", "2")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    report, _ = probe_children.cpu_report("a CPU")
    first, second = fake.children()
    assert first["setting"] is None
    assert second["setting"] == "AVX2"
    for child in (first, second):
        assert not {"DNNL_MAX_CPU_ISA", "ONEDNN_VERBOSE", "PYTHONWARNINGS"} & set(child["environment"])
    assert report.formats[torch.bfloat16].speed_ratio == 1.0


def test_a_setting_under_which_it_still_crashes_has_no_speed(fake, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    fake(dies=["bfloat16 gemm"], cure="AVX512_CORE_FP16")
    report, _ = probe_children.cpu_report("a CPU")
    assert report.needs_isa_limit
    assert not report.formats[torch.bfloat16].fast
    assert [child["setting"] for child in fake.children()] == [None, None, "AVX512_CORE_FP16", "ALL", "ALL"]


def test_the_older_name_of_the_variable_counts_when_the_newer_is_absent(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert probe_children.isa_setting() == "AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert probe_children.isa_setting() == "AVX512_CORE"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("DNNL_MAX_CPU_ISA")
    assert probe_children.isa_setting() is None


@pytest.mark.parametrize(
    "code, words",
    [
        (-4, "was killed by an illegal instruction (SIGILL)"),
        (0xC000001D, "was killed by an illegal instruction (SIGILL)"),
        (-9, "was killed by SIGKILL"),
        (-99, "ended with exit code -99"),
        (0, "ended with exit code 0"),
    ],
)
def test_how_a_process_ended_in_words(code, words):
    assert probe_children.how_it_ended(code) == words


def test_an_accelerator_is_tried_in_process_and_imitations_do_not_count(monkeypatch):
    # The CPU stands in for an accelerator: what is tested is how the answers are put together.
    monkeypatch.setattr(probe_children, "ACCELERATOR_SIZES", (32, 64))
    report = probe_children.accelerator_report("cpu", "stand-in", {torch.bfloat16: False})
    assert report.formats[torch.bfloat16].status == "unsupported"
    assert report.formats[torch.bfloat16].detail == "gemm: torch only imitates it on this device"
    assert report.formats[torch.float16].status == "native"
    assert set(report.formats[torch.float16].speeds) == set(probe_child.TIMED_CASES)
    assert report.formats[torch.float8_e4m3fn].status == "unsupported"


def test_real_children_agree_with_float32_about_which_cases_exist(monkeypatch):
    """The real program, in a child without the variable: every announced case ends, or the child dies."""
    environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    jobs = [[dtype, case] for case in probe_child.CASES for dtype in ("float32", "float8_e5m2")]
    done = subprocess.run(
        [*probe_children.CHILD_COMMAND, json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line.removeprefix("mezzo-probe ")) for line in done.stdout.splitlines()]
    begun = [fact["begin"] for fact in facts if "begin" in fact]
    ended = {tuple(fact["end"]): fact for fact in facts if "end" in fact}
    assert begun == [list(job) for job in ended]
    assert {case for dtype, case in ended if dtype == "float32"} == set(probe_child.CASES)
    assert {case for dtype, case in ended if dtype == "float8_e5m2"} == {"storage", "convolution"}
    assert ended["float32", "gemm"]["seconds"] > 0
    assert ended["float32", "attention"]["seconds"] is None
    assert "not implemented" in ended["float8_e5m2", "convolution"]["error"]


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
            probe_child.run_case(case, torch.bfloat16, "meta", sizes=(128,))
        return count.names

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    assert reached("gemm").count("mm") == 1
    assert reached("gemm_backward").count("mm") == 3
    assert reached("matmul_backward").count("mm") == 3
    assert "convolution" in reached("convolution")
    assert "convolution_backward" in reached("convolution_backward")
    assert any("attention" in name or name == "bmm" for name in reached("attention"))
    assert len(reached("attention_backward")) > len(reached("attention"))


def test_work_in_process_leaves_the_random_state_and_the_grad_mode_alone():
    before = torch.get_rng_state()
    with torch.no_grad():
        probe_child.run_case("gemm_backward", torch.float32, sizes=(16,))
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_reports_cannot_be_changed_and_survive_json():
    support = FormatSupport(
        dtype=torch.bfloat16, status="crashes", fast=True, speed_ratio=2.5, cases={"gemm": "crashes"},
        speeds={"gemm": 2.5}, detail="why",
    )  # fmt: skip
    report = DeviceReport(device_type="cpu", name="a CPU", formats={torch.bfloat16: support}, needs_isa_limit=True)
    assert DeviceReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    with pytest.raises(TypeError):
        report.formats[torch.bfloat16].cases["gemm"] = "native"
    with pytest.raises(AttributeError):
        report.name = "another"


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: stored.pop("name"),
        lambda stored: stored.update(needs_isa_limit="no"),
        lambda stored: stored.update(formats=3),
        lambda stored: stored["formats"][0].update(status="splendid"),
        lambda stored: stored["formats"][0].update(dtype="float7"),
        lambda stored: stored["formats"][0].update(dtype="nn"),
        lambda stored: stored["formats"][0].update(speed_ratio="fast"),
        lambda stored: stored["formats"][0].update(cases=[]),
    ],
)
def test_a_damaged_report_is_refused(damage):
    support = FormatSupport(
        dtype=torch.float16, status="native", fast=False, speed_ratio=None, cases={}, speeds={}, detail=""
    )
    report = DeviceReport(device_type="cpu", name="a CPU", formats={torch.float16: support}, needs_isa_limit=False)
    stored = report.to_dict()
    damage(stored)
    with pytest.raises(ValueError, match="not a device report"):
        DeviceReport.from_dict(stored)


def test_what_other_programs_take_of_the_processor_makes_no_format_slow(monkeypatch):
    """A child that waits is measured as one that does not: a busy machine's verdict would be kept for good."""
    monkeypatch.setitem(probe_child.CASES, "gemm", (lambda *_: lambda: time.sleep(0.02), False))
    assert probe_child.time_case("gemm", torch.float32) < 0.01
