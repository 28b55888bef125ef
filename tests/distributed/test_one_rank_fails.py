"""A rank that refuses, raises, ends or collapses ends all with an error that names it and the step; none hangs."""

import torch
import torch.distributed as dist

import mezzo

from .ranks import on_ranks
from .test_verdict import averaged, loss_of, model_of


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
