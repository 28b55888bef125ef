"""Training that goes on: state that knows nothing of how weights are stored, copies, edited and swapped weights."""

import copy
import functools
import io
import pickle

import pytest
import torch

from mezzo import optim

from .halved import halved, values
from .test_optim import parameters, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("stored", [FP16, FP32])
def test_a_state_loads_however_the_weights_are_stored(stored):
    params = parameters()
    optimizer = optim.AdamW(params)
    halved(params, BF16)
    train(params, optimizer, range(2))
    others = parameters()
    other = optim.AdamW(others)
    halved(others, stored)
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


@pytest.mark.parametrize("optimizer_class, way", [*WAYS, (optim.Lion, through_a_file)])
def test_copies_go_on_as_the_original_would(optimizer_class, way):
    params = parameters()
    optimizer = optimizer_class(params, lr=0.1)
    train(params, optimizer, range(2))
    copied, twin = way((params, optimizer))
    train(copied, twin, range(2, 5))
    train(params, optimizer, range(2, 5))
    assert all(map(torch.equal, copied, params))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_edits_of_weights_are_seen_whatever_made_them(dtype):
    """As of plain parameters: written, swapped for an evaluation and back, put elsewhere; a step in between or none."""
    params, plain = halved(parameters(), dtype), parameters()
    ends = []
    for param_list in (params, plain):
        optimizer = optim.SGD(param_list, lr=0.5)
        with torch.no_grad():  # on a grid that both hold, and steps by powers of two keep
            for param in param_list:
                param.copy_(param.mul(64).round().div(64))

        def step(optimizer=optimizer, weights=param_list):
            for param in weights:
                param.grad = torch.full_like(param, 2.0**-4)
            optimizer.step()

        step()
        with torch.no_grad():
            param_list[0].view(-1)[:1] = 3.0
        param_list[1].data.view(-1)[:1] = 3.0
        param_list[2].data = torch.full(param_list[2].shape, 2.0)
        step()
        backup = [param.data for param in param_list]
        for param in param_list:
            param.data = torch.zeros(param.shape)
        step()
        assert all((param == -(2.0**-5)).all() for param in param_list)
        for param, data in zip(param_list, backup, strict=True):
            param.data = data
        step()
        ends.append(values(param_list))
    assert all(map(torch.equal, *ends))
