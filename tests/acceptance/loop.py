"""The training loop as rules of a state machine, and what must hold after each of them."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition

from mezzo import MixedPrecision
from mezzo.errors import MezzoError, NumericsError
from mezzo.session.session import engine_of

from .drivers import DRIVERS
from .near import rounded
from .subject import BEFORE, LOW, NAMES, Config, Subject, array, fresh_weights
from .twins import Twins, rule

#: The last is swallowed by a sum with any other in sixteen bits, and by none in FP32.
VALUES = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 2.0**-12)
WIDTHS = (1.0, 0.5, 2.0, 4.0)
SCALES = ("", "none", "64", *["dynamic(init=256,interval=2)", "dynamic(init=32768,interval=1)"] * 2)
PRODUCTS = (
    "", "", ",mxfp8_module=*", ",nvfp4_module=first+second+late",
    ",fp8_recipe=delayed,fp8_history=3,fp8_module=first+second+late",
)  # fmt: skip
ROWS = 6  # of all layers; a wide one repeats three
#: Sums of so many stay whole multiples of 2⁻¹³ within 17 bits, which FP32 adds without rounding.
MOST_CALLS = 4

#: That of a layer: the gradients of its weight overflow.
kinds = st.sampled_from(["plain"] * 9 + ["first.weight", "second.weight", "inf loss", "inf input"])
passes = st.fixed_dictionaries(
    {
        "values": st.integers(0, 99),  # which of many
        "widths": st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS)),
        "kind": kinds,
        "elsewhere": kinds,  # on another rank
    }
)
clearings = st.sampled_from([who + how for who in ("session", "optimizers", "model") for how in ("", " zeros")])
some = st.sampled_from([None, None, 0, 1])  # all optimizers, or one of them
calls = st.one_of(
    st.tuples(st.just("backward"), passes, some),
    st.tuples(st.just("step"), some, st.just("own")),
    st.tuples(st.just("unscale"), some),
)


@st.composite
def configs(draw, styles):
    level, dtype = draw(st.sampled_from(["O2", "O1", "O3", "O0"])), draw(st.sampled_from(LOW))
    library = draw(st.sampled_from(["mezzo", "torch", "fused", "own"]))
    style = draw(st.sampled_from(styles))
    rules = ["AdamW", "SGD", "Adam", "Lion"] if library == "mezzo" else ["AdamW", "SGD"]
    config = Config(
        level=level, dtype=dtype, library=library, rule=draw(st.sampled_from(rules)),
        state_dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "int8"])),
        apart=draw(st.booleans()), pinned=draw(st.booleans()), scale=draw(st.sampled_from(SCALES)),
        clip=draw(st.sampled_from([None, 1.0])), style=style,
        on_overflow=draw(st.sampled_from(["skip", "skip", "raise"])),
        wide=library == "mezzo" and draw(st.integers(0, 15)) == 15,
        beside=DRIVERS[style].has("beside") and draw(st.integers(0, 3)) == 3,
        products="" if "planned" in style else draw(st.sampled_from(PRODUCTS)),
    )  # fmt: skip
    config = DRIVERS[config.style].suited(config)
    return config if config.is_promised else Config(**{**vars(config), "scale": ""})


def needs(*abilities):
    """A rule that a style lacking one of these has no call for."""
    return precondition(lambda self: all(map(self.driver.has, abilities)))


class Share:
    """What one rank computes of a batch: the tensors that a loss is made of, and the gradients that it must have."""

    def __init__(self, config, batch, scale):
        self.is_plain = batch["kind"] == "plain"
        self.finite = batch["kind"] not in ("inf loss", "inf input")
        self.widths = (float("inf"), 1.0) if batch["kind"] == "inf input" else batch["widths"]
        self.x = torch.diag(torch.tensor(self.widths))
        self.added = torch.tensor(float("inf") if batch["kind"] == "inf loss" else 0.0)
        self.factors, self.gradients = {}, {}
        values = iter(drawn(batch["values"], config.wide or batch.get("is_coarse", False)))
        for name, (rows, columns) in config.shapes.items():
            few = np.array([[next(values) for _ in range(columns)] for _ in range(min(rows, 3))])
            factors = np.resize(few, (rows, columns)) / np.array(batch["widths"])
            if batch["kind"] == name:
                factors[:] = 2.0**127
            self.factors[name] = torch.from_numpy(factors.T).float()
            self.gradients[name] = self.left(config.computes(name), factors * scale)

    def left(self, computes, factors):
        """The gradient that formats leave of a loss times its scale."""
        return rounded(rounded(rounded(factors, "float32"), computes) @ np.diag(self.widths), computes)

    def loss(self, outputs):
        return total(outputs, self.factors, self.added)


@functools.cache
def drawn(seed, is_coarse):
    """Values for the weights of all layers."""
    return np.random.default_rng(seed).choice(VALUES[:-1] if is_coarse else VALUES, 2 * ROWS)


def total(outputs, factors, added):
    """A loss of zero, whose gradients are the factors."""
    return sum((factors[name] * (output - output.detach())).sum() for name, output in outputs.items()) + added


class Loop(Twins):
    """A session and its oracle in a training loop: forward, backward, unscale_, step, zero_grad."""

    def begin(self, config, seed):
        weights, self.begun_at = fresh_weights(config, seed), config.level
        self.subject = Subject(config, weights)
        self.oracle = self.subject.oracle()
        for name, weight in self.oracle.weights.items():
            assert np.array_equal(weight.exact, weight.keep(weights[name])), f"{name} was not taken over whole"
        self.record_tape(config, seed)

    @property
    def amp(self):
        return self.subject.amp

    @property
    def config(self):
        return self.subject.config

    @property
    def driver(self):
        return self.subject.driver

    def chosen(self, number):
        """Groups that a call is for, and the optimizers to pass; most loops step with one at a time."""
        if number is None and not self.driver.has("all at once"):
            number = 0
        if number is None:
            return self.oracle.groups, None
        number %= len(self.oracle.groups)
        return [self.oracle.groups[number]], self.subject.optimizers[number]

    def refused(self, call, *words):
        """A call raises one of mezzo's errors, and nothing at all has changed."""
        before = self.subject.bits()
        with pytest.raises(MezzoError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value
        assert self.subject.bits() == before, f"refused, and yet something changed: {caught.value}"

    # Forward and backward ------------------------------------------------------------------------------------

    def called(self, x):
        """Call the model."""
        return self.driver.model(x)

    def outputs(self, widths):
        """Run the model on a diagonal batch, whose outputs are the weights themselves, each times a power of two."""
        outputs = self.called(torch.diag(torch.tensor(widths)))
        self.check_outputs(outputs, widths)
        return outputs

    def check_outputs(self, outputs, widths, seen=None):
        if not np.isfinite(widths).all():
            return
        for name, output in outputs.items():
            computes, low = self.config.computes(name), array(output).T
            expected = [
                rounded(seen_weight * np.array(widths), computes)
                for seen_weight in (seen[name] if seen else self.seen(name))
            ]
            is_one = np.logical_or.reduce([low == value for value in expected])
            assert is_one.all(), f"the forward pass reads other weights: {name}: {low}, and not {expected}"

    def seen(self, name):
        """What a layer may compute with: of halves, which round ties away from zero, either one at a tie."""
        weight, computes = self.oracle.weights[name], self.config.computes(name)
        ways = (False, True) if weight.half == "bfloat16" == computes else (False,)
        return [rounded(weight.exact, computes, away=away) for away in ways]

    @rule(widths=st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS)), trains=st.booleans())
    def forward(self, widths, trains):
        with torch.set_grad_enabled(trains), self.driver.region():
            self.outputs(widths)

    def window_calls(self):
        return max((group.window.calls for group in self.oracle.groups if group.window), default=0)

    @precondition(lambda self: self.window_calls() < MOST_CALLS)
    @rule(batch=passes, number=some)
    def backward(self, batch, number):
        if not self.driver.may_add(self.oracle):
            return
        number = number if self.driver.has("one at a time") else None
        groups, optimizers = self.chosen(number)
        before = self.oracle.copy()
        value, gradients, finite = self.loss(batch)
        trains = any(self.oracle.weights[name].trains for group in groups for name in group.members)
        if self.driver.has("all at once") and (
            not value.requires_grad or (len(groups) < len(self.oracle.groups) and not trains)
        ):
            self.refused(
                lambda: self.amp.backward(value, optimizers), "no_grad" if not value.requires_grad else "gradient"
            )
            self.oracle = before  # a scale that waits moves with the next pass
            return
        if not value.requires_grad:
            self.oracle = before
            return
        groups = self.driver.groups(self.oracle, groups, gradients.keys())
        self.driver.backward(value, optimizers)
        self.is_planned()
        if groups:
            self.oracle.begin(groups)
            self.oracle.accumulate(groups, gradients, finite=finite)

    def passed(self, batch, made):
        """Run a pass of what is made of the loss; whether there was anything to differentiate."""
        before = self.oracle.copy()
        value, gradients, finite = self.loss(batch)
        if not value.requires_grad or not gradients:
            self.oracle = before
            return False
        groups = self.driver.groups(self.oracle, self.oracle.groups, gradients.keys())
        self.driver.backward(made(value), None)
        self.is_planned()
        self.oracle.begin(groups)
        self.oracle.accumulate(groups, gradients, finite=finite)
        return True

    def loss(self, batch):
        """A loss whose gradients are exactly the drawn values: its own value, and what it must leave behind."""
        batches, mine = self.driver.shares(batch)
        scale = self.oracle.next_scale()
        shares = [Share(self.config, batch, scale) for batch in batches]
        with self.driver.region():
            outputs = self.called(shares[mine].x)
            value = shares[mine].loss(outputs)
        self.check_outputs(outputs, shares[mine].widths)
        return value, self.mean(shares), all(share.finite for share in shares)

    def mean(self, shares):
        """The gradients of weights that train, each rank's share rounded."""
        trained = [name for name, weight in self.oracle.weights.items() if weight.trains]
        if len(shares) == 1:
            return {name: shares[0].gradients[name] for name in trained}
        dtypes = {name: self.config.stored(name)[0] for name in trained}
        return {
            name: rounded(sum(rounded(share.gradients[name] / len(shares), dtype) for share in shares), dtype)
            for name, dtype in dtypes.items()
        }

    @precondition(lambda self: not any(group.window or group.gradients for group in self.oracle.groups))
    @rule(batches=st.lists(passes, min_size=1, max_size=4))
    def train(self, batches):
        """Whole steps, each of them one call where the style has one for it."""
        for batch in batches * (1 if self.driver.train is None else 3):
            if self.driver.train is None:
                self.backward(batch, None)
                self.step(None, "session")
            elif any(weight.trains for group in self.oracle.groups for weight in self.weights_of(group)):
                self.train_at_once(batch)

    def weights_of(self, group):
        return [self.oracle.weights[name] for name in group.members]

    def train_at_once(self, batch):
        share = Share(self.config, batch, self.oracle.next_scale())
        if self.driver.is_stale():
            self.refused(lambda: self.driver.train(share), "holds what the session has left")
            self.driver.capture()
        seen = {name: self.seen(name) for name in NAMES}
        self.oracle.begin(self.oracle.groups)
        self.oracle.accumulate(self.oracle.groups, self.mean([share]), finite=share.finite)
        groups = [group for group in self.oracle.groups if group.gradients]
        self.take_step(groups, lambda: self.driver.train(share))
        self.check_outputs(self.driver.outputs, share.widths, seen)
        self.driver.trained(self.oracle)
        for group in self.oracle.groups:
            group.clear([])

    # Steps -------------------------------------------------------------------------------------------------------

    @rule(number=some, clear=st.one_of(st.just("late"), clearings))
    def step(self, number, clear):
        groups, optimizers = self.chosen(number)
        begun = any(group.window is not None for group in groups)
        groups = [group for group in groups if group.gradients and (group.window is not None or self.oracle.is_plain)]
        if not groups:
            if self.oracle.is_plain:
                optimizers.step()
                return
            if not self.driver.has("session") and any(group.gradients for group in self.chosen(number)[0]):
                return  # what the last step has left is taken again, as in plain torch
            if not self.driver.has("wants gradients"):
                return  # which an optimizer that asks for the scale takes, as with torch's scaler
            words = "no parameter has a gradient" if begun and self.driver.has("session") else ""
            words = words or ("step() before backward()" if self.driver.has("session") else "")
            self.refused(lambda: self.driver.step(optimizers), words)
            return
        self.take_step(groups, lambda: self.driver.step(optimizers))
        self.clear_after(groups, clear)

    def take_step(self, groups, call, *, norm=True):
        """Step the program and the oracle, and compare."""
        verdict = self.oracle.step(groups)
        if verdict.skipped and self.config.on_overflow == "raise":
            with pytest.raises(NumericsError, match="the gradients are not finite"):
                call()
            return None
        result = call()
        self.is_planned(writes=True)
        assert bool(result.skipped) == verdict.skipped
        if norm and not verdict.skipped:
            assert float(result.grad_norm) == pytest.approx(verdict.norm, rel=2**-20)
        scales = float(result.scale), float(result.next_scale)
        assert scales == (verdict.scale, self.oracle.scale.now), f"{scales}: {verdict.scale}, {self.oracle.scale.now}"
        self.adopt(verdict.updates)
        if self.oracle.contract.updates:
            self.driver.updated(self.oracle)
            self.oracle.scale.advance()
        return result

    @precondition(lambda self: self.oracle.contract.waits)
    @rule()
    def update(self):
        self.driver.update()
        self.driver.updated(self.oracle)
        self.oracle.scale.advance()

    def update_if_it_waits(self):
        if self.oracle.contract.waits:
            self.update()

    def adopt(self, updates):
        """Hold what an update made against what it may make, and go on from there."""
        for name, update in updates.items():
            weight = self.oracle.weights[name]
            weight.count += 1
            exact = self.subject.exact(name)
            moments, _ = self.subject.states(name)
            expected = update.exact
            if weight.half:
                expected = type(expected)(expected.value, expected.error + weight.grid)
            else:
                expected = expected.stored(weight.dtype)
            assert expected.holds(exact).all(), f"{name}: {exact} for {expected.value} ± {expected.error}"
            for key, moment in update.states.items():
                if self.config.library == "mezzo" and self.config.state_dtype == "bfloat16":
                    moment = moment.stored("bfloat16", spacings=1.0)
                elif self.config.library == "mezzo" and self.config.state_dtype == "int8":
                    moment = moment.coded(is_signed=key != "exp_avg_sq")
                elif weight.form == "torch":
                    moment = moment.stored(weight.dtype)
                assert moment.holds(moments[key]).all(), f"{name}.{key}: {moments[key]} for {moment.value}"
            weight.exact, weight.states = exact, moments

    def clear_after(self, groups, how):
        left = any(self.grads(name) for group in groups for name in group.members)
        others = any(group.window is not None for group in self.oracle.groups)
        if how == "late" and left and self.driver.has("all at once") and not others:
            # What the step left is unscaled, or used up: the next gradients cannot be added to it.
            with self.driver.region():
                value = sum(output.float().sum() for output in self.outputs((1.0, 1.0)).values())
            self.refused(lambda: self.amp.backward(value), "the last step's gradients are still there")
        if how == "own":
            for name in (name for group in groups for name in group.members):
                self.subject.param(name).grad = None
            for group in groups:
                group.clear([])
            return
        self.clear("session" if how == "late" else how)

    @rule(how=clearings)
    def clear(self, how):
        """Forget the gradients, in any of the ways that torch has: wherever the session keeps parts of them."""
        who, _, zeros = how.partition(" ")
        if who == "session":
            self.amp.zero_grad(set_to_none=not zeros)
            self.driver.forget(self.oracle)
        elif who == "optimizers":
            for optimizer in self.subject.optimizers:
                optimizer.zero_grad(set_to_none=not zeros)
        else:
            self.subject.model.zero_grad(set_to_none=not zeros)
        for group in self.oracle.groups:
            group.clear([name for name in group.members if zeros and self.grads(name)])

    def grads(self, name):
        """The gradient of a parameter, if it has one."""
        gradient = self.subject.param(name).grad
        return [] if gradient is None else [gradient]

    @precondition(lambda self: not self.oracle.is_plain)
    @rule(number=some)
    def unscale(self, number):
        groups, optimizers = self.chosen(number)
        groups = [group for group in groups if group.window is not None]
        if not self.driver.has("session"):
            groups = [group for group in groups if group.gradients and group.window.carried is not None]
            if not groups:
                return
        if not groups:
            if self.driver.has("wants gradients"):
                self.refused(lambda: self.driver.unscale_(optimizers), "unscale_() before backward()")
            return
        self.driver.unscale_(optimizers)
        for group in groups:
            group.rescale(None, None, checks=True)

    # Programs: what the loop is for, drawn more often than what happens to it ------------------------------------

    @precondition(lambda self: self.window_calls() == 0)
    @rule(passed=st.lists(st.tuples(passes, some), min_size=2, max_size=MOST_CALLS), paused=st.booleans(), steps=some)
    def micro_batches(self, passed, paused, steps):
        """Several passes, of which only the last is exchanged between ranks, or each; then a step."""
        *first, last = passed
        for batch, number in first:
            with self.driver.paused() if paused else contextlib.nullcontext():
                self.backward(batch, number)
        self.backward(*last)
        self.agrees()
        self.step(steps, "own")

    @rule(turns=st.lists(st.tuples(st.integers(0, 1), passes, st.booleans()), min_size=2, max_size=6))
    def turns(self, turns):
        """Optimizers that take turns: each a pass of its own and a step, which some leave out."""
        for number, batch, steps in turns:
            if self.window_calls() < MOST_CALLS:
                self.backward(batch, number)
                self.agrees()
            if steps:
                self.step(number, "own")

    @rule(calls=st.lists(calls, min_size=4, max_size=8))
    def program(self, calls):
        """Passes and steps in whatever order."""
        for name, *given in calls:
            if name == "backward" and self.window_calls() < MOST_CALLS:
                self.backward(*given)
            elif name == "step":
                self.step(*given)
            elif name == "unscale" and not self.oracle.is_plain:
                self.unscale(*given)
            self.agrees()

    # Under more names they are drawn more often.
    steps_ = steps__ = train
    accumulates = accumulates_ = micro_batches
    turns_ = turns__ = turns
    program_ = program__ = program

    # What must hold after each of them -------------------------------------------------------------------------

    @invariant()
    def agrees(self):
        if self.begun_at != "O3":  # whose buffers have 16 bits
            counted = self.subject.model.state_dict()["seen"]
            assert float(counted) == BEFORE + self.subject.model.calls, "a buffer stands still"
        for name, weight in self.oracle.weights.items():
            param, exact = self.subject.param(name), self.subject.exact(name)
            assert np.isfinite(exact).all(), f"{name}: {exact}"
            assert str(param.dtype) == f"torch.{weight.dtype}", f"{name} is {param.dtype}"
            assert np.array_equal(array(param), exact), f"{name}: {array(param)}, and saved as {exact}"
            assert np.array_equal(exact, weight.exact), f"{name}: {exact} is not {weight.exact}"
            moments, count = self.subject.states(name)
            for key, moment in moments.items():
                assert np.array_equal(moment, weight.states.get(key, np.zeros(self.config.shapes[name]))), (
                    f"{name}.{key}"
                )
            assert count is None or count == weight.count, f"{name}: {count} updates, and not {weight.count}"
        for group in (group for group in self.oracle.groups if group.window is not None):
            for name in set(group.members) - group.window.assigned:
                grads = [array(grad) for grad in self.grads(name)]
                assert bool(grads) == (name in group.gradients), f"{name}.grad"
                if grads and np.isfinite(group.gradients[name]).all():
                    assert np.array_equal(sum(grads), group.gradients[name]), (
                        f"{name}.grad: {grads}, and not {group.gradients[name]}"
                    )
        self.agrees_on_scales()

    def is_planned(self, *, writes=False):
        """Right after a pass or a step the plan in force is the one that would be made now, whatever the numbers.

        How an optimizer writes is asked before a step alone.
        """
        if isinstance(self.amp, MixedPrecision) and self.driver.has("steady"):
            engine = engine_of(self.amp)
            stale = engine.plan.differences(engine.planned())
            stale = [part for part in stale if writes or not ("deciding" in part or ".writers" in part)]
            assert not stale, f"a stale plan: {stale}"

    def agrees_on_scales(self):
        scale = self.oracle.scale
        assert float(self.amp.loss_scale) == scale.now, f"{float(self.amp.loss_scale)}, and not {scale.now}"
        if not self.driver.has("session"):
            return
        stats = self.amp.stats()
        assert (stats.steps, stats.skipped) == (self.oracle.steps, self.oracle.skipped)
        assert (stats.scale, stats.growths, stats.backoffs) == (scale.noted, scale.growths, scale.backoffs)
        assert (stats.lowest_scale, stats.highest_scale) == (scale.lowest, scale.highest)
