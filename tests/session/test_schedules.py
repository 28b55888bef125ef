"""Learning rates and averages of weights: both follow the weights, and so the steps that were taken."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import mezzo
from mezzo import MixedPrecision, PolicyError

from ..support.tables import thinned
from .loops import assert_same, backward, batch, network, session, sgd, state, train, weights

EVERY = [
    "O0",
    "O0,loss_scale=dynamic",
    *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2") for dtype in ("float16", "bfloat16")),
]


# Schedulers ---------------------------------------------------------------------------------------------


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=12),  # moves momentum as well
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
}
SPOILT = {0, 3, 4, 8}  # the very first step too, at which torch would warn that the schedule came before the weights


def rates(optimizer):
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


GIVEN = [lambda s: s, lambda s: [s], lambda s: (s,), lambda s: s.step]


@pytest.mark.parametrize(
    "policy, name, given", thinned(["O0", "O1,emulate=true", "O2,emulate=true"], SCHEDULERS, GIVEN, every=2)
)
def test_schedulers_move_with_the_weights_and_only_then(policy, name, given):
    model, optimizer, amp = session(policy)
    scheduler = SCHEDULERS[name](optimizer)
    other = sgd(network().parameters())
    reference = SCHEDULERS[name](other)
    for number in range(10):
        step = train(amp, model, number, spoilt=number in SPOILT, scheduler=given(scheduler))
        assert bool(step.skipped) == (number in SPOILT)
        if number not in SPOILT:
            other.step()
            reference.step()
        assert rates(optimizer) == rates(other)


def test_several_schedulers_step_in_their_order():
    model, optimizer, amp = session("O2,emulate=true")
    warmup, decay, calls = lr_scheduler.ConstantLR(optimizer, 0.5, 1), lr_scheduler.ExponentialLR(optimizer, 0.5), []
    train(amp, model, 0, scheduler=[warmup, decay, lambda: calls.append(1)])
    train(amp, model, 1, spoilt=True, scheduler=[warmup, decay, lambda: calls.append(2)])
    assert calls == [1]
    assert warmup.last_epoch == decay.last_epoch == 1


def test_plateaus_step_with_a_metric_in_a_function():
    model, optimizer, amp = session("O1,emulate=true")
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    for number in range(6):
        train(amp, model, number, spoilt=number % 2 == 1, scheduler=lambda: plateau.step(1.0))
    assert plateau.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.05
    backward(amp, model, 9)
    before = state(amp, model)
    with pytest.raises(PolicyError, match=r"ReduceLROnPlateau needs a metric(.|\n)*lambda: plateau.step\(metric\)"):
        amp.step(scheduler=plateau)
    assert_same(before, state(amp, model))


def test_a_scheduler_that_raises_does_so_after_the_step():
    model, _, amp = session("O1,emulate=true")
    backward(amp, model, 0)
    before = weights(amp)
    with pytest.raises(ZeroDivisionError):
        amp.step(scheduler=lambda: 1 / 0)
    assert not torch.equal(before[0], weights(amp)[0])
    assert amp.stats().steps == 1
    amp.zero_grad()
    train(amp, model, 1)


# Averages of weights ------------------------------------------------------------------------------------


AVERAGES = {"swa": {}, "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("policy", EVERY)
def test_averaged_models(policy, kind):
    """An ``AveragedModel`` made before the session is FP32, and what it averages is what the optimizer updates.

    With masters (O2) those are not the model's parameters: ``AveragedModel(model)`` made later would average rounded
    weights in low precision, and lose most of what one step adds. ``nn.ParameterList(amp.master_params())`` gives
    the masters in the order of the optimizer, so that of the model for ``Optimizer(model.parameters())``.
    """
    model = network()
    averaged = swa_utils.AveragedModel(model, **AVERAGES[kind])
    amp = MixedPrecision(model, sgd(model.parameters()), policy)
    history = []
    for number in range(6):
        train(amp, model, number, spoilt=number == 3)
        averaged.update_parameters(nn.ParameterList(amp.master_params()))
        history.append([w.double() for w in weights(amp)])
    mean = history[0]
    for count, each in enumerate(history[1:], start=1):
        part = 1 / (count + 1) if kind == "swa" else 0.1
        mean = [m + (w - m) * part for m, w in zip(mean, each, strict=True)]
    for found, true in zip(averaged.parameters(), mean, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), true, rtol=1e-6, atol=1e-7)
    with mezzo.autocast(amp.policy) if amp.policy.autocast else torch.no_grad():
        assert torch.isfinite(averaged(batch(0)[0])).all()


@pytest.mark.parametrize("policy", [p for p in EVERY if "O2" not in p])
def test_averaging_the_model_itself_where_it_is_fp32(policy):
    model, _, amp = session(policy)
    averaged = swa_utils.AveragedModel(model)
    for number in range(3):
        train(amp, model, number)
        averaged.update_parameters(model)
    x, _ = batch(0)
    with amp.autocast():
        assert torch.isfinite(averaged(x)).all()
    assert {p.dtype for p in averaged.parameters()} == {torch.float32}


@pytest.mark.parametrize("policy", EVERY)
def test_averaged_weights_can_be_put_into_the_model(policy):
    model, _, amp = session(policy)
    averaged = swa_utils.AveragedModel(nn.ParameterList(amp.master_params()))
    for number in range(3):
        train(amp, model, number)
        averaged.update_parameters(nn.ParameterList(amp.master_params()))
    amp.close()
    mean = list(averaged.module)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(mean), model.parameters())
    assert_same(list(model.parameters()), mean)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
