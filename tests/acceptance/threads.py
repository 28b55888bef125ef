"""A second thread: what it does with a model of its own, while the program's passes and steps run."""

import contextlib
import threading

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

import mezzo
from mezzo.errors import NumericsError

from .loop import MOST_CALLS, Loop, needs, passes
from .rules import LR
from .subject import array
from .twins import rule

#: Seconds after which a thread waits for the other for ever.
LIMIT = 60.0


def beside(work):
    """Run ``work`` in another thread while this one waits, and raise here what it raises there."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "two threads wait for each other"
    if errors:
        raise errors[0]


class Threads(Loop):
    """Another thread trains a plain model, or one in a session of its own, from beginning to end."""

    @needs("broken passes")
    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.driver.may_add(self.oracle))
    @rule(
        batch=passes,
        where=st.sampled_from(["beside", "in a pass", "in a step"]),
        what=st.sampled_from(["plain", "session"]),
    )
    def second_thread(self, batch, where, what):
        work = self.trains_plainly if what == "plain" else self.trains_in_a_session
        if where == "beside":
            beside(work)
            return
        if where == "in a pass":
            self.passed(batch, lambda value: [value.register_hook(lambda _: beside(work)), value][1])
            return
        if self.config.level == "O3" and self.oracle.clip is not None:
            return  # low gradients are clipped in place for a hook
        self.backward(batch, None)
        group = self.oracle.groups[0]
        if group.window is None or not group.gradients:
            return
        handle = self.subject.optimizers[0].register_step_pre_hook(lambda *_: beside(work))
        with handle, contextlib.suppress(NumericsError):
            self.take_step([group], lambda: self.driver.step(self.chosen(0)[1]))
        self.clear("session")

    def trains_plainly(self):
        self.foreign.loss(3, "plain").backward()
        self.foreign.step()

    def trains_in_a_session(self):
        model = torch.nn.Linear(2, 2, bias=False)
        weight = array(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        amp = mezzo.MixedPrecision(model, optimizer, "O1,dtype=bfloat16,loss_scale=64")
        with amp.autocast():
            output = model(torch.eye(2))
            loss = (output - output.detach()).float().sum()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
        amp.close()
        expected = (weight.astype(np.float32) - np.float32(LR)).astype(np.float64)
        assert np.array_equal(array(model.weight), expected), f"in a thread: {array(model.weight)}, not {expected}"
