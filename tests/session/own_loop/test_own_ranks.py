"""A plain loop on two ranks while it is attached: what the same loop in a session's calls comes to, on both."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

from ...distributed.ranks import on_ranks
from .loops import POLICIES, attached, build, loss_of

INF = float("inf")


def loop(model, wrapped, built, amp, own, clips):
    for number in range(4):
        for part in range(2):
            with wrapped.no_sync() if part == 0 else contextlib.nullcontext():
                loss = loss_of(wrapped, 10 * number + 2 * part + dist.get_rank(), None if own else amp)
                loss.backward() if own else amp.backward(loss)
        if number == 1 and dist.get_rank() == 1:
            next(model.parameters()).grad.fill_(INF)  # on one rank alone
        if clips:
            if not own:
                amp.unscale_()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        built.step() if own else amp.step()
        built.zero_grad()


def ends_on_a_rank(policy, optimizer, clips, wraps_first):
    """What both loops come to on this rank."""
    found = []
    for own in (True, False):
        model, built = build(optimizer)
        wrapped = DistributedDataParallel(model) if wraps_first else None
        amp = (mezzo.attach if own else mezzo.MixedPrecision)(wrapped or model, built, POLICIES[policy])
        wrapped = wrapped or DistributedDataParallel(model)
        loop(model, wrapped, built, amp, own, clips)
        stats = amp.stats()
        found.append(([p.detach().clone() for p in amp.master_params()], stats.skipped, stats.scale))
        amp.close()
    return found


def refused_on_a_rank():
    model, built = build()
    wrapped = DistributedDataParallel(model)
    engine = torch.autograd._engine_run_backward
    with pytest.raises(mezzo.MezzoError) as raised:
        mezzo.attach(wrapped, built, POLICIES["O2"])
    assert torch.autograd._engine_run_backward is engine
    with attached(wrapped, built, POLICIES["O1"]):
        loss_of(wrapped, 0).backward()
        built.step()
    model, built = build()
    prepared = mezzo.prepare(model, POLICIES["O2"])  # what it says, and then it can be attached
    wrapped = DistributedDataParallel(model)
    with attached(wrapped, built) as amp:
        assert wrapped(torch.ones(2, 8)).dtype == torch.float32
        loss_of(wrapped, 0).backward()
        built.step()
        assert amp.policy.level == "O2"
        assert {p.dtype for p in amp.master_params()} == {torch.float32}
    prepared.remove()
    return str(raised.value)


def without_gradients(policy):
    """What each of four steps came to: rank 1 has no gradients in the second, and no rank has in the third."""
    model, built = build()
    scheduler = torch.optim.lr_scheduler.StepLR(built, 1, gamma=0.5)
    found = []
    with attached(model, built, policy) as amp:
        for ranks in ((0, 1), (0,), (), (0, 1)):
            before = [p.clone() for p in amp.master_params()]
            if dist.get_rank() in ranks:
                loss_of(model, 0).backward()  # of the same batch on each rank
            built.step()
            scheduler.step()
            built.zero_grad()
            moved = not all(map(torch.equal, before, amp.master_params()))
            found.append((moved, scheduler.get_last_lr()[0] / scheduler.base_lrs[0], amp.stats().scale))
        return found, amp.stats().steps, amp.stats().skipped


def sharded_on_a_rank():
    """What both loops come to over torch's own fully_shard, and what O2 is told where it gathers FP32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second, on ranks alone

    found = []
    for policy, low in (("O1", None), ("O2", torch.float16), ("O2, bfloat16", torch.bfloat16)):
        weights = []
        for own in (True, False):
            model, _ = build()
            fully_shard(model, mp_policy=MixedPrecisionPolicy(low, cast_forward_inputs=False))
            built = torch.optim.AdamW(model.parameters(), lr=0.01)
            amp = (mezzo.attach if own else mezzo.MixedPrecision)(model, built, POLICIES[policy])
            for number in range(3):
                loss = loss_of(model, 2 * number + dist.get_rank(), None if own else amp)
                loss.backward() if own else amp.backward(loss)
                if not own:
                    amp.unscale_()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                built.step() if own else amp.step()
                built.zero_grad()
            weights.append([p.full_tensor().detach().clone() for p in model.parameters()])
            amp.close()
        found.append(weights)
    model, _ = build()
    fully_shard(model)
    with pytest.raises(mezzo.UnsupportedError) as raised:
        mezzo.attach(model, torch.optim.AdamW(model.parameters()), POLICIES["O2"])
    return found, str(raised.value)


def cases():
    found = {}
    for policy, optimizer, clips, first in (
        ("O1", "SGD", True, False),
        ("O1", "mezzo", False, True),
        ("O2", "AdamW", True, False),
        ("O2, bfloat16", "mezzo", False, False),
    ):
        found[f"{policy} {optimizer}"] = ends_on_a_rank(policy, optimizer, clips, first)
    return (
        found,
        refused_on_a_rank(),
        sharded_on_a_rank(),
        {policy: without_gradients(POLICIES[policy]) for policy in ("O1", "O2")},
    )


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(2, cases, timeout=120)


def test_two_ranks(ranks, bits):
    (one, refusal, _, _), (other, _, _, _) = ranks
    for case, (mine, session) in one.items():
        assert bits(mine) == bits(session), case
        assert bits(mine) == bits(other[case][0]), case
        assert mine[1] == 1, case
    assert "DistributedDataParallel" in refusal
    assert "prepare first, then DistributedDataParallel(model)" in refusal


def test_shards_of_torchs_own(ranks, bits):
    (_, _, (one, refusal), _), (_, _, (other, _), _) = ranks
    for (own, session), (theirs, _) in zip(one, other, strict=True):
        assert bits(own) == bits(session) == bits(theirs)
    assert "fully_shard gathers parameters in float32, and O2 wants float16" in refusal
    assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)" in refusal


def test_a_rank_without_gradients_votes_and_no_rank_steps(ranks):
    (*_, one), (*_, other) = ranks
    assert one == other
    for steps, taken, skipped in one.values():
        scale = steps[0][2]
        # What no rank has gradients for is no step, as in plain torch, whose scheduler goes on.
        assert steps == [(True, 0.5, scale), (False, 0.5, scale), (False, 0.25, scale), (True, 0.125, scale)]
        assert (taken, skipped) == (3, 1)
