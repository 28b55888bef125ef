"""Sessions over `fully_shard`: with mezzo's optimizers bit for bit as over whole models, a fault in one part, state."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import mezzo
from mezzo import optim
from mezzo.sharded import local

from .ranks import on_ranks, text_of
from .test_fully_shard import BF16, batch, net, own, own_part, same, sharded, train

FIXED = [f"O2,dtype={dtype},loss_scale=1024,emulate=false" for dtype in ("bfloat16", "float16")]
MEZZO = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "momentum": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
}


def session(policy, name, model):
    optimizer = MEZZO[name](model.parameters())
    return model, optimizer, mezzo.MixedPrecision(model, optimizer, policy)


def loss_of(model, amp, step=0, part=own_part):
    x, y = map(part, batch(step))
    with amp.autocast():
        return (model(x) - y).square().mean()


# With mezzo's optimizers: bit for bit as whole models ------------------------------------------------------


def average_gradients(model):
    """Do what `fully_shard` does to gradients to those of a model that every rank has whole."""
    for param in model.parameters():
        mean = param.grad.to(torch.float32)
        dist.all_reduce(mean)
        param.grad_dtype = None
        param.grad = (mean / dist.get_world_size()).to(param.dtype)


def bits(tensor):
    here = local(tensor.detach()).clone()
    return here.dtype, tuple(here.shape), here.contiguous().view(-1).view(torch.uint8).tolist()


def own_shard(tensor):
    """This rank's part of a tensor that it has whole: the last rank may have none."""
    parts = tensor.detach().clone().chunk(dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else tensor[:0]


def like_replicas(cases):
    """Every weight, FP32 value and moment against sessions that have all of the model on each rank."""
    wrong = []
    for policy, name in cases:
        pairs = [session(policy, name, mezzo.fully_shard(net(), policy)), session(policy, name, net())]
        for step in range(2):
            for model, _, amp in pairs:
                amp.backward(loss_of(model, amp, step))
            average_gradients(pairs[1][0])
            for model, _, amp in pairs:
                if step == 1:
                    amp.unscale_()  # and clipped by hand
                    for param in model.parameters():
                        param.grad.mul_(0.5)
                amp.step()
                amp.zero_grad()
        (model, optimizer, amp), (other, theirs, its) = pairs
        for what in ("weights", "FP32 values"):
            for (key, mine), one in zip(model.named_parameters(), other.parameters(), strict=True):
                wrong += [(policy, name, what, key)] * (bits(mine) != bits(own_shard(one)))
                for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    if moment in theirs.state[one]:
                        have, want = optimizer.state[mine][moment], theirs.state[one][moment]
                        wrong += [(policy, name, moment, key)] * (bits(have) != bits(own_shard(want)))
            amp.close()
            its.close()
    return wrong


# Windows ---------------------------------------------------------------------------------------------------


def waiting():
    """What is said of a step while gradients wait to be reduced; and whether clearing reaches them."""
    other, its = sharded(BF16)
    train(other, its, steps=1)
    model, amp = sharded(BF16)
    with amp.no_sync():
        amp.backward(loss_of(model, amp, 5))
    refused = text_of(amp.step)
    amp.zero_grad()
    train(model, amp, steps=1)
    return refused, same(own(other), own(model))


class Rows(nn.Module):
    """A weight for each row, whose gradient is what comes in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x


#: FP16's smallest number, and what two ranks send in units of it: a mean in FP16 would lose it, before a sum or after.
SMALLEST = 2.0**-24
SENT = [[1, 1], [1, 2], [3, 0], [1001, 1004]]


def means():
    """The means of gradients over ranks, in units of the smallest number: of one pass, and of two."""
    policy = mezzo.Policy.O2("float16", loss_scale=1024.0, emulate=False)
    model = mezzo.fully_shard(Rows(), policy)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.0), policy)
    ours = torch.tensor([row[dist.get_rank()] for row in SENT]) * SMALLEST
    gradients = []
    for passes in (1, 2):
        for number in range(passes):
            with amp.no_sync() if number < passes - 1 else contextlib.nullcontext():
                with amp.autocast():
                    out = model(ours.float())
                amp.backward(out.sum() / 1024)
        amp.unscale_()
        gradients.append((model.weight.grad.full_tensor().float() * 1024 / SMALLEST).flatten().tolist())
        amp.step()
        amp.zero_grad()
    return gradients


# All of them, in one launch ---------------------------------------------------------------------------------


def everything():
    return {
        "replicas": like_replicas([(FIXED[0], "adamw"), (FIXED[1], "momentum")]),
        "waiting": waiting(),
        "means": means(),
    }


@pytest.fixture(scope="module")
def of_two():
    """What :func:`everything` returns on each of two ranks."""
    return on_ranks(2, everything)


def test_parts_are_trained_bit_for_bit_as_whole_models_are(of_two):
    assert [rank["replicas"] for rank in of_two] == [[], []]


def test_gradients_that_wait_are_not_stepped_with_and_are_cleared(of_two):
    for rank in of_two:
        refused, differing = rank["waiting"]
        assert refused.startswith("StateError: no parameter has a gradient")
        assert differing == []


def test_gradients_are_averaged_in_fp32_and_not_rounded(of_two):
    for once, twice in (rank["means"] for rank in of_two):
        assert once == [sum(row) / 2 for row in SENT]
        assert twice == [sum(row) for row in SENT]


# What a graph reaches ----------------------------------------------------------------------------------------


def in_five_lines(model, optimizer, loss_of):
    amp = mezzo.MixedPrecision(model, optimizer, "O0,loss_scale=1024")
    amp.backward(loss_of(model))
    amp.unscale_()
    return amp


def in_its_own_loop(model, optimizer, loss_of):
    amp = mezzo.attach(model, optimizer, "O0,loss_scale=1024")
    loss_of(model).backward()
    return amp


@pytest.mark.parametrize("style", [in_five_lines, in_its_own_loop])
def test_gathered_parameters_are_no_leaves_of_others_and_are_unscaled_once(alone, style):
    def loss_of(model):
        return model(x).square().mean()

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)), torch.randn(16, 8)
    plain = torch.autograd.grad(loss_of(model), list(model.parameters()))
    fully_shard(model)
    amp = style(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    gradients = [param.grad.full_tensor() for param in model.parameters()]
    amp.close()
    assert all(map(torch.equal, gradients, plain))
