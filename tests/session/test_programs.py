"""A loss scale must leave no trace: programs of all styles under ``O0,loss_scale=1024`` are plain torch's bit for bit.

A power of two changes no bit of FP32, nor of BF16, so whatever differs is a gradient that somebody has seen scaled, or
unscaled twice. Under ``attach`` a program is as it stands; the other styles have their calls where users write them.
"""

import pytest
import torch

import mezzo
from mezzo.compat.torch import GradScaler
from mezzo.session.scaler import SessionScaler

from .programs import PROGRAMS

POLICY = "O0,loss_scale=1024"


class Plain:
    """torch's own calls; what a program has trained, and what it has looked at."""

    def __init__(self, policy=POLICY):
        self.policy, self.models, self.seen = policy, [], []

    def begin(self, models, *optimizers):
        self.end()
        self.models += models if isinstance(models, list) else [models]

    def end(self):
        """Leave nothing bound."""

    def see(self, *tensors):
        self.seen += [tensor.detach().clone() for tensor in tensors]

    def backward(self, loss, **options):
        loss.backward(**options)

    def unscale_(self, optimizer):
        """Make gradients true where they are not yet."""

    def of_a_leaf(self, leaf):
        """The gradient of what no optimizer has."""
        return leaf.grad

    def forget(self, optimizer):
        """Clear gradients with which no step is taken."""
        optimizer.zero_grad()

    def step(self, optimizer, closure=None):
        optimizer.step() if closure is None else optimizer.step(closure)

    def update(self):
        """End an iteration."""

    def trained(self):
        return [value.clone() for model in self.models for value in model.state_dict().values()] + self.seen


class Attached(Plain):
    amp = None

    def begin(self, models, *optimizers):
        super().begin(models, *optimizers)
        self.amp = mezzo.attach(models, list(optimizers), self.policy)

    def end(self):
        if self.amp is not None:
            self.amp.detach()


class FiveLines(Attached):
    def begin(self, models, *optimizers):
        Plain.begin(self, models, *optimizers)
        self.amp = mezzo.MixedPrecision(models, list(optimizers), self.policy)

    def end(self):
        if self.amp is not None:
            self.amp.close()

    def backward(self, loss, **options):
        self.amp.backward(loss, **options)

    def unscale_(self, optimizer):
        self.amp.unscale_(optimizer)

    def forget(self, optimizer):
        self.amp.zero_grad()

    def step(self, optimizer, closure=None):
        assert not self.amp.step(optimizer, closure=closure).skipped


class OfTorch(Plain):
    """``mezzo.compat.torch``: no session; other leaves have scaled gradients, as with torch's own."""

    scaler = None

    def begin(self, models, *optimizers):
        super().begin(models, *optimizers)
        self.scaler = GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss, **options):
        self.scaler.scale(loss).backward(**options)

    def unscale_(self, optimizer):
        self.scaler.unscale_(optimizer)

    def of_a_leaf(self, leaf):
        return leaf.grad / 1024

    def forget(self, optimizer):
        optimizer.zero_grad()
        self.scaler = GradScaler("cpu", init_scale=1024.0)

    def step(self, optimizer, closure=None):
        self.scaler.step(optimizer)

    def update(self):
        self.scaler.update()


class OfASession(OfTorch):
    """A session's engine as a ``GradScaler``."""

    amp = None

    def begin(self, models, *optimizers):
        Plain.begin(self, models, *optimizers)
        self.amp = mezzo.MixedPrecision(models, list(optimizers), self.policy)
        self.scaler = SessionScaler(self.amp)

    def end(self):
        if self.amp is not None:
            self.amp.close()

    def of_a_leaf(self, leaf):
        return leaf.grad

    def forget(self, optimizer):
        optimizer.zero_grad()

    def step(self, optimizer, closure=None):
        self.scaler.step(optimizer, *([] if closure is None else [closure]))


DRIVERS = {"attach": Attached, "five lines": FiveLines, "GradScaler": OfTorch, "SessionScaler": OfASession}


LOW = ("O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true")


def ran(name, driver):
    """What a program comes to; whatever it has bound is put back."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            PROGRAMS[name](driver)
            return driver.trained()
        finally:
            driver.end()


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {number}: {(mine - theirs).abs().max():g}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_scale_leaves_no_trace(name):
    """In any style; nor does it in bfloat16, in two of them."""
    expected = ran(name, Plain())
    styles = [style for style in DRIVERS if style not in PROGRAMS[name].not_for]
    for style in styles:
        assert_same(ran(name, DRIVERS[style]()), expected)
    for style, policy in zip(styles[:2], LOW, strict=False):
        one, other = (ran(name, DRIVERS[style](policy + scale)) for scale in ("", ",loss_scale=1024"))
        assert_same(one, other)
