"""What a session refuses before anything is changed: models, optimizers, policies, losses, calls."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import MixedPrecision, Policy, PolicyError, StateError, UnsupportedError

from .loops import assert_same
from .small_nets import OPTIMIZERS, POLICIES, backward, batch, fresh, network, session, snapshot


def foreign_optimizer():
    return network(), OPTIMIZERS["sgd"](network().parameters())


def stepped(level):
    model, optimizer = fresh()
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def in_session():
    model, optimizer, _ = session("O1,emulate=true")
    return model, optimizer


def lazy():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    return model, torch.optim.SGD(model[0].parameters(), lr=1.0)


def huge():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1e5)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def half_model():
    model = network().half()
    return model, OPTIMIZERS["sgd"](model.parameters())


def double_model():
    model = network().double()
    return model, OPTIMIZERS["sgd"](model.parameters())


@pytest.mark.parametrize(
    "build, policy, error, says",
    [
        (fresh, "O4", PolicyError, "unknown level 'O4'"),
        (foreign_optimizer, "O1", PolicyError, "updates parameters that are not the models'"),
        (lambda: (network(), "adamw"), "O1", PolicyError, "must be a torch.optim.Optimizer, not str"),
        (lambda: ("net", fresh()[1]), "O1", PolicyError, "a model must be an nn.Module, not str"),
        (lambda: (m := network(), [o := OPTIMIZERS["sgd"](m.parameters()), o]), "O1", PolicyError, "listed twice"),
        (lambda: (network(), torch.optim.SGD([{"params": []}])), "O1", PolicyError, "updates no parameter"),
        (lambda: in_session(), "O1", StateError, "belongs to a session"),
        (lambda: lazy(), "O2", UnsupportedError, "lazy parameters have no values yet"),
        (lambda: huge(), "O2", UnsupportedError, "values do not fit float16"),
        (lambda: stepped("O3"), "O3,dtype=bfloat16", StateError, "holds FP32 state"),
        (half_model, "O1", UnsupportedError, "fp16 gradients cannot be unscaled in fp16"),
        (double_model, "O2", UnsupportedError, "float64 parameters"),
        (fresh, "O2,fp32_module=nowhere", PolicyError, "matches no module"),
    ],
)
def test_refused_sessions_leave_everything_as_it_was(build, policy, error, says):
    model, optimizer = build()
    real = isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    real = real and "lazy" not in says and "belongs" not in says  # those are not as they were built
    before = snapshot(model, optimizer) if real else None
    groups = list(optimizer.param_groups[0]["params"]) if real else None
    with pytest.raises(error, match=says) as caught:
        MixedPrecision(model, optimizer, policy)
    assert "\n  write  " in str(caught.value) or "did you mean" in str(caught.value) or "why" in str(caught.value)
    if real:
        assert_same(before, snapshot(model, optimizer))
        assert all(a is b for a, b in zip(groups, optimizer.param_groups[0]["params"], strict=True))
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert vars(optimizer).keys() & {"zero_grad", "add_param_group"} == set()


def test_a_second_model_that_fails_undoes_the_first():
    good, bad = network(), network().double()
    optimizer = OPTIMIZERS["sgd"](good.parameters())
    before = snapshot(good, optimizer)
    with pytest.raises(UnsupportedError):
        MixedPrecision([good, bad], optimizer, "O2")
    assert_same(before, snapshot(good, optimizer))


def test_fp32_state_is_carried_over_exactly_where_there_are_masters():
    model, optimizer = stepped("O2")
    reference, plain = copy.deepcopy(model), None
    plain = OPTIMIZERS["adamw"](reference.parameters())
    plain.load_state_dict(optimizer.state_dict())
    amp = MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")
    for p, q in zip(amp.master_params(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])


def test_calls_in_the_wrong_order():
    model, _, amp = session("O1,emulate=true")
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()
    backward(amp, model, 0)
    amp.zero_grad()
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()
    backward(amp, model, 0)
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(StateError, match="no parameter has a gradient"):
        amp.step()


@pytest.mark.parametrize(
    "loss, error, says",
    [
        (lambda m: m(batch(0)[0]), PolicyError, r"one floating number(.|\n)*shape \(8, 5\)"),
        (lambda m: torch.tensor(3), PolicyError, r"one floating number(.|\n)*torch.int64"),
        (lambda m: 3.0, PolicyError, "the loss is a float, not a tensor"),
        (lambda m: m(batch(0)[0]).sum().detach(), StateError, "depends on no parameter"),
    ],
)
def test_losses_that_cannot_be_differentiated(loss, error, says):
    model, _, amp = session("O1,emulate=true")
    with pytest.raises(error, match=says):
        amp.backward(loss(model))
    assert all(p.grad is None for p in model.parameters())


def test_the_scale_cannot_change_inside_a_window():
    model, _, amp = session("O1,emulate=true")
    other = session("O1,emulate=true")[2].state_dict()
    backward(amp, model, 0)
    with pytest.raises(StateError, match="inside an accumulation window"):
        amp.load_state_dict(other)
    amp.loss_scale.mul_(2)
    for call in (lambda: backward(amp, model, 1), amp.step):
        with pytest.raises(StateError, match="scale was changed inside an accumulation window"):
            call()
    amp.zero_grad()
    backward(amp, model, 1)
    amp.step()


def test_states_of_another_session_list_every_difference():
    _, _, amp = session("O1,emulate=true")
    model = nn.Linear(3, 2)
    other = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0), "O2,emulate=true").state_dict()
    before = copy.deepcopy(amp.state_dict())
    with pytest.raises(StateError) as caught:
        amp.load_state_dict(other)
    for line in (
        "policy level: O2 → O1",
        "parameter weight: float16 [2, 3] → missing",
        "parameter 0.weight: missing → float32 [4, 1, 3, 3]",
    ):
        assert line in str(caught.value)
    assert_same(before, amp.state_dict())
    for wrong in ({}, {"version": 2}, 7):
        with pytest.raises(StateError, match="not the state of a MixedPrecision session"):
            amp.load_state_dict(wrong)
    with pytest.raises(StateError, match="version 99"):
        amp.load_state_dict(before | {"version": 99})


def test_optimizers_may_share_parameters_without_masters():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    pair = [torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(model.parameters(), lr=1.0)]
    amp = MixedPrecision(model, pair, "O1,emulate=true,loss_scale=64", max_grad_norm=10.0)
    amp.backward((model.weight * torch.tensor([3.0, 4.0])).sum())
    assert amp.step().grad_norm.item() == 5.0
    assert model.weight.tolist() == [[-6.0, -8.0]]


def test_a_step_that_fails_cannot_unscale_twice():
    model, optimizer, amp = session("O1,emulate=true")
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(amp, model, 0)
    with pytest.raises(ZeroDivisionError):
        amp.step()
    failing.remove()
    with pytest.raises(StateError, match=r"step\(\) before backward\(\)"):
        amp.step()


def test_forgetting_zero_grad_is_noticed_before_gradients_mix():
    model, optimizer, amp = session("O1,emulate=true")
    backward(amp, model, 0)
    amp.step()
    with pytest.raises(StateError, match="the last step's gradients are still there"):
        backward(amp, model, 1)
    optimizer.zero_grad(set_to_none=False)  # zeros are no leftovers
    backward(amp, model, 1)
    amp.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_behind_the_session_s_back_is_refused_before_anything_is_written(policy):
    model, optimizer, amp = session(policy)
    backward(amp, model, 0)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(StateError, match=r"behind the session's back(.|\n)*write  amp.step\(\)"):
        optimizer.step()
    assert_same(before, list(model.parameters()))
    amp.step()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_fused_sgd_that_would_leave_low_precision_weights_as_they_are_is_refused(dtype):
    """Whether this torch's does, is seen on its own optimizer."""
    plain = nn.Linear(64, 1, bias=False).to(dtype)
    plain.weight.grad = torch.ones_like(plain.weight)
    before = plain.weight.detach().clone()
    torch.optim.SGD(plain.parameters(), lr=1.0, fused=True).step()
    if not torch.equal(plain.weight, before):
        pytest.skip("this torch's fused SGD moves low-precision weights")
    name = str(dtype).removeprefix("torch.")
    policy = f"O3,dtype={name},emulate=true"
    says = rf"fused SGD of torch .* leaves most {dtype} weights on CPUs as they are[\s\S]*SGD\(…, fused=False\)"
    model = nn.Linear(64, 1)
    with pytest.raises(UnsupportedError, match=says):
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), policy)
    assert model.weight.dtype == torch.float32
    MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=False), policy).close()
    model = nn.Linear(64, 1)
    amp = MixedPrecision(model, torch.optim.SGD([model.bias], lr=1.0), policy)
    with pytest.raises(UnsupportedError, match=says):
        amp.add(torch.optim.SGD([model.weight], lr=1.0, fused=True))
    amp.close()
    small = nn.Linear(2, 1)  # fewer weights than a vector holds move
    MixedPrecision(small, torch.optim.SGD(small.parameters(), lr=1.0, fused=True), policy).close()
    for level in ("O0", f"O1,dtype={name},emulate=true", f"O2,dtype={name},emulate=true"):
        model = nn.Linear(64, 1)
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), level).close()


def test_fused_sgd_makes_its_momentum_in_a_real_step():
    """torch's kernel allocates the buffer and, when told to skip, leaves it as it found it."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true")
    amp.backward((model.weight * float("inf")).sum())
    assert bool(amp.step().skipped)
    amp.zero_grad()
    assert not optimizer.state
    before = model.weight.detach().clone()
    amp.backward(model.weight.sum())
    amp.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_masters_are_saved_by_name():
    def build(order):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        params = [p for i in order for p in model[i].parameters()]
        return model, MixedPrecision(model, torch.optim.SGD(params, lr=0.1), "O2,dtype=bfloat16,emulate=true")

    model, amp = build([0, 1])
    again, other = build([1, 0])
    again.load_state_dict(model.state_dict())
    other.load_state_dict(amp.state_dict())
    assert_same(model.state_dict(), again.state_dict())
    assert_same(amp.state_dict()["masters"], other.state_dict()["masters"])


def test_two_models_may_share_a_parameter():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    amp = MixedPrecision([first, second], torch.optim.SGD(first.parameters(), lr=0.1), "O2,dtype=bfloat16,emulate=true")
    assert first.weight.dtype == torch.bfloat16
    amp.close()
    assert first.weight.dtype == torch.float32


def test_sessions_are_neither_copied_nor_pickled():
    _, _, amp = session("O2,emulate=true")
    with pytest.raises(StateError, match=r"cannot be copied(.|\n)*copy.deepcopy\(model\)"):
        copy.deepcopy(amp)
    with pytest.raises(StateError, match=r"copied or pickled(.|\n)*amp.state_dict\(\)"):
        pickle.dumps(amp)


@pytest.mark.parametrize(
    "scheduler, says",
    [
        (3, "a scheduler has a step"),
        (lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o), "ReduceLROnPlateau needs a metric"),
    ],
)
def test_schedulers_are_checked_before_anything_is_written(scheduler, says):
    model, optimizer, amp = session("O1,emulate=true")
    backward(amp, model, 0)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(PolicyError, match=says):
        amp.step(scheduler=scheduler(optimizer) if callable(scheduler) else scheduler)
    assert_same(before, list(model.parameters()))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), "1"])
def test_a_norm_to_clip_to_is_positive(wrong):
    with pytest.raises(PolicyError, match="max_grad_norm is"):
        session("O0", max_grad_norm=wrong)


def test_fp16_emulation_is_reported():
    assert session("O1,dtype=float16,emulate=true")[2].emulated
    assert not session("O0")[2].emulated


def test_policy_may_be_a_file(tmp_path):
    Policy.O2("bfloat16").save(tmp_path / "policy.toml")
    assert session(tmp_path / "policy.toml")[2].policy == Policy.O2("bfloat16")
