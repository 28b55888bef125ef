"""mezzo.optim against torch.optim: updates, states, groups, schedules, skipping, storage."""

import copy
import math

import pytest
import torch
from torch import nn

import mezzo
from mezzo import optim
from mezzo.step.executors.cpp import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.weights.stepping import in_memory

from .halved import halved

SHAPES = ((5, 7), (3,), (4, 2, 3), ())
PAIRS = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw amsgrad": (optim.AdamW, torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adam": (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    "sgd": (optim.SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "sgd nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


#: Dtypes of weights and of moments.
STORED = [(torch.float32, "bfloat16"), (torch.bfloat16, "float32"), (torch.float16, "bfloat16")]
STORED += [(torch.bfloat16, "int8"), (torch.float32, "int8")]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params, step, *, scale=1.0, dtype=None):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator) * scale
        if dtype is not None:
            param.grad = None
            param.grad_dtype = dtype
        param.grad = gradient.to(dtype or param.dtype)


def train(params, optimizer, steps, **options):
    for step in steps:
        give_gradients(params, step, **options)
        optimizer.step()


def ulps(ours, theirs):
    """The largest difference in units in the last place of the larger operand of the update, about 1."""
    return max(((a - b).abs() / torch.finfo(torch.float32).eps).max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("pair", PAIRS)
def test_steps_are_torch_s_and_state_goes_to_torch_and_back_in_mid_run(pair):
    mine, theirs, options = PAIRS[pair]
    one, other = parameters(), parameters()
    first, second = mine(one, lr=1e-2, **options), theirs(other, lr=1e-2, **options)
    for steps in (range(20), range(20, 40)):
        train(one, first, steps)
        train(other, second, steps)
        assert ulps([p.detach() for p in one], [p.detach() for p in other]) <= 32
        states = first.state_dict(), second.state_dict()
        first, second = theirs(one, lr=1e-2, **options), mine(other, lr=1e-2, **options)
        if pair != "sgd":  # of which torch keeps none
            first.load_state_dict(states[0])
            second.load_state_dict(states[1])


@pytest.mark.parametrize("dtype, state_dtype", STORED)
def test_resuming_is_bit_exact(dtype, state_dtype):
    params, others = parameters(), parameters(seed=1)
    optimizer, resumed = (optim.AdamW(param_list, lr=1e-2, state_dtype=state_dtype) for param_list in (params, others))
    halved(params, dtype)
    halved(others, dtype)
    train(params, optimizer, range(5))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():  # weights come with the model
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    train(params, optimizer, range(5, 15))
    train(others, resumed, range(5, 15))
    assert all(map(torch.equal, params, others))


def test_where_a_session_says_so_updates_of_a_low_weight_are_rounded_to_nearest():
    """``O3`` asks for it."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = optim.SGD([weight], lr=2**-7)
    optimizer.rounds = True
    weight.grad = torch.tensor([0.0, 0.2, 0.3, 1.0], dtype=torch.bfloat16)
    for _ in range(3):
        start = weight.detach().float()
        optimizer.step()
        assert torch.equal(weight, (start - 2**-7 * weight.grad.float()).bfloat16())


@pytest.mark.parametrize(
    "optimizer_class, executor",
    [
        (optim.AdamW, Cpp()),
        (optim.AdamW, Portable()),
        (optim.Adam, Cpp()),
        (optim.SGD, Portable()),
        (optim.Lion, Cpp()),
    ],
)
def test_halves_are_fp32_weights_bit_for_bit_in_bfloat16(optimizer_class, executor, monkeypatch):
    monkeypatch.setattr("mezzo.optim.optimizer.executor_for", lambda *_: executor)
    one, other = parameters(), parameters()
    low, wide = optimizer_class(one, lr=1e-2), optimizer_class(other, lr=1e-2)
    halved(one, torch.bfloat16)
    for step in range(8):
        give_gradients(one, step, dtype=(torch.bfloat16, torch.float32)[step % 2])
        for param, same in zip(one, other, strict=True):
            same.grad = param.grad.float()
        low.step()
        wide.step()
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("first", [0, 1])
def test_weights_in_halves_and_plain_ones_share_an_optimizer(first):
    plain, exact, wide = parameters(), parameters(), parameters()
    both = [plain, exact]
    optimizer, reference = optim.AdamW(both[first] + both[1 - first], lr=1e-3), optim.AdamW(wide, lr=1e-3)
    halved(exact, torch.bfloat16)
    for step in range(5):
        for params in (plain, exact, wide):
            give_gradients(params, step)
        optimizer.step()
        reference.step()
    assert all(map(torch.equal, exact, wide))
    assert all(map(torch.equal, plain, wide))


@pytest.mark.parametrize("dtype, state_dtype", STORED)
def test_a_skipped_step_writes_nothing(dtype, state_dtype):
    params = parameters()
    optimizer = optim.AdamW(params, lr=1e-2, state_dtype=state_dtype)
    halved(params, dtype)

    def facts():
        return copy.deepcopy((in_memory(params), optimizer.state_dict()["state"]))

    train(params, optimizer, range(3))
    before = facts()
    give_gradients(params, 7)
    params[0].grad.fill_(math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(8.0)
    optimizer.step()
    for one, other in zip(*(torch.utils._pytree.tree_leaves(x) for x in (before, facts())), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_divided_on_the_way_and_never_written():
    one, other = parameters(), parameters()
    scaled, plain = optim.SGD(one, lr=1e-2), optim.SGD(other, lr=1e-2)  # which follows a scale, as Adam does not
    halved(one, torch.bfloat16)
    halved(other, torch.bfloat16)
    for step in range(5):
        give_gradients(one, step, scale=1024.0)
        give_gradients(other, step)
        before = [param.grad.clone() for param in one]
        scaled.found_inf, scaled.grad_scale = torch.tensor(0.0), torch.tensor(1024.0)
        scaled.step()
        plain.step()
        assert all(torch.equal(param.grad, gradient) for param, gradient in zip(one, before, strict=True))
    assert all(map(torch.equal, one, other))


def test_groups_schedules_parameters_added_later_and_those_that_miss_steps():
    """Each keeps a count of its own."""
    one, other = parameters(), parameters()
    for make, params in ((optim.AdamW, one), (torch.optim.AdamW, other)):
        optimizer = make([{"params": params[:2], "lr": 1e-2}, {"params": params[2:3], "weight_decay": 0.0}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        for step in range(12):
            if step == 6:
                optimizer.add_param_group({"params": params[3:], "lr": 5e-3, "betas": (0.5, 0.9)})
            give_gradients(params, step)
            if step % 3:
                params[step % 2].grad = None
            optimizer.step()
            schedule.step()
    assert ulps([p.detach() for p in one], [p.detach() for p in other]) <= 16


def test_it_follows_torchs_grad_scaler():
    one, other = parameters(), parameters()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for scaler, make, params in zip(scalers, (optim.AdamW, torch.optim.AdamW), (one, other), strict=True):
        optimizer = make(params, lr=1e-2)
        for step in range(6):
            optimizer.zero_grad()
            loss = sum((param * (step + 1)).square().sum() for param in params)
            scaler.scale(loss * (math.inf if step == 3 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert ulps([p.detach() for p in one], [p.detach() for p in other]) <= 16


@pytest.mark.parametrize("executor", [Portable(), Cpp()], ids=["portable", "cpp"])
def test_autograd_knows_that_weights_were_written(monkeypatch, executor):
    """Or casts kept for the next forward pass, and graphs that saved a weight, would go on with the old one."""
    monkeypatch.setattr("mezzo.optim.optimizer.executor_for", lambda *_: executor)
    model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    optimizer = mezzo.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight._version
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true,low=tanh"):
        first = model(x)
        kept = torch.tanh(model(model(x)))
        first.sum().backward()
        optimizer.step()
        assert model.weight._version > before
        expected = torch.nn.functional.linear(x, model.weight, model.bias)
        torch.testing.assert_close(model(x).float(), expected.float(), rtol=0.02, atol=0.02)
        assert not torch.equal(model(x), first)
    model.weight.grad = torch.ones_like(model.weight)
    graph = (model.weight * model.weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()
    assert kept.shape == (1, 4)
