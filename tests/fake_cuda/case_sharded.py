"""Steps over DTensors on a CUDA device: kernels over this rank's shards, as many launches as over plain tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from mezzo import optim
from mezzo.weights.models import store

#: Uneven on two ranks; on the second rank there is nothing of the last.
SHAPES = [((7, 32), Shard(0)), ((8, 6), Shard(1)), ((5,), Replicate()), ((1, 16), Shard(0))]


@pytest.fixture
def mesh(request):
    """Two ranks, of which this is one, and nothing is exchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    try:
        yield init_device_mesh("cuda", (2,))
    finally:
        dist.destroy_process_group()


def one_step(machine, params, options):
    optimizer = optim.AdamW(params, lr=0.01, **options)
    store(dict.fromkeys(params, torch.bfloat16), dict.fromkeys(params, "weight"))
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    with machine.watched() as record:
        optimizer.step()
    return record, optimizer


@pytest.mark.parametrize(
    "mesh, options",
    [(0, {"state_dtype": "bfloat16"}), (1, {}), (0, {"state_dtype": "int8"})],
    indirect=["mesh"],
    ids=str,
)
def test_shards_take_no_more_launches_than_plain_tensors(machine, mesh, options):
    whole = [torch.ones(shape, device="cuda") for shape, _ in SHAPES]
    sharded = [
        nn.Parameter(distribute_tensor(tensor, mesh, [placement], src_data_rank=None))
        for tensor, (_, placement) in zip(whole, SHAPES, strict=True)
    ]
    plain, _ = one_step(machine, [nn.Parameter(param._local_tensor.clone()) for param in sharded], options)
    record, optimizer = one_step(machine, sharded, options)
    # Copies have a bucket of their own where random bits are the same for them on all ranks.
    assert record.triton == plain.triton * (1 + ("state_dtype" in options))
    assert record.reads == []
    name = "exp_avg_codes" if options.get("state_dtype") == "int8" else "exp_avg"
    assert all(type(state[name]) is type(sharded[0]) for state in optimizer.state.values())
