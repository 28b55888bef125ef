"""Weight casts are made once a region, and never served to another one."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.cast.casts import WeightCasts

from .models import data

FORMATS = ["O1,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=true", "O1,dtype=bfloat16,emulate=false"]
NO_MODE = "O1,dtype=bfloat16,emulate=false,lists=device"


class Casts(TorchDispatchMode):
    """Watch casts of tensors of one shape from FP32 to low precision."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.made = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        if is_cast and args[0].dtype == torch.float32 and out.dtype in (torch.float16, torch.bfloat16):
            self.made.append(weakref.ref(out))
        return out


def linear():
    return nn.Linear(8, 8, bias=False)


def session(policy):
    model = linear()
    return model, mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def prepared(policy):
    model = linear()
    return model, mezzo.prepare(model, policy)


class Bare:
    """A region that belongs to no model."""

    def __init__(self, policy):
        self.policy = policy

    def autocast(self):
        return mezzo.autocast(self.policy, "cpu")


@pytest.mark.parametrize("policy", [FORMATS[0], FORMATS[2]])
def test_a_weight_used_several_times_is_cast_once_a_region(policy):
    model, amp = session(policy)
    for _ in range(3):  # micro-batches
        with Casts(model.weight.shape) as casts, amp.autocast():
            loss = model(model(torch.ones(2, 8))).float().square().mean()
            with amp.autocast():
                model(torch.ones(2, 8))
            outer = amp.policy
            for inner in (outer, outer.low("gelu"), outer):  # as those of modules with rules are
                with mezzo.autocast(inner, "cpu"):
                    functional.linear(torch.ones(2, 8), model.weight)
        assert len(casts.made) == 1
        amp.backward(loss)


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("make", [session, prepared, lambda policy: (linear(), Bare(policy))])
def test_no_cast_outlives_the_outermost_region(make, failing):
    model, handle = make(FORMATS[0])
    for _ in range(2):
        casts = Casts(model.weight.shape)
        try:
            with casts, handle.autocast():
                with handle.autocast(), torch.no_grad():
                    model(torch.ones(2, 8))
                gc.collect()
                assert [watch() is None for watch in casts.made] == [False]
                if failing:
                    raise KeyError
        except KeyError:
            pass
        gc.collect()
        assert [watch() for watch in casts.made] == [None]


# Gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_use_widens_its_own_gradient(dtype):
    """Three gradients whose sum needs more bits than the format has."""
    weight, casts = nn.Parameter(torch.ones(2, 2)), WeightCasts()
    small = torch.finfo(dtype).eps / 4
    for scale in (1.0, small, small):
        (casts.cast(weight, dtype) * scale).sum().backward(retain_graph=True)
    assert weight.grad[0, 0] == 1 + 2 * small
    weight.grad = None
    with Casts(weight.shape) as made:
        sum((casts.cast(weight, dtype) * scale).sum().float() for scale in (1.0, small, small)).backward()
    assert weight.grad[0, 0] == 1 + 2 * small
    assert made.made == []


@pytest.mark.parametrize("policy", FORMATS)
def test_so_does_each_use_in_a_region(policy):
    weight = nn.Parameter(torch.ones(1, 1))
    with mezzo.autocast(policy, "cpu") as region:
        small = torch.finfo(region.policy.dtype).eps / 4
        uses = [functional.linear(torch.full((1, 1), scale), weight).float() for scale in (1.0, small, small)]
    region.run_backward(sum(uses))
    assert weight.grad == 1 + 2 * small


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
    assert casts.cast(weight, torch.float32) is weight  # in its own dtype it is not copied


def test_no_cast_of_a_frozen_weight_or_of_a_trace_is_kept():
    frozen, casts = nn.Parameter(torch.ones(2, 2), requires_grad=False), WeightCasts()
    with Casts(frozen.shape) as made:
        casts.cast(frozen, torch.bfloat16), casts.cast(frozen, torch.bfloat16)
    assert len(made.made) == 2
    net = nn.Linear(2, 2, bias=False)
    with mezzo.autocast(FORMATS[1], "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(nn.Sequential(net, net), torch.ones(1, 2))
    with torch.no_grad():
        net.weight.fill_(3.0)
    assert traced(torch.ones(1, 2)).tolist() == [[36.0, 36.0]]  # no cast of what the weight was is part of it


def test_a_cast_made_without_gradients_never_serves_training():
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with mezzo.autocast(FORMATS[1], "cpu"):
        with torch.no_grad():
            assert not functional.linear(x, weight).requires_grad
        with torch.inference_mode():
            functional.linear(x, weight)
        functional.linear(x, weight).float().sum().backward()
    assert weight.grad is not None


def test_nothing_is_kept_of_a_function_s_transform():
    """A tensor made inside torch.func belongs to the transform, and is dead after it."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with mezzo.autocast(FORMATS[1], "cpu"):
        gradient = torch.func.grad(lambda y: functional.linear(y, weight).float().sum())(x)
        rows = torch.func.vmap(lambda y: functional.linear(y, weight))(x)
        functional.linear(x, weight).float().sum().backward()
    for slope in (gradient, rows, weight.grad):
        assert slope.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    casts = WeightCasts()
    torch.func.vmap(lambda y: y * casts.cast(weight, torch.bfloat16))(x)
    with Casts(weight.shape) as made:
        casts.cast(weight, torch.bfloat16)
    assert len(made.made) == 1


# Weights that are written -------------------------------------------------------------------------------


def test_a_write_inside_a_region_is_seen():
    """torch's own cache serves the stale cast."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with mezzo.autocast(FORMATS[1], "cpu"):
        assert functional.linear(x, weight).tolist() == [[2.0, 2.0]]
        with torch.no_grad():
            weight.fill_(3.0)
        assert functional.linear(x, weight).tolist() == [[6.0, 6.0]]
        weight.data = torch.full((2, 2), 5.0)
        assert functional.linear(x, weight).tolist() == [[10.0, 10.0]]


def assigned_and_freed(param, factor):
    """Twice, so that the allocator may hand the first address out again."""
    param.data = param.data.clone()
    param.data = param.data * factor


WRITES = {
    "scaled": lambda param, factor: param.data.mul_(factor),
    "copied": lambda param, factor: param.data.copy_(param.data * factor),
    "assigned": lambda param, factor: setattr(param, "data", param.data * factor),
    "assigned and freed": assigned_and_freed,
}


@pytest.mark.parametrize("policy", [*FORMATS, NO_MODE])
@pytest.mark.parametrize("make", [session, prepared])
def test_weights_swapped_between_regions_are_seen(make, policy):
    """As averages are that EMA classes swap in, evaluate without gradients, and swap out."""
    model, handle = make(policy)
    x = torch.ones(2, 8)

    def run(no_grad):
        with torch.set_grad_enabled(not no_grad), handle.autocast():
            return model(x).detach().clone()

    for name, write in WRITES.items():
        for no_grad in (True, False):
            for _ in range(4):  # a reused address is a matter of chance
                before = run(no_grad)
                write(model.weight, 2.0)
                assert torch.equal(run(no_grad), before * 2), name
                write(model.weight, 0.5)
                assert torch.equal(run(no_grad), before), name


@pytest.mark.parametrize("policy", [*FORMATS, NO_MODE])
def test_an_edit_between_two_passes_of_a_step_is_seen_by_the_second(policy):
    """With gradients on, and a backward pass before it: in the middle of a window."""
    x = data(2, 8)

    def by_hand(weight):
        plain = linear()
        plain.weight.data.copy_(weight)
        with mezzo.autocast(policy, "cpu"):
            loss = plain(x).float().square().mean()
        loss.backward()
        return loss.detach(), plain.weight.grad

    for name, write in WRITES.items():
        model, amp = session(f"{policy},loss_scale=1")
        before, losses = model.weight.detach().clone(), []
        for number in range(2):
            if number:
                write(model.weight, 2.0)
            with amp.autocast():
                loss = model(x).float().square().mean()
            amp.backward(loss)
            losses.append(loss.detach())
        (first, one), (second, two) = by_hand(before), by_hand(before * 2)
        assert losses == [first, second], name
        assert torch.equal(model.weight.grad, one + two), name
