"""``change()`` on two ranks: beside DistributedDataParallel, of sharded models, and where one rank does otherwise."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.distributed import exchange
from mezzo.session import change

from .ranks import on_ranks, text_of
from .twins import without_ties

O1, HALVES = "O1,bf16,emulate=true", "O2,bf16,emulate=true"
FP16 = "O2,fp16,emulate=true,loss_scale=dynamic(init=64)"
RULED = "O2,bf16,emulate=true,fp32_module=0"


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3))
    without_ties(model, torch.bfloat16)
    return model


def batch(number):
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def train(amp, model, number):
    x, y = batch(number)
    with amp.autocast():
        out = model(x)
    amp.backward(nn.functional.cross_entropy(out.float(), y))
    step = amp.step()
    amp.zero_grad()
    return float(step.grad_norm)


def begun(wrapping, policy, values=None, moments=None):
    """A model on ranks with its optimizer and session, from some FP32 values and an optimizer's state."""
    model = network()
    if values is not None:
        model.load_state_dict(values)
    called = model
    if wrapping == "sharded":
        model = called = mezzo.fully_shard(model, policy, wrap=nn.Linear)
    made = mezzo.optim.AdamW(model.parameters(), lr=1e-2)
    if moments is not None:
        made.load_state_dict(moments)
    amp = mezzo.MixedPrecision(model, made, policy)
    if wrapping == "wrapped":
        called = DistributedDataParallel(model)
    return model, called, made, amp


def whole(model):
    values = model.state_dict()
    return {name: getattr(value, "full_tensor", value.clone)().clone() for name, value in values.items()}


def rehearsed(wrapping, before, after):
    """The end of a run that changes, and of one that begins where it changed."""
    model, called, made, amp = begun(wrapping, before)
    for number in range(3):
        train(amp, called, number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.change(after)
    values, moments = whole(model), copy.deepcopy(made.state_dict())
    norms = [train(amp, called, number) for number in range(3, 6)]
    end = whole(model)
    amp.close()
    twin, its_called, _, other = begun(wrapping, after, values, moments)
    its_norms = [train(other, its_called, number) for number in range(3, 6)]
    its_end = whole(twin)
    other.close()
    is_same = norms == its_norms and all(torch.equal(end[name], its_end[name]) for name in end)
    return is_same, [str(warning.message).splitlines()[0] for warning in caught], values["0.weight"]


STAYS = "weights stay stored as they were beside DistributedDataParallel"


@pytest.mark.parametrize(
    "wrapping, before, after, warned",
    [
        ("wrapped", O1, "O1,bf16,emulate=true,fp32_module=0", []),
        ("wrapped", HALVES, FP16, []),
        ("wrapped", HALVES, O1, [STAYS]),
        ("wrapped", O1, HALVES, [STAYS]),
        ("sharded", O1, HALVES, []),
        ("sharded", HALVES, O1, []),
        ("sharded", HALVES, FP16, []),
        ("sharded", FP16, RULED, []),
        ("sharded", HALVES, "O2,bf16,emulate=true,nvfp4_module=*", []),
    ],
)
def test_a_run_goes_on_as_one_that_begins_there(wrapping, before, after, warned):
    (one, first, here), (two, second, there) = on_ranks(2, rehearsed, wrapping, before, after)
    assert (one, two) == (True, True)
    assert torch.equal(here, there)
    assert first == second == warned


def attempted(amp, how):
    """What a rank says where the ranks do not do the same."""
    rank, plain = dist.get_rank(), change._carry_scale
    policy = FP16
    if how == "two texts":
        policy = [FP16, RULED][rank]
    elif how == "refused" and rank == 1:
        policy = f"{FP16},fp32_module=nowhere"
    elif how == "low":
        policy = "O3,bf16,emulate=true"
    elif how == "late" and rank == 1:
        change._carry_scale = lambda *_: 1 / 0
    try:
        return [] if how == "alone" and rank == 0 else [text_of(lambda: amp.change(policy))]
    finally:
        change._carry_scale = plain


def differing(wrapping, before, how):
    """What each rank says where the ranks do not do the same, and whether the run goes on as without it."""
    exchange.VOTE_SECONDS = 3.0
    ends, texts = [], []
    for attempts in (False, True):
        model, called, _, amp = begun(wrapping, before)
        train(amp, called, 0)
        texts += attempted(amp, how) if attempts else []
        assert str(amp.policy) == str(mezzo.Policy.of(before))
        norms = [train(amp, called, number) for number in (1, 2)]
        amp.change(RULED)
        ends.append((norms, train(amp, called, 3), whole(model)))
        amp.close()
    (one, norm, values), (other, its_norm, its_values) = ends
    is_same = one == other and norm == its_norm
    return texts, is_same and all(torch.equal(values[name], its_values[name]) for name in values)


WORDS = {
    "alone": [(), ("not all ranks have called change(policy) within 3 s", "rank 0")],
    "two texts": [("the ranks call change(policy) with different policies", "rank 0: O2,dtype=float16")] * 2,
    "refused": [("another rank cannot carry out change(policy)", "rank 1: the module glob"),
                ("PolicyError", "nowhere")],
    "low": [("16 bits alone",)] * 2,
    "late": [("another rank cannot carry out change(policy), which is carried out", "rank 1: division by zero"),
             ("ZeroDivisionError",)],
}  # fmt: skip


@pytest.mark.parametrize("wrapping", ["wrapped", "sharded"])
@pytest.mark.parametrize("how", WORDS)
def test_ranks_that_differ_keep_the_former_policy_and_train_on(wrapping, how):
    for (texts, is_same), words in zip(on_ranks(2, differing, wrapping, HALVES, how), WORDS[how], strict=True):
        assert is_same
        assert len(texts) == (len(words) > 0)
        assert all(word in text for text in texts for word in words), texts
