"""What ranks agree on: norms of sharded gradients, one verdict, one scale, errors."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

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


class FromTheHost(TorchDispatchMode):
    """Counts tensors that are made of Python numbers, each of which a GPU would have to wait for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **kwargs or {})


def norms_over_two_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = [torch.arange(8.0).view(4, 2) + number for number in range(3)]
    placements = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]]
    params = [nn.Parameter(distribute_tensor(*each)) for each in zip(whole, [mesh] * 3, placements, strict=True)]
    consensus = Consensus.of()
    consensus.follow(params, lambda param: "a parameter")
    own = torch.stack([param.detach().to_local().norm() for param in params])
    found = consensus.norms(params, own)
    with FromTheHost() as made:
        again = consensus.norms(params, own)
    return found.tolist(), again.tolist(), [each.norm().item() for each in whole], made.count


def test_groups_that_hold_some_of_the_parameters_send_nothing_to_the_device_once_it_has_their_places():
    for found, again, expected, count in on_ranks(4, norms_over_two_groups):
        assert found == again
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
        assert count == 0


def one_rank_only():
    assert dist.get_world_size() == 1
    return Consensus.of()


def test_one_rank_has_nobody_to_agree_with():
    assert Consensus.of() is None
    assert on_ranks(1, one_rank_only) == [None]
