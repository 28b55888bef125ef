"""What torch's GradScaler gets wrong, and mezzo's does not: each beside torch's own behaviour."""

import functools
import gc
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch

import mezzo
from mezzo import StateError, UnsupportedError
from mezzo.compat.torch import GradScaler
from mezzo.step.executors.portable import Portable

from ..acceptance.faults import Interrupt
from .programs import OPTIMIZERS, SCALERS, assert_same, batch, loss_of, network, weights


@pytest.fixture
def portable(monkeypatch):
    """No kernel is built for an optimizer of mezzo's."""
    monkeypatch.setattr("mezzo.optim.optimizer.executor_for", lambda *_: Portable())


def one_weight(value=1.0):
    weight = torch.full((1,), value, requires_grad=True)
    return weight, torch.optim.SGD([weight], lr=1.0)


def advance(loss, scaler, *optimizers):
    """A step of each optimizer; without a scaler in plain torch."""
    (loss if scaler is None else scaler.scale(loss)).backward()
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


# The scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALERS)
def test_a_scale_that_sinks_stops_above_zero(name):
    """torch's becomes 0 after 166 overflows, and the next finite step makes the weights NaN."""
    weight, optimizer = one_weight()
    scaler = SCALERS[name]("cpu")
    for number in range(200):
        optimizer.zero_grad()
        is_told = pytest.warns(match="20 steps in a row") if number == 19 and name != "torch" else nullcontext()
        with is_told:
            advance(weight.sum() * (torch.inf if number < 199 else 1.0), scaler, optimizer)
    if name == "torch":
        assert scaler.get_scale() == 0.0
        assert weight.isnan().all()
    else:
        assert scaler.get_scale() == 2.0**-126
        assert weight == 0.0  # 1 - 1


def test_an_infinity_that_unscaling_makes_is_found():
    for name, unscales in itertools.product(SCALERS, (False, True)):
        weight, optimizer = one_weight()
        scaler = SCALERS[name]("cpu", init_scale=2.0**-100)
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(1e10)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert weight.isfinite().all() == (name == "mezzo")
        assert scaler.get_scale() == (2.0**-101 if name == "mezzo" else 2.0**-100)


def test_gradients_are_unscaled_by_the_scale_that_they_were_made_with():
    """torch takes the scale of now, which update() has doubled meanwhile."""
    values = {}
    for name, scaler_of in SCALERS.items():
        (first, one), (second, two) = one_weight(), one_weight()
        scaler = scaler_of("cpu", init_scale=8.0, growth_interval=1)
        advance(first.sum() + second.sum(), scaler, one)
        scaler.step(two)
        values[name] = second.item()
    assert values == {"torch": 0.5, "mezzo": 0.0}


def test_what_a_step_has_left_is_not_divided_again():
    """torch divides once more, and steps with gradients that are as much too small."""
    values = {}
    for name, scaler_of in SCALERS.items():
        weight, optimizer = one_weight(8.0)
        scaler = scaler_of("cpu", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
        values[name] = weight.item()
    assert values == {"torch": 8 - 1 - 1 / 4 - 1 / 16, "mezzo": 5.0}


def test_an_interval_that_is_shorter_than_the_count_is_over():
    """torch compares for equality, and the scale would not grow again before the next overflow."""
    scales = {}
    for name, scaler_of in SCALERS.items():
        weight, optimizer = one_weight()
        scaler = scaler_of("cpu", init_scale=8.0, growth_interval=10)
        for number in range(5):
            optimizer.zero_grad()
            advance(weight.sum(), scaler, optimizer)
            if number == 2:
                scaler.set_growth_interval(2)
        scales[name] = scaler.get_scale()
    assert scales == {"torch": 8.0, "mezzo": 16.0}


def test_a_scale_of_the_users_own_counts_besides_as_in_torch():
    values = {}
    for name, scaler_of in SCALERS.items():
        weight = torch.ones(1, requires_grad=True)
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0, fused=True), scaler_of("cpu", init_scale=8.0)
        scaler.scale(weight.sum()).backward()
        optimizer.grad_scale = torch.tensor(4.0)
        scaler.step(optimizer)
        values[name] = weight.item()
        assert not hasattr(optimizer, "grad_scale")
    assert values == {"torch": 0.75, "mezzo": 0.75}


# Closures ---------------------------------------------------------------------------------------------------


def evaluated(scaler, optimizer_of, overflows=(), begins=False):
    """Steps of an optimizer that asks for the loss by itself; with a scaler, or in plain torch."""
    model = network()
    optimizer, losses = optimizer_of(model.parameters()), []
    for number in range(4):
        calls = []

        def closure(number=number, calls=calls):
            optimizer.zero_grad()
            calls.append(1)
            loss = loss_of(model, number, overflows=(number, len(calls)) in overflows)
            loss.backward() if scaler is None else scaler.scale(loss).backward()
            return loss.detach()

        closure() if begins else optimizer.zero_grad()
        step = optimizer.step if scaler is None else functools.partial(scaler.step, optimizer)
        losses.append(float(step(closure=closure) if number % 2 else step(closure)))
        if scaler is not None:
            scaler.update()
    return weights(model), losses


class Ascends(torch.optim.SGD):
    """SAM: a step up the gradient that is there, and a step down the one of there."""

    def step(self, closure):
        params = [param for group in self.param_groups for param in group["params"]]
        loss = None
        if params[0].grad is None:
            loss = closure()
        with torch.no_grad():
            up = [0.1 * param.grad for param in params]
            torch._foreach_add_(params, up)
            later = torch.enable_grad()(closure)()
            torch._foreach_sub_(params, up)
        super().step()
        return later if loss is None else loss


SEARCHES = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    "SAM": lambda params: Ascends(params, lr=0.1),
}


@pytest.mark.parametrize("optimizer", SEARCHES)
def test_closures_of_optimizers_that_evaluate_as_often_as_they_like(optimizer):
    """torch's scaler has no such optimizers; with a scale that is a power of two the numbers are plain torch's."""
    runs = [evaluated(scaler, SEARCHES[optimizer]) for scaler in (None, GradScaler("cpu", init_scale=2.0**10))]
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    scaler = GradScaler("cpu", init_scale=8.0)
    overflowed, _ = evaluated(scaler, SEARCHES[optimizer], {(0, 2), (2, 1), (3, 2)})
    model = network()
    plain = SEARCHES[optimizer](model.parameters())

    def closure():
        plain.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    plain.step(closure)  # the one step that does not overflow: others put the weights back
    assert_same(overflowed, weights(model))
    assert scaler.get_scale() == 1.0


def test_closures_of_optimizers_that_evaluate_once(portable):
    for name in ("momentum", "adamw fused", "mezzo"):
        optimizer_of, scaler = OPTIMIZERS[name], GradScaler("cpu", init_scale=2.0**10)
        runs = [evaluated(its_scaler, optimizer_of) for its_scaler in (None, scaler)]
        assert_same(runs[0][0], runs[1][0])
        assert runs[0][1] == runs[1][1]
        assert_same(evaluated(scaler, optimizer_of, {(number, 1) for number in range(4)})[0], weights(network()))
        assert scaler.get_scale() == 2.0**6


def test_gradients_before_a_closure_are_an_evaluation_of_their_own():
    runs = [evaluated(scaler, SEARCHES["SAM"], begins=True)[0] for scaler in (None, GradScaler("cpu"))]
    assert_same(*runs)


# Optimizers that share weights, change them, or go ----------------------------------------------------------


def test_optimizers_that_share_weights_divide_by_the_scale_once():
    """A common encoder under two heads, or all weights in common. torch divides once more by each further optimizer."""
    orders = ("s0 s1", "u0 s0 s1", "u0 u1 s0 s1", "u1 u0 s0 s1", "s0 u1 s1", "u1 s0 s1", "s0 b0 s1", "u0 s0 b0 s1")
    for order, fused, shares_all in itertools.product(orders, (None, True), (False, True)):
        ends = []
        for scaler in (None, GradScaler("cpu", init_scale=2.0**10)):
            params = own, common, other = [torch.full((1,), value, requires_grad=True) for value in (1.0, 2.0, 3.0)]
            parts = (params, params) if shares_all else ((own, common), (common, other))
            optimizers = [torch.optim.SGD(part, lr=0.125, fused=fused) for part in parts]
            for _ in range(2):
                for call, number in f"b0 {order}".split():
                    optimizer = optimizers[int(number)]
                    if call == "b":
                        own.grad = common.grad = other.grad = None
                        loss = (own + 2 * common + 3 * other).sum()
                        (loss if scaler is None else scaler.scale(loss)).backward()
                    elif call == "s":
                        optimizer.step() if scaler is None else scaler.step(optimizer)
                    elif scaler is not None:
                        scaler.unscale_(optimizer)
                if scaler is not None:
                    scaler.update()
            ends.append(torch.cat(params))
        assert torch.equal(*ends), (order, fused, shares_all)


def test_a_parameter_that_took_anothers_place_in_its_group_is_unscaled_and_judged():
    """As programs do that split and prune points while they train."""
    for value, unscales in itertools.product((1.0, torch.inf), (False, True)):
        scaler = GradScaler("cpu", init_scale=2.0**10)
        stays, goes, comes = (torch.ones(1, requires_grad=True) for _ in range(3))
        optimizer = torch.optim.SGD([stays, goes], lr=0.125)
        for second in (goes, comes):
            optimizer.zero_grad()
            optimizer.param_groups[0]["params"][1] = second
            scaler.scale((stays + second * (value if second is comes else 1.0)).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        is_taken = value == 1.0
        assert (stays.item(), comes.item()) == ((0.75, 0.875) if is_taken else (0.875, 1.0))
        assert scaler.get_scale() == (2.0**10 if is_taken else 2.0**9)


def test_an_overflow_that_one_has_found_skips_another_optimizer_of_the_same_weights():
    model, scaler = network(), GradScaler("cpu", init_scale=2.0**10)
    before, (one, two) = weights(model), [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    scaler.scale(loss_of(model, 0, overflows=True)).backward()
    scaler.unscale_(one)
    for param in model.parameters():
        param.grad.fill_(1.0)
    for optimizer in (one, two):
        scaler.step(optimizer)
        assert scaler.last_step.skipped
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same(before, weights(model))


def test_optimizers_of_earlier_iterations_are_let_go():
    model, scaler, gone = network(), GradScaler("cpu"), []
    for number in range(3):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        advance(loss_of(model, number), scaler, optimizer)
        gone.append(weakref.ref(optimizer))
    del optimizer
    gc.collect()
    assert [reference() is None for reference in gone] == [True, True, False]


class Odd(torch.optim.SGD):
    """An optimizer whose step takes and returns something of its own."""

    def step(self, closure=None, *, factor=1.0, log=()):
        super().step(closure)
        log.append(factor)
        return "stepped"


def test_step_hands_on_what_it_is_given_and_returns_what_it_gets():
    weight = torch.ones(1, requires_grad=True)
    optimizer, log = Odd([weight], lr=1.0), []
    for scaler_of in SCALERS.values():
        scaler = scaler_of("cpu")
        for factor in (1.0, torch.inf):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            returned = scaler.step(optimizer, None, factor=3.0, log=log)
            scaler.update()
            assert returned == ("stepped" if factor == 1.0 else None)
    assert log == [3.0, 3.0]


# Low weights ------------------------------------------------------------------------------------------------


def test_fp16_gradients_are_refused_with_parameter_cause_and_cure():
    model = network().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = {}
    for (name, scaler_of), call in itertools.product(SCALERS.items(), ("unscale_", "step")):
        scaler = scaler_of("cpu", init_scale=8.0)
        optimizer.zero_grad()
        scaler.scale(model(batch(0).half()).float().square().mean()).backward()
        before = [param.grad.clone() for param in model.parameters()]
        with pytest.raises((ValueError, UnsupportedError)) as raised:
            getattr(scaler, call)(optimizer)
        messages[name] = str(raised.value)
        if name == "mezzo":
            assert_same([param.grad for param in model.parameters()], before)
    assert messages["torch"] == "Attempting to unscale FP16 gradients."
    assert messages["mezzo"].splitlines() == [
        "fp16 gradients cannot be unscaled in fp16",
        "  where  group 0, parameter 0 (float16 [8, 4]) and 3 more, optimizer SGD",
        "  why    dividing them by the loss scale in float16 flushes small ones to zero",
        "  write  model.float(), and autocast(device_type, torch.float16) around its forward pass;",
        '         or mezzo.MixedPrecision(model, optimizer, "O2"), whose weights are FP32, of a model given in FP32',
    ]
    model = network()
    mezzo.prepare(model, "O3,dtype=float16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0)).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(UnsupportedError, match="fp16 gradients cannot be unscaled in fp16"):
            call(optimizer)


def test_gradients_of_weights_in_fp16_halves_are_fp32(portable):
    """The gradient, divided by the scale in FP16, is zero."""
    for optimizer_of in (torch.optim.SGD, mezzo.optim.SGD):
        for unscales in (False, True):
            model = torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.zeros_(model.weight)
            prepared = mezzo.prepare(model, "O2,dtype=float16")
            optimizer, scaler = optimizer_of(model.parameters(), lr=2.0**14), GradScaler("cpu", init_scale=2.0**14)
            with prepared.autocast():
                loss = (model(torch.ones(1, 2)) * 2.0**-28).float().sum()
            scaler.scale(loss).backward()
            assert model.weight.grad.dtype == torch.float32
            if unscales:
                scaler.unscale_(optimizer)
                assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0**-28))
            scaler.step(optimizer)
            assert torch.equal(model.weight.detach(), torch.full((2, 2), -(2.0**-14)))


# What it costs, and what it tells ---------------------------------------------------------------------------


def test_the_last_step_says_whether_it_skipped_so_that_schedulers_can_wait():
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert scaler.last_step is None
    rates = []
    for number in range(4):
        optimizer.zero_grad()
        advance(loss_of(model, number, number in (0, 2)), scaler, optimizer)
        if not scaler.last_step.skipped:
            assert scaler.last_step.grad_norm.isfinite()
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.1, 0.05, 0.05, 0.025]


# What goes on -----------------------------------------------------------------------------------------------


def test_an_optimizer_that_raises_while_it_writes_is_not_gone_on_with_unseen():
    class Raises(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                raise KeyError("of its own")
            super().step(closure)

    model, scaler = network(), GradScaler("cpu")
    optimizer = Raises(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(KeyError, match="of its own"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.fails = False
    for _ in range(2):  # some weights may be those of the next step
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        with pytest.raises(StateError, match=r"(?s)an update was ended half-way.*Raises.*load_state_dict"):
            scaler.step(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    before = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model[0].weight, before[0])


def test_a_signal_at_each_fourth_line_of_a_first_step_leaves_it_whole_or_to_be_taken_again():
    twin = one_weight()
    twin[0].sum().backward()
    twin[1].step()
    line, came = 0, True
    while came:
        (other, first), (weight, optimizer) = one_weight(), one_weight()
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(weight.sum() + other.sum()).backward()
        scaler.step(first)
        before = scaler.last_step
        with Interrupt(line) as interrupt:
            scaler.step(optimizer)
        if scaler.last_step is before:
            scaler.step(optimizer)
        scaler.update()
        assert weight == twin[0]
        assert scaler.state_dict()["_growth_tracker"] == 1
        line, came = line + 4, interrupt.came
    assert line > 100
