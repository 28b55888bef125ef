"""``unscale_``: the user's own look at the gradients, and edits of them, before the step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision, PolicyError, StateError

from ...support.tables import thinned
from ..loops import Syncs, assert_same, backward, batch, network, session, sgd, weights

SCALED = [
    "O0,loss_scale=dynamic",
    "O1,emulate=true",
    "O2,emulate=true",
    "O1,dtype=bfloat16,emulate=true,loss_scale=1024",
    "O2,dtype=bfloat16,emulate=true,loss_scale=dynamic",
]
EVERY = ["O0", "O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true", *SCALED]


def gradients(amp):
    return [p.grad.clone() for p in amp.master_params()]


def plain_gradients(*numbers):
    """Return the gradients of some batches as torch makes and sums them in FP32."""
    model = network()
    for number in numbers:
        x, y = batch(number)
        functional.cross_entropy(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def near(mine, true, bits):
    """Whether gradients are the true ones up to some ten roundings to so many bits, following one another."""
    found, reference = (torch.cat([g.flatten() for g in each]) for each in (mine, true))
    return torch.linalg.vector_norm(found - reference) < 10 * 2.0**-bits * torch.linalg.vector_norm(reference)


# What there is to see -----------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("policy", EVERY)
def test_gradients_are_fp32_and_true(policy, numbers):
    model, _, amp = session(policy)
    for number in numbers:
        backward(amp, model, number)
    amp.unscale_()
    found = gradients(amp)
    assert {g.dtype for g in found} == {torch.float32}
    if policy.startswith("O0"):
        assert_same(found, plain_gradients(*numbers))
    else:
        assert near(found, plain_gradients(*numbers), bits=11 if amp.policy.dtype == torch.float16 else 8)


def test_masters_get_the_low_gradients_divided_by_the_scale_in_fp32_bit_for_bit():
    model, _, amp = session("O2,emulate=true,loss_scale=3000")
    backward(amp, model, 0)
    low = [p.grad.clone() for p in model.parameters()]
    assert torch.float16 in {g.dtype for g in low}
    amp.unscale_()
    over_scale = torch.tensor(1 / 3000, dtype=torch.float64).float()  # rounded once
    assert_same(gradients(amp), [g.float() * over_scale for g in low])
    assert all(p.grad is master.grad for p, master in zip(model.parameters(), amp.master_params(), strict=True))


@pytest.mark.parametrize("policy", EVERY)
def test_it_costs_no_host_sync(policy):
    model, _, amp = session(policy, lambda params: sgd(params, fused=True))
    backward(amp, model, 0)
    amp.step()  # fused SGD makes its momentum in a real step, which asks once
    amp.zero_grad()
    with Syncs() as syncs:
        backward(amp, model, 1)
        amp.unscale_()
        amp.step()
    assert syncs.count == 0


# What the step makes of it ------------------------------------------------------------------------------


def norm_clipped(params):
    nn.utils.clip_grad_norm_(params, 0.3)


def value_clipped(params):
    nn.utils.clip_grad_value_(params, 0.01)


def noisy(params):
    generator = torch.Generator().manual_seed(7)
    for p in params:
        p.grad.add_(torch.randn(p.grad.shape, generator=generator), alpha=0.01)


def normalised(params):
    for p in params:
        p.grad.div_(p.grad.norm())


def replaced(params):
    for p in params:
        p.grad = p.grad.sign()


def one_dropped(params):
    params[0].grad = None


def zeroed_by_assignment(params):
    params[0].grad = torch.zeros_like(params[0])


EDITS = [norm_clipped, value_clipped, noisy, normalised, replaced, one_dropped, zeroed_by_assignment]
SIDES = {"masters": lambda model, amp: [*amp.master_params()], "model": lambda model, amp: [*model.parameters()]}


@pytest.mark.parametrize("policy, edit, fused, side", thinned(EVERY, EDITS, [False, True], SIDES, every=2))
def test_the_step_takes_the_gradients_as_they_were_edited(policy, edit, fused, side):
    """Plain SGD fed the very gradients that the edit left is the oracle, whatever the precision."""
    model, _, amp = session(policy, lambda params: sgd(params, fused=fused))
    copies = [p.requires_grad_() for p in weights(amp)]
    plain = torch.optim.SGD(copies, lr=0.1, momentum=0.9, fused=fused)
    for number in range(3):
        backward(amp, model, number)
        amp.unscale_()
        edited = SIDES[side](model, amp)
        edit(edited)
        for mine, theirs in zip(edited, copies, strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in copies if p.grad is not None]))
        step = amp.step()
        amp.zero_grad()
        plain.step()
        assert step.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert_same(weights(amp), copies)
    for p, master in zip(model.parameters(), amp.master_params(), strict=True):
        assert torch.equal(p, master.to(p.dtype))


@pytest.mark.parametrize("policy", EVERY)
def test_the_user_s_clipping_is_the_session_s(policy):
    (model, _, amp), (other, _, clipping) = session(policy), session(policy, max_grad_norm=0.3)
    for number in range(3):
        backward(amp, model, number)
        amp.unscale_()
        nn.utils.clip_grad_norm_(amp.master_params(), 0.3)
        amp.step()
        amp.zero_grad()
        backward(clipping, other, number)
        clipping.step()
        clipping.zero_grad()
    for mine, theirs in zip(amp.master_params(), clipping.master_params(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", EVERY)
def test_looking_changes_nothing(policy):
    runs = []
    for looks in (0, 1, 2):
        model, _, amp = session(policy, max_grad_norm=0.3)
        for number in range(4):
            backward(amp, model, number)
            for _ in range(looks):
                amp.unscale_()
            amp.step()
            amp.zero_grad()
        runs.append((weights(amp), amp.stats()))
    assert_same(runs[1], runs[2])
    for a, b in zip(runs[0][0], runs[1][0], strict=True):  # one product instead of two
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("policy", SCALED)
def test_an_overflow_that_the_user_mends_is_stepped_with_and_still_lowers_the_scale(policy):
    model, _, amp = session(policy)
    backward(amp, model, 0)
    model[0].weight.grad[0, :2] = torch.tensor([float("inf"), float("nan")])
    amp.unscale_()
    before = weights(amp)
    assert not all(torch.isfinite(g).all() for g in gradients(amp))
    for p in amp.master_params():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    step = amp.step()
    assert not step.skipped
    assert torch.isfinite(step.grad_norm)
    assert not before[1].equal(weights(amp)[1])
    dynamic = amp.policy.loss_scale.mode == "dynamic"
    assert step.next_scale.item() == step.scale.item() * (0.5 if dynamic else 1)


@pytest.mark.parametrize("policy", EVERY)
def test_an_infinity_that_the_user_makes_is_found(policy):
    model, _, amp = session(policy)
    backward(amp, model, 0)
    amp.unscale_()
    before = weights(amp)
    next(amp.master_params()).grad[0, 0] = float("inf")
    assert bool(amp.step().skipped)
    assert_same(before, weights(amp))


# Between backward passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_later_backward_passes_are_added_to_unscaled_gradients(policy):
    (model, _, amp), (other, _, whole) = session(policy), session(policy)
    backward(amp, model, 0)
    amp.unscale_()
    backward(amp, model, 1)
    amp.unscale_()
    backward(amp, model, 2)
    amp.unscale_()
    for number in range(3):
        backward(whole, other, number)
    whole.unscale_()
    for mine, theirs in zip(gradients(amp), gradients(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    if policy.startswith("O0"):
        assert_same(gradients(amp), plain_gradients(0, 1, 2))
    assert not amp.step().skipped
    assert amp.stats().steps == 1


@pytest.mark.parametrize("policy", EVERY)
def test_an_edit_is_kept_when_a_backward_pass_follows(policy):
    model, _, amp = session(policy)
    backward(amp, model, 0)
    amp.unscale_()
    first = gradients(amp)
    for p in amp.master_params():
        p.grad.mul_(0.5)
    backward(amp, model, 1)
    amp.unscale_()
    found = gradients(amp)
    amp.zero_grad()
    backward(amp, model, 1)
    amp.unscale_()
    for mine, half, rest in zip(found, first, gradients(amp), strict=True):
        torch.testing.assert_close(mine, half * 0.5 + rest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", SCALED)
def test_an_overflow_before_unscale_still_skips_after_another_backward(policy):
    model, _, amp = session(policy)
    before = weights(amp)
    backward(amp, model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    amp.unscale_()
    backward(amp, model, 1)
    assert bool(amp.step().skipped)
    assert_same(before, weights(amp))


# Some of the optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", EVERY)
def test_one_of_two_optimizers(policy, fused):
    def pair(looks):
        model = network()
        optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.1, fused=fused),
            torch.optim.AdamW([*model[2].parameters(), *model[3].parameters()], lr=0.01, fused=fused),
        ]
        amp = MixedPrecision(model, optimizers, policy, max_grad_norm=0.3)
        for number in range(3):
            backward(amp, model, number)
            if looks:
                scaled = [p.grad.clone() for p in model[3].parameters()]
                amp.unscale_(optimizers[number % 2])
                if number % 2 == 0:
                    assert_same(scaled, [p.grad for p in model[3].parameters()])
                    mine = [p.grad for p in amp.master_params(optimizers[0])]
                    assert near(mine, plain_gradients(number)[:2], bits=7) or number
            amp.step()
            amp.zero_grad()
        return weights(amp)

    for mine, theirs in zip(pair(True), pair(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_each_of_two_optimizers_may_step_alone_after_unscale():
    model = network()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3])]
    amp = MixedPrecision(model, pair, "O2,emulate=true")
    before = copy.deepcopy(model.state_dict())
    backward(amp, model, 0)
    amp.unscale_(pair[0])
    with pytest.raises(PolicyError, match="not an optimizer of this session"):
        amp.unscale_(torch.optim.SGD(model[2].parameters(), lr=0.1))
    amp.step(pair[1])
    with pytest.raises(StateError, match=r"unscale_\(\) before backward\(\)"):
        amp.unscale_(pair[1])
    assert torch.equal(before["0.weight"], model[0].weight)
    amp.step(pair[0])
    assert not torch.equal(before["0.weight"], model[0].weight)


# Mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_there_must_be_gradients(policy):
    model, _, amp = session(policy)
    says = r"unscale_\(\) before backward\(\)\n  write  amp.backward\(loss\), then amp.unscale_\(\)"
    with pytest.raises(StateError, match=says):
        amp.unscale_()
    backward(amp, model, 0)
    amp.step()
    with pytest.raises(StateError, match=says):
        amp.unscale_()
    amp.zero_grad()
    backward(amp, model, 0)
    amp.zero_grad()
    with pytest.raises(StateError, match=says):
        amp.unscale_()
    amp.close()
    with pytest.raises(StateError, match=r"unscale_\(\) after close\(\)"):
        amp.unscale_()


def test_all_gradients_taken_away_afterwards():
    model, _, amp = session("O2,emulate=true")
    backward(amp, model, 0)
    amp.unscale_()
    for p in amp.master_params():
        p.grad = None
    with pytest.raises(StateError, match="no parameter has a gradient"):
        amp.step()


def test_an_optimizer_s_own_step_is_refused_after_unscale_too():
    model, _, amp = session("O2,emulate=true")
    backward(amp, model, 0)
    amp.unscale_()
    before = copy.deepcopy(model.state_dict()), weights(amp)
    with pytest.raises(StateError, match="behind the session's back"):
        amp._core.optimizers[0].step()
    assert_same(before, (model.state_dict(), weights(amp)))
    amp.step()
