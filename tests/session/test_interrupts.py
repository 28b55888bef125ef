"""Ctrl-C leaves a whole step, whichever line of it the signal comes at: all of before, or all of after."""

import contextlib
import itertools
import os
import signal
import sys

import pytest
import torch

import mezzo

from ..support.refusals import bits
from .loops import LOW, built, facts, loss_of

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

    def __exit__(self, error_class, *_):
        sys.settrace(self.before)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return error_class is KeyboardInterrupt

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


class Loop:
    """Training, just before its second step."""

    def __init__(self, begin, policy, optimizer):
        self.model, self.optimizer = built(optimizer)
        self.own = begin is mezzo.attach
        self.amp = begin(self.model, self.optimizer, policy, max_grad_norm=0.5)
        self.number = 0
        self.backward()
        self.step()
        self.backward()

    def backward(self):
        self.number += 1
        self.optimizer.zero_grad() if self.own else self.amp.zero_grad()
        loss = loss_of(self.model, self.number, None if self.own else self.amp)
        loss.backward() if self.own else self.amp.backward(loss)

    def step(self):
        self.optimizer.step() if self.own else self.amp.step()

    def facts(self):
        """All that a step changes."""
        return bits(facts(self.model, self.optimizer, amp=self.amp))

    def go_on(self):
        """Take two steps more, the first of which lets the scale grow; all that there is then."""
        for _ in range(2):
            self.backward()
            self.step()
        self.amp.zero_grad()
        return self.facts(), bits(self.amp.state_dict()), torch.is_grad_enabled()


def interrupt(make, start, stride):
    """Interrupt a step at some of its lines; return how often it had not begun, and how often it was whole."""
    plain = make()
    before = plain.facts()
    plain.step()
    after = plain.facts()
    end = plain.go_on()
    plain.amp.close()
    assert before != after
    counts = [0, 0]
    for number in itertools.count(start, stride):
        loop = make()
        try:
            with Signal(number) as came:
                loop.step()
            if came.where is None:
                return counts
            is_whole = loop.amp.stats().steps == 2
            assert loop.facts() == (after if is_whole else before), came.where
            if not is_whole:
                loop.step()
            assert loop.go_on() == end, came.where
            counts[is_whole] += 1
        finally:
            loop.amp.close()
    raise AssertionError


CASES = [
    (mezzo.MixedPrecision, LOW[2].replace("init=1024", "init=1024,interval=3"), "AdamW"),
    (mezzo.MixedPrecision, LOW[0].replace("init=1024", "init=1024,interval=3"), "mezzo"),
    (mezzo.attach, LOW[3], "mezzo"),
    (mezzo.attach, LOW[2].replace("init=1024", "init=1024,interval=3"), "fused"),
]


@pytest.mark.parametrize("begin, policy, optimizer", CASES)
def test_a_signal_at_some_lines_leaves_a_whole_step(begin, policy, optimizer):
    """At every 131st line, from another one on in each case: all cases together meet most lines that they share."""
    begun, whole = interrupt(
        lambda: Loop(begin, policy, optimizer), 1 + 23 * CASES.index((begin, policy, optimizer)), 131
    )
    assert begun
    assert whole
