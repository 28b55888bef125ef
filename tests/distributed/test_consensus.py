"""What ranks agree on: norms of sharded gradients, one verdict, one scale, errors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mezzo.step.consensus import Consensus
from mezzo.step.gradients import dense, norms

from .ranks import on_ranks


def sharded_norms():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model[0])  # the root's own parameters stay plain
    x = torch.randn(4, 3)
    with torch.no_grad():  # what the root would all-gather, and a gradient that all ranks hold alike
        model[1].weight.grad = torch.full((2, 5), 2.0)
    model[0](x).square().sum().backward()
    params = [p for p in model.parameters() if p.grad is not None]
    consensus = Consensus.of()
    consensus.follow(params, lambda param: "a parameter")
    found = consensus.norms(params, norms(dense(params)[1], torch.device("cpu")))
    shards = [tuple(gradient.shape) for gradient in dense(params)[1]]
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params]
    return found, torch.stack([g.double().norm().float() for g in whole]), shards, len(consensus.sharding.groups)


def test_norms_of_shards_become_those_of_whole_gradients():
    results = on_ranks(2, sharded_norms)
    assert torch.equal(results[0][0], results[1][0])
    for rank, (found, expected, shards, num_groups) in enumerate(results):
        torch.testing.assert_close(found, expected)
        assert num_groups == 1
        assert shards[0] == ((3, 3), (2, 3))[rank]  # five rows over two ranks


def one_rank_only():
    assert dist.get_world_size() == 1
    return Consensus.of()


def test_one_rank_has_nobody_to_agree_with():
    assert Consensus.of() is None
    assert on_ranks(1, one_rank_only) == [None]
