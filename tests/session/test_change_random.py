"""Walks over policies at random steps: each part of a run is what a fresh session computes from its first state."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mezzo
from mezzo import MixedPrecision

from .loops import network, train
from .test_change import POLICIES, same, scale_of, state_of, values_of

EVERY = (*POLICIES, "O2,bf16,emulate=true,fp32_module=3", "O1,fp16,emulate=true,loss_scale=1024",
         "O2,fp16,emulate=true,loss_scale=dynamic(init=64,ceiling=256,interval=2)")  # fmt: skip
steps = st.fixed_dictionaries({"micro_batches": st.integers(1, 3), "spoilt": st.sampled_from([False, False, True])})
parts = st.tuples(st.sampled_from(EVERY), st.lists(steps, max_size=3))


def made_over(model, rule, state_dtype):
    return getattr(mezzo.optim, rule)(model.parameters(), lr=1e-2, state_dtype=state_dtype)


def check(walk, rule, state_dtype, norm):
    model = network()
    made = made_over(model, rule, state_dtype)
    amp, number, params = MixedPrecision(model, made, EVERY[0], max_grad_norm=norm), 0, list(model.parameters())
    for policy, taken in walk:
        before = amp.policy
        amp.change(policy)
        twin = network()
        twin.load_state_dict({name: value.float() for name, value in values_of(model).items()})
        twin_made = made_over(twin, rule, state_dtype)
        twin_made.load_state_dict(copy.deepcopy(made.state_dict()))
        other = MixedPrecision(twin, twin_made, policy, max_grad_norm=norm)
        if before.loss_scale.mode == amp.policy.loss_scale.mode == "dynamic":
            scale, clean_steps = scale_of(amp)
            other.load_state_dict({"scale": scale, "_growth_tracker": clean_steps})
        for step in taken:
            number += 1
            ours, theirs = (train(session, net, number, **step) for session, net in ((amp, model), (other, twin)))
            assert bool(ours.skipped) == bool(theirs.skipped) == step["spoilt"]
            assert float(amp.loss_scale) == float(other.loss_scale)
        same(values_of(model), values_of(twin))
        same(state_of(made), state_of(twin_made))
        other.close()
    assert list(map(id, model.parameters())) == list(map(id, params))
    amp.close()


arguments = {
    "walk": st.lists(parts, min_size=1, max_size=6), "rule": st.sampled_from(["AdamW", "SGD", "Lion"]),
    "state_dtype": st.sampled_from(["float32", "bfloat16", "int8"]), "norm": st.sampled_from([None, 0.5]),
}  # fmt: skip


@settings(max_examples=15)
@given(**arguments)
def test_each_part_of_a_walk_is_as_if_it_began_there(walk, rule, state_dtype, norm):
    check(walk, rule, state_dtype, norm)


@pytest.mark.slow
@settings(max_examples=300)
@given(**arguments)
def test_many_walks(walk, rule, state_dtype, norm):
    check(walk, rule, state_dtype, norm)
