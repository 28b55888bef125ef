"""Passes inside passes, and a plain model beside the session's: what carries a scale inside carries none afterwards."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition
from torch.utils.checkpoint import checkpoint

from .loop import MOST_CALLS, Loop, Share, drawn, needs, passes
from .rules import LR, MOMENTUM
from .subject import NAMES, array
from .twins import rule

#: How a loss is computed: what it is computed by may run a pass of its own inside the pass.
WAYS = ("plain", "reentrant", "Function", "leaf", "leaf beside")
ways = st.sampled_from(WAYS)
#: Thirteen bits, which no 16-bit format holds.
FINE = 1 + 2.0**-12


class Recomputed(torch.autograd.Function):
    """A checkpoint as Megatron's and fairscale's: its backward computes again, and runs a pass."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.x = run, x
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, *grads):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.run(x)
        torch.autograd.backward(outputs, grads)
        return None, x.grad


def computed(run, x, way):
    """What ``run`` makes of ``x``."""
    if way == "reentrant":
        return checkpoint(run, x, use_reentrant=True)
    return Recomputed.apply(run, x) if way == "Function" else run(x)


def cached(value):
    """A leaf in the place of a loss, whose hook runs the pass through what it was computed by."""
    leaf = value.detach().requires_grad_()

    @leaf.register_hook
    def run(gradient):
        with torch.enable_grad():
            (value * gradient).backward()

    return leaf


class Foreign:
    """A plain model with an optimizer of its own, which no session knows; and the numbers that plain FP32 gives."""

    def __init__(self):
        self.model = torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[1.0, -0.5], [0.25, 2.0]]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.weight, self.moment = self.model.weight.detach().numpy().copy(), np.zeros((2, 2), np.float32)
        self.gradient, self.leaves = None, []

    def loss(self, values, way):
        """A loss of zero; all numbers of its gradient have few bits, but more than sixteen-bit formats hold."""
        x = torch.tensor([[FINE, 0.5], [-1.0, 2.0]], requires_grad=True)
        factors = torch.from_numpy(drawn(values, True)[:4].reshape(2, 2)).float()
        output = computed(self.model, x, way)
        assert output.dtype == torch.float32, f"a plain model gives {output.dtype}"
        assert np.allclose(array(output), array(x) @ self.weight.T.astype(np.float64), rtol=0, atol=2.0**-18)
        added = array(factors).T @ array(x)
        self.gradient = added if self.gradient is None else self.gradient + added
        self.leaves.append((x, array(factors) @ self.weight.astype(np.float64)))
        value = (factors * (output - output.detach())).sum()
        if way == "leaf":
            value = cached(value)
            self.leaves.append((value, np.float64(1.0)))
        return value

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.gradient is not None:
            half, rate = np.float32(MOMENTUM), np.float32(LR)
            self.moment = self.moment * half + self.gradient.astype(np.float32)
            self.weight = self.weight - self.moment * rate
        self.gradient = None

    def agrees(self):
        weight = self.model.weight
        assert weight.dtype == torch.float32
        gradient = None if weight.grad is None else array(weight.grad)
        assert (gradient is None) == (self.gradient is None), f"a plain model's gradient is {gradient}"
        assert gradient is None or np.array_equal(gradient, self.gradient), (
            f"a plain model's: {gradient}, not {self.gradient}"
        )
        assert np.array_equal(array(weight), self.weight), f"a plain model's: {array(weight)}, not {self.weight}"
        for leaf, gradient in self.leaves:
            assert leaf.grad is not None, "a leaf without a gradient"
            assert np.allclose(array(leaf.grad), gradient, rtol=0, atol=2.0**-16), f"{leaf.grad}, not {gradient}"
        self.leaves = []


class Nested(Loop):
    """Programs whose pass runs others, and those that train two models, of which a session knows one."""

    def begin(self, config, seed):
        super().begin(config, seed)
        self.foreign = Foreign()

    @needs("nested")
    @precondition(lambda self: self.window_calls() < MOST_CALLS - 1 and self.driver.may_add(self.oracle))
    @rule(batch=passes, more=passes, way=st.sampled_from(WAYS[1:]), beside=st.sampled_from([None, *WAYS]))
    def nested_pass(self, batch, more, way, beside):
        """One pass of the session, which runs others; perhaps beside a plain model's loss."""
        before = self.oracle.copy()
        batch, more = ({**data, "is_coarse": True} for data in (batch, more))
        scale, leaves = self.oracle.next_scale(), []
        shares = [Share(self.config, data, scale) for data in (batch, more)[: 2 if way == "leaf beside" else 1]]
        values = [self.nested_loss(share, way, leaves) for share in shares]
        if not all(value.requires_grad for value in values) or not any(w.trains for w in self.oracle.weights.values()):
            self.oracle = before
            return
        if way.startswith("leaf"):
            values[0] = cached(values[0])
            leaves.append((values[0], np.float64(1.0), 0.0))
        loss = sum(values) * 1.0
        if beside is not None and self.driver.has("others"):
            loss = loss + self.foreign.loss(batch["values"], "leaf" if beside == "leaf beside" else beside)
        gradients = self.mean(shares[:1])
        for name, gradient in self.mean(shares[1:]).items() if shares[1:] else ():
            gradients[name] = gradients[name] + gradient
        groups = self.driver.groups(self.oracle, self.oracle.groups, gradients.keys())
        self.driver.backward(loss, None)
        self.oracle.begin(groups)
        self.oracle.accumulate(groups, gradients, finite=all(share.finite for share in shares))
        for group in groups:
            group.window.calls += len(shares) - 1
        for leaf, gradient, off in leaves:
            assert leaf.grad is not None, "a leaf without a gradient"
            if np.isfinite(gradient).all() and self.driver.has("others"):
                assert (np.abs(array(leaf.grad) - gradient) <= off).all(), f"a leaf's: {leaf.grad}, and not {gradient}"

    def nested_loss(self, share, way, leaves):
        """A loss through the model, whose input is a leaf with a gradient."""
        x = share.x.clone().requires_grad_(not way.startswith("leaf"))

        def run(x):
            with self.driver.region():
                return tuple(self.called(x)[name] for name in NAMES)

        outputs = dict(zip(NAMES, computed(run, x, way), strict=True))
        self.check_outputs(outputs, share.widths)
        if x.requires_grad:
            leaves.append((x, *self.gradient_of_input(share)))
        return share.loss(outputs)

    def gradient_of_input(self, share):
        """What the input of the model gets, and how far off rounding may be; infinite where formats overflow."""
        scale, terms = self.oracle.scale.now, []
        for name in NAMES:
            with np.errstate(all="ignore"):
                terms.append((array(share.factors[name]), self.oracle.weights[name].exact))
        exact = sum(factors @ weight for factors, weight in terms)
        sizes = sum(np.abs(factors) @ np.abs(weight) for factors, weight in terms)
        large = np.max(sizes) * scale * 4 > 2.0**15 if np.isfinite(sizes).all() else True
        if not share.is_plain or (large and self.config.dtype == "float16"):
            return exact * np.nan, 0.0
        return exact, sizes * 2.0**-5 + 2.0**-20

    @needs("nested")
    @rule(values=st.integers(0, 99), way=st.sampled_from(WAYS[:-1]), steps=st.booleans())
    def foreign_pass(self, values, way, steps):
        """A plain loop over another model."""
        self.foreign.loss(values, way).backward()
        self.foreign.agrees()
        if steps:
            self.foreign.step()
        if float(self.amp.loss_scale) != self.oracle.scale.now:
            self.oracle.commit()  # a pass that may have run others, through the model too, needed to know the scale

    @needs("others")
    @precondition(lambda self: self.window_calls() < MOST_CALLS and self.driver.may_add(self.oracle))
    @rule(batch=passes, values=st.integers(0, 99), way=st.sampled_from(WAYS[:-1]), steps=st.booleans())
    def shared_pass(self, batch, values, way, steps):
        """One loss for both models; in a style of several ranks the other model is each rank's own."""
        if self.passed(batch, lambda value: value + self.foreign.loss(values, way)):
            self.foreign.agrees()
            if steps:
                self.foreign.step()

    @invariant()
    def leaves_others_alone(self):
        self.foreign.agrees()
