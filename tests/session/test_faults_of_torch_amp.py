"""What users of ``torch.amp`` suffer from, each fault shown in torch 2.13 first, and then its cure.

Faults that need a GPU or several processes are elsewhere. Where a later torch mends one, its first half fails here,
and the fault is history.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import LossScale, MixedPrecision, Policy, PolicyError, ScaleCollapsed, StateError, UnsupportedError

INF = float("inf")


def linear(value=1.0):
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


class Overflow(torch.autograd.Function):
    """Changes nothing on the way forward, and everything on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * INF


def scaler_step(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def session_step(amp, loss, **options):
    amp.backward(loss)
    step = amp.step(**options)
    amp.zero_grad()
    return step


# The scale ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O1,emulate=true", "O2,emulate=true"])
def test_overflows_in_a_row_take_the_scale_to_zero(policy):
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    for _ in range(166):
        scaler_step(scaler, optimizer, Overflow.apply(model.weight).sum())
    assert scaler.get_scale() == 0.0
    scaler_step(scaler, optimizer, model.weight.sum())
    assert model.weight.isnan().all()

    model = linear()
    amp = MixedPrecision(model, sgd(model), policy)
    for _ in range(300):
        assert bool(session_step(amp, Overflow.apply(model.weight).float().sum()).skipped)
    assert amp.loss_scale.item() == 1.0
    assert not session_step(amp, model.weight.float().sum()).skipped
    torch.testing.assert_close(next(amp.master_params()).detach(), torch.full((1, 2), 0.9))


def test_nobody_is_told_that_every_step_overflows():
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    for _ in range(60):  # without a word: warnings are errors here
        scaler_step(scaler, optimizer, Overflow.apply(model.weight).sum())
    assert model.weight.eq(1).all()

    model = linear()
    policy = Policy.O1(emulate=True, loss_scale=LossScale.dynamic(patience=20))
    amp = MixedPrecision(model, sgd(model), policy)
    for _ in range(16 + 20):  # from 65536 to 1, and then the patience
        session_step(amp, Overflow.apply(model.weight).sum())
    amp.backward(model.weight.sum())
    with pytest.raises(ScaleCollapsed, match=r"20 overflows in a row at its floor, 1\n  where(.|\n)*: weight\n"):
        amp.step()
    assert model.weight.eq(1).all()


def test_an_infinity_that_unscaling_makes_is_written():
    model = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-126)
    scaler_step(scaler, sgd(model), (model.weight * 8.0 * 2.0**126).sum())
    assert model.weight.isinf().all()

    for fused in (False, True):
        model = linear()
        policy = Policy.O1(loss_scale=LossScale.constant(2.0**-126), emulate=True)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), policy)
        assert bool(session_step(amp, (model.weight * 8.0 * 2.0**126).sum()).skipped)
        assert model.weight.eq(1).all()


# The step -----------------------------------------------------------------------------------------------


def test_a_closure_given_by_position_sees_scaled_gradients():
    def build():
        model = linear()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=1)
        seen, gather = [], optimizer._gather_flat_grad
        optimizer._gather_flat_grad = lambda: seen.append(gather()) or seen[-1]
        return model, optimizer, seen

    model, optimizer, seen = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def closure():
        optimizer.zero_grad()
        loss = model.weight.sum()
        scaler.scale(loss).backward()
        return loss

    closure()  # without gradients the scaler itself would stumble
    scaler.step(optimizer, closure)
    assert seen[0].tolist() == [1024.0, 1024.0]

    model, optimizer, seen = build()
    amp = MixedPrecision(model, optimizer, "O1,emulate=true,loss_scale=1024")

    def evaluate():
        optimizer.zero_grad()
        loss = model.weight.sum()
        amp.backward(loss)
        return loss

    with pytest.raises(PolicyError, match="closure=closure"):
        amp.step(evaluate)
    amp.step(closure=evaluate)
    assert seen[0].tolist() == [1.0, 1.0]


def test_attempting_to_unscale_fp16_gradients():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).half()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model[0].weight.sum()).backward()
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):  # which, why, what instead?
        scaler.unscale_(sgd(model))

    with pytest.raises(UnsupportedError) as caught:  # before a batch is lost
        MixedPrecision(model, sgd(model), "O1,emulate=true")
    lines = str(caught.value).splitlines()
    assert "0.weight" in lines[1]
    assert any(line.startswith("  write  ") for line in lines)
    model.zero_grad()
    amp = MixedPrecision(model, sgd(model), "O2,emulate=true")
    amp.backward(model[0].weight.float().sum() * 2.0**-30)  # far below what FP16 holds
    amp.unscale_()
    assert next(amp.master_params()).grad.eq(2.0**-30).all()


def test_a_step_does_not_say_whether_it_skipped_and_schedules_go_on():
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    said = []
    for factor in (1.0, INF, 1.0):
        said.append(scaler_step(scaler, optimizer, (model.weight * factor).sum()))
        scheduler.step()
    assert said == [None] * 3
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8  # after two updates

    model = linear()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true")
    steps = []
    for factor in (1.0, INF, 1.0):
        steps.append(session_step(amp, (model.weight * factor).sum()))
        if not steps[-1].skipped:
            scheduler.step()
    assert [bool(step.skipped) for step in steps] == [False, True, False]
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4


def test_an_optimizer_s_own_step_uses_scaled_gradients():
    model, scaler = linear(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = sgd(model)
    scaler.scale(model.weight.sum()).backward()
    optimizer.step()  # a habit of years
    assert model.weight.lt(-100).all()  # 1 − 0.1 · 1024

    model = linear()
    optimizer = sgd(model)
    amp = MixedPrecision(model, optimizer, "O1,emulate=true,loss_scale=1024")
    amp.backward(model.weight.sum())
    with pytest.raises(StateError, match="behind the session's back"):
        optimizer.step()
    assert model.weight.eq(1).all()


def test_clipping_before_unscaling_clips_to_almost_nothing():
    model, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model, lr=1.0)
    scaler.scale(model.weight.sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    assert (1 - model.weight).max() < 2e-5  # instead of 0.7

    model = linear()
    amp = MixedPrecision(model, sgd(model, lr=1.0), "O1,emulate=true", max_grad_norm=1.0)
    session_step(amp, model.weight.sum())
    torch.testing.assert_close(1 - model.weight.detach(), torch.full((1, 2), 0.5**0.5))
    amp.backward(model.weight.sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.warns(UserWarning, match=r"(?s)carry the loss scale.*amp\.unscale_"):
        amp.step()


# Casting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,emulate=false", "O1,dtype=bfloat16,emulate=true",
                                    "O1,emulate=true"])  # fmt: skip
def test_a_weight_written_inside_a_region_is_used_stale(policy):
    def products(model, region):
        with region:
            one = model(torch.ones(1, 2)).item()
            with torch.no_grad():
                model.weight.add_(1.0)
            return one, model(torch.ones(1, 2)).item()

    assert products(linear(), torch.autocast("cpu", dtype=torch.bfloat16)) == (2.0, 2.0)

    assert products(linear(), mezzo.autocast(policy)) == (2.0, 4.0)
    model = linear()
    amp = MixedPrecision(model, sgd(model), policy)
    assert products(model, amp.autocast()) == (2.0, 4.0)


def test_lists_of_cpu_and_cuda_disagree():
    """torch's CPU lists leave exp in low precision, where CUDA's compute it in FP32: one does not predict the other."""
    x = torch.full((4,), 1.5, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.exp(x).dtype == torch.bfloat16

    with mezzo.autocast("O1,dtype=bfloat16,emulate=true"):
        assert torch.exp(x).dtype == torch.float32


class Products(TorchDispatchMode):
    """Note the precision of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_compiled_backward_ignores_an_inner_region_without_autocast():
    def loss(x, weight):
        with torch.autocast("cpu", enabled=False):
            return (x.float() @ weight.float()).sum()

    def gradient(region):
        torch.compiler.reset()
        weight = torch.randn(8, 8, requires_grad=True)
        with region:
            value = torch.compile(loss, backend="aot_eager")(torch.randn(8, 8), weight)
        with Products() as products:
            value.backward()
        return products.dtypes

    assert gradient(torch.autocast("cpu", dtype=torch.bfloat16)) == [torch.bfloat16]

    assert gradient(mezzo.autocast("O1,dtype=bfloat16,emulate=false")) == [torch.float32]


# Weights in low precision -------------------------------------------------------------------------------


def test_updates_of_bf16_weights_are_swallowed():
    def steps(model, optimizer, step):
        for _ in range(100):
            out = model(torch.ones(1, 2, dtype=torch.bfloat16))
            step(functional.mse_loss(out, torch.zeros_like(out)))

    model = linear().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def plain(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    steps(model, optimizer, plain)
    assert model.weight.eq(1).all()  # each update is below half a unit in the last place of 1.0

    model = linear()
    amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2,dtype=bfloat16,emulate=true")
    steps(model, None, lambda loss: session_step(amp, loss))
    reference = linear()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        functional.mse_loss(reference(torch.ones(1, 2)), torch.zeros(1, 1)).backward()
        optimizer.step()
    assert reference.weight.max() < 0.91
    torch.testing.assert_close(next(amp.master_params()).detach(), reference.weight.detach(), rtol=0.01, atol=0)
    assert torch.equal(model.weight, next(amp.master_params()).bfloat16())
