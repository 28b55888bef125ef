"""A program in apex's form on two ranks, wrapped as apex wants it, against one process in float64."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mezzo.compat.apex import amp

from ..distributed.ranks import on_ranks
from .apex import INF, initialized, perceptron, points, scales, values

STEPS, BAD = 3, 1
CASES = [(level, delay) for level in ("O1", "O2") for delay in (False, True)]


def programs(rank):
    """Train in each case: weights and scale by case."""
    found = []
    for level, delay in CASES:
        model = perceptron()
        with initialized(model, torch.optim.SGD(model.parameters(), lr=0.2), opt_level=level) as (model, optimizer):
            wrapped = DistributedDataParallel(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                for micro_batch in range(2):
                    x, y = points(100 * step + 10 * micro_batch + rank)
                    loss = functional.cross_entropy(wrapped(x), y)
                    with amp.scale_loss(loss, optimizer, delay_unscale=delay and micro_batch == 0) as scaled:
                        scaled.backward()
                if step == BAD and rank == 1:
                    next(model.parameters()).grad.fill_(INF)
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
                optimizer.step()
            found.append((values(model.state_dict().values()), scales()))
    return found


def test_two_ranks_take_the_steps_of_one_process():
    one, other = on_ranks(2, _run, timeout=120)
    twin = perceptron().double()
    plain = torch.optim.SGD(twin.parameters(), lr=0.2)
    for step in range(STEPS):
        plain.zero_grad()
        for rank in range(2):
            for micro_batch in range(2):
                x, y = points(100 * step + 10 * micro_batch + rank)
                (functional.cross_entropy(twin(x.double()), y) / 2).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        if step != BAD:
            plain.step()
    for case, (mine, scale), (theirs, same) in zip(CASES, one, other, strict=True):
        assert all(map(torch.equal, mine, theirs)), case
        assert scale == same, case
        for value, right in zip(mine, twin.parameters(), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=0, atol=3e-3)


def _run():
    return programs(torch.distributed.get_rank())
