"""A search leaves nothing behind: gradients, buffers, random states, hooks and modes are bit for bit as before."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mezzo
from mezzo.overflow import locate

FP16 = "O1,dtype=float16,emulate=true"


def snapshot(model, x):
    return {
        "state": [(name, id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in (*model.parameters(), x)],
        "versions": [t._version for t in (*model.parameters(), x)],
        "training": [module.training for module in model.modules()],
        "hooks": [
            [dict(h) for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)] for m in model.modules()
        ],
        "random": [torch.get_rng_state(), random.getstate(), *np.random.get_state()],
        "modes": [_get_current_function_mode_stack(), _get_current_dispatch_mode_stack()],
        "flags": [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("ending", ["finite", "forward", "backward", "fn raises", "model raises"])
@pytest.mark.parametrize("policy", ["O0", FP16, "O2,dtype=float16,emulate=true"])
def test_everything_is_as_it_was(make, policy, ending):
    model, x = make("conv")
    prepared = mezzo.prepare(model, policy)
    x.requires_grad_()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    x.grad = torch.ones_like(x)
    model.drop.eval()
    before = snapshot(model, x)

    def fn():
        with prepared.autocast():
            if ending == "model raises":
                model.conv(torch.ones(1))
            output = model(x * (torch.rand(()) + random.random() + float(np.random.rand())))
        if ending == "fn raises":
            raise KeyError("the user's own error")
        loss = output.float().square().sum()
        return loss.log() * torch.inf if ending == "forward" else loss

    scale = 2.0**127 if ending == "backward" else 1.0
    if ending.endswith("raises"):
        with pytest.raises((KeyError, RuntimeError)):
            locate(fn, model, policy=policy, loss_scale=scale)
    else:
        found = locate(fn, model, policy=policy, loss_scale=scale)
        assert (found is None) == (ending == "finite")
    assert same(before, snapshot(model, x))


def test_hooks_that_run_after_accumulation_do_not_run():
    model, stepped = nn.Linear(2, 2), []
    hook = model.weight.register_post_accumulate_grad_hook(stepped.append)
    assert locate(lambda: model(torch.ones(1, 2)).sum(), model) is None
    assert not stepped
    model(torch.ones(1, 2)).sum().backward()
    assert len(stepped) == 1  # it is there again
    hook.remove()


def test_a_distributed_model_reduces_nothing(alone):
    model, reduced = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), []

    def hook(state, bucket):
        reduced.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    overflow = locate(lambda: (model(torch.ones(1, 2)) * 0).sum().sqrt(), model)
    assert (overflow.kind, overflow.op) == ("zero", "sqrt")
    assert not reduced
    model(torch.ones(1, 2)).sum().backward()
    assert reduced


def test_it_runs_where_gradients_are_off(located):
    with torch.no_grad():
        overflow = located("chain", FP16, loss_scale=2.0**30)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inside = located("chain", FP16, gain=1e5)
    assert (overflow.kind, inside.kind) == ("scale", "range")
