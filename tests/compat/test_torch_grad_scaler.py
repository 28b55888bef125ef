"""torch's GradScaler and mezzo's, side by side: the same weights, scales and return values, bit for bit."""

import copy
import itertools
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.torch import GradScaler

from ..support.tables import thinned
from .beside_torch import MEZZO, OPTIMIZERS, SCALERS, batch, both, loss_of, network, weights

TRACES = json.loads((Path(__file__).parents[1] / "conformance" / "scale_traces.json").read_text())


def training(scaler_of, make, clip=None, micro_batches=1, overflows=(), unscales=False):
    model = network()
    optimizer, scaler = make(model.parameters()), scaler_of("cpu", init_scale=2.0**10, growth_interval=2)
    trace = []
    for step in range(8):
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
    return weights(model), [repr(each) for each in trace], scaler.state_dict()


@pytest.mark.parametrize("optimizer, overflows", thinned([*OPTIMIZERS, *MEZZO], [(), (0,), (3, 4), (7,)], every=2))
def test_clipping_and_accumulation(optimizer, overflows):
    if optimizer == "sgd fused" and overflows == (0,):
        pytest.skip("torch's fused SGD begins with momentum that was never written, after a skipped first step")
    make = (OPTIMIZERS | MEZZO)[optimizer]
    for clip, micro_batches, unscales in ((None, 1, False), (None, 3, True), (0.1, 1, False), (1e3, 3, False)):
        both(training, make, clip, micro_batches, overflows, unscales)


def test_a_fused_sgd_whose_first_step_is_skipped_begins_as_if_it_were_not():
    make = OPTIMIZERS["sgd fused"]
    found, scales, _ = training(GradScaler, make, overflows=(0,))
    plain, _, _ = training(SCALERS["torch"], OPTIMIZERS["momentum"], overflows=(0,))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)
    assert scales[1] == "512.0"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_fused_sgd_over_halves_whose_first_step_is_skipped_begins_as_if_it_were_not(dtype):
    found = {}
    for make in (OPTIMIZERS["sgd fused"], OPTIMIZERS["momentum"]):
        model = network()
        prepared = mezzo.prepare(model, f"O2,dtype={dtype}")
        optimizer, scaler = make(model.parameters()), GradScaler("cpu", init_scale=2.0**10)
        prepared.adopt(optimizer)
        for number in range(3):
            loss = model(batch(number)).float().square().mean() * (torch.inf if number == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found[make] = [*model.state_dict().values()]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other)


def scaled_by(scaler_of, scales):
    """Steps with whatever scale is set: numbers that are no powers of two round alike."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=scales[0])
    for number, scale in enumerate(scales):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update(scale)
    return weights(model), scaler.get_scale()


def test_scales_that_are_no_powers_of_two():
    both(scaled_by, [3.0, 0.1, 1e-3, 12345.678, 1e10])


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("pattern", [each["pattern"] for each in TRACES["traces"] if each["system"] == "torch"])
def test_traces_of_the_scale(pattern, unscales):
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0 ** TRACES["start_log2"], growth_interval=TRACES["interval"])
    found = []
    for each in pattern:
        weight.grad = None
        scaler.scale(weight.sum() * (torch.inf if each == "X" else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert bool(scaler.last_step.skipped) == (each == "X")
        assert scaler.last_step.scale == scaler.get_scale()
        scaler.update()
        found.append(torch.tensor(scaler.get_scale()).log2().item())
    (wanted,) = (each for each in TRACES["traces"] if each["system"] == "torch" and each["pattern"] == pattern)
    assert found == wanted["log2_scale_after_step"]


def odd_traces(scaler_of, growth, backoff, interval, pattern):
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_of("cpu", 3.0, growth, backoff, interval)
    found = []
    for each in pattern:
        weight.grad = None
        scaler.scale(weight.sum() * (torch.inf if each == "X" else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), scaler.state_dict()["_growth_tracker"], scaler._get_growth_tracker()]
    return [weight.detach()], found


@pytest.mark.parametrize("growth, backoff", [(1.001, 0.3), (3.7, 0.9), (1e3, 1e-3)])
def test_factors_that_are_no_powers_of_two(growth, backoff):
    for interval, pattern in itertools.product((1, 3), ("....X...XX....", "XXXX", "." * 12)):
        both(odd_traces, growth, backoff, interval, pattern)


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


def optimizers_and_losses(scaler_of, overflows=(), retain=False):
    """torch's example of several models, losses and optimizers: one update for all."""
    first, second = network(0), network(1)
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.01)]
    scaler, trace = scaler_of("cpu", init_scale=64.0, growth_interval=2), []
    for number in range(6):
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


@pytest.mark.parametrize("overflows", [(), [("both", 1)], [("second", 0), ("second", 3)], [("second", 5), ("both", 2)]])
def test_several_models_losses_and_optimizers(overflows):
    both(optimizers_and_losses, overflows)


def penalty(scaler_of, overflows=()):
    """torch's example of a gradient penalty: differentiated scaled, unscaled by hand, and scaled again."""
    model = network()
    optimizer, scaler, trace = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=128.0), []
    for number in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, number, number in overflows)
        params = list(model.parameters())
        scaled = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
        gradients = [each * (1.0 / scaler.get_scale()) for each in scaled]
        loss = loss + sum(each.pow(2).sum() for each in gradients).sqrt()
        scaler.scale(loss).backward()
        trace.append(scaler.step(optimizer))
        scaler.update()
        trace.append(scaler.get_scale())
    return weights(model), trace


@pytest.mark.parametrize("overflows", [(), (1,)])
def test_a_gradient_penalty(overflows):
    both(penalty, overflows)


def several_outputs(scaler_of, kind):
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=8.0)
    outputs = kind([model(batch(0)).sum(), model(batch(1)).mean()])
    scaled = scaler.scale(outputs)
    names = type(scaled).__name__
    torch.autograd.backward(list(scaled))
    scaler.step(optimizer)
    scaler.update()
    nested = scaler.scale([torch.ones(2), (torch.ones(1), [torch.ones(())])])
    return weights(model), names, repr(nested)


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_lists_tuples_and_other_iterables_of_outputs(kind):
    both(several_outputs, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_scaled_has_the_dtype_that_torch_gives_it(dtype):
    for shape in ((), (1,), (2, 3)):
        found, wanted = (each("cpu").scale(torch.full(shape, 2.0, dtype=dtype)) for each in SCALERS.values())
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


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


@pytest.mark.parametrize("value", [(1.0, 2.0, 3.0), (1.0, torch.inf, 3.0), (torch.nan, 1.0, 1.0)])
def test_sparse_gradients(value):
    both(sparse, value)


def groups_and_devices(scaler_of):
    """Several groups, one of which comes later, parameters without a gradient, FP64 among FP32."""
    params = [torch.full((2,), 1.0 + i, requires_grad=True) for i in range(3)]
    params.append(torch.ones(3, dtype=torch.float64, requires_grad=True))
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:2], "lr": 0.5}], lr=0.1)
    scaler, trace = scaler_of("cpu", init_scale=32.0), []
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(sum(((each * (number + 1)).sum() for each in params[number % 2 :]), torch.zeros(()))).backward()
        scaler.step(optimizer)
        scaler.update()
        if number == 1:
            optimizer.add_param_group({"params": params[2:]})
        trace.append(scaler.get_scale())
    return [each.detach() for each in params], trace


def test_parameter_groups_of_all_kinds():
    both(groups_and_devices)


def replaced(scaler_of):
    """A gradient that the user replaces after unscaling, and weights moved by hand in between."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu")
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.unscale_(optimizer)
        for param in model.parameters():
            param.grad = param.grad.clamp(-0.01, 0.01) if number else torch.nan_to_num(param.grad) * 2
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    return weights(model), scaler.get_scale()


def test_gradients_replaced_after_unscaling():
    both(replaced)


def cleaned(scaler_of):
    """Gradients that were not finite when they were unscaled, and are made finite: torch skips all the same."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0, overflows=True)).backward()
    scaler.unscale_(optimizer)
    for param in model.parameters():
        param.grad.zero_()
    scaler.step(optimizer)
    scaler.update()
    return weights(model), scaler.get_scale()


def test_an_overflow_counts_though_its_gradients_were_cleared_of_it():
    both(cleaned)


def without_step(scaler_of):
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


def test_a_step_that_the_user_leaves_out():
    both(without_step)


def by_hand(scaler_of):
    """A step that the user takes without the scaler, with unscaled gradients, or with some of no scaler's."""
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), scaler_of("cpu")
    for number in range(6):
        optimizer.zero_grad()
        if number % 2:
            loss_of(model, number).backward()
            optimizer.step()
            continue
        scaler.scale(loss_of(model, number)).backward()
        scaler.unscale_(optimizer)
        optimizer.step() if number == 2 else scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale()


def test_steps_without_the_scaler_in_between():
    both(by_hand)


def disabled(scaler_of):
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu", enabled=False)
    output = model(batch(0)).mean()
    assert scaler.scale(output) is output
    scaler.scale(output).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    trace = [scaler.step(optimizer), scaler.step(optimizer, lambda: 5), scaler.update(), scaler.get_scale()]
    scaler.load_state_dict({})
    return weights(model), trace, scaler.state_dict(), scaler.is_enabled()


def test_a_disabled_scaler():
    both(disabled)
    scaler = GradScaler("cpu", enabled=False)
    model = network()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not scaler.last_step.skipped


def patched(scaler_of):
    """Steps that others have wrapped on the instance, as schedulers do, and accelerate, which counts calls."""
    model = network()
    optimizer, scaler, calls = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu"), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    plain = optimizer.step

    def counted(*args, **kwargs):
        calls.append(len(args) + len(kwargs))
        return plain(*args, **kwargs)

    for number in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, number == 2)).backward()
        optimizer.step = counted
        scaler.step(optimizer, None)
        optimizer.step = plain
        scaler.update()
        scheduler.step()
    return weights(model), len(calls), scheduler.get_last_lr()


def test_steps_that_others_have_wrapped():
    both(patched)


def compiled(scaler_of):
    model = network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of("cpu")

    def step(x):
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    run = torch.compile(step, backend="eager")
    for number in range(3):
        run(batch(number))
    return weights(model), scaler.state_dict()


def test_a_compiled_step():
    found = compiled(GradScaler)
    assert found[1]["_growth_tracker"] == 3
    plain, model = torch.optim.SGD, network()
    optimizer = plain(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    for one, other in zip(found[0], weights(model), strict=True):
        torch.testing.assert_close(one, other)


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


@pytest.mark.parametrize("saving", SCALERS)
@pytest.mark.parametrize("loading", SCALERS)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_states_load_both_ways_and_go_on(saving, loading, is_lazy):
    """As torch's test: whether a loss was scaled before or not, everything is loaded, the rules included."""
    first = SCALERS[saving]("cpu", 3.0, 4.0, 0.5, 2)
    second = SCALERS[loading]("cpu", 6.0, 7.0, 0.8, 1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not is_lazy:
        trained(first, model, optimizer, range(5))
        trained(second, model, optimizer, range(3))
    state = first.state_dict()
    assert state == first.state_dict()
    assert json.loads(json.dumps(state)) == state
    second.load_state_dict(state)
    assert second.state_dict() == state
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(first, f"get_{name}")() == getattr(second, f"get_{name}")() == state[name]
    other = copy.deepcopy(model)
    found = trained(second, model, optimizer, range(6, 16))
    assert found == trained(first, other, torch.optim.SGD(other.parameters(), lr=0.1), range(6, 16))
    for one, two in zip(weights(model), weights(other), strict=True):
        assert torch.equal(one, two)


def test_getters_and_setters():
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


def test_a_new_scale_as_a_number_and_as_a_tensor():
    for scaler_of in SCALERS.values():
        scaler = scaler_of("cpu", init_scale=8.0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(scaler, model, optimizer, (0,))
        given = torch.tensor(16.0)
        scaler.scale(loss_of(model, 1)).backward()
        scaler.step(optimizer)
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
        assert trained(copied, network(), torch.optim.SGD(network().parameters(), lr=0.1), ()) == []
    other = copy.deepcopy(scaler)
    trained(other, model, optimizer, (2,))
    assert (other.get_scale(), scaler.get_scale()) == (8.0, 4.0)
    assert not pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False))).is_enabled()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, lambda params, lr: MEZZO["mezzo adamw"](params)])
def test_a_step_whose_hook_has_raised_is_taken_again(kind):
    """As with torch's; a step that has begun to write is not."""
    ends = []
    for raises in (True, False):
        model, scaler = network(), GradScaler("cpu", init_scale=1024.0)
        optimizer, calls = kind(model.parameters(), lr=0.1), []

        def once(*_, calls=calls, raises=raises):
            calls.append(1)
            if raises and len(calls) == 1:
                raise ValueError("of the user's")

        optimizer.register_step_pre_hook(once)
        scaler.scale(loss_of(model, 0)).backward()
        if raises:
            with pytest.raises(ValueError, match="of the user's"):
                scaler.step(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=0, atol=0)
