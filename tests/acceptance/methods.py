"""Methods of a model that are called from outside, and outputs that a program goes on with."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition

from .edits import names
from .loop import MOST_CALLS, WIDTHS, Loop, drawn, needs
from .near import TINY, UNIT, rounded
from .subject import TURN, array
from .twins import rule

widths = st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS))


class Methods(Loop):
    """What is no call of the model computes what plain torch computes."""

    @property
    def dtypes(self):
        """The dtypes of buffers, which a session under O3 makes low."""
        low = getattr(torch, self.config.dtype) if self.config.level == "O3" else torch.float32
        return {name: low for name, _ in self.subject.model.named_buffers()}

    @precondition(lambda self: self.begun_at != "O3")
    @rule(widths=widths)
    def predict(self, widths):
        """Ends in numpy, which has no bfloat16."""
        for name, output in self.subject.model.predict(torch.diag(torch.tensor(widths))).items():
            assert output.dtype == np.float32, f"{name}: {output.dtype} in numpy"
            exact = self.oracle.weights[name].exact
            ways = [rounded(weight * np.array(widths), "float32") for weight in (exact, *self.seen(name))]
            ways += [rounded(weight, self.config.computes(name)) for weight in ways]
            assert np.logical_or.reduce([weight == output.T for weight in ways]).all(), f"{name}: {output.T} of {exact}"

    @rule(name=names)
    def project(self, name):
        """A method that writes weights computes in FP32."""
        weight = self.oracle.weights[name]
        self.subject.model.project(name)
        weight.exact = self.turned(name, self.subject.exact(name))

    def turned(self, name, values):
        """What is near a weight that was turned."""
        weight = self.oracle.weights[name]
        turn = np.array(TURN, np.float32).astype(np.float64)
        unit, tiny = UNIT[weight.dtype], TINY[weight.dtype]
        expected, sizes = weight.exact @ turn, np.abs(weight.exact) @ np.abs(turn)
        assert (np.abs(values - expected) <= 8 * unit * sizes + tiny + weight.grid).all(), (
            f"{name}: {values}: {expected}"
        )
        return values

    @needs("swapping")
    @precondition(lambda self: not self.oracle.is_open)
    @rule(is_given=st.booleans())
    def fuse(self, is_given):
        """A weight made of others has its dtype; then the old one comes back."""
        model, weight = self.subject.model, self.oracle.weights["first.weight"]
        before = model.first.weight
        model.fuse(*[torch.tensor(TURN, dtype=before.dtype)] * is_given)
        values, dtype = array(model.first.weight), model.first.weight.dtype
        model.first.weight = before
        if self.driver.train is not None:
            self.driver.capture()  # a graph goes on with the memory that it was recorded with
        assert dtype == before.dtype, f"a weight that a method has made is {dtype}"
        if is_given:  # which the policy's region computes
            unit = max(UNIT[weight.dtype], UNIT[self.config.computes("first.weight")])
            assert np.allclose(
                values, weight.exact @ np.array(TURN), rtol=0, atol=16 * unit * np.abs(weight.exact).max()
            )
        else:
            self.turned("first.weight", values)

    # Outputs -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.driver.may_add(self.oracle))
    @precondition(lambda self: self.oracle.weights["first.weight"].trains)
    @needs("outputs")
    @rule(values=st.integers(0, 99), how=st.sampled_from(["grad", "retain_grad"]))
    def output_of_an_output(self, values, how):
        """An output on which another depends is in its graph."""
        if how == "grad" and not self.driver.has("autograd"):
            return
        before, (rows, columns) = self.oracle.copy(), self.config.shapes["first.weight"]
        scale, factors = self.oracle.next_scale(), drawn(values, True)[: rows * columns].reshape(columns, rows)
        with self.driver.region():
            hidden, output = self.driver.model(torch.eye(columns), chained=True)
            value = (torch.from_numpy(factors).float() * (output - output.detach())).sum()
        if how == "grad":
            (gradient,) = torch.autograd.grad(value, hidden)
            self.oracle, scale = before, 1.0
        else:
            hidden.retain_grad()
            groups = self.driver.groups(self.oracle, self.oracle.groups, {"first.weight"})
            self.driver.backward(value, None)
            gradient = rounded(rounded(factors.T * scale, "float32"), self.config.computes("first.weight"))
            self.oracle.begin(groups)
            self.oracle.accumulate(groups, {"first.weight": gradient}, finite=True)
            gradient = hidden.grad
        assert gradient is not None, "an output without a gradient"
        scaled = rounded(factors * scale, self.config.computes("first.weight"))
        ways = [factors, scaled / scale, scaled]
        assert any(np.array_equal(array(gradient), way) for way in ways), (
            f"an output's gradient: {gradient}, not {factors}"
        )

    @invariant()
    def keeps_dtypes(self):
        """No call changes the dtype of a parameter, which :meth:`agrees` looks at, or of a buffer."""
        for name, buffer in self.subject.model.named_buffers():
            assert buffer.dtype == self.dtypes[name], f"{name} is {buffer.dtype}"
