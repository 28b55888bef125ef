"""Values as JSON: numbers that JSON lacks are texts, and nothing else changes."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from mezzo.documents import jsonable

LACKING = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=9)


def alike(value, read):
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) == read and math.isclose(LACKING[read], value) != math.isnan(value)
    if isinstance(value, dict):
        return value.keys() == read.keys() and all(alike(value[key], read[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(read) and all(map(alike, value, read))
    return type(value) is type(read) and value == read


@given(values)
def test_what_is_written_is_strict_json_and_says_the_same(value):
    assert alike(value, json.loads(json.dumps(jsonable(value), allow_nan=False)))


def test_tuples_are_lists():
    assert jsonable({"ms": (1.5, (math.inf,))}) == {"ms": [1.5, ["inf"]]}
