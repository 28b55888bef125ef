"""Losses that are not finite themselves, gradients that overflow on the way to one, and raising."""

import logging

import pytest
import torch
from torch import nn

from mezzo import LossScale, MixedPrecision, NumericsError, Policy, ScaleCollapsed

from .counted import INF, NAN, Weights, iterate, session

# Losses that fail by themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [INF, -INF, NAN])
@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true"])
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale(level, poison, caplog):
    caplog.set_level(logging.WARNING, logger="mezzo.session.stats")
    model, amp = session("dynamic(init=64,interval=3,hysteresis=2,skip_rate_limit=0.9)", level=level)
    iterate(model, amp)
    before = [scaler["scale"] for scaler in amp.state_dict()["loss_scales"]], amp.state_dict()["loss_scales"]
    for _ in range(5):
        step = iterate(model, amp, "F", poison)
        assert bool(step.skipped)
        assert step.next_scale.item() == step.scale.item() == 64.0
    assert before == ([64.0], amp.state_dict()["loss_scales"])  # the counters stand still as well
    assert amp.stats().skipped == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the loss of step 2 is not finite: skipped, and the loss scale stays"
    ]
    for event in ".FX.F":
        iterate(model, amp, event, poison)
    assert [record.getMessage()[:35] for record in caplog.records[1:]] == [
        "the loss of step 8 is not finite: s",
        "the loss of step 11 is not finite: ",
    ]


@pytest.mark.parametrize("rules", ["none", "1024"])
def test_a_failing_loss_is_told_without_a_dynamic_scale_too(rules, caplog):
    caplog.set_level(logging.WARNING, logger="mezzo.session.stats")
    model, amp = session(rules)
    assert bool(iterate(model, amp, "F").skipped)
    assert [record.getMessage() for record in caplog.records] == ["the loss of step 1 is not finite: skipped"]


@pytest.mark.parametrize("rules", ["dynamic(init=64,patience=3)", "constant(64,patience=3)", "constant(1,patience=3)"])
def test_patience_with_a_failing_loss(rules):
    """Not a collapse: no scale can cure it. And not while it recovers in between."""
    model, amp = session(rules)
    for event in "FF.FFXFF":
        assert bool(iterate(model, amp, event).skipped) == (event != ".")
    step = iterate(model, amp, "F")
    with pytest.raises(NumericsError, match=r"the loss was not finite for 3 steps in a row\n  where  step 9") as caught:
        bool(step.skipped)
    assert not isinstance(caught.value, ScaleCollapsed)
    assert "no loss scale can cure" in str(caught.value)
    with pytest.raises(NumericsError, match="3 steps in a row"):
        iterate(model, amp)


def test_failing_losses_in_a_row_are_told_once(caplog):
    caplog.set_level(logging.WARNING, logger="mezzo.session.stats")
    model, amp = session("constant(1,patience=2)", names=("a", "b"))
    for _ in range(2):
        step = iterate(model, amp, "F")
    with pytest.raises(NumericsError, match="where  step 2\n"):
        bool(step.skipped)
    assert len(caplog.records) == 1


def test_a_failing_loss_is_no_overflow_at_the_floor():
    """Neither counted among those in a row, nor the end of the row."""
    model, amp = session("dynamic(init=1,patience=3)")
    for event in "XFXF":
        assert bool(iterate(model, amp, event).skipped)
    step = iterate(model, amp, "X")
    with pytest.raises(ScaleCollapsed, match="3 overflows in a row"):
        bool(step.skipped)


def test_one_failing_micro_batch_excuses_the_others():
    model, amp = session("dynamic(init=64,interval=1)")
    for poison in (1.0, INF, 1.0):
        amp.backward(model.loss() * poison)
    assert bool(amp.step().skipped)
    assert amp.loss_scale.item() == 64.0


@pytest.mark.parametrize("num_losses", [1, 2])
def test_the_other_loss_s_scale_moves_as_ever(num_losses):
    """One loss fails, the other one is clean or overflows."""
    for overflow, scales in ((False, [64.0, 128.0]), (True, [64.0, 32.0])):
        model, amp = session("dynamic(init=64,interval=1)", num_losses=2)
        amp.backward(model.loss() * NAN, loss_id=0)
        amp.backward(model.loss(), loss_id=1)
        if overflow:
            model.of["w"].grad.fill_(INF)
        assert bool(amp.step().skipped)
        assert amp.loss_scale.tolist() == scales


# Gradients on the way to a loss --------------------------------------------------------------------------


def penalty_session(**options):
    model, amp = session("dynamic(init=2**12,interval=4,patience=2)", level="O1,emulate=true", **options)
    with torch.no_grad():
        model.of["w"].fill_(2.0**4)
    return model, amp


def penalise(model, amp, loss_id=0):
    """A gradient penalty: in FP16 w·scale = 2**(4 + 12) is infinite, and so is the loss that is made of it."""
    x = torch.ones(1, 2, requires_grad=True)
    with amp.autocast():
        out = nn.functional.linear(x, model.of["w"][None])
        (gradient,) = amp.grad(out.float().sum(), x, create_graph=True, loss_id=loss_id)
        amp.backward(gradient.square().sum() + model.loss(), loss_id=loss_id)


def test_an_overflow_on_the_way_to_a_loss_counts_for_the_scale(caplog):
    """2**12 is too large on the way, 2**11 for the penalty's own gradient 2·w·scale, and 2**10 for nothing."""
    caplog.set_level(logging.DEBUG, logger="mezzo.session.stats")
    model, amp = penalty_session()
    steps = []
    for _ in range(3):
        penalise(model, amp)
        steps.append(amp.step())
        amp.zero_grad()
    assert [bool(step.skipped) for step in steps] == [True, True, False]
    assert [step.scale.item() for step in steps] == [2.0**12, 2.0**11, 2.0**10]
    assert model.of["w"].tolist() == [16.0 - (2 * 16 + 1)] * 2
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_overflow_on_the_way_counts_once_for_two_optimizers(order):
    """The second step knows it too: its loss is not finite, but not by itself."""
    models = [Weights(), Weights()]
    pair = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    rules = LossScale.dynamic(init=2.0**12, interval=4)
    amp = MixedPrecision(models, pair, Policy.O1(emulate=True, loss_scale=rules))
    with torch.no_grad():
        models[0].of["w"].fill_(2.0**4)
        models[1].of["w"].fill_(1.0)
    x = torch.ones(1, 2, requires_grad=True)
    with amp.autocast():
        out = nn.functional.linear(x, models[0].of["w"][None] * models[1].of["w"])
        (gradient,) = amp.grad(out.float().sum(), x, create_graph=True)
        amp.backward(gradient.square().sum())
    for number in order:
        assert bool(amp.step(pair[number]).skipped)
    assert amp.loss_scale.item() == 2.0**11


def test_an_overflow_on_the_way_counts_for_its_own_loss_only():
    model, amp = penalty_session(num_losses=2)
    penalise(model, amp, loss_id=1)
    amp.backward(model.loss(), loss_id=0)
    assert bool(amp.step().skipped)
    assert amp.loss_scale.tolist() == [2.0**12, 2.0**11]


def test_an_overflow_on_the_way_is_spent_with_the_step():
    """Whoever clears gradients with the optimizer's own zero_grad."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true,loss_scale=dynamic(init=2**12)")
    with torch.no_grad():
        model.of["w"].fill_(2.0**4)
    penalise(model, amp)
    for scale in (2.0**11, 2.0**11):
        amp.step()
        assert amp.loss_scale.item() == scale
        optimizer.zero_grad()
        amp.backward(model.loss())


def test_an_overflow_on_the_way_is_forgotten_with_the_gradients():
    model, amp = penalty_session()
    penalise(model, amp)
    amp.zero_grad()
    assert not iterate(model, amp).skipped
    assert amp.loss_scale.item() == 2.0**12


@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
@pytest.mark.parametrize("rules", ["none", "3", "dynamic(init=1024)"])
def test_results_of_grad_are_unscaled_in_fp32(level, rules):
    """By a low-precision parameter too, with and without a scale; None where an input was not used."""
    model, amp = session(rules, level=level)
    weight = model.of["w"]
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    unused = torch.ones(1, requires_grad=True)
    out = (weight * x).float().sum()
    by_weight, by_x, by_nothing = amp.grad(out, [weight, x, unused], allow_unused=True)
    assert by_weight.dtype == by_x.dtype == torch.float32
    torch.testing.assert_close(by_weight, torch.tensor([1.0, 3.0]), rtol=2e-3 if "O2" in level else 1e-6, atol=0)
    assert by_x.tolist() == [0.0, 0.0]
    assert by_nothing is None
    assert weight.grad is None


# Raising -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2,emulate=true"])
def test_on_overflow_raise_names_the_gradients_and_goes_on(level, fused):
    model = Weights("a", "b", "c")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    policy = Policy.parse(level).evolve(loss_scale=LossScale.dynamic(init=64.0, interval=2))
    amp = MixedPrecision(model, optimizer, policy, on_overflow="raise")
    for event in ".X..":
        if event == "X":
            with pytest.raises(NumericsError, match=r"where  1 of 3: of.b\n  why .*under the loss scale 64"):
                iterate(model, amp, event, where="b")
            assert amp.loss_scale.item() == 32.0
        else:
            assert not iterate(model, amp, event).skipped
    assert all(torch.equal(p.detach(), torch.full((2,), -3.0)) for p in amp.master_params())
    assert amp.loss_scale.item() == 64.0
    assert (amp.stats().steps, amp.stats().skipped) == (4, 1)
