"""The cross entropy in chunks of rows over sharded heads, against one process with the same global batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import mezzo

from .ranks import on_ranks

POLICIES = ("O0", "O2,bf16,emulate=false")


#: Rows and classes over ranks: of data, and of tensors.
AXES = ((Shard(0), Replicate()), (Replicate(), Shard(0)))


class Net(nn.Module):
    """A block that is gathered by itself, and a head that belongs to the model, whose loss it computes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 20)

    def forward(self, x, target):
        hidden = torch.relu(self.blocks[0](x))
        return mezzo.linear_cross_entropy(hidden, self.head.weight, target, linear_bias=self.head.bias, rows=32)


def trained(policy, part, *, shards):
    torch.manual_seed(1)
    model = Net()
    if shards:
        model = mezzo.fully_shard(model, policy)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.5), policy)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(2):
        x = part(torch.randn(160, 8, generator=generator))
        target = part(torch.randint(20, (160,), generator=generator))
        with amp.autocast():
            loss = model(x, target)
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
        losses.append(loss.item())
    params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [param.detach().clone() for param in params]


def own_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def outside(policy):
    """The loss outside of the forward of whoever owns the head: its weight is a shard there."""
    model = mezzo.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 20)), policy, wrap=nn.Linear)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.5), policy)
    with amp.autocast():
        hidden = model[0](torch.randn(80, 8))
        with pytest.raises(mezzo.StateError) as error:
            mezzo.linear_cross_entropy(hidden, model[1].weight, torch.zeros(80, dtype=torch.long), rows=32)
    return str(error.value)


def over_a_mesh(of_rows, of_head):
    """Return how far the loss and the head's gradient are from one process's, over DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    hidden, weight, target = torch.randn(160, 8), torch.randn(20, 8, requires_grad=True), torch.randint(20, (160,))
    wanted = nn.functional.cross_entropy(hidden @ weight.mT, target)
    wanted.backward()
    rows, targets = (distribute_tensor(tensor, mesh, [of_rows]) for tensor in (hidden, target))
    head = distribute_tensor(weight.detach(), mesh, [of_head]).requires_grad_()
    with loss_parallel() if of_head.is_shard() else contextlib.nullcontext():
        loss = mezzo.linear_cross_entropy(rows, head, targets, rows=32)
        loss.backward()
    distances = (loss.full_tensor() - wanted, head.grad.full_tensor() - weight.grad)
    return [distance.abs().max().item() for distance in distances]


def everything():
    runs = {policy: trained(policy, own_part, shards=True) for policy in POLICIES}
    return {**runs, "outside": outside("O1,bf16,emulate=false"), "mesh": [over_a_mesh(*axes) for axes in AXES]}


@pytest.fixture(scope="module")
def of_two():
    return on_ranks(2, everything)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sharded_head_trains_as_in_one_process(policy, of_two):
    losses, params = trained(policy, lambda tensor: tensor, shards=False)
    means = [sum(values) / 2 for values in zip(*(rank[policy][0] for rank in of_two), strict=True)]
    bound = 2e-6 if policy == "O0" else 2e-2
    torch.testing.assert_close(torch.tensor(means), torch.tensor(losses), rtol=bound, atol=0)
    for rank in of_two:
        torch.testing.assert_close(rank[policy][1], params, rtol=0, atol=bound)


def test_rows_or_classes_may_be_shards(of_two):
    for rank in of_two:
        assert max(distance for distances in rank["mesh"] for distance in distances) < 1e-6


def test_a_head_that_is_not_gathered_is_told_apart(of_two):
    for rank in of_two:
        assert rank["outside"].startswith("linear_weight is a part of a weight, and input is whole")
        assert "\n  write  " in rank["outside"]
