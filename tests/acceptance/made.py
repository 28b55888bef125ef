"""Gradients that a program makes, or writes: by hand, by surgery, by ``autograd.grad``, in a hook before a step."""

import contextlib

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from mezzo.errors import NumericsError, StateError

from .loop import MOST_CALLS, Loop, Share, clearings, drawn, needs, passes
from .oracle import Window
from .subject import array
from .twins import rule


def nothing_there(self):
    """No gradient, and no pass since the last step."""
    return not any(group.window or group.gradients for group in self.oracle.groups)


class Made(Loop):
    """What stands in ``.grad`` is what a step takes."""

    def write_gradients(self, gradients):
        """Assign what a program has made for the weights that train; it carries what those of an open window do."""
        for group in self.oracle.groups:
            for name in group.members:
                if name in gradients and self.oracle.weights[name].trains:
                    param = self.subject.param(name)
                    param.grad = torch.from_numpy(gradients[name]).to(param.dtype)
                    group.gradients[name] = array(param.grad)
            group.window = (group.window or Window()) if group.gradients else None

    def step_all(self, *, is_told=False):
        """Step each optimizer with what was written, and clear.

        Where gradients carry a scale between two calls, those in a window that a pass has opened do. Of others nothing
        says whether they do, unless a program has been given some without it: they may be refused, but not divided.
        """
        is_told = is_told or self.oracle.is_plain or not self.oracle.scale.is_carried
        for number, group in enumerate(self.oracle.groups):
            if group.gradients:
                is_sure = is_told or group.window.carried is not None
                groups, optimizers = self.chosen(number)
                whole, bits = self.oracle.copy(), self.subject.bits()
                refused = ""
                try:
                    self.take_step(groups, lambda optimizers=optimizers: self.driver.step(optimizers))
                except StateError as error:
                    refused, self.oracle = str(error), whole
                assert not refused or (not is_sure and "unscale_" in refused and self.subject.bits() == bits), refused
        self.clear("session")

    @needs("session", "made")
    @precondition(nothing_there)
    @rule(
        values=st.integers(0, 99), only=st.sampled_from([None, "first.weight", "second.weight"]), inf=st.integers(0, 9)
    )
    def gradients_by_hand(self, values, only, inf):
        """Plain numbers that no pass has made."""
        gradients = self.drawn_gradients(values)
        if only is not None:
            gradients = {only: gradients[only]}
        if inf == 9:
            next(iter(gradients.values()))[:] = np.inf
        self.write_gradients(gradients)
        self.step_all()

    def drawn_gradients(self, values):
        numbers, made = iter(drawn(values, True)), {}
        for name, (rows, columns) in self.config.shapes.items():
            few = np.array([[next(numbers) for _ in range(columns)] for _ in range(min(rows, 3))])
            made[name] = np.resize(few, (rows, columns)).astype(np.float32)
        return made

    @needs("session", "made")
    @precondition(nothing_there)
    @rule(batch=passes, is_amps=st.booleans())
    def gradients_by_autograd(self, batch, is_amps):
        """``autograd.grad``, the session's or torch's, written into ``.grad``."""
        before, batch = self.oracle.copy(), {**batch, "is_coarse": True}
        value, _, _ = self.loss(batch)
        self.oracle = before
        if not value.requires_grad or not self.driver.has("grad" if is_amps else "autograd"):
            return
        plain = Share(self.config, batch, 1.0).gradients
        names = [name for group in before.groups for name in group.members if before.weights[name].trains]
        if not names:
            return
        params = [self.subject.param(name) for name in names]
        made = (self.amp.grad if is_amps else torch.autograd.grad)(value, params)
        if is_amps or self.takes_part:
            self.oracle.commit()
        gradients, overflows = {}, False
        for name, gradient in zip(names, made, strict=True):
            values = array(gradient)
            whole = np.isfinite(values) & (values != plain[name])
            assert not whole.any(), f"{name}: {values}, and not {plain[name]}"
            if not np.isfinite(values).all():
                assert self.may_overflow(batch), f"{name}: {values} for {plain[name]}"
                overflows = True
            gradients[name] = values.astype(np.float32)
        self.write_gradients(gradients)
        self.oracle.inner = self.oracle.inner or (overflows and self.scales_grad(is_amps))
        self.step_all(is_told=is_amps)

    def scales_grad(self, is_amps):
        """Whether what is differentiated carries a scale meanwhile."""
        return self.oracle.scale.is_carried and (is_amps or self.takes_part)

    @property
    def takes_part(self):
        return self.oracle.is_plain and self.driver.has("plain passes")

    def may_overflow(self, batch):
        return self.config.dtype == "float16" or batch["kind"] != "plain"

    @needs("session", "made")
    @precondition(nothing_there)
    @rule(batches=st.tuples(passes, passes), unscales=st.booleans(), clear=clearings)
    def surgery(self, batches, unscales, clear):
        """The backward pass of each loss, whose gradients are copied and cleared; then something is made of them."""
        copies = []
        for batch in batches:
            self.backward({**batch, "kind": "plain", "is_coarse": True}, None)
            if unscales and not self.oracle.is_plain:
                self.unscale(None)
            copies.append({
                name: self.subject.param(name).grad.clone() for group in self.oracle.groups for name in group.gradients
            })  # fmt: skip
            finite = all(np.isfinite(g).all() for group in self.oracle.groups for g in group.gradients.values())
            self.clear(clear.removesuffix(" zeros"))
            if not finite:
                self.clear("session")
                return
        made = {name: array(gradient) + array(copies[1].get(name, gradient)) for name, gradient in copies[0].items()}
        self.write_gradients({name: gradient.astype(np.float32) for name, gradient in made.items()})
        self.step_all(is_told=unscales)

    # In a hook before a step -------------------------------------------------------------------------------------

    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.oracle.clip is None)
    @precondition(lambda self: self.config.level != "O3")
    @rule(batch=passes, number=st.integers(0, 1))
    def step_with_a_hook(self, batch, number):
        """A program's own hook before a step clips what a step takes."""
        self.backward(batch, None)
        number %= len(self.oracle.groups)
        group, optimizer = self.oracle.groups[number], self.subject.optimizers[number]
        if group.window is None or not group.gradients or group.window.assigned:
            return
        expected, seen = group.unscaled(), {}

        def clips(*_):
            for name in group.members:
                gradient = self.subject.param(name).grad
                if gradient is not None and name not in seen:  # one class's step may call another's, hooks and all
                    seen[name] = gradient.dtype, array(gradient)
                    gradient.mul_(0.5)

        group.gradients = {name: gradient * 0.5 for name, gradient in group.gradients.items()}
        handle = optimizer.register_step_pre_hook(clips)
        try:
            self.take_step([group], lambda: self.driver.step(self.chosen(number)[1]), norm=False)
        finally:
            handle.remove()
        for name, (dtype, gradient) in seen.items():
            if np.isfinite(expected[name]).all():
                assert dtype == torch.float32 or self.oracle.weights[name].dtype != "float32", f"{name}: {dtype}"
                assert np.array_equal(gradient, expected[name]), f"{name} in a hook: {gradient}, not {expected[name]}"
        with contextlib.suppress(NumericsError):
            self.clear("session")
