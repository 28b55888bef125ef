"""Split storage on a real model: thousands of steps of ``docs-lm`` as with FP32 masters, bit for bit in BF16."""

import dataclasses

import pytest
import torch

import mezzo.optim.optimizer
from mezzo import Policy, optim
from mezzo.recipes import get
from mezzo.recipes.parallel import World
from mezzo.recipes.recipe import decayed_groups
from mezzo.recipes.training import Training
from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Portable

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports

EXECUTORS = {"portable": Portable, "cpp": Cpp}


@pytest.fixture(scope="module")
def split():
    return get("docs-lm").load()


def trained(split, master, steps, dtype="bfloat16"):
    """Train the recipe with mezzo's AdamW, and return its losses and FP32 weights."""
    recipe = dataclasses.replace(
        get("docs-lm"),
        optimizer=lambda model: optim.AdamW(decayed_groups(model, 0.1), lr=2.5e-3, betas=(0.9, 0.99), master=master),
        evaluate=lambda model, split: 0.0,  # which says nothing here, and takes longer than six steps
    )
    policy = Policy.parse(f"O2,dtype={dtype},emulate=true")
    run = Training(recipe, policy, split, steps=steps, world=World(device=torch.device("cpu")))
    run.train()
    weights = [run.optimizer.master_of(param) for param in run.model.parameters()]
    run.close()
    return [record.loss for record in run.records], weights


def same_curves(split, steps):
    curves, weights = trained(split, "split", steps)
    expected, masters = trained(split, "full", steps)
    assert len(curves) == steps
    assert curves[-1] < 0.8 * curves[0]  # it learned something
    assert curves == expected
    for one, other in zip(weights, masters, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_six_steps_are_those_of_full_masters(split):
    same_curves(split, 6)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_thousand_steps_are_those_of_full_masters(split, executor, monkeypatch):
    made = EXECUTORS[executor]()
    monkeypatch.setattr(mezzo.optim.optimizer, "executor_for", lambda *_: made)
    same_curves(split, 2000)


@pytest.mark.slow
def test_two_thousand_steps_in_fp16_end_where_full_masters_do(split):
    curves, _ = trained(split, "split", 2000, "float16")
    expected, _ = trained(split, "full", 2000, "float16")
    tails = (sum(curve[-200:]) / 200 for curve in (curves, expected))
    one, other = tails
    assert abs(one - other) < 0.01 * other  # weights below 2^-16 are kept to within 2^-40
