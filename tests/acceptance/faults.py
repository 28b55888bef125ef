"""What goes wrong in users' code, or is called wrongly, and must leave the session whole."""

import contextlib

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from mezzo.errors import NumericsError

from .checkpoints import Checkpoints
from .interrupt import Interrupt, lines
from .loop import MOST_CALLS, needs, passes, some
from .subject import BoomError
from .twins import rule


def boom(*_):
    raise BoomError


class Faults(Checkpoints):
    """Calls that are refused, exceptions from outside, and Ctrl-C at any line."""

    @needs("session")
    @rule(which=st.integers(0, 5))
    def wrong_call(self, which):
        amp, model = self.amp, self.subject.model
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with self.driver.region():
            vector = self.driver.model(torch.eye(2))["first.weight"]
        loss = vector.float().sum() + sum(param.float().sum() for param in model.parameters())
        calls = [
            lambda: amp.backward(vector),
            lambda: amp.backward(loss.detach()),
            lambda: amp.backward(loss, stranger),
            lambda: amp.step(stranger),
            lambda: amp.unscale_(stranger),
            lambda: amp.load_state_dict({"version": 0}),
        ]
        self.refused(calls[which])

    @needs("session")
    @precondition(lambda self: self.oracle.is_open and not self.oracle.is_plain)
    @rule(number=st.integers(0, 1))
    def foreign_step(self, number):
        """A user's own ``optimizer.step()`` behind the session's back."""
        number %= len(self.oracle.groups)
        group = self.oracle.groups[number]
        if group.window is not None and group.gradients and any(group.lr.values()):
            self.refused(self.subject.optimizers[number].step, "behind the session's back")

    # Exceptions --------------------------------------------------------------------------------------------------

    @rule(trains=st.booleans())
    def exception_in_forward(self, trains):
        before, hook = self.subject.bits(), self.subject.model.second.register_forward_hook(boom)
        with (
            contextlib.closing(_Removed(hook)),
            pytest.raises(BoomError),
            torch.set_grad_enabled(trains),
            self.driver.region(),
        ):
            self.driver.model(torch.eye(2))
        assert not torch.is_autocast_enabled("cpu")
        assert self.subject.bits() == before

    @needs("broken passes")
    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.driver.may_add(self.oracle))
    @rule(batch=passes, early=st.booleans())
    def exception_in_backward(self, batch, early):
        """Before any gradient was made, after which the window goes on; or in the middle, after which it is cleared."""
        before = self.oracle.copy()
        value, reached, _ = self.loss({**batch, "kind": "plain"})
        if not (value.requires_grad and self.oracle.weights["first.weight"].trains):
            self.oracle = before  # a scale that waits moves with a pass
            return
        hook = value.register_hook(boom) if early else self.subject.model.first.weight.register_hook(boom)
        with contextlib.closing(_Removed(hook)), pytest.raises(BoomError):
            self.driver.backward(value, None)
        groups = self.driver.groups(self.oracle, self.oracle.groups, reached.keys())
        self.oracle.begin(groups)
        self.oracle.accumulate(groups, {}, finite=True)
        if not early:
            self.clear("session")

    @needs("broken passes")
    @precondition(lambda self: self.oracle.is_open)
    @rule(number=st.integers(0, 1))
    def exception_before_an_optimizer(self, number):
        """A hook before the step of one optimizer raises: no weight is written, and nothing is counted."""
        number %= len(self.oracle.groups)
        group, optimizer = self.oracle.groups[number], self.subject.optimizers[number]
        if group.window is None or not group.gradients:
            return
        whole, taken = self.oracle.copy(), self.driver.taken()
        hook = optimizer.register_step_pre_hook(boom)
        with contextlib.closing(_Removed(hook)), contextlib.suppress(BoomError, NumericsError):
            self.driver.step(optimizer)
        if self.driver.taken() != taken:
            assert whole.step([whole.groups[number]]).skipped
            self.oracle = whole
        self.update_if_it_waits()
        self.clear("session")

    @needs("session", "broken passes")
    @precondition(lambda self: self.config.library == "own" and not self.oracle.is_open)
    @rule(batch=passes, number=st.integers(0, 1), how=st.sampled_from(["before", "with a state", "half-way"]))
    def exception_in_an_optimizer(self, batch, number, how):
        """Half-way is where a weight was written: a checkpoint heals that; before it, the step can be taken again."""
        self.update_if_it_waits()
        self.clear("session")
        self.save()
        self.backward(batch, None)
        number %= len(self.oracle.groups)
        group, optimizer = self.oracle.groups[number], self.subject.optimizers[number]
        if group.window is None or not group.gradients:
            return
        _, given = self.chosen(number)
        whole, optimizer.fails = self.oracle.copy(), how
        with contextlib.suppress(BoomError, NumericsError):
            self.driver.step(given)
        if optimizer.fails is not None:
            optimizer.fails = None
            assert whole.step([whole.groups[number]]).skipped
            self.oracle = whole
        elif how != "half-way" and self.oracle.clip is not None:
            pass  # as in plain torch the gradients are clipped by now
        elif how != "half-way":
            self.take_step([group], lambda: self.driver.step(given))
        else:
            self.refused(lambda: self.driver.step(given), "an update was ended half-way")
            _, saved, oracle = self.checkpoint
            self.subject.load(saved, [0, 1, 2, 3])
            self.oracle = oracle.copy().loaded(self.oracle)
        self.update_if_it_waits()
        self.clear("session")

    # Ctrl-C ------------------------------------------------------------------------------------------------------

    @needs("signals")
    @precondition(lambda self: self.oracle.is_open)
    @rule(number=some, line=lines)
    def interrupted_step(self, number, line):
        """A signal at whatever line: the step is taken whole, or nothing is, and it can be taken again."""
        groups, optimizers = self.chosen(number)
        groups = [group for group in groups if group.window is not None and group.gradients]
        if not groups:
            return
        taken = self.driver.taken()
        with contextlib.suppress(NumericsError), Interrupt(line):
            self.driver.step(optimizers)
        assert torch.is_grad_enabled()
        if self.driver.taken() == taken:
            self.take_step(groups, lambda: self.driver.step(optimizers))
        else:
            self.adopt(self.oracle.step(groups).updates)
        self.update_if_it_waits()
        self.clear("session")

    @needs("signals", "session", "broken passes")
    @precondition(lambda self: self.window_calls() < MOST_CALLS)
    @rule(batch=passes, line=lines, unscales=st.booleans())
    def interrupted_pass(self, batch, line, unscales):
        """In the midst of a pass, or of unscaling, gradients are whatever they are: clearing them begins anew."""
        before = self.oracle.copy()
        value, gradients, _ = self.loss(batch)
        if not gradients or not value.requires_grad:
            self.oracle = before
            return
        with Interrupt(line):
            self.driver.backward(value, None)
            if unscales and not self.oracle.is_plain:
                for optimizer in self.subject.optimizers:
                    if any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
                        self.driver.unscale_(optimizer)
        assert torch.is_grad_enabled()
        self.clear("session")
        self.driver.state_dict()  # a scale that was to move has moved
        self.oracle.commit()

    @needs("signals", "session")
    @precondition(lambda self: not self.oracle.is_open)
    @rule(line=lines)
    def interrupted_save(self, line):
        """A look at the state changes nothing, however it ends."""
        self.save()
        before = self.subject.bits()
        with Interrupt(line):
            self.subject.save()
        assert self.subject.bits() == before


class _Removed:
    """A hook that is taken off when it is closed."""

    def __init__(self, hook):
        self.close = hook.remove
