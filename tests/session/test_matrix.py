"""The classic matrix: optimizers × models × losses × scales × where an infinity strikes × levels.

After Apex's tests/L0/run_amp/test_multiple_models_optimizers_losses.py. Every number is chosen to be exact: weights
start as whole numbers, inputs are ±1, learning rates and scales powers of two, so that FP16 (and for three steps BF16)
rounds nothing and weights equal those of an FP32 loop bit for bit.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from mezzo import MixedPrecision

from ..support.tables import pairwise, thinned

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


def loss_of(models, number, num_losses, step):
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
    """A session beside a simulation of its loss scales."""

    def __init__(self, level, num_optimizers, num_models, num_losses, own, fused=False):
        self.models = [Pair(seed) for seed in range(num_models)]
        self.optimizers = optimizers_over(self.models, num_optimizers, fused)
        self.num_losses, self.own = num_losses, own
        self.amp = MixedPrecision(self.models, self.optimizers, level, num_losses=num_losses if own else 1)
        self.scales = [Simulated() for _ in range(num_losses if own else 1)]

    def backward(self, step, strike):
        """Backpropagate all losses; return which parameter was struck."""
        struck = None
        for number in range(self.num_losses):
            with self.amp.autocast():
                loss = loss_of(self.models, number, self.num_losses, step)
            self.amp.backward(loss, loss_id=number if self.own else 0)
            if strike is not None and strike[:2] == (step, number):
                struck = victims(self.models, number, self.num_losses)[strike[2]]
                struck.grad[0, 1] = float("inf")
        return struck

    def check_scales(self, step, strike):
        struck = strike is not None and strike[0] == step
        for number, scale in enumerate(self.scales):
            scale.update(struck and (not self.own or number == strike[1]))
        if self.amp.policy.loss_scale.mode == "dynamic":
            assert self.amp.loss_scale.flatten().tolist() == [scale.scale for scale in self.scales]

    def check_weights(self, skips):
        """Compare with FP32 without mezzo: plain backward passes, and the skipped steps left out.

        Args:
            skips: The steps that each optimizer left out.
        """
        plain = [Pair(seed) for seed in range(len(self.models))]
        built = optimizers_over(plain, len(self.optimizers))
        for step in range(len(self.scales[0].trace)):
            for optimizer in built:
                optimizer.zero_grad()
            for number in range(self.num_losses):
                loss_of(plain, number, self.num_losses, step).backward()
            for optimizer, skipped in zip(built, skips, strict=True):
                if step not in skipped:
                    optimizer.step()
        wanted = [param for optimizer in built for param in optimizer.param_groups[0]["params"]]
        for mine, theirs in zip(self.amp.master_params(), wanted, strict=True):
            assert torch.equal(mine.detach(), theirs.detach())
        for mine, theirs in zip(self.models, plain, strict=True):
            for low, wide in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(low, wide.to(low.dtype))


def check(run, strike, steps=STEPS):
    for step in range(steps):
        struck = run.backward(step, strike) is not None
        result = run.amp.step()
        run.amp.zero_grad()
        assert bool(result.skipped) == struck
        run.check_scales(step, strike)
        assert result.next_scale.tolist() == run.amp.loss_scale.tolist() or run.amp.policy.loss_scale.mode == "none"
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
#: How many losses, and whether each has a scale of its own.
LOSSES = {"1 loss": (1, False), "shared": (2, False), "own": (2, True)}


@pytest.mark.parametrize(
    "level, num_optimizers, num_models, losses", pairwise(list(FP16), [1, 2], [1, 2, 3], list(LOSSES))
)
def test_weights_and_scales_are_exact_wherever_an_infinity_strikes(level, num_optimizers, num_models, losses):
    num_losses, own = LOSSES[losses]
    for strike in strikes(num_losses):
        check(Run(FP16[level], num_optimizers, num_models, num_losses, own), strike)


@pytest.mark.parametrize("level, losses", thinned(BF16, LOSSES, every=2))
def test_bf16_with_and_without_a_scale(level, losses):
    num_losses, own = LOSSES[losses]
    for strike in strikes(num_losses, at=(0, 1)):
        check(Run(BF16[level], 2, 2, num_losses, own), strike, steps=3)


@pytest.mark.parametrize("level, losses", thinned(FP16, LOSSES, every=2))
def test_fused_optimizers(level, losses):
    num_losses, own = LOSSES[losses]
    for strike in strikes(num_losses):
        check(Run(FP16[level], 2, 2, num_losses, own, fused=True), strike)


@pytest.mark.parametrize("level, num_models, losses", pairwise(list(FP16), [1, 3], list(LOSSES)))
def test_optimizers_that_step_one_by_one(level, num_models, losses):
    """Only the one whose gradients overflowed is skipped, and an iteration moves a scale once, whoever comes first."""
    num_losses, own = LOSSES[losses]
    for strike in strikes(num_losses, at=(1, 2)):
        run = Run(FP16[level], 2, num_models, num_losses, own)
        skips = [set(), set()]
        for step in range(STEPS):
            struck = run.backward(step, strike)
            for optimizer, skipped in zip(run.optimizers, skips, strict=True):
                of_this = [id(param) for param in leaves(run, optimizer)]
                if id(struck) in of_this:
                    skipped.add(step)
                assert bool(run.amp.step(optimizer).skipped) == (id(struck) in of_this)
            run.amp.zero_grad()
            run.check_scales(step, strike)
        run.check_weights(skips)


def leaves(run, optimizer):
    """The models' parameters that an optimizer updates, as :func:`optimizers_over` dealt them out."""
    params = [param for model in run.models for param in model.parameters()]
    return params[run.optimizers.index(optimizer) :: len(run.optimizers)]
