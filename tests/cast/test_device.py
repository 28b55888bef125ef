"""What mezzo does about a device: it never lets a policy kill the process, and says why it does what."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from mezzo.cast.device import arithmetic, child, decide, devices, fast_format, intended, kinds, probe, probing
from mezzo.cast.device.probing import FORMATS, DeviceReport, FormatSupport
from mezzo.errors import PolicyError, UnsupportedError

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
LIMIT = "AVX512_CORE_FP16"


def report(float16=("right", 0.02), bfloat16=("right", 2.0), *, needs_isa_limit=False):
    formats = {
        dtype: FormatSupport(status=status, speed_ratio=ratio, detail="as told")
        for dtype, (status, ratio) in zip(FORMATS, (float16, bfloat16), strict=True)
    }
    return DeviceReport(device_type="cpu", name="a CPU", formats=formats, needs_isa_limit=needs_isa_limit)


CURED = report(bfloat16=("dead", 2.0), needs_isa_limit=True)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """Begin as a new process does: nothing cached, no limit set, no probe allowed unless a test says so."""
    for cache in ("_reports", "_revived"):
        monkeypatch.setattr(decide, cache, {})
    monkeypatch.setattr(decide, "_said", set())
    monkeypatch.setattr(probing, "cpu_report", lambda **_: pytest.fail("the CPU was probed"))
    monkeypatch.setattr(decide, "survives_here", lambda dtype: pytest.fail("a copy of this process was made"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Through setenv, so that whatever a decision does to the variable is undone.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)


@pytest.fixture
def told(monkeypatch):
    """Return a function that tells what the probe finds, and collects how it is asked."""

    def tell(found):
        asked = []
        monkeypatch.setattr(probing, "cpu_report", lambda *, refresh: asked.append(refresh) or found)
        return asked

    return tell


@pytest.fixture
def tried(monkeypatch):
    """Return a function that sets how the trial in a copy of this process ends, and collects what it was given."""

    def end(survives):
        given = []

        def survives_here(dtype):
            given.append((dtype, os.environ.get("ONEDNN_MAX_CPU_ISA")))
            return survives

        monkeypatch.setattr(decide, "survives_here", survives_here)
        return given

    return end


# probe ------------------------------------------------------------------------------------------------


def test_a_process_asks_once_unless_it_is_to_ask_again(told):
    asked = told(report())
    first = probe("cpu")
    assert first == report()
    assert probe("cpu") is first
    assert asked == [False]
    asked = told(CURED)
    assert probe("cpu", refresh=True) == CURED
    assert probe("cpu") == CURED
    assert asked == [True]


def test_threads_that_ask_together_probe_once(monkeypatch):
    asked = []

    def slow(*, refresh):
        asked.append(refresh)
        time.sleep(0.05)
        return report()

    monkeypatch.setattr(probing, "cpu_report", slow)
    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


# arithmetic -------------------------------------------------------------------------------------------


def test_full_precision_is_never_emulated_and_never_probed():
    for dtype in (torch.float32, torch.float64):
        for emulate in ("auto", True, False):
            choice = arithmetic(dtype, "cpu", emulate)
            assert choice.action == "native"
            assert choice.reason.endswith("is what emulation computes in")


@pytest.mark.parametrize(
    "found, emulate, action, reason",
    [
        (("right", 2.0), "auto", "native", "bfloat16 on this cpu is right"),
        (("right", 0.5), "auto", "native", "is right"),
        (("right", 0.499), "auto", "emulate", "bfloat16 on this cpu is slow: speed 0.5 times float32's, as told"),
        (("right", 0.02), False, "native", "is right"),
        (("right", 2.0), True, "emulate", "emulate=True asks for it"),
        (("wrong", None), "auto", "emulate", "bfloat16 on this cpu is wrong (as told)"),
        (("unsupported", None), "auto", "emulate", "bfloat16 on this cpu is unsupported (as told)"),
        (("unknown", None), "auto", "emulate", "bfloat16 on this cpu is unknown (as told)"),
        (("dead", None), "auto", "emulate", "bfloat16 kills the process on this CPU (as told)"),
        (("dead", None), True, "emulate", "emulate=True asks for it"),
    ],
)
def test_what_is_not_right_or_slow_is_emulated(told, found, emulate, action, reason):
    told(report(bfloat16=found))
    choice = arithmetic(BFLOAT16, "cpu", emulate)
    assert choice.action == action
    assert reason in choice.reason
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]


@pytest.mark.parametrize("status", ["wrong", "unsupported", "unknown"])
def test_native_arithmetic_that_is_not_right_is_refused(told, status):
    told(report(bfloat16=(status, None)))
    with pytest.raises(UnsupportedError) as caught:
        arithmetic(BFLOAT16, "cpu", False)
    assert str(caught.value) == textwrap.dedent(f"""\
        bfloat16 cannot be computed natively on this cpu
          why    bfloat16 on this cpu is {status} (as told)
          write  emulate="auto", the text emulate=auto""")


@pytest.mark.parametrize("emulate, action", [("auto", "limit"), (False, "limit"), (True, "emulate")])
def test_a_limit_is_set_before_it_is_tried_and_the_answer_stays_the_same(told, tried, caplog, emulate, action):
    told(CURED)
    given = tried(survives=True)
    first = arithmetic(BFLOAT16, "cpu", emulate)
    assert first.action == action
    if action == "limit":
        assert first.reason.endswith(f"(as told), so mezzo has set ONEDNN_MAX_CPU_ISA={LIMIT}")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == LIMIT, "for what emulation does not reach, too"
    assert arithmetic(BFLOAT16, "cpu", emulate) == first
    probe("cpu", refresh=True)
    assert arithmetic(BFLOAT16, "cpu", emulate) == first
    assert given == [(BFLOAT16, LIMIT)]
    assert not caplog.records


def test_where_the_limit_comes_too_late_it_is_taken_back_and_one_warning_says_so(told, tried, caplog):
    told(CURED)
    tried(survives=False)
    with pytest.raises(UnsupportedError) as caught:
        arithmetic(BFLOAT16, "cpu", False)
    why = "bfloat16 kills the process on this CPU (as told), and this process has used oneDNN before that was set"
    assert str(caught.value) == (
        "bfloat16 cannot be computed natively on this cpu\n"
        f"  why    {why}\n"
        '  write  emulate="auto", the text emulate=auto\n'
        f"         ONEDNN_MAX_CPU_ISA={LIMIT} python …"
    )
    assert not caplog.records, "what is refused is not said twice"
    choice = arithmetic(BFLOAT16)
    assert arithmetic(BFLOAT16) == choice
    assert (choice.action, choice.reason) == ("emulate", why)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "bfloat16 products are emulated on this cpu\n"
        "  where  every region of mezzo's in this process; do not compute in the format outside them\n"
        f"  why    {why}\n"
        f"  write  ONEDNN_MAX_CPU_ISA={LIMIT} python …"
    )


@pytest.mark.parametrize(
    "status, said", [("wrong", 1), ("unknown", 1), ("dead", 1), ("unsupported", 0), ("right", 0)]
)  # fmt: skip
def test_what_is_emulated_since_something_is_amiss_is_said_once(told, caplog, status, said):
    told(report(bfloat16=(status, 0.1 if status == "right" else None)))
    for _ in range(2):
        assert arithmetic(BFLOAT16).action == "emulate"
    assert len(caplog.records) == said


@pytest.mark.parametrize("survives, action", [(True, "native"), (False, "emulate")])
def test_a_limit_of_the_users_own_is_tried_and_never_overridden(told, tried, monkeypatch, survives, action):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    told(CURED)
    given = tried(survives=survives)
    choice = arithmetic(BFLOAT16)
    assert choice.action == action
    assert ("ONEDNN_MAX_CPU_ISA=AVX512_CORE is set" in choice.reason) is survives
    assert given == [(BFLOAT16, "AVX512_CORE")]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"


def test_a_format_that_is_cured_but_slow_is_emulated(told, tried):
    told(report(float16=("dead", 0.1), needs_isa_limit=True))
    tried(survives=True)
    assert arithmetic(FLOAT16).action == "emulate"
    assert arithmetic(FLOAT16, "cpu", False).action == "limit"


def test_intentions_are_said_without_being_carried_out(monkeypatch):
    assert intended(CURED, BFLOAT16) == "limit"
    assert intended(CURED, FLOAT16) == "emulate"
    assert intended(report(), BFLOAT16) == "native"
    for status in ("wrong", "dead", "unsupported", "unknown"):
        assert intended(report(bfloat16=(status, None)), BFLOAT16) == "emulate"
    assert not os.environ["ONEDNN_MAX_CPU_ISA"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", LIMIT)
    assert intended(CURED, BFLOAT16) == "native"


# devices ----------------------------------------------------------------------------------------------


def present(monkeypatch, device_type, *, has_bfloat16=True):
    accelerator = torch.device(device_type) if device_type else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)

    def is_bf16_supported(including_emulation=True):
        return has_bfloat16 or including_emulation  # a bfloat16 that torch imitates is not native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_the_devices_are_the_cpu_and_the_current_accelerator(monkeypatch):
    present(monkeypatch, None)
    assert devices() == ["cpu"]
    assert kinds.default_kinds() == ("cpu",)
    present(monkeypatch, "xpu")
    assert devices() == ["cpu", "xpu"]
    assert kinds.default_kinds() == ("xpu",)


@pytest.mark.parametrize("device_type", ["cuda", "mps", "xpu"])
def test_an_absent_device_is_named_and_never_touched(monkeypatch, device_type):
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


def test_a_device_type_that_there_is_none_of():
    with pytest.raises(PolicyError, match=r"unknown device type 'cdua'\n  why    did you mean 'cuda'\?"):
        probe("cdua")


@pytest.mark.parametrize("has_bfloat16, action", [(True, "native"), (False, "emulate")])
def test_cuda_is_asked_and_not_measured(monkeypatch, has_bfloat16, action):
    present(monkeypatch, "cuda", has_bfloat16=has_bfloat16)
    monkeypatch.setattr(child, "examined", lambda *_: pytest.fail("it was measured"))
    assert probe("cuda").name == "a GPU"
    assert arithmetic(BFLOAT16, "cuda").action == action
    assert arithmetic(FLOAT16, "cuda").action == "native"
    assert arithmetic(BFLOAT16, "cuda", True).action == "emulate"
    if not has_bfloat16:
        with pytest.raises(UnsupportedError, match="bfloat16 cannot be computed natively on this cuda"):
            arithmetic(BFLOAT16, "cuda", False)


def test_other_accelerators_are_examined_in_this_process(monkeypatch):
    present(monkeypatch, "xpu")
    monkeypatch.setattr(torch, "get_device_module", lambda _: torch.cpu)  # which has no name
    examined = []

    def answer(dtype, device):
        examined.append((dtype, device))
        return {"status": "right", "speed_ratio": 3.0, "detail": ""}

    monkeypatch.setattr(child, "examined", answer)
    assert (probe("xpu").name, arithmetic(BFLOAT16, "xpu").action) == ("xpu", "native")
    assert examined == [(dtype, "xpu") for dtype in FORMATS]


@pytest.mark.parametrize(
    "accelerator, has_bfloat16, kinds_of_model, cpu, fast",
    [
        (None, True, {"cpu"}, report(), BFLOAT16),
        (None, True, {"cpu"}, report(("right", 4.0), ("right", 2.0)), BFLOAT16),
        (None, True, {"cpu"}, report(("right", 4.0), ("right", 0.1)), FLOAT16),
        (None, True, {"cpu"}, report(("right", 0.1), ("right", 0.1)), BFLOAT16),
        (None, True, {"cpu"}, report(("unknown", None), ("unknown", None)), BFLOAT16),
        (None, True, {"cpu"}, report(("right", 4.0), ("dead", 2.0)), BFLOAT16),
        (None, True, {"cpu"}, report(("right", 4.0), ("dead", None)), FLOAT16),
        (None, True, set(), report(("right", 4.0), ("right", 0.1)), FLOAT16),
        ("cuda", True, {"cpu", "cuda"}, None, BFLOAT16),
        ("cuda", False, {"cpu", "cuda"}, None, FLOAT16),
        ("cuda", False, set(), None, FLOAT16),
        ("cuda", False, {"cpu"}, report(), BFLOAT16),
    ],
)
def test_the_fast_format_is_the_devices(monkeypatch, told, accelerator, has_bfloat16, kinds_of_model, cpu, fast):
    present(monkeypatch, accelerator, has_bfloat16=has_bfloat16)
    if cpu is not None:
        told(cpu)
    assert fast_format(kinds_of_model) == fast


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_computes_in_float16():
    found = probe("cuda")
    assert found.formats[FLOAT16].fast
    assert found.name == torch.cuda.get_device_name()
    assert arithmetic(FLOAT16, "cuda").action == "native"


# whole processes --------------------------------------------------------------------------------------


def test_no_policy_kills_a_process_in_which_the_variable_is_not_set(tmp_path):
    """The real probe, on any machine: whatever mezzo calls native then runs, forward and backward, in this process."""
    program = """
        import torch
        from mezzo.cast.device import arithmetic, child, probe
        from mezzo.errors import UnsupportedError

        x = torch.ones(2, 96, 96)
        torch.bmm(x, x)  # as a user may have done before: oneDNN has read its environment
        for dtype, support in probe("cpu").formats.items():
            for emulate in ("auto", False):
                try:
                    action = arithmetic(dtype, "cpu", emulate).action
                except UnsupportedError:
                    action = "refused"
                if action in ("native", "limit"):
                    assert child.examined(dtype)["status"] == "right"
                print(dtype, support.status, emulate, action)
    """
    unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**unset, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(FORMATS)
    assert all(status in ("right", "dead") for _, status, _, _ in lines)
    assert ("emulated" in done.stderr) == any("dead" in line for line in lines), "and only that is on stderr"
    (stored,) = (tmp_path / "mezzo").iterdir()
    assert stored.stat().st_mode & 0o077 == 0
