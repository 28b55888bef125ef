"""What mezzo does about a device: it never lets a policy kill the process, and says why it does what."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from mezzo import files
from mezzo.cast.device import decide as device
from mezzo.cast.device import probing as probe_children
from mezzo.cast.device import trial as probe_trial
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport
from mezzo.errors import PolicyError, UnsupportedError

BFLOAT16, FLOAT16, FLOAT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CAN_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
NEEDS_AVX512 = pytest.mark.skipif(
    "avx512" not in torch.backends.cpu.get_cpu_capability().lower(),
    reason="whether oneDNN obeys the limit is seen by an AVX-512 CPU that stops offering bfloat16",
)


def support(dtype, status="native", *, ratio=2.0, cases=("gemm",)):
    return FormatSupport(
        dtype=dtype, status=status, fast=ratio is not None and ratio >= 0.5, speed_ratio=ratio,
        cases=dict.fromkeys(cases, status), speeds={}, detail=f"as told for {dtype}",
    )  # fmt: skip


def report(*, needs_isa_limit=False, **overrides):
    supports = [support(FLOAT16, ratio=0.02), support(BFLOAT16)]
    supports += [support(dtype, "unsupported", ratio=None) for dtype in FORMATS[2:]]
    formats = {entry.dtype: entry for entry in supports} | {entry.dtype: entry for entry in overrides.values()}
    return DeviceReport(device_type="cpu", name="a CPU", formats=formats, needs_isa_limit=needs_isa_limit)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """Begin as a new process does: nothing cached, no limit set, no probe allowed unless a test says so."""
    monkeypatch.setattr(device, "_reports", {})
    monkeypatch.setattr(device, "_protections", {})
    monkeypatch.setattr(device, "_without_onednn", set())
    monkeypatch.setattr(device, "switch_onednn_off", lambda: pytest.fail("oneDNN was switched off"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Through setenv, so that whatever `protect` does to the variable is undone.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)


@pytest.fixture
def told(monkeypatch):
    """Return a function that tells what the probe finds, and counts how often it is asked."""
    asked = []

    def tell(found, *, lasting=True):
        def cpu_report(name):
            asked.append(name)
            return found, lasting

        monkeypatch.setattr(probe_children, "cpu_report", cpu_report)
        return asked

    return tell


@pytest.fixture
def no_probe(monkeypatch):
    monkeypatch.setattr(probe_children, "cpu_report", lambda _: pytest.fail("the CPU was probed"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))


@pytest.fixture
def trial(monkeypatch):
    """Return a function that sets how the trial in a copy of this process ends, and what it was given."""
    tried = []

    def end(trouble, without_onednn=""):
        def survives_here(dtype, cases, *, onednn=True):
            if not onednn:
                return without_onednn
            tried.append((dtype, tuple(cases), os.environ.get("ONEDNN_MAX_CPU_ISA")))
            return trouble

        monkeypatch.setattr(device, "survives_here", survives_here)
        return tried

    return end


# probe ------------------------------------------------------------------------------------------------


def test_a_report_is_found_once_per_process_and_once_per_disk(told, monkeypatch):
    asked = told(report())
    first = device.probe("cpu")
    assert first == report()
    assert device.probe("cpu") is first
    assert len(asked) == 1
    monkeypatch.setattr(device, "_reports", {})  # the next process
    assert device.probe("cpu") == first
    assert len(asked) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(device, "_reports", {})
    device.probe("cpu")
    assert len(asked) == 2


def test_refresh_asks_again_and_replaces_what_is_stored(told, monkeypatch):
    told(report())
    device.probe("cpu")
    newer = report(needs_isa_limit=True)
    asked = told(newer)
    assert device.probe("cpu", refresh=True) == newer
    assert len(asked) == 2
    monkeypatch.setattr(device, "_reports", {})
    assert device.probe("cpu") == newer
    assert len(asked) == 2


def test_an_answer_that_is_not_lasting_is_forgotten_with_the_process(told, monkeypatch):
    asked = told(report(), lasting=False)
    device.probe("cpu")
    device.probe("cpu")
    assert len(asked) == 1
    monkeypatch.setattr(device, "_reports", {})
    device.probe("cpu")
    assert len(asked) == 2


def test_a_corrupt_file_means_probing_again(told, monkeypatch):
    asked = told(report())
    device.probe("cpu")
    (file,) = files.cache_folder().iterdir()
    file.write_text('{"key": ')
    monkeypatch.setattr(device, "_reports", {})
    assert device.probe("cpu") == report()
    assert len(asked) == 2


def test_threads_that_ask_together_probe_once(monkeypatch):
    asked = []

    def slow(name):
        asked.append(name)
        time.sleep(0.05)
        return report(), True

    monkeypatch.setattr(probe_children, "cpu_report", slow)
    threads = [threading.Thread(target=device.probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


# will_emulate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("emulate", ["auto", True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_never_emulated_and_never_probed(no_probe, dtype, emulate):
    decision = device.will_emulate(dtype, "cpu", emulate)
    assert decision.active is False
    assert decision.reason.endswith("is what emulation computes in")
    assert device.protect("cpu", dtype).action == "none"


def test_emulation_on_request_needs_no_probe(no_probe):
    assert device.will_emulate(BFLOAT16, "cpu", True).active


@pytest.mark.parametrize(
    "dtype, emulate, active, reason",
    [
        (BFLOAT16, "auto", False, "native and fast: speed 2 times float32's"),
        (BFLOAT16, False, False, "native and fast"),
        (FLOAT16, "auto", True, "native and slow: speed 0.02 times float32's"),
        (FLOAT16, False, False, "native and slow"),
        (FLOAT8, "auto", True, "float8_e4m3fn on this cpu has no arithmetic"),
    ],
)
def test_auto_emulates_what_is_absent_or_slow_and_false_only_asks_whether_it_works(
    told, dtype, emulate, active, reason
):
    told(report())
    decision = device.will_emulate(dtype, "cpu", emulate)
    assert decision.active is active
    assert reason in decision.reason


def test_no_emulation_of_a_missing_format_is_refused(told):
    told(report())
    with pytest.raises(UnsupportedError) as caught:
        device.will_emulate(FLOAT8, "cpu", False)
    assert str(caught.value) == textwrap.dedent("""\
        float8_e4m3fn cannot be computed natively on this cpu
          why    float8_e4m3fn on this cpu has no arithmetic (as told for torch.float8_e4m3fn)
          write  emulate="auto\"""")


def test_a_crash_that_nothing_cures_is_emulated_or_refused(told, trial):
    told(report(bfloat16=support(BFLOAT16, "crashes", ratio=None)))
    trial("a copy of this process that tried it was killed")
    assert device.will_emulate(BFLOAT16, "cpu", "auto").active
    with pytest.raises(UnsupportedError) as caught:
        device.will_emulate(BFLOAT16, "cpu", False)
    message = str(caught.value)
    assert message.startswith("bfloat16 cannot be computed natively on this cpu\n  why    bfloat16 crashes")
    assert 'write  emulate="auto"\n         ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python …' in message


@pytest.mark.parametrize("emulate", ["auto", False])
def test_a_crash_that_can_be_cured_in_time_is_native(told, trial, emulate):
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    trial("")
    assert device.will_emulate(BFLOAT16, "cpu", emulate).active is False
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_a_crash_that_could_have_been_cured_earlier_is_emulated(told, trial):
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    trial("a copy of this process that tried it was killed")
    decision = device.will_emulate(BFLOAT16, "cpu", "auto")
    assert decision.active
    assert "in this process that is too late or cannot be known" in decision.reason
    with pytest.raises(UnsupportedError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python"):
        device.will_emulate(BFLOAT16, "cpu", False)


def test_a_format_that_is_cured_but_slow_leaves_the_environment_alone(told, trial):
    told(report(float16=support(FLOAT16, "crashes", ratio=0.1), needs_isa_limit=True))
    tried = trial("")
    assert device.will_emulate(FLOAT16, "cpu", "auto").active
    assert not tried
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]


def test_a_device_that_cannot_hold_a_format_cannot_emulate_it_either(monkeypatch):
    present(monkeypatch, "mps")
    found = support(FLOAT8, "unsupported", ratio=None, cases=("storage",))
    monkeypatch.setattr(device, "_accelerator", lambda _: report(float8=found))
    for emulate in ("auto", True, False):
        with pytest.raises(UnsupportedError, match="mps cannot hold float8_e4m3fn"):
            device.will_emulate(FLOAT8, "mps", emulate)


# devices ----------------------------------------------------------------------------------------------


def present(monkeypatch, device_type):
    accelerator = torch.device(device_type) if device_type else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)


def test_the_devices_are_the_cpu_and_the_current_accelerator(monkeypatch):
    present(monkeypatch, None)
    assert device.devices() == ["cpu"]
    present(monkeypatch, "xpu")
    assert device.devices() == ["cpu", "xpu"]


@pytest.mark.parametrize("device_type", ["cuda", "mps", "xpu"])
def test_an_absent_device_is_named_and_never_touched(monkeypatch, no_probe, device_type):
    present(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: pytest.fail("CUDA was touched"))
    for call in (
        lambda: device.will_emulate(FLOAT16, device_type, "auto"),
        lambda: device.will_emulate(FLOAT16, device_type, True),
        lambda: device.protect(device_type, FLOAT16),
        lambda: device.probe(device_type),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value).startswith(f"there is no {device_type} device here\n")
        assert 'write  device_type="cpu"' in str(caught.value)
    assert not torch.cuda.is_initialized()


def test_a_misspelt_device_is_a_different_error(no_probe):
    with pytest.raises(PolicyError, match=r"unknown device type 'cdua'\n  why    did you mean 'cuda'\?"):
        device.probe("cdua")


def test_a_format_that_mezzo_does_not_know(no_probe):
    for call in (device.will_emulate, lambda dtype: device.protect("cpu", dtype)):
        with pytest.raises(PolicyError) as caught:
            call(torch.int8)
        assert str(caught.value) == (
            "torch.int8 is not a format that mezzo computes in\n"
            "  why    it knows float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2"
        )


@pytest.mark.parametrize("emulate", ["yes", None, 1])
def test_emulate_is_auto_true_or_false(no_probe, emulate):
    with pytest.raises(PolicyError, match=f"emulate={emulate!r} is not understood"):
        device.will_emulate(BFLOAT16, "cpu", emulate)


@pytest.mark.parametrize("has_bfloat16, active", [(True, False), (False, True)])
def test_cuda_is_asked_and_not_measured(monkeypatch, has_bfloat16, active):
    present(monkeypatch, "cuda")
    asked = []

    def is_bf16_supported(including_emulation=True):
        asked.append(including_emulation)
        return has_bfloat16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(probe_children, "accelerator_report", lambda *_: pytest.fail("it was measured"))
    assert device.will_emulate(BFLOAT16, "cuda", "auto").active is active
    assert device.will_emulate(FLOAT16, "cuda", "auto").active is False
    assert device.will_emulate(FLOAT8, "cuda", "auto").active is True
    assert device.will_emulate(BFLOAT16, "cuda", True).active is True
    assert set(asked) == {False}, "a bfloat16 that torch imitates is not native"
    assert device.protect("cuda", BFLOAT16).action == ("none" if has_bfloat16 else "emulate")
    if not has_bfloat16:
        with pytest.raises(UnsupportedError, match="bfloat16 cannot be computed natively on this cuda"):
            device.will_emulate(BFLOAT16, "cuda", False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_faster_in_float16():
    found = device.probe("cuda")
    assert found.formats[FLOAT16].status == "native"
    assert found.formats[FLOAT16].speed_ratio > 1
    assert found.name == torch.cuda.get_device_name()
    assert device.will_emulate(FLOAT16, "cuda", "auto").active is False


# protect ----------------------------------------------------------------------------------------------


def test_what_works_needs_no_protection_and_what_is_missing_is_emulated(told, trial):
    told(report())
    tried = trial("never asked")
    assert device.protect("cpu", BFLOAT16).action == "none"
    assert device.protect("cpu", FLOAT16).action == "none"
    assert device.protect("cpu", FLOAT8).action == "emulate"
    assert not tried
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]


def test_the_limit_is_set_before_it_is_tried_and_the_answer_stays_the_same(told, trial):
    told(report(bfloat16=support(BFLOAT16, "crashes", cases=("gemm", "attention")), needs_isa_limit=True))
    tried = trial("")
    first = device.protect()
    assert first.action == "limit"
    assert first.reason == ("bfloat16 crashes on this CPU, so mezzo has set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16")
    assert device.protect("cpu", BFLOAT16) is first
    assert tried == [(BFLOAT16, ("gemm", "attention"), "AVX512_CORE_FP16")]
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    device.probe("cpu", refresh=True)
    assert device.protect() is first


def test_a_limit_that_comes_too_late_is_taken_back(told, trial):
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    trial("a copy of this process that tried it was killed")
    protection = device.protect()
    assert protection.action == "emulate"
    assert protection.reason.endswith("a copy of this process that tried it was killed")
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("trouble, action", [("", "none"), ("it died", "emulate")])
def test_a_limit_of_the_users_own_is_tried_and_never_overridden(told, trial, monkeypatch, trouble, action):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    tried = trial(trouble)
    protection = device.protect()
    assert protection.action == action
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE" in protection.reason
    assert tried == [(BFLOAT16, ("gemm",), "AVX512_CORE")]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"


def test_where_no_child_could_be_started_everything_is_tried_in_a_copy(told, trial):
    told(report(bfloat16=support(BFLOAT16, "crashes", ratio=None, cases=())), lasting=False)
    tried = trial("")
    assert device.will_emulate(BFLOAT16, "cpu", "auto").active, "its speed is not known"
    assert device.will_emulate(BFLOAT16, "cpu", False).active is False
    ((dtype, cases, setting),) = tried
    assert dtype == BFLOAT16
    assert {"gemm_backward", "convolution", "attention_backward"} < set(cases)
    assert not setting


@pytest.mark.parametrize("without", ["", "a copy of this process that tried it was killed by SIGSEGV"])
def test_where_a_product_would_kill_onednn_is_switched_off_and_the_log_says_so_once(
    told, trial, monkeypatch, caplog, without
):
    switched = []
    monkeypatch.setattr(device, "switch_onednn_off", lambda: switched.append(True))
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    trial("a copy of this process that tried it was killed", without)
    assert device.protect().action == "emulate"
    assert not switched, "asking changes nothing"
    assert device.guard("cpu", FLOAT16).action == "none"
    assert not switched
    assert device.guard("cpu", BFLOAT16) == device.guard("cpu", BFLOAT16) == device.protect()
    assert switched == [True]
    (record,) = caplog.records
    because = f"; even without it, {without}: compute in bfloat16 in mezzo's regions alone" if without else ""
    assert record.getMessage() == (
        "oneDNN is switched off in this process\n"
        "  where  every bfloat16 product on the CPU, inside mezzo's regions and outside\n"
        "  why    bfloat16 crashes on this CPU unless ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 is set before oneDNN's first "
        "use, and in this process that is too late or cannot be known: a copy of this process that tried it was "
        f"killed; torch's own kernels take its place, and are slower{because}\n"
        "  write  ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python …"
    )


def test_a_format_that_is_missing_or_safe_leaves_onednn_on(told, trial):
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    trial("")
    assert device.guard("cpu", FLOAT8).action == "emulate"
    assert device.guard("cpu", BFLOAT16).action == "limit"
    assert device.guard("cpu", torch.float32).action == "none"


def test_intentions_are_said_without_being_carried_out(trial, monkeypatch):
    trial("never asked")
    cured = report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True)
    assert device.intention(cured, BFLOAT16) == "limit"
    assert device.intention(cured, FLOAT16) == "emulate"
    assert device.intention(report(), BFLOAT16) == "native"
    assert device.intention(report(), FLOAT8) == "emulate"
    hopeless = report(bfloat16=support(BFLOAT16, "crashes", ratio=None))
    assert device.intention(hopeless, BFLOAT16) == "emulate"
    homeless = report(float8=support(FLOAT8, "unsupported", ratio=None, cases=("storage",)))
    assert device.intention(homeless, FLOAT8) == "unsupported"
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    assert device.intention(cured, BFLOAT16) == "native"


# the trial in a copy of this process ------------------------------------------------------------------


def die(*_):
    os.kill(os.getpid(), signal.SIGILL)


@CAN_FORK
def test_a_copy_that_survives(capfd):
    x = torch.ones(64, 64)
    (x @ x).sum().item()  # whatever threads a product starts are running now
    assert probe_trial.survives_here(torch.float32, ["gemm_backward", "convolution"]) == ""
    assert capfd.readouterr() == ("", "")


@CAN_FORK
@pytest.mark.parametrize(
    "work, trouble",
    [
        (die, "a copy of this process that tried it was killed by an illegal instruction (SIGILL)"),
        (lambda *_: 1 / 0, "a copy of this process that tried it ended with exit code 1"),
        (lambda *_: sys.exit(0), "a copy of this process that tried it ended with exit code 1"),
        (lambda *_: time.sleep(60), "a copy of this process that tried it did not finish in 0.3 s"),
    ],
)
def test_a_copy_that_does_not(monkeypatch, capfd, work, trouble):
    monkeypatch.setattr(probe_trial, "run_case", work)
    monkeypatch.setattr(probe_trial, "TRIAL_TIMEOUT_S", 0.3)
    threads = torch.get_num_threads()
    assert probe_trial.survives_here(BFLOAT16, ["gemm"]) == trouble
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", ""), "a death that was expected is nobody's business"


@CAN_FORK
def test_a_handler_of_the_users_does_not_hide_the_death(monkeypatch):
    monkeypatch.setattr(probe_trial, "run_case", die)
    before = signal.signal(signal.SIGILL, lambda *_: None)
    try:
        assert "SIGILL" in probe_trial.survives_here(BFLOAT16, ["gemm"])
    finally:
        signal.signal(signal.SIGILL, before)


@CAN_FORK
def test_an_exit_status_that_somebody_else_collected_is_no_answer(monkeypatch):
    def collected(pid, _):
        os.kill(pid, signal.SIGKILL)
        real(pid, 0)
        return real(pid, 0)

    real = os.waitpid
    monkeypatch.setattr(os, "waitpid", collected)
    assert "somebody else collected" in probe_trial.survives_here(torch.float32, ["gemm"])


def test_a_platform_without_fork_and_a_process_too_large_to_copy(monkeypatch):
    def refuse():
        raise BlockingIOError("no memory")

    monkeypatch.setattr(os, "fork", refuse, raising=False)
    assert probe_trial.survives_here(BFLOAT16, ["gemm"]) == ("this process could not be copied to find out (no memory)")
    monkeypatch.delattr(os, "fork")
    assert probe_trial.survives_here(BFLOAT16, ["gemm"]) == ("this platform cannot copy a process to find out")


# whole processes --------------------------------------------------------------------------------------


def in_a_fresh_process(program, tmp_path, **environment):
    unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**unset, "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_no_policy_kills_a_process_in_which_the_variable_is_not_set(tmp_path):
    """On any machine: whatever mezzo calls native then runs, forward and backward, in this very process."""
    program = """
        import os
        import torch
        from mezzo.cast.device import decide as device
        from mezzo.cast.device import child as probe_child
        from mezzo.errors import UnsupportedError

        x = torch.ones(2, 96, 96)
        torch.bmm(x, x)  # as a user may have done before: oneDNN has read its environment
        for dtype in device.FORMATS:
            for emulate in ("auto", False):
                try:
                    native = not device.will_emulate(dtype, "cpu", emulate).active
                except UnsupportedError:
                    native = False
                if native and device.protect("cpu", dtype).action != "emulate":
                    for case in probe_child.CASES:
                        probe_child.run_case(case, dtype)
                print(dtype, emulate, native)
    """
    lines = in_a_fresh_process(program, tmp_path)
    assert len(lines) == 2 * len(FORMATS)
    assert "torch.float8_e4m3fn auto False" in lines
    assert "torch.float8_e4m3fn False False" in lines
    (stored,) = (tmp_path / "mezzo").iterdir()
    assert stored.stat().st_size > 0


# A CPU on which bfloat16 "crashes" unless oneDNN is limited to AVX2. The crash is simulated, but whether
# the limit is in force is oneDNN's own answer: with it, it stops offering bfloat16.
SIMULATED = """
    import os, signal, torch
    from mezzo.cast.device import decide as device
    from mezzo.cast.device import probing as probe_children, trial as probe_trial
    from mezzo.cast.device.report import DeviceReport, FormatSupport

    def die_unless_limited(*_):
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            os.kill(os.getpid(), signal.SIGILL)

    crash = FormatSupport(dtype=torch.bfloat16, status="crashes", fast=True, speed_ratio=2.0,
                          cases={"gemm": "crashes"}, speeds={}, detail="gemm: simulated")
    found = DeviceReport(device_type="cpu", name="a CPU", formats={torch.bfloat16: crash},
                         needs_isa_limit=True)
    probe_children.cpu_report = lambda name: (found, False)
    probe_children.ISA_LIMIT = "AVX2"
    probe_trial.run_case = die_unless_limited
    x = torch.ones(2, 96, 96)
"""


@CAN_FORK
@NEEDS_AVX512
def test_before_the_first_use_of_onednn_the_limit_is_set_and_obeyed(tmp_path):
    program = (
        SIMULATED
        + """
    print(device.protect().action, os.environ.get("ONEDNN_MAX_CPU_ISA"))
    torch.nn.functional.gelu(x)
    die_unless_limited()
    print(device.protect().action)
    """
    )
    lines = in_a_fresh_process(program, tmp_path, ONEDNN_VERBOSE="1")
    assert [line for line in lines if "onednn" not in line] == ["limit AVX2", "limit"]
    # The copy of the process speaks too, so every announcement is looked at.
    announced = {line for line in lines if line.startswith("onednn_verbose,v1,info,cpu,isa:")}
    assert announced == {"onednn_verbose,v1,info,cpu,isa:Intel AVX2"}


@CAN_FORK
@NEEDS_AVX512
@pytest.mark.parametrize(
    "use",
    [
        "torch.bmm(x, x)",  # asks oneDNN what the CPU can do, and runs elsewhere
        "torch.nn.functional.gelu(x)",  # runs in oneDNN
        "torch.ops.mkldnn._is_mkldnn_bf16_supported()",
    ],
)
def test_after_the_first_use_the_limit_is_known_to_be_too_late(tmp_path, use):
    program = (
        SIMULATED
        + f"""
    {use}
    protection = device.protect()
    print(protection.action, os.environ.get("ONEDNN_MAX_CPU_ISA"), "SIGILL" in protection.reason)
    print(device.will_emulate(torch.bfloat16, "cpu", "auto").active)
    """
    )
    assert in_a_fresh_process(program, tmp_path) == ["emulate None True", "True"]


@CAN_FORK
@NEEDS_AVX512
def test_a_limit_that_the_user_set_in_time_is_recognised(tmp_path):
    program = (
        SIMULATED
        + """
    torch.bmm(x, x)
    print(device.protect().action, os.environ["ONEDNN_MAX_CPU_ISA"])
    """
    )
    assert in_a_fresh_process(program, tmp_path, ONEDNN_MAX_CPU_ISA="AVX2") == ["none AVX2"]


@CAN_FORK
@NEEDS_AVX512
def test_the_limit_holds_when_the_environment_is_put_back_before_onednn_is_used(tmp_path):
    program = (
        SIMULATED
        + """
    from unittest import mock
    with mock.patch.dict(os.environ):
        print(device.protect().action, os.environ["ONEDNN_MAX_CPU_ISA"])
    print("ONEDNN_MAX_CPU_ISA" in os.environ)
    torch.nn.functional.gelu(x)
    die_unless_limited()
    print(device.protect().action)
    """
    )
    lines = in_a_fresh_process(program, tmp_path, ONEDNN_VERBOSE="1")
    assert [line for line in lines if "onednn" not in line] == ["limit AVX2", "False", "limit"]
    announced = {line for line in lines if line.startswith("onednn_verbose,v1,info,cpu,isa:")}
    assert announced == {"onednn_verbose,v1,info,cpu,isa:Intel AVX2"}


@CAN_FORK
def test_a_copy_without_onednn_leaves_it_on_here(monkeypatch):
    def needs_onednn_off(*_):
        assert not torch.backends.mkldnn.enabled

    monkeypatch.setattr(probe_trial, "run_case", needs_onednn_off)
    assert probe_trial.survives_here(BFLOAT16, ["gemm"], onednn=False) == ""
    assert "exit code 1" in probe_trial.survives_here(BFLOAT16, ["gemm"])
    assert torch.backends.mkldnn.enabled


def test_importing_starts_nothing_sets_nothing_and_touches_no_device(tmp_path):
    program = """
        import os, subprocess, torch
        def refuse(*arguments, **keywords):
            raise SystemExit(f"called at import: {arguments}")
        subprocess.Popen.__init__ = refuse
        if hasattr(os, "fork"):
            os.fork = refuse
        torch.cuda.is_available = torch.accelerator.current_accelerator = refuse
        environment, threads, state = dict(os.environ), torch.get_num_threads(), torch.get_rng_state()
        import mezzo.cast.device.decide
        assert dict(os.environ) == environment
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.cuda.is_initialized()
        # oneDNN has not looked at its environment either, else it would not obey now.
        os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
        print(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    """
    assert in_a_fresh_process(program, tmp_path) == ["False"]
    assert list(tmp_path.iterdir()) == []
