"""The gradients between a backward pass and its step: sums in FP32, edits, leftovers, optimizers that share weights.

Orders of calls are ``tests/acceptance``'s; here stands what its oracle has no words for.
"""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision, StateError
from mezzo.session.session import engine_of

from .loops import (
    EVERY,
    FP32,
    LOW,
    OPTIMIZERS,
    Weights,
    assert_same,
    attached,
    backward,
    batch,
    gradients,
    loss_of,
    network,
    over,
    poisoned,
    session,
    spoil,
    train,
    weights,
)  # fmt: skip

SCALED = [policy for policy in EVERY if "loss_scale" in policy] + ["O2,dtype=bfloat16,emulate=true,loss_scale=1024"]
GROWING = "loss_scale=dynamic(init=256,interval=1)"


# Sums -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, large", [("O3", 2048.0), ("O3,dtype=bfloat16", 256.0)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, OPTIMIZERS["mezzo"]])
def test_low_gradients_are_summed_in_fp32_from_the_second_pass_on(policy, large, optimizer):
    """In the weights' format a large gradient plus 1 would be itself."""
    model = Weights(1)
    made = optimizer(model.parameters())
    amp = MixedPrecision(model, made, f"{policy},emulate=true,loss_scale=1", max_grad_norm=1.0)
    for _ in range(2):  # and the next window begins low again
        for number, value in enumerate([large, *[1.0] * 8]):
            amp.backward(model.loss(value))
            assert model.vectors[0].grad.dtype == (torch.float32 if number else amp.policy.dtype)
        assert amp.step().grad_norm.item() == large + 8
        amp.zero_grad()


def test_unscaled_gradients_are_the_low_ones_divided_by_the_scale_in_fp32():
    """Once, whatever looks: 1/3000 has an error of its own in sixteen bits."""
    model, _, amp = session("O2,emulate=true,loss_scale=3000", "mezzo")
    backward(amp, model, 0)
    low = gradients(model)
    assert torch.float16 in {g.dtype for g in low}
    over_scale = torch.tensor(1 / 3000, dtype=torch.float64).float()  # rounded once
    for _ in range(2):
        amp.unscale_()
        assert_same(gradients(model), [g.float() * over_scale for g in low])


@pytest.mark.parametrize("level", ["O0", "O1,emulate=true", "O2,emulate=true", "O2,dtype=bfloat16,emulate=true"])
def test_a_window_that_stays_open_while_the_scale_moves_is_rescaled_in_fp32(level):
    """One optimizer accumulates over three iterations, the other steps at each; the scale grows, or falls, between."""
    for strike in (None, 1):
        model = Weights(2, 2)
        (fast, slow), amp = over(model, f"{level},{GROWING}", [model.vectors[0]], [model.vectors[1]])
        scale = 256.0
        for step in range(3):
            amp.backward(model.loss(1, 2.0**step))
            if step == strike:
                spoil(model)
            early = amp.step(fast)
            assert (bool(early.skipped), early.scale.item()) == (step == strike, scale)
            scale *= 0.5 if step == strike else 2
            fast.zero_grad()
        late = amp.step(slow)
        assert [p.tolist() for p in model.vectors] == [[-3.0 + (strike is not None)] * 2, [-7.0, -7.0]]
        assert late.grad_norm.item() == pytest.approx(7.0 * 2**0.5)
        assert not late.skipped


@pytest.mark.parametrize("policy", SCALED[1:])
def test_an_overflow_that_unscaling_has_found_skips_whatever_is_done_after(policy):
    for mends in (lambda p: p.grad.nan_to_num_(0.0, 0.0, 0.0), lambda p: p.grad.zero_(), lambda p: None):
        for goes_on in (False, True):
            model, _, amp = session(policy)
            before = weights(amp)
            backward(amp, model, 0, spoilt=True)
            amp.unscale_()
            for param in model.parameters():
                mends(param)
            if goes_on:
                backward(amp, model, 1)
            step = amp.step()
            amp.zero_grad()
            assert bool(step.skipped)
            halves = 0.5 if amp.policy.loss_scale.mode == "dynamic" else 1.0
            assert float(step.next_scale) == float(step.scale) * halves
            assert_same(before, weights(amp))
            assert not train(amp, model, 2).skipped


CLEARS = {
    "session": lambda amp, optimizer, model: amp.zero_grad(),
    "optimizer": lambda amp, optimizer, model: optimizer.zero_grad(),
    "model": lambda amp, optimizer, model: model.zero_grad(),
}


@pytest.mark.parametrize("policy, clears", list(zip(EVERY, 2 * list(CLEARS), strict=True)))
def test_clearing_all_begins_a_new_window(policy, clears):
    """Its overflow is forgotten, its scale too; what comes after is as if nothing had been."""
    for looks in (False, True):
        (model, made, amp), (other, _, same) = session(policy), session(policy)
        for number in range(2):
            backward(amp, model, 7 + number, spoilt=True)
        if looks:
            amp.unscale_()
        CLEARS[clears](amp, made, model)
        assert all(p.grad is None for p in model.parameters())
        for driver, net in ((amp, model), (same, other)):
            assert not train(driver, net, 1, micro_batches=2).skipped
        assert_same(weights(amp), weights(same))


@pytest.mark.parametrize("how", ["in place", "anew"])
def test_zeros_in_the_place_of_an_overflow_begin_a_new_window_of_a_loop_of_its_own(how):
    for policy in EVERY:
        model = Weights(2, value=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with attached(model, optimizer, policy) as amp:
            out = model.vectors[0] * 1.0
            out.register_hook(lambda gradient: gradient * float("inf"))
            out.float().sum().backward()
            grad = model.vectors[0].grad
            model.vectors[0].grad = grad.zero_() if how == "in place" else torch.zeros_like(grad)
            model.loss(0.5).backward()
            optimizer.step()
            assert not amp.last_step.skipped
            assert model.vectors[0].tolist() == [0.5, 0.5]


# What users do with gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [policy for policy in LOW if policy.startswith("O2")])
def test_an_edit_of_master_gradients_is_one_of_the_models_parameters(policy):
    """As ``clip_grad_norm_(amp.master_params(), …)`` in apex's manner; torch's optimizer in FP32 is the oracle."""
    for optimizer in ("SGD", "AdamW", "mezzo"):
        runs = []
        for updated in (False, True):
            model, _, amp = session(policy, optimizer)
            copies = [nn.Parameter(value.clone()) for value in weights(amp)]
            plain = OPTIMIZERS["AdamW" if optimizer == "mezzo" else optimizer](copies)
            for number in range(2):
                backward(amp, model, number)
                amp.unscale_()
                params = list(amp.master_params() if updated else model.parameters())
                assert all(p.grad.dtype == torch.float32 for p in params)
                nn.utils.clip_grad_norm_(params, 0.1)
                for theirs, mine in zip(copies, params, strict=True):
                    theirs.grad = mine.grad.clone()
                norm = amp.step().grad_norm
                amp.zero_grad()
                plain.step()
            runs.append([*weights(amp), norm])
            for mine, true in zip(weights(amp), copies, strict=True):
                torch.testing.assert_close(mine, true.detach(), rtol=1e-6, atol=1e-6 if optimizer == "mezzo" else 0)
        assert_same(*runs)


@pytest.mark.parametrize("policy, max_grad_norm", list(zip(SCALED, (None, 1.0, None, 1.0), strict=True)))
def test_an_edit_of_scaled_gradients_is_warned_of_once(policy, max_grad_norm):
    model, _, amp = session(policy, max_grad_norm=max_grad_norm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            backward(amp, model, number)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            amp.step()
            amp.zero_grad()
    assert [warning.category for warning in caught] == [UserWarning]
    assert re.search(r"(?s)gradients .* carry the loss scale.*amp\.unscale_\(\)", str(caught[0].message))


def test_no_other_edit_is_warned_of():
    def replaced(params):
        for param in params:
            param.grad = param.grad.clone()  # as distributed wrappers do

    def dropped(params):
        params[0].grad = None

    def doubled(params):
        params[0].grad.mul_(2)

    for policy in ("O0", LOW[0], SCALED[-1]):
        for edit, unscales in ((replaced, False), (dropped, False), (doubled, True), (replaced, True)):
            model, _, amp = session(policy, max_grad_norm=1.0 if edit is replaced else None)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for number in range(2):
                    backward(amp, model, number)
                    backward(amp, model, number + 5)
                    if unscales:
                        amp.unscale_()
                    edit(list(model.parameters()))
                    amp.step()
                    amp.zero_grad()


def test_gradients_made_without_the_session_are_not_stepped_with_unseen():
    """A plain ``loss.backward()`` beside the five lines: its gradients are no window of the session's.

    Without a scale they are gradients like all others.
    """
    for policy in EVERY:
        model, made, amp = session(policy)
        if not engine_of(amp).scaler.changes_gradients:
            loss_of(model, 0, amp).backward()
            assert not amp.step().skipped
            continue
        before = weights(amp)
        loss_of(model, 0, amp).backward()
        with pytest.raises(StateError, match=r"step\(\) before backward\(\): .* not from amp\.backward\(loss\)"):
            amp.step()
        with pytest.raises(StateError, match="behind the session's back"):
            made.step()
        assert_same(before, weights(amp))


@pytest.mark.parametrize("policy", SCALED)
def test_inputs_that_a_pass_is_told_get_gradients_without_the_scale(policy):
    model, _, amp = session(policy)
    x, y = batch(0)
    x.requires_grad_()
    with amp.autocast():
        loss = functional.cross_entropy(model(x).float(), y)
    (expected,) = amp.grad(loss, x, retain_graph=True)
    amp.backward(loss, inputs=x, retain_graph=True)
    torch.testing.assert_close(x.grad, expected)
    assert gradients(model) == [None] * len(gradients(model))
    amp.backward(loss)  # and other leaves without being told
    torch.testing.assert_close(x.grad, 2 * expected)


# Several optimizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_a_pass_for_one_optimizer_gives_gradients_to_its_parameters_alone(policy):
    model = network()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3])]
    amp = MixedPrecision(model, pair, policy)
    amp.backward(loss_of(model, 0, amp), optimizers=pair[1])
    assert [p.grad is None for p in (model[0].weight, model[3].weight)] == [True, False]
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step(pair[0])
    before = [model[0].weight.detach().clone(), model[3].weight.detach().clone()]
    amp.step()  # all that have gradients
    assert torch.equal(before[0], model[0].weight)
    assert not torch.equal(before[1], model[3].weight)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_optimizers_that_share_parameters_step_together_and_by_turns(fused, clip):
    """Together: each from the same gradients, unscaled and clipped once. By turns: with a pass for each."""
    for turns in (False, True):
        model, plain = Weights(2), Weights(2)
        pair = [torch.optim.SGD(model.parameters(), lr=lr, fused=fused) for lr in (0.5, 0.25)]
        amp = MixedPrecision(model, pair, f"O0,{GROWING}", max_grad_norm=clip)
        theirs = [torch.optim.SGD(plain.parameters(), lr=lr) for lr in (0.5, 0.25)]
        for number in range(4):
            c = torch.tensor([3.0, 4.0]) * (number + 1)
            chosen = [number % 2] if turns else [0, 1]
            amp.backward(model.loss(c))
            assert amp.step([pair[i] for i in chosen]).grad_norm == c.norm()
            amp.zero_grad()
            plain.zero_grad()
            plain.loss(c).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            for i in chosen:
                theirs[i].step()
        # 1/scale, coefficient and product each round once.
        torch.testing.assert_close(model.vectors[0], plain.vectors[0], rtol=4 * 2.0**-23 if clip else 0, atol=0)


@pytest.mark.parametrize("policy", [policy for policy in EVERY if not policy.startswith("O2")])
def test_attached_optimizers_of_the_same_weights_skip_what_was_found_alike(policy):
    model = network()
    pair = [OPTIMIZERS[name](model.parameters()) for name in ("SGD", "mezzo")]
    with attached(model, pair, policy) as amp:
        before = weights(amp)
        poisoned(model(batch(1)[0])).backward()
        for param in model.parameters():
            param.grad.nan_to_num_(0, 1, -1)
        for optimizer in pair:
            optimizer.step()
            assert bool(amp.last_step.skipped)
        assert_same(before, weights(amp))
        model.zero_grad(set_to_none=False)
        for optimizer in pair:
            optimizer.step()
            assert not bool(amp.last_step.skipped)


@pytest.mark.parametrize("strike", [None, 0, 1])
def test_steps_that_one_pass_feeds_count_once_for_the_scale(strike):
    """Each optimizer judges its own gradients, in whichever order they step."""
    for order in ((0, 1), (1, 0)):
        model = Weights(2, 2)
        pair, amp = over(model, "O0,loss_scale=dynamic(init=256,interval=2)", [model.vectors[0]], [model.vectors[1]])
        for number, scale in enumerate((256.0, 512.0, 512.0, 1024.0) if strike is None else (256.0, 512.0, 256.0)):
            amp.backward(model.loss(1.0, 1.0))
            if number == 2 and strike is not None:
                spoil(model, which=strike)
            for index in order:
                assert bool(amp.step(pair[index]).skipped) == (number == 2 and index == strike)
            amp.zero_grad()
            assert amp.loss_scale.item() == scale


def test_they_step_in_the_order_of_the_session():
    model, called = network(), []
    pair = [OPTIMIZERS[name](part.parameters()) for name, part in (("fused", model[0]), ("SGD", model[3]))]
    amp = MixedPrecision(model, pair, "O1,emulate=true")
    for number, optimizer in enumerate(pair):
        optimizer.register_step_post_hook(lambda *_, number=number: called.append(number))
    backward(amp, model, 0)
    amp.step(list(reversed(pair)))
    assert called == [0, 1]


@pytest.mark.parametrize(
    "policy, clip, parts", [(EVERY[1], 0.1, 1), (LOW[0], None, 3), (LOW[2], None, 3), (LOW[3], 0.1, 1)]
)
def test_sparse_embeddings_train_as_dense_ones(policy, clip, parts):
    class Words(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.table, self.head = nn.Embedding(20, 8, sparse=sparse), nn.Linear(8, 3)

        def forward(self, words):
            return self.head(self.table(words).mean(1))

    runs = []
    for sparse in (True, False):
        model = Words(sparse)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.5), policy, max_grad_norm=clip)
        norms = []
        for number in range(4):
            for part in range(parts):
                generator = torch.Generator().manual_seed(10 * number + part)
                words = torch.randint(0, 20, (4, 6), generator=generator)  # some twice in a sentence
                with amp.autocast():
                    loss = functional.cross_entropy(model(words).float(), words[:, 0] % 3)
                amp.backward(loss)
            if number == 2:
                (model.table.weight.grad._values() if sparse else model.table.weight.grad)[0] = float("inf")
            step = amp.step()
            assert bool(step.skipped) == (number == 2)
            norms.append(step.grad_norm.item())
            amp.zero_grad()
        runs.append((weights(amp), norms))
    assert runs[0][1] == pytest.approx(runs[1][1], rel=2e-2)
    for mine, dense in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-5 if policy in FP32 else 5e-3)
