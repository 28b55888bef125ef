"""Delayed scaling on two ranks: all have the largest values of any, replicas and shards alike."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.session.session import weights_of

from .ranks import on_ranks, text_of

POLICY = "O1,dtype=bfloat16,fp8_recipe=delayed,fp8_history=3,fp8_module=*1"


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def batch(number, rank):
    """Larger on the second rank, whose largest values all must know."""
    generator = torch.Generator().manual_seed(2 * number + rank)
    return torch.randn(32, 32, generator=generator) * (1 + 3 * rank)


def backward(model, amp, number):
    with amp.autocast():
        loss = model(batch(number, dist.get_rank())).float().square().mean()
    amp.backward(loss)


def session(policy=POLICY, wrap=DistributedDataParallel):
    model = wrap(net())
    return model, mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)


def history(amp):
    (maxima,) = amp.state_dict()["products"]["histories"].values()
    return maxima.tolist()


def own_largest(number, rank):
    """The activation's largest value in the layer in the middle, on one rank."""
    with torch.no_grad(), mezzo.autocast("O1,dtype=bfloat16"):
        return float(net()[0](batch(number, rank)).abs().max())


def largest():
    """One step and another that is skipped on one rank; then one of two micro-batches."""
    model, amp = session()
    backward(model, amp, 0)
    amp.step()
    amp.zero_grad()
    first = history(amp)
    backward(model, amp, 1)
    if dist.get_rank():
        next(model.parameters()).grad.fill_(float("inf"))
    skipped = bool(amp.step().skipped)
    amp.zero_grad()
    second = history(amp)
    for number in (2, 3):
        backward(model, amp, number)
    amp.step()
    amp.zero_grad()
    return first, skipped, second, history(amp), [own_largest(0, rank) for rank in range(2)]


def absent():
    """Rank 1 has no gradient in a step; both go on afterwards."""
    model, amp = session()
    backward(model, amp, 0)
    amp.step()
    amp.zero_grad()
    backward(model, amp, 1)

    if dist.get_rank():
        amp.zero_grad()
    refusal = text_of(amp.step)
    amp.zero_grad()
    before = history(amp)
    backward(model, amp, 2)
    amp.step()
    amp.zero_grad()
    return refusal, before, history(amp), own_largest(2, 1)


def sharded(level):
    """A model in parts has the histories of one whole."""
    histories = []
    for wrap in [*([DistributedDataParallel] if level == "O1" else []), mezzo_sharded(level)]:
        model, amp = session(POLICY.replace("O1", level), wrap)
        for number in range(3):
            backward(model, amp, number)
            amp.step()
            amp.zero_grad()
        state = amp.state_dict()  # the root is gathered still, after a forward pass
        histories.append(history(amp))
        with torch.no_grad(), amp.autocast():
            model(batch(9, 0))
        histories.append(history(amp))
    amp.load_state_dict(state)
    histories.append(history(amp))
    with torch.no_grad(), amp.autocast():
        model(batch(9, 0))
    amp.load_state_dict(state)
    return [*histories, history(amp)]


def mezzo_sharded(level):
    return lambda model: mezzo.fully_shard(model, POLICY.replace("O1", level))


def noise():
    """Each rank rounds by noise of its own."""
    _, amp = session("O1,dtype=bfloat16,nvfp4_module=*1")
    (memory,) = weights_of(amp).memories()
    memory.counts = True  # as in a backward pass of the session
    return int(memory.draw(torch.device("cpu")))


def everything():
    return largest(), absent(), sharded("O1"), sharded("O2"), noise()


def test_ranks_agree_on_largest_values_and_each_draws_noise_of_its_own():
    results = on_ranks(2, everything)
    assert len({result[-1] for result in results}) == 2
    for (first, skipped, second, third, own), missed, whole, low, _ in results:
        assert own[0] < own[1]
        assert first[0][0] == max(own)
        assert skipped
        assert second == first
        assert [roles[1:] for roles in third] == [roles[:-1] for roles in first]
        assert missed[1] == first
        assert missed[2][0][:2] == pytest.approx([missed[3], first[0][0]], rel=0.01)
        assert all(values == whole[0] for values in whole)
        assert all(values == low[0] for values in low)
        assert low[0] == [pytest.approx(roles, rel=0.02) for roles in whole[0]]
    assert results[0][1][0].startswith("DistributedError: rank 1 ended step 2")
    assert results[1][1][0].startswith("StateError: step() before backward()")
    assert results[0][:-1] == (*results[1][:1], (results[0][1][0], *results[1][1][1:]), *results[1][2:-1])
