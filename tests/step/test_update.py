"""Update rules against torch's own optimizers, in FP32 and in float64, and against their papers."""

import math

import pytest
import torch

from mezzo.step.update import RULES, rule

ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-3}
LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
STEPS = 50
#: Of whole matrices there is one, of which ``tests/optim/test_muon.py`` asks all that is asked here of elements.
OF_ELEMENTS = [name for name, whole in RULES.items() if not whole.is_whole]

#: rule, options, hyper-parameters, torch's class: each row is one run.
CASES = {
    "adamw": ("adamw", (), ADAM, torch.optim.AdamW),
    "adamw amsgrad": ("adamw", ("amsgrad",), ADAM, torch.optim.AdamW),
    "adamw maximize": ("adamw", ("maximize",), ADAM, torch.optim.AdamW),
    "adamw both": ("adamw", ("amsgrad", "maximize"), ADAM | {"weight_decay": 0.3}, torch.optim.AdamW),
    "adam": ("adam", (), ADAM, torch.optim.Adam),
    "adam without decay": ("adam", (), ADAM | {"weight_decay": 0.0}, torch.optim.Adam),
    "adam amsgrad": ("adam", ("amsgrad",), ADAM, torch.optim.Adam),
    "adam maximize": ("adam", ("maximize",), ADAM | {"beta1": 0.3, "eps": 1e-3}, torch.optim.Adam),
    "sgd": ("sgd", (), SGD | {"momentum": 0.0}, torch.optim.SGD),
    "sgd momentum": ("sgd", ("momentum",), SGD, torch.optim.SGD),
    "sgd dampening": ("sgd", ("momentum",), SGD | {"dampening": 0.4}, torch.optim.SGD),
    "sgd nesterov": ("sgd", ("momentum", "nesterov"), SGD, torch.optim.SGD),
    "sgd maximize": ("sgd", ("momentum", "maximize"), SGD | {"weight_decay": 0.0}, torch.optim.SGD),
}
#: How far from torch after these steps, in units in the last place of the tensor's largest weight: rounding in
#: another order each time. Measured after 200: 2, 2 and 2.5.
ULPS = {"adamw": 2, "adam": 2, "sgd": 4}


def keywords(hypers, options):
    plain = {name: value for name, value in hypers.items() if not name.startswith("beta")}
    betas = {"betas": (hypers["beta1"], hypers["beta2"])} if "beta1" in hypers else {}
    return plain | betas | {option: True for option in options if option != "momentum"}


def problem(count=2048):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(count, generator=generator) * 0.1
    spread = [torch.randn(count, generator=generator).exp() * 1e-2 for _ in range(STEPS)]
    return weight, [torch.randn(count, generator=generator) * factors for factors in spread]


def device_tensors(hypers):
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in hypers.items()}


def run_rule(update, hypers, weight, gradients, dtype=torch.float32):
    weight, states = weight.to(dtype), tuple(torch.zeros_like(weight, dtype=dtype) for _ in update.states)
    for step, gradient in enumerate(gradients, start=1):
        numbers = update.scalars(device_tensors(hypers), torch.tensor(step), dtype)
        weight, states = update.update(gradient.to(dtype), weight, states, numbers)
    return weight, states


def run_torch(optimizer_class, kwargs, weight, gradients, dtype=torch.float32):
    param = torch.nn.Parameter(weight.to(dtype, copy=True))
    optimizer = optimizer_class([param], **kwargs)
    for gradient in gradients:
        param.grad = gradient.to(dtype, copy=True)
        optimizer.step()
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize("case", CASES)
def test_in_float64_a_rule_is_torch_s_optimizer_and_in_float32_as_near_to_it_as_torch(case):
    name, options, hypers, optimizer_class = CASES[case]
    update = rule(name, *options)
    weight, gradients = problem()
    before = weight.clone()
    mine, states = run_rule(update, hypers, weight, gradients, torch.float64)
    theirs, their_states = run_torch(optimizer_class, keywords(hypers, options), weight, gradients, torch.float64)
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)
    for state_name, state in zip(update.states, states, strict=True):
        torch.testing.assert_close(state, their_states[state_name], rtol=1e-12, atol=1e-16)
    low, _ = run_rule(update, hypers, weight, gradients)
    single, _ = run_torch(optimizer_class, keywords(hypers, options) | {"foreach": False}, weight, gradients)
    largest = theirs.abs().max().float()
    ulp = largest.nextafter(torch.tensor(torch.inf)) - largest
    assert (low - single).abs().max() <= ULPS[name] * ulp
    assert (low - theirs).abs().max() <= (single - theirs).abs().max() + 0.5 * ulp
    assert torch.equal(weight, before)  # a rule is pure
    assert not torch.equal(low, weight)


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_the_paper_s_algorithm(maximize):
    weight, gradients = problem(64)
    mine, (momentum,) = run_rule(rule("lion", *(["maximize"] * maximize)), LION, weight, gradients, torch.float64)
    w, m = weight.double(), torch.zeros(64, dtype=torch.float64)
    lr, beta1, beta2, decay = LION.values()
    for gradient in gradients:  # Chen et al. 2023, algorithm 2, word for word
        g = -gradient.double() if maximize else gradient.double()
        c = beta1 * m + (1 - beta1) * g
        w = w - lr * (torch.sign(c) + decay * w)
        m = beta2 * m + (1 - beta2) * g
    torch.testing.assert_close(mine, w, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(momentum, m, rtol=1e-12, atol=1e-16)


def test_scalars_are_float64_s_rounded_once_and_nothing_is_read_on_the_host():
    vector = rule("adamw").scalars(device_tensors(ADAM), torch.tensor(1, dtype=torch.int32))
    numbers = dict(zip(rule("adamw").numbers, vector, strict=True))
    expected = {"gain1": 1 - 0.9, "step_size": 1e-3 / (1 - 0.9), "correction2": (1 - 0.999) ** -0.5}
    assert vector.dtype == torch.float32
    assert all(numbers[name] == torch.tensor(value) for name, value in expected.items())
    for update in map(rule, OF_ELEMENTS):
        with torch.device("meta"):  # a meta tensor has no value to read
            hypers = {hyper: torch.tensor(0.5, dtype=torch.float64) for hyper in update.hypers}
            states = tuple(torch.zeros(3) for _ in update.states)
            numbers = update.scalars(hypers, torch.tensor(1))
            weight, new = update.update(torch.zeros(3), torch.zeros(3), states, numbers)
        assert weight.is_meta
        assert len(new) == len(states)


def test_a_rule_is_a_value_found_again_by_name_and_options_and_hides_no_nan():
    assert rule("adam", "amsgrad") is rule("adam", "amsgrad")
    assert rule("adam", "amsgrad", "maximize") == rule("adam", "maximize", "amsgrad")
    assert rule("adam") != rule("adamw")
    assert rule("adam", "amsgrad").states == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # torch's names
    for update in (*map(rule, OF_ELEMENTS), rule("sgd", "momentum")):
        hypers = {key: torch.tensor(0.1, dtype=torch.float64) for key in update.hypers}
        states, scalars = tuple(torch.zeros(2) for _ in update.states), update.scalars(hypers, torch.tensor(1))
        weight, _ = update.update(torch.tensor([math.nan, 1.0]), torch.ones(2), states, scalars)
        assert weight.isnan().tolist() == [True, False]
