"""A session's state between steps: bit-exact resume in any order, other policies, other systems' scalers, refusals."""

import copy
import itertools

import pytest
import torch
from torch import nn

import mezzo
from mezzo import LossScale, MixedPrecision, StateError

from ..support.tables import thinned
from .loops import (
    EVERY,
    LOW,
    O3,
    OPTIMIZERS,
    Weights,
    assert_same,
    backward,
    built,
    facts,
    on_disk,
    over,
    session,
    train,
    weights,
)  # fmt: skip

ORDERS = list(itertools.permutations(range(3)))


def build(policy, optimizer):
    return session(policy, optimizer, max_grad_norm=1.0)


@pytest.mark.parametrize("policy, optimizer, order", thinned([*EVERY, *O3], OPTIMIZERS, ORDERS, every=8))
def test_ten_steps_after_loading_are_the_same_in_whatever_order(policy, optimizer, order):
    """Saved after a skipped step; the scale grows between saving and the end."""
    policy = policy.replace("init=1024", "init=1024,interval=4")
    parts = build(policy, optimizer)
    for number in range(5):
        train(parts[2], parts[0], number, spoilt=number == 3)
    saved = on_disk(*parts)
    fresh = build(policy, optimizer)
    nn.init.ones_(fresh[0][0].bias)
    for place in order:
        fresh[place].load_state_dict(saved[place])
    for number in range(5, 15):
        for model, _, amp in (parts, fresh):
            train(amp, model, number, spoilt=number == 8)
    assert_same(facts(*parts[:2], amp=parts[2]), facts(*fresh[:2], amp=fresh[2]))
    assert_same(parts[2].state_dict(), fresh[2].state_dict())


def test_loading_goes_back_in_time_within_one_session():
    for policy in (*EVERY, O3[1]):
        model, made, amp = session(policy, "AdamW")
        train(amp, model, 0)
        saved = copy.deepcopy([model.state_dict(), made.state_dict(), amp.state_dict()])
        for number in range(1, 4):
            train(amp, model, number, spoilt=number == 2)
        after = facts(model, made, amp=amp)
        for part, state in zip((model, made, amp), saved, strict=True):
            part.load_state_dict(state)
        for number in range(1, 4):
            train(amp, model, number, spoilt=number == 2)
        assert_same(after, facts(model, made, amp=amp))


def test_a_state_shares_no_memory_with_the_session():
    for policy in LOW:
        model, _, amp = session(policy)
        train(amp, model, 0)
        state = amp.state_dict()
        before = copy.deepcopy(state)
        train(amp, model, 1, spoilt=True)
        assert_same(before, state)


def test_it_is_a_plain_tree():
    _, _, amp = session(LOW[2])
    for leaf in torch.utils._pytree.tree_leaves(amp.state_dict()):
        assert type(leaf) in (int, float, bool, str, torch.Tensor)


# Another policy -------------------------------------------------------------------------------------------------------

KINDS = [("O0", "AdamW"), (LOW[1], "AdamW"), (LOW[3], "AdamW"), (LOW[2], "AdamW"), (LOW[3], "mezzo"), (LOW[2], "mezzo")]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("one", KINDS)
def test_fp32_values_survive_a_change_of_policy_or_optimizer(one, other, order):
    (model, _, amp), fresh = session(*one), session(*other)
    for number in range(3):
        train(amp, model, number)
    saved = on_disk(model, amp)
    parts = {0: (fresh[0], saved[0]), 2: (fresh[2], saved[1])}
    for place in order:
        if place in parts:
            parts[place][0].load_state_dict(parts[place][1])
    error = 2.0**-40 if other == (LOW[2], "mezzo") else 0.0
    for mine, theirs in zip(weights(amp), weights(fresh[2]), strict=True):
        assert (mine - theirs).abs().max() <= error
    assert not train(fresh[2], fresh[0], 3).skipped


@pytest.mark.parametrize("policy", [*EVERY, O3[1]])
def test_stateful_goes_on_bit_for_bit(policy):
    for optimizer in ("AdamW", "mezzo"):
        model, _, amp = session(policy, optimizer)
        for number in range(3):
            train(amp, model, number, spoilt=number == 1)
        saved = copy.deepcopy(amp.stateful().state_dict())
        again, _, fresh = session(policy, optimizer)
        fresh.stateful().load_state_dict(saved)
        for number in range(3, 6):
            train(amp, model, number)
            train(fresh, again, number)
        assert_same((weights(amp), amp.stats()), (weights(fresh), fresh.stats()))


def test_what_fp16_does_not_hold_is_refused_by_stateful_before_anything_is_loaded():
    model, _, amp = session(LOW[3], "AdamW")
    with torch.no_grad():
        model[0].weight.fill_(1e6)
    saved = amp.stateful().state_dict()
    again, made, fresh = session(LOW[2], "AdamW")
    before = facts(again, made, amp=fresh)
    with pytest.raises(StateError, match=r"0\.weight: values beyond 65504 → float16"):
        fresh.stateful().load_state_dict(saved)
    assert_same(before, facts(again, made, amp=fresh))


def test_stateful_refuses_what_has_no_place_by_the_names_of_parameters():
    """LBFGS tells what it keeps only to a closure, and keeps lists of tensors then."""
    model, _, amp = session("O0", lambda params: torch.optim.LBFGS(params, max_iter=8))
    with pytest.raises(
        mezzo.UnsupportedError, match=r"before its first step(.|\n)*LBFGS(.|\n)*one step of the session"
    ):
        amp.stateful().state_dict()

    def closure():
        amp.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        amp.backward(loss)
        return loss

    amp.step(closure=closure)
    with pytest.raises(mezzo.UnsupportedError, match=r"LBFGS keeps tensors in nested containers(.|\n)*old_dirs"):
        amp.stateful().state_dict()


# Other systems --------------------------------------------------------------------------------------------------------

SCALERS = {
    "torch": lambda scale: (
        torch.amp.GradScaler("cpu", init_scale=scale).state_dict() | {"scale": scale, "_growth_tracker": 3}
    ),
    "apex": lambda scale: {"loss_scaler0": {"loss_scale": scale, "unskipped": 3}},
    "paddle": lambda scale: {
        "scale": torch.tensor([scale]),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 1,
        "incr_count": 3,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
    },
}


@pytest.mark.parametrize("system", SCALERS)
@pytest.mark.parametrize("style", ["five lines", "attached"])
def test_scalers_of_other_systems_give_their_scale_and_their_count(system, style):
    model = Weights(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make = MixedPrecision if style == "five lines" else mezzo.attach
    amp = make(model, optimizer, "O0,loss_scale=dynamic(interval=5)")
    amp.load_state_dict(SCALERS[system](512.0))
    assert amp.loss_scale.item() == 512.0
    for scale in (512.0, 1024.0):
        amp.backward(model.loss(1.0))
        assert amp.step().next_scale.item() == scale
        amp.zero_grad()


@pytest.mark.parametrize("policy", ["O0", "O0,loss_scale=8"])
def test_where_the_scale_does_not_move_a_scaler_s_stays_out(policy):
    model = Weights(1)
    _, amp = over(model, policy)
    before = amp.state_dict()
    amp.load_state_dict(SCALERS["torch"](512.0))
    assert_same(before, amp.state_dict())


def test_a_scale_that_counts_from_below_zero_is_saved_and_loaded():
    """DeepSpeed's first growth comes a step late: its count begins at -1."""
    saved, loaded = (over(Weights(1), f"O0,loss_scale={LossScale.like('deepspeed')}")[1] for _ in range(2))
    assert saved.state_dict()["loss_scale"]["clean_steps"] == -1
    loaded.load_state_dict(saved.state_dict())
    assert_same(saved.state_dict(), loaded.state_dict())


# Refusals -------------------------------------------------------------------------------------------------------------


def test_remainders_are_saved_by_name():
    def of(order):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        params = [p for number in order for p in model[number].parameters()]
        return model, MixedPrecision(model, torch.optim.SGD(params, lr=0.1), "O2,dtype=bfloat16,emulate=true")

    (model, amp), (again, fresh) = of([0, 1]), of([1, 0])
    again.load_state_dict(model.state_dict())
    fresh.load_state_dict(amp.state_dict())
    assert_same(model.state_dict(), again.state_dict())
    assert_same(amp.state_dict()["remainders"], fresh.state_dict()["remainders"])


@pytest.mark.parametrize("policy", LOW[2:])
@pytest.mark.parametrize("optimizer", ["SGD", "mezzo"])
def test_values_that_are_loaded_into_the_model_reach_the_optimizer_whole(policy, optimizer):
    model, _, amp = session(policy, optimizer)
    fresh, _ = built()
    with torch.no_grad():
        for param in fresh.parameters():
            param.mul_(1.0009765625)
    model.load_state_dict(fresh.state_dict())
    error = 2.0**-40 if "bfloat16" not in policy else 0.0
    for mine, theirs in zip(weights(amp), fresh.parameters(), strict=True):
        assert (mine - theirs).abs().max() <= error
    large = {name: value * 1e6 for name, value in fresh.state_dict().items()}
    if "bfloat16" not in policy:
        with pytest.raises(mezzo.NumericsError, match="beyond the range"):
            model.load_state_dict(large)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", LOW[2:])
@pytest.mark.parametrize("optimizer", ["SGD", "mezzo"])
def test_low_values_that_are_loaded_leave_what_rounds_to_them_as_it_is(policy, optimizer, dtype):
    """So that the state of the session may be loaded before that of a model that another run has saved low."""
    model, _, amp = session(policy, optimizer)
    train(amp, model, 0)
    before = [weight.clone() for weight in weights(amp)]
    assert any((weight.to(dtype) != weight).any() for weight in before)
    low = {name: weight.to(dtype) for name, weight in zip(model.state_dict(), before, strict=True)}
    low["0.weight"][0, 0] += 1
    model.load_state_dict(low)
    after = weights(amp)
    assert after[0][0, 0] == low["0.weight"][0, 0]
    before[0][0, 0] = after[0][0, 0]
    assert_same(before, after)


def test_a_repaired_session_goes_on_after_an_update_that_ended_half_way():
    class Raising(torch.optim.SGD):
        armed = False

        @torch.no_grad()
        def step(self, closure=None):
            if self.armed:
                self.param_groups[0]["params"][0].add_(1.0)
                raise RuntimeError("no")
            return super().step(closure)

    for policy in EVERY:
        model, made, amp = session(policy, lambda params: Raising(params, lr=0.01))
        saved = copy.deepcopy([model.state_dict(), made.state_dict(), amp.state_dict()])
        backward(amp, model, 0)
        made.armed = True
        with pytest.raises(RuntimeError, match="no"):
            amp.step()
        made.armed = False
        with pytest.raises(StateError, match=r"(?s)ended half-way.*Raising.*load_state_dict"):
            amp.step()
        made.zero_grad()
        for part, state in zip((model, made, amp), saved, strict=True):
            part.load_state_dict(state)
        assert not train(amp, model, 1).skipped


def test_one_optimizers_scale_is_in_the_state_once():
    model = Weights(1, 1)
    _, amp = over(model, "O0,loss_scale=dynamic(init=8)", [model.each[0]], [model.each[1]])
    assert amp.state_dict()["loss_scale"]["scale"] == 8.0


@pytest.mark.parametrize("optimizer", ["AdamW", "mezzo"])
def test_a_window_whose_gradients_the_model_has_cleared_is_none(optimizer):
    model, made = built(optimizer)
    amp = mezzo.attach(model, made, "O2,dtype=bfloat16,emulate=true")
    model(torch.ones(2, 8)).square().mean().backward()
    with pytest.raises(StateError, match="inside an accumulation window"):
        amp.state_dict()
    model.zero_grad()
    assert amp.state_dict()["stats"]["steps"] == 0
    amp.detach()
