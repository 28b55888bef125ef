"""Lent sessions: optimizers that step by themselves, scalers that come and go, FP32 gradients, exported state dicts."""

import copy

import pytest
import torch
from torch import nn

import mezzo
from mezzo import LossScale
from mezzo.scale.held import HeldScaler
from mezzo.session.attached import lend
from mezzo.session.attached.scaling import ScaledOptimizer

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
}


def lent(optimizer="sgd", *, sums_wide=False, dtype="bfloat16", saves=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    made = OPTIMIZERS[optimizer](model.parameters())
    amp = mezzo.MixedPrecision(model, made, f"O2,dtype={dtype},loss_scale=none,emulate=true")
    attached = lend(amp, sums_wide=sums_wide)
    if saves:
        attached.save_as(torch.float32)
    return model, made, amp


def weights(amp):
    return [param.detach().clone() for param in amp.master_params()]


x = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_of_the_optimizer_is_one_of_the_session_bit_for_bit(optimizer):
    found = []
    for own in (True, False):
        model, made, amp = lent(optimizer)
        if not own:
            amp.close()
            amp = mezzo.MixedPrecision(model, made, "O2,dtype=bfloat16,emulate=true")
        for _ in range(4):
            loss = model(x).square().mean()
            if own:
                loss.backward()
                assert made.step() is None
                made.zero_grad()
            else:
                amp.backward(loss)
                amp.step()
                amp.zero_grad()
        found.append(weights(amp))
        assert amp.stats().steps == 4
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sums_wide", [True, False])
def test_gradients_are_fp32_from_the_first_pass_of_each_window_on(optimizer, sums_wide):
    model, made, _ = lent(optimizer, sums_wide=sums_wide)
    for _ in range(3):
        for _ in range(2):
            model(x).square().mean().backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32 if sums_wide else torch.bfloat16}
        made.step()
        made.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_to_zeros_stay_fp32(set_to_none):
    model, made, _ = lent(sums_wide=True)
    for _ in range(3):
        model(x).square().mean().backward()
        made.step()
        made.zero_grad(set_to_none=set_to_none)
    model(x).square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_scalers_that_come_one_after_the_other():
    model, made, amp = lent(dtype="float16")
    for scale in (8.0, 1024.0, None):
        held = None if scale is None else HeldScaler(LossScale.dynamic(init=scale), "cpu")
        before = weights(amp)
        loss = model(x).square().mean()
        (loss if held is None else held.scaled(loss)).backward()
        if held is None:
            made.step()
        else:
            scaled = ScaledOptimizer(made, held)
            scaled.find(held.state.scale)
            step, _ = scaled.step(None, (), {})
            assert not step.skipped
            held.advance()
        made.zero_grad()
        moved = torch.cat([(a - b).flatten() for a, b in zip(before, weights(amp), strict=True)])
        assert 1e-4 < moved.norm() < 1.0  # unscaled by what it was scaled with


def test_an_overflow_that_a_scaler_finds_is_skipped_and_one_without_a_scaler_too():
    model, made, amp = lent()
    before = weights(amp)
    (model(x).square().mean() * torch.inf).backward()
    made.step()
    made.zero_grad()
    assert all(map(torch.equal, before, weights(amp)))
    assert amp.stats().skipped == 1


def test_a_closed_session_gives_its_optimizer_back():
    model, made, amp = lent()
    amp.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters()]
    model(x).square().mean().backward()
    made.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_without_a_gradient_a_step_does_nothing():
    _, made, amp = lent()
    before = weights(amp)
    assert made.step() is None
    assert all(map(torch.equal, before, weights(amp)))
    assert amp.stats().steps == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exported_state_dicts_hold_fp32_values_and_load_them_whole(optimizer):
    model, made, amp = lent(optimizer, saves=True)
    model(x).square().mean().backward()
    made.step()
    state = copy.deepcopy(model.state_dict())
    exact = {name: made.master_of(p) if optimizer == "mezzo" else m for (name, p), m in
             zip(model.named_parameters(), amp.master_params(), strict=True)}  # fmt: skip
    assert state.keys() == exact.keys()
    assert all(torch.equal(state[name], exact[name]) for name in state)
    assert any(not torch.equal(state[name], p.float()) for name, p in model.named_parameters())
    other, _, _ = lent(optimizer, saves=True)
    other.load_state_dict(state)
    assert all(torch.equal(other.state_dict()[name], state[name]) for name in state)
    part = model[0].state_dict()
    assert torch.equal(part["weight"], state["0.weight"])
    alone = copy.deepcopy(model)
    assert {value.dtype for value in alone.state_dict().values()} == {torch.bfloat16}
