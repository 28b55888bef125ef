"""Programs in whatever order torch allows, under torch's scaler and under mezzo's: bit for bit the same."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from .beside_torch import OPTIMIZERS, SCALERS, assert_same, batch, network, weights

#: Without momentum that torch leaves unwritten where a fused SGD's first step is skipped.
KINDS = sorted(OPTIMIZERS.keys() - {"sgd fused"})

PART = st.fixed_dictionaries(
    {
        "passes": st.integers(1, 2),
        "overflows": st.sampled_from([None, None, None, torch.inf, torch.nan]),
        "unscales": st.booleans(),
        "clips": st.sampled_from([None, None, 0.05, 10.0]),
        "edits": st.sampled_from([None, None, "double", "zero", "replace"]),
        "steps": st.sampled_from([True, True, True, False]),
        "clears": st.sampled_from(["none", "zeros"]),
    }
)
ITERATION = st.fixed_dictionaries(
    {
        "parts": st.lists(PART, min_size=2, max_size=2),
        "together": st.booleans(),
        "new_scale": st.sampled_from([None, None, None, None, 3.0, 2.0**20]),
        "reloads": st.sampled_from([False, False, False, True]),
        "sets": st.sampled_from([None, None, None, ("growth_interval", 4), ("backoff_factor", 0.3)]),
    }
)


def run(scaler_of, kinds, iterations):
    models = [network(0), network(1)]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for kind, model in zip(kinds, models, strict=True)]
    scaler, trace = scaler_of("cpu", init_scale=2.0**6, growth_interval=2), []
    for number, iteration in enumerate(iterations):
        pairs = list(zip(models, optimizers, iteration["parts"], strict=True))
        for model, optimizer, part in pairs:
            optimizer.zero_grad(set_to_none=part["clears"] == "none")
            for each in range(part["passes"]):
                loss = model(batch(3 * number + each)).square().mean()
                scaler.scale(
                    loss * part["overflows"] if part["overflows"] is not None and not each else loss
                ).backward()
            if not iteration["together"]:
                finish(scaler, model, optimizer, part, trace)
        if iteration["together"]:
            for model, optimizer, part in reversed(pairs):
                finish(scaler, model, optimizer, part, trace)
        if iteration["new_scale"] is not None or any(p["steps"] or p["unscales"] for p in iteration["parts"]):
            scaler.update(iteration["new_scale"])
        if iteration["sets"] is not None:
            name, value = iteration["sets"]
            getattr(scaler, f"set_{name}")(value)
        if iteration["reloads"]:
            state = scaler.state_dict()
            scaler = scaler_of("cpu", init_scale=5.0)
            scaler.load_state_dict(state)
        trace.append(scaler.state_dict())
    return weights(*models), trace


def finish(scaler, model, optimizer, part, trace):
    if part["unscales"]:
        scaler.unscale_(optimizer)
        if part["clips"] is not None:
            trace.append(repr(nn.utils.clip_grad_norm_(model.parameters(), part["clips"])))
        for param in model.parameters() if part["edits"] else ():
            if part["edits"] == "replace":
                param.grad = torch.full_like(param, 0.01)
            else:
                param.grad.mul_(2.0) if part["edits"] == "double" else param.grad.zero_()
    if part["steps"]:
        trace.append(scaler.step(optimizer))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=2), st.lists(ITERATION, min_size=1, max_size=5))
def test_whatever_the_order_both_come_to_the_same(kinds, iterations):
    (theirs, one), (mine, other) = (run(scaler_of, kinds, iterations) for scaler_of in SCALERS.values())
    assert other == one
    assert_same(mine, theirs)
