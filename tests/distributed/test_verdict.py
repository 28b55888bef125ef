"""One verdict for all ranks: the same steps skipped, the same scale and the same end, whichever rank saw the fault."""

import copy
import functools
import math
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.sharded import local

from .ranks import RankError, on_ranks, text_of

POLICY = "O1,dtype=float16"


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def session_of(model, policy=POLICY, **options):
    return mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, **options)


def averaged(model):
    """What DistributedDataParallel does, without its buckets."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def loss_of(amp, model, seed):
    torch.manual_seed(seed)
    with amp.autocast():
        return model(torch.randn(3, 4)).float().square().mean()


# Which rank saw it ------------------------------------------------------------------------------------------


def a_step_with(fault, guilty):
    """Take a step in which one rank sees a fault, and one without; of each: skipped, scales; and the weights."""
    model = model_of()
    amp = session_of(model, max_grad_norm=1.0)
    is_guilty, seen = dist.get_rank() == guilty, []
    for step in range(2):
        loss = loss_of(amp, model, dist.get_rank())
        if fault == "loss" and is_guilty and step == 0:
            loss = loss * math.nan
        if fault == "grad":
            scaled = loss * (1e38 if is_guilty and step == 0 else 1)
            amp.grad(scaled, model[0].weight, create_graph=True)
        amp.backward(loss)
        averaged(model)
        if fault == "gradient" and is_guilty and step == 0:
            model[2].bias.grad[1] = -torch.inf
        result = amp.step()
        seen.append((bool(result.skipped), float(result.scale), float(result.next_scale)))
        amp.zero_grad()
    return seen, amp.stats().ranks, [param.detach().clone() for param in model.parameters()]


def a_plain_loop(guilty):
    """The same with plain gradients, in a loop's own calls."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp, seen = mezzo.attach(model, optimizer, POLICY), []
    for step in range(3):
        torch.manual_seed(dist.get_rank())
        loss = model(torch.randn(3, 4)).float().square().mean()
        loss.backward()
        averaged(model)
        if step == 1 and dist.get_rank() == guilty:
            model[0].weight.grad[0, 0] = torch.nan
        before = model[0].weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((torch.equal(before, model[0].weight), float(amp.loss_scale)))
    amp.detach()
    return seen, [param.detach().clone() for param in model.parameters()]


# A rank that cannot go on ---------------------------------------------------------------------------------


def a_refused_step(fault):
    """Refuse a step on rank 1; then take one on both, as if nothing had been."""
    model, guilty = model_of(), dist.get_rank() == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, POLICY)
    before = model[0].weight.detach().clone()
    amp.backward(loss_of(amp, model, dist.get_rank()))
    averaged(model)
    if guilty and fault == "no gradient":
        amp.zero_grad()
    elif guilty:
        optimizer.param_groups[0]["lr"] = float("nan")
    refusal = text_of(amp.step)
    same = torch.equal(model[0].weight, before)
    amp.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.1
    amp.backward(loss_of(amp, model, dist.get_rank()))
    averaged(model)
    after = amp.step()
    return refusal, same, (bool(after.skipped), float(after.scale)), model[0].weight.detach()


class Full(torch.optim.SGD):
    """Runs out of memory in its first steps, before it has written anything."""

    left = 0

    def step(self, closure=None):
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)


def steps_without_memory(guilty):
    """What steps say, how often they fail on some ranks at first, and the weights; then those of a checkpoint."""
    model = model_of()
    optimizer = Full(model.parameters(), lr=0.1, momentum=0.9)
    amp = mezzo.MixedPrecision(model, optimizer, POLICY)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    optimizer.left, refusals = int(dist.get_rank() in guilty), []
    for number in (0, 0, 1, 2):
        amp.zero_grad()
        amp.backward(loss_of(amp, model, number + dist.get_rank()))
        averaged(model)
        refusals.append(text_of(amp.step))
    weights = [param.detach().clone() for param in model.parameters()]
    amp.zero_grad()
    for part, state in zip((model, optimizer, amp), saved, strict=True):
        part.load_state_dict(state)
    amp.backward(loss_of(amp, model, dist.get_rank()))
    averaged(model)
    return refusals, weights, text_of(amp.step)


# What it costs ----------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Write down the collectives that are called meanwhile, with their bytes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append((func._opname, sum(t.nbytes for t in args[0])))
        return func(*args, **(kwargs or {}))


def collectives_of_a_step():
    calls = {}
    for wrap in (DistributedDataParallel, fully_shard):
        wrapped = wrap(model_of())
        amp = session_of(wrapped, max_grad_norm=1.0)
        for _ in range(2):
            amp.backward(loss_of(amp, wrapped, 0))
            with Collectives() as counted:
                amp.step()
            amp.zero_grad()
        calls[wrap.__name__] = counted.calls
    return calls


# All of them, in one launch -------------------------------------------------------------------------------


def everything():
    return {
        "faults": {
            (fault, who): a_step_with(fault, who) for fault in ("none", "loss", "grad", "gradient") for who in (0, 1)
        },
        "plain": [a_plain_loop(guilty) for guilty in (0, 1)],
        "refused": {fault: a_refused_step(fault) for fault in ("no gradient", "an error")},
        "memory": {guilty: steps_without_memory(guilty) for guilty in ((), (0, 1), (1,))},
        "collectives": collectives_of_a_step(),
        "random": randomly_faulty(),
    }


@pytest.fixture(scope="module")
def of_two():
    """What :func:`everything` returns on each of two ranks."""
    return on_ranks(2, everything)


def test_what_one_rank_sees_decides_for_all(of_two):
    one, other = (rank["faults"] for rank in of_two)
    high, low = 2.0**16, 2.0**15
    # A loss that is not finite leaves the scale, and so does what it was computed from: that has a scale of its own.
    after = {"none": high, "loss": high, "grad": high, "gradient": low}
    for (fault, guilty), (seen, ranks, weights) in one.items():
        first, second = seen
        assert first[1:] == (high, after[fault]), fault
        assert second == (False, after[fault], after[fault]), fault
        assert fault == "grad" or first[0] is (fault != "none"), fault
        assert ranks == 2
        assert other[fault, guilty][0] == seen, fault
        assert all(map(torch.equal, weights, other[fault, guilty][2])), fault


def test_so_it_does_in_a_loop_s_own_calls(of_two):
    for (seen, weights), (theirs, others) in zip(*(rank["plain"] for rank in of_two), strict=True):
        assert [skipped for skipped, _ in seen] == [False, True, False]
        assert seen == theirs
        assert all(map(torch.equal, weights, others))


def test_a_rank_with_an_error_or_without_a_gradient_ends_the_step_of_all(of_two):
    one, other = (rank["refused"] for rank in of_two)
    for fault, mine in (("no gradient", "StateError: "), ("an error", "")):
        text, same, after, weight = one[fault]
        assert text.startswith("DistributedError: rank 1 ended step 1 with an error, or had no gradient left"), text
        assert other[fault][0].startswith(mine), other[fault][0]
        assert "DistributedError" not in other[fault][0]
        assert same
        assert other[fault][1]
        assert after == other[fault][2] == (False, 2.0**16)
        assert torch.equal(weight, other[fault][3])


def test_where_all_ranks_have_run_out_of_memory_alike_training_goes_on_and_where_one_has_it_ends(of_two):
    for rank, results in enumerate(of_two):
        (none, *_), (both, weights, _), (one, _, mended) = results["memory"].values()
        assert none == [""] * 4
        assert both == ["OutOfMemoryError: CUDA out of memory", "", "", ""]
        assert all(map(torch.equal, weights, of_two[0]["memory"][0, 1][1]))
        assert one[0] == ("OutOfMemoryError: CUDA out of memory" if rank else "")
        assert all(text.startswith("DistributedError: rank 1 ended step") for text in one[1:]), one
        assert mended == ""


def test_a_step_exchanges_a_few_numbers_once_and_twice_where_parameters_are_sharded(of_two):
    for rank in of_two:
        ((name, size),) = rank["collectives"]["DistributedDataParallel"]
        assert (name, size <= 64) == ("allreduce_", True)
        (norms, size), (name, least) = rank["collectives"]["fully_shard"]
        assert (norms, size, name, least <= 64) == ("allreduce_", 8 * 4, "allreduce_", True)  # a float64 a parameter


def lost():
    """Lose rank 1 in step 3, and tell what the other raises, and after how long."""
    model = model_of()
    amp = session_of(model)
    for step in range(1, 4):
        amp.backward(loss_of(amp, model, 0))
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        amp.step()
        amp.zero_grad()
    return time.monotonic() - begun


def test_a_rank_that_is_gone_ends_the_others():
    with pytest.raises(RankError) as failed:
        on_ranks(2, lost, fresh=True)
    assert failed.value.texts[1] == "was killed"
    assert (
        "DistributedError: the ranks could not agree on step 3\n  where  rank 0 of 2, after " in failed.value.texts[0]
    )


# Random faults --------------------------------------------------------------------------------------------

#: What a fault does to the scale; all skip the step.
SKIPS = {"gradient": "backs off", "backward": "backs off", "first micro-batch": "backs off", "own": "backs off",
         "forward": "stays", "loss": "stays"}  # fmt: skip
FLOOR, INIT, INTERVAL = 1.0, 1024.0, 5
SCALED = f"O1,dtype=float16,loss_scale=dynamic(init={INIT:g},interval={INTERVAL})"
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


def faults_of(seed, wrap, steps):
    """Return by step which fault comes, and on which rank: each of them once."""
    draw = random.Random(seed)
    kinds = [skip for skip in SKIPS if (skip, wrap) != ("own", "fsdp2")]  # there all ranks gather and reduce together
    return dict(zip(draw.sample(range(steps), len(kinds)), [(skip, draw.randrange(2)) for skip in kinds], strict=True))


def expected_trace(faults, steps):
    """Return what the rules say, written anew: of each step whether it is skipped, and its scale."""
    scale, clean, trace = INIT, 0, []
    for step in range(steps):
        fault, _ = faults.get(step, (None, None))
        trace.append((fault in SKIPS, scale))
        if fault and SKIPS[fault] == "stays":
            continue
        clean = 0 if fault else clean + 1
        if fault:
            scale = max(scale / 2, FLOOR)
        elif clean == INTERVAL:
            scale, clean = scale * 2, 0
    return trace


def trained(wrap, optimizer, seed, steps):
    """Train, and return of each step whether it was skipped and its scale; and the weights as this rank has them."""
    torch.manual_seed(0)
    net, rank, faults, trace = Net(), dist.get_rank(), faults_of(seed, wrap, steps), []
    model = DistributedDataParallel(net, find_unused_parameters=True) if wrap == "ddp" else fully_shard(net)
    amp = mezzo.MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), SCALED, max_grad_norm=1.0)
    torch.manual_seed(rank)
    for step in range(steps):
        planned, guilty = faults.get(step, (None, None))
        fault = planned if rank == guilty else None
        if step % 4 == 3 or planned == "first micro-batch":
            with amp.no_sync():
                amp.backward(faulty_loss(amp, model, "backward" if fault == "first micro-batch" else None))
        amp.backward(faulty_loss(amp, model, fault))
        if fault == "gradient":
            local(net.last.bias.grad)[0] = torch.inf
        result = amp.step()
        trace.append((bool(result.skipped), float(result.scale)))
        amp.zero_grad()
    return trace, [param.detach().clone() for param in map(local, net.parameters())]


def faulty_loss(amp, model, fault):
    """Compute a loss, with a fault in it or in what comes back."""
    rows = torch.randn(3, 4) * (1e6 if fault == "forward" else 1)
    with amp.autocast():
        out = model(rows, fault == "own")
    if fault in ("own", "backward"):
        out.register_hook(lambda gradient: gradient * torch.inf)
    loss = out.float().square().mean()
    return loss * torch.nan if fault == "loss" else loss


CASES = [("ddp", "SGD", 0), ("fsdp2", "mezzo.AdamW", 1), ("ddp", "fused AdamW", 2)]
STEPS = 30


def randomly_faulty():
    return [trained(*case, STEPS) for case in CASES]


def test_random_faults_of_single_ranks_leave_one_trace(of_two):
    one, other = (rank["random"] for rank in of_two)
    for case, (trace, weights), (theirs, their_weights) in zip(CASES, one, other, strict=True):
        wrap, _, seed = case
        assert trace == theirs, case
        assert trace == expected_trace(faults_of(seed, wrap, STEPS), STEPS), case
        assert all(weight.isfinite().all() for weight in (*weights, *their_weights)), case
        if wrap == "ddp":
            assert all(map(torch.equal, weights, their_weights)), case
