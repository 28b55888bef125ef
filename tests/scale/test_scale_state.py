"""ScaleState: the inverse, and a state dict that continues exactly."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.errors import StateError
from mezzo.scale import LossScale, ScaleState, next_scale

CONFIG = LossScale.dynamic(init=3.3, growth=1.7, backoff=0.6, interval=4, hysteresis=2, growth_offset=1, floor=0.1)
SAVED = {"scale": 1024.0, "clean_steps": 3, "budget": 1, "floor_overflows": 0}


def walk(state: ScaleState, pattern: list[bool], config: LossScale = CONFIG) -> list[dict]:
    found = []
    for overflow in pattern:
        state = next_scale(state, torch.tensor(overflow), config)
        found.append(state.state_dict())
    return found


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), min_size=10, max_size=10))
def test_a_loaded_state_continues_exactly(before, after):
    state = CONFIG.start()
    for overflow in before:
        state = next_scale(state, torch.tensor(overflow), CONFIG)
    loaded = ScaleState.from_state_dict(json.loads(json.dumps(state.state_dict())))
    assert loaded.state_dict() == state.state_dict()
    for name in ("scale", "clean_steps", "budget", "floor_overflows"):
        ours, theirs = getattr(loaded, name), getattr(state, name)
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert walk(loaded, after) == walk(state, after)


@pytest.mark.parametrize("config", [LossScale.none(), LossScale.constant(0.7), LossScale.dynamic()], ids=str)
def test_every_kind_round_trips(config):
    state = config.start()
    assert ScaleState.from_state_dict(state.state_dict()).state_dict() == state.state_dict()


def test_the_state_dict_is_plain():
    state = next_scale(CONFIG.start(), torch.tensor(True), CONFIG)
    plain = state.state_dict()
    assert plain == {
        "scale": float(np.float32(3.3)),
        "clean_steps": -1,
        "budget": 1,
        "floor_overflows": 0,
    }
    assert [type(value) for value in plain.values()] == [float, int, int, int]


def test_the_device_is_the_callers():
    loaded = ScaleState.from_state_dict(SAVED, device="meta")
    assert {tensor.device.type for tensor in (loaded.scale, loaded.budget)} == {"meta"}


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"scale": None}, ["scale cannot be None", "it is a positive float32 number"]),
        ({"scale": 0.0}, ["scale cannot be 0.0"]),
        ({"scale": math.inf}, ["scale cannot be inf"]),
        ({"scale": math.nan}, ["scale cannot be nan"]),
        ({"scale": -1.0}, ["scale cannot be -1.0"]),
        ({"scale": True}, ["scale cannot be True"]),
        ({"scale": 1e39}, ["scale cannot be 1e+39"]),
        ({"clean_steps": 1.5}, ["clean_steps cannot be 1.5", "it is a whole number"]),
        ({"budget": "2"}, ["budget cannot be '2'", "it is a whole number"]),
        ({"floor_overflows": 2**60}, ["floor_overflows cannot be"]),
        ({"window": ""}, ["unknown key 'window'"]),
        ({"growth_tracker": 3}, ["unknown key 'growth_tracker'", "valid: scale, clean_steps"]),
        ({"budgett": 3, "scale": 0}, ["2 problems", "did you mean 'budget'?", "scale cannot be 0"]),
    ],
)
def test_values_that_are_no_state(change, parts):
    with pytest.raises(StateError) as caught:
        ScaleState.from_state_dict({**SAVED, **change})
    assert [part for part in parts if part not in str(caught.value)] == []
    assert "where  state of a loss scale" in str(caught.value)


def test_missing_keys_are_listed_together_with_unknown_ones():
    with pytest.raises(StateError) as caught:
        ScaleState.from_state_dict({"scale": 2.0, "_growth_tracker": 0})
    message = str(caught.value)
    assert "missing keys: clean_steps, budget, floor_overflows" in message
    assert "unknown key '_growth_tracker'" in message
    assert "ScaleState.from_state_dict(saved.state_dict())" in message


@settings(deadline=None)
@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_the_inverse_is_rounded_once(scale):
    state = LossScale.constant(scale).start()
    inverse = state.inverse()
    assert inverse.dtype == torch.float32
    assert inverse.shape == ()
    assert inverse.item() == float(np.float32(1.0 / np.float64(scale)))
    assert math.isfinite(inverse.item())


@pytest.mark.parametrize("exponent", range(-126, 128))
def test_the_inverse_of_a_power_of_two_is_exact(exponent):
    state = LossScale.constant(2.0**exponent).start()
    assert state.inverse().item() == 2.0**-exponent


def test_states_are_compared_by_identity():
    # Comparing tensors would sync.
    state, again = CONFIG.start(), CONFIG.start()
    assert {state, state, again} == {again, state}
    assert state != again
