"""Split storage: FP32 as a low-precision value and 16 bits, against bit patterns, float64 and torch's own casts."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import NumericsError
from mezzo.step.split import decode, encode, encode_into, halves, joined
from mezzo.step.storage import SPLIT
from mezzo.tensors import flat

BF16, FP16 = torch.bfloat16, torch.float16
LOW = [BF16, FP16]
INFINITE, FIRST_REFUSED = 0x7F80_0000, 0x7F7F_8000
#: The largest remainders that there are.
EXTREMES = {BF16: (-0x8000, 0x7FFF), FP16: (-0x4000, 0x4000)}
SAME_BITS = {"rtol": 0, "atol": 0, "equal_nan": True}


def of_bits(*patterns):
    return torch.tensor([p - (p >> 31 << 32) for p in patterns], dtype=torch.int32).view(torch.float32)


def random_bits(count, seed=0):
    """Values with every exponent equally likely: log-uniform over the whole of FP32, both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)


def encodable(bits):
    """Without NaN, and without the finite values that BF16 refuses; these become infinities."""
    magnitude = bits & 0x7FFF_FFFF
    return torch.where(magnitude >= FIRST_REFUSED, (bits & -(2**31)) | INFINITE, bits)


def check_bfloat16(bits):
    w = encodable(bits).view(torch.float32)
    hi, lo = encode(w, BF16)
    assert torch.equal(decode(hi, lo).view(torch.int32), w.view(torch.int32))
    away = lo == -(2**15)  # exact ties go away from zero; everything else is torch's nearest
    differs = hi.view(torch.int16) != w.to(BF16).view(torch.int16)
    assert not (differs & ~away).any()
    assert (hi[away].float().abs() > w[away].abs()).all()


def test_bfloat16_is_exact_over_50_million_log_uniform_values():
    for seed in range(25):
        check_bfloat16(random_bits(2_000_000, seed))


@pytest.mark.slow
def test_bfloat16_is_exact_for_every_fp32_value():
    for first in range(-(2**31), 2**31, 2**24):
        check_bfloat16(torch.arange(first, first + 2**24, dtype=torch.int32))


def check_float16(w):
    hi, lo = encode(w, FP16)
    assert torch.equal(hi.view(torch.int16), w.half().view(torch.int16))
    back = decode(hi, lo)
    exact = w.abs() >= 2.0**-16
    assert torch.equal(back[exact].view(torch.int32), w[exact].view(torch.int32))
    assert ((back.double() - w.double()).abs() <= 2.0**-40).all()
    assert torch.equal(back.signbit(), w.signbit())
    assert torch.equal(decode(*encode(back, FP16)).view(torch.int32), back.view(torch.int32))  # nothing drifts


#: Remainders at the ends of every range that there is, beside them, and in between.
REMAINDERS = sorted({s * (1 << k) + d for k in (0, 1, 8, 12, 13, 14, 15) for s in (-1, 1) for d in (-1, 0, 1)} | {0})
REMAINDERS = [each for each in REMAINDERS if -0x8000 <= each <= 0x7FFF]


def test_every_bfloat16_pattern_beside_any_remainder_is_a_sum_of_integers():
    high = np.repeat(np.arange(-0x8000, 0x8000), len(REMAINDERS))
    low = np.tile(np.array(REMAINDERS), 1 << 16)
    exponent_and_digits = high & 0x7FFF
    own = np.where(exponent_and_digits == 0, low.clip(0, 0x7FFF), low)  # nothing rounds to zero from below it
    own = np.where(exponent_and_digits >= 0x7F80, 0, own)  # an infinity or NaN is the value
    read = decode(torch.from_numpy(high).short().view(BF16), torch.from_numpy(low).short())
    found, expected = read.view(torch.int32).numpy().astype(np.int64), (high << 16) + own
    is_nan = exponent_and_digits > 0x7F80
    assert (found == expected)[~is_nan].all()
    assert read.isnan().numpy()[is_nan].all()


def test_every_float16_pattern_beside_any_remainder_is_near_and_so_is_a_zero_from_outside():
    high = torch.arange(-0x8000, 0x8000).short().view(FP16)
    for low in REMAINDERS:
        read = decode(high, torch.full_like(high, low, dtype=torch.int16))
        wide, finite = high.double(), high.isfinite()
        half_a_spacing = torch.maximum(wide.abs() * 2.0**-11, torch.tensor(2.0**-25, dtype=torch.float64))
        assert ((read.double() - wide).abs() <= half_a_spacing)[finite].all()
        torch.testing.assert_close(read[~finite], high[~finite].float(), **SAME_BITS)
        assert (decode(torch.zeros(1, dtype=BF16), torch.tensor([low], dtype=torch.int16)).abs() < 5e-41).all()


@given(patterns=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_any_fp32_pattern_goes_through_halves(patterns):
    w = of_bits(*patterns)
    for dtype in LOW:
        hi, lo = torch.empty_like(w, dtype=dtype), torch.empty_like(w, dtype=torch.int16)
        encode_into(w, hi, lo)
        for value, back in zip(w.tolist(), decode(hi, lo).tolist(), strict=True):
            check_value(value, back, dtype)
        again = decode(hi, lo), torch.empty_like(hi), torch.empty_like(lo)
        encode_into(*again)
        assert torch.equal(decode(*again[1:]).isnan(), w.isnan())
        assert torch.equal(decode(*again[1:]).nan_to_num(7), decode(hi, lo).nan_to_num(7))


def check_value(value, back, dtype):
    if math.isnan(value):
        assert math.isnan(back)
    elif abs(value) >= (65520 if dtype == FP16 else of_bits(FIRST_REFUSED).item()):
        assert back == math.copysign(math.inf, value)
    else:
        assert abs(back - value) <= (0 if dtype == BF16 or abs(value) >= 2.0**-16 else 2.0**-40)
        assert math.copysign(1, back) == math.copysign(1, value)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps", "scalar", "empty", "many blocks"])
def test_halves_that_are_there_take_other_values(layout, dtype):
    w = LAYOUTS[layout]()
    hi, lo = encode(torch.zeros_like(w), dtype)
    before = hi.data_ptr(), lo.data_ptr()
    encode_into(w, hi, lo)
    assert (hi.data_ptr(), lo.data_ptr()) == before
    assert all(same.equal(other) for same, other in zip((hi, lo), encode(w, dtype), strict=True))


def test_no_value_is_asked_of_the_device():
    with torch.device("meta"):
        encode_into(torch.zeros(5), torch.zeros(5, dtype=BF16), torch.zeros(5, dtype=torch.int16))


def test_float16_keeps_its_bound_in_every_binade():
    for exponent in range(-149, 16):
        check_binade(exponent)


def test_float16_keeps_its_bound_at_every_pattern_and_at_the_midpoints_to_both_neighbours():
    """Just below 2^-14 patterns differ by up to 2^13: 6.1008e-05 was read as 6.1020e-05."""
    patterns = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    of_interest = torch.cat([patterns, (patterns[1:] + patterns[:-1]) / 2, torch.tensor([6.1008e-05])])
    near = [of_interest.view(torch.int32).add(step).clamp(min=0).view(torch.float32) for step in range(-3, 4)]
    w = torch.cat(near).clamp(max=65504)
    check_float16(torch.cat([w, -w]))


@pytest.mark.parametrize("dtype", LOW)
def test_an_infinity_or_nan_is_the_value_whatever_remainder_lies_beside_it(dtype):
    hi = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype).repeat_interleave(3)
    read = SPLIT.read((hi, torch.tensor([*EXTREMES[dtype], 1], dtype=torch.int16).repeat(3)))
    torch.testing.assert_close(read, hi.float(), **SAME_BITS)


def check_binade(exponent):
    start, end = 2.0**exponent, 2.0 ** (exponent + 1)
    generator = torch.Generator().manual_seed(exponent + 149)
    inside = start + (end - start) * torch.rand(2000, generator=generator, dtype=torch.float64)
    edges = [math.nextafter(start, 0), start, end, *(start * (1 + k * 2.0**-11) for k in range(0, 2049, 64))]
    magnitudes = torch.cat([inside, torch.tensor(edges, dtype=torch.float64)]).float().clamp(max=65504)
    neighbours = [magnitudes, *(magnitudes.view(torch.int32).add(step).view(torch.float32) for step in (-1, 1))]
    w = torch.cat(neighbours).nan_to_num(0).clamp(0, 65504)
    check_float16(torch.cat([w, -w]))


@pytest.mark.slow
def test_float16_keeps_its_bound_for_every_fp32_value():
    last = torch.tensor(65504.0).view(torch.int32).item()
    for first in range(0, last + 1, 2**24):
        w = torch.arange(first, min(first + 2**24, last + 1), dtype=torch.int32).view(torch.float32)
        check_float16(w)
        check_float16(-w)


def remainder_by_definition(w, hi):
    """The definition of the remainder in Python integers and float64."""
    if math.isinf(hi):
        return 0
    if abs(hi) >= 2.0**-14:
        return struct.unpack("i", struct.pack("f", w))[0] - struct.unpack("i", struct.pack("f", hi))[0]
    return round((w - hi) * 2.0**39)  # Python rounds half to even, as rint does


def test_float16_remainders_are_what_the_definition_says():
    exponent = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 56 - 40
    w = torch.cat([exponent.exp2(), -exponent.exp2(), torch.tensor([2.0**-14, 2.0**-14 - 2.0**-27, 65504.0])])
    w = w.clamp(-65504, 65504)
    hi, lo = encode(w, FP16)
    assert lo.tolist() == [remainder_by_definition(*pair) for pair in zip(w.tolist(), hi.tolist(), strict=True)]


@pytest.mark.parametrize("dtype", LOW)
def test_zeros_subnormals_and_infinities_keep_sign_and_value(dtype):
    w = of_bits(0, 1 << 31, 1, (1 << 31) + 1, 0x007F_FFFF, INFINITE, 0xFF80_0000)
    hi, lo = encode(w, dtype)
    back = decode(hi, lo)
    assert torch.equal(back.signbit(), w.signbit())
    assert torch.equal(hi.signbit(), w.signbit())
    assert back[-2:].tolist() == hi[-2:].tolist() == [math.inf, -math.inf]
    exact = back if dtype == BF16 else torch.cat([back[:2], w[2:5], back[5:]])
    assert torch.equal(exact.view(torch.int32), w.view(torch.int32))


@pytest.mark.parametrize("dtype", LOW)
def test_a_weight_written_beside_the_remainder_of_another_is_at_most_half_a_spacing_off(dtype):
    """Pruned to zero, clamped, filled: through ``.data`` nobody sees it, and the remainder stays."""
    _, remainders = encode(torch.tensor([1 + 2**-9 - 2**-23, 1 - 2**-9 + 2**-20, 2**-15 * 1.3, 0.1, -0.1, 3.1]), dtype)
    remainders = torch.cat([remainders, -remainders, torch.tensor([*EXTREMES[dtype], -1, 0, 1], dtype=torch.int16)])
    patterns = torch.arange(0, 0x7F80 if dtype == BF16 else 0x7C00, 37).to(torch.int16)
    patterns = torch.cat([torch.tensor([0, -0x8000, 1, 2], dtype=torch.int16), patterns, patterns | -0x8000])
    hi = patterns.view(dtype).repeat_interleave(len(remainders))
    lo = remainders.repeat(len(patterns))
    read = SPLIT.read((hi, lo))
    # At a power of two the spacing below is half that above; subnormal halves of FP16 count in units of 2^-39.
    smallest = torch.tensor(2.0**-24 if dtype == FP16 else 2.0**-133)
    spacing = torch.maximum(hi.double().abs() * torch.finfo(dtype).eps, smallest)
    assert ((read.double() - hi.double()).abs() <= spacing / 2).all()


@pytest.mark.parametrize("dtype", LOW)
def test_every_nan_becomes_the_one_nan_and_stays_visible(dtype):
    payloads = [0x7F80_0001, 0x7FC0_0000, 0x7FC0_1234, 0x7FFF_8000, 0x7FFF_FFFF]
    hi, lo = encode(of_bits(*payloads, *(p | 1 << 31 for p in payloads)), dtype)
    assert hi.isnan().all()
    assert hi.signbit().tolist() == [False] * 5 + [True] * 5
    assert not lo.any()
    assert torch.equal(
        decode(hi, lo).view(torch.int32), of_bits(*[0x7FC0_0000] * 5, *[0xFFC0_0000] * 5).view(torch.int32)
    )


def test_a_weight_that_leaves_float16_during_a_step_is_infinite_not_garbage():
    w = torch.tensor([65519.99, 65520.0, -70000.0, 3e38])
    high, remainder = halves(w, FP16)
    assert high.half().tolist() == [65504.0, math.inf, -math.inf, math.inf]
    assert joined(high.half().float(), remainder, FP16).tolist() == [w[0].item(), math.inf, -math.inf, math.inf]


@pytest.mark.parametrize(
    "dtype, fine, refused, range_",
    [(FP16, 65504.0, 65504.004, "65504"), (BF16, of_bits(0x7F7F_7FFF).item(), of_bits(0x7F7F_8000).item(), "3.396")],
)
def test_finite_weights_that_would_become_infinite_are_refused_by_name(dtype, fine, refused, range_):
    hi, lo = encode(torch.tensor([fine, -fine]), dtype)
    assert decode(hi, lo).tolist() == [fine, -fine]
    with pytest.raises(NumericsError, match=rf"2 of 3 weights(?s:.*)blocks\.0\.weight, shape \(3,\)(?s:.*){range_}"):
        encode(torch.tensor([1.0, refused, -refused]), dtype, name="blocks.0.weight")


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4, 5, 6),
    "channels last": lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(40, 30).t(),
    "with gaps": lambda: torch.randn(40, 30)[:, ::3],
    "expanded": lambda: torch.randn(1, 30).expand(40, 30),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "many blocks": lambda: torch.randn(700_001),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_splits_and_joins(layout, dtype):
    w = LAYOUTS[layout]()
    hi, lo = encode(w, dtype)
    like = torch.empty_like(w)
    assert hi.stride() == lo.stride() == like.stride()
    if dtype == BF16:
        torch.testing.assert_close(decode(hi, lo), w, **SAME_BITS)
    else:
        torch.testing.assert_close(decode(hi, lo), w, rtol=0, atol=2.0**-40)


def test_parameters_need_no_care_about_autograd():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    hi, lo = encode(weight, BF16)
    assert not hi.requires_grad
    assert torch.equal(decode(torch.nn.Parameter(hi), lo), weight)


def test_flat_views_share_memory_and_refuse_what_lies_otherwise():
    w = torch.randn(4, 3).t()
    (vector,) = flat(w)
    assert vector.data_ptr() == w.data_ptr()
    assert flat(w, torch.randn(3, 4)) is None
    assert flat(torch.randn(4, 6)[:, ::2]) is None
