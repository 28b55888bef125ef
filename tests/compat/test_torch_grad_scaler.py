"""torch's GradScaler and mezzo's, side by side: the same weights, scales and return values, bit for bit."""

import copy
import itertools
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mezzo
from mezzo.compat.torch import GradScaler

from .programs import OPTIMIZERS, SCALERS, assert_same, batch, both, loss_of, network, weights


def training(scaler_of, make, clip=None, micro_batches=1, overflows=(), unscales=False):
    model = network()
    optimizer, scaler = make(model.parameters()), scaler_of("cpu", init_scale=2.0**10, growth_interval=2)
    trace = []
    for step in range(5):
        for part in range(micro_batches):
            loss = loss_of(model, step * micro_batches + part, step in overflows and part == 0) / micro_batches
            scaler.scale(loss).backward()
        if clip is not None or unscales:
            scaler.unscale_(optimizer)
        if clip is not None:
            trace.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        trace.append(scaler.step(optimizer))
        scaler.update()
        optimizer.zero_grad()
        trace.append(scaler.get_scale())
    return weights(model), [repr(entry) for entry in trace], scaler.state_dict()


def test_clipping_and_accumulation():
    ways = ((None, 1, False), (None, 3, True), (0.01, 1, False), (1e3, 2, False))
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        for position, (clip, micro_batches, unscales) in enumerate(ways[number % 2 :: 2]):
            overflows = ((), (0,), (2, 3), (4,))[(number // 2 + position) % 4]
            if name == "sgd fused" and overflows == (0,):
                overflows = ()  # torch's begins with momentum that was never written: see below
            both(training, make, clip, micro_batches, overflows, unscales)


def test_a_fused_sgd_whose_first_step_is_skipped_begins_as_if_it_were_not():
    final, scales, _ = training(GradScaler, OPTIMIZERS["sgd fused"], overflows=(0,))
    plain, _, _ = training(SCALERS["torch"], OPTIMIZERS["momentum"], overflows=(0,))
    torch.testing.assert_close(final, plain)
    assert scales[1] == "512.0"
    for dtype in ("bfloat16", "float16"):
        ends = []
        for name in ("sgd fused", "momentum"):
            model = network()
            prepared = mezzo.prepare(model, f"O2,dtype={dtype}")
            optimizer, scaler = OPTIMIZERS[name](model.parameters()), GradScaler("cpu", init_scale=2.0**10)
            for number in range(3):
                with prepared.autocast():
                    loss = loss_of(model, number, number == 0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            ends.append([*model.state_dict().values()])
        torch.testing.assert_close(*ends)


# The scale --------------------------------------------------------------------------------------------------


def odd_scales(scaler_of, scales):
    """Steps with whatever scale is set: numbers that are no powers of two round alike."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=scales[0])
    for number, scale in enumerate(scales):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update(scale)
    return weights(model), scaler.get_scale()


def odd_factors(scaler_of, growth, backoff, interval, pattern):
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler, numbers = scaler_of("cpu", 3.0, growth, backoff, interval), []
    for mark in pattern:
        weight.grad = None
        scaler.scale(weight.sum() * (torch.inf if mark == "X" else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        numbers += [scaler.get_scale(), scaler.state_dict()["_growth_tracker"], scaler._get_growth_tracker()]
    return [weight.detach()], numbers


def test_scales_and_factors_that_are_no_powers_of_two():
    both(odd_scales, [3.0, 0.1, 1e-3, 12345.678, 1e10])
    for (growth, backoff), interval in itertools.product(((1.001, 0.3), (3.7, 0.9), (1e3, 1e-3)), (1, 3)):
        both(odd_factors, growth, backoff, interval, "....X..XX....")


def test_the_scale_does_not_grow_beyond_fp32():
    """``test_grad_scale_will_not_overflow``; but that gradients whose norm is beyond FP32 are an overflow here."""
    for init, gradient, after, skipped in ((1e38, 1e-30, 1e38, False), (1e38, 1e-10, 5e37, True)):
        for name, scaler_of in SCALERS.items():
            weight = nn.Parameter(torch.ones(8))
            optimizer = torch.optim.SGD([weight], lr=1.0)
            scaler = scaler_of("cpu", init_scale=init, growth_interval=1, growth_factor=2.0**4)
            scaler.scale((weight * gradient).sum()).backward()
            assert weight.grad.isfinite().all()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == pytest.approx(after if name == "mezzo" else init), (name, gradient)
            assert name == "torch" or bool(scaler.last_step.skipped) == skipped


# Programs of torch's documents and tests --------------------------------------------------------------------


def several(scaler_of, overflows=()):
    """torch's example of several models, losses and optimizers: one update for all."""
    first, second = network(0), network(1)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.01)]
    scaler, trace = scaler_of("cpu", init_scale=64.0, growth_interval=2), []
    for number in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        one, two = first(batch(number)), second(batch(number))
        loss0 = (2 * one + 3 * two).square().mean()
        loss1 = (3 * one - 5 * two).square().mean() * (torch.inf if ("both", number) in overflows else 1.0)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        if ("second", number) in overflows:
            second[0].weight.grad[0, 0] = torch.nan
        scaler.unscale_(optimizers[0])
        trace.append(repr([scaler.step(optimizer) for optimizer in optimizers]))
        scaler.update()
        trace.append(scaler.get_scale())
    return weights(first, second), trace


def penalty(scaler_of, overflows):
    """torch's example of a gradient penalty: differentiated scaled, unscaled by hand, and scaled again."""
    model = network()
    optimizer, scaler, trace = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=128.0), []
    for number in range(3):
        optimizer.zero_grad()
        loss, params = loss_of(model, number, number in overflows), list(model.parameters())
        scaled = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
        loss = loss + sum((gradient * (1.0 / scaler.get_scale())).pow(2).sum() for gradient in scaled).sqrt()
        scaler.scale(loss).backward()
        trace.append(scaler.step(optimizer))
        scaler.update()
        trace.append(scaler.get_scale())
    return weights(model), trace


def outputs(scaler_of, container):
    """Lists, tuples and other iterables of outputs, and nested ones."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=8.0)
    scaled = scaler.scale(container([model(batch(0)).sum(), model(batch(1)).mean()]))
    names = type(scaled).__name__
    torch.autograd.backward(list(scaled))
    scaler.step(optimizer)
    scaler.update()
    return weights(model), names, repr(scaler.scale([torch.ones(2), (torch.ones(1), [torch.ones(())])]))


def sparse(scaler_of, value):
    """torch's test of sparse gradients, coalesced and not."""
    embedding = nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(18.0).view(6, 3))
    optimizer, scaler = torch.optim.SparseAdam(embedding.parameters(), lr=0.1), scaler_of("cpu", init_scale=16.0)
    trace = []
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale((embedding(torch.tensor([1, 4, 1])) * value[number]).sum()).backward()
        if number:
            scaler.unscale_(optimizer)
            trace.append(repr(embedding.weight.grad.to_dense()))
        scaler.step(optimizer)
        scaler.update()
        trace.append(scaler.get_scale())
    return weights(embedding), trace


def left_out(scaler_of):
    """unscale_ and a look at the norm, and no step: the overflow moves the scale nevertheless."""
    model, other = network(), network(1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=4.0, growth_interval=2)
    second, scales = torch.optim.SGD(other.parameters(), lr=0.1), []
    for number in range(6):
        optimizer.zero_grad()
        second.zero_grad()
        scaler.scale(loss_of(model, number, number in (1, 4)) + loss_of(other, number)).backward()
        scaler.unscale_(optimizer)
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            scaler.step(optimizer)
        if number > 2:
            scaler.step(second)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(model, other), scales


def disabled(scaler_of):
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", enabled=False)
    output = model(batch(0)).mean()
    assert scaler.scale(output) is output
    output.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    trace = [scaler.step(optimizer), scaler.step(optimizer, lambda: 5), scaler.update(), scaler.get_scale()]
    assert scaler_of is torch.amp.GradScaler or not scaler.last_step.skipped
    scaler.load_state_dict({})
    return weights(model), trace, scaler.state_dict(), scaler.is_enabled()


PROGRAMS = {
    "an overflow of one optimizer, and of both": lambda of: several(of, [("second", 0), ("both", 2), ("second", 4)]),
    "a gradient penalty that overflows": lambda of: penalty(of, (1,)),
    "a list": lambda of: outputs(of, list),
    "a tuple": lambda of: outputs(of, tuple),
    "an iterator": lambda of: outputs(of, iter),
    "infinite sparse gradients": lambda of: sparse(of, (1.0, torch.inf, 3.0)),
    "sparse gradients that are no numbers": lambda of: sparse(of, (torch.nan, 1.0, 1.0)),
    "a step that the user leaves out": left_out,
    "a disabled scaler": disabled,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_comes_to_the_same(name):
    both(PROGRAMS[name])


def test_what_is_scaled_has_the_dtype_that_torch_gives_it():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (1,), (2, 3)):
            scaled, wanted = (value("cpu").scale(torch.full(shape, 2.0, dtype=dtype)) for value in SCALERS.values())
            assert scaled.dtype == wanted.dtype
            assert torch.equal(scaled, wanted)


# State ------------------------------------------------------------------------------------------------------


def trained(scaler, model, optimizer, numbers):
    scales = []
    for number in numbers:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, number % 5 == 4)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_states_load_both_ways_and_go_on():
    """As torch's test: whether a loss was scaled before or not, everything is loaded, the rules included."""
    for saving, loading, is_lazy in itertools.product(SCALERS, SCALERS, (False, True)):
        first, second = SCALERS[saving]("cpu", 3.0, 4.0, 0.5, 2), SCALERS[loading]("cpu", 6.0, 7.0, 0.8, 1)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not is_lazy:
            trained(first, model, optimizer, range(4))
            trained(second, model, optimizer, range(3))
        state = first.state_dict()
        assert json.loads(json.dumps(state)) == state
        second.load_state_dict(state)
        assert second.state_dict() == first.state_dict() == state
        for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
            assert getattr(first, f"get_{name}")() == getattr(second, f"get_{name}")() == state[name]
        other = copy.deepcopy(model)
        numbers = trained(second, model, optimizer, range(6, 12))
        assert numbers == trained(first, other, torch.optim.SGD(other.parameters(), lr=0.1), range(6, 12))
        assert_same(weights(model), weights(other))


def test_getters_setters_and_a_new_scale():
    for scaler_of in SCALERS.values():
        scaler = scaler_of("cpu", init_scale=8.0)
        assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 2.0, 0.5)
        assert (scaler.get_growth_interval(), scaler.is_enabled()) == (2000, True)
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(1)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert trained(scaler, model, optimizer, (0, 4, 1)) == [32.0, 8.0, 32.0]
        assert scaler.state_dict()["growth_interval"] == 1
        scaler.set_growth_interval(2)
        given = torch.tensor(16.0)
        trained(scaler, model, optimizer, (0,))
        scaler.update(given)
        given.fill_(3.0)
        assert scaler.get_scale() == 16.0
        assert scaler.state_dict()["_growth_tracker"] == 1
        scaler.update(2.0)
        assert scaler.get_scale() == 2.0


def test_copies_and_pickles_go_on_alone():
    scaler, model = GradScaler("cpu", init_scale=4.0, growth_interval=3), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(scaler, model, optimizer, (0, 1))
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert copied.state_dict() == scaler.state_dict()
        assert isinstance(copied, torch.amp.GradScaler)
        assert trained(copied, model, optimizer, (2,)) == [8.0]
        assert scaler.get_scale() == 4.0
    assert not pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False))).is_enabled()


# Calls in any order: of optimizers without gradients, as those of GANs and of experts that were not asked.

CALLS = st.lists(
    st.tuples(
        st.sampled_from("backward infinite none none".split()),
        st.sampled_from(["step", "step", "unscale_ step", "unscale_", "unscale_ zero step", ""]),
    ),
    min_size=2, max_size=2,
)  # fmt: skip


class Loop:
    """Networks, an optimizer each, and one scaler; what a call raises is kept by its kind."""

    def __init__(self, scaler_of, names):
        self.models = [network() for _ in names]
        self.optimizers = [OPTIMIZERS[name](model.parameters()) for name, model in zip(names, self.models, strict=True)]
        self.scaler, self.raised = scaler_of("cpu", init_scale=2.0**10, growth_interval=2), []

    def call(self, name, *args):
        try:
            getattr(self.scaler, name)(*args)
        except (RuntimeError, AssertionError) as error:
            self.raised.append((name, isinstance(error, AssertionError)))

    def iteration(self, number, plan):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for model, (gradient, _) in zip(self.models, plan, strict=True):
            if gradient != "none":
                self.scaler.scale(loss_of(model, number, gradient == "infinite")).backward()
        self.scaler.scale(torch.zeros(()))
        for optimizer, (_, calls) in zip(self.optimizers, plan, strict=True):
            for name in calls.split():
                if name == "zero":
                    optimizer.zero_grad()
                else:
                    self.call(name, optimizer)
        self.call("update")
        if self.raised and self.raised[-1][0] == "update":
            self.scaler.update(self.scaler.get_scale())  # torch's goes no further without

    def end(self):
        return [weights(model) for model in self.models], self.scaler.get_scale(), self.raised


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["adamw fused", "sgd fused", "momentum", "adamw foreach"]), min_size=2, max_size=2),
    st.lists(CALLS, max_size=6),
)
def test_any_order_of_calls_with_and_without_gradients(names, plans):
    theirs, ours = (Loop(scaler_of, names) for scaler_of in (SCALERS["torch"], GradScaler))
    for number, plan in enumerate(plans):
        plan = [
            ("backward" if name == "sgd fused" and gradient == "infinite" else gradient, calls)
            for name, (gradient, calls) in zip(names, plan, strict=True)
        ]  # a fused SGD that begins with a skipped step has momentum of its own in torch
        theirs.iteration(number, plan)
        ours.iteration(number, plan)
    for one, other in zip(theirs.end()[0], ours.end()[0], strict=True):
        assert_same(one, other)
    assert theirs.end()[1:] == ours.end()[1:]


def test_a_step_without_gradients_is_one_to_schedulers_and_hooks():
    """What counts steps counts the same; nothing is written, and nothing found."""
    for scaler_of in (SCALERS["torch"], GradScaler):
        loop = Loop(scaler_of, ["adamw fused", "momentum"])
        before, hooked = weights(loop.models[0]), []
        loop.optimizers[0].register_step_pre_hook(lambda *_, hooked=hooked: hooked.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1)
        loop.iteration(0, [("none", "unscale_ step"), ("backward", "step")])
        scheduler.step()  # which warns where no step was taken before
        assert hooked == [1]
        assert loop.raised == []
        assert_same(weights(loop.models[0]), before)


def test_a_session_s_scaler_unscales_nothing_where_nothing_is():
    """That of Accelerate and attached loops: ``accelerator.clip_grad_norm_`` unscales each optimizer."""
    from mezzo.session.grad_scaler import SessionScaler

    models = [network(), network()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05, fused=True) for model in models]
    amp = mezzo.MixedPrecision(models, optimizers, "O1,fp16,emulate=true")
    scaler = SessionScaler(amp)
    before = weights(models[1])
    scaler.scale(loss_of(models[0], 0)).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert_same(weights(models[1]), before)
    assert not torch.equal(next(models[0].parameters()), next(models[1].parameters()))
    amp.close()
