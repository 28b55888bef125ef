"""Weights of sharded models for engines that generate: whole on each rank, as those of one process."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.errors import NumericsError
from mezzo.weights import export

from .ranks import on_ranks

POLICY = "O2,bf16,emulate=false,fp32_module=2"


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].weight[0] = 1 + 2.0**-8  # which halves round up, and a cast to even
    return model


def exported():
    alone, sharded = net(), mezzo.fully_shard(net(), POLICY, wrap=nn.Linear)
    for model in (alone, sharded):
        mezzo.prepare(model, POLICY)
    sharded(torch.ones(2, 6))  # leaves the root's parameters gathered
    first, second = export(alone), export(sharded)
    assert first["0.weight"][0, 0] == 1 + 2.0**-7
    assert [value.dtype for value in second.values()] == [*[torch.bfloat16] * 4, *[torch.float32] * 2]
    assert all(type(second[name]) is torch.Tensor and torch.equal(second[name], first[name]) for name in first)
    assert list(first) == list(second)
    plain = mezzo.fully_shard(net(), "O1,bf16,emulate=false", wrap=nn.Linear)
    shard = plain[2].weight.to_local()
    if torch.distributed.get_rank() == 1:
        shard.data.fill_(1e6)  # which the other rank knows nothing of
    with pytest.raises(NumericsError, match=r"2\.weight"):
        export(plain, "fp16")


def test_every_rank_gets_whole_tensors():
    on_ranks(2, exported)
