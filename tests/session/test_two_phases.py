"""Models that are prepared first and get their session later: bit for bit what the session prepares itself."""

import copy
import io

import pytest
import torch
from torch import nn

import mezzo
from mezzo import MixedPrecision, Policy, PolicyError, StateError, UnsupportedError, optim

from ..support.tables import thinned

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "split": lambda params: optim.AdamW(params, lr=0.01),
    "full": lambda params: optim.AdamW(params, lr=0.01, master="full"),
}
POLICIES = (
    "O0", "O1,emulate=true", "O2,dtype=bfloat16,emulate=true,fp32_module=3", "O2,emulate=true",
    "O2,dtype=bfloat16,emulate=true", "O3,dtype=bfloat16,emulate=true",
)  # fmt: skip
LOW = "O2,dtype=bfloat16,emulate=true"


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def train(model, amp, numbers=range(3)):
    for number in numbers:
        x = torch.sin(torch.arange(24.0) * (number + 1)).view(4, 6)
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()


def at_once(make, policy, seed=0):
    model = net(seed)
    return model, MixedPrecision(model, make(model.parameters()), policy)


@pytest.mark.parametrize("policy, name", thinned(POLICIES, OPTIMIZERS, every=2))
def test_a_session_over_a_prepared_model_is_the_one_that_prepares_it_itself(policy, name, bits):
    make = OPTIMIZERS[name]
    one, at_first = at_once(make, policy)
    train(one, at_first)
    for is_early in (True, False):
        two = net()
        early = make(two.parameters()) if is_early else None
        handle = mezzo.prepare(two, policy)
        amp = MixedPrecision(handle, early or make(two.parameters()))
        assert amp.policy == Policy.parse(policy)
        train(two, amp)
        assert bits(two.state_dict()) == bits(one.state_dict())
        assert bits(amp.state_dict()) == bits(at_first.state_dict())
        low = bits(two.state_dict())
        amp.close()
        assert bits(two.state_dict()) == low  # a wrapper around it may rely on its dtypes
        handle.remove()
        twin, session = at_once(make, policy)
        train(twin, session)
        session.close()
        assert bits(two.state_dict()) == bits(twin.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_session_removing_restores_every_bit_and_the_memory(policy, bits):
    model = net()
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([1.00390625, -0.0, 1e-40, 3.0e-8])  # a tie in BF16; subnormal numbers
    before, memory = bits(model.state_dict()), [param.data_ptr() for param in model.parameters()]
    handle = mezzo.prepare(model, policy)
    with handle.autocast():
        model(torch.ones(2, 6)).float().sum().backward()
    model.load_state_dict(model.state_dict() | {"1.num_batches_tracked": torch.tensor(0)})
    model[1].reset_running_stats()
    handle.remove()
    assert bits(model.state_dict()) == before
    assert [param.data_ptr() for param in model.parameters()] == memory
    handle.remove()
    assert bits(model.state_dict()) == before


@pytest.mark.parametrize("name", ["adamw", "split"])
def test_one_session_after_another_goes_on_with_every_bit(name, bits):
    make = OPTIMIZERS[name]
    one, first = at_once(make, LOW)
    two = net()
    optimizer = make(two.parameters())
    handle = mezzo.prepare(two, LOW)
    train(one, first, range(6))
    amp = MixedPrecision(handle, optimizer)
    train(two, amp)
    amp.close()
    amp = MixedPrecision(handle, optimizer, Policy.parse(LOW))
    train(two, amp, range(3, 6))
    assert bits(two.state_dict()) == bits(one.state_dict())
    assert bits(amp.state_dict()["masters"]) == bits(first.state_dict()["masters"])


@pytest.mark.parametrize("name", ["adamw", "split", "full"])
def test_a_session_that_is_refused_leaves_the_handle_as_it_was(name, bits, monkeypatch):
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = 1.01171875  # a tie, which split storage rounds away from zero, and torch to even
    before = bits(model.state_dict())
    handle = mezzo.prepare(model, LOW)
    optimizer = OPTIMIZERS[name](model.parameters())
    low = bits(model.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr("mezzo.session.begin.watch", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            MixedPrecision(handle, optimizer)
    assert bits(model.state_dict()) == low
    assert not handle.in_session
    handle.remove()
    assert bits(model.state_dict()) == before


# What happens in between ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "split"])
def test_weights_loaded_in_between_count_with_all_their_bits(name, bits):
    make = OPTIMIZERS[name]
    one, first = at_once(make, LOW, seed=1)
    two = net()
    handle = mezzo.prepare(two, LOW)
    two.load_state_dict(net(seed=1).state_dict())
    amp = MixedPrecision(handle, make(two.parameters()))
    assert bits(amp.state_dict()["masters"]) == bits(first.state_dict()["masters"])
    train(one, first)
    train(two, amp)
    assert bits(two.state_dict()) == bits(one.state_dict())


def test_what_is_written_in_between_counts_element_by_element():
    model = net()
    before = model[0].weight.detach().clone()
    handle = mezzo.prepare(model, LOW)
    model[0].weight.data[0, :2] = torch.tensor([2.0, -3.0])  # as programs initialise: no version counts this
    with torch.no_grad():
        model[0].weight[1] *= 2
    amp = MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    master = next(amp.master_params())
    assert master[0, :2].tolist() == [2.0, -3.0]
    assert torch.equal(master[1], model[0].weight[1].float())
    assert torch.equal(master[2:], before[2:])
    assert torch.equal(master[0, 2:], before[0, 2:])


def test_an_optimizer_that_brings_the_other_halves_keeps_them(bits):
    """A run that is resumed before its session is made: low weights and remainders come from the checkpoint."""
    one, first = at_once(OPTIMIZERS["split"], LOW)
    train(one, first)
    saved = copy.deepcopy([one.state_dict(), first._core.optimizers[0].state_dict()])
    two = net(seed=1)
    handle = mezzo.prepare(two, LOW)
    optimizer = OPTIMIZERS["split"](two.parameters())
    two.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp = MixedPrecision(handle, optimizer)
    assert bits(amp.state_dict()["masters"]) == bits(first.state_dict()["masters"])
    train(one, first, range(3, 5))
    train(two, amp, range(3, 5))
    assert bits(two.state_dict()) == bits(one.state_dict())


@pytest.mark.parametrize("name", ["adamw", "momentum", "split"])
def test_an_optimizer_that_has_trained_before_keeps_its_state(name, bits):
    results = []
    for is_early in (False, True):
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters())
        for number in range(2):
            model(torch.sin(torch.arange(24.0) + number).view(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        subject = mezzo.prepare(model, LOW) if is_early else model
        amp = MixedPrecision(subject, optimizer, LOW)
        train(model, amp)
        results.append(bits([model.state_dict(), amp.state_dict()["masters"]]))
    assert results[0] == results[1]


def test_values_that_do_not_fit_are_refused_while_they_load(bits):
    model = net()
    mezzo.prepare(model, "O2,emulate=true")
    before = bits(model.state_dict())
    huge = net().state_dict()
    huge["0.weight"] = huge["0.weight"] * 1e6
    with pytest.raises(UnsupportedError, match=r"values do not fit float16(.|\n)*0\.weight"):
        model.load_state_dict(huge)
    assert bits(model.state_dict()) == before


def test_a_copy_or_a_pickled_model_leads_to_no_handle():
    model = net()
    mezzo.prepare(model, "O1,emulate=true")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        amp = MixedPrecision(other, torch.optim.SGD(other.parameters(), lr=0.1), "O1,dtype=bfloat16,emulate=true")
        train(other, amp)


def test_originals_can_be_given_up():
    model = net()
    handle = mezzo.prepare(model, LOW)
    low = model[0].weight.detach().clone()
    handle.release_originals()
    handle.remove()
    assert torch.equal(model[0].weight, low.float())


# Wrappers and several models --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what goes through a hook, read by Dynamo itself
@pytest.mark.parametrize("policy", [None, LOW])
def test_a_wrapper_around_a_prepared_model_is_known(policy, bits):
    one, first = at_once(OPTIMIZERS["adamw"], LOW)
    train(one, first)
    for wrap in (lambda m: torch.compile(m, backend="eager"), nn.Sequential, lambda m: m):
        two = net()
        mezzo.prepare(two, LOW)  # its handle is found again
        wrapper = wrap(two)
        amp = MixedPrecision(wrapper, torch.optim.AdamW(wrapper.parameters(), lr=0.01), policy)
        assert amp.policy == Policy.parse(LOW)
        train(wrapper, amp)
        assert bits(list(two.state_dict().values())) == bits(list(one.state_dict().values()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what goes through a hook, read by Dynamo itself
def test_compiled_before_or_after_it_is_the_same(bits):
    one, first = at_once(OPTIMIZERS["split"], LOW)
    train(one, first)
    for compiled_first in (True, False):
        two = net()
        if compiled_first:
            run = torch.compile(two, backend="eager")
            handle = mezzo.prepare(run, LOW)
        else:
            handle = mezzo.prepare(two, LOW)
            run = torch.compile(two, backend="eager")
        amp = MixedPrecision(handle, OPTIMIZERS["split"](two.parameters()))
        train(run, amp)
        assert bits(two.state_dict()) == bits(one.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_several_prepared_models_train_in_one_session(tied, bits):
    results = []
    for early in (False, True):
        models = [net(), net(seed=1)]
        if tied:
            models[1][0].weight = models[0][0].weight
        before = [bits(model.state_dict()) for model in models]
        params = list(dict.fromkeys(param for model in models for param in model.parameters()))
        handles = [mezzo.prepare(model, LOW) for model in models] if early else models
        optimizers = torch.optim.AdamW(params, lr=0.01)
        amp = MixedPrecision(handles, optimizers) if early else MixedPrecision(models, optimizers, LOW)
        x = torch.ones(4, 6)
        for _ in range(2):
            with amp.autocast():
                loss = (models[0](x) * models[1](x)).float().square().mean()
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
        results.append([bits(model.state_dict()) for model in models])
    assert results[0] == results[1]
    models = [net(), net(seed=1)]
    if tied:
        models[1][0].weight = models[0][0].weight
    for order in ([0, 1], [1, 0]):
        handles = [mezzo.prepare(model, LOW) for model in models]
        for number in order:
            handles[number].remove()
        assert [bits(model.state_dict()) for model in models] == before


def test_a_prepared_model_beside_one_that_is_not(bits):
    models = [net(), net(seed=1)]
    handle = mezzo.prepare(models[1], LOW)
    amp = MixedPrecision([models[0], handle], torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], 0.1))
    assert {param.dtype for model in models for param in model[0].parameters()} == {torch.bfloat16}
    amp.close()
    assert models[0][0].weight.dtype == torch.float32
    assert models[1][0].weight.dtype == torch.bfloat16


# What is refused --------------------------------------------------------------------------------------------


def other_policy(model, handle):
    return MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1), "O2,emulate=true")


def part(model, handle):
    return MixedPrecision(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1))


def larger(model, handle):
    whole = nn.Sequential(model, nn.Linear(3, 3))
    return MixedPrecision(whole, torch.optim.SGD(whole.parameters(), lr=0.1))


def twice(model, handle):
    return MixedPrecision([handle, nn.Sequential(model)], torch.optim.SGD(model.parameters(), lr=0.1))


def removed(model, handle):
    handle.remove()
    return MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1))


def cast(model, handle):
    model.float()
    return MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1))


def replaced(model, handle):
    model[3] = nn.Linear(8, 3)
    return MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1))


def with_gradients(model, handle):
    model(torch.ones(2, 6)).sum().backward()
    return MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1))


def prepared_twice(model, handle):
    return mezzo.prepare(model, LOW)


REFUSALS = [
    (other_policy, PolicyError, r"not the one that its model was prepared with(.|\n)*dtype: bfloat16 → float16"),
    (part, StateError, "prepared as part of a larger one"),
    (larger, StateError, "prepared only in part"),
    (twice, PolicyError, "listed twice"),
    (removed, StateError, "the preparation was removed"),
    (cast, StateError, r"was cast(.|\n)*0\.weight \(float32\)"),
    (replaced, StateError, r"given other parameters(.|\n)*3\.weight, 3\.bias"),
    (with_gradients, StateError, r"hold gradients(.|\n)*zero_grad"),
    (prepared_twice, StateError, "prepared already"),
]


@pytest.mark.parametrize("call, error, says", REFUSALS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_does_not_fit_is_refused_and_nothing_is_changed(call, error, says, bits):
    model = net()
    handle = mezzo.prepare(model, LOW)
    before = bits(model.state_dict())
    with pytest.raises(error, match=says):
        call(model, handle)
    if call not in (removed, cast, replaced, with_gradients):
        assert bits(model.state_dict()) == before


def test_a_session_keeps_others_and_remove_away():
    model = net()
    handle = mezzo.prepare(model, LOW)
    amp = MixedPrecision(handle, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StateError, match=r"belongs to a session(.|\n)*amp\.close\(\)"):
        handle.remove()
    for again in (handle, model, nn.Sequential(model)):
        with pytest.raises(StateError, match="belongs to a session"):
            MixedPrecision(again, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, amp)
    amp.close()
    handle.remove()


def test_what_the_session_would_refuse_it_refuses_later_in_the_same_words():
    policy, texts = "O1,dtype=bfloat16,emulate=true,low_param=3.weight", []
    for is_early in (True, False):
        model = net()
        subject = mezzo.prepare(model, policy) if is_early else model
        with pytest.raises(UnsupportedError, match="would train without FP32 masters") as refused:
            MixedPrecision(subject, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


def test_o1_is_prepared_once_too():
    model = net()
    handle = mezzo.prepare(model, "O1,dtype=bfloat16,emulate=true")
    with pytest.raises(StateError, match="prepared already"):
        mezzo.prepare(model, "O1")
    with pytest.raises(PolicyError, match="prepared with"):
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1")
    handle.remove()
    MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1,emulate=true")


def test_state_in_fp32_for_weights_without_masters_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    handle = mezzo.prepare(model, "O3,dtype=bfloat16,emulate=true")
    with pytest.raises(StateError, match=r"holds FP32 state(.|\n)*0\.weight"):
        MixedPrecision(handle, optimizer)
