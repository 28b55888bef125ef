"""A script's own checkpoints while it is attached: they go on bit for bit, and plain torch loads them."""

import copy
import io
import itertools

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import mezzo

from .loops import OPTIMIZERS, POLICIES, attached, build, ends, loss_of, spoil, train

FEW = [
    ("O0, scaled", "fused"),
    ("O1", "SGD"),
    ("O1", "mezzo"),
    ("O1, bfloat16", "AdamW"),
    ("O2", "SGD"),
    ("O2", "fused"),
    ("O2", "mezzo"),
    ("O2, bfloat16", "AdamW"),
    ("O2, bfloat16", "mezzo"),
    ("O3", "SGD"),
]


def saved(*parts):
    """What a script writes to a file, and reads from it."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(policy, optimizer, order):
    """The end of a run that is saved after three steps and goes on with new objects, and of one that just goes on."""
    found = []
    for stops in (True, False):
        model, built = build(optimizer)
        scheduler = StepLR(built, 2, gamma=0.5)
        amp = mezzo.attach(model, built, policy)
        train(model, built, schedulers=[scheduler])
        if stops:
            files = saved(model, built, scheduler)
            amp.detach()
            model, built = build(optimizer)
            torch.nn.init.ones_(next(model.parameters()))
            scheduler = StepLR(built, 2, gamma=0.5)
            amp = mezzo.attach(model, built, policy)
            parts = [model, built, scheduler]
            for place in order:
                parts[place].load_state_dict(files[place])
        train(model, built, steps=range(3, 6), schedulers=[scheduler], spoilt=(4,))
        found.append((ends(amp, built), scheduler.last_epoch))
        amp.detach()
    return found


@pytest.mark.parametrize("policy, optimizer", FEW)
def test_a_run_goes_on_bit_for_bit(policy, optimizer, bits):
    for order in ((0, 1, 2), (1, 2, 0)):
        one, other = resumed(POLICIES[policy], optimizer, order)
        assert bits(one) == bits(other), order
        assert one[0][3].skipped == 2
        assert one[1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy, optimizer", list(itertools.product(POLICIES, OPTIMIZERS)))
def test_every_run_goes_on_bit_for_bit(policy, optimizer, bits):
    for order in itertools.permutations(range(3)):
        one, other = resumed(POLICIES[policy], optimizer, order)
        assert bits(one) == bits(other), order


@pytest.mark.parametrize("policy", ["O1", "O2", "O2, bfloat16"])
def test_a_run_goes_on_in_the_middle_of_an_accumulation(policy, bits):
    found = []
    for stops in (True, False):
        model, built = build("AdamW")
        amp = mezzo.attach(model, built, POLICIES[policy])
        train(model, built)
        for number in range(2):
            loss_of(model, number).backward()
        if stops:
            files = saved(model, built)
            amp.detach()
            model, built = build("AdamW")
            amp = mezzo.attach(model, built, POLICIES[policy])
            for part, state in zip((model, built), files, strict=True):
                part.load_state_dict(state)
        loss_of(model, 2).backward()
        built.step()
        found.append(ends(amp, built))
        amp.detach()
    assert bits(found[0]) == bits(found[1])


@pytest.mark.parametrize("policy", ["O1", "O2", "O2, bfloat16", "O3"])
def test_plain_torch_loads_them(policy):
    model, built = build("AdamW")
    with attached(model, built, POLICIES[policy]) as amp:
        train(model, built)
        states = saved(model, built)
        exact = [p.detach().float() for p in amp.master_params()]
    assert all(value.dtype == torch.float32 for value in states[0].values())
    twin, theirs = build("AdamW")
    twin.load_state_dict(states[0])
    theirs.load_state_dict(states[1])
    assert "mezzo" not in theirs.state_dict()
    assert all(map(torch.equal, exact, twin.parameters()))
    train(twin, theirs, spoilt=())


def test_values_that_are_loaded_are_the_masters():
    for policy, optimizer in itertools.product(("O2", "O2, bfloat16"), ("SGD", "mezzo")):
        model, built = build(optimizer)
        fresh = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        with attached(model, built, POLICIES[policy]):
            train(model, built, steps=range(1), spoilt=())
            model.load_state_dict(fresh)
            now = model.state_dict()
            assert all(torch.equal(now[name], value) for name, value in fresh.items())
        assert all(map(torch.equal, model.state_dict().values(), fresh.values()))


def test_a_state_from_plain_torch_is_loaded_as_it_is():
    plain, theirs = build("AdamW")
    train(plain, theirs, spoilt=())
    model, built = build("AdamW")
    with attached(model, built, "O2,emulate=true") as amp:
        train(model, built, steps=range(1), spoilt=(0,))
        scale = float(amp.loss_scale)
        model.load_state_dict(plain.state_dict())
        built.load_state_dict(theirs.state_dict())
        assert float(amp.loss_scale) == scale
        train(model, built, spoilt=())


def test_loading_while_gradients_wait_forgets_them():
    model, built = build()
    with attached(model, built, "O1,emulate=true") as amp:
        states = copy.deepcopy([model.state_dict(), built.state_dict()])
        loss_of(model, 0).backward()
        spoil(model)
        model.load_state_dict(states[0])
        built.load_state_dict(states[1])
        loss_of(model, 1).backward()
        built.step()
        assert not amp.last_step.skipped


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    other, theirs = build()
    wide = torch.nn.Linear(8, 3)
    with attached(wide, torch.optim.SGD(wide.parameters(), lr=0.1, momentum=0.9), "O1,emulate=true") as amp:
        (strange,) = saved(amp._core.optimizers[0])
    with attached(other, theirs, "O1,emulate=true") as amp:
        train(other, theirs)
        before = copy.deepcopy(theirs.state_dict()), amp.stats(), float(amp.loss_scale)
        with pytest.raises(mezzo.StateError, match="the state belongs to another session"):
            theirs.load_state_dict(strange)
        assert (amp.stats(), float(amp.loss_scale)) == before[1:]
        train(other, theirs, spoilt=())


def test_states_of_two_optimizers_load_one_after_the_other(bits):
    found = []
    for stops in (True, False):
        model, _ = build()
        built = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[:2], model[2:])]
        amp = mezzo.attach(model, built, "O2,emulate=true")
        loss_of(model, 0).backward()
        built[0].step()  # the gradients of the other wait
        if stops:
            files = saved(model, *built)
            amp.detach()
            model, _ = build()
            built = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[:2], model[2:])]
            amp = mezzo.attach(model, built, "O2,emulate=true")
            for part, state in zip((model, *built), files, strict=True):
                part.load_state_dict(state)
        built[1].step()
        found.append(([p.detach().clone() for p in amp.master_params()], amp.stats()))
        amp.detach()
    assert bits(found[0]) == bits(found[1])


@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo"])
def test_looking_at_the_state_of_a_models_parameter_leaves_the_checkpoint_as_it_was(optimizer, bits):
    model, built = build(optimizer)
    with attached(model, built, "O2,dtype=bfloat16,emulate=true"):
        train(model, built)
        built.state["rounds"] = 0  # of the program's own
        before = built.state_dict()["state"]
        for param in model.parameters():
            dict(built.state[param])
        assert bits(built.state_dict()["state"]) == bits(before)
        train(model, built)
        assert built.state.pop("rounds") == 0
    assert {id(key) for key in built.state} == {id(param) for param in model.parameters()}
