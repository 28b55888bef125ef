"""The format table against oracles that share no code with it: struct, fractions, numpy, torch's casts."""

import bisect
import itertools
import math
import struct
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.cli.show import landmarks
from mezzo.errors import PolicyError
from mezzo.formats import BF16, E2M1, E4M3, E5M2, E8M0, FORMATS, FP16, FP32, TF32, Coverage, Format, by_name
from mezzo.formats import definitions as table_of_formats

from ..support.refusals import refused

SMALL = [FP16, BF16, E4M3, E5M2]  # every pattern can be tried
EVERY = [fmt for fmt in FORMATS.values() if fmt not in (E2M1, E8M0)]  # which tests/formats/test_small.py has
any_float = st.floats(width=64)


def read(number_format: Format, bits: int) -> float:
    """What a pattern means, read by struct: BF16 is half a float32, E5M2 half a float16."""
    match number_format.name:
        case "float32":
            return struct.unpack(">f", bits.to_bytes(4))[0]
        case "tf32":
            return struct.unpack(">f", (bits << 13).to_bytes(4))[0]
        case "bfloat16":
            return struct.unpack(">f", (bits << 16).to_bytes(4))[0]
        case "float16":
            return struct.unpack(">e", bits.to_bytes(2))[0]
        case "float8_e5m2":
            return struct.unpack(">e", (bits << 8).to_bytes(2))[0]
        case "float8_e4m3fn":  # the OCP table, as text: S.EEEE.MMM
            sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
            if exponent == 15 and mantissa == 7:
                return math.nan
            size = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
            if exponent == 0:
                size = Fraction(mantissa, 8) * Fraction(1, 64)
            return -float(size) if sign else float(size)
    raise AssertionError(number_format.name)


def finite_values(number_format: Format) -> list[Fraction]:
    """The non-negative finite values in order, with the next one beyond the largest, as if it existed."""
    values = []
    for bits in range(1 << (number_format.num_bits - 1)):
        value = read(number_format, bits)
        if not math.isfinite(value):
            break
        values.append(Fraction(value))
    return [*values, 2 * values[-1] - values[-2]]


TABLES = {number_format.name: finite_values(number_format) for number_format in SMALL}


def nearest_even(number_format: Format, value: float) -> float:
    """Round by looking a value up between its two neighbours, in exact arithmetic."""
    if not math.isfinite(value):
        return value if number_format.has_inf or math.isnan(value) else math.nan
    table, size = TABLES[number_format.name], Fraction(abs(value))
    above = min(bisect.bisect_left(table, size), len(table) - 1)
    below = max(above - 1, 0)
    gap_below, gap_above = abs(size - table[below]), abs(table[above] - size)
    index = below if gap_below < gap_above or (gap_below == gap_above and below % 2 == 0) else above
    result = (math.inf if number_format.has_inf else math.nan) if index == len(table) - 1 else float(table[index])
    return math.copysign(result, value)


def same(left: float, right: float) -> bool:
    """Equal as numbers, with the sign of zero; any NaN is like any other."""
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return left == right and math.copysign(1, left) == math.copysign(1, right)


def some_patterns(number_format: Format, until: int) -> list[int]:
    """Every 97th pattern, and those around each power of two and at the end; of a small format all."""
    binade = 1 << number_format.mantissa_bits
    step = 1 if number_format.num_bits == 8 else 97
    return [bits for bits in range(until) if bits % step == 0 or (bits + 2) % binade <= 4 or bits > until - 4]


def edge_values(number_format: Format) -> list[float]:
    """Values, their midpoints, and the float64 numbers next to each midpoint, of both signs."""
    numbers = TABLES[number_format.name]
    chosen = some_patterns(number_format, len(numbers) - 1)
    pairs = [(float(numbers[bits]), float(numbers[bits + 1])) for bits in chosen]
    table = sorted({value for pair in pairs for value in pair})
    middles = [(low + high) / 2 for low, high in pairs]
    neighbours = [math.nextafter(middle, side) for middle in middles for side in (0.0, math.inf)]
    positive = [*table, *middles, *neighbours, 1e300, 5e-324, math.inf]
    return [*positive, *(-value for value in positive), math.nan]


# The table itself


@pytest.mark.parametrize("number_format", EVERY, ids=str)
def test_fields_agree_with_the_patterns(number_format):
    top = {"float8_e4m3fn": 0x7E}.get(
        number_format.name, (2**number_format.exponent_bits - 1 << number_format.mantissa_bits) - 1
    )
    assert number_format.max == read(number_format, top)
    assert number_format.smallest_normal == read(number_format, 1 << number_format.mantissa_bits)
    assert number_format.smallest_subnormal == read(number_format, 1)
    one = number_format.bias << number_format.mantissa_bits
    assert read(number_format, one) == 1.0
    assert number_format.eps == read(number_format, one + 1) - 1.0
    assert number_format.has_inf == math.isinf(read(number_format, top + 1))


# From the paper

FACTS = {
    FP16: [
        ("0 00000 0000000000", 0x0000, 0.0),
        ("0 00000 0000000001", 0x0001, 2.0**-24),
        ("0 00000 1111111111", 0x03FF, 1023 * 2.0**-24),
        ("0 00001 0000000000", 0x0400, 2.0**-14),
        ("0 01101 0101010101", 0x3555, 0.333251953125),
        ("0 01110 1111111111", 0x3BFF, 1 - 2.0**-11),
        ("0 01111 0000000000", 0x3C00, 1.0),
        ("0 01111 0000000001", 0x3C01, 1 + 2.0**-10),
        ("0 11110 1111111111", 0x7BFF, 65504.0),
        ("0 11111 0000000000", 0x7C00, math.inf),
        ("1 00000 0000000000", 0x8000, -0.0),
        ("1 10000 0000000000", 0xC000, -2.0),
        ("1 11111 0000000000", 0xFC00, -math.inf),
    ],
}


def test_facts():
    for number_format, rows in FACTS.items():
        for text, bits, value in rows:
            assert int(text.replace(" ", ""), 2) == bits
            assert same(number_format.decode(bits), value)
            assert number_format.encode(value) == bits
    assert [fmt.encode(1 / 3) for fmt in (FP16, BF16, E4M3, E5M2)] == [0x3555, 0x3EAB, 0x2B, 0x35]
    # 40 powers of two, subnormals included: 2^-24 … 2^15.
    exact = [k for k in range(-40, 40) if FP16.decode(FP16.encode(2.0**k)) == 2.0**k]
    assert exact == list(range(-24, 16))
    for k in range(-24, -14):  # 2^k ≤ x < 2^(k+1) holds 2^(24+k) values: 24+k fraction bits and the leading one
        inside = [bits for bits in range(0x400) if 2.0**k <= FP16.decode(bits) < 2.0 ** (k + 1)]
        assert len(inside) == 2 ** (25 + k - 1)
    assert FP16.spacing(2.0**-3) == 2.0**-13  # small terms are shifted out
    assert FP16.decode(FP16.encode(2.0**-3 + 2.0**-14)) == 0.125


# decode and encode


@pytest.mark.parametrize("number_format", [*SMALL, TF32], ids=str)
def test_every_pattern_decodes_as_struct_reads_it_and_survives_a_round_trip(number_format):
    for bits in some_patterns(number_format, 1 << number_format.num_bits):
        value = number_format.decode(bits)
        assert same(value, read(number_format, bits)), hex(bits)
        again = number_format.encode(value)
        if math.isnan(value):
            assert math.isnan(number_format.decode(again))
            assert again >> (number_format.num_bits - 1) == bits >> (number_format.num_bits - 1)
        else:
            assert again == bits


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_fp32_patterns_decode_as_struct_reads_them(bits):
    assert same(FP32.decode(bits), read(FP32, bits))


@pytest.mark.parametrize(
    "number_format, bits",
    [(FP32, 0x7FC00000), (TF32, 0x3FE00), (FP16, 0x7E00), (BF16, 0x7FC0), (E4M3, 0x7F), (E5M2, 0x7E)],
    ids=str,
)
def test_nan_is_the_quiet_one_and_keeps_its_sign(number_format, bits):
    assert number_format.encode(math.nan) == bits
    assert number_format.encode(-math.nan) == bits | 1 << (number_format.num_bits - 1)
    assert math.copysign(1.0, number_format.decode(number_format.encode(-math.nan))) == -1.0


@pytest.mark.parametrize("number_format", SMALL, ids=str)
def test_encode_at_every_value_and_midpoint(number_format):
    for value in edge_values(number_format):
        rounded = read(number_format, number_format.encode(value))
        assert same(rounded, nearest_even(number_format, value)), value


@pytest.mark.parametrize("number_format", SMALL, ids=str)
@settings(deadline=None)
@given(value=any_float)
def test_encode_anything(number_format, value):
    assert same(read(number_format, number_format.encode(value)), nearest_even(number_format, value))


@settings(deadline=None)
@given(any_float)
def test_encode_fp32_as_numpy_does(value):
    with np.errstate(over="ignore"):
        expected = np.float32(np.float64(value))
    assert same(read(FP32, FP32.encode(value)), float(expected))


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_encode_tf32_as_exact_arithmetic_does(value):
    _, exponent = math.frexp(value)
    unit = Fraction(2) ** (max(exponent, -125) - 11)  # eleven significant bits, lowest binade 2^-126
    exact = round(Fraction(value) / unit) * unit  # Fraction rounds half to even
    expected = math.inf if abs(exact) >= 2**128 else float(exact)
    assert same(read(TF32, TF32.encode(value)), math.copysign(expected, value))


def test_what_is_refused():
    for bits in (-1, 1 << 16, 1.5, "3c00"):
        with refused(PolicyError, "is no bit pattern of float16", "write  an integer from 0 to 0xffff"):
            FP16.decode(bits)
    for value in ("1", None, [1.0], 1j, 10**400, torch.ones(2)):
        with refused(PolicyError, "has no bit pattern\n  write  a real number"):
            FP16.encode(value)
    for tensor, write in (
        (torch.ones(2, dtype=torch.int64), "tensor.float()"),
        (torch.ones(2, dtype=torch.bool), "tensor.float()"),
        (torch.ones(2, dtype=torch.complex64), "torch.view_as_real(tensor)"),
        (torch.ones(2).to(torch.float8_e5m2), "tensor.float()"),
    ):
        for method in (FP16.round, FP16.coverage):
            words = "tensors cannot be rounded to float16", f"write  {write}", "tensor of shape (2,) on cpu"
            with refused(PolicyError, *words):
                method(tensor)
            for wrong in ([1.0], None, 1.0):
                with refused(PolicyError, "cannot be rounded to float16\n  write  torch.tensor"):
                    method(wrong)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with refused(PolicyError, "coverage cannot be taken at scale", "positive finite number"):
            FP16.coverage(torch.ones(2), scale)
    for name, hint in (
        ("flaot16", "did you mean 'float16'?"), ("bf61", "did you mean 'bf16'?"),
        (torch.int8, "why    valid: float32, tf32, float16"), (torch.float64, "why    valid: float32, tf32, float16"),
        (16, "valid: float32, tf32, float16"), ("", "valid: float32, tf32, float16"),
    ):  # fmt: skip
        with refused(
            PolicyError, f"unknown number format {name!r}", hint, 'write  by_name("float16"), by_name("fp16")'
        ):
            by_name(name)


# spacing


@pytest.mark.parametrize("number_format", SMALL, ids=str)
def test_spacing_is_the_distance_to_the_neighbour_away_from_zero(number_format):
    table = TABLES[number_format.name]
    for low, high in ((table[at], table[at + 1]) for at in some_patterns(number_format, len(table) - 1)):
        assert number_format.spacing(float(low)) == float(high - low)
        assert number_format.spacing(-float(low)) == float(high - low)


@pytest.mark.parametrize("number_format", EVERY, ids=str)
def test_spacing_where_there_is_none(number_format):
    beyond = math.nextafter(number_format.max, math.inf)
    assert all(math.isnan(number_format.spacing(x)) for x in (math.inf, -math.inf, math.nan, beyond, 1e300))
    assert number_format.spacing(0.0) == number_format.smallest_subnormal
    assert number_format.spacing(5e-324) == number_format.smallest_subnormal


# round

INPUTS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def stored(number_format: Format, value: float, dtype: torch.dtype) -> float:
    """The reference: encode, decode, and put the result into the input's dtype."""
    return torch.tensor(number_format.decode(number_format.encode(value)), dtype=dtype).double().item()


@pytest.mark.parametrize("number_format", SMALL, ids=str)
def test_round_equals_encode_at_every_edge(number_format):
    for dtype in INPUTS:
        values = torch.tensor(edge_values(number_format), dtype=torch.float64).to(dtype)
        rounded = number_format.round(values)
        assert rounded.dtype == dtype
        table = {x: stored(number_format, x, dtype) for x in set(values.double().tolist()) if x == x}
        for value, result in zip(values.double().tolist(), rounded.double().tolist(), strict=True):
            expected = math.copysign(table.get(value, math.nan), value)
            assert same(result, expected), (dtype, value)


@pytest.mark.parametrize("number_format", EVERY, ids=str)
@settings(deadline=None)
@given(values=st.lists(any_float, max_size=8))
def test_round_equals_encode_anywhere(number_format, values):
    rounded = number_format.round(torch.tensor(values, dtype=torch.float64)).tolist()
    expected = [number_format.decode(number_format.encode(value)) for value in values]
    assert all(map(same, rounded, expected))


@pytest.mark.parametrize("number_format", [entry for entry in EVERY if entry.dtype], ids=str)
def test_the_exact_path_agrees_with_torchs_cast_on_float32(number_format):
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(3))
    values = patterns.to(torch.int32).view(torch.float32)
    by_torch = values.to(number_format.dtype).to(torch.float32)
    if number_format is E4M3:  # torch saturates since 2.12
        by_torch[values.abs() > 464.0] = math.nan
    assert torch.equal(number_format.round(values).nan_to_num(7.0), by_torch.nan_to_num(7.0))
    exact = number_format.round(values.double()).float()
    assert torch.equal(exact.nan_to_num(7.0), by_torch.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_e4m3_overflow_is_not_hidden(dtype):
    values = torch.tensor([448.0, 464.0, 466.0, -480.0, 6e4, math.inf], dtype=dtype)
    assert E4M3.round(values)[:2].tolist() == [448.0, 448.0]
    assert E4M3.round(values).isnan().tolist() == [False, False, True, True, True, True]
    assert E4M3.coverage(values).overflow == 4


def test_float64_is_rounded_once():
    # Just above the tie between 1 and 1 + 2^-10; through float32 it would fall onto the tie, then to 1.
    above = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert FP16.round(above).item() == 1 + 2.0**-10
    assert BF16.round(above * 0 + 1 + 2.0**-8 + 2.0**-40).item() == 1 + 2.0**-7


@pytest.mark.parametrize("number_format", EVERY, ids=str)
def test_round_keeps_shape_layout_and_stays_outside_autograd(number_format):
    for shape, dtype in itertools.product([(), (0,), (3, 0, 2), (2, 3)], INPUTS):
        values = torch.ones(shape, dtype=dtype, requires_grad=True)
        rounded = number_format.round(values)
        assert (rounded.shape, rounded.dtype, rounded.device) == (values.shape, dtype, values.device)
        assert not rounded.requires_grad
        assert rounded.data_ptr() != values.data_ptr() or values.numel() == 0
    strided = torch.full((4, 6), 1.0009765625 + 1e-4).t()[::2]
    assert torch.equal(number_format.round(strided), number_format.round(strided.contiguous()))


# stochastic rounding


@pytest.mark.parametrize("number_format", [TF32, *SMALL], ids=str)
def test_stochastic_rounding_is_unbiased(number_format):
    trials, cases = 20_000, itertools.product((torch.float32, torch.float64), (0.0, 0.125, 0.5, 0.875), (True, False))
    for dtype, share, is_normal in cases:
        low = -1.5 if is_normal else -number_format.smallest_subnormal
        gap = number_format.spacing(low)
        values = torch.full((trials,), low - share * gap, dtype=dtype)
        drawn = number_format.round(values, stochastic=True, generator=torch.Generator().manual_seed(11))
        seen = Counter(drawn.double().tolist())
        assert set(seen) <= {low, low - gap}
        # Five standard deviations of a binomial share; none at all where the value is on the grid.
        assert abs(seen[low - gap] / trials - share) <= 5 * math.sqrt(share * (1 - share) / trials)


@pytest.mark.parametrize("number_format", SMALL, ids=str)
def test_stochastic_rounding_leaves_the_grid_alone(number_format):
    table = [float(value) for value in TABLES[number_format.name][:-1]]
    values = torch.tensor([*table, *(-x for x in table)], dtype=torch.float64)
    drawn = number_format.round(values, stochastic=True, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.view(torch.int64), values.view(torch.int64))  # the sign of zero too


@pytest.mark.parametrize("number_format", EVERY, ids=str)
def test_stochastic_rounding_takes_a_neighbour(number_format):
    source = torch.Generator().manual_seed(5)
    for dtype in INPUTS:
        values = torch.randn(300, generator=source, dtype=torch.float64)
        values = (values * torch.exp2(torch.randint(-20, 6, (300,), generator=source).double())).to(dtype)
        drawn = number_format.round(values, stochastic=True, generator=source)
        for value, result in zip(values.double().tolist(), drawn.double().tolist(), strict=True):
            assert abs(result - value) < number_format.spacing(value)
            assert number_format.decode(number_format.encode(result)) == result
            assert math.copysign(1, result) == math.copysign(1, value)


def test_stochastic_rounding_beyond_the_largest_follows_the_nearest_rule():
    values = torch.tensor([65504.0, 65519.0, 65520.0, -1e6, math.inf, math.nan])
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        drawn = FP16.round(values, stochastic=True, generator=source)
        assert drawn[:5].tolist() == [65504.0, 65504.0, math.inf, -math.inf, math.inf]
        assert drawn[5].isnan()
    assert E4M3.round(torch.tensor([448.0, math.inf]), stochastic=True).isnan().tolist() == [False, True]


def test_stochastic_rounding_draws_from_the_generator_it_is_given():
    values = torch.full((100,), 1.0 + 2.0**-12)
    draws = [FP16.round(values, stochastic=True, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# coverage


def classify(number_format: Format, value: float) -> str:
    """The class of one value, by the exact oracle."""
    if math.isnan(value):
        return "nan"
    if value == 0:
        return "zero"
    rounded = abs(nearest_even(number_format, value))
    if not math.isfinite(rounded):
        return "overflow"
    if rounded == 0:
        return "underflow"
    return "subnormal" if rounded < number_format.smallest_normal else "normal"


def counts(coverage: Coverage) -> dict[str, int]:
    names = ("zero", "underflow", "subnormal", "normal", "overflow", "nan")
    return {name: getattr(coverage, name) for name in names}


@pytest.mark.parametrize("number_format", SMALL, ids=str)
@settings(deadline=None)
@given(values=st.lists(any_float, max_size=12), scale=st.sampled_from([1.0, 0.25, 1024.0, 2.0**24]))
def test_coverage_partitions_the_elements(number_format, values, scale):
    coverage = number_format.coverage(torch.tensor(values, dtype=torch.float64), scale)
    expected = Counter("zero" if x == 0 else classify(number_format, x * scale) or x for x in values)
    lost_in_float64 = sum(1 for x in values if x != 0 and x * scale == 0)
    expected["underflow"] += lost_in_float64
    expected["zero"] -= lost_in_float64
    assert {k: v for k, v in counts(coverage).items() if v} == {k: v for k, v in expected.items() if v}
    assert coverage.total == sum(counts(coverage).values()) == len(values)


@pytest.mark.parametrize("number_format", SMALL, ids=str)
def test_coverage_at_every_edge(number_format):
    values = edge_values(number_format)
    expected = Counter(classify(number_format, value) for value in values)
    assert counts(number_format.coverage(torch.tensor(values, dtype=torch.float64))) == expected


def test_coverage_of_every_fp16_pattern_in_itself():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert FP16.coverage(patterns) == Coverage(
        zero=2, underflow=0, subnormal=2046, normal=61440, overflow=2, nan=2046, total=65536
    )


def test_coverage_walks_in_chunks(monkeypatch):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-5
    whole = FP16.coverage(values)
    monkeypatch.setattr(table_of_formats, "CHUNK", 7)
    assert FP16.coverage(values.reshape(10, 100).t()) == whole
    assert FP16.coverage(values[:0]).total == 0


# names and landmarks


def test_by_name():
    for expected, names in {
        FP16: ["float16", "fp16", "half", "torch.half", torch.float16, "torch.float16"],
        BF16: [" BF16 ", torch.bfloat16], FP32: ["fp32", "float", torch.float32], TF32: ["TF32"],
        E4M3: ["e4m3", torch.float8_e4m3fn], E5M2: ["fp8_e5m2", E5M2],
    }.items():  # fmt: skip
        assert all(by_name(name) is expected for name in names)


@pytest.mark.parametrize("number_format", EVERY, ids=str)
def test_landmarks(number_format):
    marks = {what: bits for bits, what in landmarks(number_format)}
    value = {what: read(number_format, bits) for what, bits in marks.items()}
    assert list(marks.values()) == sorted(marks.values())
    assert value["largest"] == number_format.max
    assert value["smallest normal"] == number_format.smallest_normal
    assert value["largest subnormal"] == number_format.smallest_normal - number_format.smallest_subnormal
    assert value["smallest above one"] - 1.0 == number_format.eps
    assert 1.0 - value["largest below one"] == number_format.eps / 2
    assert ("+inf" in marks) == ("−inf" in marks) == number_format.has_inf
    if number_format in FACTS:
        assert {bits for _, bits, _ in FACTS[number_format]} <= set(marks.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number_format", EVERY, ids=str)
def test_the_gpu_rounds_as_the_cpu_does(number_format):
    for dtype in INPUTS:
        values = torch.tensor(edge_values(BF16) + edge_values(E4M3), dtype=torch.float64).to(dtype)
        on_gpu = number_format.round(values.cuda()).cpu()
        assert torch.equal(on_gpu.nan_to_num(7.0), number_format.round(values).nan_to_num(7.0))
        assert number_format.coverage(values.cuda()) == number_format.coverage(values)
