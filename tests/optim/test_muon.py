"""mezzo.optim.Muon: torch's numbers bit for bit, halves, small momentum, skipped steps, AdamW beside it."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mezzo
from mezzo import optim
from mezzo.optim import optimizer as optimizer_module
from mezzo.step.executors.whole import WholeUpdate
from mezzo.step.matrix import EMULATED, NATIVE, RATIOS, orthogonal
from mezzo.weights.stepping import in_memory

from .halved import halved

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = st.integers(1, 70)
COEFFICIENTS = (3.0, -4.0, 2.0)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laid(values, layout):
    """Lay a matrix out in memory: by rows, by columns, or with gaps between its rows."""
    if layout == "columns":
        return torch.empty(values.T.shape).T.copy_(values)
    return torch.zeros(len(values), values.shape[1] + 3)[:, 1:-2].copy_(values) if layout == "gaps" else values.clone()


def pair(values, layout="rows"):
    return tuple(nn.Parameter(laid(values, layout)) for _ in range(2))


def gradients(shapes, count, scale=1.0):
    return [
        [normal(*shape, seed=100 * step + i + 7) * scale for i, shape in enumerate(shapes)] for step in range(count)
    ]


def run(params, optimizer, per_step, dtype=None):
    for step in per_step:
        for param, gradient in zip(params, step, strict=True):
            if dtype is not None:
                param.grad = None
                param.grad_dtype = dtype
            param.grad = gradient.to(dtype or FP32)
        optimizer.step()


def assert_same(mine, theirs):
    """Compare weights and momentum of two runs, bit for bit."""
    for (param, own), (other, state) in zip(mine.state.items(), theirs.state.items(), strict=True):
        assert torch.equal(own["momentum_buffer"], state["momentum_buffer"])
        assert torch.equal(param, other)


class Predicated(WholeUpdate):
    """As on a device where the verdict's flag and the numbers stay."""

    def __init__(self, bucket):
        super().__init__(bucket)
        self.on_cpu = False


# torch's numbers ------------------------------------------------------------------------------------------------

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "weight_decay": st.sampled_from([0.0, 0.3]),
        "momentum": st.sampled_from([0.0, 0.3, 0.95]),
        "nesterov": st.booleans(),
        "ns_coefficients": st.just(COEFFICIENTS),
        "eps": st.sampled_from([1e-7, 2.0]),
        "ns_steps": st.integers(0, 6),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
    },
)


@settings(max_examples=60)
@given(SIZES, SIZES, OPTIONS, st.sampled_from(["rows", "columns", "gaps"]), st.booleans())
def test_steps_are_torch_s_bit_for_bit(rows, columns, options, layout, is_tensor):
    one, other = pair(normal(rows, columns), layout)
    rate = torch.tensor(0.02) if is_tensor else 0.02
    mine, theirs = optim.Muon([one], lr=rate, **options), torch.optim.Muon([other], lr=rate, **options)
    per_step = gradients([(rows, columns)], 4)
    for step in per_step[:3]:
        step[0] = laid(step[0], layout)
    run([one], mine, per_step)
    run([other], theirs, per_step)
    assert_same(mine, theirs)


def test_large_matrices_are_torch_s_bit_for_bit():
    """Beyond the widths at which kernels change, and the sizes from which torch's threads share a tensor."""
    shapes = [(300, 130), (130, 300), (512, 512)]
    ones, others = zip(*(pair(normal(*shape)) for shape in shapes), strict=True)
    mine, theirs = optim.Muon(ones, lr=0.05), torch.optim.Muon(others, lr=0.05)
    per_step = gradients(shapes, 3)
    run(ones, mine, per_step)
    run(others, theirs, per_step)
    assert_same(mine, theirs)


def test_whatever_a_program_changes_between_steps_counts_from_the_next_one():
    """Nothing of a group is frozen when a step is planned; a list that is written in place is another value, too."""
    one, other = pair(normal(12, 33))
    mine = optim.Muon([one], ns_coefficients=[*COEFFICIENTS])
    theirs = torch.optim.Muon([other], ns_coefficients=[*COEFFICIENTS])
    changes = [("lr", 0.1), ("weight_decay", 0.7), ("momentum", 0.2), ("nesterov", False), ("ns_steps", 2)]
    changes += [("eps", 3.0), ("adjust_lr_fn", "match_rms_adamw"), ("ns_coefficients", [3.4, -4.7, 2.0])]
    per_step = gradients([(12, 33)], 2 * len(changes) + 2)
    for index, (name, value) in enumerate(changes):
        for param, optimizer in ((one, mine), (other, theirs)):
            run([param], optimizer, per_step[2 * index : 2 * index + 2])
            optimizer.param_groups[0][name] = copy.copy(value)
    for param, optimizer in ((one, mine), (other, theirs)):
        run([param], optimizer, per_step[-2:-1])
        optimizer.param_groups[0]["ns_coefficients"][1] = -4.0
        run([param], optimizer, per_step[-1:])
    assert_same(mine, theirs)


def test_schedules_and_parameters_that_miss_steps_are_torch_s():
    shapes = [(8, 8), (3, 20)]
    ones, others = zip(*(pair(normal(*shape)) for shape in shapes), strict=True)
    for params, kind in ((ones, optim.Muon), (others, torch.optim.Muon)):
        optimizer = kind([{"params": [params[0]], "lr": 0.1}, {"params": [params[1]]}])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number, step in enumerate(gradients(shapes, 4)):
            params[0].grad, params[1].grad = step[0], step[1] if number % 2 else None
            optimizer.step()
            scheduler.step()
    assert all(map(torch.equal, ones, others))


@pytest.mark.parametrize("name", [name for name in RATIOS if name is not None])
def test_the_rate_follows_the_shape(name):
    ratio = {"original": max(1, 6 / 24), "match_rms_adamw": 0.04 * 24, "spectral_unclamped": 6 / 24}[name]
    steps = []
    for options in ({"lr": 0.5, "adjust_lr_fn": name}, {"lr": 0.5 * math.sqrt(ratio)}):
        weight = nn.Parameter(torch.zeros(6, 24))
        run([weight], optim.Muon([weight], **options), gradients([(6, 24)], 1))
        steps.append(weight.detach())
    torch.testing.assert_close(*steps, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(8, 8), (8, 40), (40, 8), (24, 64)])
@pytest.mark.parametrize("products", [NATIVE, EMULATED])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape, products):
    """Against the decomposition in float64, which knows nothing of polynomials."""
    matrix = normal(*shape).bfloat16()
    result = orthogonal(matrix.clone(), (3.4445, -4.7750, 2.0315), 10, 1e-7, products).double()
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    inside = left.T @ result @ right.T
    sizes = inside.diagonal()[values > 0.05 * values[0]]
    assert sizes.min() > 0.4
    assert sizes.max() < 1.5
    assert (inside - inside.diagonal().diag()).abs().max() < 0.12


def test_emulated_products_round_once():
    a, b, c = (normal(9, 9, seed=seed).bfloat16() for seed in range(3))
    wide = [operand.double() for operand in (a, b, c)]
    assert torch.equal(EMULATED.mm(a, b), (wide[0] @ wide[1]).float().bfloat16())
    expected = -4.775 * wide[2] + 2.0315 * (wide[0] @ wide[1])
    rounded = EMULATED.addmm(c, a, b, beta=-4.775, alpha=2.0315)
    assert ((rounded.double() - expected).abs() <= expected.abs() * 2**-8 * 1.01 + 1e-6).all()


def test_products_that_end_the_process_are_emulated(monkeypatch):
    monkeypatch.setattr("mezzo.optim.muon.is_right", lambda *_: False)
    monkeypatch.setattr(torch, "mm", refused(torch.mm))
    monkeypatch.setattr(torch, "addmm", refused(torch.addmm))
    one, other = pair(normal(20, 30))
    mine = optim.Muon([one], lr=0.02)
    run([one], mine, gradients([(20, 30)], 3))
    monkeypatch.undo()
    run([other], torch.optim.Muon([other], lr=0.02), gradients([(20, 30)], 3))
    assert (one - other).abs().max() < 0.02 * 0.1


def refused(function):
    def call(*operands, **options):
        assert all(operand.dtype == FP32 for operand in operands), "a BF16 product"
        return function(*operands, **options)

    return call


# Halves, scales, skipped steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_halves_are_fp32_weights(dtype):
    shapes = [(20, 33), (40, 8)]
    ones, others = zip(*(pair(normal(*shape)) for shape in shapes), strict=True)
    mine, theirs = optim.Muon(ones, lr=0.02), torch.optim.Muon(others, lr=0.02)
    halved(ones, dtype)
    per_step = [[gradient.to(dtype).float() for gradient in step] for step in gradients(shapes, 5)]
    run(ones, mine, per_step, dtype)
    run(others, theirs, per_step)
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other) if dtype == BF16 else (one - other).abs().max() <= 5 * 2.0**-40
    assert all(map(torch.equal, (s["momentum_buffer"] for s in mine.state.values()),
                   (s["momentum_buffer"] for s in theirs.state.values())))  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_are_unscaled_and_clipped_on_the_way_and_never_written(dtype):
    one, other = pair(normal(16, 48))
    mine, theirs = optim.Muon([one], lr=0.02), torch.optim.Muon([other], lr=0.02)
    halved([one], dtype)
    for (gradient,) in gradients([(16, 48)], 3):
        one.grad, other.grad = gradient * 1000, gradient * 1000 * torch.tensor(1000.0).reciprocal()
        mine.grad_scale, mine.found_inf = torch.tensor(1000.0), torch.tensor(0.0)
        mine.step()
        theirs.step()
        assert torch.equal(one.grad, gradient * 1000)
    assert_same(mine, theirs)


@pytest.mark.parametrize("update", [WholeUpdate, Predicated])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_skipped_step_writes_nothing(update, dtype, state_dtype, monkeypatch):
    """DeepSpeed#8435: an engine that skipped the weights alone trained on a poisoned momentum for ever after."""
    monkeypatch.setattr(optimizer_module, "WholeUpdate", update)
    params = [nn.Parameter(normal(6, 10)), nn.Parameter(normal(10, 6))]
    optimizer = optim.Muon(params, lr=0.1, state_dtype=state_dtype)
    halved(params, dtype)
    run(params, optimizer, gradients([(6, 10), (10, 6)], 2))
    before = copy.deepcopy([in_memory(params), [optimizer.state[param] for param in params]])
    for wrong in (math.inf, math.nan, -math.inf):
        for param in params:
            param.grad[0, 0] = wrong
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        after = [in_memory(params), [optimizer.state[param] for param in params]]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_of_a_session_leave_a_run_that_never_saw_their_batches(level):
    """Bit for bit, weights and momentum: a loss of 2^30 times its size is finite, and its FP16 gradients are not."""
    runs = []
    for overflows in ({0, 3, 4}, set()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = optim.Muon(optim.matrices_of(model, lr=1e-3), lr=0.02)
        policy = f"{level},fp16,emulate=true,loss_scale=1024"
        amp = mezzo.MixedPrecision(model, optimizer, policy, max_grad_norm=0.5)
        for batch in range(8) if overflows else (1, 2, 5, 6, 7):
            with amp.autocast():
                loss = model(normal(8, 12, seed=batch)).float().square().mean()
            amp.backward(loss * 2**30 if batch in overflows else loss)
            assert bool(amp.step().skipped) == (batch in overflows)
            amp.zero_grad()
        momentum = optimizer.state[model[0].weight]["momentum_buffer"]
        runs.append([momentum.clone(), *map(torch.clone, model.parameters())])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_where_the_flag_stays_on_the_device_steps_are_the_same_up_to_the_last_roundings(dtype, monkeypatch):
    runs = []
    for update in (WholeUpdate, Predicated):
        monkeypatch.setattr(optimizer_module, "WholeUpdate", update)
        param = nn.Parameter(normal(16, 24))
        optimizer = optim.Muon([param], lr=0.02)
        halved([param], dtype)
        run([param], optimizer, gradients([(16, 24)], 1))
        runs.append(param.detach().clone())
    assert (runs[0] - runs[1]).abs().max() <= 2**-22
