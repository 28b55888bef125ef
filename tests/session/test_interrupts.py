"""Ctrl-C leaves a whole step, whichever line of it the signal comes at: all of before, or all of after."""

import contextlib
import copy
import itertools
import os
import signal
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import mezzo

#: The Python files at whose lines the signal comes.
FILES = (os.path.dirname(mezzo.__file__), os.path.dirname(torch.optim.__file__), contextlib.__file__)


class Signal:
    """A real SIGINT at the n-th line that runs in the block; of all lines none when there are fewer.

    Attributes:
        where: Where it came; ``None`` if it did not.
    """

    def __init__(self, number):
        self.left, self.where = number, None

    def __enter__(self):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(self.before)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return kind is KeyboardInterrupt

    def call(self, frame, event, _):
        return self.line if frame.f_code.co_filename.startswith(FILES) else None

    def line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.line


def torch_adamw(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


def torch_fused(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def mezzo_adamw(params):
    return mezzo.optim.AdamW(params, lr=0.01)


class Loop:
    """Training, just before its second step."""

    def __init__(self, policy, make):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = make(self.model.parameters())
        self.begin(policy)
        self.number = 0
        self.backward()
        self.step()
        self.backward()

    def begin(self, policy):
        self.amp = mezzo.MixedPrecision(self.model, self.optimizer, policy, max_grad_norm=0.5)

    def loss(self):
        generator = torch.Generator().manual_seed(self.number)
        x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)
        return functional.cross_entropy(self.model(x).float(), y)

    def backward(self):
        self.number += 1
        self.amp.zero_grad()
        with self.amp.autocast():
            loss = self.loss()
        self.amp.backward(loss)

    def step(self):
        self.amp.step()

    def facts(self):
        """All that a step changes."""
        stats = self.amp.stats()
        exact = [param.detach() for param in self.amp.master_params()]
        state = self.optimizer.state_dict()["state"]
        return copy.deepcopy([self.model.state_dict(), exact, state, self.amp.loss_scale, stats.steps, stats.growths])

    def go_on(self):
        """Take two steps more, the first of which lets the scale grow; all that there is then."""
        for _ in range(2):
            self.backward()
            self.step()
        self.amp.zero_grad()
        return [self.facts(), self.amp.state_dict()["loss_scale"], torch.is_grad_enabled()]


class OwnLoop(Loop):
    """The same by the program's own calls."""

    def begin(self, policy):
        self.amp = mezzo.attach(self.model, self.optimizer, policy, max_grad_norm=0.5)

    def backward(self):
        self.number += 1
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self):
        self.optimizer.step()


def same(one, other):
    flat_one, flat_other = (pytree.tree_flatten(each) for each in (one, other))
    return flat_one[1] == flat_other[1] and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(flat_one[0], flat_other[0], strict=True)
    )


def interrupt(make, start, stride):
    """Interrupt a step at some of its lines; return how often it had not begun, and how often it was whole."""
    plain = make()
    before = plain.facts()
    plain.step()
    after = plain.facts()
    end = plain.go_on()
    plain.amp.close()
    assert not same(before, after)
    found = [0, 0]
    for number in itertools.count(start, stride):
        loop = make()
        try:
            with Signal(number) as came:
                loop.step()
            if came.where is None:
                return found
            is_whole = loop.amp.stats().steps == 2
            assert same(loop.facts(), after if is_whole else before), came.where
            if not is_whole:
                loop.step()
            assert same(loop.go_on(), end), came.where
            found[is_whole] += 1
        finally:
            loop.amp.close()
    raise AssertionError


POLICIES = [
    f"{level},{numbers},emulate=true"
    for level in ("O1", "O2")
    for numbers in ("dtype=float16,loss_scale=dynamic(init=64,interval=3)", "dtype=bfloat16")
]
CASES = list(itertools.product((Loop, OwnLoop), POLICIES, (mezzo_adamw, torch_adamw, torch_fused)))


@pytest.mark.parametrize("kind, policy, make", CASES)
def test_a_signal_at_some_lines_leaves_a_whole_step(kind, policy, make):
    """At every 193rd line, from another one on in each case: all cases together meet most lines that they share."""
    interrupt(lambda: kind(policy, make), 1 + 71 * CASES.index((kind, policy, make)) % 193, 193)


@pytest.mark.slow
@pytest.mark.parametrize("kind, policy, make", CASES[::5])
def test_a_signal_at_any_line_leaves_a_whole_step(kind, policy, make):
    begun, whole = interrupt(lambda: kind(policy, make), 1, 1)
    assert begun > 20
    assert whole > 100
