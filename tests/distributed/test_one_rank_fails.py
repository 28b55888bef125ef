"""A rank that refuses, raises, ends or collapses ends all with an error that names it and the step; none hangs."""

import dataclasses
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo import LossScale, Policy
from mezzo.session.scale import StepOutcome
from mezzo.step.consensus import Consensus, Heard
from mezzo.step.passes import Verdict
from mezzo.step.ranks import PROBLEMS, Problem

from .ranks import RankError, on_ranks
from .test_verdict import averaged, loss_of, model_of, session_of


def text_of(call):
    """Return the name and the text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unlike(optimizer, amp, model, fault):
    """Let one rank do something else than the others before a step."""
    if fault == "no gradient":
        amp.zero_grad()
    elif fault == "PolicyError":
        optimizer.param_groups[0]["lr"] = float("nan")
    elif fault == "StateError":
        amp.loss_scale.mul_(2)


def a_refused_step(fault):
    """Refuse a step on rank 1; then take one on both, as if nothing had been."""
    model, guilty = model_of(), dist.get_rank() == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, "O1,dtype=float16")
    before = model[0].weight.detach().clone()
    amp.backward(loss_of(amp, model, dist.get_rank()))
    averaged(model)
    if guilty or fault == "no gradient anywhere":
        unlike(optimizer, amp, model, fault.removesuffix(" anywhere"))
    steps = []
    said = text_of(lambda: steps.append(amp.step()))
    same = torch.equal(model[0].weight, before)
    skipped = bool(steps[0].skipped) if steps else None
    amp.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.1
    amp.loss_scale.fill_(2.0**16)
    amp.backward(loss_of(amp, model, dist.get_rank()))
    averaged(model)
    after = amp.step()
    stats = amp.stats()
    return said, same, skipped, (bool(after.skipped), float(after.scale), stats), model[0].weight.detach()


def refused_steps():
    return {
        fault: a_refused_step(fault) for fault in ("no gradient", "no gradient anywhere", "PolicyError", "StateError")
    }


def test_what_one_rank_refuses_no_rank_steps_with():
    one, other = on_ranks(2, refused_steps)
    for fault, (_, same, _, after, weight) in one.items():
        assert same, fault
        assert other[fault][1], fault
        assert not after[0], fault
        assert after == other[fault][3], fault
        assert torch.equal(weight, other[fault][4]), fault
    # To have no gradient is a vote: at the end of the data a rank may have none left.
    assert (one["no gradient"][0], other["no gradient"][0]) == ("", "")
    assert one["no gradient"][2] is other["no gradient"][2] is True
    assert one["no gradient"][3][2].skipped == 1
    for ranks in (one, other):
        assert "step() before backward()" in ranks["no gradient anywhere"][0]
    for fault, text in (("PolicyError", "lr is nan"), ("StateError", "the loss scale was changed")):
        assert other[fault][0].startswith(fault), other[fault][0]
        assert text in other[fault][0]
        assert one[fault][0].startswith(f"DistributedError: rank 1 ended step 1 with a {fault}"), one[fault][0]
        assert text in one[fault][0]


# Ranks that are gone ----------------------------------------------------------------------------------------


def a_lost_rank(how, wrap, guilty):
    """Lose one rank in step 3, and tell what the others raise, and after how long."""
    model = model_of()
    wrapped = {"ddp": DistributedDataParallel, "fsdp2": fully_shard, "none": lambda model: model}[wrap](model)
    amp = session_of(wrapped)
    begun = time.monotonic()
    try:
        for step in range(1, 5):
            if step == 3 and dist.get_rank() == guilty:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("a broken batch")
            begun = time.monotonic()
            amp.backward(loss_of(amp, wrapped, step))
            amp.step()
            amp.zero_grad()
    except RuntimeError as error:
        raise AssertionError(f"{type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}") from None


@pytest.mark.parametrize("how, wrap", [("killed", "ddp"), ("raised", "fsdp2"), ("killed", "none")])
def test_a_rank_that_is_gone_is_named_with_its_step(how, wrap):
    with pytest.raises(RankError) as caught:
        on_ranks(2, a_lost_rank, how, wrap, 1, group_timeout=20)
    texts = caught.value.texts
    assert ("was killed" if how == "killed" else "ValueError: a broken batch") in texts[1]
    assert "DistributedError after" in texts[0]
    assert "rank 1 did not take part in step 3" in texts[0]
    assert "rank 0 of 2" in texts[0]
    assert float(texts[0].split("DistributedError after ")[1].split(" s")[0]) < 20


@pytest.mark.slow
def test_of_four_ranks_the_one_that_is_gone_is_named():
    with pytest.raises(RankError) as caught:
        on_ranks(4, a_lost_rank, "killed", "ddp", 2, group_timeout=20)
    for rank in (0, 1, 3):
        assert "rank 2 did not take part in step 3" in caught.value.texts[rank]


# A session that one rank refuses ------------------------------------------------------------------------------


def a_refused_session(difference):
    """Begin a session that is wrong on rank 1 alone; what is said, and whether the model is as it was."""
    model, guilty = model_of(), dist.get_rank() == 1
    policy, options = "O2,dtype=float16", {}
    if difference == "policy" and guilty:
        policy = "O2,dtype=bfloat16"
    if difference == "max_grad_norm" and guilty:
        options = {"max_grad_norm": -1.0}
    if difference == "values" and guilty:
        with torch.no_grad():
            model[0].weight[0, 0] = 1e6
    said = text_of(lambda: session_of(model, policy, **options))
    return said, {param.dtype for param in model.parameters()}


def refused_sessions():
    found = {name: a_refused_session(name) for name in ("policy", "max_grad_norm", "values")}
    model = model_of()
    alone = [dist.new_group([rank]) for rank in range(2)]
    found["another's group"] = (text_of(lambda: session_of(model, process_group=alone[1 - dist.get_rank()])), None)
    found["alone"] = (session_of(model, process_group=alone[dist.get_rank()]).stats().ranks, None)
    return found


def test_a_session_begins_on_all_ranks_or_on_none():
    one, other = on_ranks(2, refused_sessions)
    for found in (one, other):
        assert all(found[name][1] == {torch.float32} for name in ("policy", "max_grad_norm", "values"))
        assert "PolicyError: the ranks were given different values of policy" in found["policy"][0]
        assert "O2,dtype=float16 on rank 0; O2,dtype=bfloat16 on rank 1" in found["policy"][0]
        assert "this rank is not in the session's process_group" in found["another's group"][0]
        assert found["alone"][0] == 1
    for name, text in (("max_grad_norm", "max_grad_norm is -1.0"), ("values", "values do not fit float16")):
        assert text in other[name][0]
        assert one[name][0].startswith("DistributedError: rank 1 refused the session")
        assert text in one[name][0]


def added():
    rank = dist.get_rank()
    model = model_of()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD([model[0].weight], lr=0.1), "O1,emulate=true")
    rest = [param for name, param in model.named_parameters() if name != "0.weight"]
    other = torch.optim.SGD(rest, lr=0.1)
    refused = text_of(lambda: amp.add(torch.optim.SGD(model_of().parameters(), lr=0.1) if rank else other))
    free = not other._optimizer_step_pre_hooks
    unlike = text_of(lambda: amp.add(torch.optim.Adam(rest) if rank else torch.optim.SGD(rest, lr=0.1)))
    amp.add(other)
    return refused, free, unlike, len(list(amp.master_params()))


def test_optimizers_are_added_on_all_ranks_or_on_none():
    one, two = on_ranks(2, added)
    assert "parameters that are not the models'" in two[0]
    assert one[0].startswith("DistributedError: rank 1 refused")
    assert "parameters that are not the models'" in one[0]
    for _, free, unlike, count in (one, two):
        assert free
        assert "the ranks were given different values of optimizers" in unlike
        assert count == len(list(model_of().parameters()))


def sharded_otherwise():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    partial = text_of(lambda: session_of(model))
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    pair = dist.new_group([0, 1])
    return (
        partial,
        text_of(lambda: session_of(model, process_group=alone)),
        text_of(lambda: session_of(model, process_group=pair)),
    )


def test_parameters_that_are_sums_or_lie_elsewhere_are_refused_by_name():
    for partial, elsewhere, together in on_ranks(2, sharded_otherwise):
        assert "a parameter is a sum over ranks that was never taken" in partial
        assert "weight, placements (Partial(sum),)" in partial
        assert "sharded over ranks that are not in the session's process group" in elsewhere
        assert together == ""


def of_another_device():
    consensus = Consensus.of()
    return text_of(lambda: consensus.require(torch.device("cuda")))


def test_a_device_without_a_backend_is_refused():
    for text in on_ranks(2, of_another_device, backend="cpu:gloo"):
        assert "the process group cannot exchange tensors of cuda" in text
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in text


# Overflows that end a run ---------------------------------------------------------------------------------------


def overflowing(reaction, wrap):
    """Let rank 1 overflow from the second step on, and tell what each rank raises, in which step, and what it says."""
    policy = dataclasses.replace(Policy.O1("float16"), loss_scale=LossScale.dynamic(init=4.0, floor=2.0, patience=2))
    model = model_of()
    wrapped = DistributedDataParallel(model) if wrap == "ddp" else model
    amp = session_of(wrapped, policy, on_overflow=reaction)
    said, where = "", []
    for step in range(1, 9):
        try:
            is_bad = dist.get_rank() == 1 and step > 1
            with amp.autocast():
                rows = torch.full((3, 4), 1e5 if is_bad and reaction != "skip" else 1.0)
                loss = wrapped(rows).float().square().mean()
            amp.backward(loss)
            if is_bad and reaction == "skip":
                model[0].bias.grad[0] = torch.inf
            where.append(str(amp.step().overflow).splitlines()[0])
            amp.zero_grad()
        except Exception as error:
            said = f"{type(error).__name__} in step {step}: {error}"
            break
    return said, where


def all_overflowing():
    return {case: overflowing(*case) for case in (("raise", "none"), ("skip", "none"), ("explain", "ddp"))}


def test_ranks_end_alike_where_one_overflows_and_say_which():
    one, other = on_ranks(2, all_overflowing)
    for said, _ in (one["raise", "none"], other["raise", "none"]):
        assert said.startswith("NumericsError in step 2: the gradients are not finite"), said
        assert "first on rank 1" in said
        assert "the loss itself is not finite" in said
    for said, _ in (one["skip", "none"], other["skip", "none"]):
        assert said.startswith("ScaleCollapsed in step 5: the loss scale collapsed"), said
        assert "step 4 on rank 1" in said
    for said, _ in (one["explain", "ddp"], other["explain", "ddp"]):
        assert said.startswith("NumericsError in step 4: the loss was not finite for 2 steps in a row"), said
        assert "step 3 on rank 1" in said
    # The batch is run again on each rank, and reduces nothing: only one of them finds a cause.
    assert one["explain", "ddp"][1] == ["None"] * 3
    assert other["explain", "ddp"][1][0] == "None"
    assert all(
        "the first non-finite tensor: input 0 cast to float16" in text for text in other["explain", "ddp"][1][1:]
    )


def explained_shards():
    return text_of(lambda: session_of(fully_shard(model_of()), on_overflow="explain"))


def test_what_all_ranks_would_have_to_gather_is_not_explained_on_one():
    for said in on_ranks(2, explained_shards):
        assert said.startswith("UnsupportedError: an overflow in a model that fully_shard has sharded cannot be expl")


def an_account_with(word):
    """Read the account of a step, as it comes from an accelerator after the step, in which rank 1 had a problem."""
    amp = session_of(model_of())
    consensus, one = amp._core.consensus, torch.ones(())
    heard = Heard(consensus=consensus, blame=one * 0, problem=one * Problem(PROBLEMS.index(word), 1).number(2))
    outcome = StepOutcome(
        verdict=Verdict.of_flags(one, None, torch.device("cpu")), params=[], scale=one, next_scale=one, after={},
        loss_failed=one > 0, heard=heard,
    )  # fmt: skip
    stats = amp._core.stats
    stats.note(outcome, stats.packed(outcome))
    return text_of(stats.check), amp.stats().skipped


def accounts():
    return an_account_with("StateError"), an_account_with("no gradient")


def test_the_host_learns_of_another_rank_s_error_from_the_account_of_the_step():
    for (said, skipped), vote in on_ranks(2, accounts):
        assert said.startswith("DistributedError: rank 1 ended step 1 with a StateError")
        assert skipped == 1
        assert vote == ("", 1)


def wrapped_otherwise():
    """Let wrappers reduce over all ranks, or over this one, and sessions step alone; what backward passes say."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    found = []
    for options in ({}, {"process_group": alone}):
        for place in (lambda model, wrapper: model, lambda model, wrapper: wrapper):
            model = model_of()
            wrapper = DistributedDataParallel(model, **options)
            amp = session_of(place(model, wrapper), process_group=alone)
            found.append([text_of(lambda: amp.backward(loss_of(amp, wrapper, 0))) for _ in range(2)])  # noqa: B023
    return found


def test_wrappers_that_reduce_over_other_ranks_are_refused_each_time():
    for rank, (*refused, one, other) in enumerate(on_ranks(2, wrapped_otherwise)):
        for text in (text for texts in refused for text in texts):
            assert "PolicyError: DistributedDataParallel reduces gradients with ranks that are not in the" in text
            assert f"where  rank {1 - rank}\n" in text
        assert one == other == ["", ""]


def initialised_late(store):
    model = model_of()
    amp = session_of(model)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    wrapper = DistributedDataParallel(model)
    late = text_of(lambda: amp.backward(loss_of(amp, wrapper, 0)))
    amp.zero_grad()
    amp.close()
    amp = session_of(model)
    return late, text_of(lambda: amp.backward(loss_of(amp, wrapper, 0)))


def test_ranks_that_appear_after_the_session_began_are_refused(tmp_path):
    for rank, (late, again) in enumerate(on_ranks(2, initialised_late, tmp_path / "store", backend=None)):
        assert "StateError: torch.distributed was initialised after the session began" in late
        assert f"where  rank {rank} of 2" in late
        assert "init_process_group() first, then MixedPrecision" in late
        assert again == ""


def test_what_is_no_process_group_and_no_flag_is_refused():
    with pytest.raises(mezzo.StateError, match="process_group= names ranks, and there are none"):
        session_of(model_of(), process_group="x")
    with pytest.raises(mezzo.PolicyError, match="check_ranks is 'yes', not True or False"):
        session_of(model_of(), check_ranks="yes")
    (said,) = on_ranks(1, wrong_groups)
    assert said[0].startswith("PolicyError: process_group is 'x', not a process group")
    assert said[1].startswith("PolicyError: stage_group is 3, not a process group")


def wrong_groups():
    model = model_of()
    return [text_of(lambda: session_of(model, **wrong)) for wrong in ({"process_group": "x"}, {"stage_group": 3})]  # noqa: B023
