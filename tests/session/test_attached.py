"""Sessions behind ``loss.backward()`` and ``optimizer.step()`` of the user's own: bit for bit as behind their calls."""

import types
import warnings

import pytest
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.session.attached import Attached

from .loops import batch, network, sgd, weights

POLICIES = ("O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true", "O0")
OPTIMIZERS = {
    "SGD": sgd,
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=1e-2),
}


def attached(policy, optimizer=sgd, **options):
    model = network()
    built = optimizer(model.parameters())
    amp = mezzo.MixedPrecision(model, built, policy, **options)
    return model, built, amp, Attached(amp)


def loss_of(amp, model, number, factor=1.0):
    x, y = batch(number)
    with amp.autocast():
        return functional.cross_entropy(model(x).float(), y) * factor


def pair():
    """Two models with an optimizer each."""
    models = [network(), network()]
    built = [sgd(model.parameters()) for model in models]
    amp = mezzo.MixedPrecision(models, built, "O1,emulate=true")
    return models, built, amp, Attached(amp)


def test_its_backward_passes_are_those_of_the_session():
    for policy in POLICIES:
        for name, optimizer in OPTIMIZERS.items():
            ends = []
            for own in (True, False):
                model, _, amp, watch = attached(policy, optimizer, num_losses=2, max_grad_norm=1.0)
                for number in range(3):
                    for loss_id in (0, 0, 1, 0):  # sums of one scale, then of two
                        loss = loss_of(amp, model, number + loss_id)
                        if own:
                            amp.backward(loss, loss_id=loss_id)
                        else:
                            watch.scaled(loss, loss_id).backward()
                    if number == 1:
                        amp.unscale_()
                    amp.step()
                    amp.zero_grad()
                ends.append((weights(amp), amp.loss_scale, amp.stats(1)))
            (one, scale, stats), (other, *rest) = ends
            assert all(map(torch.equal, one, other)), (policy, name)
            assert torch.equal(scale, rest[0]), (policy, name)
            assert stats == rest[1], (policy, name)


def test_any_call_that_reaches_a_scaled_loss_is_one_pass():
    calls = {
        "backward of several": lambda a, b: torch.autograd.backward([a, b]),
        "backward of a sum": lambda a, b: (a + b).backward(),
        "backward of a fraction": lambda a, b: ((a / 2 + b / 2) * 2).backward(),
    }
    for name, call in calls.items():
        model, _, amp, watch = attached("O1,emulate=true")
        call(watch.scaled(loss_of(amp, model, 0)), watch.scaled(loss_of(amp, model, 1)))
        amp.unscale_()
        found = [p.grad.clone() for p in model.parameters()]
        amp.zero_grad()
        amp.backward(loss_of(amp, model, 0) + loss_of(amp, model, 1))
        amp.unscale_()
        for mine, param in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, param.grad, rtol=4e-3, atol=1e-5, msg=name)  # FP16 sums in another order


def test_inputs_are_the_callers():
    model, _, amp, watch = attached("O0,loss_scale=8")
    first = next(model.parameters())
    watch.scaled(loss_of(amp, model, 0)).backward(inputs=[first])
    assert [p.grad is not None for p in model.parameters()] == [True, *([False] * 5)]
    amp.unscale_()
    whole = network()
    functional.cross_entropy(whole(batch(0)[0]), batch(0)[1]).backward()
    torch.testing.assert_close(first.grad, next(whole.parameters()).grad)


def test_losses_of_two_scales_in_one_pass_are_refused():
    model, _built, amp, watch = attached("O1,emulate=true", num_losses=2)
    both = [watch.scaled(loss_of(amp, model, number), number) for number in (0, 1)]
    with pytest.raises(mezzo.StateError, match="one backward pass goes through losses with different scales") as raised:
        torch.autograd.backward(both)
    assert "a backward pass for each; or one loss_id for both" in str(raised.value)
    amp.zero_grad()
    before = weights(amp)
    watch.scaled(loss_of(amp, model, 0)).backward()  # and nothing of the failed pass is left
    assert not amp.step().skipped
    assert not all(map(torch.equal, before, weights(amp)))


def test_losses_of_one_constant_scale_are_one_pass_whatever_their_numbers():
    model, _, amp, watch = attached("O0,loss_scale=8", num_losses=2)
    torch.autograd.backward([watch.scaled(loss_of(amp, model, number), number) for number in (0, 1)])
    assert not amp.step().skipped


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("a backward function of the user's")


def test_a_pass_that_fails_leaves_what_a_failed_one_of_the_session_leaves():
    for policy in POLICIES:
        found = []
        for own in (True, False):
            model, _, amp, watch = attached(policy, num_losses=2)
            amp.backward(loss_of(amp, model, 0))
            failing = _Fails.apply(loss_of(amp, model, 1))
            with pytest.raises(RuntimeError, match="of the user's"):
                amp.backward(failing, loss_id=1) if own else watch.scaled(failing, 1).backward()
            assert watch._under_way() is None
            amp.backward(loss_of(amp, model, 2), loss_id=1)
            amp.step()
            found.append(weights(amp))
        assert all(map(torch.equal, *found)), policy


def test_gradients_of_parameters_that_it_is_not_for_stay_as_they_were():
    (one, other), (first, second), amp, watch = pair()
    watch.scaled(loss_of(amp, other, 0), optimizers=second).backward()
    before = [p.grad for p in other.parameters()]
    values = [gradient.clone() for gradient in before]
    with amp.autocast():
        joint = (one(batch(0)[0]) + other(batch(0)[0])).float().square().mean()
    watch.scaled(joint, optimizers=first).backward()
    assert watch.without_gradients == {second}
    assert all(p.grad is was for p, was in zip(other.parameters(), before, strict=True))
    assert all(map(torch.equal, before, values))
    amp.step(first)
    assert not amp.step(second).skipped
    amp.zero_grad()
    watch.scaled(loss_of(amp, other, 0)).backward()
    assert watch.without_gradients == set()


def test_a_pass_that_goes_on_with_another_optimizers_loss_is_for_both():
    (one, other), (first, second), amp, watch = pair()
    torch.autograd.backward(
        [watch.scaled(loss_of(amp, one, 0), optimizers=first), watch.scaled(loss_of(amp, other, 1), optimizers=second)]
    )
    amp.unscale_()
    for model, number in ((one, 0), (other, 1)):
        mine = [p.grad.clone() for p in model.parameters()]
        plain = network()
        functional.cross_entropy(plain(batch(number)[0]), batch(number)[1]).backward()
        for found, param in zip(mine, plain.parameters(), strict=True):
            torch.testing.assert_close(found, param.grad, rtol=2e-2, atol=1e-4)


def test_a_pass_that_reaches_no_scaled_loss_is_untouched():
    model, _, amp, watch = attached("O1,emulate=true")
    scaled = watch.scaled(loss_of(amp, model, 0))
    bystander, twin = network(), network()
    for net in (bystander, twin):
        functional.cross_entropy(net(batch(3)[0]), batch(3)[1]).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(bystander.parameters(), twin.parameters(), strict=True))
    assert not any(group.window for group in amp._core.groups)
    scaled.backward()
    assert not amp.step().skipped


def test_gradients_carry_the_scale_that_their_loss_was_given():
    model, _, amp, watch = attached("O0,loss_scale=dynamic(init=8,interval=1)")

    def loss(factor):
        return sum(param.sum() for param in model.parameters()) * factor

    early = watch.scaled(loss(3.0))  # by 8
    watch.scaled(loss(1.0)).backward()
    amp.step()
    amp.zero_grad()
    assert float(amp.loss_scale) == 16
    early.backward()
    watch.scaled(loss(5.0)).backward()  # by 16
    amp.unscale_()
    assert all((param.grad == 8).all() for param in model.parameters())


def test_what_requires_no_gradient_is_scaled_and_nothing_else():
    model, _, amp, watch = attached("O0,loss_scale=8")
    assert float(watch.scaled(torch.tensor(2.0))) == 16
    many = watch.scaled(model(batch(0)[0]))
    many.backward(torch.full_like(many, 0.5))
    assert not amp.step().skipped


def test_without_a_scale_the_loss_itself_gets_no_hook():
    model, _, amp, watch = attached("O2,dtype=bfloat16,emulate=true")
    loss = loss_of(amp, model, 0)
    scaled = watch.scaled(loss)
    assert scaled is not loss
    assert not loss._backward_hooks
    assert torch.equal(scaled, loss)


def test_checkpoints_are_recomputed_under_the_region():
    for reentrant in (True, False):
        ends = []
        for own in (True, False):
            model, _, amp, watch = attached("O1,dtype=bfloat16,emulate=true,low=layer_norm")
            x, y = batch(0)
            x.requires_grad_()
            with amp.autocast():
                out = checkpoint(lambda x, model=model: model(x) * 2, x, use_reentrant=reentrant)
                loss = functional.cross_entropy(out, y)
            amp.backward(loss) if own else watch.scaled(loss).backward()
            amp.step()
            ends.append(weights(amp))
        assert all(map(torch.equal, *ends))


def test_a_closed_session_and_wrong_arguments_are_refused():
    model, _, amp, watch = attached("O1,emulate=true")
    scaled = watch.scaled(loss_of(amp, model, 0))
    with pytest.raises(mezzo.PolicyError, match="there is no loss 1"):
        watch.scaled(loss_of(amp, model, 0), 1)
    with pytest.raises(mezzo.PolicyError, match="not an optimizer of this session"):
        watch.scaled(loss_of(amp, model, 0), optimizers=sgd(network().parameters()))
    amp.close()
    with pytest.raises(mezzo.StateError, match=r"backward\(\) after close\(\)"):
        scaled.backward()


# Steps --------------------------------------------------------------------------------------------------------------


def take_over(amp, watch, *optimizers):
    taken = []
    for optimizer in optimizers:
        watch.take_over(optimizer, lambda o, closure: taken.append(amp.step(o, closure)))
    return taken


def test_its_steps_are_those_of_the_session():
    for policy in POLICIES:
        for name, optimizer in OPTIMIZERS.items():
            ends = []
            for own in (True, False):
                model, built, amp, watch = attached(policy, optimizer)
                taken = take_over(amp, watch, *([] if own else [built]))
                for number in range(3):
                    watch.scaled(loss_of(amp, model, number)).backward()
                    if number == 1:
                        next(model.parameters()).grad.fill_(float("inf"))
                    amp.step() if own else built.step()
                    built.zero_grad()
                assert own or [bool(step.skipped) for step in taken] == [False, True, False]
                ends.append(weights(amp))
            assert all(map(torch.equal, *ends)), (policy, name)


def test_closures_are_handed_on():
    ends = []
    for own in (True, False):
        model, built, amp, watch = attached(
            "O1,dtype=bfloat16,emulate=true", lambda p: torch.optim.LBFGS(p, max_iter=3)
        )
        take_over(amp, watch, *([] if own else [built]))

        def closure(model=model, amp=amp, watch=watch):
            amp.zero_grad()
            loss = loss_of(amp, model, 0)
            watch.scaled(loss).backward()
            return loss

        amp.step(closure=closure) if own else built.step(closure)
        ends.append(weights(amp))
    assert all(map(torch.equal, *ends))


def test_schedulers_wrap_it_in_any_order_and_it_comes_off():
    for before in (False, True):
        for after in (False, True):
            model, built, amp, watch = attached("O1,emulate=true")
            schedulers = [StepLR(built, 1)] if before else []
            was = vars(built).get("step")
            taken = take_over(amp, watch, built)
            assert isinstance(built.step, types.MethodType)
            assert built.step.__self__ is built
            schedulers += [LambdaLR(built, lambda epoch: 1.0)] if after else []
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for number in range(3):
                    watch.scaled(loss_of(amp, model, number)).backward()
                    if number == 0:
                        next(model.parameters()).grad.fill_(float("inf"))
                    built.step()
                    built.zero_grad()
                    for scheduler in schedulers:
                        scheduler.step()
            assert [bool(step.skipped) for step in taken] == [True, False, False]
            wrapped = vars(built)["step"]
            watch.give_back()
            watch.give_back()
            amp.close()
            if after and not before:  # the scheduler's wrapper is outside, and stays
                assert vars(built)["step"] is wrapped
            else:
                assert vars(built).get("step") is was
            start = weights_of(model)
            functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
            built.step()
            assert len(taken) == 3  # not one of them the session's
            assert not all(map(torch.equal, start, weights_of(model)))


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def test_a_wrapper_of_anyone_around_it_is_kept():
    model, built, amp, watch = attached("O2,emulate=true")
    taken, seen = take_over(amp, watch, built), []
    inner = built.step

    def outer(self, closure=None):
        seen.append(1)
        return inner(closure)

    built.step = types.MethodType(outer, built)
    watch.scaled(loss_of(amp, model, 0)).backward()
    built.step()
    assert (len(seen), len(taken)) == (1, 1)
    watch.give_back()
    assert watch.plain_step(built) == built.step
    watch.scaled(loss_of(amp, model, 1)).backward()
    with pytest.raises(mezzo.StateError, match="behind the session's back"):
        built.step()
