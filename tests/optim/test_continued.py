"""Training that goes on: state that knows nothing of how weights are stored, copies, edited and swapped weights."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn

from mezzo import optim

from .halved import halved
from .test_optim import parameters, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("stored", [FP16, FP32])
def test_a_state_loads_however_the_weights_are_stored(stored):
    params = parameters()
    optimizer = optim.AdamW(params)
    halved(params, BF16, optimizer)
    train(params, optimizer, range(2))
    others = parameters()
    other = optim.AdamW(others)
    halved(others, stored, other)
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(params, others, strict=True):
        assert other.state[two]["exp_avg"].dtype == FP32
        for name, value in optimizer.state[one].items():
            assert torch.equal(other.state[two][name], value)
    train(others, other, range(2, 4))


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


IN_CODES = functools.partial(optim.AdamW, state_dtype="int8")
WAYS = [
    (optim.AdamW, copy.deepcopy),
    (IN_CODES, copy.deepcopy),
    (optim.SGD, lambda value: pickle.loads(pickle.dumps(value))),
]


@pytest.mark.parametrize("kind, way", [*WAYS, (optim.Lion, through_a_file)])
def test_copies_go_on_as_the_original_would(kind, way):
    params = parameters()
    optimizer = kind(params, lr=0.1)
    train(params, optimizer, range(2))
    copied, twin = way((params, optimizer))
    train(copied, twin, range(2, 5))
    train(params, optimizer, range(2, 5))
    assert all(map(torch.equal, copied, params))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_edits_of_weights_are_seen_whatever_made_them(dtype):
    params = parameters()
    optimizer = optim.SGD(params, lr=0.1)
    halves = halved(params, dtype, optimizer)
    train(params, optimizer, range(2))
    before = [halves.read(param) for param in params]
    with torch.no_grad():
        params[0].view(-1)[:1] = 3.0
    params[1].data.view(-1)[:1] = 3.0
    params[2].data = torch.full_like(params[2], 2.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    spacing = torch.finfo(dtype).eps
    for param, old in zip(params[:2], before[:2], strict=True):
        assert param.view(-1)[0] == 3
        assert abs(halves.read(param).view(-1)[0].item() - 3) <= spacing
        assert torch.equal(halves.read(param).view(-1)[1:], old.view(-1)[1:])  # not a bit of the others lost
    assert (params[2] == 2).all()
    assert torch.equal(halves.read(params[3]), before[3])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_weights_swapped_for_an_evaluation_and_back_train_as_if_nothing_had_been(dtype):
    """``param.data = average``, in FP32 as averages are, and a step in between: it updates the average."""
    params, others = parameters(), parameters()
    optimizers = [optim.AdamW(each, lr=0.1) for each in (params, others)]
    halves, of_others = (halved(each, dtype, its) for each, its in zip((params, others), optimizers, strict=True))
    train(params, optimizers[0], range(3))
    train(others, optimizers[1], range(3))
    backup = [param.data for param in params]
    for param in params:
        param.data = torch.zeros(param.shape)
        param.grad = None
    optimizers[0].step()
    assert {param.dtype for param in params} == {dtype}  # so that the model computes
    assert not any(param.any() for param in params)
    for param, data in zip(params, backup, strict=True):
        param.data = data
    train(params, optimizers[0], range(3, 6))
    train(others, optimizers[1], range(3, 6))
    for one, other in zip(params, others, strict=True):
        assert torch.equal(halves.read(one), of_others.read(other))


def test_a_swapped_weight_is_what_a_step_updates():
    weight = nn.Parameter(torch.tensor([1.0, 0.1]))
    optimizer = optim.SGD([weight], lr=0.5)
    halves = halved([weight], BF16, optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.data = torch.tensor([4.0, 0.3])
    weight.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    assert torch.equal(halves.read(weight), torch.tensor([4.0, 0.3]) - 0.5 * torch.tensor([1.0, 2.0]))
