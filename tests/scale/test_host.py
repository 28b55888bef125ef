"""The rule in Python numbers against the rule in kernels."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.scale import LossScale, next_scale
from mezzo.scale.rules import next_scale_on_host
from mezzo.scale.scaler import Scaler

CONFIGS = st.builds(
    LossScale.dynamic,
    init=st.sampled_from([2.0**-20, 1.0, 1000.0, 65536.0, 2.0**100]),
    growth=st.sampled_from([1.1, 2.0, 3.7, 2.0**30]),
    backoff=st.sampled_from([0.1, 0.5, 0.9]),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    refill=st.sampled_from(["backoff", "clean", "growth", "clean+backoff"]),
    floor=st.sampled_from([2.0**-126, 2.0**-20]),
    ceiling=st.sampled_from([None, 2.0**101]),
    growth_offset=st.integers(0, 2),
    skip_rate_limit=st.sampled_from([None, 0.5]),
)


def same(one, other):
    return all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))


@given(CONFIGS, st.lists(st.booleans(), max_size=20))
def test_both_executors_agree_bit_for_bit(config, pattern):
    kernels = host = config.start()
    for found in pattern:
        kernels = next_scale(kernels, torch.tensor(found), config)
        host = next_scale_on_host(host, found, config)
        assert same(kernels, host)
        assert all(getattr(kernels, f.name).dtype == getattr(host, f.name).dtype for f in dataclasses.fields(host))


@pytest.mark.parametrize("config", [LossScale.none(), LossScale.constant(8, patience=2)])
def test_scales_that_never_move(config):
    kernels = host = config.start()
    for found in (True, True, False):
        kernels, host = next_scale(kernels, torch.tensor(found), config), next_scale_on_host(host, found, config)
        assert same(kernels, host)


@given(CONFIGS, st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_a_scaler_holds_and_outdates_as_the_kernels_do(config, pattern):
    """The path of an accelerator, spelled out, beside the one of this device."""
    scaler, state = Scaler(config, "cpu"), config.start()
    earlier_host = earlier = state.scale
    for found, hold, outdated in pattern:
        found_inf, held_back = torch.tensor(found), torch.tensor(hold)
        after = next_scale(state, found_inf, config)
        if outdated:
            held_back = held_back | ~found_inf | (state.scale < earlier)
        scaler.update(
            found_inf,
            made_with=earlier_host.clone() if outdated else scaler.state.scale,
            hold=torch.tensor(hold),
        )
        earlier, earlier_host = state.scale, scaler.state.scale
        state = state if held_back else after
        assert same(state, scaler.state)
        earlier_host = earlier
