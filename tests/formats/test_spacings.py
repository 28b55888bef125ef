"""Spacings of whole tensors: those of single numbers, over all binades of every format."""

import math

import pytest
import torch

from mezzo.errors import PolicyError
from mezzo.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_spacings_are_those_of_single_numbers(name):
    fmt = FORMATS[name]
    powers = [math.ldexp(1.0, exponent) for exponent in range(-160, 140)]
    values = [0.0, math.inf, math.nan, fmt.max, 5e-324]
    for power in powers:
        values += [power, math.nextafter(power, 0.0), math.nextafter(power, math.inf), 1.75 * power]
    values += [-value for value in values]
    result = fmt.spacings(torch.tensor(values, dtype=torch.float64)).tolist()
    for value, spacing in zip(values, result, strict=True):
        wanted = fmt.spacing(value)
        assert spacing == wanted or (math.isnan(spacing) and math.isnan(wanted)), value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_spacings_of_other_dtypes_are_in_float64(dtype):
    tensor = torch.tensor([[1.0, -3.0], [0.0, 2.0**-20]], dtype=dtype)
    spacings = FORMATS["bfloat16"].spacings(tensor)
    assert spacings.dtype == torch.float64
    assert spacings.tolist() == [[2.0**-7, 2.0**-6], [2.0**-133, 2.0**-27]]


def test_integers_have_no_spacings():
    with pytest.raises(PolicyError, match=r"tensor\.float\(\)"):
        FORMATS["float16"].spacings(torch.arange(3))
