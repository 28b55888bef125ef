"""What a session without masters leaves when it ends: optimizers that go on as torch's own would."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mezzo
from mezzo import MixedPrecision, optim

O3 = "O3,dtype=bfloat16,emulate=true"
TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rmsprop, foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
OWN = {
    "own adamw": lambda p: optim.AdamW(p, lr=0.01),
    "own sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "own lion, kahan": lambda p: optim.Lion(p, lr=0.01, master=None, rounding="kahan"),
}
ALL = TORCH | OWN


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model, number):
    x = torch.sin(torch.arange(48.0) * (number + 1)).view(8, 6)
    return cross_entropy(model(x), torch.arange(8) % 3)


def train(amp, model, optimizer, numbers):
    for number in numbers:

        def closure(number=number):
            amp.zero_grad()
            with amp.autocast():
                loss = loss_of(model, number)
            amp.backward(loss)
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            amp.step(closure=closure)
        else:
            closure()
            amp.step()
    amp.zero_grad()


def train_plainly(model, optimizer, numbers):
    for number in numbers:

        def closure(number=number):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss

        optimizer.step(closure)
    optimizer.zero_grad()


def in_its_own_loop(model, optimizer, policy, numbers):
    amp = mezzo.attach(model, optimizer, policy)
    train_plainly(model, optimizer, numbers)
    return amp


def in_a_session(model, optimizer, policy, numbers):
    amp = MixedPrecision(model, optimizer, policy)
    train(amp, model, optimizer, numbers)
    return amp


def floating(state):
    """The dtypes of all floating state that is no count: torch's counts are FP32 beside whatever weight."""
    values = [v for held in state.values() for v in held.values()]
    values += [each for v in values if isinstance(v, list) for each in v]
    return {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}


@pytest.mark.parametrize("begin", [in_a_session, in_its_own_loop])
@pytest.mark.parametrize("name", ALL)
def test_the_optimizer_goes_on_as_torch_s_own_that_loads_its_state(name, begin, bits):
    """torch's optimizers give the state that they load their parameters' dtype: the oracle is one that loads it."""
    model = net()
    optimizer = ALL[name](model.parameters())
    amp = begin(model, optimizer, O3, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    amp.close()
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = ALL[name](twin.parameters())
    other.load_state_dict(saved)
    assert floating(optimizer.state) <= {torch.float32}
    for goes_on in (model, optimizer), (twin, other):
        train_plainly(*goes_on, range(3, 6))
    assert bits(model.state_dict()) == bits(twin.state_dict())
    assert bits(optimizer.state_dict()["state"]) == bits(other.state_dict()["state"])


@pytest.mark.parametrize("name", ALL)
def test_closed_before_the_first_step_it_is_as_it_was_built(name, bits):
    model, twin = net(), net()
    optimizer, other = ALL[name](model.parameters()), ALL[name](twin.parameters())
    MixedPrecision(model, optimizer, O3).close()
    twin.load_state_dict(model.state_dict())
    for goes_on in (model, optimizer), (twin, other):
        train_plainly(*goes_on, range(3))
    assert bits(model.state_dict()) == bits(twin.state_dict())


@pytest.mark.parametrize("policy", ["O0", "O1,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("name", ["momentum", "adam", "adam, fused", "rmsprop, foreach", "lbfgs", "own adamw"])
def test_a_session_of_another_level_goes_on_with_it(name, policy, bits):
    model = net()
    optimizer = ALL[name](model.parameters())
    in_a_session(model, optimizer, O3, range(3)).close()
    twin = net()
    twin.load_state_dict(model.state_dict())
    other = ALL[name](twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for goes_on in (model, optimizer), (twin, other):
        in_a_session(*goes_on, policy, range(3, 6)).close()
        train_plainly(*goes_on, range(6, 8))
    assert bits(model.state_dict()) == bits(twin.state_dict())
    assert bits(optimizer.state_dict()["state"]) == bits(other.state_dict()["state"])


@pytest.mark.parametrize("name", ["momentum", "adam", "lbfgs"])
def test_state_has_the_dtype_of_weights_that_a_handle_keeps_low_until_it_is_removed(name):
    model = net()
    optimizer, handle = TORCH[name](model.parameters()), mezzo.prepare(model, O3)
    amp = MixedPrecision(handle, optimizer)
    train(amp, model, optimizer, range(2))
    amp.close()
    assert torch.bfloat16 in floating(optimizer.state)
    amp = MixedPrecision(handle, optimizer)  # another session has state and weights as they are
    train(amp, model, optimizer, range(2, 4))
    amp.close()
    handle.remove()
    assert floating(optimizer.state) == {torch.float32}
    train_plainly(model, optimizer, range(4, 6))


def test_state_that_its_owner_keeps_low_beside_fp32_weights_is_left_alone():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=torch.bfloat16)
    MixedPrecision(model, optimizer, "O1,emulate=true").close()
    assert floating(optimizer.state) == {torch.bfloat16}


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_an_optimizer_that_keeps_state_by_words_too_is_closed_with_it(policy):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["rounds"] = 3
    amp = mezzo.MixedPrecision(model, optimizer, policy)
    with amp.autocast():
        loss = model(torch.ones(2, 4)).sum()
    amp.backward(loss)
    amp.step()
    amp.close()
    assert optimizer.state["rounds"] == 3
    assert set(optimizer.state) == {"rounds", *model.parameters()}
