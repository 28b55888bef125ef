"""Operands of products below sixteen bits as they are written down and read."""

import math

import pytest
import torch

from mezzo.cast import products
from mezzo.cast.products import ROLES, linear, operands
from mezzo.cast.products.memory import Memory, Slot
from mezzo.cast.products.operands import Quantiser
from mezzo.formats import BLOCK_FORMATS, quantized
from mezzo.policy import Policy

#: Numbers, and the largest magnitude of them.
NOTED = [
    ([-3.0, 1.0, 0.5, 0.0], 3.0),
    ([2.0, -1.0, 0.0, 1.0], 2.0),
    ([-0.0] * 4, 0.0),
    ([1.0, -math.inf, 0.0, 0.0], math.inf),
    ([1.0, math.nan, 0.0, 0.0], math.nan),
]


def test_the_largest_magnitude_is_noted_whatever_its_sign():
    recipe = products.recipe_of(Policy.parse("O1,bf16,fp8_recipe=delayed,fp8=*"), "fp8")
    for numbers, largest in NOTED:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            slot = Slot(torch.zeros(3), torch.zeros(3))
            quantiser = Quantiser(recipe, None, slot)
            for role in ROLES:
                quantiser.along(role, torch.tensor([numbers]).to(dtype), 1)
            noted = torch.stack([quantiser.noted[role] for role in ROLES])
            assert noted.dtype == torch.float32
            assert torch.equal(noted.nan_to_num(7.0), torch.full((3,), largest).nan_to_num(7.0))


def test_the_key_of_a_noise_is_on_the_device_of_what_is_rounded(monkeypatch):
    policy, keys = Policy.parse("O1,bf16,nvfp4=*"), []
    monkeypatch.setattr(operands, "quantized", lambda x, form, dim, *, key, amax: keys.append(key))
    memory = Memory({}, policy)  # of no weight are there histories, by which it could know a device
    for memory.counts in (False, True, True):
        quantiser = Quantiser(products.recipe_of(policy, "nvfp4"), memory, None)
        quantiser.along("gradient", torch.empty(32, 32, device="meta"), 1)
    assert [key.device.type for key in keys] == ["meta"] * 3


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_an_operand_times_what_its_rows_are_multiplied_by_is_what_it_stands_for(name):
    for dim in (0, 1):
        operand = quantized(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), BLOCK_FORMATS[name], dim)
        rows, by = linear._wide(operand, dim)
        wide = operand.wide() if dim == 1 else operand.wide().mT
        assert torch.equal(rows if by is None else rows * by, wide)
        if by is not None:  # elements as they are, which FP8 holds
            assert torch.equal(rows, rows.to(operand.format.element.dtype).float())
