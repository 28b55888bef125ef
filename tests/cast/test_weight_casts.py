"""Weight casts are made once, and never served stale."""

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
    (kept,) = [entry.cast for entry in amp.engine.weights.prepared[0].casts._casts.values()]
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
    assert region.region.casts is None


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


def prepared(policy):
    model = nn.Linear(8, 8, bias=False)
    return model, mezzo.prepare(model, policy)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [*FORMATS, "O1,dtype=bfloat16,emulate=false,lists=device"])
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


@pytest.mark.parametrize("policy", FORMATS)
def test_averages_may_be_evaluated_in_the_middle_of_a_window(policy):
    """As EMA classes do: swap in, evaluate without gradients, swap out; training goes on with its own casts."""
    model, amp = session(policy)
    x, own = torch.ones(2, 8), model.weight.detach().clone()

    def evaluate():
        with torch.no_grad(), amp.autocast():
            return model(x)

    trained = 0
    for _ in range(3):
        with Casts(model.weight.shape) as casts, amp.autocast():
            loss = model(x).float().square().mean()
        trained += casts.count
        raw = evaluate()
        model.weight.data.copy_(own * 2)
        assert torch.equal(evaluate(), raw * 2)
        model.weight.data.copy_(own)
        amp.backward(loss)
        assert torch.equal(evaluate(), raw)
    assert trained == 1
    amp.zero_grad()
    assert len(amp.engine.weights.prepared[0].casts) == 0


def test_a_swap_before_the_first_backward_pass_is_seen_by_the_next_region_with_gradients_too():
    model, amp = session("O1,dtype=bfloat16,emulate=true")
    x = torch.ones(2, 8)
    with amp.autocast():
        before = model(x).detach()
    model.weight.data.mul_(2)
    with amp.autocast():
        out = model(x)
    assert torch.equal(out, before * 2)
    amp.backward(out.float().mean())
    model.weight.data.mul_(2)  # documented: inside the window it is not seen
    with amp.autocast():
        assert torch.equal(model(x), out)
    amp.zero_grad()
    with amp.autocast():
        assert torch.equal(model(x), out * 2)


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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [session, prepared])
def test_what_is_recomputed_after_the_region_has_ended_is_the_same(make, reentrant):
    policy, x = "O1,dtype=float16,emulate=true,loss_scale=1", torch.randn(4, 8, requires_grad=True)
    model, handle = make(policy)
    found = []
    for again in (False, True):
        with handle.autocast():
            body = torch.utils.checkpoint.checkpoint if again else (lambda function, value, **_: function(value))
            loss = model(body(model, x, use_reentrant=reentrant)).float().square().mean()
        loss.backward()
        found.append((model.weight.grad, x.grad))
        model.weight.grad = x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if make is prepared:
        assert len(handle.casts) == 0


@pytest.mark.parametrize("failing", [False, True])
def test_without_a_session_no_cast_outlives_its_region(failing):
    model, handle = prepared("O1,dtype=float16,emulate=true")
    watches = []
    for _ in range(2):
        try:
            with handle.autocast():
                with handle.autocast(), torch.no_grad():
                    model(torch.ones(2, 8))
                (made,) = [made.cast for made in handle.casts._casts.values()]
                watches.append(weakref.ref(made))
                del made
                if failing:
                    raise KeyError
        except KeyError:
            pass
        gc.collect()
        assert len(handle.casts) == 0
        assert [watch() for watch in watches] == [None] * len(watches)


def test_frozen_weights_are_cast_once_in_a_window():
    """The base of an adapter: it needs no gradient, and is read by every micro-batch."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[0].weight.requires_grad_(False)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model[1].parameters(), lr=0.1), "O1,dtype=bfloat16,emulate=true")
    count = 0
    for _ in range(3):
        with Casts(model[0].weight.shape) as casts, amp.autocast():
            loss = model(torch.ones(2, 8)).float().square().mean()
        count += casts.count
        amp.backward(loss)
    assert count == 1
