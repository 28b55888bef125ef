"""Observations: each form against NumPy in float64, for every number of sixteen and eight bits; flags and factors."""

import math

import numpy as np
import pytest
import torch

from mezzo.launched import Launch, jitted
from mezzo.trace import observe as observing
from mezzo.trace.observe import BINS, COUNTABLE, DTYPE, FIRST, INFS, LARGEST, NAME, NANS, WHEN, WIDTH, ZEROS, observe

SPECIAL = torch.tensor(
    [0.0, -0.0, 2.0**-149, -(2.0**-149), 3 * 2.0**-149, 2.0**-127, 2.0**-126, -1.5 * 2.0**-126, 1.0, -1.0, 65504.0,
     3.4028234663852886e38, math.inf, -math.inf, math.nan, 2.0, 2.0**-25]
)  # fmt: skip


def any_bits(count):
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits.to(torch.int32).view(torch.float32), SPECIAL])


def values_of(dtype):
    if dtype == torch.float32:
        return any_bits(20_000)
    integers = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    return integers.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)


def by_numpy(tensor, factor=None):
    """The row that NumPy makes in float64: of the product once it is rounded to float32."""
    values = tensor.double().abs()
    values = (values if factor is None else (values * factor.double()).float().double()).numpy().reshape(-1)
    finite = values[np.isfinite(values) & (values != 0)]
    fraction, exponent = np.frexp(finite)
    row = np.zeros(WIDTH, dtype=np.int64)
    np.add.at(row, exponent - 1 - FIRST + BINS * (fraction == 0.5), 1)
    row[ZEROS], row[INFS], row[NANS] = (values == 0).sum(), np.isinf(values).sum(), np.isnan(values).sum()
    row[LARGEST] = np.float32(finite.max(initial=0)).view(np.int32)
    row[DTYPE] = COUNTABLE.index(tensor.dtype) + 1
    return row.tolist()


def flag(value=1):
    return torch.tensor([value], dtype=torch.int32)


def row():
    return torch.zeros(WIDTH, dtype=torch.int64)


def counted(row):
    """A row without its time."""
    row = row.tolist()
    assert row[WHEN] > 0
    return [*row[:WHEN], 0, *row[WHEN + 1 :]]


def interpreted(request):
    """The Triton form, by Triton's interpreter: three programs, each of several blocks."""
    request.getfixturevalue("interpreted")

    def run(x, row, flag, factor=None, name=0):
        vector = observing._vector(x)
        bits = vector.view(torch.int16) if vector.dtype == torch.bfloat16 else vector
        launch = Launch(jitted(observing.triton_source(vector.dtype), "observe"), {}, BLOCK=1024)
        factors = (vector, 0) if factor is None else (factor, 1)
        launch(3, x.device, bits, vector.numel(), row, flag, *factors, *observing._details(x, name))

    return run


def portable(request):
    request.getfixturevalue("monkeypatch").setattr(observing, "_cpp", lambda dtype: None)
    return observe


@pytest.mark.parametrize("dtype", COUNTABLE, ids=str)
@pytest.mark.parametrize("form", [lambda request: observe, portable, interpreted], ids=["C++", "torch", "Triton"])
def test_each_form_counts_what_numpy_counts(dtype, form, request):
    count, values = form(request), values_of(dtype)
    for factor in (None, torch.tensor(0.37)):
        histogram = row()
        count(values, histogram, flag(0), factor)
        assert not histogram.any()
        count(values, histogram, flag(), factor)
        assert counted(histogram) == by_numpy(values, factor), factor
        first = histogram[WHEN].item()
        count(values, histogram, flag(), factor, 7)  # is added
        assert (histogram[:LARGEST] // 2).tolist() == by_numpy(values, factor)[:LARGEST]
        assert counted(histogram)[LARGEST:NAME] == by_numpy(values, factor)[LARGEST:NAME]
        assert histogram[WHEN] > first
        assert histogram[NAME] == 7


def test_the_largest_is_kept_and_values_lie_as_they_like():
    image = any_bits(5000)[:4800].view(2, 6, 20, 20)
    for view in (
        image.to(memory_format=torch.channels_last),
        image.mT,
        image[:, ::2, 1:],
        image[:0],
        image[0, 0, 0, 0],
    ):
        histogram = row()
        observe(view, histogram, flag())
        assert counted(histogram) == by_numpy(view)
    histogram = row()
    for value in (3.0, 7.0, 5.0):
        observe(torch.tensor(value), histogram, flag())
    assert histogram[LARGEST] == torch.tensor(7.0).view(torch.int32)


def test_subnormals_count_where_a_process_takes_them_for_zero():
    values = torch.tensor([2.0**-149, 3 * 2.0**-140, 2.0**-127]).repeat(100)
    expected, histogram = row(), row()
    observe(values, expected, flag())
    if not torch.set_flush_denormal(True):
        pytest.skip("a processor that cannot flush subnormals")
    try:
        observe(values, histogram, flag())
    finally:
        torch.set_flush_denormal(False)
    assert counted(histogram) == counted(expected)
    assert not histogram[ZEROS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [3, 1000, (1 << 16) - 1, 200_000])  # where values are looked at, and magnitudes
def test_threads_count_what_one_does(dtype, number, monkeypatch):
    values = torch.randn(number, generator=torch.Generator().manual_seed(0)).mul(1e-3).to(dtype)
    monkeypatch.setattr(observing, "threads", lambda elements: 3)
    for factor in (None, torch.tensor(0.37)):
        histogram = row()
        observe(values, histogram, flag(), factor)
        assert counted(histogram) == by_numpy(values, factor), factor
