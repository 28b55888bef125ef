"""A loss scale that moves when it is told to, once for all that was found since: on the host and on a device alike."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.scale import LossScale, ScaleState, next_scale
from mezzo.scale.device_state import Scaler
from mezzo.scale.transition import next_scale_on_host

from .test_rules import CONFIGS

YES, NO = torch.tensor(True), torch.tensor(False)
RULES = {
    "torch": LossScale.like("torch", init=8.0, interval=2),
    "paddle": LossScale.like("paddle", init=8.0, interval=2, hysteresis=2),
    "offset": LossScale.dynamic(init=4, interval=2, growth_offset=2, hysteresis=2),
    "constant": LossScale.constant(8.0, patience=3),
    "none": LossScale.none(),
}


def same(one, other):
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def made(rules, device):
    """A scaler in host arithmetic, or in tensors alone, as on an accelerator: here with those of a graph."""
    scaler = Scaler(rules, "cpu")
    scaler.in_graph = device == "device"
    return scaler


def moved(scaler, steps):
    """States after each move; a step is the flags that optimizers found."""
    states = []
    for flags in steps:
        for flag in flags:
            before = scaler.state
            scaler.update(flag)
            assert scaler.state is before
        scaler.advance()
        states.append(scaler.state_dict())
    return states


@given(CONFIGS, st.lists(st.booleans(), max_size=20))
def test_the_rule_in_numbers_is_the_rule_in_kernels_bit_for_bit(config, pattern):
    kernels = host = config.start()
    for overflowed in pattern:
        kernels = next_scale(kernels, torch.tensor(overflowed), config)
        host = next_scale_on_host(host, overflowed, config)
        assert same(kernels, host)


@given(
    CONFIGS | st.sampled_from([*RULES.values()]),
    st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3), max_size=12),
)
def test_steps_between_two_moves_are_one_that_overflowed_where_one_did_that_counts(config, moves):
    on_host, on_device, state = made(config, "host"), made(config, "device"), config.start()
    for updates in moves:
        for scaler in (on_host, on_device):
            for overflowed, hold in updates:
                scaler.update(torch.tensor(overflowed), hold=torch.tensor(hold))
            scaler.advance()
        if counting := [overflowed for overflowed, hold in updates if not hold]:
            state = next_scale(state, torch.tensor(any(counting)), config)
        assert same(state, on_host.state)
        assert same(state, on_device.state)


def test_a_move_is_one_launch_on_a_device():
    launched = []

    def compute(function, given, tensors):
        launched.append(function.__name__)
        return function(*given, *tensors)

    scaler = Scaler(RULES["torch"], "cpu", compute)
    moved(scaler, [(NO,), (YES, NO, NO)])
    assert launched == []
    scaler.enter(scaler.tensors())
    moved(scaler, [(NO,), (YES, NO, NO), ()])
    assert launched == ["moved_on"] * 2


@pytest.mark.parametrize("scale", [3.0, torch.tensor(3.0), torch.tensor([3.0], dtype=torch.float64)])
def test_another_scale_forgets_what_was_found_and_keeps_the_count(scale):
    scaler = Scaler(RULES["torch"], "cpu")
    moved(scaler, [(NO,)])
    scaler.update(YES)
    scaler.set(scale)
    assert (scaler.state.scale, scaler.state.scale.dtype, scaler.state.clean_steps) == (3.0, torch.float32, 1)
    scaler.advance()
    assert scaler.state.scale == 3.0
    if isinstance(scale, torch.Tensor):
        scale.zero_()
        assert scaler.state.scale == 3.0


def test_states_go_on_and_forget_what_was_found():
    first, second = Scaler(RULES["torch"], "cpu"), Scaler(RULES["torch"], "cpu")
    patterns = [[(YES if bad else NO,)] for bad in (0, 1, 0, 0, 0, 1)]
    for pattern in patterns:
        moved(first, pattern)
        second.update(YES)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
    for pattern in itertools.chain(patterns, patterns):
        assert moved(first, pattern) == moved(second, pattern)


def test_what_gradients_notice_of_a_scale():
    expected = {
        "none": False,
        "constant(1)": False,
        "constant(1,patience=2)": False,
        "constant(8)": True,
        "dynamic": True,
    }
    for rules, changes in expected.items():
        assert Scaler(LossScale.parse(rules), "cpu").changes_gradients == changes, rules


def test_a_scaled_loss_is_finite_and_exact_whatever_its_format_holds():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (1,)):
            loss = torch.full(shape, 3.0, dtype=dtype)
            scaled = Scaler(LossScale.dynamic(init=2.0**16), "cpu").scaled(loss)
            assert scaled.item() == 3.0 * 2.0**16  # beyond the range of FP16
            assert scaled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert Scaler(LossScale.none(), "cpu").scaled(loss) is loss


# What is saved of a scale -----------------------------------------------------------------------------------

UNEVEN = LossScale.dynamic(init=3.3, growth=1.7, backoff=0.6, interval=4, hysteresis=2, growth_offset=1, floor=0.1)


def walk(state, pattern, config=UNEVEN):
    states = []
    for overflow in pattern:
        state = next_scale(state, torch.tensor(overflow), config)
        states.append(state.state_dict())
    return states


@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), min_size=10, max_size=10))
def test_a_loaded_state_continues_exactly(before, after):
    state = UNEVEN.start()
    for overflow in before:
        state = next_scale(state, torch.tensor(overflow), UNEVEN)
    loaded = ScaleState.from_state_dict(json.loads(json.dumps(state.state_dict())))
    plain = loaded.state_dict()
    assert plain == state.state_dict()
    assert {name: type(value) for name, value in plain.items()} == {
        "scale": float, "clean_steps": int, "budget": int, "floor_overflows": int,
    }  # fmt: skip
    for name in ("scale", "clean_steps", "budget", "floor_overflows"):
        ours, theirs = getattr(loaded, name), getattr(state, name)
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert walk(loaded, after) == walk(state, after)


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_the_inverse_is_rounded_once(scale):
    state = LossScale.constant(scale).start()
    inverse = state.inverse()
    assert (inverse.dtype, inverse.shape) == (torch.float32, ())
    assert inverse.item() == float(np.float32(1.0 / np.float64(scale)))
