"""Weight casts are made once a region, and never served to another one."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.cast.weight_casts import WeightCasts


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
def test_a_weight_used_several_times_is_cast_once_a_region(policy):
    model, amp = session(policy)
    for _ in range(3):  # micro-batches
        with Casts(model.weight.shape) as casts, amp.autocast():
            loss = model(model(torch.ones(2, 8))).float().square().mean()
            with amp.autocast():
                model(torch.ones(2, 8))
        assert casts.count == 1
        amp.backward(loss)


def test_regions_inside_others_share_the_casts_of_the_outermost_one():
    """Those of modules with rules are such, whose policies differ."""
    weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(2, 8)
    outer = mezzo.Policy.O1("bfloat16", emulate=True)
    with Casts(weight.shape) as casts, mezzo.autocast(outer, "cpu"):
        for inner in (outer, outer.low("gelu"), outer):
            with mezzo.autocast(inner, "cpu"):
                functional.linear(x, weight)
        functional.linear(x, weight)
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
    with Casts(weight.shape) as made:
        sum((casts.cast(weight, low) * scale).sum().float() for scale in (1.0, small, small)).backward()
    assert weight.grad[0, 0] == 1 + 2 * small
    assert made.count == 0


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
    with Casts(weight.shape) as made:
        casts.cast(weight, torch.bfloat16)
    assert made.count == 1


def test_a_write_inside_a_region_is_seen():
    """torch's own cache serves the stale cast."""
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


# Weights written through .data ------------------------------------------------------------------------


def scaled_in_place(param, factor):
    param.data.mul_(factor)


def copied(param, factor):
    param.data.copy_(param.data * factor)


def assigned(param, factor):
    param.data = param.data * factor


def assigned_and_freed(param, factor):
    """Twice, so that the allocator may hand the first address out again."""
    param.data = param.data.clone()
    param.data = param.data * factor


WRITES = [scaled_in_place, copied, assigned, assigned_and_freed]
FORMATS = ["O1,dtype=float16,emulate=true", "O1,dtype=bfloat16,emulate=true", "O1,dtype=bfloat16,emulate=false"]
NO_MODE = "O1,dtype=bfloat16,emulate=false,lists=device"


def prepared(policy):
    model = nn.Linear(8, 8, bias=False)
    return model, mezzo.prepare(model, policy)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [*FORMATS, NO_MODE])
@pytest.mark.parametrize("make", [session, prepared])
def test_weights_swapped_between_regions_are_seen(make, policy, write):
    model, handle = make(policy)
    x = torch.ones(2, 8)

    def run(no_grad):
        with torch.set_grad_enabled(not no_grad), handle.autocast():
            return model(x).detach().clone()

    for no_grad in (True, False, True):
        for _ in range(4):  # a reused address is a matter of chance
            before = run(no_grad)
            write(model.weight, 2.0)
            assert torch.equal(run(no_grad), before * 2)
            write(model.weight, 0.5)
            assert torch.equal(run(no_grad), before)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [*FORMATS, NO_MODE])
def test_an_edit_between_two_passes_of_a_step_is_seen_by_the_second(policy, write):
    """With gradients on, and a backward pass before it: in the middle of a window."""
    model, amp = session(f"{policy},loss_scale=1")
    x, before = torch.randn(2, 8), model.weight.detach().clone()

    def gradient():
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        return loss.detach()

    def by_hand(weight):
        plain = nn.Linear(8, 8, bias=False)
        plain.weight.data.copy_(weight)
        with mezzo.autocast(policy, "cpu"):
            loss = plain(x).float().square().mean()
        loss.backward()
        return loss.detach(), plain.weight.grad

    losses = [gradient()]
    write(model.weight, 2.0)
    losses.append(gradient())
    (first, one), (second, two) = by_hand(before), by_hand(before * 2)
    assert losses == [first, second]
    assert torch.equal(model.weight.grad, one + two)


@pytest.mark.parametrize("policy", FORMATS)
def test_averages_may_be_evaluated_in_the_middle_of_a_window(policy):
    """As EMA classes do: swap in, evaluate without gradients, swap out."""
    model, amp = session(policy)
    x, own = torch.ones(2, 8), model.weight.detach().clone()

    def evaluate():
        with torch.no_grad(), amp.autocast():
            return model(x)

    for _ in range(3):
        with amp.autocast():
            loss = model(x).float().square().mean()
        raw = evaluate()
        model.weight.data.copy_(own * 2)
        assert torch.equal(evaluate(), raw * 2)
        model.weight.data.copy_(own)
        amp.backward(loss)
        assert torch.equal(evaluate(), raw)


@pytest.mark.parametrize("policy", FORMATS)
def test_a_loop_that_steps_through_data_trains_without_a_session(policy):
    torch.manual_seed(0)
    model, handle = prepared(policy)
    x, losses = torch.randn(16, 8), []
    for _ in range(5):
        with handle.autocast():
            loss = (model(x).float() - 1).square().mean()
        loss.backward()
        for param in model.parameters():
            param.data.add_(param.grad, alpha=-0.1)
            param.grad = None
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 5


def test_a_closure_that_moves_weights_through_data_is_evaluated_with_them():
    """As SAM does: climb, evaluate again, come back, step."""

    class Climbing(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            (param,) = self.param_groups[0]["params"]
            param.data.mul_(2)
            closure()
            param.data.mul_(0.5)
            super().step()

    model = nn.Linear(8, 8, bias=False)
    amp = mezzo.MixedPrecision(model, Climbing(model.parameters(), lr=0.1), "O1,dtype=bfloat16,emulate=true")
    losses = []

    def closure():
        amp.zero_grad()
        with amp.autocast():
            loss = model(torch.ones(2, 8)).float().square().mean()
        amp.backward(loss)
        losses.append(loss.item())
        return loss

    amp.step(closure=closure)
    assert losses[1] == pytest.approx(4 * losses[0], rel=2**-7)


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("make", [session, prepared, lambda policy: (nn.Linear(8, 8, bias=False), Bare(policy))])
def test_no_cast_outlives_the_outermost_region(make, failing):
    model, handle = make("O1,dtype=float16,emulate=true")
    made = Made(model.weight.shape)
    for _ in range(2):
        try:
            with made, handle.autocast():
                with handle.autocast(), torch.no_grad():
                    model(torch.ones(2, 8))
                gc.collect()
                assert [watch() is None for watch in made.watches] == [False]
                if failing:
                    raise KeyError
        except KeyError:
            pass
        gc.collect()
        assert [watch() for watch in made.watches] == [None]
        made.watches.clear()


class Bare:
    """A region that belongs to no model."""

    def __init__(self, policy):
        self.policy = policy

    def autocast(self):
        return mezzo.autocast(self.policy, "cpu")


class Made(TorchDispatchMode):
    """Watch the casts that are made of tensors of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.watches = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape and out.dtype == torch.float16:
            self.watches.append(weakref.ref(out))
        return out
