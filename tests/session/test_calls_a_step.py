"""The host's work for a step, in calls: so many for any step, and so many more for each tensor; bounds only go down."""

import functools

import pytest
import torch
from torch import nn

import mezzo

from ..support.calls import base_and_slope, calls_of

#: Steps for what happens only once, such as states and tables.
FIRST = 3
OPTIMIZERS = {
    "split": functools.partial(mezzo.optim.AdamW, master="split"),
    "full": functools.partial(mezzo.optim.AdamW, master="full"),
    "moments": functools.partial(mezzo.optim.AdamW, state_dtype="bfloat16"),
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
}
#: By policy and optimizer: calls of a step, and of each of its tensors. On two cores a call takes 0.1 to 0.3 µs, with
#: the loop that it stands in.
MOST = {
    ("O1,dtype=bfloat16", "split"): (339, 1),
    ("O1,dtype=bfloat16", "full"): (339, 1),
    ("O1,dtype=bfloat16", "fused AdamW"): (250, 1),
    ("O1,dtype=float16", "split"): (397, 1),
    ("O1,dtype=float16", "fused AdamW"): (308, 1),
    ("O2,dtype=bfloat16", "split"): (373, 1),
    ("O2,dtype=bfloat16", "full"): (373, 5),
    ("O2,dtype=bfloat16", "moments"): (387, 1),
    ("O2,dtype=bfloat16", "fused AdamW"): (263, 3),
    ("O2,dtype=float16", "split"): (431, 1),
    ("O2,dtype=float16", "fused AdamW"): (321, 3),
}


def calls_of_a_step(policy, optimizer, tensors):
    model = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(tensors)])
    amp = mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), policy, max_grad_norm=1.0)
    for _ in range(FIRST):
        backward(amp, model)
        amp.step()
        amp.zero_grad()
    backward(amp, model)
    return calls_of(amp.step)


def backward(amp, params):
    amp.backward(torch.stack([param.sum() for param in params]).float().sum())


@pytest.mark.parametrize("policy, optimizer", MOST, ids=map(" / ".join, MOST))
def test_a_tensor_costs_the_host_few_calls_a_step(policy, optimizer):
    base, slope = base_and_slope(functools.partial(calls_of_a_step, policy, optimizer), 8, 40)
    most_base, most_slope = MOST[policy, optimizer]
    assert base <= most_base
    assert slope <= most_slope
