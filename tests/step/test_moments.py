"""Moments in 8 bits against exact Python: fractions and bit patterns, one element after another."""

import functools
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import optim
from mezzo.errors import PolicyError
from mezzo.formats.noise import noise
from mezzo.step.moments import GROUP, START, coded, decode, encode, fit, num_groups, valued, write

from ..support.refusals import refused
from .executors.implementations import LAYOUTS, in_order, random

INT8, UINT8, BF16, FP16, FP32 = torch.int8, torch.uint8, torch.bfloat16, torch.float16, torch.float32
LAST = {INT8: 127, UINT8: 255}
#: Where the curve ends.
END = Fraction(31, 16)
#: What four FP32 operations, and a largest element kept below the end, may change of a place on the curve.
ABOUT = Fraction(1, 2**21)


def pattern_of(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


def value_of(pattern):
    return struct.unpack("<f", struct.pack("<i", pattern))[0]


def scale_of(group):
    """The largest, rounded up to BF16; at least 2^-126."""
    if any(map(math.isnan, group)):
        return math.nan
    largest = max(pattern_of(abs(value)) for value in group)
    return max(value_of(min(-(-largest // 2**16) * 2**16, pattern_of(math.inf))), 2.0**-126)


def place_of(y):
    """The FP32 pattern of a fraction, which between two powers of two is a line."""
    power = math.frexp(float(y))[1] - 1
    return (power + 126 + y / Fraction(2) ** power) * 2**23


def codes_of(value, scale, dtype, fraction=Fraction(1, 2)):
    """The codes that FP32 arithmetic may find: of a place on the curve, and of one that is a little lower or higher."""
    start = Fraction(START[dtype])
    y = start + (END - start) * abs(Fraction(value)) / Fraction(scale)
    codes = []
    for position in (y * (1 - ABOUT), min(y * (1 + ABOUT), END)):
        size = math.floor((place_of(max(position, start)) - place_of(start)) / 2**19 + fraction)
        size = max(size, int(value != 0)) if dtype == UINT8 else size
        codes.append(-size if value < 0 else size)
    return codes


def check(values, dtype):
    values = [abs(value) for value in values] if dtype == UINT8 else values
    codes, scales = encode(torch.tensor(values, dtype=FP32), dtype)
    assert (codes.dtype, scales.dtype, scales.shape) == (dtype, BF16, (num_groups(len(values)),))
    back = decode(codes, scales)
    for at, scale in enumerate(scales.tolist()):
        group = values[GROUP * at : GROUP * at + GROUP]
        assert scale == scale_of(group) or (math.isnan(scale) and math.isnan(scale_of(group)))
        if not math.isfinite(scale):
            assert not back[GROUP * at : GROUP * at + GROUP].isfinite().any()
            continue
        least = START[dtype] * Fraction(scale)
        for index, value in enumerate(group, start=GROUP * at):
            low, high = sorted(codes_of(value, scale, dtype))
            assert low <= int(codes[index]) <= high, (value, scale)
            error = abs(Fraction(float(back[index])) - Fraction(value))
            most = max((abs(Fraction(value)) + least) / 32, least / 30 if dtype == UINT8 else 0)
            assert error <= most + ABOUT * Fraction(scale) + Fraction(2) ** -148, (value, scale)
            assert (float(back[index]) == 0) >= (value == 0)
            assert dtype == INT8 or (float(back[index]) != 0) == (value != 0)
    if scales.isfinite().all():
        assert fit(codes, scales)
        again, same = encode(back, dtype)
        assert torch.equal(again, codes)
        assert torch.equal(same, scales)


LARGEST, LARGEST_BF16 = value_of(0x7F7F_FFFF), value_of(0x7F7F_0000)
#: Values by hand: of one group, of more, and of one that is not full.
BY_HAND = {
    "nothing": [],
    "a zero": [0.0],
    "zeros": [0.0, -0.0] * 20,
    "all equal": [0.3] * 45,
    "one huge": [1e-3 * number for number in range(31)] + [1e20, 1.0],
    "powers of ten": [(-10.0) ** power for power in range(-20, 21)],
    "denormals": [value_of(number * 777_777 + 1) for number in range(11)] + [-value_of(1)],
    "the least of all": [value_of(1)] * 33,
    "a denormal beside one": [1.0, value_of(1), -value_of(0x7F_FFFF)],
    "just above BF16": [value_of(0x3F80_0001), 0.5, value_of(0x3F80_FFFF)],
    "the largest of BF16": [LARGEST_BF16, -1.0, LARGEST_BF16 / 3],
    "beyond BF16": [value_of(0x7F7F_0001), 1.0] + [0.0] * 30 + [2.0],
    "beyond all": [math.inf, 1.0] + [0.0] * 30 + [2.0],
    "no number": [0.0] * 31 + [-math.nan] + [1.0, 2.0],
    "the largest of FP32": [LARGEST] * 3,
}


@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_codes_and_scales_by_hand(dtype):
    for name, values in BY_HAND.items():
        try:
            check([value_of(pattern_of(value)) for value in values], dtype)
        except AssertionError as error:
            raise AssertionError(name) from error


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40), st.integers(-149, 127), st.booleans())
def test_codes_and_scales_drawn(values, power, is_signed):
    """FP32 values of any size, and as many that are near each other."""
    alike = [math.ldexp(math.remainder(value, 1.0), power) for value in values if math.isfinite(value)]
    for group in (values, [value_of(pattern_of(value)) for value in alike]):
        check(group, INT8 if is_signed else UINT8)


@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_what_was_kept_is_kept_again_bit_for_bit(dtype):
    """Each code beside the last one, under each mantissa of a scale, next to where scales end and in between."""
    others = torch.arange(-127 if dtype == INT8 else 0, LAST[dtype] + 1).to(dtype)
    first = torch.nn.functional.pad(others, (0, -len(others) % (GROUP - 1))).view(-1, GROUP - 1)
    codes = torch.cat([torch.full((len(first), 1), LAST[dtype]).to(dtype), first], 1).view(-1)
    for exponent in (1, 2, 127, 254):
        for mantissa in range(1 << 7):
            scales = torch.full((len(first),), value_of((exponent << 23) + (mantissa << 16))).to(BF16)
            again, same = encode(decode(codes, scales), dtype)
            assert torch.equal(same, scales), (exponent, mantissa)
            assert torch.equal(again, codes), (exponent, mantissa)


@pytest.mark.parametrize("dtype", [INT8, UINT8])
def test_what_is_rounded_at_random_is_a_neighbour_and_in_the_mean_the_moment(dtype):
    """Within four standard deviations of a mean of 4,096. Each half of 32 random bits rounds so."""
    count, generator = 4096, torch.Generator().manual_seed(7)
    group = random((GROUP,), 3).abs() * torch.logspace(-3, 0, GROUP)
    group[::5] *= 1 if dtype == UINT8 else -1
    group[7] = 0
    words = torch.randint(-(2**31), 2**31, (count, GROUP), generator=generator, dtype=torch.int32)
    for bits in (words, words >> 13):
        codes, scales = coded(group.expand(count, GROUP), dtype, bits)
        rounded = valued(codes.to(dtype), scales)
        scale = float(scales[0])
        for index, value in enumerate(group.tolist()):
            low, high = (codes_of(value, scale, dtype, f) for f in (Fraction(0), 1 - Fraction(1, 2**19)))
            assert {*codes[:, index].tolist()} <= {*low, *high}, value
        deviation = rounded.double().std(0) / math.sqrt(count)
        assert ((rounded.double().mean(0) - group.double()).abs() <= 4 * deviation + 2.0**-20 * scale).all()
        assert fit(codes.to(dtype), scales.view(-1))
    assert not rounded[:, 7].any()


def test_two_moments_of_an_element_are_rounded_apart():
    """They share 32 random bits: whether one is rounded up says nothing of the other."""
    moment = torch.tensor([1.0] + [0.3] * 31).expand(512, GROUP)
    bits = noise(torch.arange(moment.numel(), dtype=torch.int32), torch.tensor(5, dtype=torch.int32)).view(moment.shape)
    kept = torch.empty(512, GROUP, dtype=INT8), torch.empty(512, 1, dtype=BF16)
    low, high = (
        write(kept, moment, bits, take_high=takes_high)[0][:, 1:].double().reshape(-1) for takes_high in (False, True)
    )
    assert low.std() > 0.1 < high.std()
    assert abs(torch.corrcoef(torch.stack([low, high]))[0, 1]) < 4 / math.sqrt(low.numel())


def test_second_moments_in_codes_shrink_where_gradients_end():
    """0.999 of a code rounds to itself. One element is 9 % off after 200 roundings, the mean of them a thousandth."""
    weight = torch.nn.Parameter(torch.zeros(1 << 14))
    optimizer = optim.AdamW([weight], lr=0.0, state_dtype="int8")
    for step in range(200):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()
    state = optimizer.state[weight]
    mean = decode(state["exp_avg_sq_codes"], state["exp_avg_sq_scale"]).mean()
    assert float(mean) == pytest.approx(1e-3 * 0.999**199, rel=0.005)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_are_so_in_memory_whatever_the_shape(layout):
    moment = LAYOUTS[layout](1).nan_to_num(0.5, 1.0, 1.0)
    codes, scales = encode(moment)
    back = decode(codes, scales)
    assert codes.stride() == back.stride() == torch.empty_like(moment).stride()
    vector = in_order(moment, codes).view(-1)
    alone, same = encode(vector)
    assert torch.equal(scales, same)
    assert torch.equal(in_order(codes, codes).view(-1), alone)
    assert torch.equal(in_order(back, codes).view(-1), decode(alone, same))
    assert fit(codes, scales)


def test_low_precision_is_encoded_as_its_fp32_value():
    for dtype in (BF16, FP16):
        moment = random((5, 9), 2, 1e-3).to(dtype)
        assert all(map(torch.equal, encode(moment), encode(moment.float())))


def test_scales_that_are_not_those_of_codes_are_found():
    """Codes in another order, zeroed or beyond the last: in some group it shows."""
    moment = random((8, 40), 5) * torch.logspace(-8, 0, 40)
    codes, scales = encode(moment)
    turned = codes.t().contiguous()
    zeroed, beyond = codes.clone(), codes.clone()
    zeroed.view(-1)[codes.view(-1).abs() == 127] = 0
    beyond.view(-1)[codes.view(-1).abs() == 127] = -128
    for damaged, its in ((turned, scales), (zeroed, scales), (beyond, scales), (codes, -scales)):
        assert not fit(damaged, its)
    assert fit(codes, scales)
    assert fit(codes, scales * math.nan)  # of which nothing is known


def test_what_neither_is_a_moment_nor_codes_is_refused():
    for wrong in (torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=INT8)):
        with refused(PolicyError, "moments of ", "[3] in codes of torch.int8", "moments are float32, float16"):
            encode(wrong)
    with refused(PolicyError, "in codes of torch.int16"):
        encode(torch.ones(3), torch.int16)
    codes, scales = encode(torch.ones(40))
    for its in ((codes, scales[:1]), (codes.short(), scales), (codes.view(2, 20)[:, ::2], scales[:1])):
        with refused(PolicyError, "codes of ", "with scales of bfloat16", "every 32 of them share a scale"):
            decode(*its)
    with refused(PolicyError, "codes of ", "with scales of int16"):
        decode(codes, scales.view(torch.int16))


# Training -----------------------------------------------------------------------------------------------


def quadratic():
    """Curvatures from 1e-3 to 1e3: gradient and loss."""
    curvature, best = torch.logspace(-3, 3, 48).double(), random((48,), 11).double()
    return lambda w: curvature * (w - best), lambda w: (curvature * (w - best) ** 2).sum() / 2


def logistic():
    points, noise = random((128, 48), 12).double(), random((128,), 13).double()
    labels = (points @ random((48,), 14).double() + 4 * noise > 0).double()
    loss = functools.partial(torch.nn.functional.binary_cross_entropy_with_logits, reduction="sum")
    return (lambda w: points.t() @ (torch.sigmoid(points @ w) - labels)), (lambda w: loss(points @ w, labels))


def exact(rule_name, gradient, rates):
    """Train from zero by the rule in float64."""
    w = first = second = torch.zeros(48).double()
    for step, lr in enumerate(rates, start=1):
        g = gradient(w)
        if rule_name == "Lion":
            w, first = w - lr * torch.sign(0.9 * first + 0.1 * g), 0.99 * first + 0.01 * g
        elif rule_name == "SGD":
            first = 0.9 * first + g
            w = w - lr * first
        else:
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
            w = w - lr * first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return w


RUNS = {"AdamW": (0.05, {"weight_decay": 0.0}), "SGD": (1e-3, {"momentum": 0.9}), "Lion": (0.02, {})}


@pytest.mark.parametrize("rule_name", RUNS)
def test_training_ends_where_it_ends_with_exact_moments(rule_name):
    """On a quadratic and a logistic regression, with a rate that falls to zero, and with it the noise of rounding."""
    (most, options), problems, steps = RUNS[rule_name], (quadratic(), logistic()), 200 if rule_name == "Lion" else 1000
    rates = [most * (1 - step // 20 * 20 / steps) for step in range(steps)]
    weights, zero = [torch.nn.Parameter(torch.zeros(48)) for _ in problems], torch.zeros(48).double()
    optimizer = getattr(optim, rule_name)(weights, state_dtype="int8", **options)
    for optimizer.param_groups[0]["lr"] in rates:
        for weight, (gradient, _) in zip(weights, problems, strict=True):
            weight.grad = gradient(weight.detach().double()).float()
        optimizer.step()
    for weight, (gradient, loss) in zip(weights, problems, strict=True):
        start, wanted, reached = map(loss, (zero, exact(rule_name, gradient, rates), weight.detach().double()))
        assert reached <= 1.02 * wanted + 1e-6 * start < 0.5 * start
        state = optimizer.state[weight]
        assert all(fit(state[name], scales) for name in state if (scales := state.get(f"{name}_scale")) is not None)
