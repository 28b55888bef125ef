"""The highest scale that is finite, against trying every one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.overflow.diagnose import highest_scale, power


@given(
    limit=st.integers(-30, 30),
    scale=st.floats(2.0**-20, 2.0**40),
    needed=st.one_of(st.none(), st.just(math.inf), st.floats(1.0, 1e12)),
)
def test_the_highest_scale_is_the_one_that_trying_all_finds(limit, scale, needed):
    tried = []

    def is_finite_at(value):
        tried.append(value)
        return value <= 2.0**limit

    top = math.ceil(math.log2(scale)) - 1
    wanted = max((2.0**e for e in range(top - 40, top + 1) if 2.0**e <= 2.0**limit), default=None)
    assert highest_scale(scale, needed, 65504.0, is_finite_at) == wanted
    assert all(value < scale for value in tried)
    assert len(tried) <= 1 + 41


def test_a_good_guess_needs_three_passes():
    tried = []

    def is_finite_at(value):
        tried.append(value)
        return value <= 2.0**9

    assert highest_scale(2.0**16, 65504.0 * 100, 65504.0, is_finite_at) == 2.0**9
    assert tried == [2.0**-25, 2.0**9, 2.0**10]


@pytest.mark.parametrize("value, text", [(1.0, "2**0"), (512.0, "2**9"), (0.5, "2**-1")])
def test_powers(value, text):
    assert power(value) == text
