"""Several optimizers: those that share parameters, take turns, or are given groups in mid-training."""

import pytest
import torch
from torch import nn

from mezzo import LossScale, MixedPrecision, Policy, ScaleCollapsed, StateError

from .weights import EPS, EVERY_STEP, Weights, session, values


class Adversaries:
    """A generator and a discriminator, with everything that a GAN's step needs."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.models = [self.discriminator, self.generator]
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in self.models]

    def loss(self, number, step):
        noise, real = values(15, step).reshape(5, 3), values(10, step + 100).reshape(5, 2)
        fake = self.generator(noise)
        if number == 0:
            return (self.discriminator(real) - 1).square().mean() + self.discriminator(fake.detach()).square().mean()
        return (self.discriminator(fake) - 1).square().mean()

    def weights(self):
        return [p.detach().clone() for model in self.models for p in model.parameters()]


@pytest.mark.parametrize("strike", [None, (2, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("named", [False, True])
def test_adversaries_that_take_turns(num_losses, named, strike):
    """Bit for bit what plain FP32 does that leaves the struck steps out: powers of two round nothing in FP32."""
    gan, plain = Adversaries(), Adversaries()
    amp = MixedPrecision(
        gan.models, gan.optimizers, "O0,loss_scale=dynamic(init=256,interval=3)", num_losses=num_losses
    )
    scales, clean = [256.0] * num_losses, [0] * num_losses
    for step in range(5):
        for number in (0, 1):
            loss_id = number % num_losses
            amp.zero_grad()
            with amp.autocast():
                loss = gan.loss(number, step)
            amp.backward(loss, loss_id=loss_id, optimizers=gan.optimizers[number] if named else None)
            struck = strike == (step, number)
            if struck:
                next(gan.models[number].parameters()).grad[0, 0] = float("inf")
            result = amp.step(gan.optimizers[number])
            assert bool(result.skipped) == struck
            clean[loss_id] = 0 if struck else clean[loss_id] + 1
            if struck or clean[loss_id] == 3:
                scales[loss_id] *= 0.5 if struck else 2
                clean[loss_id] = 0
            assert amp.loss_scale.flatten().tolist() == scales
            for optimizer in plain.optimizers:
                optimizer.zero_grad()
            plain.loss(number, step).backward()
            if not struck:
                plain.optimizers[number].step()
    for mine, theirs in zip(gan.weights(), plain.weights(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["O0", f"O0,{EVERY_STEP}", f"O2,dtype=bfloat16,emulate=true,{EVERY_STEP}"])
def test_only_the_chosen_optimizers_parameters_get_gradients(policy):
    """The gradients that ``inputs=`` of torch's own backward gives, and none anywhere else."""
    gan = Adversaries()
    amp = session(None, policy, optimizers=gan.optimizers, models=gan.models)
    with amp.autocast():
        loss = gan.loss(1, 0)
    amp.backward(loss, optimizers=gan.optimizers[1])
    assert all(p.grad is None for p in gan.discriminator.parameters())
    if "O2" not in policy:
        exact = Adversaries()
        exact.loss(1, 0).backward(inputs=list(exact.generator.parameters()))
        amp.unscale_(gan.optimizers[1])
        for mine, theirs in zip(gan.generator.parameters(), exact.generator.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step(gan.optimizers[0])
    before = gan.weights()
    amp.step()  # all that have gradients
    moved = [not torch.equal(a, b) for a, b in zip(before, gan.weights(), strict=True)]
    assert moved == [False] * 4 + [True] * 4


def test_optimizers_that_share_parameters_are_told_apart_by_what_is_their_own():
    """``inputs=`` are the chosen one's parameters, though its neighbour shares one of them."""
    model = Weights(2, 2, 2)
    mine, shared, theirs = model.each
    pair = [torch.optim.SGD([mine, shared], lr=1.0), torch.optim.SGD([shared, theirs], lr=1.0)]
    amp = session(model, optimizers=pair)
    amp.backward(model.loss(1, 2, 3), optimizers=pair[0])
    assert theirs.grad is None
    assert mine.grad is not None
    amp.step(pair[0])
    assert [p.tolist() for p in model.each] == [[-1.0, -1.0], [-2.0, -2.0], [0.0, 0.0]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_optimizers_that_share_parameters_step_together_and_by_turns(fused, clip):
    """Together: each from the same gradients, unscaled and clipped once. By turns: with a backward pass for each."""
    for turns in (False, True):
        model, plain = Weights(2), Weights(2)
        pair = [torch.optim.SGD(model.parameters(), lr=lr, fused=fused) for lr in (0.5, 0.25)]
        ours = session(model, optimizers=pair, max_grad_norm=clip)
        theirs = [torch.optim.SGD(plain.parameters(), lr=lr) for lr in (0.5, 0.25)]
        for number in range(4):
            c = torch.tensor([3.0, 4.0]) * (number + 1)
            chosen = [number % 2] if turns else [0, 1]
            ours.backward(model.loss(c))
            ours.step([pair[i] for i in chosen])
            ours.zero_grad()
            plain.zero_grad()
            plain.loss(c).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            for i in chosen:
                theirs[i].step()
        # 1/scale, coefficient and product each round once.
        torch.testing.assert_close(model.each[0], plain.each[0], rtol=4 * EPS if clip else 0, atol=0)


def test_an_optimizer_that_shares_gradients_with_one_that_stepped_says_so():
    model = Weights(2)
    pair = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.Adagrad(model.parameters(), lr=1.0)]
    amp = session(model, optimizers=pair)
    amp.backward(model.loss(1))
    amp.step(pair[0])
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)(.|\n)*shares parameters with"):
        amp.step(pair[1])
    assert model.each[0].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("struck", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_one_loss_that_two_optimizers_step_from_counts_once(first, struck, hysteresis):
    """Whichever steps first, and with a budget of overflows too: a step is an iteration."""
    rules = LossScale.dynamic(init=256.0, interval=2, hysteresis=hysteresis, floor=64.0)
    model = Weights(1, 1)
    pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
    amp = session(model, Policy.O0(loss_scale=rules), optimizers=pair)
    scale, clean, budget = 256.0, 0, hysteresis
    for step in range(12):
        overflow = bool(struck) and step not in (0, 3, 4)
        amp.backward(model.loss(1, 1))
        for number in struck if overflow else ():
            model.each[number].grad.fill_(float("nan"))
        for number in (first, 1 - first):
            assert bool(amp.step(pair[number]).skipped) == (overflow and number in struck)
        amp.zero_grad()
        clean = 0 if overflow else clean + 1
        budget -= overflow
        if budget == 0:
            scale, budget = max(scale / 2, 64.0), hysteresis
        if clean == 2:
            scale, clean = scale * 2, 0
        assert amp.loss_scale.item() == scale


@pytest.mark.parametrize("rules", [LossScale.dynamic(init=1.0, patience=3), LossScale.constant(8.0, patience=3)])
@pytest.mark.parametrize("first", [0, 1])
def test_patience_counts_iterations_not_steps(rules, first):
    """The clean half of a step does not make up for the half that overflowed, and two bad halves are one overflow."""
    for struck in ([0], [0, 1]):
        model = Weights(1, 1)
        pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
        amp = session(model, Policy.O0(loss_scale=rules), optimizers=pair)
        for _ in range(2):
            iterate(amp, pair, struck, first)
        with pytest.raises(ScaleCollapsed, match="3 overflows in a row"):
            bool(iterate(amp, pair, struck, first).skipped)


def iterate(amp, pair, struck, first):
    """One loss, a step of each optimizer, and infinities in the gradients of some."""
    params = [optimizer.param_groups[0]["params"][0] for optimizer in pair]
    amp.backward(sum(param.sum() for param in params))
    for number in struck:
        params[number].grad.fill_(float("nan"))
    amp.step(pair[first])
    last = amp.step(pair[1 - first])
    amp.zero_grad()
    return last


def test_gradients_of_an_older_scale_count_only_where_it_has_not_fallen_yet():
    """A window that stays open while another optimizer's steps move the scale twice."""
    for struck, scale in ((False, 64.0), (True, 64.0)):
        model = Weights(1, 1)
        pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
        amp = session(model, optimizers=pair)  # 256
        amp.backward(model.loss(1, 1))
        if struck:
            model.each[1].grad.fill_(float("inf"))
        for number in range(2):
            if number:
                amp.backward(model.each[0].sum(), optimizers=pair[0])
            model.each[0].grad.fill_(float("inf"))
            amp.step(pair[0])
            pair[0].zero_grad()
        assert amp.loss_scale.item() == 64.0
        assert bool(amp.step(pair[1]).skipped) == struck
        assert amp.loss_scale.item() == scale


def test_a_window_may_stay_open_while_others_step():
    """One accumulates over three iterations, the other steps at each; scales grow in between."""
    model = Weights(2, 2)
    pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
    amp = session(model, optimizers=pair)
    for step in range(3):
        amp.backward(model.loss(1, 10.0**step))
        assert amp.step(pair[0]).scale.item() == 256.0 * 2**step
        pair[0].zero_grad()
    slow = amp.step(pair[1])
    assert [p.tolist() for p in model.each] == [[-3.0, -3.0], [-111.0, -111.0]]
    assert slow.next_scale.item() == 2048.0  # each iteration has counted already
    assert slow.grad_norm.item() == pytest.approx(111.0 * 2**0.5)


def test_parameters_without_gradients_are_left_alone():
    model = Weights(2, 2, 2)
    model.each[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    amp = session(model, optimizers=[optimizer], max_grad_norm=1.0)
    amp.backward(model.each[0].sum())
    amp.step()
    assert model.each[1].tolist() == model.each[2].tolist() == [1.0, 1.0]
    assert len(optimizer.state) == 1
    amp.zero_grad()


def test_optimizers_of_frozen_parameters_only_are_refused():
    model, frozen = Weights(2), Weights(2).requires_grad_(False)
    pair = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, frozen)]
    amp = session(None, models=[model, frozen], optimizers=pair)
    with pytest.raises(StateError, match=r"update no parameter that requires a gradient(.|\n)*requires_grad_\(True\)"):
        amp.backward(model.loss(1), optimizers=pair[1])
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", [f"O1,emulate=true,{EVERY_STEP}", f"O2,emulate=true,{EVERY_STEP}"])
def test_groups_that_join_in_mid_training(policy, fused):
    model = Weights(2, 2)
    optimizer = torch.optim.SGD([model.each[0]], lr=1.0, fused=fused)
    amp = session(model, policy, optimizers=[optimizer])
    c = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]

    def iteration(skipped=False):
        amp.backward(model.loss(*c).float())
        if skipped:
            model.each[1].grad[0] = float("inf")
        assert bool(amp.step().skipped) == skipped
        amp.zero_grad()

    iteration()
    assert model.each[1].tolist() == [0.0, 0.0]
    optimizer.add_param_group({"params": [model.each[1]], "lr": 0.5})
    iteration()
    iteration(skipped=True)
    assert [p.tolist() for p in model.parameters()] == [[-2.0, -4.0], [-1.5, -2.0]]
    assert [p.dtype for p in amp.master_params()] == [torch.float32] * 2
    assert amp.loss_scale.item() == 512.0


@pytest.mark.parametrize("fused", [(True, False), (False, True), (True, True), (False, False)])
def test_a_group_that_joins_may_share_parameters_from_then_on(fused):
    """Then neither optimizer may unscale these gradients by itself: the other one would see them twice unscaled."""
    model = Weights(2, 2)
    pair = [torch.optim.SGD([p], lr=1.0, fused=flag) for p, flag in zip(model.each, fused, strict=True)]
    amp = session(model, optimizers=pair)
    for together in (False, True, True):
        amp.backward(model.loss(1, 1))
        amp.step()
        if not together:
            with pytest.raises(StateError, match="the last step's gradients are still there"):
                amp.backward(model.loss(1, 1))
            pair[0].add_param_group({"params": [model.each[1]], "lr": 2.0})
            with pytest.raises(StateError, match="the last step's gradients are still there"):
                amp.backward(model.loss(1, 1))
        amp.zero_grad()
    assert [p.tolist() for p in model.each] == [[-3.0, -3.0], [-7.0, -7.0]]


def test_two_masters_of_one_parameter_are_refused_later_too():
    model = Weights(2, 2)
    pair = [torch.optim.SGD([param], lr=1.0) for param in model.each]
    amp = session(model, f"O2,emulate=true,{EVERY_STEP}", optimizers=pair)
    pair[0].add_param_group({"params": [model.each[1]]})
    with pytest.raises(StateError, match="two optimizers update the same parameters"):
        amp.backward(model.loss(1, 1).float())
