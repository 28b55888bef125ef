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
from mezzo.cast.device import arithmetic, child, decide, devices, intended, kinds, probe, probing
from mezzo.cast.device.report import FORMATS, DeviceReport, FormatSupport
from mezzo.errors import PolicyError, UnsupportedError

BFLOAT16, FLOAT16, FLOAT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CAN_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
NEEDS_AVX512 = pytest.mark.skipif(
    "avx512" not in torch.backends.cpu.get_cpu_capability().lower(),
    reason="whether oneDNN obeys the limit is seen by an AVX-512 CPU that stops offering bfloat16",
)


def support(dtype, status="native", *, ratio=2.0, cases=("gemm",)):
    speeds = {} if ratio is None else {"gemm": ratio}
    return FormatSupport(dtype=dtype, cases=dict.fromkeys(cases, status), speeds=speeds, detail=f"as told for {dtype}")


def report(*, needs_isa_limit=False, **overrides):
    supports = [support(FLOAT16, ratio=0.02), support(BFLOAT16)]
    supports += [support(dtype, "unsupported", ratio=None) for dtype in FORMATS[2:]]
    formats = {entry.dtype: entry for entry in supports} | {entry.dtype: entry for entry in overrides.values()}
    return DeviceReport(device_type="cpu", name="a CPU", formats=formats, needs_isa_limit=needs_isa_limit)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """Begin as a new process does: nothing cached, no limit set, no probe allowed unless a test says so."""
    monkeypatch.setattr(decide, "_reports", {})
    monkeypatch.setattr(decide, "_native", {})
    monkeypatch.setattr(decide, "_without_onednn", set())
    monkeypatch.setattr(decide, "switch_onednn_off", lambda: pytest.fail("oneDNN was switched off"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Through setenv, so that whatever a decision does to the variable is undone.
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

        monkeypatch.setattr(probing, "cpu_report", cpu_report)
        return asked

    return tell


@pytest.fixture
def no_probe(monkeypatch):
    monkeypatch.setattr(probing, "cpu_report", lambda _: pytest.fail("the CPU was probed"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))


@pytest.fixture
def tried(monkeypatch):
    """Return a function that sets how the trial in a copy of this process ends, and what it was given."""
    given = []

    def end(trouble, without_onednn=""):
        def survives_here(dtype, cases, *, onednn=True):
            if not onednn:
                return without_onednn
            given.append((dtype, tuple(cases), os.environ.get("ONEDNN_MAX_CPU_ISA")))
            return trouble

        monkeypatch.setattr(decide, "survives_here", survives_here)
        return given

    return end


@pytest.fixture
def switched(monkeypatch):
    """How often oneDNN was switched off, which is allowed here."""
    times = []
    monkeypatch.setattr(decide, "switch_onednn_off", lambda: times.append(True))
    return times


# probe ------------------------------------------------------------------------------------------------


def test_a_report_is_found_once_per_process_and_once_per_disk(told, monkeypatch):
    asked = told(report())
    first = probe("cpu")
    assert first == report()
    assert probe("cpu") is first
    assert len(asked) == 1
    monkeypatch.setattr(decide, "_reports", {})  # the next process
    assert probe("cpu") == first
    assert len(asked) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(decide, "_reports", {})
    probe("cpu")
    assert len(asked) == 2


def test_refresh_asks_again_and_replaces_what_is_stored(told, monkeypatch):
    told(report())
    probe("cpu")
    newer = report(needs_isa_limit=True)
    asked = told(newer)
    assert probe("cpu", refresh=True) == newer
    assert len(asked) == 2
    monkeypatch.setattr(decide, "_reports", {})
    assert probe("cpu") == newer
    assert len(asked) == 2


def test_an_answer_that_is_not_lasting_is_forgotten_with_the_process(told, monkeypatch):
    asked = told(report(), lasting=False)
    probe("cpu")
    probe("cpu")
    assert len(asked) == 1
    monkeypatch.setattr(decide, "_reports", {})
    probe("cpu")
    assert len(asked) == 2


def test_a_corrupt_file_means_probing_again(told, monkeypatch):
    asked = told(report())
    probe("cpu")
    (file,) = files.cache_folder().iterdir()
    file.write_text('{"key": ')
    monkeypatch.setattr(decide, "_reports", {})
    assert probe("cpu") == report()
    assert len(asked) == 2


def test_threads_that_ask_together_probe_once(monkeypatch):
    asked = []

    def slow(name):
        asked.append(name)
        time.sleep(0.05)
        return report(), True

    monkeypatch.setattr(probing, "cpu_report", slow)
    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


# arithmetic -------------------------------------------------------------------------------------------


def test_full_precision_is_never_emulated_and_never_probed(no_probe):
    for dtype in (torch.float32, torch.float64):
        for emulate in ("auto", True, False):
            choice = arithmetic(dtype, "cpu", emulate)
            assert choice.action == "native"
            assert choice.reason.endswith("is what emulation computes in")


@pytest.mark.parametrize(
    "dtype, emulate, action, reason",
    [
        (BFLOAT16, "auto", "native", "native and fast: speed 2 times float32's"),
        (BFLOAT16, False, "native", "native and fast"),
        (BFLOAT16, True, "emulate", "emulate=True asks for it"),
        (FLOAT16, "auto", "emulate", "native and slow: speed 0.02 times float32's"),
        (FLOAT16, False, "native", "native and slow"),
        (FLOAT8, "auto", "emulate", "float8_e4m3fn on this cpu has no arithmetic"),
        (FLOAT8, True, "emulate", "emulate=True asks for it"),
    ],
)
def test_auto_emulates_what_is_absent_or_slow_and_false_only_asks_whether_it_works(
    told, tried, dtype, emulate, action, reason
):
    told(report())
    given = tried("never asked")
    choice = arithmetic(dtype, "cpu", emulate)
    assert choice.action == action
    assert reason in choice.reason
    assert not given
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]


def test_no_emulation_of_a_missing_format_is_refused(told):
    told(report())
    with pytest.raises(UnsupportedError) as caught:
        arithmetic(FLOAT8, "cpu", False)
    assert str(caught.value) == textwrap.dedent("""\
        float8_e4m3fn cannot be computed natively on this cpu
          why    float8_e4m3fn on this cpu has no arithmetic (as told for torch.float8_e4m3fn)
          write  emulate="auto\"""")


def test_a_crash_that_nothing_cures_is_emulated_or_refused(told, tried, switched):
    told(report(bfloat16=support(BFLOAT16, "crashes", ratio=None)))
    tried("a copy of this process that tried it was killed")
    with pytest.raises(UnsupportedError) as caught:
        arithmetic(BFLOAT16, "cpu", False)
    message = str(caught.value)
    assert message.startswith("bfloat16 cannot be computed natively on this cpu\n  why    bfloat16 crashes")
    assert 'write  emulate="auto"\n         ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python …' in message
    assert not switched, "what is refused changes nothing"
    for emulate in ("auto", True):
        assert arithmetic(BFLOAT16, "cpu", emulate).action == "emulate"
    assert switched == [True]


@pytest.mark.parametrize("emulate, action", [("auto", "limit"), (False, "limit"), (True, "emulate")])
def test_a_limit_is_set_before_it_is_tried_and_the_answer_stays_the_same(told, tried, emulate, action):
    told(report(bfloat16=support(BFLOAT16, "crashes", cases=("gemm", "attention")), needs_isa_limit=True))
    given = tried("")
    first = arithmetic(BFLOAT16, "cpu", emulate)
    assert first.action == action
    if action == "limit":
        assert first.reason == "bfloat16 crashes on this CPU, so mezzo has set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16", "for what emulation does not reach, too"
    assert arithmetic(BFLOAT16, "cpu", emulate) == first
    assert given == [(BFLOAT16, ("gemm", "attention"), "AVX512_CORE_FP16")]
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    probe("cpu", refresh=True)
    assert arithmetic(BFLOAT16, "cpu", emulate) == first
    assert len(given) == 1


def test_a_limit_that_comes_too_late_is_taken_back(told, tried, switched):
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    tried("a copy of this process that tried it was killed")
    with pytest.raises(UnsupportedError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 python"):
        arithmetic(BFLOAT16, "cpu", False)
    choice = arithmetic(BFLOAT16)
    assert choice.action == "emulate"
    assert "in this process that is too late or cannot be known" in choice.reason
    assert choice.reason.endswith("a copy of this process that tried it was killed")
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("trouble, action", [("", "native"), ("it died", "emulate")])
def test_a_limit_of_the_users_own_is_tried_and_never_overridden(told, tried, switched, monkeypatch, trouble, action):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    given = tried(trouble)
    choice = arithmetic(BFLOAT16)
    assert choice.action == action
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE" in choice.reason
    assert given == [(BFLOAT16, ("gemm",), "AVX512_CORE")]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"


def test_a_format_that_is_cured_but_slow_is_emulated(told, tried):
    told(report(float16=support(FLOAT16, "crashes", ratio=0.1), needs_isa_limit=True))
    tried("")
    assert arithmetic(FLOAT16).action == "emulate"
    assert arithmetic(FLOAT16, "cpu", False).action == "limit"


def test_where_no_child_could_be_started_everything_is_tried_in_a_copy(told, tried):
    told(report(bfloat16=support(BFLOAT16, "crashes", ratio=None, cases=())), lasting=False)
    given = tried("")
    assert arithmetic(BFLOAT16).action == "emulate", "its speed is not known"
    assert arithmetic(BFLOAT16, "cpu", False).action == "native"
    ((dtype, cases, setting),) = given
    assert dtype == BFLOAT16
    assert {"gemm_backward", "convolution", "attention_backward"} < set(cases)
    assert not setting


@pytest.mark.parametrize("without", ["", "a copy of this process that tried it was killed by SIGSEGV"])
def test_where_a_product_would_kill_onednn_is_switched_off_and_the_log_says_so_once(
    told, tried, switched, caplog, without
):
    told(report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True))
    tried("a copy of this process that tried it was killed", without)
    assert arithmetic(FLOAT8).action == "emulate"
    assert arithmetic(FLOAT16, "cpu", False).action == "native"
    assert not switched, "neither a missing format nor a safe one needs it"
    assert arithmetic(BFLOAT16) == arithmetic(BFLOAT16)
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


def test_intentions_are_said_without_being_carried_out(tried, monkeypatch):
    tried("never asked")
    cured = report(bfloat16=support(BFLOAT16, "crashes"), needs_isa_limit=True)
    assert intended(cured, BFLOAT16) == "limit"
    assert intended(cured, FLOAT16) == "emulate"
    assert intended(report(), BFLOAT16) == "native"
    assert intended(report(), FLOAT8) == "emulate"
    hopeless = report(bfloat16=support(BFLOAT16, "crashes", ratio=None))
    assert intended(hopeless, BFLOAT16) == "emulate"
    homeless = report(float8=support(FLOAT8, "unsupported", ratio=None, cases=("storage",)))
    assert intended(homeless, FLOAT8) == "unsupported"
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    assert intended(cured, BFLOAT16) == "native"


# devices ----------------------------------------------------------------------------------------------


def present(monkeypatch, device_type):
    accelerator = torch.device(device_type) if device_type else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)


def test_the_devices_are_the_cpu_and_the_current_accelerator(monkeypatch):
    present(monkeypatch, None)
    assert devices() == ["cpu"]
    assert kinds.default_kinds() == ("cpu",)
    present(monkeypatch, "xpu")
    assert devices() == ["cpu", "xpu"]
    assert kinds.default_kinds() == ("xpu",)


@pytest.mark.parametrize("device_type", ["cuda", "mps", "xpu"])
def test_an_absent_device_is_named_and_never_touched(monkeypatch, no_probe, device_type):
    present(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: pytest.fail("CUDA was touched"))
    for call in (
        lambda: arithmetic(FLOAT16, device_type, "auto"),
        lambda: arithmetic(FLOAT16, device_type, True),
        lambda: probe(device_type),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value).startswith(f"there is no {device_type} device here\n")
        assert 'write  device_type="cpu"' in str(caught.value)
    assert not torch.cuda.is_initialized()


def test_words_that_are_not_understood(no_probe):
    with pytest.raises(PolicyError, match=r"unknown device type 'cdua'\n  why    did you mean 'cuda'\?"):
        probe("cdua")
    with pytest.raises(PolicyError) as caught:
        arithmetic(torch.int8)
    assert str(caught.value) == (
        "torch.int8 is not a format that mezzo computes in\n"
        "  why    it knows float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2"
    )
    for emulate in ("yes", None, 1):
        with pytest.raises(PolicyError, match=f"emulate={emulate!r} is not understood"):
            arithmetic(BFLOAT16, "cpu", emulate)


def test_a_device_that_cannot_hold_a_format_cannot_emulate_it_either(monkeypatch):
    present(monkeypatch, "mps")
    found = support(FLOAT8, "unsupported", ratio=None, cases=("storage",))
    monkeypatch.setattr(decide, "_accelerator", lambda _: report(float8=found))
    for emulate in ("auto", True, False):
        with pytest.raises(UnsupportedError, match="mps cannot hold float8_e4m3fn"):
            arithmetic(FLOAT8, "mps", emulate)


@pytest.mark.parametrize("has_bfloat16, action", [(True, "native"), (False, "emulate")])
def test_cuda_is_asked_and_not_measured(monkeypatch, has_bfloat16, action):
    present(monkeypatch, "cuda")
    asked = []

    def is_bf16_supported(including_emulation=True):
        asked.append(including_emulation)
        return has_bfloat16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(probing, "accelerator_report", lambda *_: pytest.fail("it was measured"))
    assert arithmetic(BFLOAT16, "cuda").action == action
    assert arithmetic(FLOAT16, "cuda").action == "native"
    assert arithmetic(FLOAT8, "cuda").action == "emulate"
    assert arithmetic(BFLOAT16, "cuda", True).action == "emulate"
    assert set(asked) == {False}, "a bfloat16 that torch imitates is not native"
    if not has_bfloat16:
        with pytest.raises(UnsupportedError, match="bfloat16 cannot be computed natively on this cuda"):
            arithmetic(BFLOAT16, "cuda", False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_faster_in_float16():
    found = probe("cuda")
    assert found.formats[FLOAT16].status == "native"
    assert found.formats[FLOAT16].speed_ratio > 1
    assert found.name == torch.cuda.get_device_name()
    assert arithmetic(FLOAT16, "cuda").action == "native"


# the trial in a copy of this process ------------------------------------------------------------------


def die(*_):
    os.kill(os.getpid(), signal.SIGILL)


@CAN_FORK
def test_a_copy_that_survives(capfd):
    x = torch.ones(64, 64)
    (x @ x).sum().item()  # whatever threads a product starts are running now
    assert probing.survives_here(torch.float32, ["gemm_backward", "convolution"]) == ""
    assert capfd.readouterr() == ("", "")


@CAN_FORK
def test_a_copy_that_does_not(monkeypatch, capfd):
    monkeypatch.setattr(probing, "TRIAL_TIMEOUT_S", 0.3)
    threads = torch.get_num_threads()
    for work, trouble in (
        (die, "was killed by an illegal instruction (SIGILL)"),
        (lambda *_: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda *_: 1 / 0, "ended with exit code 1"),
        (lambda *_: sys.exit(0), "ended with exit code 1"),
        (lambda *_: time.sleep(60), "did not finish in 0.3 s"),
    ):
        monkeypatch.setattr(probing, "run_case", work)
        assert probing.survives_here(BFLOAT16, ["gemm"]) == f"a copy of this process that tried it {trouble}"
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", ""), "a death that was expected is nobody's business"


@CAN_FORK
def test_handlers_and_masks_of_the_users_hide_neither_a_death_nor_an_endless_wait(monkeypatch):
    monkeypatch.setattr(probing, "TRIAL_TIMEOUT_S", 0.3)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGILL, signal.SIGALRM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        monkeypatch.setattr(probing, "run_case", die)
        assert "SIGILL" in probing.survives_here(BFLOAT16, ["gemm"])
        monkeypatch.setattr(probing, "run_case", lambda *_: threading.Lock().acquire() and time.sleep(60))
        assert "did not finish" in probing.survives_here(BFLOAT16, ["gemm"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


@CAN_FORK
def test_a_copy_tells_its_result_and_leaves_no_file_open():
    before = os.listdir("/dev/fd")
    assert child.in_copy(lambda: {"threads": 3}, 60.0) == ({"threads": 3}, child.Ended("itself"))
    told, ended = child.in_copy(lambda: os.kill(os.getpid(), signal.SIGSEGV), 60.0)
    assert (told, ended) == (None, child.Ended("fault", "was killed by SIGSEGV"))
    assert os.listdir("/dev/fd") == before


@CAN_FORK
def test_an_exit_status_that_other_code_collected_is_no_answer(monkeypatch):
    def collected(pid, options):
        os.kill(pid, signal.SIGKILL)
        real(pid, 0)
        return real(pid, options)

    real = os.waitpid
    monkeypatch.setattr(os, "waitpid", collected)
    assert "other code collected its exit status" in probing.survives_here(torch.float32, ["gemm"])


def test_a_platform_without_fork_and_a_process_too_large_to_copy(monkeypatch):
    def refuse():
        raise BlockingIOError("no memory")

    monkeypatch.setattr(os, "fork", refuse, raising=False)
    assert probing.survives_here(BFLOAT16, ["gemm"]) == "this process could not be copied to find out (no memory)"
    monkeypatch.delattr(os, "fork")
    trouble = probing.survives_here(BFLOAT16, ["gemm"])
    assert trouble == "this process could not be copied to find out (this platform copies no processes)"
    # The probe's child is expendable: there it is tried in place.
    assert child.try_in_copy("float32", None, "storage") == child.Tried("native")


@CAN_FORK
def test_a_copy_without_onednn_leaves_it_on_here(monkeypatch):
    def needs_onednn_off(*_):
        assert not torch.backends.mkldnn.enabled

    monkeypatch.setattr(probing, "run_case", needs_onednn_off)
    assert probing.survives_here(BFLOAT16, ["gemm"], onednn=False) == ""
    assert "exit code 1" in probing.survives_here(BFLOAT16, ["gemm"])
    assert torch.backends.mkldnn.enabled


# whole processes --------------------------------------------------------------------------------------


def in_a_fresh_process(program, tmp_path, **environment):
    unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**unset, "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_no_policy_kills_a_process_in_which_the_variable_is_not_set(tmp_path):
    """The real probe, on any machine: whatever mezzo calls native then runs, forward and backward, in this process."""
    program = """
        import torch
        from mezzo.cast.device import arithmetic
        from mezzo.cast.device.child import CASES, run_case
        from mezzo.cast.device.report import FORMATS
        from mezzo.errors import UnsupportedError

        x = torch.ones(2, 96, 96)
        torch.bmm(x, x)  # as a user may have done before: oneDNN has read its environment
        for dtype in FORMATS:
            for emulate in ("auto", False):
                try:
                    action = arithmetic(dtype, "cpu", emulate).action
                except UnsupportedError:
                    action = "refused"
                if action in ("native", "limit"):
                    for case in CASES:
                        run_case(case, dtype, sizes=(128,))
                print(dtype, emulate, action)
    """
    lines = in_a_fresh_process(program, tmp_path)
    assert len(lines) == 2 * len(FORMATS)
    assert "torch.float8_e4m3fn auto emulate" in lines
    assert "torch.float8_e4m3fn False refused" in lines
    (stored,) = (tmp_path / "mezzo").iterdir()
    assert stored.stat().st_size > 0


# A CPU on which bfloat16 "crashes" unless oneDNN is limited to AVX2. The crash is simulated, but whether
# the limit is in force is oneDNN's own answer: with it, it stops offering bfloat16.
SIMULATED = """
    import os, signal, torch
    from mezzo.cast.device import arithmetic, child, probing
    from mezzo.cast.device.report import DeviceReport, FormatSupport

    def die_unless_limited(*_):
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            os.kill(os.getpid(), signal.SIGILL)

    def native():
        choice = arithmetic(torch.bfloat16)
        return f"{choice.action} {os.environ.get('ONEDNN_MAX_CPU_ISA')} {'SIGILL' in choice.reason}"

    crash = FormatSupport(dtype=torch.bfloat16, cases={"gemm": "crashes"}, speeds={"gemm": 2.0}, detail="simulated")
    found = DeviceReport(device_type="cpu", name="a CPU", formats={torch.bfloat16: crash}, needs_isa_limit=True)
    probing.cpu_report = lambda name: (found, False)
    probing.ISA_LIMIT = "AVX2"
    probing.run_case = die_unless_limited
    x = torch.ones(2, 96, 96)
"""


@CAN_FORK
@NEEDS_AVX512
def test_before_the_first_use_of_onednn_the_limit_is_set_and_obeyed(tmp_path):
    program = (
        SIMULATED
        + """
    from unittest import mock
    with mock.patch.dict(os.environ):  # an environment that is put back takes the limit not away
        print(native())
    print("ONEDNN_MAX_CPU_ISA" in os.environ)
    torch.nn.functional.gelu(x)
    die_unless_limited()
    print(native())
    """
    )
    lines = in_a_fresh_process(program, tmp_path, ONEDNN_VERBOSE="1")
    assert [line for line in lines if "onednn" not in line] == ["limit AVX2 False", "False", "limit None False"]
    # The copy of the process speaks too, so every announcement is looked at.
    announced = {line for line in lines if line.startswith("onednn_verbose,v1,info,cpu,isa:")}
    assert announced == {"onednn_verbose,v1,info,cpu,isa:Intel AVX2"}


@CAN_FORK
@NEEDS_AVX512
def test_after_the_first_use_the_limit_is_known_to_be_too_late(tmp_path):
    program = (
        SIMULATED
        + """
    def too_late(use):
        use()
        return native(), torch.backends.mkldnn.enabled

    def the_users_own():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
        torch.bmm(x, x)
        return native()

    # Each in a process that has not used oneDNN yet.
    for scenario in (
        lambda: too_late(lambda: torch.bmm(x, x)),  # asks oneDNN what the CPU can do, and runs elsewhere
        lambda: too_late(lambda: torch.nn.functional.gelu(x)),  # runs in oneDNN
        lambda: too_late(torch.ops.mkldnn._is_mkldnn_bf16_supported),
        the_users_own,
    ):
        print(child.in_copy(scenario, 60.0)[0])
    """
    )
    late = "['emulate None True', False]"
    # What oneDNN is switched off for is logged to stderr, by logging's last resort.
    program = program.replace("import os, signal, torch", "import logging, os, signal, torch\n    logging.disable()", 1)
    assert in_a_fresh_process(program, tmp_path) == [late, late, late, "native AVX2 False"]
