"""Which executor is chosen, and that there always is one."""

import logging

import pytest
import torch

from mezzo import optim
from mezzo.optim import executors
from mezzo.optim.executors import executor_for
from mezzo.step.kernels import Blocked, Compiled

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports

CPU = torch.device("cpu")
LARGE = 1 << 22


@pytest.fixture(autouse=True)
def choose_anew():
    executors._compiled.cache_clear()
    yield
    executors._compiled.cache_clear()


def test_on_a_cpu_compiling_has_to_be_worth_its_time():
    assert isinstance(executor_for(CPU, LARGE - 1), Blocked)
    assert isinstance(executor_for(CPU, LARGE), Compiled)
    assert executor_for(CPU, LARGE) is executor_for(CPU, LARGE)


def refuse(*_, **__):
    raise RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx")


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


def test_where_compiling_is_switched_off(monkeypatch, caplog):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert isinstance(executor_for(CPU, LARGE), Blocked)
    assert "unset TORCHDYNAMO_DISABLE" in caplog.text
