"""Which executor is chosen, and that there always is one."""

import logging

import pytest
import torch

from mezzo import UnsupportedError, optim
from mezzo.step.executors import Blocked, Compiled, choose
from mezzo.step.executors.choose import executor_for
from mezzo.step.executors.cpp import build
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.triton import launch as triton

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports

CPU = torch.device("cpu")
LARGE = 1 << 22


@pytest.fixture(autouse=True)
def choose_anew():
    caches = (choose._cpp, choose._compiled, choose._triton, choose._has_triton, build.built)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_on_a_cpu_compiling_has_to_be_worth_its_time():
    assert isinstance(executor_for(CPU, (1 << 16) - 1), Blocked)
    assert isinstance(executor_for(CPU, 1 << 16), Cpp)
    assert executor_for(CPU, 1 << 16) is executor_for(CPU, LARGE)


@pytest.fixture
def no_cpp(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))


@pytest.mark.usefixtures("no_cpp")
def test_without_a_compiler_for_kernels_torch_s_is_asked_where_that_is_worth_its_time(caplog):
    with caplog.at_level(logging.INFO, logger="mezzo.step"):
        assert isinstance(executor_for(CPU, LARGE - 1), Blocked)
        assert isinstance(executor_for(CPU, LARGE), Compiled)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "do without kernels of their own, since no C++ compiler" in record.getMessage()
    assert "where  linux, no-such-compiler" in record.getMessage()


def refuse(*_, **__):
    raise RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx")


@pytest.mark.usefixtures("no_cpp")
def test_without_a_compiler_large_models_are_updated_block_by_block(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", lambda function, **_: refuse)
    with caplog.at_level(logging.WARNING, logger="mezzo"):
        assert isinstance(executor_for(CPU, LARGE), Blocked)
        executor_for(CPU, LARGE)
    (record,) = caplog.records
    assert "block by block" in record.getMessage()
    assert "No working C++ compiler" in record.getMessage()
    assert "apt install g++" in record.getMessage()

    weight = torch.nn.Parameter(torch.ones(LARGE, dtype=torch.bfloat16))
    optimizer = optim.SGD([weight], lr=1.0)
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    assert (weight == 0.5).all()
    assert optimizer.state[weight]["remainder"].dtype == torch.int16


@pytest.mark.usefixtures("no_cpp")
def test_where_compiling_is_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert isinstance(executor_for(CPU, LARGE), Blocked)
    assert "unset TORCHDYNAMO_DISABLE" in caplog.text


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device that nothing is put on, for a torch that has Triton."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: False)
    return torch.device("cuda", 0)


def test_without_a_compiler_for_triton_cuda_devices_are_updated_block_by_block(monkeypatch, caplog, cuda):
    tries = []

    def launch(*_):
        tries.append(1)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(triton, "_Norms", launch)
    with caplog.at_level(logging.WARNING, logger="mezzo"):
        assert isinstance(executor_for(cuda, LARGE), Blocked)
        executor_for(cuda, LARGE)
    assert len(tries) == 1
    (record,) = caplog.records
    assert "steps on cuda:0 run block by block, since Triton cannot launch" in record.getMessage()
    assert "Failed to find C compiler" in record.getMessage()
    assert "apt install gcc python3-dev" in record.getMessage()


def test_triton_is_tried_once_a_device(monkeypatch, cuda):
    tried = []
    monkeypatch.setattr(triton.Triton, "require", lambda self, device: tried.append(device))
    assert isinstance(executor_for(cuda, 1), triton.Triton)
    assert executor_for(cuda, 1) is executor_for(cuda, 2)
    assert executor_for(torch.device("cuda", 1), 1) is not executor_for(cuda, 1)
    assert tried == [cuda, torch.device("cuda", 1)]


def test_while_a_graph_is_captured_nothing_is_tried_and_nothing_is_remembered(monkeypatch, cuda, caplog):
    monkeypatch.setattr(triton.Triton, "require", lambda self, device: None)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured.*the first step of all, on cuda:0.*write  one"):
        executor_for(cuda, 1)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: False)
    assert isinstance(executor_for(cuda, 1), triton.Triton)
    assert not caplog.records
