"""Set-up that must happen before torch is imported."""

import ctypes
import dataclasses
import gc
import importlib
import os
import signal
import tempfile
from pathlib import Path

# A runner in the background of a shell hands on that Ctrl-C is ignored; tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On some virtual machines oneDNN's AMX path dies with an illegal instruction on BF16 products. The
# library protects its users by itself; the tests must not depend on that when they test something else.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# The device probe's cache: shared by the workers of a run, apart from the user's own.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"mezzo-tests-{os.getuid()}")
# torch.compile by itself keeps a pool of processes for C++ and Triton; the few kernels here are compiled one by one.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# In the processes that tests/fake_cuda starts: torch looks for devices only once.
if "MEZZO_FAKE_CUDA" in os.environ:
    ctypes.CDLL(os.environ["MEZZO_FAKE_CUDA"])

import numpy
import pytest
import torch
from hypothesis import settings

from mezzo.cast.device import Claim, decide

from .gpus import FAKE, opened
from .processor import tell

if FAKE:  # before anything asks torch for a device
    from .fake_cuda.machine import plug_in

    plug_in(Path(FAKE))
if torch.backends.mkldnn.is_available():
    torch.ops.mkldnn._is_mkldnn_bf16_supported()  # oneDNN reads its limit here, whatever a test does to the environment

if not (FAKE or torch.cuda.is_available() or torch.xpu.is_available()):
    # For devices that may come, torch.manual_seed writes down the whole stack twice: milliseconds, thousands of times.
    for device in (torch.cuda, torch.xpu):
        device.random._lazy_call = lambda *_, **__: None

# Time says nothing on a shared machine; and a landing is judged by examples that its author saw, too. Other ones:
# HYPOTHESIS_PROFILE=search, with --hypothesis-seed to repeat them.
settings.register_profile("mezzo", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "mezzo"))

tell()


#: What takes longest, and starts processes: begun last, one worker would be at it alone.
_LONG = ("fake_cuda", "test_machine", "distributed", "test_compiled")


def pytest_collection_modifyitems(items):
    """Begin with what takes longest."""
    items.sort(key=lambda item: not any(name in item.path.parts or name == item.path.stem for name in _LONG))


def pytest_ignore_collect(collection_path):
    """Collect docstring examples from the source alone: helpers of tests import modules that few tests need."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith(("test_", "conftest"))
    return True if is_helper and Path(__file__).parent in collection_path.parents else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze older objects, so that garbage collection visits those of tests alone: a million take half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def swept():
    """Freeze the objects of earlier test files as well, modules that they imported for the most part."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def emulated():
    """A processor that has neither 16-bit format: both are emulated, which costs what FP32 does everywhere."""
    report, nothing = decide._reports["cpu"], Claim(words="as the tests are told")
    return dataclasses.replace(
        report, formats={dtype: support.claiming(nothing) for dtype, support in report.formats.items()}
    )


@pytest.fixture
def emulating(emulated, monkeypatch):
    """On such a processor; for tests that train, as products in BF16 take ten times as long where they are not fast."""
    monkeypatch.setitem(decide._reports, "cpu", emulated)


@pytest.fixture
def gpu():
    """The CUDA device of this process, real or one that computes nothing; files named ``test_*_on_gpu.py`` see both."""
    with opened() as device:
        yield device


@pytest.fixture
def alone():
    """A process group of this process alone, without a port."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # reducers in cycles go before their group does
        torch.distributed.destroy_process_group()


@pytest.fixture
def computing(gpu):
    """A CUDA device, for tests of values, streams and memory, which the one that computes nothing has not."""
    if not gpu.computes:
        pytest.skip("needs a CUDA device that computes")
    return gpu


@pytest.fixture
def interpreted(monkeypatch):
    """Run kernels that the test makes in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    language = importlib.import_module("triton.language")
    # If torch has imported Triton before, functions of its library are not the interpreter's.
    for name in ("max", "sum"):
        monkeypatch.setattr(language, name, triton.jit(getattr(language, name).fn))
    # The interpreter patches what the compiler uses too, and does not put all of it back.
    before = [(module, dict(vars(module))) for module in (language, language.core, language.math, language.standard)]
    with numpy.errstate(all="ignore"):  # infinities are part of the arithmetic
        yield
    for module, names in before:
        vars(module).update(names)
