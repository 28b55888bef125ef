"""Histograms of exponents against NumPy's frexp, and what follows from them; swallowed updates against float64."""

import math

import numpy as np
import pytest
import torch

from mezzo import formats
from mezzo.numerics import ExponentHistogram, exponent_histogram, swallowed, watches
from mezzo.numerics import histogram as counting

SPECIAL = torch.tensor(
    [0.0, -0.0, 2.0**-149, -(2.0**-149), 3 * 2.0**-149, 2.0**-127, 2.0**-126, -1.5 * 2.0**-126, 1.0, -1.0, 65504.0,
     65519.996, 65520.0, 3.4028234663852886e38, math.inf, -math.inf, math.nan, 448.0, 464.0, 2.0**-25]
)  # fmt: skip


#: The formats that values are stored in without a scale.
ALONE = {name: fmt for name, fmt in formats.FORMATS.items() if fmt not in (formats.E2M1, formats.E8M0)}


def any_bits(count, seed):
    """Values of every exponent that float32 has, subnormals among them."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int32).view(torch.float32)


def spread(count, seed):
    return torch.cat([any_bits(count, seed), SPECIAL])


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


def test_every_value_is_counted_in_its_bin():
    for count in (5000, 70000):  # by keys, and by a table of what sixteen bits hold
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            values = spread(count, seed=1).to(dtype)
            assert exponent_histogram(values).numbers == by_numpy(values), (dtype, count)
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        assert exponent_histogram(values).numbers == by_numpy(values), dtype
        assert exponent_histogram(values.float()).numbers == by_numpy(values), dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        assert exponent_histogram(values).numbers == by_numpy(values.float()), dtype


def test_layouts_and_sizes():
    image = spread(24000, seed=2)[:24000].view(2, 30, 20, 20)
    views = {
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "transposed": image.transpose(1, 3),
        "strided": image[:, ::2, 1:, ::3],
        "expanded": image[:1].expand(3, 30, 20, 20),
        "empty": image[:0],
        "scalar": torch.tensor(-0.75),
        "parameter": torch.nn.Parameter(image.clone()),
        "large": spread(200_003, seed=3),
    }
    for name, view in views.items():
        histogram = exponent_histogram(view)
        assert histogram.numbers == by_numpy(view.detach()), name
        assert histogram.total == view.numel(), name


def test_what_a_histogram_tells():
    histogram = exponent_histogram(SPECIAL)
    assert [histogram.count(exponent) for exponent in (-150, -149, -148, 0, 128)] == [0, 2, 1, 2, 0]
    assert (histogram.zeros, histogram.infs, histogram.nans, histogram.total) == (2, 2, 1, len(SPECIAL))
    assert histogram.max_abs == 3.4028234663852886e38
    assert repr(exponent_histogram(torch.tensor([0.0, 0.75, -6.0, math.nan]))) == (
        "ExponentHistogram(4 values, 2^-1 to 2^2, max_abs=6, zeros=1, infs=0, nans=1)"
    )
    assert repr(exponent_histogram(torch.zeros(0))).startswith("ExponentHistogram(0 values, max_abs=0")
    parts = [spread(100, seed).nan_to_num(posinf=3.0, neginf=0.0) * 2.0**-seed for seed in range(3)]
    assert ExponentHistogram.total_of(map(exponent_histogram, parts)).numbers == by_numpy(torch.cat(parts))


def test_coverage_is_that_of_the_tensor_or_says_that_it_is_interpolated():
    wide = spread(4000, 0)
    narrow = [torch.randn(4000, generator=torch.Generator().manual_seed(k)) * 2.0**k for k in (-12, 0, 6)]
    exponents = torch.randint(-149, 128, (4000,), generator=torch.Generator().manual_seed(0))
    powers = torch.exp2(exponents.double()).float()
    nearly_full = torch.full((1000,), 60000.0)
    nearly_full[7] = 65520.0  # which is known to overflow, whatever is interpolated
    samples = (wide, *narrow, powers, torch.cat([powers, SPECIAL[:10]]), nearly_full, torch.full((1000,), 65519.0))
    exact = dict.fromkeys(ALONE, 0)
    for name, target in ALONE.items():
        for number, values in enumerate(samples):
            for scale in (1.0, 8.0, 2.0**-20, 2.0**15, 3.7):
                counted, guess = target.coverage(values, scale), exponent_histogram(values).coverage(target, scale)
                exact[name] += guess.exact
                assert guess == counted or not guess.exact, (name, number, scale)
                assert (guess.overflow > 0) == (counted.overflow > 0), (name, number, scale)
                assert (guess.zero, guess.nan, guess.total) == (counted.zero, counted.nan, counted.total)
                parts = (guess.zero, guess.underflow, guess.subnormal, guess.normal, guess.overflow, guess.nan)
                assert min(parts) >= 0
                assert sum(parts) == guess.total
                # Interpolation goes wrong by what is in the limit's bin at the most, and where values lie evenly in
                # a bin, as in `wide`, by some standard deviations of a few values.
                for part, limit in (("underflow", target.smallest_subnormal / 2), ("overflow", target.max)):
                    inside = exponent_histogram(values).count(math.frexp(limit / scale)[1] - 1)
                    allowed = min(inside, 12) if values is wide else inside
                    assert abs(getattr(guess, part) - getattr(counted, part)) <= allowed, (name, number, scale, part)
    assert min(exact.values()) >= 8


def test_the_best_scale_is_the_largest_power_of_two_below_the_limit():
    for largest in (1.0, 1.999, 65503.9, 65504.0, 3e-7, 2.0**-149, 1e30):
        scale = exponent_histogram(torch.tensor([largest, 0.0, -largest / 3])).best_scale("float16")
        largest = float(np.float32(largest))
        assert math.frexp(scale)[0] == 0.5
        assert scale * largest < 65504 <= 2 * scale * largest


# Swallowed updates ------------------------------------------------------------------------------------------

COUNT = 1000


def swallowed_by_definition(weight, update, target):
    """round(w + Δw) == w in float64, where sums are exact as far as a rounding to any of the formats can tell."""
    before = target.round(weight.double())
    return int(((update != 0) & (target.round(before + update.double()) == before)).sum())


def updates(wide):
    """Weights and updates: of any size, at ties and one unit beside them, in each format's smallest and last binade."""
    generator = torch.Generator().manual_seed(0)

    def integers(low, high):
        return torch.randint(low, high, (COUNT,), generator=generator)

    signs = any_bits(COUNT, 0).sign()
    yield torch.randn(COUNT, generator=generator), torch.ldexp(signs, integers(-30, 2))
    yield any_bits(COUNT, 1), any_bits(COUNT, 2)
    for seed, target in enumerate(ALONE.values()):
        weight = target.round(any_bits(COUNT, 10 + seed))
        half = torch.ldexp(signs, torch.frexp(weight)[1] - 1 + integers(-13, 1))
        for update in (half, torch.nextafter(half, torch.zeros(())), torch.nextafter(half, half * 2)):
            yield weight, update
            yield torch.exp2(integers(-149, 128).double()).float(), update
        small = integers(0, 4 << target.mantissa_bits).float() * target.smallest_subnormal
        yield small, integers(-9, 10).float() * target.smallest_subnormal / 4
        yield torch.full((COUNT,), target.max) * signs, integers(-9, 10).float() * target.spacing(target.max) / 8
    inf = math.inf
    special = [0.0, -0.0, inf, -inf, math.nan, 448.0, -464.0, 57344.0, 65504.0, 65520.0, 3.4e38, 1.0, -15.99, 16.0]
    special = torch.tensor([*special, 2.0**-25, 2.0**-149, 2.0**-133])
    # In small parts: a sum over them would hide two faults that cancel out.
    pairs = (
        values.reshape(-1).split(1 if wide == torch.float32 else 17)
        for values in torch.meshgrid(special, special, indexing="ij")
    )
    yield from zip(*pairs, strict=True)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_swallowed_updates_are_those_of_the_definition(wide):
    targets = list(ALONE.values())
    for number, (weight, update) in enumerate(updates(wide)):
        gradient = update.roll(1).bfloat16()
        row = torch.zeros(watches.FIELDS + len(targets), dtype=torch.int64)
        watches.count_moves([watches.Move(weight.to(wide), update.to(wide), gradient, row)], targets)
        moving = update != 0
        assert row[: watches.FIELDS].tolist() == [
            int(moving.sum()),
            int((moving & (weight.double().abs() >= 2048 * update.double().abs())).sum()),
            int((gradient != 0).sum()),
            int(((gradient != 0) & ~moving).sum()),
        ], number
        expected = [swallowed_by_definition(weight, update, target) for target in targets]
        assert row[watches.FIELDS :].tolist() == expected, (number, weight, update)


def test_small_and_large_tensors_are_counted_alike_together_and_each_alone():
    generator = torch.Generator().manual_seed(1)
    targets = [formats.FP16, formats.BF16, formats.E4M3]
    sizes = (3, 40, 100_001, 0, 7)
    weights, steps = ([torch.randn(size, generator=generator) for size in sizes] for _ in range(2))
    gradients = [None, steps[1].to(torch.float8_e5m2), steps[2].half(), steps[3], steps[4].double()]
    together, alone = torch.zeros(2, len(sizes), watches.FIELDS + 3, dtype=torch.int64)
    given = list(zip(weights, steps, gradients, strict=True))
    rows = zip(given, together, strict=True)
    watches.count_moves([watches.Move(w, u * 1e-3, g, row) for (w, u, g), row in rows], targets)
    for (weight, update, gradient), row in zip(given, alone, strict=True):
        watches.count_moves([watches.Move(weight, update * 1e-3, gradient, row)], targets)
    assert together.tolist() == alone.tolist()
    assert together[2][0] == 100_001


def test_the_share_of_swallowed_updates():
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
    assert swallowed(torch.ones(64), torch.full((64,), -1e-3), "bfloat16") == 1.0  # what AdamW writes at 1e-3
