"""What the probe finds out about a device, what is kept of it, and what mezzo does then: never die, and say why."""

import dataclasses
import json
import math
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
from mezzo.cast.device import Claim, arithmetic, child, claims, decide, devices, fast_format, intended, probe, probing
from mezzo.cast.device.child import FAMILIES
from mezzo.cast.device.probing import FORMATS, ISA_LIMIT, DeviceReport, FamilySupport, FormatSupport
from mezzo.errors import PolicyError, UnsupportedError

from ..support.refusals import refused

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
VARIABLE = "ONEDNN_MAX_CPU_ISA"
CAN_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
ONE = {"status": "right", "speed_ratio": 2.0, "detail": "slowest: matmul"}
RIGHT = dict.fromkeys(FAMILIES, ONE)
HAS, LACKS = Claim(has=("it",), words="it has it"), Claim(words="it has no such thing")
DEAD = -signal.SIGILL
#: Where this run of the suite keeps what the probe has found: it asks once.
SHARED = os.environ["XDG_CACHE_HOME"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Begin as a new process does: nothing cached, no limit set; return the folder of the cache."""
    for name in ("_reports", "_revived"):
        monkeypatch.setattr(decide, name, {})
    monkeypatch.setattr(decide, "_said", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Through setenv, so that whatever a decision does to the variable is undone.
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    return tmp_path / "mezzo"


# What a child says --------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Small products, that all take a second."""
    monkeypatch.setattr(child, "WIDTHS", (32,))
    monkeypatch.setattr(child, "_seconds", lambda work, device: work() and 1.0)


def off_by(share):
    return lambda a, b: (torch.matmul(a.float(), b.float()) * (1 + share * (a.dtype != torch.float32))).to(a.dtype)


def refusing(dtype):
    def product(a, b):
        if a.dtype == dtype:
            raise RuntimeError("no kernel\nand more")
        return a @ b

    return product


class WrongBackward(torch.autograd.Function):
    """A product whose gradients are right in FP32 alone."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient @ b.T, a.T @ gradient * (1.1 if a.dtype == BFLOAT16 else 1)


PRODUCTS = [
    (torch.matmul, "right", "slowest: linear"),
    (off_by(0.01), "right", "slowest: linear"),
    (off_by(0.05), "wrong", "matmul at width 32 is off by 0.05 of its norm"),
    (lambda a, b: a @ b * (math.nan if a.dtype == BFLOAT16 else 1), "wrong", "matmul at width 32 is off by nan"),
    (WrongBackward.apply, "wrong", "matmul at width 32 is off by"),
    (refusing(BFLOAT16), "unsupported", "matmul: no kernel"),
]


def test_a_product_that_is_further_from_fp32s_than_rounding_is_wrong(small, monkeypatch):
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=FLOAT16), torch.device("meta"):  # which reach it not
        verdicts = child.examined(FLOAT16)
    slowest = ("linear", "convolution", "attention", "lstm")
    for family, name in zip(FAMILIES, slowest, strict=True):
        assert verdicts[family] == {"status": "right", "speed_ratio": 1.0, "detail": f"slowest: {name}"}
    assert torch.equal(before, torch.get_rng_state())
    _, shapes, _ = child.PRODUCTS["matmul"]
    for product, status, detail in PRODUCTS:
        monkeypatch.setitem(child.PRODUCTS, "matmul", ("products", shapes, product))
        verdicts = child.examined(BFLOAT16)
        assert verdicts["products"]["status"] == status
        assert verdicts["products"]["detail"].startswith(detail)
        assert (verdicts["products"]["speed_ratio"] is None) == (status != "right")
        assert {verdicts[family]["status"] for family in FAMILIES[1:]} == {"right"}, "of another family nothing is said"
    monkeypatch.setitem(child.PRODUCTS, "matmul", ("products", shapes, refusing(torch.float32)))
    with pytest.raises(RuntimeError, match="no kernel"):  # of FP32: a failure, and no answer
        child.examined(BFLOAT16)


def test_the_slowest_product_decides_what_is_fast(small, monkeypatch):
    ratios = iter([2.0, 0.25, 0.5, 3.0, 1.0, 0.1])  # linear, matmul, convolution, attention, lstm, gru
    monkeypatch.setattr(child, "_speed_ratio", lambda *_: next(ratios))
    timings = [(verdict["speed_ratio"], verdict["detail"]) for verdict in child.examined(BFLOAT16).values()]
    assert timings == [
        (0.25, "slowest: matmul"), (0.5, "slowest: convolution"), (3.0, "slowest: attention"), (0.1, "slowest: gru")
    ]  # fmt: skip


def test_what_other_programs_take_of_the_processor_makes_no_format_slow():
    """A child that waits is measured as one that does not: a busy machine's verdict would be kept for good."""
    assert child._seconds(lambda: time.sleep(0.02), "cpu") < 0.01


def test_fp32_and_the_format_are_timed_by_turns_and_the_least_of_each_counts(monkeypatch):
    asked = []

    def ratio(*times):
        """Of pairs: FP32's time, and the format's."""
        asked.clear()
        durations = (duration for pair in times for duration in pair)
        monkeypatch.setattr(child, "_seconds", lambda work, device: asked.append(work) or next(durations))
        return child._speed_ratio("fp32", "format", "cpu")

    assert ratio((1.0, 9.0), (3.0, 2.0), (3.0, 9.0), (9.0, 9.0), (9.0, 9.0)) == 0.5
    assert asked == ["fp32", "format"] * child.MIN_TURNS
    assert ratio((1.0, 101.0)) == 1 / 101, "which is known after the first"
    assert ratio(*[(0.001, 0.002)] * child.MAX_TURNS) == 0.5
    assert len(asked) == 2 * child.MAX_TURNS
    assert ratio(*[(0.0, 1.0), (1.0, -1.0)] * 3) == 1.0, "a coarse clock, or one that was set back"
    assert ratio(*[(0.0, 1.0)] * child.MIN_TURNS) is None
    monkeypatch.setattr(child, "WIDTHS", (32,))
    monkeypatch.setattr(child, "_seconds", lambda work, device: 0.0)
    verdicts = child.examined(BFLOAT16)
    for verdict in verdicts.values():
        assert verdict == {"status": "right", "speed_ratio": None, "detail": "too short for this clock"}


# What the parent makes of it ----------------------------------------------------------------------------


@pytest.fixture
def children(monkeypatch):
    """How each child ends, by format and limit: what it says, or its exit code. Others are right. What was asked."""
    ends, asked = {}, []

    def run(command, env, **_):
        key = command[-1], env.get(VARIABLE)
        asked.append(key)
        end = ends.get(key, RIGHT)
        if isinstance(end, int):
            return subprocess.CompletedProcess(command, end, b"", b"")
        return subprocess.CompletedProcess(command, 0, f"chatter\n{child.PREFIX}{json.dumps(end)}\nmore".encode(), b"")

    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(claims, "of_processor", lambda facts, dtype, limit: HAS)
    return ends, asked


def test_a_healthy_cpu_is_asked_once_for_each_format(children, cache):
    ends, asked = children
    lacking = {"status": "unsupported", "speed_ratio": None, "detail": "linear: no kernel"}
    ends["float16", None] = RIGHT | {"products": lacking}
    report = probing.cpu_report()
    right = FamilySupport(**ONE, claim=HAS)
    half = FormatSupport(families=dict.fromkeys(FAMILIES, right) | {"products": FamilySupport(**lacking, claim=HAS)})
    formats = {FLOAT16: half, BFLOAT16: FormatSupport(families=dict.fromkeys(FAMILIES, right))}
    assert (half.status, half.worst.detail) == ("unsupported", "linear: no kernel")
    assert report == DeviceReport(device_type="cpu", name=probing.processor()["name"], formats=formats)
    assert asked == [("float16", None), ("bfloat16", None)]
    assert probing.cpu_report() == report
    assert len(asked) == 2, "the next process reads the answers"
    (file,) = cache.iterdir()
    assert (cache.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert probing.cpu_report(refresh=True) == report
    assert len(asked) == 4
    assert list(cache.iterdir()) == [file]
    kept = json.loads(file.read_text())
    assert kept == {"float16": RIGHT | {"products": lacking}, "bfloat16": RIGHT}, "what was tried, and no claim"


def test_a_death_is_asked_again_under_the_limit(children):
    ends, asked = children
    ends["bfloat16", None] = DEAD
    report = probing.cpu_report()
    died = "another process that tried it was killed by SIGILL"
    for support in report.formats[BFLOAT16].families.values():
        assert (support.status, support.fast, support.speed_ratio) == ("dead", True, 2.0)
        assert support.detail == f"{died}; right with {VARIABLE}=AVX512_CORE_FP16"
    assert report.needs_isa_limit
    assert asked == [("float16", None), ("bfloat16", None), ("bfloat16", ISA_LIMIT)]
    assert probing.cpu_report() == report
    assert len(asked) == 3
    wrong = {"status": "wrong", "speed_ratio": None, "detail": "off"}
    ends["bfloat16", ISA_LIMIT] = RIGHT | {"convolution": wrong}  # which the limit cures but for one family
    support = probing.cpu_report(refresh=True).formats[BFLOAT16]
    assert [family.speed_ratio for family in support.families.values()] == [2.0, None, 2.0, 2.0]
    assert [family.is_usable for family in support.families.values()] == [True, False, True, True]
    assert support.families["convolution"].detail == f"{died}; wrong (off) with {VARIABLE}={ISA_LIMIT}"
    assert support.status == "dead"
    for end in (DEAD, 1, dict.fromkeys(FAMILIES, wrong)):  # which it does not cure
        ends["bfloat16", ISA_LIMIT] = end
        report = probing.cpu_report(refresh=True)
        support = report.formats[BFLOAT16].worst
        assert (support.status, support.fast, support.speed_ratio, support.detail) == ("dead", False, None, died)
        assert not report.needs_isa_limit


@pytest.mark.parametrize("name", [VARIABLE, "DNNL_MAX_CPU_ISA"])
def test_under_the_users_own_limit_a_format_is_as_it_is_there(children, monkeypatch, name):
    ends, asked = children
    probing.cpu_report()
    monkeypatch.setenv(name, "AVX2")
    assert probing.isa_setting() == "AVX2"
    ends["bfloat16", "AVX2"] = RIGHT | {"attention": ONE | {"speed_ratio": 0.1}}
    assert probing.cpu_report().formats[BFLOAT16].worst.speed_ratio == 0.1
    assert asked[2:] == [("float16", "AVX2"), ("bfloat16", "AVX2")]
    monkeypatch.delenv(name)
    assert probing.cpu_report().formats[BFLOAT16].worst.speed_ratio == 2.0
    assert len(asked) == 4, "both answers are in the one file"


def test_under_the_users_own_limit_a_death_stays_one(children, monkeypatch):
    ends, _ = children
    monkeypatch.setenv(VARIABLE, "AVX2")
    ends["bfloat16", None] = DEAD
    report = probing.cpu_report()
    assert (report.formats[BFLOAT16].status, report.formats[BFLOAT16].worst.speed_ratio) == ("dead", 2.0)
    assert report.needs_isa_limit
    ends["bfloat16", "AVX2"] = DEAD
    assert not probing.cpu_report(refresh=True).formats[BFLOAT16].worst.is_usable


def test_a_child_that_says_nothing_is_asked_again_by_the_next_process(children):
    ends, asked = children
    for end, how in ((-signal.SIGKILL, "was killed by SIGKILL"), (7, "ended with exit code 7")):
        ends["bfloat16", None] = end
        support = probing.cpu_report().formats[BFLOAT16].worst
        detail = f"it could not be asked: another process {how} and had said nothing"
        assert (support.status, support.fast, support.detail) == ("unknown", False, detail)
    del ends["bfloat16", None]
    assert probing.cpu_report().formats[BFLOAT16].status == "right"
    assert asked == [("float16", None), *[("bfloat16", None)] * 3]


@pytest.mark.parametrize(
    "command, reason",
    [
        (["/nonexistent/python"], "another process could not be started or did not end"),
        ([sys.executable, "-S", "-c", "import time; time.sleep(60)"], "could not be started or did not end"),
        ([sys.executable, "-S", "-c", "pass"], "ended with exit code 0 and had said nothing"),
        (None, "this Python has no executable of its own to start another with"),
    ],
)
def test_what_cannot_be_asked_is_unknown(monkeypatch, cache, command, reason):
    if command is not None and "sleep" in command[-1]:  # the others end by themselves, however busy the machine is
        monkeypatch.setattr(probing, "CHILD_TIMEOUT_S", 0.1)
    if command is None:  # a frozen program's executable is the program
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))
    else:
        monkeypatch.setattr(probing, "CHILD_COMMAND", command)
    for support in probing.cpu_report().formats.values():
        assert support.status == "unknown"
        assert reason in support.worst.detail
    assert not cache.exists() or json.loads(next(cache.iterdir()).read_text()) == {}


def test_warning_filters_and_folders_of_the_users_do_not_reach_the_child(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path / "no text", None])  # imports pass over them
    script = tmp_path / "folder" / "program.py"
    script.parent.mkdir()
    script.write_text(
        f"import warnings; warnings.warn('old'); import json; print({child.PREFIX!r} + '{json.dumps(RIGHT)}')"
    )
    monkeypatch.setattr(probing, "CHILD_COMMAND", [*probing.CHILD_COMMAND[:-1], str(script)])
    assert {of_format.status for of_format in probing.cpu_report().formats.values()} == {"right"}


def test_another_processor_torch_or_probe_is_another_file(children, cache, monkeypatch):
    probing.cpu_report()
    others = (
        (probing, "processor", lambda: {"name": "another"}),
        (torch, "__version__", "9.9.9"),
        (probing, "_VERSION", 9),
    )
    for number, other in enumerate(others, start=2):
        with monkeypatch.context() as patch:
            patch.setattr(*other)
            probing.cpu_report()
        assert len(children[1]) == 2 * number
        assert len(list(cache.iterdir())) == number


def of_families(answer):
    return json.dumps({"bfloat16": dict.fromkeys(FAMILIES, answer)}).encode()


HARM = [b"", b"null", b"[]", b"3", b'{"bfloat16": 1}', b'{"bfloat16": {"word": 1}}', b"\xff\xfe", b"[" * 100_000,
        of_families(1), of_families({"word": 1}), of_families({"status": "rigth", "detail": ""}),
        of_families({"status": "right", "speed_ratio": "2", "detail": ""}),
        json.dumps({"bfloat16": RIGHT | {"recurrent": None}}).encode()]  # fmt: skip


def test_a_file_that_is_not_right_is_replaced_with_a_line_in_the_log(children, cache, caplog):
    report = probing.cpu_report()
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for harm in HARM:
        file.write_bytes(harm)
        caplog.clear()
        with caplog.at_level("INFO"):
            assert probing.cpu_report() == report, harm
        (record,) = caplog.records
        assert record.getMessage().startswith("nothing is known of this CPU: ")
        assert file.read_bytes() == whole


@pytest.mark.parametrize("location", ["file", "homeless"])
def test_a_cache_that_cannot_be_written_costs_a_line_in_the_log(children, monkeypatch, tmp_path, caplog, location):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if location == "file" else "")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(files.Path, "home", homeless)
    with caplog.at_level("INFO"):
        assert probing.cpu_report().formats[BFLOAT16].status == "right"
    assert caplog.records[-1].getMessage().startswith("what was found out of this CPU could not be kept: ")


# The trial in a copy of this process ---------------------------------------------------------------------


def die():
    os.kill(os.getpid(), signal.SIGILL)


@CAN_FORK
def test_a_copy_that_survives(capfd):
    x = torch.ones(64, 64)
    (x @ x).sum().item()  # whatever threads a product starts are running now
    before = os.listdir("/dev/fd")
    assert probing.survives_here(torch.float32)
    assert os.listdir("/dev/fd") == before
    assert capfd.readouterr() == ("", "")


@CAN_FORK
def test_a_copy_that_does_not(monkeypatch, capfd):
    """Handlers and masks of the user's hide neither a death nor an endless wait."""
    monkeypatch.setattr(probing, "TRIAL_TIMEOUTS_S", (1,))
    threads = torch.get_num_threads()
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGILL, signal.SIGALRM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        for end in (die, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 / 0, lambda: sys.exit(0),
                    lambda: threading.Lock().acquire() and time.sleep(60)):  # fmt: skip
            monkeypatch.setattr(child, "products", lambda dtype, end=end: end())
            assert not probing.survives_here(BFLOAT16)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", ""), "a death that was expected is nobody's business"


@CAN_FORK
def test_a_copy_that_does_not_end_is_no_answer(monkeypatch, tmp_path):
    """On a busy machine, or behind a lock that another thread held: another copy is made, and has longer."""
    monkeypatch.setattr(probing, "TRIAL_TIMEOUTS_S", (1, 60, 60))
    here = tmp_path / "tried"

    def slow_at_first(dtype):
        if not here.exists():
            here.touch()
            time.sleep(60)

    monkeypatch.setattr(child, "products", slow_at_first)
    assert probing.survives_here(BFLOAT16)
    here.unlink()
    monkeypatch.setattr(child, "products", lambda dtype: slow_at_first(dtype) or die())
    assert not probing.survives_here(BFLOAT16)


@CAN_FORK
def test_no_answer_is_no_survival(monkeypatch):
    """An exit status that other code has collected, a process too large to copy, a platform without fork."""
    real = os.waitpid

    def collected(pid, options):
        real(pid, 0)
        return real(pid, options)

    def refuse():
        raise BlockingIOError("no memory")

    monkeypatch.setattr(os, "waitpid", collected)
    assert not probing.survives_here(torch.float32)
    monkeypatch.setattr(os, "fork", refuse)
    assert not probing.survives_here(BFLOAT16)
    monkeypatch.delattr(os, "fork")
    assert not probing.survives_here(BFLOAT16)


# Decisions ------------------------------------------------------------------------------------------------


def support(status, claim=LACKS, ratio=None):
    """What a family is; one that is cured is dead."""
    is_cured = status == "cured"
    fields = {"status": "dead" if is_cured else status, "is_cured": is_cured, "detail": "as told"}
    return FamilySupport(**fields, claim=claim, speed_ratio=ratio)


def report(float16=("right", LACKS), bfloat16=("right", HAS), *, needs_isa_limit=False):
    """A report of which one thing holds for all families of a format: status, claim and speed."""
    formats = {
        dtype: FormatSupport(families=dict.fromkeys(FAMILIES, support(*words)))
        for dtype, words in zip(FORMATS, (float16, bfloat16), strict=True)
    }
    return DeviceReport(device_type="cpu", name="a CPU", formats=formats, needs_isa_limit=needs_isa_limit)


CURED = report(bfloat16=("cured", HAS), needs_isa_limit=True)


@pytest.fixture
def probed(monkeypatch):
    """Return a function that tells what the probe finds, and collects how it is asked."""
    monkeypatch.setattr(probing, "cpu_report", lambda **_: pytest.fail("the CPU was probed"))
    monkeypatch.setattr(decide, "survives_here", lambda dtype: pytest.fail("a copy of this process was made"))

    def tell(answer):
        asked = []
        monkeypatch.setattr(probing, "cpu_report", lambda *, refresh: asked.append(refresh) or answer)
        return asked

    return tell


@pytest.fixture
def tried(probed, monkeypatch):
    """Return a function that sets how the trial in a copy of this process ends, and collects what it was given."""

    def end(survives):
        given = []
        monkeypatch.setattr(
            decide, "survives_here", lambda dtype: given.append((dtype, os.environ.get(VARIABLE))) or survives
        )
        return given

    return end


def test_a_process_asks_once_unless_it_is_to_ask_again(probed, monkeypatch):
    asked = probed(report())
    first = probe("cpu")
    assert first == report()
    assert probe("cpu") is first
    assert asked == [False]
    asked = probed(CURED)
    assert probe("cpu", refresh=True) == probe("cpu") == CURED
    assert asked == [True]
    monkeypatch.setattr(decide, "_reports", {})  # and threads that ask together
    asked = []
    monkeypatch.setattr(
        probing, "cpu_report", lambda *, refresh: (asked.append(refresh), time.sleep(0.05), report())[-1]
    )
    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_full_precision_is_never_emulated_and_never_probed(probed):
    for dtype in (torch.float32, torch.float64):
        for emulate in ("auto", True, False):
            for choice in arithmetic(dtype, "cpu", emulate).values():
                assert choice.action == "native"
                assert choice.reason.endswith("is what emulation computes in")


def of_all(choices):
    """The choice that is every family's."""
    assert tuple(choices) == FAMILIES
    (choice,) = set(choices.values())
    return choice


DECISIONS = [
    (("right", HAS), "auto", "native", "bfloat16 on this cpu is right (it has it)"),
    (("right", HAS, 0.125), "auto", "native", "bfloat16 on this cpu is right (it has it)"),
    (("right", HAS, 0.124), "auto", "emulate",
     "bfloat16 on this cpu is slow: it was measured at 0.12 times float32's speed (as told), although it has it"),
    (("right", LACKS), "auto", "emulate", "bfloat16 on this cpu is slow: it has no such thing"),
    (("right", LACKS, 2.0), "auto", "emulate", "bfloat16 on this cpu is slow: it has no such thing"),
    (("right", LACKS, 2.1), "auto", "native",
     "is right (it was measured at 2.1 times float32's speed (as told), although it has no such thing)"),
    (("right", LACKS), False, "native", "is right"),
    (("right", HAS, 0.02), False, "native", "is right"),
    (("right", HAS), True, "emulate", "emulate=True asks for it"),
    (("wrong", HAS), "auto", "emulate", "bfloat16 on this cpu is wrong (as told)"),
    (("unsupported", HAS), "auto", "emulate", "bfloat16 on this cpu is unsupported (as told)"),
    (("unknown", HAS), "auto", "emulate", "bfloat16 on this cpu is unknown (as told)"),
    (("dead", HAS), "auto", "emulate", "bfloat16 kills the process on this CPU (as told)"),
    (("dead", HAS), True, "emulate", "emulate=True asks for it"),
]  # fmt: skip


@pytest.mark.parametrize("bfloat16, emulate, action, reason", DECISIONS)
def test_what_is_not_right_or_slow_is_emulated(probed, caplog, bfloat16, emulate, action, reason):
    """Where something is amiss it is said, once."""
    probed(report(bfloat16=bfloat16))
    for _ in range(2):
        choice = of_all(arithmetic(BFLOAT16, "cpu", emulate))
        assert choice.action == action
        assert reason in choice.reason
    assert not os.environ[VARIABLE]
    assert len(caplog.records) == (emulate == "auto" and bfloat16[0] in ("wrong", "unknown", "dead"))


def test_native_arithmetic_that_is_not_right_is_refused(probed, monkeypatch):
    for status in ("wrong", "unsupported", "unknown"):
        probed(report(bfloat16=(status, HAS)))
        monkeypatch.setattr(decide, "_reports", {})
        with pytest.raises(UnsupportedError) as caught:
            arithmetic(BFLOAT16, "cpu", False)
        assert str(caught.value) == textwrap.dedent(f"""\
            bfloat16 cannot be computed natively on this cpu
              why    bfloat16 on this cpu is {status} (as told)
              write  emulate="auto", the text emulate=auto""")


@pytest.mark.parametrize("emulate, action", [("auto", "limit"), (False, "limit"), (True, "emulate")])
def test_a_limit_is_set_before_it_is_tried_and_the_answer_stays_the_same(probed, tried, caplog, emulate, action):
    probed(CURED)
    given = tried(survives=True)
    first = of_all(arithmetic(BFLOAT16, "cpu", emulate))
    assert first.action == action
    if action == "limit":
        assert first.reason.endswith(f"(as told), so mezzo has set {VARIABLE}={ISA_LIMIT}")
    assert os.environ[VARIABLE] == ISA_LIMIT, "for what emulation does not reach, too"
    probe("cpu", refresh=True)
    assert of_all(arithmetic(BFLOAT16, "cpu", emulate)) == first
    assert given == [(BFLOAT16, ISA_LIMIT)]
    assert not caplog.records


def test_where_the_limit_comes_too_late_it_is_taken_back_and_one_warning_says_so(probed, tried, caplog):
    probed(CURED)
    tried(survives=False)
    why = "bfloat16 kills the process on this CPU (as told), and this process has used oneDNN before that was set"
    with refused(UnsupportedError, f"  why    {why}\n", f"emulate=auto\n         {VARIABLE}={ISA_LIMIT} python …"):
        arithmetic(BFLOAT16, "cpu", False)
    assert not caplog.records, "what is refused is not said twice"
    choice = of_all(arithmetic(BFLOAT16))
    assert of_all(arithmetic(BFLOAT16)) == choice
    assert (choice.action, choice.reason) == ("emulate", why)
    assert VARIABLE not in os.environ
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "bfloat16 products are emulated on this cpu\n"
        "  where  every region of mezzo's in this process; do not compute in the format outside them\n"
        f"  why    {why}\n"
        f"  write  {VARIABLE}={ISA_LIMIT} python …"
    )


@pytest.mark.parametrize("survives, action", [(True, "native"), (False, "emulate")])
def test_a_limit_of_the_users_own_is_tried_and_never_overridden(probed, tried, monkeypatch, survives, action):
    monkeypatch.setenv(VARIABLE, "AVX512_CORE")
    probed(CURED)
    given = tried(survives=survives)
    choice = of_all(arithmetic(BFLOAT16))
    assert choice.action == action
    assert (f"{VARIABLE}=AVX512_CORE is set" in choice.reason) is survives
    assert given == [(BFLOAT16, "AVX512_CORE")]
    assert os.environ[VARIABLE] == "AVX512_CORE"


def all_do(action):
    return dict.fromkeys(FAMILIES, action)


def some_are(dtype, **families):
    """A report in which some families of a format are as said, and the others right and fast."""
    usable = report(("right", HAS), ("right", HAS))
    others = {family: support(*words) for family, words in families.items()}
    formats = usable.formats | {dtype: FormatSupport(families={**usable.formats[dtype].families, **others})}
    return dataclasses.replace(usable, formats=formats)


def test_intentions_are_said_without_being_carried_out(monkeypatch):
    assert [intended(CURED, dtype) for dtype in (BFLOAT16, FLOAT16)] == [all_do("limit"), all_do("emulate")]
    assert intended(report(), BFLOAT16) == all_do("native")
    for status in ("wrong", "dead", "unsupported", "unknown"):
        assert intended(report(bfloat16=(status, HAS)), BFLOAT16) == all_do("emulate")
    some = some_are(FLOAT16, convolution=("right", HAS, 0.1), attention=("wrong", HAS))
    assert intended(some, FLOAT16) == all_do("native") | {"convolution": "emulate", "attention": "emulate"}
    assert not os.environ[VARIABLE]
    monkeypatch.setenv(VARIABLE, ISA_LIMIT)
    assert intended(CURED, BFLOAT16) == all_do("native")


def test_a_format_that_is_cured_but_slow_is_emulated(probed, tried):
    probed(report(float16=("cured", LACKS), needs_isa_limit=True))
    tried(survives=True)
    actions = [of_all(arithmetic(FLOAT16, "cpu", emulate)).action for emulate in ("auto", False)]
    assert actions == ["emulate", "limit"]


# Other devices --------------------------------------------------------------------------------------------


def present(monkeypatch, device_type, *, has_bfloat16=True, capability=(9, 0)):
    accelerator = torch.device(device_type) if device_type else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    # A bfloat16 that torch imitates is not native.
    supported = lambda including_emulation=True: has_bfloat16 or including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_the_devices_are_the_cpu_and_the_accelerator_which_a_bare_region_covers(monkeypatch):
    for device_type, every in ((None, ["cpu"]), ("xpu", ["cpu", "xpu"])):
        present(monkeypatch, device_type)
        assert devices() == every
        assert probing.default_device_types() == (every[-1],)


def test_an_absent_device_is_named_and_never_touched(monkeypatch):
    present(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: pytest.fail("CUDA was touched"))
    for name in ("cuda", "mps", "xpu"):
        for call in (lambda: arithmetic(FLOAT16, name), lambda: arithmetic(FLOAT16, name, True), lambda: probe(name)):  # noqa: B023
            with refused(UnsupportedError, f"there is no {name} device here\n", 'write  device_type="cpu"'):
                call()
    with refused(PolicyError, "unknown device type 'cdua'\n  why    did you mean 'cuda'?"):
        probe("cdua")
    assert not torch.cuda.is_initialized()


def test_cuda_is_asked_and_not_measured(monkeypatch):
    monkeypatch.setattr(child, "examined", lambda *_: pytest.fail("it was measured"))
    for has_bfloat16, action in ((True, "native"), (False, "emulate")):
        present(monkeypatch, "cuda", has_bfloat16=has_bfloat16)
        assert probe("cuda", refresh=True).name == "a GPU"
        assert of_all(arithmetic(BFLOAT16, "cuda")).action == action
        assert of_all(arithmetic(FLOAT16, "cuda")).action == "native"
        assert of_all(arithmetic(BFLOAT16, "cuda", True)).action == "emulate"
    for capability, action in (((7, 0), "native"), ((7, 5), "native"), ((6, 1), "emulate")):
        present(monkeypatch, "cuda", has_bfloat16=False, capability=capability)
        probe("cuda", refresh=True)
        assert of_all(arithmetic(FLOAT16, "cuda")).action == action
        assert of_all(arithmetic(FLOAT16, "cuda", False)).action == "native"
    assert of_all(arithmetic(FLOAT16, "cuda")).reason == (
        "float16 on this cuda is slow: it is sm_61, and float16 is fast from sm_70 on"
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert probe("cuda", refresh=True).formats[FLOAT16].worst.claim.has == ("ROCm",)
    with refused(UnsupportedError, "bfloat16 cannot be computed natively on this cuda"):
        arithmetic(BFLOAT16, "cuda", False)


def test_other_accelerators_are_examined_in_this_process(monkeypatch):
    present(monkeypatch, "xpu")
    monkeypatch.setattr(torch, "get_device_module", lambda _: torch.cpu)  # which has no name
    examined = []
    answer = dict.fromkeys(FAMILIES, ONE)
    monkeypatch.setattr(child, "examined", lambda *given: examined.append(given) or answer)
    assert (probe("xpu").name, of_all(arithmetic(BFLOAT16, "xpu")).action) == ("xpu", "native")
    assert examined == [(dtype, "xpu") for dtype in FORMATS]


FAST = [
    (None, True, {"cpu"}, report(("right", HAS), ("right", HAS)), BFLOAT16),
    (None, True, {"cpu"}, report(("right", HAS), ("right", LACKS)), FLOAT16),
    (None, True, {"cpu"}, report(("right", LACKS), ("right", LACKS)), BFLOAT16),
    (None, True, {"cpu"}, report(("right", HAS), ("cured", HAS)), BFLOAT16),
    (None, True, {"cpu"}, report(("right", HAS), ("dead", HAS)), FLOAT16),
    (None, True, set(), report(("right", HAS), ("right", LACKS)), FLOAT16),
    ("cuda", True, {"cpu", "cuda"}, None, BFLOAT16),
    ("cuda", False, {"cpu", "cuda"}, None, FLOAT16),
    ("cuda", False, {"cpu"}, report(), BFLOAT16),
]


@pytest.mark.parametrize("accelerator, has_bfloat16, of_model, cpu, fast", FAST)
def test_the_fast_format_is_the_devices(monkeypatch, probed, accelerator, has_bfloat16, of_model, cpu, fast):
    present(monkeypatch, accelerator, has_bfloat16=has_bfloat16)
    if cpu is not None:
        probed(cpu)
    assert fast_format(of_model) == fast


# Whole processes ------------------------------------------------------------------------------------------


def run_alone(program, **environment):
    unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env=unset | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow  # what follows from a report is tested above
def test_no_policy_kills_a_process_in_which_the_variable_is_not_set():
    """The real probe, on any machine: whatever mezzo calls native then runs, forward and backward, in this process."""
    program = """
        import torch
        from mezzo.cast.device import arithmetic, child, probe
        from mezzo.errors import UnsupportedError

        child.WIDTHS = (128,)  # here; the probe takes its own
        x = torch.ones(2, 96, 96)
        torch.bmm(x, x)  # as a user may have done before: oneDNN has read its environment
        for dtype, support in probe("cpu").formats.items():
            for emulate in ("auto", False):
                try:
                    choices = arithmetic(dtype, "cpu", emulate)
                except UnsupportedError:
                    print(dtype, support.status, emulate, "refused")
                    continue
                if any(choice.action != "emulate" for choice in choices.values()):
                    found = child.examined(dtype)
                    for family, choice in choices.items():
                        assert choice.action == "emulate" or found[family]["status"] == "right", family
                print(dtype, support.status, emulate, *(choice.action for choice in choices.values()))
    """
    printed, errors = run_alone(program, XDG_CACHE_HOME=SHARED)
    lines = [line.split() for line in printed]
    assert len(lines) == 2 * len(FORMATS)
    assert all(status in ("right", "dead") for _, status, *_ in lines)
    assert ("emulated" in errors) == any("dead" in line for line in lines), "and only that is on stderr"


def test_an_environment_that_is_put_back_does_not_take_the_limit_away():
    """oneDNN reads it at once, and obeys it whatever the environment becomes."""
    program = """
        import os, unittest.mock
        import torch
        from mezzo.cast.device import arithmetic, decide, probing

        probing.ISA_LIMIT = "SSE41"  # under which it offers no bfloat16
        claim = probing.Claim(has=("it",), words="it has it")
        dead = probing.FormatSupport.same_for_all("dead", "as told", claim=claim, is_cured=True)
        formats = dict.fromkeys(probing.FORMATS, dead)
        decide._reports["cpu"] = probing.DeviceReport(
            device_type="cpu", name="a CPU", formats=formats, needs_isa_limit=True
        )
        decide.survives_here = lambda dtype: True
        with unittest.mock.patch.dict(os.environ):
            print(arithmetic(torch.bfloat16, "cpu", False)["products"].action, os.environ["ONEDNN_MAX_CPU_ISA"])
        print("ONEDNN_MAX_CPU_ISA" in os.environ, torch.ops.mkldnn._is_mkldnn_bf16_supported())
    """
    assert run_alone(program)[0] == ["limit SSE41", "False False"]
