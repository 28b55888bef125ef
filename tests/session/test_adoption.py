"""The state of mezzo's optimizers exists from a session's adoption on: for whatever trains, and for nothing else."""

import copy
import itertools

import pytest
import torch
from torch import nn

from mezzo import MixedPrecision, optim
from mezzo.errors import StateError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = [
    "O0",
    *(f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")),
]
RULES = {
    "adamw": (optim.AdamW, {"lr": 0.01}, {"exp_avg", "exp_avg_sq"}),
    "amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "sgd": (optim.SGD, {"lr": 0.1}, set()),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, {"momentum_buffer"}),
    "lion": (optim.Lion, {"lr": 0.01}, {"exp_avg"}),
}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def session(policy, rule="adamw", frozen=False, model=None, **options):
    model = network() if model is None else model
    model[0].requires_grad_(not frozen)
    kind, defaults, _ = RULES[rule]
    optimizer = kind(model.parameters(), **(defaults | options))
    return model, optimizer, MixedPrecision(model, optimizer, policy)


def backward(model, amp, number=0):
    x = torch.sin(torch.arange(24.0) * (number + 1)).view(4, 6)
    with amp.autocast():
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    amp.backward(loss)


def train(model, amp, numbers, passes=1):
    for number in numbers:
        for each in range(passes):
            backward(model, amp, 10 * number + each)
        amp.step()
        amp.zero_grad()


def halves(policy):
    return {"remainder"} if policy.startswith("O2") else set()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_trains_has_all_its_state_and_what_is_frozen_has_no_moments(policy, rule):
    model, optimizer, _ = session(policy, rule, frozen=True)
    for param in model[0].parameters():
        assert set(optimizer.state.get(param, {})) == halves(policy)  # the FP32 value is not to be lost
    for param in model[2].parameters():
        state = optimizer.state[param]
        assert set(state) == {"step"} | RULES[rule][2] | halves(policy)
        assert int(state["step"]) == 0
        assert all(not state[name].any() and state[name].dtype == FP32 for name in RULES[rule][2])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_thawed_has_its_state_before_its_step_counts(policy, bits):
    """It begins as a parameter that always trained: in the same dtype of gradients, at a count of its own."""
    for rule in RULES:
        model, optimizer, amp = session(policy, rule, frozen=True)
        train(model, amp, range(2), passes=2)
        model[0].requires_grad_(True)
        backward(model, amp, 2)
        backward(model, amp, 3)
        dtypes = {param.grad.dtype for param in model.parameters()}
        assert len(dtypes) == 1
        saved = optimizer.state_dict()["state"]  # in mid-window, before its first step
        assert {*saved[0]} == {*saved[2]}
        assert float(saved[0]["step"]) == 0
        amp.step()
        amp.zero_grad()
        assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [1, 1, 3, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_window_sums_its_gradients_alike(policy):
    """The first used to sum in low precision what later ones summed in FP32."""
    for rule, master in itertools.product(("adamw", "sgd"), ("split", "full")):
        model, optimizer, amp = session(policy, rule, master=master)
        seen = []
        for window in range(3):
            for number in range(3):
                backward(model, amp, 3 * window + number)
                seen.append([param.grad.dtype for param in model.parameters()])
            amp.step()
            amp.zero_grad()
        assert seen[:3] == seen[3:6] == seen[6:]
        low = model[0].weight.dtype
        assert {dtype for each in seen[1:3] for dtype in each} == {FP32 if policy.startswith("O2") else low}
        assert optimizer.stored() == (list(model.parameters()) if policy.startswith("O2") else [])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fresh_optimizer_that_loads_its_own_state_is_fresh(policy, bits):
    """As accelerate does to every optimizer it prepares."""
    for rule in RULES:
        (model, optimizer, amp), (other, _, same) = session(policy, rule), session(policy, rule)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, amp, range(3))
        train(other, same, range(3))
        assert bits(model.state_dict()) == bits(other.state_dict())
        assert bits(amp.state_dict()["masters"]) == bits(same.state_dict()["masters"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_without_entries_loads_and_begins_anew(policy, bits):
    """Of an optimizer that never stepped, or saved before state was made at once; of one that lacks a parameter."""
    for rule in RULES:
        (model, optimizer, amp), (other, _, same) = session(policy, rule), session(policy, rule)
        packed = optimizer.state_dict()
        for lone in ({}, {i: {"remainder": s["remainder"]} for i, s in packed["state"].items() if "remainder" in s}):
            optimizer.load_state_dict({**packed, "state": lone})
        assert all(int(optimizer.state[param]["step"]) == 0 for param in model.parameters())
        train(model, amp, range(3))
        train(other, same, range(3))
        assert bits(model.state_dict()) == bits(other.state_dict())
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][0]
        optimizer.load_state_dict(saved)
        assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [0, 3, 3, 3]
        assert set(optimizer.state[model[0].weight]) == set(optimizer.state[model[2].weight])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_that_is_added_later_has_its_state_at_once(policy):
    model = network()
    optimizer = optim.AdamW(model[0].parameters(), lr=0.01)
    amp = MixedPrecision(model, optimizer, policy)
    train(model, amp, range(2))
    low = model[2].weight.dtype != FP32
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
    for param in model[2].parameters():
        assert {"step", "exp_avg", "exp_avg_sq"} | (halves(policy) if low else set()) == set(optimizer.state[param])
    train(model, amp, range(2, 4), passes=2)
    assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [4, 4, 2, 2]
    amp.close()
    assert [group["master"] for group in optimizer.param_groups] == ["split", "split"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"master": "full"}, {"master": None}, {"master": None, "rounding": "kahan"}])
def test_o3_keeps_no_masters_whatever_the_optimizer_was_told(dtype, options):
    model, optimizer, amp = session(f"O3,dtype={dtype},emulate=true", **options)
    before = optimizer.param_groups[0]["master"], optimizer.defaults["master"]
    assert before == (None, None)
    train(model, amp, range(2))
    kept = {name for state in optimizer.state.values() for name in state}
    assert kept == {"step", "exp_avg", "exp_avg_sq"} | ({"compensation"} if "rounding" in options else set())
    assert amp.state_dict()["masters"] == {}
    amp.close()
    own = options.get("master", "split")
    assert (optimizer.param_groups[0]["master"], optimizer.defaults["master"]) == (own, own)
    assert {param.dtype for param in model.parameters()} == {FP32}
    train_on = MixedPrecision(model, optimizer, "O0")
    train(model, train_on, range(2))


def test_o3_refuses_halves_of_weights_that_it_has_no_place_for():
    model = network().bfloat16()
    optimizer = optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateError, match=r"other half of weights(.|\n)*AdamW: 0.weight(.|\n)*optimizer.release\(\)"):
        MixedPrecision(model, optimizer, "O3,dtype=bfloat16,emulate=true")
    assert set(optimizer.state_dict()["state"][0]) == set(before["state"][0])
    optimizer.release()
    MixedPrecision(model, optimizer, "O3,dtype=bfloat16,emulate=true")


@pytest.mark.parametrize("master", ["split", "full"])
def test_closing_leaves_weights_that_were_low_before_with_their_other_half(master):
    model = network().bfloat16()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, master=master)
    amp = MixedPrecision(model, optimizer, "O0")
    train(model, amp, range(3))
    exact = [optimizer.master_of(param) for param in model.parameters()]
    assert not all(torch.equal(value, param.float()) for value, param in zip(exact, model.parameters(), strict=True))
    amp.close()
    assert all(torch.equal(optimizer.master_of(p), value) for p, value in zip(model.parameters(), exact, strict=True))


def test_a_session_that_is_refused_leaves_no_state_behind():
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(Exception, match="65504"):
        MixedPrecision(model, optimizer, "O2,emulate=true")
    assert not optimizer.state
    assert optimizer.param_groups[0]["master"] == "split"


def test_edits_of_weights_outlive_saving_and_added_groups():
    """A full master takes an edit over at the next step, or when its session is saved; nothing forgets it before."""
    model = network()
    optimizer = optim.SGD(model[0].parameters(), lr=0.0, master="full")
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.state_dict()
    optimizer.add_param_group({"params": model[2].parameters()})
    packed = optimizer.state_dict()
    optimizer.load_state_dict({**packed, "state": {}})
    train(model, amp, range(1))
    assert model[0].weight.eq(0.5).all()


def test_momentum_begins_as_the_gradient_itself():
    """Not as (1 − dampening) of it, although its zeros are there from the beginning."""
    model, optimizer, amp = session("O0", "momentum")
    backward(model, amp)
    gradients = [param.grad.clone() for param in model.parameters()]
    amp.step()
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], gradient)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, optim.AdamW])
def test_building_the_session_again_is_refused_for_the_one_reason_that_there_is(optimizer):
    """As a notebook's cell does that is run twice: masters stand in the parameters' places by then."""
    model = nn.Linear(4, 4)
    built = optimizer(model.parameters())
    first = MixedPrecision(model, built, "O2,dtype=bfloat16,emulate=true")
    with pytest.raises(StateError, match=r"^the optimizer belongs to a session(.|\n)*session\.close\(\)"):
        MixedPrecision(model, built, "O2,dtype=bfloat16,emulate=true")
    copied = copy.deepcopy(model)
    with pytest.raises(StateError, match=r"prepared already(.|\n)*of a copy(.|\n)*load_state_dict"):
        MixedPrecision(copied, optimizer(copied.parameters()), "O2,dtype=bfloat16,emulate=true")
    first.close()
    MixedPrecision(model, built, "O2,dtype=bfloat16,emulate=true").close()
