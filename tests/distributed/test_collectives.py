"""Collectives on parameters in halves: what they read and write is what they do to plain FP32 parameters, or raises."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo.errors import UnsupportedError
from mezzo.weights import Halves
from mezzo.weights.models import store

from .ranks import on_ranks


def plain(rows=4, seed=0):
    make = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return nn.Parameter(torch.randn(rows, 3, generator=make))


def stored(rows=4, seed=0):
    param = plain(rows, seed)
    store({param: torch.bfloat16}, {param: "a.weight"})
    assert isinstance(param, Halves)
    return param


def async_all_reduce(make):
    param = make()
    work = dist.all_reduce(param.data, async_op=True)
    work.wait()
    work.wait()
    return param


def ring(make):
    """Send one, and receive the other's."""
    mine, other = make(), make(seed=1)
    if dist.get_rank() == 0:
        dist.send(mine.data, 1)
        dist.recv(other.data, 1)
    else:
        dist.recv(other.data, 0)
        dist.send(mine.data, 0)
    return other


def batched(make):
    mine, other, to = make(), make(seed=1), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, mine.data, to), dist.P2POp(dist.irecv, other.data, to)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return other


def into(call, rows, *others):
    def run(make):
        target = make(rows)
        call(target.data, *(other(make) for other in others))
        return target

    return run


def written(call):
    def run(make):
        param = make()
        result = call(param)
        return param if result is None else result

    return run


def functional(make):
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    param = make()
    return torch.cat([all_reduce(param.detach(), "sum", dist.group.WORLD) * 1,
                      all_gather_tensor(param.detach(), 0, dist.group.WORLD) * 1])  # fmt: skip


def functional_in_place(make):
    param = make()
    name = dist.group.WORLD.group_name
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(param.data, "sum", name))
    return param


def gathered_in_lists(make):
    outs = [make(seed=seed) for seed in (1, 2)]
    dist.all_gather([out.data for out in outs], make().data)
    return torch.cat([out.detach() for out in outs])


def gathered_from_plain(make):
    """Here the list alone is in halves."""
    outs = [make(seed=seed) for seed in (1, 2)]
    dist.all_gather([out.data for out in outs], torch.full((4, 3), 0.1 * (1 + dist.get_rank())))
    return torch.cat([out.detach() for out in outs])


def reduced_from_lists(make):
    out = torch.zeros(4, 3)
    dist.reduce_scatter(out, [make(seed=seed).data for seed in (1, 2)])
    return out


def scattered_into(make):
    """The whole lies on rank 0 in plain tensors, the parts in parameters."""
    param = make()
    parts = [torch.full((4, 3), 0.1), torch.full((4, 3), 0.2)] if dist.get_rank() == 0 else None
    dist.scatter(param.data, parts, 0)
    return param


def reduced(make):
    param = make()
    dist.reduce(param.data, 0)
    return param if dist.get_rank() == 0 else make()


CALLS = {
    "broadcast": written(lambda param: dist.broadcast(param.data, 1)),
    "broadcast of the parameter": written(lambda param: dist.broadcast(param.detach(), 0)),
    "all_reduce": written(lambda param: dist.all_reduce(param.data)),
    "all_reduce, mean of a row": written(lambda param: dist.all_reduce(param.data[1])),
    "all_reduce, async": async_all_reduce,
    "reduce": reduced,
    "all_gather_into_tensor": into(dist.all_gather_into_tensor, 8, lambda make: make().data),
    "all_gather of parameters": into(dist.all_gather_into_tensor, 8, lambda make: torch.full((4, 3), 0.1)),
    "reduce_scatter_tensor": into(dist.reduce_scatter_tensor, 2, lambda make: make().data),
    "all_to_all_single": into(dist.all_to_all_single, 4, lambda make: make().data),
    "all_gather": gathered_in_lists,
    "all_gather of plain ones": gathered_from_plain,
    "reduce_scatter": reduced_from_lists,
    "scatter": scattered_into,
    "send and recv": ring,
    "batched": batched,
    "functional": functional,
    "functional, in place": functional_in_place,
}


def all_of_them():
    """What each call makes of plain and of stored parameters; and what is refused."""
    comparisons = {}
    with torch.no_grad():
        for name, call in CALLS.items():
            want, got = (call(make).detach() + 0 for make in (plain, stored))
            comparisons[name] = torch.equal(want, got), float(want.abs().sum())
        refused = {}
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        param = stored()
        try:  # which comes to no tensor's Python: what is written is plain, and what is read is in a list
            dist.scatter(torch.zeros(4, 3), [param.data], dist.get_rank(), group=alone)
        except RuntimeError as error:
            refused["lists that are read"] = str(error)
        try:
            torch.ops.symm_mem.two_shot_all_reduce_(param.data, "sum", dist.group.WORLD.group_name)
        except UnsupportedError as error:
            refused["symmetric memory"] = str(error)
    return comparisons, refused


@pytest.fixture(scope="module")
def of_two():
    return on_ranks(2, all_of_them)


def test_collectives_reach_both_halves(of_two):
    for comparisons, _ in of_two:
        assert {name: same for name, (same, _) in comparisons.items()} == dict.fromkeys(CALLS, True)
    moved = [name for name, (_, size) in of_two[0][0].items() if size]
    assert moved == [*CALLS]


def test_what_cannot_reach_them_raises(of_two):
    for _, refused in of_two:
        assert "a.weight" in refused["symmetric memory"]
        assert "symm_mem.two_shot_all_reduce_" in refused["symmetric memory"]
        assert "data pointer" in refused["lists that are read"]
