"""Halves on a real model: thousands of steps of ``docs-lm`` as with FP32 masters kept by hand, bit for bit in BF16."""

import pytest
import torch
from torch.func import functional_call

import lm
import mezzo.optim.optimizer
from mezzo import optim
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.weights import encode

from .halved import halved

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports

EXECUTORS = {"portable": Portable, "cpp": Cpp}


def adamw(groups):
    return optim.AdamW(groups, lr=2.5e-3, betas=(0.9, 0.99))


def losses(model, steps, step):
    """Train in FP32 arithmetic on low weights, whose gradients are low, too; return the losses."""
    found, batches = [], lm.batches(0)
    for _ in range(steps):
        inputs, targets = next(batches)
        wide = {name: param.float() for name, param in model.named_parameters()}
        loss = lm.loss(functional_call(model, wide, (inputs,)), targets)
        loss.backward()
        found.append(loss.item())
        step()
        model.zero_grad()
    return found


def in_halves(dtype, steps):
    model = lm.build(0)
    optimizer = adamw(lm.groups(model))
    halves = halved(list(model.parameters()), dtype, optimizer)
    return losses(model, steps, optimizer.step), [halves.read(param) for param in model.parameters()]


def beside_masters(dtype, steps):
    """Gradients go to FP32 copies of the weights, which an optimizer updates, and the weights are these, rounded."""
    model, wide = lm.build(0), lm.build(0)
    optimizer, masters = adamw(lm.groups(wide)), list(wide.parameters())

    def rounded():
        for param, master in zip(model.parameters(), masters, strict=True):
            param.data = encode(master.detach(), dtype)[0]

    def step():
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        rounded()

    rounded()
    return losses(model, steps, step), [master.detach() for master in masters]


def same_curves(steps):
    curves, weights = in_halves(torch.bfloat16, steps)
    expected, masters = beside_masters(torch.bfloat16, steps)
    assert len(curves) == steps
    assert curves[-1] < 0.9 * curves[0]  # it learned something
    assert curves == expected
    for one, other in zip(weights, masters, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_six_steps_are_those_of_masters():
    same_curves(6)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_thousand_steps_are_those_of_masters(executor, monkeypatch):
    made = EXECUTORS[executor]()
    monkeypatch.setattr(mezzo.optim.optimizer, "executor_for", lambda *_: made)
    same_curves(2000)


@pytest.mark.slow
def test_two_thousand_steps_in_fp16_end_where_masters_do():
    curves, _ = in_halves(torch.float16, 2000)
    expected, _ = beside_masters(torch.float16, 2000)
    one, other = (sum(curve[-200:]) / 200 for curve in (curves, expected))
    assert abs(one - other) < 0.01 * other  # weights below 2^-16 are kept to within 2^-40
