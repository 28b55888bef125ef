"""Steps that are not taken: wherever an infinity strikes, nothing is written anywhere, and the scale falls once.

The first part is the classic matrix of optimizers × models × losses × levels, after Apex's test_multiple_models_
optimizers_losses.py. Every number of it is chosen to be exact: weights start as whole numbers, inputs are ±1, learning
rates and scales powers of two, so that FP16 (and for three steps BF16) rounds nothing and weights equal those of an
FP32 loop bit for bit.
"""

import copy
import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from mezzo import LossScale, MixedPrecision, NumericsError, Policy
from mezzo.weights import encode

from ..support.tables import pairwise, thinned
from .loops import (
    EVERY,
    INF,
    NAN,
    O3,
    OPTIMIZERS,
    assert_same,
    attached,
    backward,
    batch,
    facts,
    loss_of,
    network,
    session,
    train,
)  # fmt: skip

INTERVAL, INIT = 2, 256.0
SCALE = f"loss_scale=dynamic(init={INIT:g},interval={INTERVAL})"
STEPS = 4


class Pair(nn.Module):
    """Two parameters, so that two optimizers can share out even one model."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, -2.0 + seed]]))
            self.second.weight.copy_(torch.tensor([[0.0 + seed, 1.0]]))

    def forward(self, x):
        return self.first(x).float() + 2 * self.second(x.flip(0)).float()


def data(step, number):
    """Two numbers, ±1, another sign pattern for each step and loss."""
    bits = (5 * step + 3 * number + 1) % 4
    return torch.tensor([1.0 if bits & 1 else -1.0, 1.0 if bits & 2 else -1.0])


def outputs(models, number, num_losses):
    """Which models a loss is made of: with two losses, the first and the second half, which share the middle one."""
    if num_losses == 1:
        return models
    middle = len(models) // 2
    return models[: middle + 1] if number == 0 else models[middle:]


def pair_loss(models, number, num_losses, step):
    return sum(model(data(step, number)).square().sum() for model in outputs(models, number, num_losses)) * 0.25


def optimizers_over(models, count, fused=False):
    """SGD with momentum, each with its own learning rate; two of them deal the parameters out in turn."""
    params = [param for model in models for param in model.parameters()]
    return [torch.optim.SGD(params[i::count], lr=2.0 ** (-3 - i), momentum=0.5, fused=fused) for i in range(count)]


@dataclass
class Simulated:
    """A dynamic loss scale by the book: half after an overflow, double after INTERVAL clean steps in a row."""

    scale: float = INIT
    clean: int = 0
    trace: list[float] = field(default_factory=list)

    def update(self, overflow):
        self.clean = 0 if overflow else self.clean + 1
        if overflow:
            self.scale /= 2
        elif self.clean == INTERVAL:
            self.scale, self.clean = self.scale * 2, 0
        self.trace.append(self.scale)


def victims(models, number, num_losses):
    """The first and the last parameter that a loss gives a gradient to."""
    params = [param for model in outputs(models, number, num_losses) for param in model.parameters()]
    return {0: params[0], 1: params[-1]}


class Run:
    """A session beside a simulation of its loss scale."""

    def __init__(self, level, num_optimizers, num_models, num_losses, fused=False):
        self.models = [Pair(seed) for seed in range(num_models)]
        self.optimizers = optimizers_over(self.models, num_optimizers, fused)
        self.num_losses = num_losses
        self.amp = MixedPrecision(self.models, self.optimizers, level)
        self.scale = Simulated()

    def backward(self, step, strike):
        """Backpropagate all losses; return which parameter was struck."""
        struck = None
        for number in range(self.num_losses):
            with self.amp.autocast():
                loss = pair_loss(self.models, number, self.num_losses, step)
            self.amp.backward(loss)
            if strike is not None and strike[:2] == (step, number):
                struck = victims(self.models, number, self.num_losses)[strike[2]]
                struck.grad[0, 1] = float("inf")
        return struck

    def check_scale(self, step, strike):
        self.scale.update(strike is not None and strike[0] == step)
        if self.amp.policy.loss_scale.mode == "dynamic":
            assert self.amp.loss_scale.item() == self.scale.scale

    def check_weights(self, skips):
        """Compare with FP32 without mezzo: plain backward passes, and the skipped steps left out.

        Args:
            skips: The steps that each optimizer left out.
        """
        plain = [Pair(seed) for seed in range(len(self.models))]
        built = optimizers_over(plain, len(self.optimizers))
        for step in range(len(self.scale.trace)):
            for optimizer in built:
                optimizer.zero_grad()
            for number in range(self.num_losses):
                pair_loss(plain, number, self.num_losses, step).backward()
            for optimizer, skipped in zip(built, skips, strict=True):
                if step not in skipped:
                    optimizer.step()
        wanted = [param for optimizer in built for param in optimizer.param_groups[0]["params"]]
        for mine, theirs in zip(masters_of(self), wanted, strict=True):
            assert torch.equal(mine.detach(), theirs.detach())
        for mine, theirs in zip(self.models, plain, strict=True):
            for low, wide in zip(mine.parameters(), theirs.parameters(), strict=True):
                rounded = wide if low.dtype == torch.float32 else encode(wide.detach(), low.dtype)[0]
                assert torch.equal(low, rounded)  # in BF16 ties go away from zero


def check(run, strike, steps=STEPS):
    for step in range(steps):
        struck = run.backward(step, strike) is not None
        result = run.amp.step()
        run.amp.zero_grad()
        assert bool(result.skipped) == struck
        run.check_scale(step, strike)
        assert result.next_scale.item() == run.amp.loss_scale.item()
    run.check_weights([set() if strike is None else {strike[0]}] * len(run.optimizers))


def strikes(num_losses, at=(0, 2)):
    """No strike, and one at each of: the first step and one after a growth; each backward pass; two parameters."""
    return [None, *itertools.product(at, range(num_losses), (0, 1))]


FP16 = {
    "O0": f"O0,{SCALE}",
    "O1": f"O1,emulate=true,{SCALE}",
    "O2": f"O2,emulate=true,{SCALE}",
}
BF16 = {
    "O1": "O1,dtype=bfloat16,emulate=true",
    "O1 scaled": f"O1,dtype=bfloat16,emulate=true,{SCALE}",
    "O2": "O2,dtype=bfloat16,emulate=true",
    "O2 scaled": f"O2,dtype=bfloat16,emulate=true,{SCALE}",
}


def masters_of(run):
    """The exact values that the optimizers update, in their order."""
    return [value for optimizer in run.optimizers for value in run.amp.master_params(optimizer)]


@pytest.mark.parametrize("level, num_optimizers, num_models, losses", pairwise(list(FP16), [1, 2], [1, 2, 3], [1, 2]))
def test_weights_and_scales_are_exact_wherever_an_infinity_strikes(level, num_optimizers, num_models, losses):
    for strike in strikes(losses):
        check(Run(FP16[level], num_optimizers, num_models, losses), strike)


@pytest.mark.parametrize("level, losses", thinned(BF16, [1, 2], every=2))
def test_bf16_with_and_without_a_scale(level, losses):
    for strike in strikes(losses, at=(0, 1)):
        check(Run(BF16[level], 2, 2, losses), strike, steps=3)


@pytest.mark.parametrize("level, losses", thinned(FP16, [1, 2], every=2))
def test_fused_optimizers(level, losses):
    for strike in strikes(losses):
        check(Run(FP16[level], 2, 2, losses, fused=True), strike)


@pytest.mark.parametrize("level, num_models, losses", pairwise(list(FP16), [1, 3], [1, 2]))
def test_optimizers_that_step_one_by_one(level, num_models, losses):
    """Only the one whose gradients overflowed is skipped; an iteration moves the scale once, whoever comes first."""
    for strike in strikes(losses, at=(1, 2)):
        run = Run(FP16[level], 2, num_models, losses)
        skips = [set(), set()]
        params = [param for model in run.models for param in model.parameters()]
        for step in range(STEPS):
            struck = run.backward(step, strike)
            for number, (optimizer, skipped) in enumerate(zip(run.optimizers, skips, strict=True)):
                hit = any(struck is param for param in params[number::2])
                if hit:
                    skipped.add(step)
                assert bool(run.amp.step(optimizer).skipped) == hit
            run.amp.zero_grad()
            run.check_scale(step, strike)
        run.check_weights(skips)


# Nothing is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer, poison", thinned([*EVERY, *O3], OPTIMIZERS, [INF, -INF, NAN], every=6))
def test_a_skipped_step_writes_nothing_and_the_loop_goes_on(policy, optimizer, poison):
    for first in (True, False):  # before there is any state of the optimizer's, and after
        model, made, amp = session(policy, optimizer, max_grad_norm=1.0)
        if not first:
            train(amp, model, 0)
        before = facts(model, made)
        backward(amp, model, 1)
        model[3].weight.grad[0, 0] = poison
        step = amp.step()
        amp.zero_grad()
        assert bool(step.skipped)
        assert not torch.isfinite(step.grad_norm)
        after = facts(model, made)
        assert_same(before[0], after[0])
        if not first:
            assert_same(before[1], after[1])
        falls = 0.5 if amp.policy.loss_scale.mode == "dynamic" else 1.0
        assert step.next_scale.item() == step.scale.item() * falls
        assert not train(amp, model, 2).skipped
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_run_is_that_without_the_skipped_steps(optimizer):
    for policy in (*EVERY, O3[1]):
        ends = []
        for skips in (True, False):
            model, made, amp = session(policy + ("" if "loss_scale" in policy else ",loss_scale=1"), optimizer)
            for number in range(5):
                spoilt = number in (0, 2)
                if skips or not spoilt:
                    train(amp, model, number, spoilt=spoilt)
            ends.append(facts(model, made)[:2])
        assert_same(*ends)


def test_an_infinity_that_unscaling_makes_is_found():
    """torch checks before it multiplies by 1/scale, and writes the infinity into the weights."""
    for optimizer in OPTIMIZERS:
        model, _, amp = session(Policy.O1(loss_scale=LossScale.constant(2.0**-126), emulate=True), optimizer)
        before = copy.deepcopy(model.state_dict())
        amp.backward(sum(param.float().sum() for param in model.parameters()) * 2.0**3 * 2.0**126)
        assert bool(amp.step().skipped), optimizer
        assert_same(before, model.state_dict())


@pytest.mark.parametrize("policy", EVERY)
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale(policy):
    for factor in (INF, NAN):
        for parts in (1, 2):  # one failing micro-batch excuses the others
            model, made, amp = session(policy)
            train(amp, model, 0)
            before = facts(model, made)
            for part in range(parts):
                amp.backward(loss_of(model, part, amp) * (factor if part == 0 else 1.0))
            step = amp.step()
            amp.zero_grad()
            assert bool(step.skipped)
            assert step.next_scale == step.scale == amp.loss_scale
            assert_same(before, facts(model, made))
            assert not train(amp, model, 2).skipped


def test_losses_that_fail_in_a_row_end_the_run_and_single_ones_do_not():
    model, _, amp = session("O1,emulate=true,loss_scale=dynamic(init=256,patience=2)")

    def step(factor):
        amp.backward(loss_of(model, 0, amp) * factor)
        skipped = bool(amp.step().skipped)
        amp.zero_grad()
        return skipped

    assert [step(factor) for factor in (NAN, 1.0, NAN, 1.0, NAN, 1.0, INF)] == [True, False] * 3 + [True]
    assert step(NAN)
    with pytest.raises(NumericsError, match="the loss was not finite for 2 steps in a row"):
        step(1.0)


def test_a_finite_gradient_whose_square_is_not_counts_as_an_overflow():
    model, _, amp = session("O0")
    backward(amp, model, 0)
    model[0].weight.grad.fill_(2e19)
    assert bool(amp.step().skipped)


# What users do about it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O0", *EVERY[2:]])
def test_on_overflow_raise_says_so_and_the_loop_can_go_on(policy):
    model, made, amp = session(policy, on_overflow="raise")
    train(amp, model, 0)
    before = facts(model, made)
    backward(amp, model, 1, spoilt=True)
    with pytest.raises(NumericsError, match="gradients are not finite"):
        amp.step()
    amp.zero_grad()
    assert_same(before, facts(model, made))
    assert amp.stats().skipped == 1
    assert not train(amp, model, 2).skipped


def test_on_overflow_explain_says_where():
    model, _, amp = session("O1,emulate=true", on_overflow="explain")
    x, y = batch(0)
    x[0, 0] = INF
    with amp.autocast():
        loss = nn.functional.cross_entropy(model(x).float(), y)
    amp.backward(loss)
    step = amp.step()
    assert bool(step.skipped)
    assert step.overflow is not None
    assert str(step.overflow)
    amp.zero_grad()
    assert train(amp, model, 1).overflow is None


def test_a_schedule_follows_the_weights_by_a_line_of_the_users():
    model, made, amp = session("O1,emulate=true")
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    rates = []
    for number in range(4):
        step = train(amp, model, number, spoilt=number in (1, 2))
        if not step.skipped:
            schedule.step()
        rates.append(made.param_groups[0]["lr"])
    assert rates == [0.05, 0.05, 0.05, 0.025]


@pytest.mark.parametrize("policy, optimizer", thinned(EVERY, OPTIMIZERS, every=2))
def test_what_is_skipped_is_skipped_alike_in_every_style(policy, optimizer):
    """The five lines, and a loop of its own while it is attached: the same scale, the same account, near weights."""
    ends = []
    for own in (True, False):
        model = network()
        made = OPTIMIZERS[optimizer](model.parameters())
        if own:
            with attached(model, made, policy) as amp:
                for number in range(4):
                    loss_of(model, number).backward()
                    if number == 1:
                        model[0].weight.grad[0] = NAN
                    made.step()
                    made.zero_grad()
                ends.append((float(amp.loss_scale), amp.stats(), [p.detach().clone() for p in amp.master_params()]))
        else:
            amp = MixedPrecision(model, made, policy)
            for number in range(4):
                train(amp, model, number, spoilt=number == 1)
            ends.append((float(amp.loss_scale), amp.stats(), [p.detach().clone() for p in amp.master_params()]))
            amp.close()
    assert ends[0][:2] == ends[1][:2]
    for mine, theirs in zip(ends[0][2], ends[1][2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
