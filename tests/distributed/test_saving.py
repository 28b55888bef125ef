"""mezzo.save on several ranks: the first writes, or each a file of its own; what a killed rank leaves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import MixedPrecision, optim

from .ranks import on_ranks, text_of

LOW = "O2,dtype=bfloat16,emulate=true"


def session(policy=LOW):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return model, MixedPrecision(model, optim.AdamW(model.parameters(), lr=0.01), policy)


def backward(model, amp, number):
    with amp.autocast():
        loss = model(torch.sin(torch.arange(12.0) * (number + 1 + dist.get_rank())).view(2, 6)).float().square().mean()
    amp.backward(loss)


def train(model, amp, numbers):
    for number in numbers:
        backward(model, amp, number)
        amp.step()
        amp.zero_grad()


def all_ways(folder):
    rank, outcomes = dist.get_rank(), {}
    mezzo.save(folder / "all.pt", number=1 + 10 * rank)
    mezzo.save(folder / f"own{rank}.pt", rank=rank, each_rank=True)
    dist.barrier()
    outcomes["all"] = mezzo.load(folder / "all.pt")["number"]
    outcomes["own"] = mezzo.load(folder / f"own{rank}.pt")["rank"]
    model, amp = session()
    wrapper = DistributedDataParallel(model)
    with amp.no_sync():
        backward(wrapper, amp, 0)
    outcomes["window"] = text_of(amp.state_dict)
    amp.zero_grad()
    train(wrapper, amp, range(2))
    mezzo.save(folder / "parts.pt", model=model, amp=amp)
    dist.barrier()
    other, same = session()
    mezzo.load(folder / "parts.pt", model=other, amp=same)
    outcomes["parts"] = torch.equal(other.weight, model.weight), same.stats().steps
    return outcomes


def test_the_first_rank_writes_and_all_read(tmp_path):
    for rank, outcomes in enumerate(on_ranks(2, all_ways, tmp_path)):
        assert (outcomes["all"], outcomes["own"]) == (1, rank)
        assert outcomes["window"].startswith("StateError: ")
        assert "accumulation window" in outcomes["window"]
        assert outcomes["parts"] == (True, 2)
