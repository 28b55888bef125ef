"""Training loops as users write them, against the same loop in plain torch: bit for bit in FP32, near it elsewhere."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from mezzo import MixedPrecision, StateError

from .loops import INF, assert_same, backward, batch, network, session, sgd, state, train, weights

FP32 = ["O0", "O0,loss_scale=dynamic"]
LOW = ["O1,emulate=true", "O2,emulate=true", "O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true"]
EVERY = [*FP32, *LOW]


def plain_step(model, optimizer, *numbers):
    for number in numbers:
        x, y = batch(number)
        functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_as_exact(policy, mine, plain, start):
    """FP32 runs equal plain torch's; others moved as it did, up to a part of the way."""
    if policy in FP32:
        assert_same(mine, plain)
        return
    found, true, first = (torch.cat([t.detach().flatten() for t in each]) for each in (mine, plain, start))
    assert torch.linalg.vector_norm(found - true) < 0.05 * torch.linalg.vector_norm(true - first)


# Accumulation, data loaders -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_the_last_window_of_an_epoch_may_be_short(policy):
    model, _, amp = session(policy, max_grad_norm=1.0)
    plain = network()
    optimizer = sgd(plain.parameters())
    start = copy.deepcopy(list(plain.parameters()))
    for _ in range(2):
        windows = [range(3), range(3, 6), range(6, 8)]
        for window in windows:
            for number in window:
                backward(amp, model, number)
            assert not amp.step().skipped
            amp.zero_grad()
            for number in window:
                x, y = batch(number)
                functional.cross_entropy(plain(x), y).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert amp.stats().steps == 6
    assert_as_exact(policy, weights(amp), list(plain.parameters()), start)


@pytest.mark.parametrize("policy", EVERY)
def test_a_window_may_be_given_up(policy):
    (model, _, amp), (other, _, same) = session(policy), session(policy)
    train(amp, model, 0)
    backward(amp, model, 1)
    backward(amp, model, 2)
    amp.zero_grad()
    train(amp, model, 3)
    train(same, other, 0)
    train(same, other, 3)
    assert_same(state(amp, model), state(same, other))


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("fused", [False, True])
def test_epochs_over_a_data_loader_with_evaluation_between(policy, fused):
    """Two clusters that a line parts, minibatches in random order: learnt in every precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 8, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=generator)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=6 * len(loader))
    accuracy = []
    for _ in range(6):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            with amp.autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            amp.backward(loss)
            amp.step(scheduler=scheduler)
        model.eval()
        with torch.inference_mode(), amp.autocast():
            accuracy.append((model(x).argmax(1) == y).float().mean().item())
    assert accuracy[-1] > 0.95 > accuracy[0]
    assert amp.stats().steps == 6 * len(loader)
    assert scheduler.last_epoch == 6 * len(loader) - amp.stats().skipped


# Which parameters train ---------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [range(2, 5), range(5)], ids=["on the way", "from the start"])
@pytest.mark.parametrize("policy", EVERY)
def test_parameters_frozen_and_unfrozen(policy, frozen):
    model, plain = network(), network()
    for each in (model, plain):
        each[0].requires_grad_(0 not in frozen)
    amp = MixedPrecision(model, sgd(model.parameters()), policy)
    optimizer = sgd(plain.parameters())
    start = copy.deepcopy(list(plain.parameters()))
    for number in range(8):
        for each in (model, plain):
            each[0].requires_grad_(number not in frozen)
        before = copy.deepcopy(model[0].weight)
        train(amp, model, number)
        plain_step(plain, optimizer, number)
        assert torch.equal(before, model[0].weight) == (number in frozen)
    assert_as_exact(policy, weights(amp), list(plain.parameters()), start)


@pytest.mark.parametrize("policy", EVERY)
def test_a_parameter_group_that_is_added_later(policy):
    model, plain = network(), network()
    mine, optimizer = sgd(model[:3].parameters()), sgd(plain[:3].parameters())
    amp = MixedPrecision(model, mine, policy)
    start = copy.deepcopy(list(plain.parameters()))
    for number in range(6):
        if number == 2:
            mine.add_param_group({"params": model[3].parameters(), "lr": 0.05})
            optimizer.add_param_group({"params": plain[3].parameters(), "lr": 0.05})
        before = copy.deepcopy(model[3].weight)
        train(amp, model, number)
        plain_step(plain, optimizer, number)
        plain.zero_grad()
        assert torch.equal(before, model[3].weight) == (number < 2)
    if policy in FP32:
        assert_same(list(model.parameters()), list(plain.parameters()))
    else:
        assert_as_exact(policy, weights(amp), list(plain.parameters()), start)


@pytest.mark.parametrize("policy", EVERY)
def test_parameters_that_the_loss_does_not_depend_on(policy):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = network(), network()

        def forward(self, x):
            return self.used(x)

    model, plain = Branches(), network()
    amp = MixedPrecision(model, sgd(model.parameters(), weight_decay=0.1), policy, max_grad_norm=1.0)
    optimizer = sgd(plain.parameters(), weight_decay=0.1)
    idle = copy.deepcopy(list(model.idle.parameters()))
    start = copy.deepcopy(list(plain.parameters()))
    for number in range(4):
        train(amp, model, number)
        x, y = batch(number)
        functional.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(list(model.idle.parameters()), idle)
    assert_as_exact(policy, weights(amp)[: len(start)], list(plain.parameters()), start)


@pytest.mark.parametrize("policy", EVERY)
def test_losses_and_gradients_that_are_not_there(policy):
    model, optimizer, amp = session(policy)
    train(amp, model, 0)
    before = state(amp, model)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(StateError, match=r"the loss depends on no parameter(.|\n)*outside torch.no_grad"):
        amp.backward(torch.ones(()))
    with torch.no_grad(), amp.autocast():
        loss = model(batch(0)[0]).float().sum()
    with pytest.raises(StateError, match="the loss depends on no parameter"):
        amp.backward(loss)
    amp.backward(x.sum())  # it has a gradient, and none that a step could use
    with pytest.raises(StateError, match=r"no parameter has a gradient\n  why(.|\n)*write  amp.zero_grad\(\)"):
        amp.step()
    amp.zero_grad()
    backward(amp, model, 1)
    optimizer.zero_grad()
    with pytest.raises(StateError, match="no parameter has a gradient"):
        amp.step()
    assert_same(before, state(amp, model))
    amp.zero_grad()
    train(amp, model, 1)


@pytest.mark.parametrize("policy", EVERY)
def test_after_close_the_model_and_the_optimizer_are_plain(policy):
    model, optimizer, amp = session(policy)
    for number in range(3):
        train(amp, model, number)
    masters = weights(amp)
    amp.close()
    for call in (lambda: backward(amp, model, 0), lambda: amp.backward(model(batch(0)[0]).sum()), amp.step):
        with pytest.raises(StateError, match=r"\w+\(\) after close\(\)\n  write  a new MixedPrecision"):
            call()
    assert_same(list(model.parameters()), masters)
    plain = network()
    other = sgd(plain.parameters())
    plain.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3):
        plain_step(model, optimizer, number)
        plain_step(plain, other, number)
    assert_same(list(model.parameters()), list(plain.parameters()))


# Clearing gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("whose", ["session", "optimizer"])
@pytest.mark.parametrize("policy", EVERY)
def test_whoever_clears_clears_everything(policy, whose, micro_batches, set_to_none):
    (model, optimizer, amp), (other, _, same) = session(policy), session(policy)
    clear = amp.zero_grad if whose == "session" else optimizer.zero_grad
    for number in range(micro_batches):
        backward(amp, model, 10 + number)  # an unfinished window
    clear(set_to_none=set_to_none)
    left = [p.grad for p in (*model.parameters(), *amp.master_params()) if p.grad is not None]
    assert all(not gradient.any() for gradient in left)
    assert not (left and set_to_none)
    for number in range(3):
        for part in range(micro_batches):
            backward(amp, model, 5 * number + part)
            backward(same, other, 5 * number + part)
        amp.step()
        clear(set_to_none=set_to_none)
        same.step()
        same.zero_grad()
    assert_same(weights(amp), weights(same))


# Behind the session's back ------------------------------------------------------------------------------


def after_backward(amp, model):
    backward(amp, model, 5)


def after_unscale(amp, model):
    backward(amp, model, 5)
    amp.unscale_()


def after_the_step(amp, model):
    backward(amp, model, 5)
    amp.step()


def without_the_session(amp, model):
    x, y = batch(5)
    with amp.autocast():
        functional.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("when", [after_backward, after_unscale, after_the_step, without_the_session])
@pytest.mark.parametrize("policy", [*EVERY, "O3,dtype=bfloat16,emulate=true"])
def test_an_optimizer_s_own_step_is_refused_before_anything_is_written(policy, when):
    model, optimizer, amp = session(policy)
    scheduler = lr_scheduler.StepLR(optimizer, 1)  # which wraps the optimizer's step
    train(amp, model, 0, scheduler=scheduler)
    optimizer.step()  # without a gradient nothing is written, and some do so before they make a scheduler
    when(amp, model)
    before = state(amp, model)
    gradients = [copy.deepcopy(p.grad) for p in (*model.parameters(), *amp.master_params())]
    if when is after_the_step and "O2" in policy:
        model[0].weight.grad = torch.ones_like(model[0].weight)  # masters leave none behind
    calls = [optimizer.step, lambda: optimizer.step(closure=lambda: 0.0)]
    if when is after_backward:
        calls.append(lambda: torch.amp.GradScaler("cpu", enabled=False).step(optimizer))
    for call in calls:
        with pytest.raises(StateError, match=r"optimizer.step\(\) behind the session's back(.|\n)*amp.step\(\)"):
            call()
        assert_same(before, state(amp, model))
    if when is not after_the_step:
        assert_same(gradients, [p.grad for p in (*model.parameters(), *amp.master_params())])
    amp.zero_grad()
    assert not train(amp, model, 6).skipped


# Steps that are not taken -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bfloat16,emulate=true", "O2,dtype=bfloat16,emulate=true",
                                    "O3,dtype=bfloat16,emulate=true"])  # fmt: skip
def test_a_batch_that_is_not_finite_is_skipped_without_a_scale_too(policy, value, fused):
    model, _, amp = session(policy, lambda params: torch.optim.AdamW(params, lr=0.01, fused=fused))
    train(amp, model, 0)
    before = state(amp, model)
    x, y = batch(1)
    x[0, 0] = value
    with amp.autocast():
        loss = functional.cross_entropy(model(x), y)
    amp.backward(loss)
    step = amp.step()
    assert bool(step.skipped)
    assert step.scale.item() == step.next_scale.item() == 1
    amp.zero_grad()
    assert_same(before, state(amp, model))
    assert not train(amp, model, 2).skipped


# Unusual models -----------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 8, sparse=sparse)
            self.head = nn.Linear(8, 3)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", EVERY)
def test_sparse_embeddings_train_as_dense_ones(policy, clip, micro_batches):
    runs = []
    for sparse in (True, False):
        model = Words(sparse)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.5), policy, max_grad_norm=clip)
        norms = []
        for number in range(6):
            for part in range(micro_batches):
                generator = torch.Generator().manual_seed(10 * number + part)
                words = torch.randint(0, 20, (4, 6), generator=generator)  # some twice in a sentence
                with amp.autocast():
                    loss = functional.cross_entropy(model(words), words[:, 0] % 3)
                amp.backward(loss)
            if number == 3:
                (model.table.weight.grad._values() if sparse else model.table.weight.grad)[0] = INF
            step = amp.step()
            assert bool(step.skipped) == (number == 3)
            norms.append(step.grad_norm.item())
            amp.zero_grad()
        runs.append((weights(amp), norms))
    assert runs[0][1] == pytest.approx(runs[1][1], rel=2e-2)
    for mine, dense in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-5 if policy in FP32 else 5e-3)


@pytest.mark.parametrize("policy", EVERY)
def test_sparse_adam(policy):
    model = Words(sparse=True)
    optimizers = [torch.optim.SparseAdam(model.table.parameters(), lr=0.05), sgd(model.head.parameters())]
    amp = MixedPrecision(model, optimizers, policy)
    words = torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(0))
    before = weights(amp)[0]
    losses = []
    for _ in range(15):
        with amp.autocast():
            loss = functional.cross_entropy(model(words), words[:, 0] % 3)
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(before[10:], weights(amp)[0][10:])  # words that never came


@pytest.mark.parametrize("policy", ["O0", "O0,loss_scale=dynamic", "O1,dtype=bfloat16,lists=device,emulate=false"])
def test_a_compiled_model_trains_as_an_eager_one(policy):
    (model, _, amp), (other, _, eager) = session(policy), session(policy)
    compiled = torch.compile(model, backend="aot_eager")
    for number in range(3):
        assert bool(train(amp, compiled, number, spoilt=number == 1).skipped) == (number == 1)
        train(eager, other, number, spoilt=number == 1)
    assert_same(state(amp, model), state(eager, other))


def test_a_session_over_a_compiled_model():
    model = torch.compile(network(), backend="aot_eager")
    amp = MixedPrecision(model, sgd(model.parameters()), "O1,dtype=bfloat16,lists=device,emulate=false")
    plain, _, eager = session("O1,dtype=bfloat16,lists=device,emulate=false")
    for number in range(3):
        train(amp, model, number)
        train(eager, plain, number)
    assert_same(weights(amp), weights(eager))


@pytest.mark.parametrize("policy", EVERY)
def test_losses_that_share_a_graph(policy):
    model, _, amp = session(policy)
    x, y = batch(0)
    with amp.autocast():
        out = model(x)
        first, second = functional.cross_entropy(out, y), out.float().square().mean()
    amp.backward(first, retain_graph=True)
    amp.backward(second)
    amp.step()
    plain = network()
    optimizer = sgd(plain.parameters())
    start = copy.deepcopy(list(plain.parameters()))
    out = plain(x)
    functional.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    assert_as_exact(policy, weights(amp), list(plain.parameters()), start)


class Lion(torch.optim.Optimizer):
    """An optimizer from elsewhere: no hooks, no fused kernel, state of its own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=group["lr"])
                    average.lerp_(p.grad, 0.01)


@pytest.mark.parametrize("policy", EVERY)
def test_an_optimizer_from_elsewhere_with_several_groups(policy):
    def build(model):
        return Lion([{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 1e-3}], lr=1e-2)

    model, plain = network(), network()
    amp = MixedPrecision(model, build(model), policy)
    optimizer = build(plain)
    start = copy.deepcopy(list(plain.parameters()))
    for number in range(5):
        train(amp, model, number)
        plain_step(plain, optimizer, number)
    if policy in FP32:
        assert_same(weights(amp), list(plain.parameters()))
    else:  # signs flip where a gradient is about zero
        same = [
            torch.isclose(a, b, atol=1e-4).float().mean() for a, b in zip(weights(amp), plain.parameters(), strict=True)
        ]
        assert min(same) > 0.8
        assert not torch.equal(start[0], weights(amp)[0])
