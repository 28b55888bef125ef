"""Unscaled gradients on the model's parameters: one tensor with their masters', and whatever is assigned counts."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import MixedPrecision, StateError

from ...support.tables import thinned
from ..loops import assert_same, backward, batch, network, session, sgd, weights

LOW = [
    "O2,emulate=true",
    "O2,dtype=bfloat16,emulate=true",
    "O2,dtype=bfloat16,emulate=true,loss_scale=dynamic",
]
KEEPERS = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.5),
    "torch fused": lambda params: torch.optim.SGD(params, lr=0.5, fused=True),
    "split": lambda params: mezzo.optim.SGD(params, lr=0.5),
    "full": lambda params: mezzo.optim.SGD(params, lr=0.5, master="full"),
}


def restored(amp, model):
    """Whether every parameter takes gradients of its own dtype only, and holds none in another."""
    return all(p.grad_dtype == p.dtype and (p.grad is None or p.grad.dtype == p.dtype) for p in model.parameters())


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("policy", LOW)
def test_a_parameter_and_its_master_show_one_gradient(policy, keeper):
    model, _, amp = session(policy, KEEPERS[keeper])
    for _ in range(2):
        backward(amp, model, 0)
        amp.unscale_()
        for param, master in zip(model.parameters(), amp.master_params(), strict=True):
            assert param.grad is master.grad
            assert param.grad.dtype == torch.float32
        amp.step()
        assert restored(amp, model)
        amp.zero_grad()
        assert restored(amp, model)


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("policy", LOW)
def test_the_model_s_gradients_are_clipped(policy, keeper):
    """The weights move by the learning rate times what is left of the norm."""
    model, _, amp = session(policy, KEEPERS[keeper])
    backward(amp, model, 0)
    amp.unscale_()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.1
    before = weights(amp) if "torch" in keeper else [amp._core.optimizers[0].master_of(p) for p in model.parameters()]
    step = amp.step()
    after = weights(amp) if "torch" in keeper else [amp._core.optimizers[0].master_of(p) for p in model.parameters()]
    moved = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(after, before, strict=True)])
    assert step.grad_norm.item() == pytest.approx(0.01, rel=1e-5)
    assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-4)


def doubled(g):
    return g * 2


def same(g):
    return g


#: What is assigned to a master's gradient and to its parameter's (``None``: nothing is), and what then counts.
ASSIGNED = {
    "to the parameter": (None, doubled, 2.0),
    "to the master": (doubled, None, 2.0),
    "the same tensor to both": (same, same, 1.0),
    "equal values to both": (doubled, doubled, 2.0),
    "nothing to the parameter": (None, lambda g: None, None),
    "nothing to the master": (lambda g: None, None, None),
    "nothing to both": (lambda g: None, lambda g: None, None),
    "to a cleared parameter": (lambda g: None, doubled, 2.0),
    "to a cleared master": (doubled, lambda g: None, 2.0),
}
#: What takes up the assigned gradients; each is followed by another look and a step.
FOLLOWING = {
    "step": lambda amp, model: None,
    "another look": lambda amp, model: amp.unscale_(),
    "state_dict": lambda amp, model: amp.state_dict(),
    "backward": lambda amp, model: backward(amp, model, 1),
}


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("how", ASSIGNED)
@pytest.mark.parametrize("policy", LOW)
def test_what_is_assigned_on_either_side_counts(policy, how, following):
    """The same gradients, assigned to plain FP32 parameters by hand, are the oracle."""
    to_master, to_param, factor = ASSIGNED[how]
    model, _, amp = session(policy)
    copies = [p.requires_grad_() for p in weights(amp)]
    plain = sgd(copies)
    backward(amp, model, 0)
    amp.unscale_()
    param, master = next(zip(model.parameters(), amp.master_params(), strict=True))
    shown, *expected = (p.grad for p in amp.master_params())
    for tensor, change in ((master, to_master), (param, to_param)):
        if change is not None:
            tensor.grad = change(shown)
    expected = [None if factor is None else shown * factor, *(g.clone() for g in expected)]
    FOLLOWING[following](amp, model)
    if following == "backward":
        other, _, alone = session(policy)
        backward(alone, other, 1)
        alone.unscale_()
        pairs = zip(expected, (p.grad for p in alone.master_params()), strict=True)
        expected = [more if mine is None else mine + more for mine, more in pairs]
        amp.unscale_()
    for theirs, gradient in zip(copies, expected, strict=True):
        theirs.grad = gradient
    amp.step()
    plain.step()
    for mine, theirs in zip(weights(amp), copies, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("call", ["step", "unscale_", "state_dict"])
def test_different_gradients_for_a_parameter_and_its_master_are_refused(call):
    model, _, amp = session("O2,emulate=true")
    backward(amp, model, 0)
    amp.unscale_()
    model[3].weight.grad = torch.ones(3, 16)
    master = list(amp.master_params())[4]
    master.grad = torch.full((3, 16), 2.0)
    before = weights(amp), amp.stats()
    with pytest.raises(StateError) as error:
        getattr(amp, call)()
    assert str(error.value) == (
        "a parameter and its master were given different gradients\n"
        "  where  3.weight\n"
        "  why    after amp.unscale_() they share one, and nothing says which of the two is meant\n"
        "  write  p.grad = … for those of model.parameters(), or for those of amp.master_params(), not for both"
    )
    assert_same((weights(amp), amp.stats()), before)
    assert torch.equal(model[3].weight.grad, torch.ones(3, 16))
    master.grad = model[3].weight.grad
    assert not amp.step().skipped


CLEARED = {
    "amp": lambda amp, model, none: amp.zero_grad(none),
    "optimizer": lambda amp, model, none: amp._core.optimizers[0].zero_grad(none),
    "model": lambda amp, model, none: model.zero_grad(none),
    "by hand": lambda amp, model, none: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.parametrize("policy, keeper, by, to_none", thinned(LOW, KEEPERS, CLEARED, [True, False], every=2))
def test_after_clearing_unscaled_gradients_the_next_are_right(policy, keeper, by, to_none):
    (model, _, amp), (other, _, never) = session(policy, KEEPERS[keeper]), session(policy, KEEPERS[keeper])
    backward(amp, model, 0)
    amp.unscale_()
    CLEARED[by](amp, model, to_none)
    if by == "amp":
        assert restored(amp, model)
    backward(amp, model, 1)
    backward(never, other, 1)
    amp.unscale_()
    never.unscale_()
    assert_same(*([p.grad for p in each.master_params()] for each in (amp, never)))
    steps = amp.step(), never.step()
    assert steps[0].grad_norm.item() == steps[1].grad_norm.item()
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    amp.zero_grad()
    assert restored(amp, model)


@pytest.mark.parametrize("policy", LOW)
def test_edits_are_saved_in_mid_window_and_the_loaded_gradients_are_shown_too(policy):
    (model, optimizer, amp), (other, fresh, loaded) = session(policy), session(policy)
    backward(amp, model, 0)
    amp.unscale_()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    model[0].weight.grad = model[0].weight.grad.sign()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    for part, state in zip((other, fresh, loaded), saved, strict=True):
        part.load_state_dict(state)
    for each in (model, other):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)
    steps = amp.step(), loaded.step()
    assert steps[0].grad_norm.item() == steps[1].grad_norm.item()
    assert_same((weights(amp), dict(model.state_dict())), (weights(loaded), dict(other.state_dict())))
    assert restored(loaded, other)


OWN = {
    "SGD": lambda params: mezzo.optim.SGD(params, lr=0.5),
    "stochastic": lambda params: mezzo.optim.SGD(params, lr=0.5, master=None, rounding="stochastic"),
    "kahan": lambda params: mezzo.optim.AdamW(params, lr=0.01, master=None, rounding="kahan"),
}


@pytest.mark.parametrize("optimizer", OWN)
@pytest.mark.parametrize("policy", ["O3,emulate=true", "O3,dtype=bfloat16,emulate=true,loss_scale=1024"])
def test_without_masters_mezzo_s_optimizers_show_fp32_too(policy, optimizer):
    """The norm of what is shown is that of the low gradients in FP32; a window with it resumes."""
    (model, built, amp), (other, fresh, loaded) = session(policy, OWN[optimizer]), session(policy, OWN[optimizer])
    for number in range(2):
        backward(amp, model, number)
        scale = amp.policy.loss_scale.init
        low = [p.grad.double() / scale for p in model.parameters()]
        amp.unscale_()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(torch.cat([g.flatten() for g in low])).item())
        if number:
            backward(amp, model, 2)
            amp.unscale_()
            saved = copy.deepcopy((model.state_dict(), built.state_dict(), amp.state_dict()))
            for part, state in zip((other, fresh, loaded), saved, strict=True):
                part.load_state_dict(state)
            assert loaded.step().grad_norm.item() == pytest.approx(amp.step().grad_norm.item())
            assert_same(dict(model.state_dict()), dict(other.state_dict()))
            assert restored(loaded, other)
        else:
            assert amp.step().grad_norm.item() == pytest.approx(0.1, rel=1e-5)
        assert restored(amp, model)
        amp.zero_grad()


def test_tied_frozen_and_unused_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.unused, self.frozen = (nn.Linear(4, 4, bias=False) for _ in range(4))
            self.other.weight = self.one.weight
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.other(self.one(x)))

    model = Tied()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O2,dtype=bfloat16,emulate=true")
    before = weights(amp)
    with amp.autocast():
        loss = model(torch.ones(2, 4)).sum()
    amp.backward(loss)
    amp.unscale_()
    assert model.unused.weight.grad is model.frozen.weight.grad is None
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.unused.weight.grad = torch.ones_like(model.unused.weight)  # bfloat16, as the user may well write
    amp.step()
    moved = [(b - a).norm().item() for a, b in zip(weights(amp), before, strict=True)]
    assert moved == pytest.approx([0.1, 4.0, 0.0], rel=1e-5)
    assert restored(amp, model)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_each_of_two_optimizers_shows_its_own(keeper):
    model = network()
    pair = [KEEPERS[keeper](part.parameters()) for part in (model[0], model[3])]
    amp = MixedPrecision(model, pair, "O2,emulate=true", num_losses=2)
    for first, second in itertools.permutations(pair):
        for loss_id, number in enumerate((0, 1)):
            x, y = batch(number)
            with amp.autocast():
                loss = functional.cross_entropy(model(x), y)
            amp.backward(loss, loss_id=loss_id)
        amp.unscale_(first)
        shown, hidden = (model[0], model[3]) if first is pair[0] else (model[3], model[0])
        assert {p.grad.dtype for p in shown.parameters()} == {torch.float32}
        nn.utils.clip_grad_norm_(shown.parameters(), 1e-3)
        assert amp.step(first).grad_norm.item() == pytest.approx(1e-3, rel=1e-4)
        amp.unscale_(second)
        nn.utils.clip_grad_norm_(hidden.parameters(), 1e-3)
        assert amp.step(second).grad_norm.item() == pytest.approx(1e-3, rel=1e-4)
        assert restored(amp, model)
        amp.zero_grad()


@pytest.mark.parametrize("keeper", KEEPERS)
def test_after_close_gradients_are_fp32(keeper):
    model, _, amp = session("O2,dtype=bfloat16,emulate=true", KEEPERS[keeper])
    for number in range(2):
        backward(amp, model, number)
        backward(amp, model, number)
        amp.unscale_()
        amp.step()
        amp.zero_grad()
    amp.close()
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    model.zero_grad()
    amp = MixedPrecision(model, KEEPERS[keeper](model.parameters()), "O2,dtype=bfloat16,emulate=true")
    assert restored(amp, model)
