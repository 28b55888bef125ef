"""``torch.distributed.checkpoint`` with a session, in one process: it goes on bit for bit, or is refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from mezzo import MasterWeights, MixedPrecision, StateError, UnsupportedError, optim

from ...support.tables import thinned

# What torch says of a checkpoint in one process, and of its own options.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

MINE = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "adam full": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, master="full"),
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "lion bf16": lambda params: optim.Lion(params, lr=0.01, state_dtype="bfloat16"),
}
TORCHS = {
    "torch adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "torch fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "torch rate": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), eps=1e-4),
    "torch sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "torch momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
LOW = [f"{level},dtype={dtype},emulate=true" for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")]
WITH_MASTERS = [policy for policy in LOW if policy.startswith("O2")]
WORKS = [
    *((policy, name) for policy in ("O0", *LOW) for name in MINE),
    *((policy, name) for policy in ("O0", *LOW) for name in TORCHS if policy not in WITH_MASTERS),
]


def session(policy, name, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = (MINE | TORCHS)[name](model.parameters())
    return model, optimizer, MixedPrecision(model, optimizer, policy)


def backward(model, amp, number):
    x = torch.sin(torch.arange(24.0) * (number + 1)).view(4, 6)
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)


def train(model, amp, numbers):
    for number in numbers:
        backward(model, amp, number)
        amp.step()
        amp.zero_grad()


@pytest.mark.parametrize("steps, flat", thinned([0, 2], [False, True], every=2))
def test_state_dicts_go_from_one_session_to_another(steps, flat, bits):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    for policy, name in WORKS:
        (model, optimizer, amp), (other, second, same) = session(policy, name), session(policy, name, seed=1)
        train(model, amp, range(steps))
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        set_state_dict(other, second, model_state_dict=weights, optim_state_dict=state, options=options)
        train(model, amp, range(5, 8))
        train(other, same, range(5, 8))
        assert bits(model.state_dict()) == bits(other.state_dict()), (policy, name)
        assert bits(amp.state_dict()["masters"]) == bits(same.state_dict()["masters"]), (policy, name)


@pytest.mark.parametrize("policy", ["O0", *WITH_MASTERS])
@pytest.mark.parametrize("name", MINE)
def test_a_checkpoint_on_disk_carries_moments_counts_and_remainders(policy, name, tmp_path, bits):
    """It is read into the tensors of a fresh session, which has to have them all."""
    (model, optimizer, amp), (other, second, same) = session(policy, name), session(policy, name, seed=1)
    train(model, amp, range(2))
    for state in optimizer.state.values():
        state["step"].fill_(2**24 + 1)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, second), strict=True))
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, second, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(model, amp, range(5, 8))
    train(other, same, range(5, 8))
    assert {int(state["step"]) for state in second.state.values()} == {2**24 + 4}
    assert bits(model.state_dict()) == bits(other.state_dict())
    assert bits(optimizer.state_dict()) == bits(second.state_dict())
    assert bits(amp.state_dict()["masters"]) == bits(same.state_dict()["masters"])


@pytest.mark.parametrize("name", MINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_session_asking_for_state_is_no_step(dtype, name, bits):
    """torch makes state by a step with zero gradients and rates, which torch's optimizers count."""
    params = [nn.Linear(4, 3).to(dtype) for _ in range(2)]
    params[1].load_state_dict(params[0].state_dict())
    one, other = (MINE[name](model.parameters()) for model in params)
    state = get_optimizer_state_dict(params[0], one)
    assert {float(each["step"]) for each in state["state"].values()} == {0.0}
    set_optimizer_state_dict(params[0], one, copy.deepcopy(state))
    for _ in range(3):
        for model, optimizer in zip(params, (one, other), strict=True):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
    assert bits(params[0].state_dict()) == bits(params[1].state_dict())
    assert bits(one.state_dict()) == bits(other.state_dict())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("policy", WITH_MASTERS)
def test_masters_are_refused_by_name_and_nothing_is_changed(policy, name, steps, bits):
    (model, optimizer, amp), (other, _, same) = session(policy, name), session(policy, name)
    train(model, amp, range(steps))
    train(other, same, range(steps))
    before = bits([optimizer.state_dict(), model.state_dict()])
    match = r"cannot read an optimizer whose parameters have FP32 masters(.|\n)*amp.stateful\(\)(.|\n)*mezzo.optim"
    with pytest.raises(UnsupportedError, match=match):
        get_optimizer_state_dict(model, optimizer)
    with pytest.raises(UnsupportedError, match=match):
        get_state_dict(model, optimizer)
    if steps == 0:
        state = get_optimizer_state_dict(*session("O0", name)[:2])
        with pytest.raises(UnsupportedError, match=match):
            set_optimizer_state_dict(model, optimizer, state)
    assert bits([optimizer.state_dict(), model.state_dict()]) == before
    assert all(param.grad is None for param in (*model.parameters(), *amp.master_params()))
    train(model, amp, range(5, 8))
    train(other, same, range(5, 8))
    assert bits(model.state_dict()) == bits(other.state_dict())


def test_masters_without_a_session_are_refused_too():
    model = nn.Linear(3, 2).half()
    masters = MasterWeights(torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="whose parameters have FP32 masters"):
            get_optimizer_state_dict(model, masters.optimizer)
        assert masters.optimizer.param_groups[0]["lr"] == 0.1
        for param in model.parameters():
            param.grad = torch.ones_like(param, dtype=torch.float32)
        masters.step()
        masters.zero_grad()


# A step that nobody but the session may take --------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O0", *LOW])
@pytest.mark.parametrize("name", ["adamw", "torch adamw", "torch rate"])
def test_only_a_step_that_changes_nothing_passes(policy, name):
    model, optimizer, amp = session(policy, name)
    backward(model, amp, 0)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0) if isinstance(rate, torch.Tensor) else 0.0
    with pytest.raises(StateError, match="behind the session's back"):  # gradients that are not zero
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    amp.zero_grad()
    for param in amp.master_params():
        param.grad = torch.zeros_like(param)
    with pytest.raises(StateError, match="behind the session's back"):  # a rate that is not zero
        optimizer.step()
    amp.zero_grad()
    train(model, amp, range(2))
