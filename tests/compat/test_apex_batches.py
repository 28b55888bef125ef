"""Batches as they enter a model: float64 is cast, and a class of the user's own by its ``to(dtype)``, as by apex."""

import collections
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


def test_o0_asks_a_batch_as_well_and_o1_does_not():
    for level, asked in (("O0", (torch.float32,)), ("O1", ())):
        model, _ = begun(level)
        model(CustomData(torch.randn(8, 4)))
        assert model.seen[0].asked == asked, level
        amp.deinitialize()


def test_batches_in_float64_enter_every_model():
    wide = torch.randn(8, 4, dtype=torch.float64)
    for level in ("O0", "O1", "O2", "O3"):
        for given in (
            (CustomData(wide), [wide, {"a": wide}, torch.arange(3)]),
            (Fields(wide), collections.UserDict(a=wide)),
        ):
            if level == "O1" and isinstance(given[0], CustomData):
                given = (Fields(wide), given[1])
            model, optimizer = begun(level)
            out = model(*given, named=wide)
            batch, others, named = model.seen
            low = torch.float16 if level > "O1" else torch.float32
            assert batch.tensor.dtype == named["named"].dtype == low, level
            inside = others["a"] if isinstance(others, collections.UserDict) else others[1]["a"]
            assert (inside.dtype, given[0].tensor.dtype) == (low, torch.float64), level
            assert out.dtype == (torch.float16 if level == "O1" else torch.float32), level
            with amp.scale_loss(out.float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            amp.deinitialize()
            with pytest.raises(RuntimeError, match="dtype"):
                model(*given)


def test_at_o0_other_floating_inputs_are_cast_too_and_at_o1_not():
    for level, expected in (("O0", torch.float32), ("O1", torch.bfloat16)):
        model, _ = begun(level)
        model(Fields(torch.randn(8, 4)), torch.ones(2, dtype=torch.bfloat16))
        assert model.seen[1].dtype == expected, level
        amp.deinitialize()


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
