"""Weight casts are made once, and never served stale."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.cast.weights import WeightCasts


class Casts(TorchDispatchMode):
    """Count casts of tensors of one shape from FP32 to low precision."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32 and kwargs.get("dtype") in (torch.float16, torch.bfloat16)
        return func(*args, **kwargs)


def session(policy):
    model = nn.Linear(8, 8, bias=False)
    return model, mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


@pytest.mark.parametrize("policy", ["O1,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=false"])
def test_a_weight_used_k_times_in_m_micro_batches_is_cast_once(policy):
    model, amp = session(policy)
    count = 0
    for _ in range(3):
        with Casts(model.weight.shape) as casts, amp.autocast():
            loss = model(model(torch.ones(2, 8))).float().square().mean()
        count += casts.count
        amp.backward(loss)
    assert count == 1
    amp.step()
    amp.zero_grad()
    with Casts(model.weight.shape) as casts, amp.autocast():
        model(torch.ones(2, 8))
    assert casts.count == 1


def test_accumulated_gradients_through_one_cast_are_right():
    model, amp = session("O1,dtype=float16,emulate=true,loss_scale=128")
    reference = nn.Linear(8, 8, bias=False)
    reference.load_state_dict(model.state_dict())
    for value in (1.0, 2.0):
        x = torch.full((2, 8), value)
        with amp.autocast():
            amp.backward(model(x).float().square().mean())
        reference(x).square().mean().backward()
    wanted = reference.weight.grad
    got = model.weight.grad / amp.loss_scale
    assert (got - wanted).abs().max() <= 4 * 2**-11 * wanted.abs().max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_use_widens_its_own_gradient(dtype):
    """Three gradients whose sum needs more bits than the format has."""
    low, weight, casts = getattr(torch, dtype), nn.Parameter(torch.ones(2, 2)), WeightCasts()
    small = torch.finfo(low).eps / 4
    for scale in (1.0, small, small):
        (casts.cast(weight, low) * scale).sum().backward(retain_graph=True)
    assert weight.grad[0, 0] == 1 + 2 * small
    weight.grad = None
    sum((casts.cast(weight, low) * scale).sum().float() for scale in (1.0, small, small)).backward()
    assert weight.grad[0, 0] == 1 + 2 * small
    assert len(casts) == 1


def test_further_uses_can_be_differentiated_twice():
    weight, casts = nn.Parameter(torch.full((2,), 3.0)), WeightCasts()
    for _ in range(3):
        (first,) = torch.autograd.grad(casts.cast(weight, torch.bfloat16).pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
        assert first.tolist() == [27.0, 27.0]
        assert first.dtype == second.dtype == torch.float32
        assert second.tolist() == [18.0, 18.0]


def test_a_parameter_that_is_frozen_or_thawed_meanwhile_is_cast_anew():
    weight, casts = nn.Parameter(torch.ones(2), requires_grad=False), WeightCasts()
    assert not casts.cast(weight, torch.bfloat16).requires_grad
    weight.requires_grad_(True)
    casts.cast(weight, torch.bfloat16).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]
    weight.requires_grad_(False)
    assert not casts.cast(weight, torch.bfloat16).requires_grad


def test_nothing_is_kept_of_a_function_s_transform():
    """A tensor made inside torch.func belongs to the transform, and is dead after it."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"):
        gradient = torch.func.grad(lambda y: functional.linear(y, weight).float().sum())(x)
        assert gradient.tolist() == [[2.0, 2.0], [2.0, 2.0]]
        rows = torch.func.vmap(lambda y: functional.linear(y, weight))(x)
        functional.linear(x, weight).float().sum().backward()
    assert rows.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    casts = WeightCasts()
    torch.func.vmap(lambda y: y * casts.cast(weight, torch.bfloat16))(x)
    assert len(casts) == 0


def test_nothing_survives_the_step():
    model, amp = session("O1,dtype=float16,emulate=true")
    with amp.autocast():
        loss = model(model(torch.ones(2, 8))).float().mean()
    (kept,) = [entry.cast for entry in amp._parts.prepared[0].casts._casts.values()]
    watch = weakref.ref(kept)
    del kept
    amp.backward(loss)
    del loss
    assert watch() is not None
    amp.step()
    gc.collect()
    assert watch() is None


def test_a_bare_region_forgets_at_its_end():
    weight = nn.Parameter(torch.ones(4, 4))
    with mezzo.autocast("O1,dtype=float16,emulate=true", "cpu") as region:
        out = functional.linear(torch.ones(2, 4), weight)
        watch = weakref.ref(out)
    del out
    gc.collect()
    assert watch() is None
    assert region._casts is None


def test_a_write_inside_a_region_is_seen():
    """FACTS E: torch's own cache serves the stale cast."""
    weight = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(1, 2)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"):
        assert functional.linear(x, weight).tolist() == [[2.0, 2.0]]
        with torch.no_grad():
            weight.fill_(3.0)
        assert functional.linear(x, weight).tolist() == [[6.0, 6.0]]
        weight.data = torch.full((2, 2), 5.0)
        assert functional.linear(x, weight).tolist() == [[10.0, 10.0]]


def test_a_cast_made_without_gradients_never_serves_training():
    weight = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(1, 2)
    with mezzo.autocast("O1,dtype=bfloat16,emulate=true", "cpu"):
        with torch.no_grad():
            assert not functional.linear(x, weight).requires_grad
        with torch.inference_mode():
            functional.linear(x, weight)
        functional.linear(x, weight).float().sum().backward()
    assert weight.grad is not None


def test_a_parameter_in_its_own_dtype_is_not_copied():
    weight = nn.Parameter(torch.ones(2, 2))
    assert WeightCasts().cast(weight, torch.float32) is weight
