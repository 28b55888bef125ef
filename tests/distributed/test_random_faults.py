"""Two hundred steps with twenty faults, each on one rank alone: all ranks skip the same and have the same scale."""

import functools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.tensors import local

from .ranks import on_ranks

STEPS, FAULTS = 200, 20
#: What a fault does: to the step, and to the scale.
SKIPS = {"gradient": "backs off", "backward": "backs off", "first micro-batch": "backs off", "own": "backs off",
         "forward": "stays", "loss": "stays"}  # fmt: skip
FLOOR = 1.0  # of the rules, unless they say another
RULES = {"init": 1024.0, "interval": 20}
POLICY = "O1,dtype=float16,loss_scale=dynamic(init=1024,interval=20)"
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01),
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
    "mezzo.AdamW": mezzo.optim.AdamW,
}


class Net(nn.Module):
    """A net with a layer that a rank may use alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.own = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, rows, uses_own=False):
        hidden = self.first(rows).relu()
        return self.last(hidden) + (self.own(hidden) if uses_own else 0)


def faults_of(seed, wrap):
    """Return by step which fault comes, and on which rank."""
    draw = random.Random(seed)
    kinds = [*SKIPS, "grad"]
    if wrap == "fsdp2":
        kinds.remove("own")  # all ranks gather and reduce together
    return {step: (draw.choice(kinds), draw.randrange(2)) for step in draw.sample(range(STEPS), FAULTS)}


def expected_trace(faults):
    """Return what the rules say, written anew: of each step whether it is skipped, and its scale."""
    scale, clean, trace = RULES["init"], 0, []
    for step in range(STEPS):
        fault, _ = faults.get(step, (None, None))
        trace.append((fault in SKIPS, scale))
        if fault in SKIPS and SKIPS[fault] == "stays":
            continue
        clean = 0 if fault else clean + 1
        if fault:
            scale = max(scale / 2, FLOOR)
        elif clean == RULES["interval"]:
            scale, clean = scale * 2, 0
    return trace


def trained(wrap, optimizer, seed):
    """Train, and return of each step whether it was skipped and its scale; and the weights as this rank has them."""
    torch.manual_seed(0)
    net, rank, faults, trace = Net(), dist.get_rank(), faults_of(seed, wrap), []
    model = DistributedDataParallel(net, find_unused_parameters=True) if wrap == "ddp" else fully_shard(net)
    amp = mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), POLICY, max_grad_norm=1.0)
    torch.manual_seed(rank)
    for step in range(STEPS):
        fault, guilty = faults.get(step, (None, None))
        fault = fault if rank == guilty else None
        if step % 4 == 3 or faults.get(step, ("",))[0] == "first micro-batch":
            with amp.no_sync():
                amp.backward(loss_of(amp, model, "backward" if fault == "first micro-batch" else None))
        amp.backward(loss_of(amp, model, fault, differentiates=faults.get(step, ("",))[0] == "grad"))
        if fault == "gradient":
            local(net.last.bias.grad)[0] = torch.inf
        found = amp.step()
        trace.append((bool(found.skipped), float(found.scale)))
        amp.zero_grad()
    return trace, [param.detach().clone() for param in map(local, net.parameters())]


def loss_of(amp, model, fault, *, differentiates=False):
    """Compute a loss, with a fault in it or in what comes back, and differentiate it on all ranks or on none."""
    rows = torch.randn(3, 4) * (1e6 if fault == "forward" else 1)
    with amp.autocast():
        out = model(rows, fault == "own")
    if fault in ("own", "backward"):
        out.register_hook(lambda gradient: gradient * torch.inf)
    loss = out.float().square().mean()
    if differentiates:
        amp.grad(loss * (1e38 if fault == "grad" else 1), out, retain_graph=True)
    return loss * torch.nan if fault == "loss" else loss


def all_trained(cases):
    return [trained(*case) for case in cases]


def check(cases):
    one, other = on_ranks(2, all_trained, cases, timeout=300)
    for case, (trace, weights), (theirs, their_weights) in zip(cases, one, other, strict=True):
        wrap, _, seed = case
        assert trace == theirs, case
        assert trace == expected_trace(faults_of(seed, wrap)), case
        assert all(weight.isfinite().all() for weight in (*weights, *their_weights)), case
        if wrap == "ddp":
            assert all(map(torch.equal, weights, their_weights)), case


@pytest.mark.slow
def test_two_hundred_steps_of_ranks_have_one_trace():
    check([("ddp", "SGD", 0), ("fsdp2", "mezzo.AdamW", 1)])


@pytest.mark.slow
def test_other_faults_and_optimizers():
    check([(wrap, optimizer, seed) for seed in range(2, 5) for wrap in ("ddp", "fsdp2") for optimizer in OPTIMIZERS])
