"""E2M1 and E8M0 as formats of the table, and every code of both and of the two of eight bits, against fractions."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, Format, by_name

from . import oracle

ELEMENTS = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}
any_float = st.floats(width=64)


def expected_e8m0(value: float) -> int:
    """By logarithms of fractions: the nearer power of two, a tie the larger; beyond 2^127, negative and NaN: NaN."""
    if math.isnan(value) or value < 0 or value >= 1.5 * 2.0**127:
        return 255
    size = Fraction(value)
    if size <= Fraction(2) ** -127:
        return 0
    power = oracle.log2_floor(size)
    return power + 127 + (size >= Fraction(3, 2) * Fraction(2) ** power)


def expected_e2m1(value: float) -> int:
    if math.isnan(value):
        return 7
    sign = 8 if math.copysign(1.0, value) < 0 else 0
    return sign | (7 if abs(value) > 6 else oracle.rounded(abs(Fraction(value)), "E2M1", None))


def same(left: float, right: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or (
        left == right and math.copysign(1, left) == math.copysign(1, right)
    )


def test_every_code_of_every_format_of_eight_bits_or_fewer():
    for name, number_format in ELEMENTS.items():
        half = 1 << number_format.num_bits - 1
        for code in range(2 * half):
            value, decoded = oracle.meaning(name, code), number_format.decode(code)
            if value is None:
                assert not math.isfinite(decoded)
                assert math.isinf(decoded) == (name == "E5M2" and code % half == 0x7C), (name, code)
            else:
                assert same(decoded, math.copysign(float(value), -1 if code >= half else 1)), (name, code)
                assert number_format.encode(decoded) == code
    for code in range(255):
        assert Fraction(E8M0.decode(code)) == Fraction(2) ** (code - 127)
        assert E8M0.encode(E8M0.decode(code)) == code
    assert math.isnan(E8M0.decode(255))
    by_torch = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).double().tolist()
    assert all(same(E8M0.decode(code), by_torch[code]) for code in range(256))


def test_the_tables_of_the_specification():
    """OCP Microscaling 1.0: section 5.3.3, all values of E2M1; section 5.4.1, the range of E8M0."""
    assert [E2M1.decode(code) for code in range(8)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [E2M1.decode(code) for code in range(8, 16)] == [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert (E8M0.decode(0), E8M0.decode(0xFE), math.isnan(E8M0.decode(0xFF))) == (2.0**-127, 2.0**127, True)
    assert (E4M3.decode(0b0_1111_110), E4M3.decode(1), E5M2.decode(0b0_11110_11), E5M2.decode(1)) == (
        448.0, 2.0**-9, 57344.0, 2.0**-16,
    )  # fmt: skip


def test_what_the_table_says_of_them():
    assert (E2M1.num_bits, E2M1.signed, E2M1.has_nan, E2M1.has_inf, E2M1.dtype) == (4, True, False, False, None)
    assert (E8M0.num_bits, E8M0.signed, E8M0.has_nan, E8M0.has_inf) == (8, False, True, False)
    assert (E2M1.max, E2M1.smallest_normal, E2M1.smallest_subnormal, E2M1.eps, E2M1.bias) == (6.0, 1.0, 0.5, 0.5, 1)
    assert (E8M0.max, E8M0.smallest_normal, E8M0.smallest_subnormal, E8M0.eps) == (2.0**127, 2.0**-127, 2.0**-127, 1.0)
    for number_format in FORMATS.values():
        assert (number_format.signed, number_format.has_nan) == (number_format is not E8M0, number_format is not E2M1)
    for word in ("e2m1", "FP4", "float4_e2m1fn", torch.float4_e2m1fn_x2, "torch.float4_e2m1fn_x2"):
        assert by_name(word) is E2M1
    assert by_name("e8m0") is by_name(torch.float8_e8m0fnu) is E8M0


def edges(number_format: Format) -> list[float]:
    numbers = [number_format.decode(code) for code in range(8 if number_format is E2M1 else 255)]
    middles = [low / 2 + high / 2 for low, high in itertools.pairwise(numbers)]
    most = number_format.max
    positive = [
        *numbers,
        *middles,
        7.0,
        most * 1.5,
        most * 1.1666,
        math.nextafter(most * 1.5, 0),
        1e300,
        5e-324,
        math.inf,
    ]
    neighbours = [math.nextafter(value, side) for value in positive for side in (0.0, math.inf)]
    return [signed for value in (*positive, *neighbours) for signed in (value, -value)] + [math.nan, -math.nan]


@pytest.mark.parametrize("number_format", [E2M1, E8M0], ids=str)
def test_encode_round_and_coverage_at_every_edge(number_format):
    expected = expected_e2m1 if number_format is E2M1 else expected_e8m0
    values = edges(number_format)
    for value in values:
        assert number_format.encode(value) == expected(value), value
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        given = torch.tensor(values, dtype=torch.float64).to(dtype)
        wanted = torch.tensor([number_format.decode(expected(value)) for value in given.double().tolist()])
        rounded = number_format.round(given)
        assert rounded.dtype == dtype
        assert all(map(same, rounded.tolist(), wanted.to(dtype).tolist())), dtype
    counts = number_format.coverage(torch.tensor(values, dtype=torch.float64))
    assert (
        counts.total
        == len(values)
        == sum((counts.zero, counts.underflow, counts.subnormal, counts.normal, counts.overflow, counts.nan))
    )
    assert counts.zero == sum(value == 0 for value in values)
    is_beyond = (lambda x: abs(x) >= 7) if number_format is E2M1 else (lambda x: x < 0 or x >= 1.5 * 2.0**127)
    assert counts.overflow == sum(map(is_beyond, values))
    gone = [value for value in values if value and expected(value) % 8 == 0] if number_format is E2M1 else []
    assert counts.underflow == len(gone)


@settings(deadline=None)
@given(any_float)
def test_encode_anything(value):
    assert E2M1.encode(value) == expected_e2m1(value)
    assert E8M0.encode(value) == expected_e8m0(value)


def test_spacing():
    assert [E2M1.spacing(x) for x in (0.0, 0.3, 1.0, -1.9, 2.0, 6.0)] == [0.5, 0.5, 0.5, 0.5, 1.0, 2.0]
    assert [E8M0.spacing(x) for x in (0.0, 1e-300, 1.0, 1.9, 2.0, 2.0**127)] == [
        2.0**-127,
        2.0**-127,
        1,
        1,
        2,
        2.0**127,
    ]
    assert all(map(math.isnan, (E2M1.spacing(6.1), E8M0.spacing(-1.0), E8M0.spacing(math.inf), E2M1.spacing(math.nan))))


def test_stochastic_rounding():
    source = torch.Generator().manual_seed(3)
    drawn = E2M1.round(torch.full((20_000,), 2.25), stochastic=True, generator=source)
    assert set(drawn.tolist()) == {2.0, 3.0}
    assert abs(drawn.mean().item() - 2.25) < 5 * math.sqrt(0.25 * 0.75 / 20_000)
    drawn = E8M0.round(torch.full((20_000,), 1.25), stochastic=True, generator=source)
    assert set(drawn.tolist()) == {1.0, 2.0}
    assert abs(drawn.mean().item() - 1.25) < 5 * math.sqrt(0.25 * 0.75 / 20_000)
    assert E2M1.round(torch.tensor([6.5, -7.0, 1e9]), stochastic=True).tolist() == [6.0, -6.0, 6.0]
    assert E8M0.round(torch.tensor([0.0, 1e-45]), stochastic=True).tolist() == [2.0**-127] * 2
