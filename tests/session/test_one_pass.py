"""Sessions whose optimizer is mezzo's own: weights stored once, exact through checkpoints and changes of policy."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import LossScale, MixedPrecision, Policy, optim
from mezzo.errors import NumericsError, PolicyError, StateError

from .loops import assert_same

O2 = ["O2,dtype=bfloat16,emulate=true", "O2,dtype=float16,emulate=true"]


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


def session(policy, make=optim.AdamW, **options):
    model = network()
    optimizer = make(model.parameters(), lr=1e-2)
    return model, optimizer, MixedPrecision(model, optimizer, policy, **options)


def backward(model, amp, number):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)


def train(model, amp, steps, micro_batches=1):
    for step in steps:
        for part in range(micro_batches):
            backward(model, amp, 100 * step + part)
        amp.step()
        amp.zero_grad()


def exact(model, optimizer):
    return [optimizer.master_of(param) for param in model.parameters()]


def torchs(params, lr):
    return torch.optim.AdamW(params, lr=lr)


@pytest.mark.parametrize("policy", O2)
@pytest.mark.parametrize("master", ["split", "full"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_is_masters_and_torchs_adamw_but_for_roundings(policy, master, micro_batches):
    one, other = (
        session(policy, lambda p, lr: optim.AdamW(p, lr=lr, master=master), max_grad_norm=1.0),
        session(policy, torchs, max_grad_norm=1.0),
    )
    for model, _, amp in (one, other):
        train(model, amp, range(10), micro_batches)
        amp.close()
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("policy", O2)
def test_not_a_bit_of_the_initialisation_is_lost(policy):
    plain = network()
    model, optimizer, amp = session(policy)
    for before, after in zip(plain.parameters(), exact(model, optimizer), strict=True):
        assert (before - after).abs().max() <= 2**-40 if "float16" in policy[:14] else torch.equal(before, after)
    amp.close()
    for before, after in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0 if "bfloat16" in policy else 2**-40)
    assert all("remainder" not in state for state in optimizer.state.values())


@pytest.mark.parametrize("policy", O2)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_resuming_is_bit_exact_in_every_order(policy, order):
    model, optimizer, amp = session(policy)
    train(model, amp, range(4))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    parts = session(policy)
    for place in order:
        parts[place].load_state_dict(states[place])
    train(model, amp, range(4, 10))
    train(parts[0], parts[2], range(4, 10))
    for one, other in zip(exact(model, optimizer), exact(parts[0], parts[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pair", list(itertools.permutations(["O1 torch", "O2 torch", "O2 split"], 2)))
def test_fp32_weights_survive_a_change_of_policy_or_optimizer(pair):
    """The session's state is loaded first and last; what a step then sees is the saved FP32 values."""
    kinds = {"torch": torchs, "split": optim.AdamW}

    def build(kind):
        level, _, name = kind.partition(" ")
        return session(f"{level},dtype=bfloat16,emulate=true", kinds[name])

    def weights(model, optimizer, amp):
        masters = amp._core.weights.named_masters()
        own = isinstance(optimizer, optim.AdamW)
        return [
            optimizer.master_of(p) if own else masters.get(name, p).detach().clone()
            for name, p in model.named_parameters()
        ]

    before, after = pair
    saved = build(before)
    train(saved[0], saved[2], range(4))
    states = copy.deepcopy([part.state_dict() for part in saved])
    for order in ((0, 1, 2), (2, 0, 1)):
        loaded = build(after)
        for place in order:
            loaded[place].load_state_dict(states[place])
        for one, other in zip(weights(*saved), weights(*loaded), strict=True):
            assert torch.equal(one, other), order


@pytest.mark.parametrize("pair", list(itertools.permutations(["bfloat16", "float16"])))
@pytest.mark.parametrize("masters", list(itertools.product(["split", "full"], repeat=2)))
def test_masters_survive_another_low_precision_in_every_order(pair, masters):
    def build(dtype, master):
        return session(f"O2,dtype={dtype},emulate=true", lambda p, lr: optim.AdamW(p, lr=lr, master=master))

    saved = build(pair[0], masters[0])
    train(saved[0], saved[2], range(4))
    states = copy.deepcopy([part.state_dict() for part in saved])
    for order in itertools.permutations(range(3)):
        loaded = build(pair[1], masters[1])
        for place in order:
            loaded[place].load_state_dict(states[place])
        for one, other in zip(exact(*saved[:2]), exact(*loaded[:2]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2.0**-40 if "float16" in pair[1][:7] else 0)


def test_a_state_that_turns_fused_off_costs_a_sync_and_no_crash():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    amp = MixedPrecision(model, optimizer, O2[0])
    train(model, amp, range(2))
    optimizer.load_state_dict(optim.AdamW(network().parameters(), lr=1e-2).state_dict())
    optimizer.load_state_dict(torch.optim.AdamW(network().parameters(), lr=1e-2, fused=False).state_dict())
    train(model, amp, range(2, 4))
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("policy", O2)
@pytest.mark.parametrize("master", ["split", "full"])
def test_a_clamp_of_the_weights_stays(policy, master):
    model, _, amp = session(policy, lambda p, lr: optim.SGD(p, lr=0.0, master=master))
    train(model, amp, range(2))
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.01, 0.01)
    train(model, amp, range(2, 4))
    assert max(param.abs().max().item() for param in model.parameters()) < 0.0101


@pytest.mark.parametrize("policy", O2)
def test_micro_batches_are_summed_in_fp32(policy):
    model, _, amp = session(policy)
    backward(model, amp, 0)
    assert model[0].weight.grad.dtype == model[0].weight.dtype
    first = model[0].weight.grad.float()
    backward(model, amp, 1)
    assert model[0].weight.grad.dtype == torch.float32
    other, _, single = session(policy)
    with torch.no_grad():
        other[1].load_state_dict(network()[1].state_dict())
    backward(other, single, 1)
    assert (model[0].weight.grad - first - other[0].weight.grad.float()).abs().max() <= 2e-2 * first.abs().max()
    amp.step()
    amp.zero_grad()
    backward(model, amp, 2)  # the next window starts as the backward pass makes gradients
    assert model[0].weight.grad.dtype == model[0].weight.dtype


def test_unscaled_gradients_are_fp32_and_edits_count():
    model, optimizer, amp = session(O2[1])
    backward(model, amp, 0)
    amp.unscale_()
    gradients = [param.grad for param in amp.master_params()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    before = exact(model, optimizer)
    for gradient in gradients:
        gradient.zero_()
    step = amp.step()
    assert not step.skipped
    assert step.grad_norm == 0
    for old, new in zip(before, exact(model, optimizer), strict=True):
        torch.testing.assert_close(new, old * (1 - 1e-2 * 1e-2), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("policy", O2)
@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam, optim.SGD, optim.Lion])
def test_an_overflow_writes_nothing(policy, make):
    policy = Policy.parse(policy).evolve(loss_scale=LossScale.dynamic(init=1024))
    model, optimizer, amp = session(policy, make)
    train(model, amp, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    backward(model, amp, 7)
    kept = model[1].running_mean.clone()
    model[0].weight.grad[0, 0] = math.inf
    step = amp.step()
    assert step.skipped
    assert (step.scale, step.next_scale) == (1024, 512)
    model[1].running_mean.copy_(before[0]["1.running_mean"])
    model[1].running_var.copy_(before[0]["1.running_var"])
    model[1].num_batches_tracked.copy_(before[0]["1.num_batches_tracked"])
    assert not torch.equal(kept, model[1].running_mean)
    assert_same(before, (model.state_dict(), optimizer.state_dict()["state"]))


def test_gradients_are_read_and_never_written():
    model, _, amp = session(O2[1], max_grad_norm=0.1)
    backward(model, amp, 0)
    before = [param.grad.clone() for param in model.parameters()]
    amp.step()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), before, strict=True))
    with pytest.raises(StateError, match="the last step's gradients are still there"):
        backward(model, amp, 1)


def test_bytes_between_steps_are_fourteen_a_parameter():
    model = nn.Linear(256, 256, bias=False)
    optimizer = optim.AdamW(model.parameters())
    amp = MixedPrecision(model, optimizer, O2[0])
    with amp.autocast():
        loss = model(torch.randn(4, 256)).square().mean()
    amp.backward(loss)
    amp.step()
    state = [value for value in optimizer.state[model.weight].values() if value.dim()]
    kept = [model.weight, model.weight.grad, *state]
    assert sum(tensor.nbytes for tensor in kept) == 14 * model.weight.numel()


def test_weights_too_large_for_split_storage_are_named_and_nothing_changes():
    model = network()
    with torch.no_grad():
        model[3].weight[0, 0] = 65510.0  # FP16 rounds it to 65504, and split storage holds no more than that
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NumericsError, match=r"too large for split storage in float16(.|\n)*3\.weight"):
        MixedPrecision(model, optim.AdamW(model.parameters()), O2[1])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_an_o2_session_refuses_an_optimizer_that_keeps_no_masters():
    model = network()
    with pytest.raises(PolicyError, match="O2 keeps FP32 masters, and the optimizer is told to keep none"):
        MixedPrecision(model, optim.AdamW(model.parameters(), master=None), O2[0])
    assert {param.dtype for param in model.parameters()} == {torch.float32}
