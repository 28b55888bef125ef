"""Batches of the user's own classes, which ``apex.amp`` casts by their ``to(dtype)`` as they enter a model."""

import copy
import dataclasses
import io

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import apex as amp


class CustomData:
    """As in apex's documentation, but that it leaves the caller's own as it is."""

    def __init__(self, tensor, asked=()):
        self.tensor, self.asked = tensor, asked

    def to(self, dtype):
        return CustomData(self.tensor.to(dtype), (*self.asked, dtype))


@dataclasses.dataclass
class Fields:
    tensor: torch.Tensor

    def to(self, dtype):
        raise AssertionError("its fields are cast one by one")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.seen = None

    def forward(self, batch, others=(), **named):
        self.seen = batch, others, named
        return self.inner(batch.tensor)


@pytest.fixture(autouse=True)
def ended():
    yield
    amp.deinitialize()


def begun(opt_level):
    torch.manual_seed(0)
    model = Model()
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=opt_level, verbosity=0)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_batch_is_cast_by_its_own_to(opt_level):
    model, optimizer = begun(opt_level)
    batch = CustomData(torch.randn(8, 4))
    out = model(batch, [{"mask": CustomData(torch.ones(2))}, "text", np.ones(2)], more=CustomData(torch.ones(1)))
    seen, others, named = model.seen
    assert (seen.tensor.dtype, seen.asked) == (torch.float16, (torch.float16,))
    assert others[0]["mask"].asked == named["more"].asked == (torch.float16,)
    assert (others[1], others[2].dtype) == ("text", np.float64)
    assert (batch.tensor.dtype, out.dtype) == (torch.float32, torch.float32)
    before = model.inner.weight.detach().clone()
    with amp.scale_loss(out.square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(model.inner.weight, before)
    model(Fields(torch.randn(8, 4)))
    assert model.seen[0].tensor.dtype == torch.float16


@pytest.mark.parametrize("opt_level", ["O0", "O1"])
def test_levels_that_keep_fp32_weights_ask_no_batch(opt_level):
    model, _ = begun(opt_level)
    model(CustomData(torch.randn(8, 4)))
    assert model.seen[0].asked == ()


def test_it_ends_with_amp_and_travels_with_the_model():
    model, _ = begun("O2")
    copied = copy.deepcopy(model)
    copied(CustomData(torch.randn(8, 4)))
    assert copied.seen[0].asked == (torch.float16,)
    model.seen = None
    torch.save(model, io.BytesIO())
    amp.deinitialize()
    model(CustomData(torch.randn(8, 4)))
    assert model.seen[0].asked == ()
    assert not model._forward_pre_hooks
