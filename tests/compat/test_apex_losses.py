"""Passes in apex's form: several models, optimizers and losses in apex's own cases, and passes that go wrong."""

import contextlib

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.apex import amp

from .programs import apex_pass, apex_scale, assert_same, batch, initialized, loss_of, network, weights

pytestmark = [
    pytest.mark.usefixtures("emulating"),
    pytest.mark.filterwarnings("ignore:all losses share one loss scale"),
]


@pytest.mark.filterwarnings("ignore:(?s).*is not finite")
def test_a_loss_that_is_not_finite_skips_the_models_that_it_reaches():
    """As by torch.amp's ``GradScaler``, which looks at each optimizer's own gradients; the scale is left alone."""
    for level, together in (("O0", False), ("O1", True), ("O2", False), ("O2", True)):
        models = [network(), network()]
        made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        with initialized(models, made, opt_level=level, loss_scale="dynamic") as (models, made):
            before = [weights(model) for model in models]
            losses = [loss_of(models[0], 0) + torch.inf, loss_of(models[1], 1)]
            with amp.scale_loss(losses[0], made[0]) as first, amp.scale_loss(losses[1], made[1]) as second:
                for scaled in (first + second,) if together else (second, first):
                    scaled.backward()
            for optimizer in made:
                optimizer.step()
            assert_same(before[0], weights(models[0]))
            assert not any(map(torch.equal, before[1], models[1].parameters()))
            assert apex_scale() == 2.0**16


def test_gradients_of_what_no_optimizer_has_and_those_that_were_there_before():
    """An input's for an attack, a frozen-out head's for a report: a scale that stays in these is seen by nobody."""
    for level in ("O0", "O1", "O2"):
        model, twin, stray = network(), network(), nn.Parameter(torch.ones(2))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 4)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        (twin(inputs[0]) * 2).square().mean().backward()
        with initialized(model, optimizer, opt_level=level, loss_scale=1024.0):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            apex_pass((model(inputs[1]) * (stray + 1)).square().mean(), optimizer)
            for tensor, right in zip(
                (*amp.master_params(optimizer), inputs[1]), (*twin.parameters(), inputs[0]), strict=True
            ):
                before = 0.0 if tensor is inputs[1] else 1.0
                assert tensor.dtype == tensor.grad.dtype == torch.float32
                torch.testing.assert_close(tensor.grad, right.grad + before, rtol=0, atol=3e-3)
            assert stray.grad.abs().max() < 10


def test_a_closure_that_is_evaluated_again():
    for level, tolerance in (("O1", 2e-2),):
        model, twin = network(), network().double()
        optimizer, plain = (torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3) for net in (model, twin))

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            apex_pass(loss, optimizer)
            return loss

        def exact(model=twin, optimizer=plain):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        with initialized(model, optimizer, opt_level=level):
            torch.testing.assert_close(optimizer.step(closure).double(), plain.step(exact), rtol=1e-3, atol=1e-3)
        for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=tolerance)


# Passes that go wrong ---------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """A layer whose first backward pass raises."""

    calls = 0

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        Fails.calls += 1
        if Fails.calls == 1:
            raise RuntimeError("of the user's")
        return gradient


def test_a_pass_that_fails_is_over_and_leaves_plain_gradients():
    for cleared in (False, True):
        model, twin = network(), network()
        made, plain = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin))

        def train(model, optimizer, backward, cleared=cleared):
            Fails.calls = 0
            for number in range(3):
                with contextlib.suppress(RuntimeError):
                    backward(model[2](Fails.apply(model[:2](batch(number)))).square().mean())
                if cleared:
                    optimizer.zero_grad()
                backward(loss_of(model, number))
                optimizer.step()
                optimizer.zero_grad()

        with initialized(model, made, opt_level="O0", loss_scale=1024.0):
            train(model, made, lambda loss, made=made: apex_pass(loss, made))
        train(twin, plain, torch.Tensor.backward)
        assert_same(weights(model), weights(twin))


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_that_would_be_differentiated_again_are_refused():
    model, twin = network(), network()
    made, plain = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin))
    with initialized(model, made, opt_level="O0", loss_scale=1024.0):
        with (
            amp.scale_loss(loss_of(model, 0), made) as scaled,
            pytest.raises(mezzo.StateError, match="would be differentiated again"),
        ):
            scaled.backward(create_graph=True)
        apex_pass(loss_of(model, 0), made)
        made.step()
    loss_of(twin, 0).backward()
    plain.step()
    assert_same(weights(model), weights(twin))


def test_a_pass_that_is_told_to_end_inside_of_its_graph_is_refused():
    """What it leaves there would carry the scale: in ``.grad`` of a tensor that nobody knows of."""
    model = network()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with initialized(model, made, opt_level="O0", loss_scale=1024.0):
        for others in ([], [model[2].weight]):
            inner = model[0](batch(0))
            with (
                amp.scale_loss(model[1:](inner).square().mean(), made) as scaled,
                pytest.raises(mezzo.StateError, match="begins, or stops, inside of its graph"),
            ):
                scaled.backward(inputs=[inner, *others])
            assert inner.grad is None
        x = batch(0).requires_grad_()
        with amp.scale_loss(model(x).square().mean(), made) as scaled:
            scaled.backward(inputs=[x, model[0].weight], retain_graph=True)
        (right,) = torch.autograd.grad(model(x).square().mean(), x)
        torch.testing.assert_close(x.grad, right)
        assert [param.grad is None for param in model.parameters()] == [False, True, True, True]
