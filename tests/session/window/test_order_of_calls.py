"""Calls in a wrong order, or with wrong arguments: everything stays as it was."""

import copy

import pytest
import torch
from torch import nn

from mezzo import MixedPrecision, NumericsError, PolicyError, StateError

from ..loops import assert_same
from .weights import Weights, gradients, session


def snapshot(model, amp):
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy((model.state_dict(), grads, amp.state_dict()))


FOREIGN = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda amp, loss: amp.backward(loss, loss_id=2), PolicyError, "there is no loss 2(.|\n)*num_losses=3"),
        (lambda amp, loss: amp.backward(loss, loss_id=-1), PolicyError, "there is no loss -1(.|\n)*from 0 to 1"),
        (lambda amp, loss: amp.backward(loss, loss_id=True), PolicyError, "there is no loss True"),
        (lambda amp, loss: amp.backward(loss, loss_id="G"), PolicyError, "there is no loss 'G'"),
        (lambda amp, loss: amp.grad(loss, loss, loss_id=2), PolicyError, "there is no loss 2"),
        (lambda amp, loss: amp.stats(2), PolicyError, "there is no loss 2"),
        (lambda amp, loss: amp.backward(loss, optimizers=FOREIGN), PolicyError, "not an optimizer of(.|\n)*SGD"),
        (lambda amp, loss: amp.backward(loss, optimizers=[]), PolicyError, "not an optimizer of(.|\n)*empty list"),
        (lambda amp, loss: amp.backward(loss, optimizers="sgd"), PolicyError, "not an optimizer of(.|\n)*str"),
        (lambda amp, loss: amp.step(FOREIGN), PolicyError, "not an optimizer of this session"),
        (lambda amp, loss: amp.unscale_([FOREIGN]), PolicyError, "not an optimizer of this session"),
        (lambda amp, loss: amp.step(scheduler=7), PolicyError, "a scheduler has a step"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("open_window", [False, True])
def test_wrong_calls_change_nothing(call, error, says, open_window):
    model = Weights(2)
    amp = session(model, num_losses=2)
    if open_window:
        amp.backward(model.loss(1))
        amp.backward(model.loss(2), loss_id=1)
    before = snapshot(model, amp)
    with pytest.raises(error, match=says):
        call(amp, model.loss(1))
    assert_same(before, snapshot(model, amp))
    if open_window:
        amp.step()
        assert model.each[0].tolist() == [-3.0, -3.0]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"num_losses": 0}, "num_losses is 0"),
        ({"num_losses": True}, "num_losses is True"),
        ({"num_losses": 1.0}, "num_losses is 1.0"),
        ({"on_overflow": "explode"}, "unknown on_overflow 'explode'(.|\n)*did you mean 'explain'"),
        ({"on_overflow": None}, "unknown on_overflow None"),
        ({"num_losses": -1, "on_overflow": "x", "max_grad_norm": -1.0}, "3 problems"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_changed(options, says):
    model = Weights(2)
    with pytest.raises(PolicyError, match=says):
        session(model, "O2,emulate=true", **options)
    assert model.each[0].dtype == torch.float32
    amp = session(model, "O2,emulate=true")
    amp.backward(model.loss(1).float())
    amp.step()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_without_a_backward_pass(fused):
    model = Weights(2)
    amp = session(model, optimizers=[torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)])
    for _ in range(2):
        before = snapshot(model, amp)
        with pytest.raises(StateError, match=r"step\(\) before backward\(\)(.|\n)*write  amp.backward\(loss\)"):
            amp.step()
        assert_same(before, snapshot(model, amp))
        amp.backward(model.loss(1))
        amp.step()  # and the next round begins with a second step
        amp_grads = gradients(amp)
        with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
            amp.step()
        assert_same(amp_grads, gradients(amp))
        amp.zero_grad()
    assert model.each[0].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("before", [(0,), (0, 1), (1, 0, 1)])
def test_a_backward_pass_that_fails_may_be_tried_again(before):
    """What was set aside for it is still there."""
    model = Weights(2)
    amp = session(model, num_losses=2)
    spent = model.loss(1).square()
    spent.backward()
    model.zero_grad()
    for loss_id in before:
        amp.backward(model.loss(1), loss_id=loss_id)
    other = 1 - before[-1]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        amp.backward(spent, loss_id=other)
    amp.backward(model.loss(2), loss_id=other)
    amp.step()
    assert model.each[0].tolist() == [-2.0 - len(before)] * 2
    assert amp.loss_scale.tolist() == [512.0, 512.0]


def test_raising_on_overflow_leaves_the_loop_able_to_go_on():
    model = Weights(2, 2)
    amp = session(model, on_overflow="raise", num_losses=2)
    for struck in (True, False):
        amp.backward(model.loss(1, 1))
        if struck:
            model.each[1].grad[0] = float("inf")
            with pytest.raises(
                NumericsError, match=r"not finite\n  where  1 of 2: each.1\n  why .*under the loss scale 256"
            ):
                amp.step()
            assert not any(p.any() for p in model.parameters())
        else:
            amp.step()
        amp.zero_grad()
    assert [p.tolist() for p in model.each] == [[-1.0, -1.0]] * 2
    assert amp.loss_scale.tolist() == [256.0, 256.0]  # fell, and grew again
    assert amp.stats().skipped == 1


def test_raising_says_whether_the_loss_itself_was_not_finite():
    model = Weights(2)
    amp = session(model, on_overflow="raise")
    amp.backward(model.loss(float("inf")))  # 0 · inf
    with pytest.raises(NumericsError, match=r"why +the loss itself is not finite, which no loss scale cures; nothing"):
        amp.step()


def test_new_gradients_in_the_memory_of_freed_ones_are_no_old_ones():
    """torch's fused optimizers do not write gradients: a new tensor at a freed address has the same version, too."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), fused=True), "O1,emulate=true")
    for _ in range(4):
        amp.backward(model(torch.randn(3, 64)).square().mean())
        amp.step()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
