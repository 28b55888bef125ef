"""How a number is stored: FP32 as a low value and 16 bits, rounding to nearest and at random, against bit patterns."""

import math
import struct

import numpy as np
import pytest
import torch

from mezzo.formats.noise import noise
from mezzo.step.storage import PLAIN, READ, SPLIT, decode, encode, encode_into, keys, nearest, stochastic

BF16, FP16 = torch.bfloat16, torch.float16
LOW = [BF16, FP16]
INFINITE, FIRST_REFUSED = 0x7F80_0000, 0x7F7F_8000
SAME_BITS = {"rtol": 0, "atol": 0, "equal_nan": True}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 2.0**-25, 3 * 2.0**-25, -(2.0**-25), 65519.9, 65520.0, -7e4]
SPECIAL += [3.3961776e38, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-14 - 2.0**-26]


def of_bits(*patterns):
    return torch.tensor([p - (p >> 31 << 32) for p in patterns], dtype=torch.int32).view(torch.float32)


def random_bits(count, seed=0):
    """Values with every exponent equally likely: log-uniform over the whole of FP32, both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)


def encodable(bits):
    """Without NaN, and without the finite values that BF16 refuses; these become infinities."""
    magnitude = bits & 0x7FFF_FFFF
    return torch.where(magnitude >= FIRST_REFUSED, (bits & -(2**31)) | 0x7F80_0000, bits)


def check_bfloat16(bits):
    w = encodable(bits).view(torch.float32)
    hi, lo = encode(w, BF16)
    assert torch.equal(decode(hi, lo).view(torch.int32), w.view(torch.int32))
    away = lo == -(2**15)  # exact ties go away from zero; everything else is torch's nearest
    differs = hi.view(torch.int16) != w.to(BF16).view(torch.int16)
    assert not (differs & ~away).any()
    assert (hi[away].float().abs() > w[away].abs()).all()


def test_bfloat16_is_exact_at_every_high_half_and_every_low_one():
    """A value is its upper and its lower sixteen bits, of which the lower may carry one over."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    for low in (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF):
        check_bfloat16(every * 2**16 + low)
    for high in (0, 1, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3FFF, 0x7F7E, 0x7F7F):
        for sign in (0, 0x8000):
            check_bfloat16((every & 0xFFFF) + (((high | sign) ^ 0x8000) - 0x8000) * 2**16)
    check_bfloat16(random_bits(200_000))


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
REMAINDERS = [remainder for remainder in REMAINDERS if -0x8000 <= remainder <= 0x7FFF]


def test_every_bfloat16_pattern_beside_any_remainder_is_a_sum_of_integers():
    high = np.repeat(np.arange(-0x8000, 0x8000), len(REMAINDERS))
    low = np.tile(np.array(REMAINDERS), 1 << 16)
    exponent_and_digits = high & 0x7FFF
    own = np.where(exponent_and_digits == 0, low.clip(0, 0x7FFF), low)  # nothing rounds to zero from below it
    own = np.where(exponent_and_digits >= 0x7F80, 0, own)  # an infinity or NaN is the value
    read = decode(torch.from_numpy(high).short().view(BF16), torch.from_numpy(low).short())
    joined, expected = read.view(torch.int32).numpy().astype(np.int64), (high << 16) + own
    is_nan = exponent_and_digits > 0x7F80
    assert (joined == expected)[~is_nan].all()
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


@pytest.mark.parametrize("dtype", LOW)
def test_any_fp32_pattern_goes_through_halves(dtype):
    """What is too large becomes infinite here, where nothing refuses it."""
    w = torch.cat([random_bits(20_000).view(torch.float32), torch.tensor([*SPECIAL, math.nan])])
    hi, lo = torch.empty_like(w, dtype=dtype), torch.empty_like(w, dtype=torch.int16)
    encode_into(w, hi, lo)
    back = decode(hi, lo)
    for pair in zip(w.tolist(), back.tolist(), strict=True):
        check_value(*pair, dtype)
    encode_into(back, hi, lo)
    torch.testing.assert_close(decode(hi, lo), back, **SAME_BITS)


def check_value(value, back, dtype):
    if math.isnan(value):
        assert math.isnan(back)
    elif abs(value) >= (65520 if dtype == FP16 else of_bits(FIRST_REFUSED).item()):
        assert back == math.copysign(math.inf, value)
    else:
        assert abs(back - value) <= (0 if dtype == BF16 or abs(value) >= 2.0**-16 else 2.0**-40)
        assert math.copysign(1, back) == math.copysign(1, value)


def test_float16_keeps_its_bound_at_every_pattern_between_them_and_in_every_binade():
    """Just below 2^-14 patterns differ by up to 2^13: 6.1008e-05 was read as 6.1020e-05."""
    patterns = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    of_interest = torch.cat([patterns, (patterns[1:] + patterns[:-1]) / 2, torch.tensor([6.1008e-05])])
    neighbours = [of_interest.view(torch.int32).add(step).clamp(min=0).view(torch.float32) for step in range(-3, 4)]
    inside = random_bits(200_000).view(torch.float32).nan_to_num(0).abs()
    w = torch.cat([*neighbours, inside]).clamp(max=65504)
    check_float16(torch.cat([w, -w]))


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
def test_every_nan_becomes_the_one_nan_and_stays_visible(dtype):
    payloads = [0x7F80_0001, 0x7FC0_0000, 0x7FC0_1234, 0x7FFF_8000, 0x7FFF_FFFF]
    hi, lo = encode(of_bits(*payloads, *(p | 1 << 31 for p in payloads)), dtype)
    assert hi.isnan().all()
    assert hi.signbit().tolist() == [False] * 5 + [True] * 5
    assert not lo.any()
    assert torch.equal(
        decode(hi, lo).view(torch.int32), of_bits(*[0x7FC0_0000] * 5, *[0xFFC0_0000] * 5).view(torch.int32)
    )


LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4, 5, 6),
    "channels last": lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(40, 30).t(),
    "with gaps": lambda: torch.randn(40, 30)[:, ::3],
    "expanded": lambda: torch.randn(1, 30).expand(40, 30),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "many blocks": lambda: torch.randn(200_001),
}


@pytest.mark.parametrize("dtype", LOW)
def test_any_layout_splits_and_joins_anew_or_in_memory_that_is_there(dtype):
    for name, layout in LAYOUTS.items():
        w = layout()
        hi, lo = encode(torch.nn.Parameter(w), dtype)
        assert not hi.requires_grad
        assert hi.stride() == lo.stride() == torch.empty_like(w).stride(), name
        back = decode(torch.nn.Parameter(hi), lo)
        torch.testing.assert_close(back, w, rtol=0, atol=0 if dtype == BF16 else 2.0**-40)
        others = encode(torch.zeros_like(w), dtype)
        before = [tensor.data_ptr() for tensor in others]
        encode_into(w, *others)
        assert [tensor.data_ptr() for tensor in others] == before
        assert all(same.equal(other) for same, other in zip(others, (hi, lo), strict=True)), name
    with torch.device("meta"):  # where there is no value to ask for
        encode_into(torch.zeros(5), torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=torch.int16))


# Storages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_a_storage_reads_what_it_has_written_and_writing_what_was_read_changes_nothing(dtype):
    w = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)).clamp(min=2.0**-16)
    stored = [(PLAIN, (w.to(dtype),), w.to(dtype).float())]  # to nearest
    stored += [(SPLIT, encode(w, dtype), w), (READ, encode(w, dtype), w)] if dtype in LOW else []
    for kept, made, value in stored:
        parts = kept.parts(*made, *[None] * (2 - len(made)))
        assert torch.equal(kept.read(parts), value)
        for part, written in zip(parts, kept.write(w, dtype), strict=True) if kept is not READ else ():
            assert torch.equal(torch.empty_like(part).copy_(written), part)


# Rounding on bit patterns, against torch's own casts ---------------------------------------------------------


def log_uniform(count=200_000):
    values = random_bits(count).view(torch.float32)
    return torch.cat([torch.tensor(SPECIAL), values[~values.isnan()]])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_nearest_is_torch_s_cast(dtype):
    w = log_uniform()
    assert torch.equal(nearest(w, dtype).to(dtype).view(torch.int16), w.to(dtype).view(torch.int16))
    fits = w.to(dtype).isfinite()
    assert torch.equal(nearest(w, dtype)[fits], w.to(dtype)[fits].float())  # on the grid already, before any cast
    assert nearest(torch.tensor(math.nan), dtype).isnan()


def test_stochastic_rounding_takes_one_of_the_two_neighbours_with_the_right_odds():
    w = log_uniform(2000).clamp(-3e38, 3e38)
    every = torch.arange(0, 1 << 16, 1 << 6, dtype=torch.int32) + 32  # 1024 of the 65536 draws, spread evenly
    rounded = stochastic(w.expand(len(every), -1), every[:, None].expand(-1, len(w)))
    assert torch.equal(rounded, rounded.bfloat16().float())
    spacing = torch.exp2((w.double().frexp().exponent - 8).clamp(min=-133).double())
    assert ((rounded.double() - w).abs() < spacing).all()
    assert ((rounded.double().mean(0) - w).abs() <= spacing / 1024).all()
    on_grid = w.bfloat16().float() == w
    assert torch.equal(rounded[:, on_grid], w[on_grid].expand(len(every), -1))
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    torch.testing.assert_close(stochastic(odd, torch.full((3,), 0xFFFF, dtype=torch.int32)), odd, **SAME_BITS)


def test_noise_is_the_mixer_it_says_it_is():
    def mixer(x):  # lowbias32, in Python integers
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    index = torch.tensor([0, 1, 2, 1000, 2**31 - 1, -1], dtype=torch.int32)
    for key, slot in ((0, 0), (12345, 0), (-7, 2)):
        expected = [mixer((i + key + slot * 0x9E3779B9) % 2**32) for i in index.tolist()]
        assert [n % 2**32 for n in noise(index, torch.tensor(key, dtype=torch.int32), slot).tolist()] == expected


def test_noise_is_even_and_uncorrelated_between_neighbours_slots_and_steps():
    index = torch.arange(200_000, dtype=torch.int32)
    steps = [keys(torch.tensor(step), 2) for step in (1, 2)]
    draws = [noise(index, key, slot) & 0xFFFF for key in (*steps[0], *steps[1]) for slot in (0, 1)]
    uniform = [draw.double() / 65536 for draw in draws]
    for one in uniform:
        assert abs(one.mean() - 0.5) < 5 * (1 / 12 / len(index)) ** 0.5
        assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1]) < 5 / len(index) ** 0.5
    others = torch.corrcoef(torch.stack(uniform)) - torch.eye(len(uniform))
    assert others.abs().max() < 5 / len(index) ** 0.5


def test_keys_differ_by_parameter_step_and_seed_and_by_nothing_else():
    made = [keys(torch.tensor(step), 50, seed) for step in range(1, 20) for seed in (0, 1, 12345678901)]
    assert len(torch.cat(made).unique()) == 50 * len(made)
    assert torch.equal(keys(torch.tensor(7), 5), keys(torch.tensor(7), 50)[:5])
