"""Histograms of exponents against NumPy's frexp, what follows from them against the formats' own counts."""

import math

import numpy as np
import pytest
import torch

from mezzo import formats
from mezzo.errors import NumericsError, PolicyError
from mezzo.numerics import ExponentHistogram, counting, exponent_histogram, swallowed

SPECIAL = torch.tensor(
    [0.0, -0.0, 2.0**-149, -(2.0**-149), 3 * 2.0**-149, 2.0**-127, 2.0**-126, -1.5 * 2.0**-126, 1.0, -1.0, 65504.0,
     65519.996, 65520.0, 3.4028234663852886e38, math.inf, -math.inf, math.nan, 448.0, 464.0, 2.0**-25]
)  # fmt: skip


def spread(count, seed):
    """Values of every exponent that float32 has, subnormals among them."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([bits.to(torch.int32).view(torch.float32), SPECIAL])


def by_numpy(tensor):
    """The row of counts that NumPy makes."""
    values = np.abs(tensor.double().numpy().reshape(-1))
    finite = values[np.isfinite(values) & (values != 0)]
    fraction, exponent = np.frexp(finite)
    row = np.zeros(counting.ROW, dtype=np.int64)
    np.add.at(row, exponent - 1 - counting.FIRST + counting.BINS * (fraction == 0.5), 1)
    row[counting.ZEROS], row[counting.INFS] = (values == 0).sum(), np.isinf(values).sum()
    row[counting.NANS] = np.isnan(values).sum()
    row[counting.LARGEST] = np.float32(finite.max(initial=0)).view(np.int32)
    return row.tolist()


@pytest.mark.parametrize("count", [5000, 70000])  # by keys, and by a table of what sixteen bits hold
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_value_is_counted_in_its_bin(dtype, count):
    values = spread(count, seed=1).to(dtype)
    assert exponent_histogram(values).numbers == by_numpy(values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_sixteen_bits_has_its_bin(dtype):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert exponent_histogram(values).numbers == by_numpy(values)
    assert exponent_histogram(values.float()).numbers == by_numpy(values)


def test_dtypes_of_eight_bits_layouts_and_sizes_are_counted_too():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        assert exponent_histogram(values).numbers == by_numpy(values.float()), dtype
    image = spread(24000, seed=2)[:24000].view(2, 30, 20, 20)
    views = {
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "transposed": image.transpose(1, 3),
        "strided": image[:, ::2, 1:, ::3],
        "expanded": image[:1].expand(3, 30, 20, 20),
        "empty": image[:0],
        "scalar": torch.tensor(-0.75),
        "parameter": torch.nn.Parameter(image.clone()),
    }
    for name, view in views.items():
        histogram = exponent_histogram(view)
        assert histogram.numbers == by_numpy(view.detach()), name
        assert histogram.total == view.numel(), name


def test_several_threads_count_what_one_counts(monkeypatch):
    values = spread(1_000_003, seed=3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert exponent_histogram(values).numbers == by_numpy(values)
    finally:
        torch.set_num_threads(threads)


def test_counts_are_read_once_and_only_when_asked():
    class Row(torch.Tensor):
        reads = 0

        def tolist(self):
            Row.reads += 1
            return self.as_subclass(torch.Tensor).tolist()

    histogram = ExponentHistogram(exponent_histogram(SPECIAL).row.as_subclass(Row))
    assert Row.reads == 0
    assert (histogram.count(-149), histogram.count(-148), histogram.count(0), histogram.count(128)) == (2, 1, 2, 0)
    assert (histogram.zeros, histogram.infs, histogram.nans, histogram.total) == (2, 2, 1, len(SPECIAL))
    assert histogram.max_abs == 3.4028234663852886e38
    assert Row.reads == 1


@pytest.mark.parametrize("target", formats.FORMATS.values(), ids=str)
def test_coverage_is_that_of_the_tensor_or_says_that_it_is_interpolated(target):
    exact = 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        wide = spread(4000, seed)
        narrow = torch.randn(4000, generator=generator) * 2.0 ** (seed * 6 - 12)
        powers = torch.exp2(torch.randint(-149, 128, (4000,), generator=generator).double()).float()
        for values in (wide, narrow, powers, torch.cat([powers, SPECIAL[:10]])):
            for scale in (1.0, 8.0, 2.0**-20, 2.0**15, 3.7):
                counted, told = target.coverage(values, scale), exponent_histogram(values).coverage(target, scale)
                exact += told.exact
                if told.exact:
                    assert told == counted, (scale, values)
                assert (told.overflow > 0) == (counted.overflow > 0)
                assert (told.zero, told.nan, told.total) == (counted.zero, counted.nan, counted.total)
                parts = (told.zero, told.underflow, told.subnormal, told.normal, told.overflow, told.nan)
                assert min(parts) >= 0
                assert sum(parts) == told.total
                # Interpolation goes wrong by what is in the limit's bin at the most, and where values lie evenly in
                # a bin, as in `wide`, by some standard deviations of a few values.
                for name, limit in (("underflow", target.smallest_subnormal / 2), ("overflow", target.max)):
                    near = exponent_histogram(values).count(math.frexp(limit / scale)[1] - 1)
                    allowed = min(near, 12) if values is wide else near
                    assert abs(getattr(told, name) - getattr(counted, name)) <= allowed, name
    assert exact >= 20


def test_whether_anything_overflows_is_right_where_a_share_is_interpolated():
    below, beyond = torch.full((1000,), 65519.0), torch.full((1000,), 60000.0)
    assert exponent_histogram(below).coverage("float16") == formats.FP16.coverage(below)
    beyond[7] = 65520.0
    told = exponent_histogram(beyond).coverage("float16")
    assert told.overflow >= 1
    assert not told.exact


def test_the_best_scale_is_the_largest_power_of_two_below_the_limit():
    for largest in (1.0, 1.999, 65503.9, 65504.0, 3e-7, 2.0**-149, 1e30):
        scale = exponent_histogram(torch.tensor([largest, 0.0, -largest / 3])).best_scale("float16")
        largest = float(np.float32(largest))
        assert math.frexp(scale)[0] == 0.5
        assert scale * largest < 65504 <= 2 * scale * largest
    for values, why in (([0.0], "every value is zero"), ([1.0, math.inf, math.nan], "1 inf and 1 nan")):
        with pytest.raises(NumericsError, match=why):
            exponent_histogram(torch.tensor(values)).best_scale("float16")


def test_what_has_no_histogram_says_what_to_write():
    for tensor, write in (
        (torch.zeros(3, dtype=torch.float64), r"tensor\.float\(\)"),
        (torch.zeros(3, dtype=torch.int32), r"tensor\.float\(\)"),
        (torch.zeros(3, dtype=torch.complex64), r"view_as_real"),
        (torch.eye(3).to_sparse(), r"tensor\.coalesce\(\)\.values\(\)"),
        (torch.eye(3).to_sparse_coo().coalesce(), r"tensor\.coalesce\(\)\.values\(\)"),
    ):
        with pytest.raises(PolicyError, match=write):
            exponent_histogram(tensor)
    for wrong in ([1.0], None, 1.0):
        with pytest.raises(PolicyError, match=r"has no histogram(.|\n)*write  exponent_histogram\(torch\.tensor"):
            exponent_histogram(wrong)
    with pytest.raises(PolicyError, match="positive finite"):
        exponent_histogram(SPECIAL).coverage("float16", scale=0.0)


def test_the_frozen_weight_of_a_hundred_steps_is_seen():
    """100 AdamW steps at lr 1e-3 leave a BF16 weight of 1.0 exactly 1.0."""
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(64, dtype=torch.bfloat16))
    assert swallowed(weight, torch.full((64,), -1e-3), torch.bfloat16) == 1.0
    assert swallowed(weight, torch.full((64,), -1e-3), "float16") == 0.0


def test_swallowed_counts_what_changes_and_what_does_not():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3000, generator=generator).to(torch.float16)
    update = torch.randn(3000, generator=generator) * torch.exp2(torch.arange(3000) % 20 - 20.0)
    update[::7] = 0.0
    stays = [
        formats.FP16.decode(formats.FP16.encode(w + u)) == w
        for w, u in zip(weight.tolist(), update.tolist(), strict=True)
        if u
    ]
    assert swallowed(weight, update, "float16") == sum(stays) / len(stays)
    assert math.isnan(swallowed(weight, torch.zeros(3000), "float16"))
    with pytest.raises(PolicyError, match="differ in shape"):
        swallowed(weight, update[:5], "float16")
    for wrong in (weight.int(), weight.bool(), torch.zeros(3000, dtype=torch.complex64), [1.0], None):
        with pytest.raises(PolicyError, match="no updates are swallowed by "):
            swallowed(wrong, update, "float16")
        with pytest.raises(PolicyError, match="no updates are swallowed by "):
            swallowed(weight, wrong, "float16")


def test_a_histogram_is_printed_in_a_line():
    assert repr(exponent_histogram(torch.tensor([0.0, 0.75, -6.0, math.nan]))) == (
        "ExponentHistogram(4 values, 2^-1 to 2^2, max_abs=6, zeros=1, infs=0, nans=1)"
    )
    assert repr(exponent_histogram(torch.zeros(0))).startswith("ExponentHistogram(0 values, max_abs=0")


def test_histograms_of_parts_are_together_that_of_the_whole():
    parts = [spread(100, seed).nan_to_num(posinf=3.0, neginf=0.0) * 2.0**-seed for seed in range(3)]
    total = ExponentHistogram.total_of(map(exponent_histogram, parts))
    assert total.numbers == by_numpy(torch.cat(parts))
