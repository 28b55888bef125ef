"""Values as JSON and back: what was written is read again, and anything else is refused with its place."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.documents import built, jsonable


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    kind: Literal["one", "other"]
    flag: bool
    losses: tuple[float, ...]
    pair: tuple[str, int]
    parts: tuple[Part, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    first: Part | None = None


GOOD = {"kind": "one", "flag": False, "losses": [1, "inf", 0.5], "pair": ["a", 3]}

names, counts = st.text(max_size=5), st.integers(0, 2**63 - 1)
parts = st.builds(Part, name=names, size=st.none() | counts)
wholes = st.builds(
    Whole,
    kind=st.sampled_from(["one", "other"]),
    flag=st.booleans(),
    losses=st.lists(st.floats(max_value=1e300, min_value=-1e300) | st.sampled_from([math.inf, -math.inf])).map(tuple),
    pair=st.tuples(names, counts),
    parts=st.lists(parts, max_size=3).map(tuple),
    counts=st.dictionaries(names, counts, max_size=3),
    first=st.none() | parts,
)


@settings(deadline=None, max_examples=40)
@given(wholes)
def test_what_is_written_is_read_again(whole):
    text = json.dumps(jsonable(dataclasses.asdict(whole)), allow_nan=False)
    assert built(Whole, json.loads(text)) == whole


def test_what_is_left_out_has_its_default_and_texts_stand_for_numbers():
    found = built(Whole, GOOD)
    assert (found.losses, found.parts, found.counts, found.first) == ((1.0, math.inf, 0.5), (), {}, None)
    assert all(type(loss) is float for loss in found.losses)
    assert math.isnan(built(Whole, GOOD | {"losses": ["nan"]}).losses[0])


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"kind": "two"}, "kind is 'two', not one of one, other"),
        ({"kind": []}, "kind is [], not one of one, other"),
        ({"flag": 1}, "flag is 1, not true or false"),
        ({"losses": 1.0}, "losses is 1.0, not a list"),
        ({"losses": {"0": 1.0}}, "losses is {'0': 1.0}, not a list"),
        ({"losses": [1.0, True]}, "losses 1 is True, not a number"),
        ({"losses": ["Infinity"]}, "losses 0 is 'Infinity', not a number"),
        ({"losses": [math.inf]}, "losses 0 is inf, not a number"),
        ({"losses": [10**400]}, "losses 0 is 10000"),
        ({"pair": ["a"]}, "pair has 1 values, not 2"),
        ({"pair": ["a", -1]}, "pair 1 is -1, not a count"),
        ({"pair": ["a", 2**63]}, f"pair 1 is {2**63}, not a count"),
        ({"pair": [None, 1]}, "pair 0 is None, not text"),
        ({"parts": [{"name": "a"}, {}]}, "parts 1 has no name"),
        ({"parts": [{"name": "a", "size": "3"}]}, "parts 0, size is '3', not a count"),
        ({"parts": ["a"]}, "parts 0 is 'a', not an object"),
        ({"counts": {"x": 0.5}}, "counts x is 0.5, not a count"),
        ({"counts": []}, "counts is [], not an object"),
        ({"first": {"nam": "a"}}, "'nam' is no field of first"),
        ({"last": None}, "'last' is no field of it"),
    ],
)
def test_anything_else_is_refused_with_its_place(changes, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}") as caught:
        built(Whole, GOOD | changes)
    assert len(str(caught.value)) < 400


def test_what_is_missing_is_listed():
    with pytest.raises(ValueError, match=r"^it has no flag, losses$"):
        built(Whole, {"kind": "one", "pair": ["a", 3]})
    with pytest.raises(ValueError, match=r"^it is \[\], not an object$"):
        built(Whole, [])
