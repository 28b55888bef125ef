"""``FP16_Optimizer`` against loops of FP32 masters that are written by hand."""

import copy
import pickle
import types

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.apex import FP16_Optimizer

from .apex import INF, perceptron

pytestmark = pytest.mark.usefixtures("emulating")


def half_model():
    """A model as ``network_to_half`` leaves it: FP16, with batch norm in FP32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4).half(), _Float(nn.BatchNorm1d(4)), nn.Linear(4, 1).half())


class _Float(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.float()).half()


def loss_of(model, number):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - x.sum(1, keepdim=True)).square().mean()


def by_hand(model, make, numbers, scale, *, clip=None, bad=None):
    """Train FP32 masters of the model's parameters with scaled gradients, as the paper says."""
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float().clone()) for param in params]
    optimizer = make(masters)
    for step, micro_batches in enumerate(numbers):
        total = [torch.zeros_like(master) for master in masters]
        for number in micro_batches:
            found = torch.autograd.grad(loss_of(model, number) * scale, params)
            total = [before + gradient.float() / scale for before, gradient in zip(total, found, strict=True)]
        if step == bad:
            continue
        for master, gradient in zip(masters, total, strict=True):
            master.grad = gradient
        if clip:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return masters


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def test_it_trains_as_masters_by_hand():
    numbers = [(0,), (1, 2), (3,), (4, 5)]
    for make in (sgd, lambda params: torch.optim.Adam(params, lr=1e-2)):
        for clip in (None, 0.1):
            for bad in (None, 2):
                for at_once in (False, True):
                    model, twin = half_model(), half_model()
                    optimizer = FP16_Optimizer(make(model.parameters()), static_loss_scale=128.0)
                    for step, micro_batches in enumerate(numbers):
                        optimizer.zero_grad()
                        for number in micro_batches:
                            at = at_once and step != bad
                            optimizer.backward(loss_of(model, number), update_master_grads=at)
                        if step == bad:
                            next(model.parameters()).grad.fill_(INF)
                        if not at:
                            optimizer.update_master_grads()
                        if clip:
                            norm = optimizer.clip_master_grads(clip)
                            assert (norm == -1) == (step == bad)
                        assert optimizer.overflow == (step == bad)
                        optimizer.step()
                    right = by_hand(twin, make, numbers, 128.0, clip=clip, bad=bad)
                    for mine, master in zip(optimizer.state_dict()["fp32_from_fp16"][0], right[:2], strict=False):
                        torch.testing.assert_close(mine, master, rtol=1e-3, atol=2e-3)
                    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                        assert mine.dtype == other.dtype
                        torch.testing.assert_close(mine, other, rtol=2e-3, atol=3e-3)
                    optimizer.close()


def test_the_dynamic_scale_is_that_of_apex():
    model = perceptron().half()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**3, "scale_factor": 4.0, "scale_window": 3},
    )
    found = []
    for step in range(9):
        optimizer.zero_grad()
        optimizer.backward(sum(param.float().sum() for param in model.parameters()), update_master_grads=False)
        if step in (3, 5):
            next(model.parameters()).grad.fill_(INF)
        optimizer.update_master_grads()
        optimizer.step()
        found.append(optimizer.loss_scale)
    assert found == [8, 8, 32, 8, 8, 2, 2, 2, 8]
    optimizer.close()
    assert FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True).loss_scale == 2.0**32


def test_the_scale_can_be_set_between_steps():
    for options in ({"static_loss_scale": 1.0}, {"dynamic_loss_scale": True}):
        model = perceptron().half()
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), **options)
        optimizer.loss_scale = 64.0
        optimizer.backward(sum(param.float().sum() for param in model.parameters()), update_master_grads=False)
        assert (next(model.parameters()).grad == 64).all()
        with pytest.raises(mezzo.StateError, match="between a backward pass and its step"):
            optimizer.loss_scale = 32.0
        optimizer.update_master_grads()
        assert all((gradient == 1).all() for group in optimizer.inspect_master_grad_data() for gradient in group)
        optimizer.step()
        assert optimizer.loss_scale == 64.0
        optimizer.close()


def test_closures_and_schedulers():
    model = perceptron().half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=16.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    before = [param.clone() for param in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8).half()).float().square().mean()
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure) > 0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not any(map(torch.equal, before, model.parameters()))
    optimizer.close()


def test_its_state_goes_on_bit_for_bit():
    def run(model, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, number))
            optimizer.step()

    for options in (
        {"static_loss_scale": 128.0},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64}},
    ):
        model = half_model()
        optimizer = FP16_Optimizer(sgd(model.parameters()), **options)
        run(model, optimizer, range(3))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        run(model, optimizer, range(3, 6))
        expected = [*model.state_dict().values(), *optimizer.state_dict()["fp32_from_fp16"][0]]
        optimizer.close()
        theirs = types.SimpleNamespace(cur_scale=saved[1]["loss_scaler"]["loss_scale"])  # an object of apex's
        for scaler in (saved[1]["loss_scaler"], theirs):
            model = half_model()
            optimizer = FP16_Optimizer(sgd(model.parameters()), **options)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict({**copy.deepcopy(saved[1]), "loss_scaler": scaler})
            run(model, optimizer, range(3, 6))
            found = [*model.state_dict().values(), *optimizer.state_dict()["fp32_from_fp16"][0]]
            assert all(map(torch.equal, found, expected))
            optimizer.close()


def test_what_it_refuses():
    model = perceptron().half()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mezzo.PolicyError, match="an optimizer must be a"):
        FP16_Optimizer(model)
    with pytest.raises(mezzo.PolicyError, match="unknown dynamic_loss_args 'window'"):
        FP16_Optimizer(plain, dynamic_loss_scale=True, dynamic_loss_args={"window": 3})
    optimizer = FP16_Optimizer(plain)
    with pytest.raises(mezzo.StateError, match="belongs to a session"):
        FP16_Optimizer(plain)
    with pytest.raises(mezzo.StateError, match="cannot be pickled"):
        pickle.dumps(optimizer)
    model(torch.ones(1, 8).half()).float().sum().backward()
    with pytest.raises(mezzo.StateError, match="whose loss was not scaled") as raised:
        optimizer.step()
    assert "optimizer.backward(loss)" in str(raised.value)
    state = optimizer.state_dict()
    with pytest.raises(mezzo.StateError, match="no state of an FP16_Optimizer") as raised:
        optimizer.load_state_dict({})
    assert "it lacks loss_scaler" in str(raised.value)
    with pytest.raises(mezzo.StateError, match="masters of other parameters"):
        optimizer.load_state_dict({**state, "fp32_from_fp16": [[]]})
    optimizer.close()
    assert {param.dtype for param in plain.param_groups[0]["params"]} == {torch.float16}
    assert "step" not in vars(plain)


def test_a_model_in_bfloat16():
    model = perceptron().bfloat16()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=2.0**-10))
    start = optimizer.state_dict()["fp32_from_fp16"][0]
    optimizer.backward(sum(param.float().sum() for param in model.parameters()))
    optimizer.step()
    for master, before in zip(optimizer.state_dict()["fp32_from_fp16"][0], start, strict=True):
        assert torch.equal(master, before - 2.0**-10)
    optimizer.close()


def test_a_model_in_fp32_needs_no_masters():
    model = perceptron()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    optimizer.backward(sum(param.sum() for param in model.parameters()))
    assert all((param.grad == 1).all() for param in model.parameters())
    optimizer.step()
    optimizer.close()
