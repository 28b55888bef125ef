"""Which executor is chosen, and that there always is one."""

import logging

import pytest
import torch

from mezzo import UnsupportedError, compiled, launched
from mezzo.step.executors import choose, cpp, triton
from mezzo.step.executors.choose import executor_for, update_of
from mezzo.step.executors.cpp import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.step.storage import PLAIN
from mezzo.step.verdict import judge

from .implementations import bucket_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def choose_anew():
    caches = (choose._working, choose.has_triton, cpp.built)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_without_a_compiler_for_kernels_weights_are_updated_block_by_block(monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled, "_COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING, logger="mezzo"):
        assert isinstance(executor_for(CPU), Portable)
        executor_for(CPU)
    (record,) = caplog.records
    assert "steps on cpu run block by block, since no C++ compiler" in record.getMessage()
    assert "where  linux, no-such-compiler" in record.getMessage()
    assert "apt install g++" in record.getMessage()

    bucket = bucket_of("sgd", PLAIN, torch.bfloat16, weights=[torch.ones(200_000)])
    for name, value in {"lr": 1.0, "weight_decay": 0.0}.items():
        bucket.hypers[name].fill_(value)
    update_of(bucket)([torch.full((200_000,), 0.5)], judge(torch.ones(1), None))
    assert (bucket.weights[0] == 0.5).all()


@pytest.mark.parametrize(
    "built, has_triton, triton_s", [("13.0", True, True), ("13.0", False, False), (None, True, False)]
)
def test_each_device_takes_its_own_executor_and_keeps_it(monkeypatch, built, has_triton, triton_s):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(launched.importlib.util, "find_spec", lambda name: has_triton or None)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: False)
    monkeypatch.setattr(triton.Triton, "require", lambda self, device: None)
    kinds = {"cuda": triton.Triton if triton_s else Portable, "cpu": Cpp, "xpu": Portable}
    for device, executor_class in kinds.items():
        assert type(executor_for(torch.device(device))) is executor_class
        assert executor_for(torch.device(device)) is executor_for(torch.device(device))


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device that nothing is put on, for a torch that has Triton."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(launched.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: False)
    return torch.device("cuda", 0)


def test_without_a_compiler_for_triton_cuda_devices_are_updated_block_by_block(monkeypatch, caplog, cuda):
    tries = []

    def launch(*_):
        tries.append(1)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(triton, "_TritonNorms", launch)
    with caplog.at_level(logging.WARNING, logger="mezzo"):
        assert isinstance(executor_for(cuda), Portable)
        executor_for(cuda)
    assert len(tries) == 1
    (record,) = caplog.records
    assert "steps on cuda:0 run block by block, since Triton cannot launch" in record.getMessage()
    assert "Failed to find C compiler" in record.getMessage()
    assert "apt install gcc python3-dev" in record.getMessage()


def test_while_a_graph_is_captured_nothing_is_tried_and_nothing_is_remembered(monkeypatch, cuda, caplog):
    monkeypatch.setattr(triton.Triton, "require", lambda self, device: None)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured.*the first step of all, on cuda:0.*write  one"):
        executor_for(cuda)
    monkeypatch.setattr(triton, "_is_capturing", lambda device: False)
    assert isinstance(executor_for(cuda), triton.Triton)
    assert not caplog.records
