"""A recorder on several ranks: each counts what it sees itself, and training goes on as without one."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.numerics import Recorder

from .ranks import on_ranks

POLICY = "O2,dtype=bfloat16"


def recorded(way):
    """What this rank has counted in its second step: numbers by kind and tensor, and the sum of activations."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.Linear(6, 2))
    if way == "fsdp":
        mezzo.fully_shard(model, POLICY, wrap=torch.nn.Linear)
    optimizer = mezzo.optim.AdamW(model.parameters())
    amp = mezzo.MixedPrecision(model, optimizer, POLICY)
    called = DistributedDataParallel(model) if way == "ddp" else model
    x = torch.randn(12, 8)[dist.get_rank() :: 3]  # four rows each
    with Recorder(model, optimizer, every=1) as recorder:
        for _ in range(2):
            with amp.autocast():
                loss = called(x).square().mean()
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
    step = recorder.evidence.steps[-1]
    return {(each.kind, each.module, each.name): each.histogram for each in step.tensors}


def test_each_rank_counts_its_own_share_and_the_reduced_gradients():
    first, second = on_ranks(2, recorded, "ddp")
    assert first.keys() == second.keys()
    for key in first:
        kind = key[0]
        alike = kind in ("weights", "weight_gradients", "updates")  # which ranks have in common
        same = (first[key].total, first[key].max_abs) == (second[key].total, second[key].max_abs)
        assert same or not alike, key
    key = ("activations", "0", "output")
    assert first[key].total == second[key].total == 4 * 6
    assert first[key].max_abs != second[key].max_abs  # of other rows


def test_of_shards_each_rank_counts_its_part_of_the_gradients():
    answers = on_ranks(2, recorded, "fsdp")
    gradients = [{key[1:]: h.total for key, h in each.items() if key[0] == "weight_gradients"} for each in answers]
    names = gradients[0].keys() | gradients[1].keys()
    totals = {name: sum(each.get(name, 0) for each in gradients) for name in names}
    assert totals == {("0", "weight"): 48, ("0", "bias"): 6, ("2", "weight"): 12, ("2", "bias"): 2}
