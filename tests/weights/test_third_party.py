"""Optimizers and averages of other libraries over halves: bit for bit what they are over plain FP32 parameters."""

import warnings

import ema_pytorch
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch_ema
from torch import nn

import mezzo
from mezzo.weights import Halves

#: Steps of each.
STEPS = 6
#: What an optimizer is made with, beside parameters.
OPTIONS = {"ranger21": {"num_iterations": STEPS}}
#: Those that differentiate their gradients again, or evaluate the loss by themselves.
SECOND_ORDER = {"adahessian", "sophiah"}


def _model(*, in_halves):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    if in_halves:
        mezzo.prepare(model, "O2,dtype=bfloat16")
        assert isinstance(model[0].weight, Halves)
        assert type(model[0].bias) is nn.Parameter
    return model


def _trained(optimizer_of, *, in_halves, steps=STEPS, creates_graph=False, after=lambda: None):
    """Train outside of any region, so that only storage differs; return the FP32 weights."""
    model = _model(in_halves=in_halves)
    torch.manual_seed(1)
    optimizer = optimizer_of(model)
    for _ in range(steps):
        x = torch.randn(16, 8)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward(create_graph=creates_graph)
            return loss

        if type(optimizer).__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        after()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_equal(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(pytorch_optimizer.get_supported_optimizers()))
def test_each_of_pytorch_optimizer_steps_as_over_plain_parameters(name):
    """What cannot train plain parameters here either, or wants a loop of its own, says so for both."""
    options = OPTIONS.get(name, {})
    creates_graph = any(name.startswith(prefix) for prefix in SECOND_ORDER)

    def optimizer_of(model):
        return pytorch_optimizer.load_optimizer(name)(list(model.parameters()), **options)

    try:
        plain = _trained(optimizer_of, in_halves=False, creates_graph=creates_graph)
    except Exception as error:
        with pytest.raises(type(error)):
            _trained(optimizer_of, in_halves=True, creates_graph=creates_graph)
        return
    _assert_equal(_trained(optimizer_of, in_halves=True, creates_graph=creates_graph), plain)


def test_most_of_pytorch_optimizer_is_compared():
    """The test above would pass for a library of which nothing works."""
    assert len(pytorch_optimizer.get_supported_optimizers()) > 100


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedule_free_goes_to_its_average_and_back(name):
    """Each ``eval()`` moves the weights to the average, and ``train()`` back: roundings would add up."""
    ends = []
    for in_halves in (False, True):
        model = _model(in_halves=in_halves)
        optimizer = getattr(schedulefree, name)(model.parameters(), lr=0.01)
        optimizer.train()
        torch.manual_seed(1)
        for _ in range(STEPS):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
        for _ in range(20):
            optimizer.eval()
            optimizer.train()
        optimizer.eval()
        ends.append(model.state_dict())
    _assert_equal(*ends)


class _TorchEma:
    def __init__(self, model):
        self.average, self.model = torch_ema.ExponentialMovingAverage(model.parameters(), 0.99), model

    def update(self):
        self.average.update()

    def end(self):
        self.average.store()
        self.average.copy_to()
        return self.model.state_dict()


class _EmaPytorch:
    def __init__(self, model):
        self.average = ema_pytorch.EMA(model, beta=0.99, update_after_step=0, update_every=1)

    def update(self):
        self.average.update()

    def end(self):
        return self.average.ema_model.state_dict()


class _Swa:
    def __init__(self, model):
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
        self.average, self.model = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average), model

    def update(self):
        self.average.update_parameters(self.model)

    def end(self):
        return self.average.module.state_dict()


class _ByHand:
    def __init__(self, model):
        self.average = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.model = model

    @torch.no_grad()
    def update(self):
        for name, param in self.model.named_parameters():
            self.average[name].lerp_(param, 0.01)

    def end(self):
        return self.average


@pytest.mark.parametrize("average", [_TorchEma, _EmaPytorch, _Swa, _ByHand])
def test_averages_are_those_of_plain_parameters(average):
    """Of weights that move by less than half a spacing of BF16 a step."""
    ends = []
    for in_halves in (False, True):
        made = []

        def optimizer_of(model, made=made):
            made.append(average(model))
            return torch.optim.SGD(model.parameters(), lr=1e-3)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _trained(optimizer_of, in_halves=in_halves, steps=30, after=lambda made=made: made[0].update())
        ends.append(made[0].end())
    _assert_equal(*ends)
