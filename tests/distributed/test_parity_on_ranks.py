"""Two models on ranks: each rank compares what its own modules return, and leaves shards as they were."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.numerics import parity
from mezzo.sharded import is_distributed

from .ranks import on_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def differing(result):
    return [row.path for row in result.rows if row.in_all.differs], result.first and result.first.path


def compared():
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    sharded, plain = mezzo.fully_shard(net(), "O2,bf16,emulate=true", wrap=nn.Linear), net()
    mezzo.MixedPrecision(sharded, torch.optim.SGD(sharded.parameters()), "O2,bf16,emulate=true")
    assert differing(parity(sharded, plain, x, policy_b="O1,bf16,emulate=true")) == ([], None)
    assert differing(parity(plain, sharded, x))[1] == "0"  # which computes in FP32 here
    assert all(is_distributed(param) for param in sharded.parameters())
    other = net()
    other[2].bias.data += 1.0
    assert differing(parity(DistributedDataParallel(net()), DistributedDataParallel(other), x)) == (["", "2"], "2")


def test_sharded_and_wrapped_models():
    on_ranks(2, compared)
