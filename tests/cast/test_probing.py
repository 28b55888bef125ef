"""What the probe finds: right, wrong, dead, unsupported or unknown; and what is kept of it on disk."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from mezzo import files
from mezzo.cast.device import child, probing
from mezzo.cast.device.probing import FORMATS, ISA_LIMIT, DeviceReport, FormatSupport

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
CAN_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
RIGHT = {"status": "right", "speed_ratio": 2.0, "detail": "slowest: matmul"}
DEAD = -signal.SIGILL


@pytest.fixture(autouse=True)
def unlimited(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    return tmp_path / "mezzo"


@pytest.fixture
def children(monkeypatch):
    """How each child ends, by format and limit: what it says, or its exit code. Others are right. What was asked."""
    ends, asked = {}, []

    def run(command, env, **_):
        key = command[-1], env.get("ONEDNN_MAX_CPU_ISA")
        asked.append(key)
        end = ends.get(key, RIGHT)
        if isinstance(end, int):
            return subprocess.CompletedProcess(command, end, b"", b"")
        return subprocess.CompletedProcess(command, 0, f"chatter\n{child.PREFIX}{json.dumps(end)}\nmore".encode(), b"")

    monkeypatch.setattr(subprocess, "run", run)
    return ends, asked


# What a child says --------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Small products, that all take a second."""
    monkeypatch.setattr(child, "WIDTHS", (32,))
    monkeypatch.setattr(child, "_seconds", lambda work, device: work() and 1.0)


@pytest.mark.parametrize("dtype", FORMATS)
def test_products_of_this_torch_are_right(small, dtype):
    assert child.examined(dtype) == {"status": "right", "speed_ratio": 1.0, "detail": "slowest: linear"}


def off_by(share):
    def product(a, b):
        exact = torch.matmul(a.float(), b.float())
        return (exact * (1 + share * (a.dtype != torch.float32))).to(a.dtype)

    return product


@pytest.mark.parametrize(
    "product, status, detail",
    [
        (off_by(0.01), "right", "slowest: linear"),
        (off_by(0.05), "wrong", "matmul at width 32 is off by 0.05 of its norm"),
        (lambda a, b: a @ b * (math.nan if a.dtype == BFLOAT16 else 1), "wrong", "matmul at width 32 is off by nan"),
    ],
)
def test_a_product_that_is_further_from_fp32s_than_rounding_is_wrong(small, monkeypatch, product, status, detail):
    monkeypatch.setitem(child.PRODUCTS, "matmul", (child.PRODUCTS["matmul"][0], product))
    found = child.examined(BFLOAT16)
    assert found["status"] == status
    assert found["detail"].startswith(detail)


def test_a_backward_pass_that_is_wrong_counts(small, monkeypatch):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.T, a.T @ gradient * (1.1 if a.dtype == BFLOAT16 else 1)

    monkeypatch.setitem(child.PRODUCTS, "matmul", (child.PRODUCTS["matmul"][0], Product.apply))
    assert child.examined(BFLOAT16)["status"] == "wrong"


def test_a_missing_kernel_is_told_from_a_failure_of_fp32(small, monkeypatch):
    def refuse(dtype):
        def product(a, b):
            if a.dtype == dtype:
                raise RuntimeError("no kernel\nand more")
            return a @ b

        return product

    monkeypatch.setitem(child.PRODUCTS, "matmul", (child.PRODUCTS["matmul"][0], refuse(BFLOAT16)))
    assert child.examined(BFLOAT16) == {"status": "unsupported", "speed_ratio": None, "detail": "matmul: no kernel"}
    monkeypatch.setitem(child.PRODUCTS, "matmul", (child.PRODUCTS["matmul"][0], refuse(torch.float32)))
    with pytest.raises(RuntimeError, match="no kernel"):
        child.examined(BFLOAT16)


def test_the_slowest_product_decides_what_is_fast(small, monkeypatch):
    times = iter([1.0, 0.5, 1.0, 4.0, 1.0, 2.0])  # FP32 and the format, by turns: linear, matmul, convolution
    monkeypatch.setattr(child, "_seconds", lambda work, device: next(times))
    found = child.examined(BFLOAT16)
    assert (found["speed_ratio"], found["detail"]) == (0.25, "slowest: matmul")


def test_the_products_compute_what_they_say(small):
    """Count the kernels that they reach, forward and backward, so that none is empty."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(isinstance(each, torch.Tensor) and each.dtype == BFLOAT16 for each in args):
                self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Count() as count:
        child.examined(BFLOAT16)
    assert count.names.count("mm") == 2 * 6, "linear and matmul, forward, backward by both, once more for the clock"
    assert count.names.count("convolution_backward") == count.names.count("convolution") == 2
    assert any("attention" in name and "backward" in name for name in count.names)


def test_work_in_process_leaves_states_alone_and_is_reached_by_none(small):
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=FLOAT16), torch.device("meta"):
        assert child.examined(BFLOAT16)["status"] == "right"
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_what_other_programs_take_of_the_processor_makes_no_format_slow():
    """A child that waits is measured as one that does not: a busy machine's verdict would be kept for good."""
    assert child._seconds(lambda: time.sleep(0.02), "cpu") < 0.01


def test_the_real_program_says_one_line():
    done = subprocess.run([*probing.CHILD_COMMAND, "float32"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    found = json.loads(line.removeprefix(child.PREFIX))
    assert found["status"] == "right"
    assert found["speed_ratio"] > 0


# What the parent makes of it ---------------------------------------------------------------------------


def test_a_healthy_cpu_is_asked_once_for_each_format(children, unlimited):
    ends, asked = children
    ends["float16", None] = {"status": "unsupported", "speed_ratio": None, "detail": "linear: no kernel"}
    report = probing.cpu_report()
    assert report == DeviceReport(
        device_type="cpu",
        name=probing.processor()["name"],
        formats={FLOAT16: FormatSupport(**ends["float16", None]), BFLOAT16: FormatSupport(**RIGHT)},
    )
    assert asked == [("float16", None), ("bfloat16", None)]
    assert probing.cpu_report() == report
    assert len(asked) == 2, "the next process reads the answers"
    (file,) = unlimited.iterdir()
    assert (file.name.startswith("device-"), file.suffix) == (True, ".json")
    assert (unlimited.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert probing.cpu_report(refresh=True) == report
    assert len(asked) == 4
    assert list(unlimited.iterdir()) == [file]


def test_a_death_is_asked_again_under_the_limit(children):
    ends, asked = children
    ends["bfloat16", None] = DEAD
    report = probing.cpu_report()
    support = report.formats[BFLOAT16]
    assert (support.status, support.fast, support.speed_ratio) == ("dead", True, 2.0)
    assert support.detail == (
        "another process that tried it was killed by SIGILL; right with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    )
    assert report.needs_isa_limit
    assert report.formats[FLOAT16].status == "right"
    assert asked == [("float16", None), ("bfloat16", None), ("bfloat16", ISA_LIMIT)]
    assert probing.cpu_report() == report
    assert len(asked) == 3


@pytest.mark.parametrize("end", [DEAD, 1, RIGHT | {"status": "wrong", "speed_ratio": None}])
def test_a_death_that_the_limit_does_not_cure(children, end):
    ends, _ = children
    ends["bfloat16", None], ends["bfloat16", ISA_LIMIT] = DEAD, end
    report = probing.cpu_report()
    support = report.formats[BFLOAT16]
    assert (support.status, support.fast, support.speed_ratio) == ("dead", False, None)
    assert support.detail == "another process that tried it was killed by SIGILL"
    assert not report.needs_isa_limit


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_under_the_users_own_limit_a_format_is_as_it_is_there(children, monkeypatch, name):
    ends, asked = children
    probing.cpu_report()
    monkeypatch.setenv(name, "AVX2")
    ends["bfloat16", "AVX2"] = RIGHT | {"speed_ratio": 0.1}
    assert probing.cpu_report().formats[BFLOAT16].speed_ratio == 0.1
    assert asked[2:] == [("float16", "AVX2"), ("bfloat16", "AVX2")]
    monkeypatch.delenv(name)
    assert probing.cpu_report().formats[BFLOAT16].speed_ratio == 2.0
    assert len(asked) == 4, "both answers are in the one file"


def test_under_the_users_own_limit_a_death_stays_one(children, monkeypatch):
    ends, _ = children
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    ends["bfloat16", None] = DEAD
    report = probing.cpu_report()
    assert (report.formats[BFLOAT16].status, report.formats[BFLOAT16].speed_ratio) == ("dead", 2.0)
    assert report.needs_isa_limit
    ends["bfloat16", "AVX2"] = DEAD
    assert probing.cpu_report(refresh=True).formats[BFLOAT16].speed_ratio is None


@pytest.mark.parametrize(
    "end, detail",
    [
        (-signal.SIGKILL, "it could not be asked: another process was killed by SIGKILL and had said nothing"),
        (7, "it could not be asked: another process ended with exit code 7 and had said nothing"),
    ],
)
def test_a_child_that_says_nothing_is_asked_again_by_the_next_process(children, unlimited, end, detail):
    ends, asked = children
    ends["bfloat16", None] = end
    support = probing.cpu_report().formats[BFLOAT16]
    assert (support.status, support.fast, support.detail) == ("unknown", False, detail)
    del ends["bfloat16", None]
    assert probing.cpu_report().formats[BFLOAT16].status == "right"
    assert asked == [("float16", None), ("bfloat16", None), ("bfloat16", None)]


@pytest.mark.parametrize(
    "command, reason",
    [
        (["/nonexistent/python"], "another process could not be started or did not end"),
        ([sys.executable, "-S", "-c", "import time; time.sleep(60)"], "could not be started or did not end"),
        ([sys.executable, "-S", "-c", "pass"], "ended with exit code 0 and had said nothing"),
        (None, "this Python has no executable of its own to start another with"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_unknown(monkeypatch, unlimited, command, reason):
    monkeypatch.setattr(probing, "CHILD_TIMEOUT_S", 0.5)
    if command is None:  # a frozen program's executable is the program
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was started"))
    else:
        monkeypatch.setattr(probing, "CHILD_COMMAND", command)
    for support in probing.cpu_report().formats.values():
        assert support.status == "unknown"
        assert reason in support.detail
    assert not unlimited.exists() or json.loads(next(unlimited.iterdir()).read_text()) == {}


def test_warning_filters_and_folders_of_the_users_do_not_reach_the_child(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path / "no text", None])  # imports pass over them
    program = f"import warnings; warnings.warn('old'); import json; print('mezzo-probe ' + json.dumps({RIGHT}))"
    script = tmp_path / "folder" / "program.py"
    script.parent.mkdir()
    script.write_text(program)
    monkeypatch.setattr(probing, "CHILD_COMMAND", [*probing.CHILD_COMMAND[:-1], str(script)])
    assert {each.status for each in probing.cpu_report().formats.values()} == {"right"}


def test_the_older_name_of_the_variable_counts_when_the_newer_is_absent(monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert probing.isa_setting() == "AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert probing.isa_setting() == "AVX512_CORE"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("DNNL_MAX_CPU_ISA")
    assert probing.isa_setting() is None


# What is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["processor", "torch", "probe"])
def test_another_processor_torch_or_probe_is_another_file(children, unlimited, monkeypatch, change):
    probing.cpu_report()
    match change:
        case "processor":
            monkeypatch.setattr(probing, "processor", lambda: {"name": "another"})
        case "torch":
            monkeypatch.setattr(torch, "__version__", "9.9.9")
        case "probe":
            monkeypatch.setattr(probing, "_VERSION", 99)
    probing.cpu_report()
    assert len(children[1]) == 4
    assert len(list(unlimited.iterdir())) == 2


@pytest.mark.parametrize(
    "harm", [b"", b"null", b"[]", b"3", b'{"bfloat16": 1}', b'{"bfloat16": {"word": 1}}', b"\xff\xfe", b"[" * 100_000,
             b'{"bfloat16": {"status": "rigth", "detail": ""}}',
             b'{"bfloat16": {"status": "right", "speed_ratio": "2", "detail": ""}}'],
)  # fmt: skip
def test_a_file_that_is_not_right_is_replaced_with_a_line_in_the_log(children, unlimited, caplog, harm):
    report = probing.cpu_report()
    (file,) = unlimited.iterdir()
    whole = file.read_bytes()
    file.write_bytes(harm)
    with caplog.at_level("INFO"):
        assert probing.cpu_report() == report
    (record,) = caplog.records
    assert record.getMessage().startswith("nothing is known of this CPU: ")
    assert file.read_bytes() == whole


@pytest.mark.parametrize("place", ["file", "homeless"])
def test_a_cache_that_cannot_be_written_costs_a_line_in_the_log(children, monkeypatch, tmp_path, caplog, place):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place == "file" else "")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(files.Path, "home", homeless)
    with caplog.at_level("INFO"):
        assert probing.cpu_report().formats[BFLOAT16].status == "right"
    assert caplog.records[-1].getMessage().startswith("what was found out of this CPU could not be kept: ")


def test_the_folder_follows_the_xdg_specification(monkeypatch, tmp_path):
    assert files.cache_folder() == tmp_path / "mezzo"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for relative in ("relative/path", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert files.cache_folder() == tmp_path / "home" / ".cache" / "mezzo"


def test_a_report_cannot_be_changed_and_is_what_json_holds():
    support = FormatSupport(status="dead", speed_ratio=2.5, detail="why")
    report = DeviceReport(device_type="cpu", name="a CPU", formats={BFLOAT16: support}, needs_isa_limit=True)
    assert json.loads(json.dumps(report.to_dict())) == {
        "device_type": "cpu", "name": "a CPU", "needs_isa_limit": True,
        "formats": [{"dtype": "bfloat16", "status": "dead", "speed_ratio": 2.5, "detail": "why", "fast": True}],
    }  # fmt: skip
    with pytest.raises(AttributeError):
        report.name = "another"


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
@pytest.mark.parametrize(
    "end",
    [die, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 / 0, lambda: sys.exit(0), lambda: time.sleep(60),
     lambda: threading.Lock().acquire() and time.sleep(60)],
)  # fmt: skip
def test_a_copy_that_does_not(monkeypatch, capfd, end):
    """Handlers and masks of the user's hide neither a death nor an endless wait."""
    monkeypatch.setattr(probing, "TRIAL_TIMEOUT_S", 1)
    monkeypatch.setattr(child, "products", lambda dtype: end())
    threads = torch.get_num_threads()
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGILL, signal.SIGALRM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        assert not probing.survives_here(BFLOAT16)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", ""), "a death that was expected is nobody's business"


@CAN_FORK
def test_an_exit_status_that_other_code_collected_is_no_answer(monkeypatch):
    real = os.waitpid

    def collected(pid, options):
        real(pid, 0)
        return real(pid, options)

    monkeypatch.setattr(os, "waitpid", collected)
    assert not probing.survives_here(torch.float32)


def test_a_platform_without_fork_and_a_process_too_large_to_copy(monkeypatch):
    def refuse():
        raise BlockingIOError("no memory")

    monkeypatch.setattr(os, "fork", refuse, raising=False)
    assert not probing.survives_here(BFLOAT16)
    monkeypatch.delattr(os, "fork")
    assert not probing.survives_here(BFLOAT16)
