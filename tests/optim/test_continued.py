"""Training that goes on: state loaded from other storages, through torch's optimizers, copies, edited weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from mezzo import optim

from .test_optim import parameters, train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_masters_load_into_split_weights_without_losing_a_bit(dtype):
    params = parameters(dtype)
    full = optim.AdamW(params, master="full")
    train(params, full, range(3))
    others = [nn.Parameter(param.detach().clone()) for param in params]
    split = optim.AdamW(others, master="split")
    split.load_state_dict(full.state_dict())
    assert split.param_groups[0]["master"] == "split"
    for one, other in zip(params, others, strict=True):
        atol = 0 if dtype == torch.bfloat16 else 2.0**-40
        torch.testing.assert_close(split.master_of(other), full.master_of(one), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", ["split", "full"])
def test_there_and_back_through_torch_s_optimizer_nothing_stale_is_kept(dtype, master):
    """torch casts what it does not know to the parameter's dtype, and does not keep it up to date."""
    params = parameters(dtype)
    mine = optim.AdamW(params, lr=0.1, master=master)
    train(params, mine, range(2))
    theirs = torch.optim.AdamW(params, lr=0.1)
    theirs.load_state_dict(mine.state_dict())
    train(params, theirs, range(2, 4))
    again = optim.AdamW(params, lr=0.1, master=master)
    again.load_state_dict(theirs.state_dict())
    before = [param.detach().clone() for param in params]
    for group in again.param_groups:
        group["lr"] = 0.0
    train(params, again, range(4, 5))
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert all(torch.equal(again.master_of(p), p.float()) for p in params)


def test_a_state_that_does_not_fit_is_left_as_it_is():
    params = parameters(torch.bfloat16)
    optimizer = optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    train(params, optimizer, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optim.AdamW(parameters(torch.bfloat16)).load_state_dict(saved)
    assert saved["param_groups"] == before["param_groups"]


def test_a_state_of_fp32_weights_has_torch_s_options_and_ours_alone():
    (group,) = optim.AdamW(parameters()).state_dict()["param_groups"]
    assert set(group) == {*optim.AdamW(parameters()).param_groups[0]}


def test_a_remainder_of_another_dtype_is_not_taken_for_one():
    params = parameters(torch.bfloat16)
    optimizer = optim.AdamW(params)
    train(params, optimizer, range(2))
    halves = [nn.Parameter(param.detach().half()) for param in params]
    other = optim.AdamW(halves)
    other.load_state_dict(optimizer.state_dict())
    assert all("exp_avg" in other.state[param] and "remainder" not in other.state[param] for param in halves)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Lion])
def test_copies_go_on_as_the_original_would(kind, way):
    params = parameters(torch.bfloat16)
    optimizer = kind(params, lr=0.1)
    train(params, optimizer, range(2))
    if way == "deepcopy":
        copied, twin = copy.deepcopy((params, optimizer))
    elif way == "pickle":
        copied, twin = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        copied, twin = torch.load(file, weights_only=False)
    reference = [nn.Parameter(param.detach().clone()) for param in params]
    loaded = kind(reference, lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    train(copied, twin, range(2, 5))
    train(reference, loaded, range(2, 5))
    for one, other in zip(copied, reference, strict=True):
        assert torch.equal(twin.master_of(one), loaded.master_of(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_masters_take_over_edits_of_the_weights(dtype):
    params = parameters(dtype)
    optimizer = optim.SGD(params, lr=0.1, master="full")
    train(params, optimizer, range(2))
    before = [optimizer.master_of(param) for param in params]
    with torch.no_grad():
        for param in params:
            param.view(-1)[:1] = 3.0
    params[-1].data = torch.full_like(params[-1], 2.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, master in zip(params[:-1], before, strict=False):
        assert param.view(-1)[0] == 3
        assert optimizer.master_of(param).view(-1)[0] == 3
        assert torch.equal(optimizer.master_of(param).view(-1)[1:], master.view(-1)[1:])  # not a bit of the others lost
    assert (optimizer.master_of(params[-1]) == 2).all()
