"""What goes wrong in users' code, or is called wrongly, and must leave the session whole."""

import contextlib

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .loop import Loop, passes


class BoomError(Exception):
    """Not one of mezzo's."""


def boom(*_):
    raise BoomError


class Faults(Loop):
    """Calls that are refused, and exceptions from outside."""

    @rule(which=st.integers(0, 7))
    def wrong_call(self, which):
        amp, model = self.amp, self.subject.model
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with amp.autocast():
            vector = model(torch.eye(2))["first.weight"]
        loss = vector.float().sum() + sum(param.float().sum() for param in model.parameters())
        calls = [
            lambda: amp.backward(vector),
            lambda: amp.backward(loss.detach()),
            lambda: amp.backward(loss, loss_id=self.config.losses),
            lambda: amp.backward(loss, stranger),
            lambda: amp.step(stranger),
            lambda: amp.unscale_(stranger),
            lambda: amp.load_state_dict({"version": 0}),
            lambda: amp.stats(self.config.losses),
        ]
        self.refused(calls[which])

    @precondition(lambda self: self.oracle.is_open)
    @rule(number=st.integers(0, 1))
    def foreign_step(self, number):
        """A user's own ``optimizer.step()`` behind the session's back."""
        number %= len(self.oracle.groups)
        group = self.oracle.groups[number]
        assume(group.window is not None and any(group.lr.values()))  # without a rate it is how torch makes its state
        self.refused(self.subject.optimizers[number].step, "behind the session's back")

    # Exceptions --------------------------------------------------------------------------------------------------

    @rule(trains=st.booleans())
    def exception_in_forward(self, trains):
        before, hook = self.subject.bits(), self.subject.model.second.register_forward_hook(boom)
        with (
            contextlib.closing(_Removed(hook)),
            pytest.raises(BoomError),
            torch.set_grad_enabled(trains),
            self.amp.autocast(),
        ):
            self.subject.model(torch.eye(2))
        assert not torch.is_autocast_enabled("cpu")
        assert self.subject.bits() == before

    @precondition(lambda self: self.window_calls() < 4)
    @rule(batch=passes, loss=st.integers(0, 1), early=st.booleans())
    def exception_in_backward(self, batch, loss, early):
        """Before any gradient was made, after which the window goes on; or in the middle, after which it is cleared."""
        loss %= self.config.losses
        value, _, finite = self.loss({**batch, "kind": "plain"}, loss)
        assume(value.requires_grad and self.oracle.weights["first.weight"].trains)
        hook = value.register_hook(boom) if early else self.subject.model.first.weight.register_hook(boom)
        with contextlib.closing(_Removed(hook)), pytest.raises(BoomError):
            self.amp.backward(value, loss_id=loss)
        self.oracle.begin(loss, self.oracle.groups, finite=finite)
        if not early:
            self.clear("session")


class _Removed:
    """A hook that is taken off when it is closed."""

    def __init__(self, hook):
        self.close = hook.remove
