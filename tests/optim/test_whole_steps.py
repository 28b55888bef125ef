"""A step of mezzo's optimizers is whole or has not begun; kernels that cannot be built are done without."""

import copy
import itertools
import signal
import sys

import pytest
import torch
from torch.nn import Parameter

import mezzo
from mezzo import UnsupportedError
from mezzo.optim import optimizer as optimizer_module
from mezzo.optim import planned
from mezzo.step import verdict
from mezzo.step.executors import choose, cpp, portable
from mezzo.weights.stepping import in_memory

from .halved import halved


def optimizer_of(name, dtype=torch.float32, length=20):
    params = [Parameter(torch.linspace(-1, 1, length)) for _ in range(2)]
    optimizer = getattr(mezzo.optim, name)([{"params": [params[0]]}, {"params": [params[1]]}], lr=0.01)
    halved(params, dtype)
    gradients(params, 0)
    optimizer.step()
    return params, optimizer


def gradients(params, number):
    for param in params:
        param.grad = torch.cos(torch.arange(len(param)) + number).to(param.dtype)


def facts(params, optimizer):
    return copy.deepcopy([in_memory(params), optimizer.state_dict()["state"]])


def same(one, other):
    pairs = zip(*(torch.utils._pytree.tree_leaves(side) for side in (one, other)), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


WRITERS = (optimizer_module.__file__, planned.__file__, verdict.__file__, portable.__file__, cpp.__file__)


@pytest.mark.parametrize("executor, stride", [("kernels", 1), ("block by block", 3)])
def test_an_interrupt_at_any_line_of_a_step_leaves_it_whole_or_not_begun(executor, stride, monkeypatch):
    """Block by block there are many lines, and all within what an interrupt waits for: every third one."""
    name, dtype = "AdamW", torch.bfloat16
    if executor != "kernels":
        monkeypatch.setattr(optimizer_module, "executor_for", lambda _: portable.Portable())
    wholes = []
    for steps in (1, 2):
        params, optimizer = optimizer_of(name, dtype)
        gradients(params, 1)
        for _ in range(steps - 1):
            optimizer.step()
        wholes.append(facts(params, optimizer))
    lines, at, interrupted = itertools.count(), None, []

    def trace(frame, event, _):
        if frame.f_code.co_filename not in WRITERS:
            return None
        if event == "line" and next(lines) == at:
            signal.raise_signal(signal.SIGINT)
        return trace

    while at is None or interrupted[-1]:  # until the line is beyond the step
        params, optimizer = optimizer_of(name, dtype)
        gradients(params, 1)
        at, lines = 0 if at is None else at + stride, itertools.count()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            optimizer.step()
            interrupted.append(False)
        except KeyboardInterrupt:
            interrupted.append(True)
        finally:
            sys.settrace(before)
        now = facts(params, optimizer)
        assert any(same(now, whole) for whole in (wholes if interrupted[-1] else wholes[1:])), at
        optimizer.step()  # and another one finds nothing in its way
    assert at > 40


def test_without_its_compiler_an_optimizer_goes_on_block_by_block(monkeypatch, caplog):
    """A gradient of another dtype needs another kernel, when the compiler may be gone."""
    name = "Lion"
    if not isinstance(choose.executor_for(torch.device("cpu")), cpp.Cpp):
        pytest.skip("needs a C++ compiler")
    portable.warn_once.cache_clear()
    params, optimizer = optimizer_of(name, torch.bfloat16, 1 << 16)
    others, other = optimizer_of(name, torch.bfloat16, 1 << 16)
    for param_list in (params, others):
        gradients(param_list, 1)
        for param in param_list:
            low = param.grad.bfloat16()
            param.grad_dtype = None
            param.grad = low
    other.step()

    def gone(source):
        raise UnsupportedError("no C++ compiler for kernels")

    monkeypatch.setattr(cpp, "built", gone)
    optimizer.step()
    optimizer.step()
    other.step()
    assert caplog.text.count("optimizer steps go on by torch's own operations, since no C++ compiler") == 1
    for mine, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=0)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_torch_compile_breaks_the_graph_around_a_step():
    torch._dynamo.reset()
    ways = []
    for compiled in (False, True):
        params, optimizer = optimizer_of("AdamW", torch.bfloat16)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            gradients(params, number)
            step()
        ways.append(facts(params, optimizer))
    assert same(*ways)
