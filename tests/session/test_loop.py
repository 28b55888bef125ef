"""MixedPrecision in a training loop: exactness, resuming, overflows."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import LossScale, MixedPrecision, Policy

from ..support.tables import pairwise, thinned
from .loops import Syncs, assert_same
from .small_nets import OPTIMIZERS, POLICIES, backward, batch, network, of_torch, session, snapshot, train

# Exactness -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_o0_is_the_plain_loop_bit_for_bit(optimizer, clip):
    model, _, amp = session("O0", optimizer, max_grad_norm=clip)
    train(amp, model, range(5))
    plain = network()
    steps = OPTIMIZERS[optimizer](plain.parameters())
    for step in range(5):
        x, y = batch(step)
        functional.cross_entropy(plain(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        steps.step()
        steps.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


def test_o1_on_device_lists_is_torch_amp_bit_for_bit():
    """The rival's own loop, with its scaler, as the oracle."""
    model, _, amp = session("O1,dtype=bfloat16,lists=device,emulate=false,loss_scale=dynamic", max_grad_norm=1.0)
    train(amp, model, range(5))
    plain = network()
    optimizer, scaler = OPTIMIZERS["sgd"](plain.parameters()), torch.amp.GradScaler("cpu")
    for step in range(5):
        x, y = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(plain(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o2_is_the_recipe_of_the_paper_bit_for_bit(dtype):
    """Micikevicius §3: low copy → forward → scaled backward → FP32 unscale → clip → update of the master."""
    scale, clip = 1024.0, 0.5
    model, _, amp = session(
        Policy.O2(dtype, loss_scale=scale, keep_batchnorm_fp32=False, emulate=False), max_grad_norm=clip
    )
    wide = network()
    optimizer = OPTIMIZERS["sgd"](wide.parameters())
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    low = network()
    for step in range(4):
        with torch.no_grad():
            for name, parameter in low.named_parameters():
                parameter.data = wide.get_parameter(name).to(dtype)
        x, y = batch(step)
        norm = low[1]
        hidden = functional.batch_norm(
            low[0](x.to(dtype)),
            norm.running_mean,
            norm.running_var,
            norm.weight.float(),
            norm.bias.float(),
            True,
        )
        loss = functional.cross_entropy(low[2:](hidden).float(), y)
        low.zero_grad()
        (loss * scale).backward()
        for name, parameter in low.named_parameters():
            wide.get_parameter(name).grad = parameter.grad.float() / scale
        nn.utils.clip_grad_norm_(wide.parameters(), clip)
        optimizer.step()
        backward(amp, model, step)
        amp.step()
        amp.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(dtype)), name
    for mine, theirs in zip(amp.master_params(), wide.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for name in statistics[:2]:
        assert torch.equal(getattr(model[1], name), getattr(low[1], name))


@pytest.mark.parametrize("policy, tolerance", [(policy, 0.1) for policy in POLICIES if not policy.startswith("O3")])
def test_every_way_to_train_stays_near_fp32(policy, tolerance):
    model, _, amp = session(policy, max_grad_norm=1.0)
    reference, _, exact = session("O0", max_grad_norm=1.0)
    train(amp, model, range(10))
    train(exact, reference, range(10))
    x, y = batch(99)
    with torch.no_grad():
        mine = functional.cross_entropy(model.eval()(x).float(), y)
        theirs = functional.cross_entropy(reference.eval()(x), y)
    assert abs(mine - theirs) < tolerance


# Resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, optimizer", thinned(POLICIES, OPTIMIZERS, every=2))
def test_resuming_is_bit_exact(policy, optimizer, tmp_path):
    policy = Policy.parse(policy)
    if policy.loss_scale.mode == "dynamic":  # so that growth falls between save and end
        policy = policy.evolve(loss_scale=LossScale.dynamic(init=256.0, interval=7))
    model, steps, amp = session(policy, optimizer, max_grad_norm=1.0)
    train(amp, model, range(10))
    saved = {"model": model.state_dict(), "optimizer": steps.state_dict(), "amp": amp.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    train(amp, model, range(10, 20))
    for order in list(itertools.permutations(saved))[:: 5 if optimizer == "sgd" else 6]:
        again, fresh, resumed = session(policy, optimizer, max_grad_norm=1.0)
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        for part in order:
            {"model": again, "optimizer": fresh, "amp": resumed}[part].load_state_dict(loaded[part])
        train(resumed, again, range(10, 20))
        assert_same(snapshot(again, fresh), snapshot(model, steps))
        assert_same(resumed.state_dict(), amp.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("parts_before", [1, 2])
def test_resuming_inside_an_accumulation_window_is_bit_exact(policy, parts_before):
    model, optimizer, amp = session(policy, "sgd")
    train(amp, model, range(2), micro_batches=3)
    for part in range(parts_before):
        backward(amp, model, 50 + part)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    again, fresh, resumed = session(policy, "sgd")
    for part, state in zip((again, fresh, resumed), saved, strict=True):
        part.load_state_dict(state)
    for each, net in ((amp, model), (resumed, again)):
        for part in range(parts_before, 3):
            backward(each, net, 50 + part)
        each.step()
        each.zero_grad()
    assert_same(snapshot(again, fresh), snapshot(model, optimizer))


# Overflow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, poison, fused", pairwise(POLICIES, [float("inf"), float("nan")], [False, True]))
def test_a_gradient_that_is_not_finite_skips_the_step(policy, poison, fused):
    model = network()
    optimizer = of_torch(model.parameters(), policy, fused)
    amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
    train(amp, model, range(2))
    before = copy.deepcopy(list(amp.master_params())), copy.deepcopy(dict(model.named_parameters()))
    momentum = copy.deepcopy(optimizer.state_dict()["state"])
    backward(amp, model, 3)
    model[5].weight.grad[0, 0] = poison
    step = amp.step()
    amp.zero_grad()
    assert bool(step.skipped)
    assert not torch.isfinite(step.grad_norm)
    assert_same(before, (list(amp.master_params()), dict(model.named_parameters())))
    assert_same(momentum, optimizer.state_dict()["state"])
    if amp.policy.loss_scale.mode == "dynamic":
        assert (step.scale.item(), step.next_scale.item()) == (65536.0, 32768.0)
    else:
        assert step.next_scale.item() == step.scale.item()
    train(amp, model, range(4, 6))  # and goes on
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_infinity_that_unscaling_would_make_is_found():
    """torch checks before it multiplies by 1/scale, and writes the infinity into the weights."""
    model = nn.Linear(2, 1)
    policy = Policy.O1(loss_scale=LossScale.constant(2.0**-126), emulate=True)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    before = model.weight.detach().clone()
    amp.backward(model.weight.sum())
    model.weight.grad.fill_(8.0)  # finite, and 2**129 once it is unscaled
    assert bool(amp.step().skipped)
    assert torch.equal(model.weight, before)


def test_gradients_are_clipped_by_their_unscaled_norm():
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1,emulate=true", max_grad_norm=1.0)
    amp.backward((model.weight * torch.tensor([3.0, 0.0, 4.0])).sum())
    step = amp.step()
    assert step.grad_norm.item() == 5.0
    torch.testing.assert_close(model.weight.detach(), -torch.tensor([[0.6, 0.0, 0.8]]))


@pytest.mark.parametrize("fused, expected", [(False, 1), (True, 0)])
@pytest.mark.parametrize("policy", POLICIES)
def test_host_syncs_of_a_step(policy, fused, expected):
    model = network()
    optimizer = of_torch(model.parameters(), policy, fused)
    amp = MixedPrecision(model, optimizer, policy, max_grad_norm=1.0)
    train(amp, model, range(1))
    for poison in (False, True):
        with Syncs() as syncs:
            backward(amp, model, 3)
            if poison:
                model[5].weight.grad.mul_(float("inf"))
            amp.step()
            amp.zero_grad()
        assert syncs.count == expected


def test_schedulers_step_only_with_the_weights():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(amp, model, 0)
    amp.step(scheduler=scheduler)
    amp.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.5
    backward(amp, model, 1)
    model[5].weight.grad.fill_(float("nan"))
    amp.step(scheduler=[scheduler])
    assert optimizer.param_groups[0]["lr"] == 0.5
