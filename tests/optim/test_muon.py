"""mezzo.optim.Muon: torch's numbers bit for bit, halves, small momentum, skipped steps, AdamW beside it."""

import copy
import dataclasses
import math
import re
import signal
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo import PolicyError, StateError, UnsupportedError, optim
from mezzo.cast.device import Claim, FormatSupport, decide
from mezzo.optim import optimizer as optimizer_module
from mezzo.optim import planned
from mezzo.step import matrix
from mezzo.step.executors import whole
from mezzo.step.executors.whole import WholeUpdate
from mezzo.step.matrix import EMULATED, NATIVE, RATIOS, Products, orthogonal
from mezzo.step.moments import decode
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

#: torch 2.13 has not yet the last of them.
TORCHS_RATIOS = [name for name in RATIOS if name != "spectral_unclamped" or torch.__version__ >= "2.14"]
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "weight_decay": st.sampled_from([0.0, 0.3]),
        "momentum": st.sampled_from([0.0, 0.3, 0.95]),
        "nesterov": st.booleans(),
        "ns_coefficients": st.just(COEFFICIENTS),
        "eps": st.sampled_from([1e-7, 2.0]),
        "ns_steps": st.integers(0, 6),
        "adjust_lr_fn": st.sampled_from(TORCHS_RATIOS),
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
    for params, make in ((ones, optim.Muon), (others, torch.optim.Muon)):
        optimizer = make([{"params": [params[0]], "lr": 0.1}, {"params": [params[1]]}])
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
    monkeypatch.setattr("mezzo.optim.muon.NATIVE", Products(refused(torch.mm), refused(torch.addmm)))
    monkeypatch.setattr(torch, "mm", refused(torch.mm))
    monkeypatch.setattr(torch, "addmm", refused(torch.addmm))
    one, other = pair(normal(20, 30))
    mine = optim.Muon([one], lr=0.02)
    run([one], mine, gradients([(20, 30)], 3))
    monkeypatch.undo()
    run([other], torch.optim.Muon([other], lr=0.02), gradients([(20, 30)], 3))
    assert (one - other).abs().max() < 0.02 * 0.1


@pytest.mark.parametrize("status, is_native", [("right", True), ("wrong", False), ("unsupported", False)])
def test_products_are_torch_s_wherever_they_are_right_and_be_it_slowly(status, is_native, monkeypatch):
    """A session would emulate BF16 on a processor that has nothing for it; here bits are promised, and torch's are."""
    formats = {dtype: FormatSupport.same_for_all(status, "", claim=Claim(words="as told")) for dtype in (FP16, BF16)}
    report = dataclasses.replace(decide._reports["cpu"], formats=formats)
    monkeypatch.setitem(decide._reports, "cpu", report)
    optimizer = optim.Muon([nn.Parameter(torch.ones(2, 2))])
    assert optimizer.products_on(torch.device("cpu")) is (NATIVE if is_native else EMULATED)
    assert optimizer.products_on(torch.device("meta")) is NATIVE


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


# Momentum in 16 and 8 bits ---------------------------------------------------------------------------------------


def momentum_of(state):
    """Return a momentum in FP32, and how far a value that is rounded at random may be from its own."""
    if "momentum_buffer_codes" in state:
        codes, scales = state["momentum_buffer_codes"], state["momentum_buffer_scale"]
        value = decode(codes, scales)
        return value, (value.abs() + 2.0**-7 * value.abs().amax()) / 15
    return state["momentum_buffer"].float(), state["momentum_buffer"].float().abs() * 2.0**-7


@pytest.mark.parametrize("shape, layout", [((9, 33), "rows"), ((20, 7), "columns"), ((1, 5), "rows")])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_small_momentum_takes_torch_s_steps_and_is_rounded_behind_them(shape, layout, state_dtype, dtype):
    """Each step is torch's from the momentum as it was read; what is kept of the new one is a neighbour of torch's."""
    one, _ = pair(normal(*shape), layout)
    mine = optim.Muon([one], lr=0.02, state_dtype=state_dtype)
    halved([one], dtype)
    for step in gradients([shape], 6):
        other = nn.Parameter(laid(one.detach(), layout))
        theirs = torch.optim.Muon([other], lr=0.02)
        if mine.state:
            theirs.state[other]["momentum_buffer"] = laid(momentum_of(mine.state[one])[0], layout)
        step = [laid(step[0], layout)]
        run([one], mine, [step])
        run([other], theirs, [step])
        kept, spacing = momentum_of(mine.state[one])
        assert torch.equal(one, other)
        assert ((kept - theirs.state[other]["momentum_buffer"]).abs() <= spacing).all()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_small_momentum_is_rounded_at_random_without_a_bias_and_alike_in_copies(state_dtype):
    params = [nn.Parameter(torch.ones(2, 16)) for _ in range(600)]
    optimizer = optim.Muon(params, state_dtype=state_dtype, ns_steps=0, momentum=0.5)
    copied = copy.deepcopy(optimizer)
    others = copied.param_groups[0]["params"]
    gradient = normal(2, 16)
    run(params, optimizer, [[gradient] * 600])
    run(others, copied, [[gradient] * 600])
    rows = [[momentum_of(state) for state in one.state.values()] for one in (optimizer, copied)]
    kept = torch.stack([value for value, _ in rows[0]])
    assert torch.equal(kept, torch.stack([value for value, _ in rows[1]]))
    assert (kept != kept[0]).any()
    spacing = torch.stack([spacing for _, spacing in rows[0]]).amax(0)
    assert ((kept.mean(0) - gradient / 2).abs() <= 5 * spacing / 2 / math.sqrt(600)).all()


# State dicts ------------------------------------------------------------------------------------------------------


def test_state_goes_to_torch_and_back_in_mid_run():
    one, other = pair(normal(20, 33))
    first, second = optim.Muon([one], lr=0.02, nesterov=False), torch.optim.Muon([other], lr=0.02, nesterov=False)
    per_step = gradients([(20, 33)], 9)
    for start in range(0, 9, 3):
        run([one], first, per_step[start : start + 3])
        run([other], second, per_step[start : start + 3])
        assert torch.equal(one, other)
        states = first.state_dict(), second.state_dict()
        first, second = type(second)([one], lr=0.5), type(first)([other], lr=0.5)
        first.load_state_dict(states[0])
        second.load_state_dict(states[1])
    assert {"lr": 0.02, "nesterov": False}.items() <= first.param_groups[0].items()


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_resuming_is_bit_exact(state_dtype, dtype, tmp_path):
    shapes = [(8, 40), (5,), (33, 4)]
    params, others = ([nn.Parameter(normal(*shape, seed=seed)) for shape in shapes] for seed in (0, 1))
    optimizer, resumed = (
        optim.Muon(ps, lr=0.02, adamw={"lr": 0.01}, state_dtype=state_dtype) for ps in (params, others)
    )
    halved(params, dtype)
    halved(others, dtype)
    per_step = gradients(shapes, 8)
    run(params, optimizer, per_step[:4], dtype)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    run(params, optimizer, per_step[4:], dtype)
    run(others, resumed, per_step[4:], dtype)
    assert all(map(torch.equal, params, others))


def test_an_assigned_momentum_is_the_one_that_steps_go_on_with():
    one, other = pair(normal(6, 9))
    mine, theirs = optim.Muon([one]), torch.optim.Muon([other])
    per_step = gradients([(6, 9)], 4)
    for param, optimizer in ((one, mine), (other, theirs)):
        run([param], optimizer, per_step[:2])
        optimizer.state[param]["momentum_buffer"] = torch.ones(9, 6).T * 0.1
        run([param], optimizer, per_step[2:3])
        optimizer.state[param]["momentum_buffer"].zero_()
        run([param], optimizer, per_step[3:])
    assert_same(mine, theirs)


def adamw_state(params):
    optimizer = optim.AdamW(params)
    run(params, optimizer, gradients([tuple(param.shape) for param in params], 1))
    return optimizer.state_dict()


def muon_state(params):
    optimizer = torch.optim.Muon(params)
    run(params, optimizer, gradients([tuple(param.shape) for param in params], 1))
    return optimizer.state_dict()


def mixed_state(params):
    optimizer = optim.Muon([{"params": params[:1], "adamw": True}, {"params": params[1:]}])
    run(params, optimizer, gradients([tuple(param.shape) for param in params], 1))
    return optimizer.state_dict()


WRONG_STATES = {
    "AdamW's": (adamw_state, lambda ps: optim.Muon(ps),
                r"the saved state of group 0 is AdamW's", r"state\[0\] has exp_avg, exp_avg_sq"),
    "Muon's": (muon_state, lambda ps: optim.Muon([{"params": ps, "adamw": True}]),
               r"the saved state of group 0 is not AdamW's", r"state\[0\] has momentum_buffer"),
    "exchanged": (mixed_state, lambda ps: optim.Muon([{"params": ps[:1]}, {"params": ps[1:], "adamw": True}]),
                  r"the saved state of group 0 is AdamW's", r"is updated by Muon"),
    "another shape": (lambda ps: muon_state([nn.Parameter(torch.ones(3, 3)) for _ in ps]), lambda ps: optim.Muon(ps),
                      r"momentum_buffer belongs to another parameter", r"\(3, 3\) → \(4, 4\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_STATES)
def test_a_state_of_another_form_is_named_and_nothing_is_loaded(name):
    save, make, *patterns = WRONG_STATES[name]
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    saved, optimizer = save([nn.Parameter(torch.ones(4, 4)) for _ in range(2)]), make(params)
    run(params, optimizer, gradients([(4, 4)] * 2, 1))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(StateError) as raised:
        optimizer.load_state_dict(saved)
    assert all(re.search(pattern, str(raised.value)) for pattern in patterns), raised.value
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


# AdamW beside it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_two_rules_in_one_optimizer_are_two_optimizers(dtype, state_dtype):
    """torch's Muon would be the oracle of matrices, mezzo's AdamW is that of the rest: a small momentum is mezzo's."""
    shapes = [(12, 20), (20,), (9, 4), (4, 3, 2)]
    ones, others = ([nn.Parameter(normal(*shape)) for shape in shapes] for _ in range(2))
    options = {"lr": 3e-3, "betas": (0.8, 0.99), "amsgrad": True}
    both = optim.Muon(ones, lr=0.02, adamw=options, state_dtype=state_dtype)
    muon = optim.Muon(others[::2], lr=0.02, state_dtype=state_dtype)
    # The number of a group is among the keys of its random rounding.
    adamw = optim.AdamW([{"params": []}, {"params": others[1::2]}], **options, state_dtype=state_dtype)
    halved(ones, dtype)
    halved(others, dtype)
    for step in gradients(shapes, 5):
        run(ones, both, [step])
        run(others[::2], muon, [step[::2]])
        run(others[1::2], adamw, [step[1::2]])
    assert all(map(torch.equal, ones, others))
    assert {*both.state[ones[1]]} == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}


def test_a_group_of_adamw_has_adamw_s_defaults():
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))
    optimizer = optim.Muon([{"params": [matrix]}, {"params": [vector], "adamw": True, "lr": 0.5}], lr=0.02, eps=1e-3)
    values = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False}
    assert values.items() <= optimizer.param_groups[1].items()
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2)), "adamw": True})
    assert optimizer.param_groups[2]["lr"] == 1e-3
    assert [*optimizer.matrices()] == [matrix]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.attention, self.norm = nn.Linear(4, 12), nn.LayerNorm(4)
        self.head.weight = self.embed.weight
        self.proj = nn.Linear(12, 4)


MODELS = {
    "GPT, tied": (Tied, ["attention.weight"]),
    "LLaMA": (
        lambda: nn.ModuleDict({"embed": nn.Embedding(11, 4), "up": nn.Linear(4, 8, bias=False),
                               "down": nn.Linear(8, 4, bias=False), "norm": nn.RMSNorm(4),
                               "head": nn.Linear(4, 11, bias=False)}),
        ["up.weight", "down.weight"],
    ),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)),
                     ["2.weight"]),
    "nothing hidden": (lambda: nn.Linear(4, 2), []),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_which_parameters_are_matrices_of_hidden_layers(name):
    make, names = MODELS[name]
    model = make()
    *hidden, rest = optim.matrices_of(model, lr=3e-4, betas=(0.9, 0.95))
    parameters = dict(model.named_parameters())
    assert [n for group in hidden for n, p in parameters.items() if any(p is q for q in group["params"])] == names
    assert {id(p) for group in (*hidden, rest) for p in group["params"]} == {*map(id, parameters.values())}
    assert {name: value for name, value in rest.items() if name != "params"} == {
        "adamw": True, "lr": 3e-4, "betas": (0.9, 0.95)
    }  # fmt: skip
    optim.Muon([*hidden, rest])


# What bad input gets ----------------------------------------------------------------------------------------------

VECTOR, MATRIX = torch.ones(64), torch.ones(4, 4)
REFUSALS = [
    (lambda: optim.Muon([VECTOR]), "Muon updates matrices", r"where  group 0: a parameter \(64,\)", "matrices_of"),
    (
        lambda: optim.Muon([MATRIX, torch.ones(2, 3, 4), torch.tensor(1.0)]),
        r"a parameter \(2, 3, 4\), a parameter \(\)",
    ),
    (lambda: optim.Muon(nn.LayerNorm(64).named_parameters()), r"group 0: weight \(64,\), bias \(64,\)"),
    (lambda: optim.Muon([{"params": [MATRIX]}, {"params": [VECTOR]}]), r"group 1: a parameter \(64,\)"),
    (lambda: optim.Muon([MATRIX]).add_param_group({"params": VECTOR}), r"a parameter \(64,\)", "adamw"),
    (lambda: optim.Muon([MATRIX, VECTOR], adamw={"beta": 1}), "AdamW has no option 'beta'", "did you mean 'betas'"),
    (lambda: optim.matrices_of(nn.Linear(2, 2), rate=1), "AdamW has no option 'rate'"),
    (lambda: optim.Muon([MATRIX, VECTOR], adamw={"lr": -1.0}), "lr is -1.0"),
    (lambda: optim.Muon([MATRIX], ns_steps=100), "ns_steps is 100", "from 0 to 99", "ns_steps=5"),
    (lambda: optim.Muon([MATRIX], ns_steps=2.0), "ns_steps is 2.0"),
    (lambda: optim.Muon([MATRIX], ns_coefficients=(1.0, 2.0)), "ns_coefficients are", "three finite numbers"),
    (lambda: optim.Muon([MATRIX], ns_coefficients=(1.0, 2.0, math.nan)), "ns_coefficients are"),
    (lambda: optim.Muon([MATRIX], adjust_lr_fn="match_rms_adam"), "unknown adjust_lr_fn", "match_rms_adamw"),
    (lambda: optim.Muon([MATRIX], adjust_lr_fn=3), "unknown adjust_lr_fn 3"),
    (lambda: optim.Muon([MATRIX], momentum=-0.1), "momentum is -0.1"),
    (lambda: optim.Muon([MATRIX], lr=torch.ones(2)), "lr is"),
    (lambda: optim.Muon([MATRIX], eps=math.inf), "eps is inf"),
    (lambda: optim.Muon([MATRIX], fused=True), "Muon takes no fused=True"),
    (lambda: optim.Muon([MATRIX], maximize=True), "Muon has no argument 'maximize'"),
    (lambda: optim.Muon([MATRIX], state_dtype="int4"), "unknown state_dtype 'int4'"),
    (lambda: optim.Muon([nn.Parameter(MATRIX.double())]), "weights in a format that no optimizer of mezzo's updates"),
    (lambda: optim.Muon([nn.Parameter(MATRIX.to(torch.complex64))]), "weights in a format"),
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_muon_cannot_update_is_named(number):
    make, *patterns = REFUSALS[number]
    with pytest.raises(PolicyError) as raised:
        make()
    assert all(re.search(pattern, str(raised.value)) for pattern in patterns), raised.value


def test_torch_refuses_what_it_refuses_in_its_own_words():
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.Muon([])
    with pytest.raises(TypeError, match="ordered collections"):
        optim.Muon({MATRIX})
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        optim.Muon(["weight"])


@pytest.mark.parametrize("name, value, pattern", [
    ("ns_steps", 100, "ns_steps is 100"), ("ns_coefficients", (1.0,), "ns_coefficients"),
    ("adjust_lr_fn", "some", "unknown adjust_lr_fn"), ("lr", math.nan, "lr is nan"), ("eps", -1.0, "eps is -1.0"),
])  # fmt: skip
def test_what_is_written_to_a_group_later_is_refused_before_a_step_writes(name, value, pattern):
    param = nn.Parameter(MATRIX.clone())
    optimizer = optim.Muon([param])
    run([param], optimizer, gradients([(4, 4)], 1))
    before = copy.deepcopy([param, optimizer.state[param]])
    optimizer.param_groups[0][name] = value
    with pytest.raises(PolicyError, match=pattern):
        run([param], optimizer, gradients([(4, 4)], 1))
    torch.testing.assert_close([param, optimizer.state[param]], before, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1,bf16", "O2,fp16"])
def test_an_embedding_among_muon_s_matrices_is_refused_by_a_session_that_knows_it(level):
    """A tied head is named as the embedding that it is, and nothing of the model is converted."""
    model = Tied()
    optimizer = optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    with pytest.raises(UnsupportedError, match=r"Muon updates an embedding\n  where  embed.weight\n") as raised:
        mezzo.MixedPrecision(model, optimizer, f"{level},emulate=true")
    assert "matrices_of(model" in str(raised.value)
    assert type(model.embed.weight) is nn.Parameter
    mezzo.MixedPrecision(model, optim.Muon(optim.matrices_of(model), lr=0.02), f"{level},emulate=true").close()


@pytest.mark.parametrize("before, after", [("O1,fp16", "O2,bf16"), ("O2,bf16", "O3,bf16"), ("O3,bf16", "O2,fp16")])
def test_a_run_whose_policy_changes_goes_on_as_one_that_begins_under_the_new_one(before, after):
    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
        return model, optim.Muon(optim.matrices_of(model, lr=1e-3), lr=0.02, state_dtype="int8")

    def train(amp, model, batches):
        for batch in batches:
            with amp.autocast():
                loss = model(normal(8, 12, seed=batch)).float().square().mean()
            amp.backward(loss)
            amp.step()
            amp.zero_grad()

    (model, optimizer), (twin, other) = built(), built()
    before, after = (f"{policy},emulate=true" + ",loss_scale=1024" * ("fp16" in policy) for policy in (before, after))
    amp = mezzo.MixedPrecision(model, optimizer, before)
    train(amp, model, range(3))
    amp.change(after)
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(amp, model, range(3, 6))
    train(mezzo.MixedPrecision(twin, other, after), twin, range(3, 6))
    values = [{name: value.float() for name, value in net.state_dict().items()} for net in (model, twin)]
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_a_signal_at_any_line_of_a_step_leaves_it_whole_or_not_begun():
    def begun(steps):
        params = [nn.Parameter(normal(6, 9)), nn.Parameter(normal(9, 6))]
        optimizer = optim.Muon(params, lr=0.1, state_dtype="int8")
        halved(params, BF16)
        run(params, optimizer, gradients([(6, 9), (9, 6)], steps))
        return params, optimizer

    def facts(params, optimizer):
        return copy.deepcopy([in_memory(params), [optimizer.state[param] for param in params]])

    outcomes, lines, at, was_interrupted = [facts(*begun(1)), facts(*begun(2))], 0, 0, True

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in (
            optimizer_module.__file__,
            planned.__file__,
            whole.__file__,
            matrix.__file__,
        ):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    while was_interrupted:
        params, optimizer = begun(1)
        for param, gradient in zip(params, gradients([(6, 9), (9, 6)], 2)[1], strict=True):
            param.grad = gradient
        at, lines, before = at + 7, 0, sys.gettrace()
        sys.settrace(trace)
        try:
            optimizer.step()
            was_interrupted = False
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.settrace(before)
        after = facts(params, optimizer)
        assert any(is_same(after, outcome) for outcome in outcomes), at
    assert is_same(after, outcomes[1])
    assert at > 100


def is_same(one, two):
    leaves = zip(*map(tree_leaves, (one, two)), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in leaves)


def test_named_parameters_keep_their_names():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2, bias=False))
    optimizer = optim.Muon(model.named_parameters(), lr=0.02, adamw={"lr": 1e-3})
    assert [group["param_names"] for group in optimizer.param_groups] == [["0.weight", "1.weight"], ["0.bias"]]
