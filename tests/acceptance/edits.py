"""What users do between two calls of the session: weights, masters and gradients edited, layers frozen and added."""

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .loop import WIDTHS, Loop, some
from .near import rounded
from .subject import NAMES, array

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
        assume(weight.pending != "exact")
        # Documented: .data inside an open window is not seen, nor by a master that stands beside its weight.
        assume(way == "in place" or not self.window_calls())
        assume(way != "in data" or weight.form != "master")
        apply, numbers = EDITS[how]
        if way == "in place":
            with torch.no_grad():
                apply(param)
        elif way == "in data":
            apply(param.data)
        else:
            param.data = apply(param.data.clone())
        weight.edit(rounded(numbers(weight.low), weight.dtype))

    @rule(name=names, how=hows, widths=st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS)))
    def edit_inside_a_region(self, name, how, widths):
        """A weight is read anew where it was written between two uses in one region."""
        assume(self.driver.reads_anew)
        weight, param = self.oracle.weights[name], self.subject.param(name)
        assume(weight.pending != "exact")
        with self.driver.region():
            self.outputs(widths)
            with torch.no_grad():
                EDITS[how][0](param)
            weight.edit(rounded(EDITS[how][1](weight.low), weight.dtype))
            self.outputs(widths)

    @rule(name=names, how=hows)
    def edit_master(self, name, how):
        weight = self.oracle.weights[name]
        assume(self.driver.is_session)  # without one there is no master_params()
        assume(weight.form == "master" and weight.pending != "low")
        masters = {id(master) for master in self.driver.master_params()}
        master = self.subject.updated(name)
        assert id(master) in masters
        with torch.no_grad():
            EDITS[how][0](master)
        weight.exact, weight.pending = rounded(EDITS[how][1](weight.exact), "float32"), "exact"

    # Gradients -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.is_open)
    @rule(name=names, how=st.sampled_from(["half", "zero", "inf", "assign", "drop"]), of_master=st.booleans())
    def edit_gradient(self, name, how, of_master):
        group = self.oracle.owner(name)
        assume(group is not None and group.window is not None and name in group.gradients)
        holder = self.subject.updated(name) if of_master else self.subject.param(name)
        assume(holder.grad is not None)
        assume(not of_master or (how not in ("assign", "drop") and name not in group.window.assigned))
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

    @precondition(lambda self: self.driver.differentiates)
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
        (found,) = self.amp.grad(value, x)
        self.oracle.commit()
        scale, computes = self.oracle.scale, self.config.computes(name)
        arrives = self.config.dtype if self.config.level in ("O2", "O3") else computes
        output = rounded(rounded(array(factors) * scale.now, "float32"), arrives)
        expected = rounded(rounded(_product(output, self.seen(name)), computes), arrives) / scale.now
        assert np.array_equal(array(found), expected, equal_nan=True)
        if scale.is_carried:
            self.oracle.inner |= not np.isfinite(expected).all()

    # What is trained, and how fast -----------------------------------------------------------------------------

    @rule(name=names, trains=st.booleans())
    def freeze(self, name, trains):
        self.subject.param(name).requires_grad_(trains)
        self.oracle.weights[name].trains = trains

    @rule(number=some, lr=st.sampled_from([0.0, 2.0**-6, 2.0**-4, 0.01]), as_tensor=st.booleans())
    def change_learning_rate(self, number, lr, as_tensor):
        groups, _ = self.chosen(number)
        for group, optimizer in zip(self.oracle.groups, self.subject.optimizers, strict=True):
            if any(group is each for each in groups):
                for options in optimizer.param_groups:
                    options["lr"] = torch.tensor(lr) if as_tensor and self.config.library == "mezzo" else lr
                rounds = as_tensor and self.config.library == "mezzo"
                group.lr = dict.fromkeys(group.lr, float(np.float32(lr)) if rounds else lr)

    @precondition(lambda self: self.driver.clips)
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
        assume(self.subject.param("late.weight").grad is None)
        # Without a session nobody keeps the FP32 values of weights that no optimizer has.
        assume(self.driver.is_session or self.config.level != "O2")
        number %= len(self.oracle.groups)
        self.subject.add_late(number)
        self.oracle.add("late.weight", number, *self.config.stored("late.weight"))
        if self.config.level == "O2":
            self.goes_on_from_what_it_was(self.oracle.weights["late.weight"])

    def goes_on_from_what_it_was(self, weight):
        """A weight that no optimizer updated had an FP32 value before the session."""
        before = self.subject.before
        expected = np.where(rounded(before, weight.dtype) == weight.low, before, weight.low)
        self.amp.state_dict()  # as the next backward pass does, it hands that over
        self.oracle.commit()
        exact = self.subject.exact("late.weight")
        error = 2.0**-40 if weight.form == "split" and weight.dtype == "float16" else 0.0
        assert (np.abs(exact - expected) <= error).all(), f"late.weight: {exact} for {expected}"
        weight.exact, weight.low = exact, weight.round(exact)


def _product(output, weight):
    """Rows of a weight, picked by a matrix with one entry, so that infinity times zero is not summed up."""
    return np.array([sum((o * weight[i] for i, o in enumerate(row) if o), np.zeros(weight.shape[1])) for row in output])
