"""A session is planned once, and again when what it is made of has changed: what programs do between two lines."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.session.session import engine_of

SCALES = ["none", "64"]


def made(*indices, scale="64", model=None, make=torch.optim.SGD):
    """Return a model of two layers whose weights are all one half, an optimizer for some of its layers, and theirs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizers = [make(model[index].parameters(), lr=1.0) for index in indices]
    return model, optimizers, mezzo.MixedPrecision(model, optimizers, f"O1,bf16,emulate=true,loss_scale={scale}")


def backward(model, amp):
    with amp.autocast():
        loss = model(torch.ones(2, 4)).sum()
    amp.backward(loss)


def up_to_date(amp):
    return not engine_of(amp).plan.differences(engine_of(amp).planned())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_parameter_that_joins_an_open_window_has_its_gradient_carry_what_those_there_do(scale, by_hand):
    model, (optimizer,), amp = made(0, scale=scale)
    backward(model, amp)  # the second layer is no optimizer's: its gradient is plain
    if by_hand:
        optimizer.param_groups[0]["params"] += model[1].parameters()
    else:
        optimizer.add_param_group({"params": list(model[1].parameters())})
    amp.step()
    assert model[1].weight[0, 0].item() == 0.5 - 2 * 2.5
    assert up_to_date(amp)


def test_a_parameter_that_leaves_an_open_window_has_a_plain_gradient():
    model, (first, _), amp = made(0, 1)
    backward(model, amp)
    leaving = first.param_groups[0]["params"].pop()
    before = leaving.grad.clone()
    amp.step()
    assert torch.equal(leaving.grad, before / 64)
    assert leaving[0].item() == 0.5
    assert up_to_date(amp)


def test_a_parameter_that_goes_from_one_optimizer_to_the_next_is_the_next_ones():
    model, (first, second), amp = made(0, 1)
    backward(model, amp)
    amp.step()
    amp.zero_grad()
    second.param_groups[0]["params"].insert(0, first.param_groups[0]["params"].pop())
    backward(model, amp)
    assert up_to_date(amp)
    before = model[0].bias.detach().clone()
    amp.step(first)
    assert torch.equal(model[0].bias, before)
    amp.step(second)
    assert (model[0].bias != before).all()


def test_parameters_that_are_given_16_bits_have_sums_in_fp32_from_then_on():
    model = nn.Linear(3, 1, bias=False)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O0")
    amp.backward(model.weight.sum())
    amp.step()
    amp.zero_grad()
    model.weight.data = model.weight.data.bfloat16()
    for factor in (1.0, 2.0**-12):  # whose sum BF16 does not hold
        amp.backward((model.weight.float() * factor).sum())
    assert up_to_date(amp)
    assert model.weight.grad.tolist() == [[1 + 2.0**-12] * 3]


@pytest.mark.parametrize("move", [lambda t: t.clone(), lambda t: t.share_memory_()], ids=["copied", "shared"])
def test_what_a_step_has_left_is_known_wherever_it_lies(move):
    model, _, amp = made(0, 1)
    backward(model, amp)
    amp.step()
    model._apply(move)
    with pytest.raises(mezzo.StateError, match="the last step's gradients are still there"):
        backward(model, amp)


@pytest.mark.parametrize("attached", [False, True])
def test_whatever_a_program_does_between_two_steps_the_next_one_goes_by_a_plan_of_what_is_there(attached):
    model, (optimizer,), amp = made(0)
    if attached:
        amp.close()
        amp = mezzo.attach(model, optimizer, "O1,bf16,emulate=true,loss_scale=64")
    shared = torch.optim.SGD(model[0].parameters(), lr=0.1)
    events = [
        lambda: None,
        lambda: optimizer.add_param_group({"params": [model[1].weight]}),
        lambda: setattr(model[1], "bias", nn.Parameter(torch.ones(4))),
        lambda: optimizer.param_groups[0]["params"].append(model[1].bias),
        lambda: optimizer.param_groups[0]["params"].reverse(),
        lambda: model.requires_grad_(False) and model[0].requires_grad_(True),
        lambda: optimizer.register_step_pre_hook(lambda *_: None),
        lambda: optimizer.state.clear(),
        lambda: model.load_state_dict(model.state_dict(), assign=True),
        lambda: optimizer.param_groups.__setitem__(1, dict(optimizer.param_groups[1])),
        *([lambda: amp.add(shared)] if attached else []),
    ]
    for event in events:
        event()
        before = [param.detach().clone() for param in model.parameters()]
        with amp.autocast():
            loss = model(torch.ones(2, 4)).sum()
        if attached:
            loss.backward()
            optimizer.step()
        else:
            amp.backward(loss)
            amp.step()
        assert up_to_date(amp)
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for param, old in zip(model.parameters(), before, strict=True):
            moved = 0.0 if param.grad is None or id(param) not in updated else param.grad
            torch.testing.assert_close(param.detach(), old - moved)  # in place: SGD is given plain gradients
        model.zero_grad()
    amp.close()
