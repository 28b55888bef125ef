"""What ranks tell each other in a step: norms of sharded gradients, one verdict, a rank that cannot go on."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

import mezzo
from mezzo.distributed.exchange import OneRank, Ranks
from mezzo.step.gradients import dense, norms

from .ranks import on_ranks, text_of

CPU = torch.device("cpu")


def sharded_norms():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model[0])  # the root's own parameters stay plain
    with torch.no_grad():  # a gradient that all ranks hold alike
        model[1].weight.grad = torch.full((2, 5), 2.0)
    model[0](torch.randn(4, 3)).square().sum().backward()
    params = [p for p in model.parameters() if p.grad is not None]
    ranks = Ranks.of()
    ranks.shards = ranks.shards_of(params, lambda param: "a parameter")
    of_shards = ranks.norms(params, norms(dense(params)[1], CPU))
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params]
    return of_shards, torch.stack([g.double().norm().float() for g in whole])


def agreed():
    """Let rank 1 find what rank 0 does not; then let it be absent, before norms are exchanged and after."""
    rank, flag = dist.get_rank(), torch.tensor
    ranks = Ranks.of()
    model = nn.Linear(5, 2)
    fully_shard(model)
    ranks.shards = ranks.shards_of(model.parameters(), lambda param: "a parameter")
    verdicts = [tensor.tolist() for tensor in ranks.agree(flag(rank == 1), flag(False), step=1)]
    verdicts += [tensor.tolist() for tensor in ranks.agree(flag(rank == 1), flag(rank == 0), step=2)]

    def step(number, late):
        params = list(model.parameters())
        try:
            if rank == 1 and not late:
                raise ValueError("mine")
            ranks.norms(params, torch.ones(len(params)))
            if rank == 1:
                raise ValueError("mine")
            ranks.agree(flag(False), flag(False), step=number)
        except Exception as error:
            ranks.absent(error, CPU, step=number)
            raise

    refusals = [text_of(lambda: step(3, late=False)), text_of(lambda: step(4, late=True))]
    huge = ranks.norms(params := list(model.parameters()), torch.full((len(params),), 1.5e19))
    verdicts += [tensor.tolist() for tensor in ranks.agree(flag(False), flag(False), step=5)]  # they are in step again
    verdicts += huge.tolist()  # squares that FP32 holds, and not their sum: as on one rank
    return verdicts, refusals, str(ranks.ended_by(1.0, 6)), ranks.ended_by(0.0, 6)


def refused():
    mesh = init_device_mesh("cpu", (2,))
    name_of = {}.get
    partial, sharded = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    fully_shard(sharded, mesh=mesh)
    alone = [dist.new_group([rank]) for rank in range(2)]
    pair = dist.new_group([0, 1])
    mine = Ranks.of(alone[dist.get_rank()])
    Ranks.of(pair).shards_of(sharded.parameters(), name_of)
    return [
        text_of(call)
        for call in (
            lambda: Ranks.of("x"),
            lambda: Ranks.of(alone[1 - dist.get_rank()]),
            lambda: Ranks.of(pair).shards_of(partial.parameters(), lambda param: "weight"),
            lambda: mine.shards_of(sharded.parameters(), name_of),
            lambda: mine.require_within(pair, "DistributedDataParallel reduces over"),
        )
    ]


def everything():
    return sharded_norms(), agreed(), refused()


@pytest.fixture(scope="module")
def of_two():
    """What :func:`everything` returns on each of two ranks."""
    return on_ranks(2, everything)


def test_norms_of_shards_become_those_of_whole_gradients(of_two):
    pairs = [result[0] for result in of_two]
    assert torch.equal(pairs[0][0], pairs[1][0])
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected)


def test_what_one_rank_finds_holds_on_all_and_an_absent_rank_ends_the_step_of_all(of_two):
    for rank, (_, (verdicts, refusals, late, none), *_) in enumerate(of_two):
        assert verdicts == [True, False, 0.0, True, True, 0.0, False, False, 0.0, math.inf, math.inf]
        assert none is None
        assert late.startswith("rank 1 ended step 6")
        for number, text in enumerate(refusals, 3):
            if rank == 1:
                assert text == "ValueError: mine"
            else:
                assert text.startswith(f"DistributedError: rank 1 ended step {number} with an error, or had no grad")


def test_what_does_not_fit_the_group_is_refused(of_two):
    expected = (
        "AttributeError: 'str' object has no attribute 'size'",
        "PolicyError: this rank is not in the session's process_group",
        "UnsupportedError: a parameter is a sum over ranks that was never taken\n  where  weight, placements (Partial(",
        "PolicyError: parameters are sharded over 2 ranks, and the session steps alone",
        "PolicyError: DistributedDataParallel reduces over 2 ranks, and the session steps alone",
    )
    for *_, texts in of_two:
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start)


def test_one_rank_has_nobody_to_agree_with():
    ranks = Ranks.of()
    assert isinstance(ranks, OneRank)
    flag, one = torch.tensor(True), torch.ones(2)
    ranks.shards = ranks.shards_of([one], str)
    assert ranks.norms([], one) is one
    assert ranks.agree(flag, ~flag, step=1)[0] is flag
    assert float(ranks.agree(flag, ~flag, step=1)[2]) == 0.0
    assert ranks.ended_by(0.0, 1) is None
    with pytest.raises(mezzo.StateError, match="process_group= names ranks, and there are none"):
        Ranks.of("x")
