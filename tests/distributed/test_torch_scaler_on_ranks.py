"""`mezzo.compat.torch.GradScaler` on several ranks: they skip together, and their scales stay equal."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.compat.torch import GradScaler, autocast

from .ranks import on_ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(number):
    return torch.sin(torch.arange(12.0) * (number + 1 + 10 * dist.get_rank())).view(3, 4)


def wrapped(scaler_of, clip):
    """Accumulation in no_sync, clipping, and an overflow of one rank's loss."""
    model = DistributedDataParallel(network())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), scaler_of("cpu", init_scale=2.0**8)
    scales = []
    for step in range(5):
        for part in range(2):
            model.require_backward_grad_sync = part == 1
            fails = step == 2 and part == 0 and dist.get_rank() == 1
            with autocast("cpu", torch.bfloat16):
                loss = model(batch(2 * step + part)).float().square().mean() * (torch.inf if fails else 1.0)
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [param.detach() for param in model.parameters()], scales


def beside_torch():
    comparisons = []
    for clip in (False, True):
        mine, theirs = wrapped(GradScaler, clip), wrapped(torch.amp.GradScaler, clip)
        comparisons.append((all(map(torch.equal, mine[0], theirs[0])), mine[1], theirs[1]))
    return comparisons


def sharded():
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    whole = network()
    comparisons = []
    pairs = [(net, torch.optim.Adam(net.parameters(), lr=0.01)) for net in (model, whole)]
    scalers = [GradScaler("cpu", init_scale=2.0**8) for _ in pairs]
    for step in range(4):
        for (net, optimizer), scaler in zip(pairs, scalers, strict=True):
            loss = net(torch.sin(torch.arange(12.0) * (step + 1)).view(3, 4)).square().mean()
            scaler.scale(loss).backward()
            if step == 1:
                gradient = net[0].weight.grad
                local = gradient.to_local() if net is model else gradient
                if dist.get_rank() == 1 or net is whole:
                    local[-1, 0] = torch.inf  # in the shard of one rank alone
            if step == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        full = [param.full_tensor() for param in model.parameters()]
        same = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(full, whole.parameters(), strict=True))
        comparisons.append((same, [scaler.get_scale() for scaler in scalers], bool(scalers[0].last_step.skipped)))
    return comparisons


def unreduced():
    """Gradients that nothing reduces: one rank's overflow, one that was found and not stepped with."""
    rank, model = dist.get_rank(), network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", 2.0**8, growth_interval=3)
    outcomes = []
    for step in range(7):
        loss = model(batch(step)).square().mean() * (torch.inf if step == 1 and rank == 1 else 1.0)
        before = model[0].weight.detach().clone()
        scaler.scale(loss).backward()
        if step == 4:
            model[0].weight.grad[0, 0] = torch.nan if rank == 0 else 1.0
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(before, model[0].weight)
        outcomes.append((moved, scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
        optimizer.zero_grad()
    return outcomes


def short():
    """One rank has come to the end of its data, and has no gradient."""
    rank, model = dist.get_rank(), network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", 2.0**8)
    scaler.scale(model(batch(0)).square().mean()).backward()
    if rank == 0:
        optimizer.zero_grad()
    try:
        scaler.step(optimizer)
    except mezzo.MezzoError as error:
        return str(error)
    return ""


def everything():
    return beside_torch(), sharded(), unreduced(), short()


def test_ranks_stay_together_wrapped_sharded_and_where_nothing_reduces():
    ranks = on_ranks(2, everything)
    for wrapped, shards, unreduced, _ in ranks:
        for are_same, mine, theirs in wrapped:
            assert are_same
            assert mine == theirs == [256.0, 256.0, 128.0, 128.0, 128.0]
        same, scales, skipped = zip(*shards, strict=True)
        assert all(same)
        assert scales == ([256.0] * 2, [128.0] * 2, [128.0] * 2, [128.0] * 2)
        assert skipped == (False, True, False, False)
        assert unreduced == [
            *((True, 256.0, 1), (False, 128.0, 0), (True, 128.0, 1), (True, 128.0, 2)),
            *((False, 64.0, 0), (True, 64.0, 1), (True, 64.0, 2)),  # what was found, and not stepped with, counts
        ]
    assert "step() before backward()" in ranks[0][3]
    assert "rank 0 ended step 1 with an error, or had no gradient left" in ranks[1][3]
