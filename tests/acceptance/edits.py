"""What users do between two calls of the session: weights and gradients edited, layers frozen and added."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from .loop import WIDTHS, Loop, needs, some
from .near import rounded
from .subject import NAMES, array
from .twins import rule

names = st.sampled_from(NAMES)
hows = st.sampled_from(["half", "zero", "fill", "clamp"])

#: Ways to edit a tensor in place, and what they do to numbers.
EDITS = {
    "half": (lambda t: t.mul_(0.5), lambda x: x * 0.5),
    "zero": (lambda t: t.zero_(), np.zeros_like),
    "fill": (lambda t: t.fill_(1.5), lambda x: x * 0.0 + 1.5),
    "clamp": (lambda t: t.clamp_(-0.25, 0.25), lambda x: np.clip(x, -0.25, 0.25)),
}


class Edits(Loop):
    """Edits of what the session knows, by whatever torch offers for it."""

    @rule(name=names, how=hows, way=st.sampled_from(["in place", "in data", "other data"]))
    def edit_weight(self, name, how, way):
        weight, param = self.oracle.weights[name], self.subject.param(name)
        if way != "in place" and self.window_calls():
            return  # documented: .data inside an open window is not seen by the casts of FP32 weights
        apply, numbers = EDITS[how]
        if way == "in place":
            with torch.no_grad():
                apply(param)
        elif way == "in data":
            apply(param.data)
        else:
            param.data = apply(param.data.clone())
        weight.exact = self.kept(name, numbers(weight.exact), elsewhere=way == "other data")

    def kept(self, name, value, *, elsewhere=False):
        """What a weight holds of a value: all of it, as long as it lies in memory of the program's own."""
        weight, values = self.oracle.weights[name], self.subject.exact(name)
        whole = rounded(value, weight.dtype)
        if weight.half == "float16" and (elsewhere or np.array_equal(values, whole)):
            return whole
        return weight.keep(value)

    @needs("reading anew")
    @rule(name=names, how=hows, widths=st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS)))
    def edit_inside_a_region(self, name, how, widths):
        """A weight is read anew where it was written between two uses in one region."""
        weight, param = self.oracle.weights[name], self.subject.param(name)
        with self.driver.region():
            self.outputs(widths)
            with torch.no_grad():
                EDITS[how][0](param)
            weight.exact = self.kept(name, EDITS[how][1](weight.exact))
            self.outputs(widths)

    @needs("swapping")
    @rule(name=names)
    def swap_weight(self, name):
        """An average of weights stands in for a forward pass, and the weight comes back to the bit."""
        weight, param = self.oracle.weights[name], self.subject.param(name)
        if weight.dtype != "float32" or self.window_calls():
            return
        backup, before = param.data, weight.exact
        param.data, weight.exact = torch.full(param.shape, 0.7), np.full(param.shape, np.float32(0.7), np.float64)
        with self.driver.region():
            self.outputs((1.0, 1.0))
        param.data, weight.exact = backup, before
        with self.driver.region():
            self.outputs((1.0, 1.0))

    @needs("session")
    @rule(number=st.integers(0, 1), how=hows)
    def edit_masters(self, number, how):
        """What a program writes to all parameters of an optimizer, by apex's name for them."""
        number %= len(self.oracle.groups)
        with torch.no_grad():
            for master in self.amp.master_params(self.subject.optimizers[number]):
                EDITS[how][0](master)
        for name in self.oracle.groups[number].members:
            weight = self.oracle.weights[name]
            weight.exact = self.kept(name, EDITS[how][1](weight.exact))

    # Gradients -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.is_open)
    @rule(name=names, how=st.sampled_from(["half", "zero", "inf", "assign", "drop"]))
    def edit_gradient(self, name, how):
        group, holder = self.oracle.owner(name), self.subject.param(name)
        if group is None or group.window is None or name not in group.gradients or holder.grad is None:
            return
        group.touch()
        if how in ("assign", "drop"):
            group.window.assigned.add(name)
        with torch.no_grad():
            if how == "drop":
                holder.grad = None
                del group.gradients[name]
            elif how == "assign":
                holder.grad = holder.grad * 0.5
                group.gradients[name] = group.gradients[name] * 0.5
            else:
                numbers = {"half": lambda x: x * 0.5, "zero": np.zeros_like, "inf": lambda x: x * 0.0 + np.inf}
                {"half": lambda t: t.mul_(0.5), "zero": lambda t: t.zero_(), "inf": lambda t: t.fill_(np.inf)}[how](
                    holder.grad
                )
                group.gradients[name] = numbers[how](group.gradients[name])

    @needs("grad")
    @rule(
        name=names, row=st.integers(0, 2), column=st.integers(0, 1),
        factor=st.sampled_from([1.0, 0.5, 2.0, 4.0]),
    )  # fmt: skip
    def gradient_of_inputs(self, name, row, column, factor):
        """``amp.grad``: a row of the weight itself, times what it is differentiated by."""
        rows, columns = self.config.shapes[name]
        x = torch.eye(columns, requires_grad=True)
        factors = torch.zeros(columns, rows)
        factors[column % columns, row % rows] = factor
        with self.driver.region():
            value = (self.called(x)[name] * factors).sum()
        (gradient,) = self.amp.grad(value, x)
        self.oracle.commit()
        ways = [self.row(name, array(factors), number) for number in self.scales_of_grad()]
        assert any(np.array_equal(array(gradient), expected, equal_nan=True) for way in ways for expected in way), (
            f"{gradient}, and not {ways}"
        )
        if self.oracle.scale.is_carried:
            self.oracle.inner |= not np.isfinite(array(gradient)).all()

    def scales_of_grad(self):
        """What ``amp.grad`` may multiply by: each call has its own scale where the loss's is dynamic."""
        scale = self.oracle.scale
        return 2.0 ** np.arange(15, -30, -1) if scale.mode == "dynamic" else [scale.now]

    def row(self, name, factors, scale):
        """What a scale leaves of a row of a weight, times what it is differentiated by."""
        computes = self.config.computes(name)
        output = rounded(rounded(factors * scale, "float32"), computes)
        return [rounded(_product(output, seen), computes) / scale for seen in self.seen(name)]

    # What is trained, and how fast -----------------------------------------------------------------------------

    @needs("freezing")
    @rule(name=names, trains=st.booleans())
    def freeze(self, name, trains):
        self.subject.param(name).requires_grad_(trains)
        self.oracle.weights[name].trains = trains

    @rule(number=some, lr=st.sampled_from([0.0, 2.0**-6, 2.0**-4, 0.01]), as_tensor=st.booleans())
    def change_learning_rate(self, number, lr, as_tensor):
        groups, _ = self.chosen(number)
        for group, optimizer in zip(self.oracle.groups, self.subject.optimizers, strict=True):
            if any(group is other for other in groups):
                for options in optimizer.param_groups:
                    options["lr"] = torch.tensor(lr) if as_tensor and self.config.library == "mezzo" else lr
                rounds = as_tensor and self.config.library == "mezzo"
                group.lr = dict.fromkeys(group.lr, float(np.float32(lr)) if rounds else lr)

    @needs("clipping")
    @rule(clip=st.sampled_from([None, 1.0, 0.25, 0.0, -1.0, float("nan"), float("inf"), True]))
    def change_clipping(self, clip):
        def change():
            self.amp.max_grad_norm = clip

        if clip is None or (clip in (1.0, 0.25) and clip is not True):
            change()
            self.oracle.clip = clip
        elif clip != float("inf"):
            self.refused(change, "max_grad_norm")

    @precondition(lambda self: self.oracle.owner("late.weight") is None and not self.oracle.is_open)
    @rule(number=st.integers(0, 1))
    def add_group(self, number):
        if self.subject.param("late.weight").grad is not None:
            return
        number %= len(self.oracle.groups)
        self.subject.add_late(number)
        self.oracle.add("late.weight", number)


def _product(output, weight):
    """Rows of a weight, picked by a matrix with one entry, so that infinity times zero is not summed up."""
    return np.array([sum((o * weight[i] for i, o in enumerate(row) if o), np.zeros(weight.shape[1])) for row in output])
