"""Models that are prepared first and get their session later: bit for bit what a session prepares itself."""

import copy
import io

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, NumericsError, Policy, StateError

from ..support.tables import thinned
from .loops import EVERY, LOW, O3, OPTIMIZERS, assert_same, facts, network, train, weights

BF16 = LOW[3]


def at_once(optimizer, policy):
    model = network()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, MixedPrecision(model, made, policy)


def steps(model, amp, numbers=range(3)):
    for number in numbers:
        train(amp, model, number, spoilt=number == 1)


@pytest.mark.parametrize("policy, optimizer", thinned([*EVERY, *O3], OPTIMIZERS, every=3))
def test_a_session_over_a_prepared_model_is_the_one_that_prepares_it_itself(policy, optimizer):
    one, first, amp_one = at_once(optimizer, policy)
    steps(one, amp_one)
    expected = facts(one, first, amp=amp_one)
    amp_one.close()
    for is_early in (True, False):
        two = network()
        made = OPTIMIZERS[optimizer](two.parameters()) if is_early else None
        handle = mezzo.prepare(two, policy)
        made = made or OPTIMIZERS[optimizer](two.parameters())
        amp = MixedPrecision(handle, made)
        assert amp.policy == Policy.parse(policy)
        steps(two, amp)
        assert_same(expected, facts(two, made, amp=amp))
        low = copy.deepcopy(two.state_dict())
        amp.close()
        assert_same(low, two.state_dict())  # a wrapper around it may rely on its dtypes
        handle.remove()
        assert_same(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("policy", [*LOW, O3[1]])
def test_without_a_session_removing_restores_every_bit(policy):
    model = network()
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([1.00390625, -0.0, 1e-40, 3.0e-8])  # a tie in BF16; subnormal numbers
    before = copy.deepcopy(model.state_dict())
    handle = mezzo.prepare(model, policy)
    with handle.autocast():
        model(torch.ones(2, 8)).float().sum().backward()
    for _ in range(2):
        handle.remove()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) or "bfloat16" not in policy
            assert ((value - before[name]).abs() <= 2.0**-40).all(), name
            assert torch.equal(value.signbit(), before[name].signbit()), name


@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo"])
def test_one_session_after_another_goes_on_with_every_bit(optimizer):
    one, _, through = at_once(optimizer, BF16)
    steps(one, through, range(6))
    two = network()
    made = OPTIMIZERS[optimizer](two.parameters())
    handle = mezzo.prepare(two, BF16)
    for numbers in (range(3), range(3, 6)):
        amp = MixedPrecision(handle, made)
        steps(two, amp, numbers)
        assert_same(weights(amp), weights(through)) if numbers[0] else amp.close()


@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo"])
def test_weights_loaded_in_between_count_with_all_their_bits(optimizer):
    trained, _, amp = at_once("SGD", "O0")
    steps(trained, amp)
    two = network()
    handle = mezzo.prepare(two, BF16)
    two.load_state_dict(trained.state_dict())
    amp = MixedPrecision(handle, OPTIMIZERS[optimizer](two.parameters()))
    assert_same(weights(amp), list(trained.parameters()))


def test_what_is_written_in_between_counts_to_half_a_spacing_and_all_else_exactly():
    model = network()
    before = model[0].weight.detach().clone()
    handle = mezzo.prepare(model, BF16)
    model[0].weight.data[0, :2] = torch.tensor([2.0, -3.0])  # as programs initialise: no version counts this
    with torch.no_grad():
        model[0].weight[1] *= 2
    master = next(MixedPrecision(handle, OPTIMIZERS["SGD"](model.parameters())).master_params())
    assert master[0, :2].tolist() == pytest.approx([2.0, -3.0], rel=2**-8)
    torch.testing.assert_close(master[1].detach(), model[0].weight[1].detach().float(), rtol=2**-8, atol=0)
    assert torch.equal(master[2:], before[2:])
    assert torch.equal(master[0, 2:], before[0, 2:])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what goes through a hook, read by Dynamo itself
@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), nn.Sequential])
def test_a_wrapper_around_a_prepared_model_is_known(wrap):
    one, _, first = at_once("AdamW", BF16)
    steps(one, first)
    two = network()
    mezzo.prepare(two, BF16)  # its handle is found again
    wrapper = wrap(two)
    amp = MixedPrecision(wrapper, OPTIMIZERS["AdamW"](wrapper.parameters()))
    assert amp.policy == Policy.parse(BF16)
    steps(wrapper, amp)
    assert_same(weights(first), weights(amp))


def test_the_model_inside_of_data_parallel_is_wrapped_after_it_is_prepared(alone):
    one, _, first = at_once("AdamW", BF16)
    steps(one, first)
    two = network()
    handle = mezzo.prepare(two, BF16)
    wrapper = nn.parallel.DistributedDataParallel(two)
    amp = MixedPrecision(handle, OPTIMIZERS["AdamW"](two.parameters()))
    steps(wrapper, amp)
    assert_same(weights(first), weights(amp))
    amp.close()


@pytest.mark.parametrize("is_tied", [False, True])
def test_several_prepared_models_train_in_one_session(is_tied):
    ends = []
    for early in (False, True):
        models = [network(), network()]
        if is_tied:
            models[1][0].weight = models[0][0].weight
        made = OPTIMIZERS["AdamW"](dict.fromkeys(param for model in models for param in model.parameters()))
        amp = MixedPrecision([mezzo.prepare(m, BF16) for m in models] if early else models, made, BF16)
        for number in range(2):
            with amp.autocast():
                loss = (models[0](torch.ones(4, 8)) * models[1](torch.ones(4, 8) * number)).float().square().mean()
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
        ends.append([model.state_dict() for model in models])
    assert_same(*ends)


def test_a_prepared_model_beside_one_that_is_not():
    models = [network(), network()]
    handle = mezzo.prepare(models[1], BF16)
    made = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], 0.1)
    amp = MixedPrecision([models[0], handle], made)
    assert {model[0].weight.dtype for model in models} == {torch.bfloat16}
    amp.close()
    assert [model[0].weight.dtype for model in models] == [torch.float32, torch.bfloat16]


def test_a_copy_or_a_pickled_model_leads_to_no_handle():
    model = network()
    mezzo.prepare(model, LOW[0])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        steps(other, MixedPrecision(other, OPTIMIZERS["SGD"](other.parameters()), LOW[1]))


def test_a_session_keeps_others_and_remove_away():
    model = network()
    handle = mezzo.prepare(model, BF16)
    made = OPTIMIZERS["SGD"](model.parameters())
    amp = MixedPrecision(handle, made)
    with pytest.raises(StateError, match=r"belongs to a session(.|\n)*amp\.close\(\)"):
        handle.remove()
    for again in (handle, model, nn.Sequential(model)):
        with pytest.raises(StateError, match="belongs to a session"):
            MixedPrecision(again, OPTIMIZERS["SGD"](model.parameters()))
    steps(model, amp)
    amp.close()
    handle.remove()


def test_values_that_do_not_fit_are_refused_while_they_load(bits):
    model = network()
    mezzo.prepare(model, "O2,emulate=true")
    before, large = bits(model.state_dict()), network().state_dict()
    large["0.weight"] *= 1e6
    with pytest.raises(NumericsError, match=r"beyond the range of the model's dtype(.|\n)*0\.weight"):
        model.load_state_dict(large)
    assert bits(model.state_dict()) == before
