"""What goes wrong in users' code, or is called wrongly, and must leave the session whole."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import mezzo
from mezzo.errors import NumericsError, StateError

from .loop import Loop, passes, some

OURS = str(Path(mezzo.__file__).parent)


class BoomError(Exception):
    """Not one of mezzo's."""


def boom(*_):
    raise BoomError


class Faults(Loop):
    """Calls that are refused, exceptions from outside, and Ctrl-C at any line."""

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

    @precondition(lambda self: self.oracle.is_open)
    @rule(number=st.integers(0, 1), before=st.booleans())
    def exception_in_an_optimizer(self, number, before):
        """A hook before the step of one optimizer raises, and nothing has happened; or one after it, and all has."""
        number %= len(self.oracle.groups)
        group, optimizer = self.oracle.groups[number], self.subject.optimizers[number]
        assume(group.window is not None and (group.gradients or group.window.aside))
        register = optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook
        whole, steps = self.oracle.copy(), self.amp.stats().steps
        hook = register(boom)
        with contextlib.closing(_Removed(hook)), contextlib.suppress(BoomError, NumericsError):
            self.amp.step(optimizer)
        if self.amp.stats().steps == steps:
            assert before  # nothing was written: the weights are as they were
        else:
            verdict = whole.step([whole.groups[number]])
            assert verdict.skipped or not before
            self.oracle = whole
            self.adopt(verdict.updates)
        self.clear("session")

    # Ctrl-C ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.is_open)
    @rule(number=some, line=st.integers(0, 1200))
    def interrupted_step(self, number, line):
        """Whatever line of mezzo's it comes at: the step is taken whole, or nothing is, and it can be taken again."""
        groups, optimizers = self.chosen(number)
        groups = [group for group in groups if group.window is not None]
        assume(any(group.gradients or group.window.aside for group in groups))
        steps = self.amp.stats().steps
        with contextlib.suppress(NumericsError), Interrupt(line) as interrupt:
            self.amp.step(optimizers)
        assert torch.is_grad_enabled()
        if interrupt.came and self.amp.stats().steps == steps:
            if self.config.library != "mezzo" and self.is_marked():
                self.begin(self.config, 0)
                return
            self.take_step(groups, lambda: self.amp.step(optimizers))
        else:
            self.adopt(self.oracle.step(groups).updates)
        self.clear("session")

    def is_marked(self):
        """Whether it came inside another library's step, of which nobody knows how far it got: the session says so."""
        try:
            self.amp.autocast()
        except StateError as error:
            return "interrupted" in str(error)
        return False


class Interrupt:
    """Raise KeyboardInterrupt at the n-th line of mezzo's that runs inside the block, and catch it outside."""

    def __init__(self, line):
        self.left, self.came = line, False

    def _at_call(self, frame, event, _):
        return self._at_line if frame.f_code.co_filename.startswith(OURS) else None

    def _at_line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left < 0 and not self.came:
                self.came = True
                raise KeyboardInterrupt
        return self._at_line

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._at_call)
        return self

    def __exit__(self, kind, error, trace):
        sys.settrace(self._before)
        return kind is KeyboardInterrupt


class _Removed:
    """A hook that is taken off when it is closed."""

    def __init__(self, hook):
        self.close = hook.remove
