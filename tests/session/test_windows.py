"""The gradients between a backward pass and its step: sums, one scale that is known, edits, clearings, leftovers."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision, StateError

from ..support.tables import pairwise, thinned
from .loops import (
    EVERY,
    FP32,
    INF,
    LOW,
    NAN,
    O3,
    OPTIMIZERS,
    Weights,
    assert_same,
    backward,
    batch,
    built,
    gradients,
    loss_of,
    network,
    over,
    session,
    spoil,
    train,
    train_plainly,
    weights,
)  # fmt: skip

SCALED = [policy for policy in EVERY if "loss_scale" in policy] + ["O2,dtype=bfloat16,emulate=true,loss_scale=1024"]
GROWING = "loss_scale=dynamic(init=256,interval=1)"


def near(mine, true, bits):
    """Whether gradients are the true ones up to some ten roundings to so many bits, following one another."""
    found, reference = (torch.cat([g.flatten() for g in each]) for each in (mine, true))
    return torch.linalg.vector_norm(found - reference) < 10 * 2.0**-bits * torch.linalg.vector_norm(reference)


def plain_gradients(*numbers):
    model = network()
    for number in numbers:
        loss_of(model, number).backward()
    return gradients(model)


# Sums -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [p for p in (*LOW, *O3) if not p.startswith("O1")])
@pytest.mark.parametrize("optimizer", ["SGD", "mezzo"])
def test_low_gradients_are_summed_in_fp32_from_the_second_pass_on(policy, optimizer):
    model, _, amp = session(policy, optimizer)
    for number in range(3):
        backward(amp, model, number)
        dtypes = {p.grad.dtype for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
        assert dtypes == {torch.float32 if number else amp.policy.dtype}
    amp.step()
    amp.zero_grad()
    backward(amp, model, 3)  # and the next window begins low again
    assert amp.policy.dtype in {p.grad.dtype for p in model.parameters()}


@pytest.mark.parametrize("policy, large", [("O2,dtype=bfloat16", 256.0), ("O2", 2048.0), ("O3,dtype=bfloat16", 256.0)])
def test_no_bit_of_a_sum_is_lost(policy, large):
    """In the weights' format a large gradient plus 1 would be itself."""
    model = Weights(1)
    _, amp = over(model, f"{policy},emulate=true,loss_scale=1", max_grad_norm=1.0)
    for value in [large, *[1.0] * 8]:
        amp.backward(model.loss(value))
    assert amp.step().grad_norm.item() == large + 8


@pytest.mark.parametrize("policy, optimizer", thinned(EVERY, OPTIMIZERS, every=2))
def test_a_window_of_four_is_one_large_batch(policy, optimizer):
    def run(parts):
        model, _, amp = session(policy, optimizer)
        x, y = batch(0)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with amp.autocast():
                out = model(xs)
            amp.backward(functional.cross_entropy(out.float(), ys) / parts)
        amp.unscale_()
        return gradients(model)

    bits = {torch.float32: 22, torch.float16: 11, torch.bfloat16: 8}
    assert near(run(4), run(1), bits[session(policy)[2].policy.dtype] if policy not in FP32 else 22)


def test_a_pass_that_leaves_a_parameter_alone_does_not_clear_it():
    for policy in EVERY:
        model = Weights(2, 2)
        _, amp = over(model, policy)
        amp.backward(model.loss(1.0, 1.0))
        amp.backward(model.each[0].float().sum())
        amp.step()
        assert [p.tolist() for p in model.each] == [[-2.0, -2.0], [-1.0, -1.0]], policy


def test_losses_that_share_a_graph():
    for policy in EVERY:
        model, _, amp = session(policy)
        x, _ = batch(0)
        with amp.autocast():
            out = model(x)
        losses = out.float().square().mean(), out.float().sum() / 8
        amp.backward(losses[0], retain_graph=True)
        amp.backward(losses[1])
        amp.unscale_()
        found = gradients(model)
        amp.zero_grad()
        with amp.autocast():
            out = model(x)
        amp.backward(out.float().square().mean() + out.float().sum() / 8)
        amp.unscale_()
        assert near(found, gradients(model), 20 if policy in FP32 else 7), policy


# unscale_ -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("policy", [*EVERY, *SCALED[-1:]])
def test_unscaled_gradients_are_fp32_and_true(policy, numbers):
    for optimizer in ("SGD", "mezzo"):
        model, _, amp = session(policy, optimizer)
        for number in numbers:
            backward(amp, model, number)
        amp.unscale_()
        found = gradients(model)
        assert {g.dtype for g in found} == {torch.float32}
        if policy in FP32:
            assert_same(found, plain_gradients(*numbers))
        else:
            assert near(found, plain_gradients(*numbers), bits=11 if amp.policy.dtype == torch.float16 else 8)


def test_they_are_the_low_ones_divided_by_the_scale_in_fp32():
    model, _, amp = session("O2,emulate=true,loss_scale=3000")
    backward(amp, model, 0)
    low = gradients(model)
    assert torch.float16 in {g.dtype for g in low}
    amp.unscale_()
    over_scale = torch.tensor(1 / 3000, dtype=torch.float64).float()  # rounded once
    assert_same(gradients(model), [g.float() * over_scale for g in low])


def norm_clipped(params):
    nn.utils.clip_grad_norm_(params, 0.1)


def value_clipped(params):
    nn.utils.clip_grad_value_(params, 0.01)


def clamped_through_data(params):
    for p in params:
        p.grad.data.clamp_(-0.01, 0.01)


def noisy(params):
    generator = torch.Generator().manual_seed(7)
    for p in params:
        p.grad.add_(torch.randn(p.grad.shape, generator=generator), alpha=0.01)


def replaced(params):
    for p in params:
        p.grad = p.grad.sign()


def one_dropped(params):
    params[0].grad = None


def one_zeroed(params):
    params[0].grad = torch.zeros_like(params[0].grad)


EDITS = [norm_clipped, value_clipped, clamped_through_data, noisy, replaced, one_dropped, one_zeroed]


@pytest.mark.parametrize("policy, edit, optimizer", thinned(EVERY, EDITS, ["SGD", "AdamW", "fused"], every=6))
def test_the_step_takes_the_gradients_as_they_were_edited(policy, edit, optimizer):
    """torch's own optimizer, fed the very gradients that the edit left, is the oracle; whatever the precision."""
    model, _, amp = session(policy, optimizer)
    copies = [nn.Parameter(value.float()) for value in weights(amp)]
    plain = OPTIMIZERS[optimizer](copies)
    for number in range(3):
        backward(amp, model, number)
        amp.unscale_()
        edit(list(model.parameters()))
        for mine, theirs in zip(model.parameters(), copies, strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in copies if p.grad is not None]))
        assert amp.step().grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        amp.zero_grad()
        plain.step()
        assert_same(weights(amp), [p.detach() for p in copies])


@pytest.mark.parametrize("policy, optimizer", pairwise(LOW, ["SGD", "mezzo"]))
def test_an_edit_of_master_gradients_is_one_of_the_models_parameters(policy, optimizer):
    """As ``clip_grad_norm_(amp.master_params(), …)`` in apex's manner."""
    found = []
    for updated in (False, True):
        model, _, amp = session(policy, optimizer)
        for number in range(3):
            backward(amp, model, number)
            amp.unscale_()
            params = list(amp.master_params() if updated else model.parameters())
            assert all(p.grad.dtype == torch.float32 for p in params)
            norm_clipped(params)
            norm = amp.step().grad_norm
            amp.zero_grad()
        found.append([*weights(amp), norm])
    assert_same(*found)


def test_looking_changes_nothing():
    for policy in EVERY:
        runs = []
        for looks in (0, 1, 2):
            model, _, amp = session(policy)
            for number in range(3):
                backward(amp, model, number)
                for _ in range(looks):
                    amp.unscale_()
                amp.step()
                amp.zero_grad()
            runs.append((weights(amp), amp.stats()))
        assert_same(runs[0], runs[1])
        assert_same(runs[1], runs[2])


@pytest.mark.parametrize("policy", EVERY)
def test_later_passes_add_to_unscaled_and_edited_gradients(policy):
    model, _, amp = session(policy)
    for number in range(3):
        backward(amp, model, number)
        amp.unscale_()
        if number == 0:
            for param in model.parameters():
                param.grad.mul_(0.5)
    found = gradients(model)
    true = [0.5 * a + b for a, b in zip(plain_gradients(0), plain_gradients(1, 2), strict=True)]
    assert near(found, true, {torch.float16: 11, torch.bfloat16: 8}[amp.policy.dtype] if policy in LOW else 21)
    assert not amp.step().skipped
    assert amp.stats().steps == 1


@pytest.mark.parametrize("policy", SCALED)
def test_an_overflow_that_unscaling_has_found_skips_whatever_is_done_after(policy):
    for mends in (lambda p: p.grad.nan_to_num_(0.0, 0.0, 0.0), lambda p: p.grad.zero_(), lambda p: None):
        for goes_on in (False, True):
            model, _, amp = session(policy)
            before = weights(amp)
            backward(amp, model, 0, spoilt=True)
            amp.unscale_()
            for param in model.parameters():
                mends(param)
            if goes_on:
                backward(amp, model, 1)
            step = amp.step()
            amp.zero_grad()
            assert bool(step.skipped)
            halves = 0.5 if amp.policy.loss_scale.mode == "dynamic" else 1.0
            assert float(step.next_scale) == float(step.scale) * halves
            assert_same(before, weights(amp))
            assert not train(amp, model, 2).skipped


@pytest.mark.parametrize("policy", EVERY)
def test_an_infinity_that_an_edit_makes_is_found(policy):
    model, _, amp = session(policy)
    before = weights(amp)
    backward(amp, model, 0)
    amp.unscale_()
    model[0].weight.grad[0, 0] = NAN
    assert bool(amp.step().skipped)
    assert_same(before, weights(amp))


# Another scale --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_a_window_that_stays_open_while_the_scale_moves_is_rescaled_in_fp32(level):
    """One optimizer accumulates over three iterations, the other steps at each; the scale grows in between."""
    model = Weights(2, 2)
    (fast, slow), amp = over(model, f"{level},{GROWING}", [model.each[0]], [model.each[1]])
    for step in range(3):
        amp.backward(model.loss(1, 2.0**step))
        assert amp.step(fast).scale.item() == 256.0 * 2**step
        fast.zero_grad()
    late = amp.step(slow)
    assert [p.tolist() for p in model.each] == [[-3.0, -3.0], [-7.0, -7.0]]
    assert late.grad_norm.item() == pytest.approx(7.0 * 2**0.5)
    assert not late.skipped


def test_it_falls_while_a_window_is_open():
    for level in ("O0", "O2,dtype=bfloat16,emulate=true"):
        model = Weights(2, 2)
        (one, _), amp = over(model, f"{level},{GROWING}", [model.each[0]], [model.each[1]])
        amp.backward(model.loss(1, 3))
        model.each[0].grad.fill_(INF)
        assert bool(amp.step(one).skipped)
        one.zero_grad()
        amp.backward(model.loss(1, 5))
        assert not amp.step().skipped
        assert [p.tolist() for p in model.each] == [[-1.0, -1.0], [-8.0, -8.0]]


# Clearing -------------------------------------------------------------------------------------------------------------

CLEARS = {
    "session": lambda amp, optimizer, model, none: amp.zero_grad(set_to_none=none),
    "optimizer": lambda amp, optimizer, model, none: optimizer.zero_grad(set_to_none=none),
    "model": lambda amp, optimizer, model, none: model.zero_grad(set_to_none=none),
}


@pytest.mark.parametrize("policy, clears, none, looks", pairwise(EVERY, list(CLEARS), [True, False], [True, False]))
def test_clearing_all_begins_a_new_window(policy, clears, none, looks):
    """Its overflow is forgotten, its scale too; what comes after is as if nothing had been."""
    for optimizer in ("SGD", "fused", "mezzo"):
        (model, made, amp), (other, _, same) = session(policy, optimizer), session(policy, optimizer)
        for parts in (1, 2):
            for number in range(parts):
                backward(amp, model, 7 + number, spoilt=none)
            if looks:
                amp.unscale_()
            CLEARS[clears](amp, made, model, none)
            left = [p.grad for p in model.parameters() if p.grad is not None]
            assert not (left if none else any(gradient.any() for gradient in left))
            for each, net in ((amp, model), (same, other)):
                backward(each, net, parts)
                backward(each, net, parts + 1)
                assert not each.step().skipped, optimizer
            CLEARS[clears](amp, made, model, none)
            same.zero_grad()
        for mine, theirs in zip(weights(amp), weights(same), strict=True):
            # Zeros are FP32 sums already; the first pass of a window that begins with none is rounded.
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if none or policy in FP32 else 4e-3)


@pytest.mark.parametrize("policy", EVERY)
def test_gradients_that_are_cleared_to_zeros_stay_in_the_step(policy):
    """A parameter that a pass does not reach has the gradient zero, as in plain torch: momentum and decay go on."""
    for optimizer in (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5), lambda p: torch.optim.AdamW(p, lr=0.5)):
        model, plain = Weights(2, 2, value=1.0), Weights(2, 2, value=1.0)
        made, theirs = optimizer(model.parameters()), optimizer(plain.parameters())
        amp = MixedPrecision(model, made, policy)
        for losses in ((1.0, 1.0), (1.0, None)):
            chosen = [w.float().sum() * c for w, c in zip(model.each, losses, strict=True) if c is not None]
            amp.backward(sum(chosen))
            amp.step()
            made.zero_grad(set_to_none=False)
            sum(w.sum() * c for w, c in zip(plain.each, losses, strict=True) if c is not None).backward()
            theirs.step()
            theirs.zero_grad(set_to_none=False)
        for mine, true in zip(weights(amp), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, true.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", EVERY)
def test_a_window_may_be_given_up(policy):
    (model, _, amp), (other, _, same) = session(policy), session(policy)
    train(amp, model, 0)
    backward(amp, model, 1)
    backward(amp, model, 2, spoilt=True)
    amp.zero_grad()
    train(amp, model, 3)
    train(same, other, 0)
    train(same, other, 3)
    assert_same(weights(amp), weights(same))
    assert amp.stats() == same.stats()


# Leftovers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer", thinned([*EVERY, *O3], OPTIMIZERS, every=4))
def test_what_a_step_has_left_is_refused_before_gradients_mix(policy, optimizer):
    model, made, amp = session(policy, optimizer)
    backward(amp, model, 0)
    amp.step()
    if all(p.grad is None for p in model.parameters()):
        return  # a step that leaves none behind is as good
    before = weights(amp)
    for _ in range(2):
        with pytest.raises(StateError, match=r"the last step's gradients are still there(.|\n)*zero_grad\(\)"):
            backward(amp, model, 1)
    assert_same(before, weights(amp))
    made.zero_grad(set_to_none=False)  # zeros are no leftovers
    backward(amp, model, 1)
    assert not amp.step().skipped
    made.zero_grad()
    backward(amp, model, 2)  # nor are new gradients in the memory of freed ones
    assert not amp.step().skipped


# A warning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("policy", SCALED)
def test_an_edit_of_scaled_gradients_is_warned_of_once(policy, max_grad_norm):
    model, _, amp = session(policy, max_grad_norm=max_grad_norm)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            backward(amp, model, number)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            amp.step()
            amp.zero_grad()
    assert [each.category for each in told] == [UserWarning]
    assert re.search(r"(?s)gradients .* carry the loss scale.*amp\.unscale_\(\)", str(told[0].message))


@pytest.mark.parametrize("policy", [*SCALED, *EVERY])
def test_no_other_edit_is_warned_of(policy):
    edits = [EDITS[4], EDITS[5], one_dropped, lambda params: params[0].grad.zero_() if policy not in SCALED else None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for edit in edits:
            model, _, amp = session(policy)
            for number in range(2):
                backward(amp, model, number)
                backward(amp, model, number + 5)
                if policy not in SCALED or edit is not replaced:
                    amp.unscale_()
                    edit(list(model.parameters()))
                amp.step()
                amp.zero_grad()
        model, _, amp = session(policy, max_grad_norm=1.0)
        backward(amp, model, 0)
        for param in model.parameters():
            param.grad = param.grad.clone()  # replaced, as distributed wrappers do
        amp.step()


# Passes that fail -----------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("a backward function of the user's")


@pytest.mark.parametrize("policy", EVERY)
def test_a_pass_that_fails_may_be_tried_again(policy):
    (model, _, amp), (other, _, same) = session(policy), session(policy)
    backward(amp, model, 0)
    with pytest.raises(RuntimeError, match="of the user's"):
        amp.backward(Fails.apply(loss_of(model, 1, amp)))
    backward(amp, model, 1)
    backward(same, other, 0)
    backward(same, other, 1)
    assert amp.step().grad_norm == same.step().grad_norm
    assert_same(weights(amp), weights(same))


# Several optimizers ---------------------------------------------------------------------------------------------------


class Adversaries:
    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.models = [self.critic, self.generator]
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in self.models]

    def loss(self, number, step):
        generator = torch.Generator().manual_seed(step)
        noise, real = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
        fake = self.generator(noise)
        if number == 0:
            return (self.critic(real) - 1).square().mean() + self.critic(fake.detach()).square().mean()
        return (self.critic(fake) - 1).square().mean()

    def weights(self):
        return [p.detach().clone() for model in self.models for p in model.parameters()]


@pytest.mark.parametrize("strike", [None, (2, 0), (2, 1)])
@pytest.mark.parametrize("named", [False, True])
def test_adversaries_that_take_turns(named, strike):
    """Bit for bit plain FP32 that leaves the struck steps out; and the scale counts each one's steps."""
    gan, plain = Adversaries(), Adversaries()
    amp = MixedPrecision(gan.models, gan.optimizers, "O0,loss_scale=dynamic(init=256,interval=3)")
    scale, clean = 256.0, 0
    for step in range(5):
        for number in (0, 1):
            amp.zero_grad()
            amp.backward(gan.loss(number, step), optimizers=gan.optimizers[number] if named else None)
            struck = strike == (step, number)
            if struck:
                spoil(gan.models[number])
            assert bool(amp.step(gan.optimizers[number]).skipped) == struck
            clean = 0 if struck else clean + 1
            if struck or clean == 3:
                scale, clean = scale * (0.5 if struck else 2), 0
            for optimizer in plain.optimizers:
                optimizer.zero_grad()
            plain.loss(number, step).backward()
            if not struck:
                plain.optimizers[number].step()
    amp.zero_grad()
    amp.backward(gan.loss(0, 9))  # by which it is committed, at the latest
    assert amp.loss_scale.item() == scale
    assert_same(gan.weights(), plain.weights())


def test_steps_that_one_pass_feeds_count_once_for_the_scale():
    gan = Adversaries()
    amp = MixedPrecision(gan.models, gan.optimizers, "O0,loss_scale=dynamic(init=256,interval=2)")
    for scale in (256.0, 512.0, 512.0, 1024.0):
        amp.zero_grad()
        amp.backward(gan.loss(0, 0) + gan.loss(1, 0))
        for optimizer in gan.optimizers:
            amp.step(optimizer)
        assert amp.loss_scale.item() == scale


@pytest.mark.parametrize("policy", EVERY)
def test_a_pass_for_one_optimizer_gives_gradients_to_its_parameters_alone(policy):
    gan = Adversaries()
    amp = MixedPrecision(gan.models, gan.optimizers, policy)
    with amp.autocast():
        loss = gan.loss(1, 0)
    amp.backward(loss, optimizers=gan.optimizers[1])
    assert all(p.grad is None for p in gan.critic.parameters())
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step(gan.optimizers[0])
    before = gan.weights()
    amp.step()  # all that have gradients
    moved = [not torch.equal(a, b) for a, b in zip(before, gan.weights(), strict=True)]
    assert moved == [False] * 4 + [True] * 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_optimizers_that_share_parameters_step_together_and_by_turns(fused, clip):
    """Together: each from the same gradients, unscaled and clipped once. By turns: with a pass for each."""
    for turns in (False, True):
        model, plain = Weights(2), Weights(2)
        pair = [torch.optim.SGD(model.parameters(), lr=lr, fused=fused) for lr in (0.5, 0.25)]
        amp = MixedPrecision(model, pair, f"O0,{GROWING}", max_grad_norm=clip)
        theirs = [torch.optim.SGD(plain.parameters(), lr=lr) for lr in (0.5, 0.25)]
        for number in range(4):
            c = torch.tensor([3.0, 4.0]) * (number + 1)
            chosen = [number % 2] if turns else [0, 1]
            amp.backward(model.loss(c))
            amp.step([pair[i] for i in chosen])
            amp.zero_grad()
            plain.zero_grad()
            plain.loss(c).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            for i in chosen:
                theirs[i].step()
        # 1/scale, coefficient and product each round once.
        torch.testing.assert_close(model.each[0], plain.each[0], rtol=4 * 2.0**-23 if clip else 0, atol=0)


def test_two_of_three_optimizers_that_share_parameters_count_each_gradient_once():
    model = Weights(2)
    three = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25, 0.125)]
    amp = MixedPrecision(model, three, "O0,loss_scale=1024", max_grad_norm=1.0)
    amp.backward(model.loss(torch.tensor([3.0, 4.0])))
    before = model.each[0].detach().clone()
    assert amp.step(three[:2]).grad_norm == 5.0
    assert torch.allclose(before - model.each[0], 0.75 * torch.tensor([0.6, 0.8]), rtol=1e-6)


@pytest.mark.parametrize("policy", [policy for policy in EVERY if not policy.startswith("O2,dtype")])
def test_one_of_two_optimizers_is_unscaled_and_steps_alone(policy):
    model = network()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:3], model[3])]
    amp = MixedPrecision(model, pair, policy)
    plain = network()
    theirs = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (plain[:3], plain[3])]
    for number in range(3):
        before = copy.deepcopy(model[3].weight)
        backward(amp, model, number)
        raw = model[3].weight.grad.clone()
        amp.unscale_(pair[0])
        assert torch.equal(model[3].weight.grad, raw)
        nn.utils.clip_grad_norm_(model[:3].parameters(), 0.05)
        amp.step(pair[0])
        assert torch.equal(model[3].weight, before)
        amp.step(pair[1])
        amp.zero_grad()
        loss_of(plain, number).backward()
        nn.utils.clip_grad_norm_(plain[:3].parameters(), 0.05)
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    if policy in FP32:
        assert_same(model.state_dict(), plain.state_dict())
    start = list(network().parameters())
    for mine, true, first in zip(weights(amp), plain.parameters(), start, strict=True):
        assert torch.linalg.vector_norm(mine - true) <= 0.05 * torch.linalg.vector_norm(true - first)


def test_they_step_in_the_order_of_the_session():
    model, called = network(), []
    pair = [OPTIMIZERS[name](part.parameters()) for name, part in (("fused", model[0]), ("SGD", model[3]))]
    amp = MixedPrecision(model, pair, "O1,emulate=true")
    for number, optimizer in enumerate(pair):
        optimizer.register_step_post_hook(lambda *_, number=number: called.append(number))
    backward(amp, model, 0)
    amp.step(list(reversed(pair)))
    assert called == [0, 1]


@pytest.mark.parametrize("policy", EVERY)
def test_gradients_made_without_the_session_are_not_stepped_with_unseen(policy):
    """A plain ``loss.backward()`` beside the five lines: its gradients are no window of the session's."""
    model, made, amp = session(policy)
    plain, _ = built()
    train_plainly(plain, _, 0)
    before = weights(amp)
    loss_of(model, 0, amp).backward()
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()
    with pytest.raises(StateError, match="behind the session's back"):
        made.step()
    assert_same(before, weights(amp))


@pytest.mark.parametrize("policy", SCALED)
def test_inputs_that_a_pass_is_told_get_gradients_without_the_scale(policy):
    model, _, amp = session(policy)
    x, y = batch(0)
    x.requires_grad_()
    with amp.autocast():
        loss = functional.cross_entropy(model(x).float(), y)
    (expected,) = amp.grad(loss, x, retain_graph=True)
    amp.backward(loss, inputs=x)
    torch.testing.assert_close(x.grad, expected)
    assert gradients(model) == [None] * len(gradients(model))
