"""Saving, loading in any order into the same session or another, closing, and going on."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from .drivers import DRIVERS
from .interrupt import Interrupt, lines
from .loop import Loop, needs
from .subject import Subject, array, fresh_weights
from .twins import rule

orders = st.permutations([0, 1, 2, 3])


class Checkpoints(Loop):
    """State that leaves a session, and comes back."""

    checkpoint = None

    @rule()
    def save(self):
        """Between two steps; inside of an accumulation window it is refused."""
        if self.oracle.is_open:
            if self.driver.has("session"):
                self.refused(self.amp.state_dict, "inside an accumulation window")
            return
        self.update_if_it_waits()
        saved = self.subject.save()
        self.oracle.commit()
        self.checkpoint = self.config, saved, self.oracle.copy()
        self.layout = self.subject.layout()

    @precondition(lambda self: self.checkpoint is not None)
    @rule(order=orders, line=st.one_of(st.none(), lines))
    def load_into_the_same(self, order, line):
        """Of a load that Ctrl-C has ended, nothing is left by another one."""
        config, saved, oracle = self.checkpoint
        if config != self.config or self.layout != self.subject.layout():
            return
        if not self.driver.has("session"):
            self.clear("session")
        if self.oracle.is_open:
            states = self.subject.read(saved)
            self.refused(lambda: self.amp.load_state_dict(states["session"]), "inside an accumulation window")
            return
        if line is not None and self.driver.has("signals"):
            with Interrupt(line):
                self.subject.load(saved, order)
        self.subject.load(saved, order)
        oracle = oracle.copy().loaded(self.oracle)
        self.store(oracle, self.oracle)
        self.oracle = oracle

    @precondition(lambda self: self.checkpoint is not None)
    @rule(order=orders, level=st.sampled_from([None, None, "O0", "O1", "O2"]), seed=st.integers(4, 6))
    def load_into_another(self, order, level, seed):
        config, saved, oracle = self.checkpoint
        config = config if level is None or config.level == "O3" else under(config, level)
        late = next((i for i, group in enumerate(oracle.groups) if "late.weight" in group.members), None)
        if self.layout != as_built(config, late):
            return
        self.subject = Subject(config, fresh_weights(config, seed), late=late)
        for name, weight in oracle.weights.items():
            self.subject.param(name).requires_grad_(weight.trains)
        begun = self.subject.oracle()
        self.subject.load(saved, order)
        oracle = oracle.copy().loaded(begun)
        self.store(oracle, begun)
        if config != self.checkpoint[0]:
            self.continue_under_another_policy(oracle, begun)
        self.oracle = oracle

    def store(self, oracle, now):
        """Weights are stored as they are in the session that has loaded them."""
        for name, weight in oracle.weights.items():
            present = now.weights[name]
            if (weight.dtype, weight.form, weight.half) == (present.dtype, present.form, present.half):
                continue
            weight.dtype, weight.form, weight.half = present.dtype, present.form, present.half
            exact = self.subject.exact(name)
            assert (np.abs(exact - weight.exact) <= weight.grid).all(), name
            weight.exact = exact

    def continue_under_another_policy(self, oracle, begun):
        before, now = oracle.scale, begun.scale
        if (before.mode, before.now if before.mode == "constant" else 0) != (
            now.mode, now.now if now.mode == "constant" else 0,
        ):  # fmt: skip
            now.growths, now.backoffs = before.growths, before.backoffs
            oracle.scale = now

    @needs("session", "closing")
    @rule(level=st.sampled_from(["O0", "O1", "O2"]), same=st.booleans())
    def close(self, level, same):
        amp = self.amp
        self.driver.close()
        for call in (amp.autocast, amp.step, amp.unscale_, amp.state_dict):
            self.refused(call, "after close()")
        old, config = self.oracle, self.config
        for what, mark in self.subject.marks().items():
            assert mark == self.subject.plain.get(what), f"left on {what}: {mark} was {self.subject.plain.get(what)}"
        for name, weight in old.weights.items():
            value = array(self.subject.param(name))
            assert np.array_equal(value, weight.exact), f"{name} after close(): {value} was {weight.exact}"
        self.subject.begin(config if same and config.level != "O3" else under(config, level))
        self.oracle = self.subject.oracle().continuing(old)
        self.checkpoint = None


def as_built(config, late):
    """The layout of a program that nothing has been done to."""
    built = [[["first.weight"], ["second.weight"]]] if not config.apart else [[["first.weight"]], [["second.weight"]]]
    if not config.apart and (config.library, config.rule) != ("fused", "SGD"):
        built = [[["first.weight", "second.weight"]]]
    if late is not None and late < len(built):  # else an optimizer that was added later has it
        built[late].append(["late.weight"])
    return built


def under(config, level):
    """The same run under another level."""
    return DRIVERS[config.style].suited(replace(config, level=level))
