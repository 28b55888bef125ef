"""``mezzo.attach``: what it binds and gives back, whom it takes in, what copies and checkpoints of a program hold."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import mezzo
from mezzo import StateError
from mezzo.session.attach import AttachedPrecision

from .loops import (
    EVERY,
    LOW,
    O3,
    OPTIMIZERS,
    assert_near,
    assert_same,
    attached,
    batch,
    bound_names,
    built,
    facts,
    loss_of,
    network,
    on_disk,
    spoil,
    train,
    train_plainly,
    weights,
)  # fmt: skip


class _OfAFramework(AttachedPrecision):
    """A session whose backward passes the framework's own scaler begins, so that there may be several."""

    _binds = ("schedulers",)


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [EVERY[1], LOW[0], LOW[2], O3[1]])
@pytest.mark.parametrize("begin", [mezzo.attach, mezzo.MixedPrecision])
def test_every_bound_name_is_given_back(policy, begin):
    """Model and optimizer are plain after the end, and go on as others from their states."""
    gc.collect()  # sessions of other tests
    before = bound_names()
    model, made = built("AdamW")
    instances = set(vars(model)), set(vars(made))
    amp = begin(model, made, policy)
    scheduler = StepLR(made, 1)
    for number in range(3):
        if begin is mezzo.attach:
            train_plainly(model, made, number, spoilt=number == 1)
        else:
            train(amp, model, number, spoilt=number == 1)
        scheduler.step()
    amp.backward(loss_of(model, 3, amp))
    kept = weights(amp)
    amp.close()
    amp.close()
    assert repr(amp).endswith("(closed)")
    after = bound_names()
    assert {key for key in before if after[key] is not before[key]} == set()
    assert after.keys() == before.keys()
    assert set(vars(model)) == instances[0]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())
    assert not made._optimizer_step_pre_hooks
    assert made.param_groups[0]["params"] == list(model.parameters())
    for param, exact in zip(model.parameters(), kept, strict=True):
        assert param.dtype == torch.float32
        assert torch.equal(param, exact)
        assert param.grad is None
    twin, theirs = built("AdamW")
    twin.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(made.state_dict()))
    for number in range(2):
        train_plainly(model, made, number)
        train_plainly(twin, theirs, number)
    assert_same(facts(model, made), facts(twin, theirs))


@pytest.mark.parametrize("first", [0, 1])
def test_names_are_given_back_in_whatever_order_sessions_end(first):
    gc.collect()
    before = bound_names()
    pair = [_OfAFramework(*built(), "O1") for _ in range(2)]
    pair[first].close()
    assert bound_names() != before
    pair[1 - first].close()
    after = bound_names()
    assert {key for key in before if after[key] is not before[key]} == set()


def test_a_session_that_nobody_holds_ends_by_itself():
    engine = torch.autograd._engine_run_backward
    mezzo.attach(*built(), "O1,emulate=true")
    gc.collect()
    model, made = built()
    with attached(model, made, "O1,emulate=true"):
        train_plainly(model, made, 0)
    assert torch.autograd._engine_run_backward is engine


def test_a_session_says_what_it_is(caplog):
    policy = "O1,dtype=bfloat16,emulate=true"
    amp = mezzo.MixedPrecision(*built(), policy)
    assert (repr(amp), str(amp.policy)) == (f"MixedPrecision(Sequential, SGD, policy={policy!r})", policy)
    assert mezzo.MixedPrecision(*built(), torch.float16).policy == mezzo.Policy.O1("float16")
    with caplog.at_level("INFO", "mezzo.cast.device.decide"), attached(*built()) as amp:
        assert [record.getMessage().split(",")[0] for record in caplog.records] == ["no policy is given: O1"]
        assert amp.policy.level == "O1"
        assert amp.policy.dtype in (torch.float16, torch.bfloat16)


# Optimizers that come later, or belong to others ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, optimizer", [(EVERY[1], "SGD"), (LOW[0], "mezzo"), (LOW[2], "SGD"), (LOW[3], "SGD"), (LOW[3], "mezzo")]
)
def test_an_optimizer_that_is_added_is_as_one_that_was_there(policy, optimizer):
    """Of a layer that was frozen until then, whose FP32 values are taken over whole."""
    ends = []
    for late in (True, False):
        model = network()
        one = OPTIMIZERS["SGD"](model[0].parameters())
        other = None if late else OPTIMIZERS[optimizer](model[3].parameters())
        with attached(model, [one] if late else [one, other], policy) as amp:
            for number in range(4):
                if late and number == 1:
                    other = OPTIMIZERS[optimizer](model[3].parameters())
                    amp.add(other)
                    assert torch.equal(model.state_dict()["3.weight"], network()[3].weight)
                model[3].requires_grad_(number > 0)
                loss_of(model, number).backward()
                if number == 2:
                    spoil(model[3])
                one.step()
                if number:
                    other.step()
                model.zero_grad()
            ends.append((weights(amp), "mezzo" in other.state_dict()))
    assert_same(*ends)
    assert ends[0][1]


def test_what_belongs_to_other_models_steps_as_ever():
    """Optimizers, a disabled GradScaler and one of another model; and what was unknown, after the end."""
    other, twin = network(), network()
    beside, theirs = OPTIMIZERS["SGD"](other.parameters()), OPTIMIZERS["SGD"](twin.parameters())
    train_plainly(twin, theirs, 0)
    for policy in ("O0,loss_scale=8", *LOW):
        model, made = built()
        stranger = torch.optim.SGD(model.parameters(), lr=1.0)
        with attached(model, made, policy) as amp:
            off = torch.amp.GradScaler("cpu", enabled=False)
            off.scale(loss_of(model, 0)).backward()
            off.unscale_(made)
            off.step(made)
            off.update()
            assert (amp.stats().steps, amp.stats().skipped) == (1, 0)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(loss_of(other, 0)).backward()
            assert scaler.step(beside) is None
            assert (amp.stats().steps, amp.stats().skipped) == (1, 0)
            assert_same(facts(other, beside), facts(twin, theirs))
            with pytest.raises(StateError, match="does not know"):
                stranger.step()
        train_plainly(model, stranger, 1)
        other, beside = copy.deepcopy(network()), None
        beside = OPTIMIZERS["SGD"](other.parameters())


# Copies ---------------------------------------------------------------------------------------------------------------


class WithoutMezzo(pickle.Unpickler):
    """Loads what can be loaded where mezzo is not installed."""

    def find_class(self, module, name):
        assert not module.startswith("mezzo"), f"{module}.{name}"
        return super().find_class(module, name)


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    module = type(pickle)("plain_pickle")
    module.Unpickler, module.load = WithoutMezzo, pickle.load
    return torch.load(file, weights_only=False, pickle_module=module)


WAYS = {
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch,
    "pickle": lambda value: WithoutMezzo(io.BytesIO(pickle.dumps(value))).load(),
}


@pytest.mark.parametrize("policy, optimizer", list(zip(LOW, 2 * ["SGD", "mezzo"], strict=True)))
def test_copies_are_plain_models_in_fp32(policy, optimizer):
    for way, copied in WAYS.items():
        model, made = built(optimizer)
        calls = []
        with attached(model, made, policy) as amp:
            train_plainly(model, made, 0)
            exact = [value.float() for value in weights(amp)]
            checkpoint = copied({"epoch": 3, "all": nn.ModuleList([model]), "part": model[0]})
            assert_same(exact[:2], [p.float() for p in checkpoint["part"].parameters()])
            for twin in (checkpoint["all"][0], copied(model)):
                assert_same(exact, list(twin.parameters()))
                assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in twin.parameters())
                assert vars(twin).keys() == vars(network()).keys()
                for module in twin.modules():
                    assert not any(value for name, value in vars(module).items() if name.endswith("hooks"))
            train_plainly(twin, OPTIMIZERS["SGD"](twin.parameters()), 1)
            mezzo.MixedPrecision(twin, OPTIMIZERS["SGD"](twin.parameters()), "O2,emulate=true").close()
            model.register_forward_hook(lambda *_, calls=calls: calls.append(1)) if way == "deepcopy" else None
            train_plainly(model, made, 1)  # and the model itself goes on
            if way == "deepcopy":
                copy.deepcopy(model)(batch(0)[0])
                assert len(calls) == 2  # a hook of the user's is in a copy


# Checkpoints of the program's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [EVERY[1], LOW[1], LOW[2], O3[1]])
def test_a_run_goes_on_bit_for_bit_from_its_own_checkpoint(policy):
    """Saved after three steps and gone on with in new objects: model, optimizer and scheduler alone, in any order."""
    for optimizer, order in zip(OPTIMIZERS, [(0, 1, 2), (1, 2, 0), (2, 1, 0), (0, 2, 1)], strict=True):
        ends = []
        for stops in (True, False):
            model, made = built(optimizer)
            scheduler = StepLR(made, 2, gamma=0.5)
            amp = mezzo.attach(model, made, policy)
            for number in range(6):
                if stops and number == 3:
                    files = on_disk(model, made, scheduler)
                    amp.detach()
                    model, made = built(optimizer)
                    nn.init.ones_(next(model.parameters()))
                    scheduler = StepLR(made, 2, gamma=0.5)
                    amp = mezzo.attach(model, made, policy)
                    for index in order:
                        [model, made, scheduler][index].load_state_dict(files[index])
                train_plainly(model, made, number, spoilt=number in (1, 4))
                scheduler.step()
            ends.append((facts(model, made, amp=amp), scheduler.last_epoch))
            amp.detach()
        assert_same(*ends)
        assert ends[0][1] == 4


def test_checkpoints_are_plain_torchs_both_ways():
    for policy in LOW:
        plain, theirs = built("AdamW")
        start = copy.deepcopy(list(plain.parameters()))
        train_plainly(plain, theirs, 0)
        model, made = built("AdamW")
        with attached(model, made, policy) as amp:
            train_plainly(model, made, 5)
            scale = float(amp.loss_scale)
            model.load_state_dict(copy.deepcopy(plain.state_dict()))
            made.load_state_dict(copy.deepcopy(theirs.state_dict()))
            assert float(amp.loss_scale) == scale
            for number in range(1, 4):
                train_plainly(model, made, number)
                train_plainly(plain, theirs, number)
            assert_near(weights(amp), list(plain.parameters()), start, share=0.35)
            states = on_disk(model, made)
            exact = [value.float() for value in weights(amp)]
        assert all(value.dtype == torch.float32 for value in states[0].values())
        twin, theirs = built("AdamW")
        twin.load_state_dict(states[0])
        theirs.load_state_dict(states[1])
        assert "mezzo" not in theirs.state_dict()
        assert_same(exact, list(twin.parameters()))
        train_plainly(twin, theirs, 1)
