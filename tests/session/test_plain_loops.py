"""Plain loops while a session is attached: when a backward pass has ended, gradients are FP32, unscaled and checked.

Orders of calls are ``tests/acceptance``'s; here stand passes, graphs, leaves and schedulers of other kinds.
"""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.session.observers import watching

from .loops import (
    EVERY,
    FP32,
    INF,
    LOW,
    O3,
    OPTIMIZERS,
    assert_same,
    attached,
    batch,
    built,
    gradients,
    loss_of,
    network,
    poisoned,
    train_plainly,
    weights,
)  # fmt: skip

BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 22}


def assert_true(actual, expected, policy):
    """Gradients are those of plain FP32: bit for bit at O0, else up to some ten roundings."""
    if policy.startswith("O0"):
        return assert_same(actual, expected)
    mine, true = (torch.cat([g.flatten().float() for g in grads]) for grads in (actual, expected))
    bits = BITS[mezzo.Policy.parse(policy).dtype]
    assert torch.linalg.vector_norm(mine - true) < 10 * 2.0**-bits * torch.linalg.vector_norm(true)
    return None


# What a pass leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [EVERY[1], *LOW, O3[0]])
def test_gradients_are_fp32_unscaled_and_true_after_each_pass(policy):
    for optimizer in ("SGD", "mezzo"):
        model, made = built(optimizer)
        plain = network()
        with attached(model, made, policy):
            for number in range(3):
                loss_of(model, number).backward()
                loss_of(plain, number).backward()
                assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
                assert_true(gradients(model), gradients(plain), policy)
            norms = [nn.utils.get_total_norm([p.grad for p in net.parameters()]) for net in (model, plain)]
            assert norms[0] == pytest.approx(float(norms[1]), rel=0 if policy in FP32 else 0.05)


@pytest.mark.parametrize("policy", ["O0", LOW[0], LOW[2], LOW[3]])
def test_what_a_pass_has_found_is_skipped_whatever_is_done_to_gradients_after(policy):
    """An infinity that is clipped to a number trains in torch; here it was found when the pass ended."""

    def goes_on(model):
        mended(model)
        loss_of(model, 2).backward()  # finite, and it adds to finite gradients

    def mended(model):
        for p in model.parameters():
            p.grad.nan_to_num_(0, 1, -1)

    def clipped(model):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def assigned_low(model):
        for p in model.parameters():
            p.grad = p.grad.nan_to_num(0, 1, -1).to(p.dtype)

    for change in (goes_on, mended, clipped, assigned_low):
        model, made = built()
        with attached(model, made, policy) as amp:
            train_plainly(model, made, 0)
            before = weights(amp)
            poisoned(model(batch(1)[0])).backward()
            change(model)
            made.step()
            assert bool(amp.last_step.skipped), change.__name__
            assert_same(before, weights(amp))
            made.zero_grad()
            train_plainly(model, made, 2)
            assert amp.stats().skipped == 1


def test_observers_are_told_losses_as_the_loop_has_them():
    """What a report shows, and what is judged as a loss that failed itself."""
    losses = []

    class Told:
        def begins(self, engine, scale):
            pass

        def judged(self, engine, judged):
            losses.extend(float(loss) for loss in judged.losses)

        def stepped(self, engine, step):
            pass

    model, made = built("AdamW")
    with watching(Told()), attached(model, made, "O1,fp16,loss_scale=dynamic(init=1024)") as amp:
        loss = loss_of(model, 0)
        loss.backward()
        made.step()
        assert losses == [loss.item()]
        made.zero_grad()
        (loss_of(model, 1) * 1e36).backward()  # finite, and times 1024 it is not: an overflow
        made.step()
        assert (amp.stats().skipped, float(amp.loss_scale)) == (1, 512)


# Which passes, and which leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1024, 65536])
def test_leaves_that_no_optimizer_has_get_gradients_without_the_scale(scale):
    """Inputs, heads beside the model, parameters that are in no group: as plain torch; no pass leaves a hook."""

    def run(model, head, x):
        functional.cross_entropy(head(model(x)), batch(0)[1]).backward()
        return [x.grad, *gradients(head), *gradients(model)]

    with torch.random.fork_rng():
        torch.manual_seed(1)
        heads = [nn.Linear(3, 3) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    expected = run(network(), heads[0], batch(0)[0].requires_grad_())
    model = network()
    with attached(model, torch.optim.SGD(model[3].parameters(), lr=0.1), f"O0,loss_scale={scale}"):
        x = batch(0)[0].requires_grad_()
        assert_same(run(model, heads[1], x), expected)
        assert not x._backward_hooks
        run(model, heads[1], x)  # and a second time: they add up
        assert_same(x.grad, expected[0] * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_leaves_that_no_optimizer_has_are_unscaled_in_fp32(dtype):
    """1/3000 has an error of its own in sixteen bits."""
    model, made = built()
    factors = torch.linspace(-1.0, 1.0, 64)
    with attached(model, made, "O0,loss_scale=3000"):
        leaf = torch.zeros(64, dtype=dtype, requires_grad=True)
        (loss_of(model, 0) + (leaf.float() * factors).sum()).backward()
    over_scale = torch.tensor(1 / 3000, dtype=torch.float64).float()
    assert_same(leaf.grad, ((factors * 3000.0).to(dtype).float() * over_scale).to(dtype))


@pytest.mark.parametrize("policy", ["O0,loss_scale=8", LOW[0], LOW[2], LOW[3]])
def test_roots_graphs_and_inputs_are_the_callers(policy):
    def run(net):
        one, other = net(batch(0)[0]), net(batch(1)[0]).float().square().mean()
        torch.autograd.backward([one, other, other * 3], [torch.full_like(one, 0.25), None, None])
        return gradients(net)

    model, made = built()
    whole = network()
    loss_of(whole, 0).backward()
    with attached(model, made, policy):
        assert_true(run(model), run(network()), policy)
        made.zero_grad()
        first, *_, last = model.parameters()
        loss = loss_of(model, 0)
        loss.backward(inputs=[first], retain_graph=True)
        assert [p.grad is not None for p in model.parameters()] == [True, *([False] * 5)]
        loss.backward(inputs=[last], retain_graph=True)
        assert_true([first.grad, last.grad], [gradients(whole)[0], gradients(whole)[-1]], policy)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        made.step()


@pytest.mark.parametrize("policy", ["O0,loss_scale=64", LOW[0], LOW[2], LOW[3]])
def test_gradients_that_are_only_returned_are_torchs_own(policy):
    """And a penalty made of them is differentiated again, as in WGAN-GP."""
    plain, x = network(), batch(0)[0].requires_grad_()
    (true,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
    true.square().sum().backward()
    model, made = built()
    with attached(model, made, policy) as amp:
        x = batch(0)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert_true([slope], [true], policy)
        slope.square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert_true(grads, [p.grad for p in plain.parameters() if p.grad is not None], policy)
        made.step()
        assert not amp.last_step.skipped


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_gradients_are_differentiated_again_where_there_is_no_scale():
    ends = []
    for policy in (None, "O0"):
        model, made = built()
        with contextlib.nullcontext() if policy is None else attached(model, made, policy):
            loss_of(model, 0).backward(create_graph=True)
            sum(param.grad.float().square().sum() for param in model.parameters()).backward()
            made.step()
            model.zero_grad()  # torch warns of the cycle otherwise
        ends.append(list(model.parameters()))
    assert_same(*ends)


@pytest.mark.parametrize("policy", ["O0", "O0,loss_scale=1024", "O1,dtype=bfloat16,emulate=true"])
def test_hooks_of_parameters_see_the_scale_and_one_warning_names_them(policy):
    model, made = built()
    seen = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    scaled = "1024" in policy
    with attached(model, made, policy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            train_plainly(model, made, number)
    assert [warning.category for warning in caught] == [UserWarning] * scaled
    assert not scaled or "0.weight" in str(caught[0].message)


# Recomputed -----------------------------------------------------------------------------------------------------------


class Functions(nn.Module):
    """Checkpoints of a module, of functions of tensors, and of functions that call several parts of the model."""

    def __init__(self, again):
        super().__init__()
        self.again, self.one, self.two, self.three = again, *(nn.Parameter(torch.zeros(8, 8)) for _ in range(3))
        self.part, self.norm, self.up = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.uniform_(param, -1, 1, generator=generator)

    def forward(self, x, *, reentrant):
        def function(x):
            scores = functional.gelu(x @ self.one.to(x.dtype)).softmax(-1)
            return functional.layer_norm(scores @ self.two.to(scores.dtype), (8,)).tanh() / 8

        def parts(x):
            y = functional.silu(self.up(self.norm(x)))
            return (y.tanh() * y + y @ self.three.to(y.dtype)) / 64

        for run in (self.part, function, parts):
            x = checkpoint(run, x, use_reentrant=reentrant) if self.again else run(x)
        return x


@pytest.mark.parametrize(
    "policy, reentrant",
    [(LOW[0], True), (LOW[1], False), (LOW[2], False), (LOW[3], True), ("O1,bf16,emulate=true,low=softmax", True),
     ("O1,bf16,emulate=true,low=softmax", False)],
)  # fmt: skip
def test_checkpoints_are_recomputed_under_the_policy_and_change_no_bit(policy, reentrant):
    grads = []
    for again in (True, False):
        model = Functions(again)
        with attached(model, torch.optim.SGD(model.parameters(), lr=0.1), policy):
            x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
            model(x, reentrant=reentrant).float().square().sum().backward()
            grads.append([x.grad, *gradients(model)])
    assert_same(*grads)


# Schedulers -----------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda made: lr_scheduler.StepLR(made, 1, gamma=0.5),
    "chained": lambda made: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(made, 1, gamma=0.5), lr_scheduler.ConstantLR(made, 1.0, 1)]
    ),
    "sequence": lambda made: lr_scheduler.SequentialLR(
        made, [lr_scheduler.StepLR(made, 1, gamma=0.5), lr_scheduler.StepLR(made, 1)], [100]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("hold", [True, False])
def test_schedulers_wait_where_a_step_was_skipped(name, hold):
    for early in (True, False):
        model, made = built()
        scheduler = SCHEDULERS[name](made) if early else None
        with attached(model, made, "O1,emulate=true", hold_schedulers=hold):
            scheduler = scheduler or SCHEDULERS[name](made)
            for number, rate in enumerate([0.05, 0.05, 0.025] if hold else [0.05, 0.025, 0.0125]):
                train_plainly(model, made, number, spoilt=number == 1)
                scheduler.step()
                assert made.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_scheduler_of_epochs_waits_for_no_single_skipped_step():
    model, made = built()
    with attached(model, made, "O1,emulate=true"):
        scheduler = lr_scheduler.LambdaLR(made, lambda epoch: 0.5**epoch)
        plateau = lr_scheduler.ReduceLROnPlateau(made)
        for number in range(3):
            train_plainly(model, made, number, spoilt=number == 1)
        scheduler.step()
        plateau.step(1.0)
        assert (scheduler.last_epoch, plateau.last_epoch) == (1, 1)
        train_plainly(model, made, 3, spoilt=True)
        scheduler.step()
        plateau.step(1.0)
        assert (scheduler.last_epoch, plateau.last_epoch) == (1, 1)
        scheduler.step()  # nothing was stepped since: torch's own
        assert scheduler.last_epoch == 2
    with attached(model, made, "O1,emulate=true"):
        train_plainly(model, made, 0, spoilt=True)
        made.param_groups[0]["lr"] = 1.0  # one that is made after a skipped step begins all the same
        del made.param_groups[0]["initial_lr"]
        lr_scheduler.LambdaLR(made, lambda epoch: 0.25)
        assert made.param_groups[0]["lr"] == 0.25


def test_a_scheduler_waits_for_its_own_optimizer_alone():
    model = network()
    pair = [OPTIMIZERS["SGD"](part.parameters()) for part in (model[0], model[3])]
    with attached(model, pair, "O0"):
        schedulers = [lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in pair]
        for number in range(2):
            loss_of(model, number).backward()
            if number:
                model[3].weight.grad.fill_(INF)
            for stepper in (*pair, *schedulers):
                stepper.step()
            model.zero_grad()
    assert [optimizer.param_groups[0]["lr"] for optimizer in pair] == [0.025, 0.05]
