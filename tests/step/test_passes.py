"""Pass 1 against torch's own unscaling and clipping, and pass 2's pure function against float64."""

import math
from itertools import product

import pytest
import torch

from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.step.passes import counted, judge, updated
from mezzo.step.storage import PLAIN
from mezzo.step.update import rule

LOW = [torch.float16, torch.bfloat16]
SHAPES = [(300_001,), (20, 30), (3,), (), (0,)]


def gradients_of(dtype, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("executor", [Portable, Cpp])
def test_norms_are_float64_s_to_four_millionths(executor):
    for dtype in (torch.float32, *LOW):
        check_norms(executor, dtype)


def check_norms(executor, dtype):
    # FP32 sums of up to 2^17 squares, added up
    gradients = gradients_of(dtype, 3.0)
    gradients.append(torch.randn(64, 40, 3, 3).to(dtype).to(memory_format=torch.channels_last))
    gradients.append(torch.randn(40, 30).to(dtype)[:, ::2])
    exact = torch.stack([gradient.double().norm() for gradient in gradients])
    norms = executor().norms(gradients)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), exact, rtol=4e-6, atol=0)


@pytest.mark.parametrize("executor", [Portable, Cpp])
def test_one_bad_value_anywhere_is_found_and_placed(executor):
    for bad, place in product([math.inf, -math.inf, math.nan], [(0, 0), (0, 300_000), (1, 599), (3, 0)]):
        gradients = gradients_of(torch.float16)
        gradients[place[0]].view(-1)[place[1]] = bad
        verdict = judge(executor().norms(gradients), torch.tensor(1.0))
        assert verdict.found_inf
        assert verdict.norms.isfinite().tolist() == [index != place[0] for index in range(len(gradients))]


@pytest.mark.parametrize("executor", [Portable, Cpp])
def test_the_largest_gradients_of_float16_are_finite(executor):
    gradients = [torch.full((400_000,), 65504.0, dtype=torch.float16)]
    verdict = judge(executor().norms(gradients), torch.tensor(2.0**-16))
    assert not verdict.found_inf
    torch.testing.assert_close(verdict.grad_norm.item(), 65504 * 400_000**0.5 * 2.0**-16, rtol=4e-6, atol=0)


@pytest.mark.parametrize("executor", [Portable, Cpp])
def test_no_gradients_at_all(executor):
    verdict = judge(executor().norms([]), torch.tensor(1.0), max_norm=1.0)
    assert verdict.grad_norm == 0
    assert not verdict.found_inf


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6, torch.tensor(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_the_verdict_is_torch_s_unscaling_and_clipping(dtype, max_norm):
    gradients = gradients_of(dtype, 8.0)
    verdict = judge(Portable().norms(gradients), torch.tensor(1 / 1024), max_norm=max_norm)
    params = [torch.nn.Parameter(torch.zeros_like(gradient, dtype=torch.float64)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.double() / 1024
    norm = torch.nn.utils.clip_grad_norm_(params, math.inf if max_norm is None else float(max_norm))
    torch.testing.assert_close(verdict.grad_norm.double(), norm, rtol=4e-6, atol=0)
    for param, gradient in zip(params, gradients, strict=True):
        torch.testing.assert_close(gradient.double() * verdict.multiplier.double(), param.grad, rtol=4e-6, atol=0)
    assert not verdict.found_inf
    assert all(value.dim() == 0 for value in (verdict.grad_norm, verdict.found_inf, verdict.multiplier))


def test_the_coefficient_is_torch_s_with_its_epsilon():
    verdict = judge(torch.tensor([1e-6]), torch.tensor(1.0), max_norm=1e-6)
    assert verdict.multiplier.item() == pytest.approx(0.5, rel=1e-6)  # 1e-6 / (1e-6 + 1e-6)
    assert judge(torch.tensor([0.0]), torch.tensor(1.0), max_norm=1.0).multiplier == 1
    assert judge(torch.tensor([0.5]), torch.tensor(0.25), max_norm=1.0).multiplier == 0.25


def test_an_infinity_that_unscaling_makes_is_found():
    assert judge(torch.tensor([1e30]), torch.tensor(1e10)).found_inf
    assert not judge(torch.tensor([1e30]), torch.tensor(1e-10)).found_inf


def test_several_norms_that_overflow_together_are_found():
    assert judge(torch.tensor([3e38, 3e38]), torch.tensor(1.0)).found_inf


def test_the_step_counts_updates_and_not_skips():
    steps = [torch.tensor(3), torch.tensor(2**40)]
    for skipped in (False, True):
        steps = counted(torch.tensor(skipped), *steps)
    assert [step.item() for step in steps] == [4, 2**40 + 1]
    assert steps[0].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_the_pure_function_multiplies_in_fp32_and_touches_nothing(dtype):
    update = rule("sgd", "momentum")
    hypers = {"lr": 0.5, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
    scalars = update.scalars({name: torch.tensor(value) for name, value in hypers.items()}, torch.tensor(1))
    gradient = torch.tensor([60000.0, 3e-5]).to(dtype)  # times the multiplier: beyond FP16, and below it
    weight, buffer, multiplier = torch.zeros(2), torch.zeros(2), torch.tensor([2.0])[0]
    key, order = torch.tensor(0, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    value, momentum = updated(update, PLAIN, gradient, (weight, buffer), scalars, multiplier, key, order)
    torch.testing.assert_close(momentum, gradient.double().mul(2).float(), rtol=0, atol=0)
    torch.testing.assert_close(value, -gradient.double().float(), rtol=0, atol=0)
    assert not weight.any()
    assert not buffer.any()
