"""What ranks send each other, counted from the collectives themselves, against what was called."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mezzo.numerics.traffic import Collective, Traffic

from .ranks import on_ranks


def counted(call):
    with Traffic() as traffic:
        call()
    return [(each.kind, str(each.dtype), each.whole_bytes, each.ranks) for each in traffic.collectives]


def collectives():
    three, six, whole = torch.zeros(3), torch.zeros(6), torch.zeros(8, dtype=torch.bfloat16)
    halves = dist.new_group([0]), dist.new_group([1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    calls = {
        "all-reduce": lambda: dist.all_reduce(three),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all-gather": lambda: dist.all_gather_into_tensor(six, three),
        "all-gather of a list": lambda: dist.all_gather([torch.zeros(3), torch.zeros(3)], three),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(three, six),
        "all-to-all": lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4)),
        "in a group of one": lambda: dist.all_reduce(three, group=halves[dist.get_rank()]),
        "a DTensor's norm": lambda: sharded.norm().full_tensor(),
        "a DTensor, whole": lambda: sharded.full_tensor(),
        "none": lambda: three.sum(),
    }
    return {name: counted(call) for name, call in calls.items()}


def test_each_collective_is_seen_with_its_whole_size_and_its_ranks():
    for found in on_ranks(2, collectives):
        assert found == {
            "all-reduce": [("all-reduce", "torch.float32", 12, 2)],
            "broadcast": [("broadcast", "torch.bfloat16", 16, 2)],
            "all-gather": [("all-gather", "torch.float32", 24, 2)],
            "all-gather of a list": [("all-gather", "torch.float32", 24, 2)],
            "reduce-scatter": [("reduce-scatter", "torch.float32", 24, 2)],
            "all-to-all": [("all-to-all", "torch.float32", 16, 2)],
            "in a group of one": [("all-reduce", "torch.float32", 12, 1)],
            "a DTensor's norm": [("all-reduce", "torch.float32", 4, 2)],
            "a DTensor, whole": [("all-gather", "torch.float32", 72, 2)],  # 3 rows on each rank, one of them padding
            "none": [],
        }


def wrapped():
    def net():
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    ddp, sharded = DistributedDataParallel(net()), net()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    found = {}
    for name, model in (("ddp", ddp), ("fsdp", sharded)):
        for _ in range(3):  # DDP puts its buckets in order in the second step, and says so to the other ranks
            found[name] = counted(lambda model=model: model(torch.ones(4, 8)).sum().backward())
    return found


def test_what_wrappers_send_in_backward_passes_is_seen():
    layer = 4 * (64 + 8)
    for found in on_ranks(2, wrapped):
        assert found["ddp"] == [("all-reduce", "torch.float32", 2 * layer, 2)]
        kinds = [kind for kind, *_ in found["fsdp"]]
        assert {size for _, _, size, _ in found["fsdp"]} == {layer}
        assert (kinds.count("all-gather"), kinds.count("reduce-scatter"), len(kinds)) == (4, 2, 6)


def test_bytes_on_the_wire_are_those_of_a_ring():
    def sent(kind, ranks):
        return Collective(kind=kind, dtype=torch.float32, whole_bytes=1200, ranks=ranks).wire_bytes

    assert [sent("all-gather", ranks) for ranks in (1, 2, 4)] == [0, 600, 900]
    assert [sent("all-reduce", ranks) for ranks in (1, 2, 4)] == [0, 1200, 1800]
