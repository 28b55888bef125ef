"""Pass 1 against torch's own unscaling and clipping, and pass 2's pure function against float64."""

import math

import pytest
import torch

from mezzo.step.executors.portable import Portable
from mezzo.step.gradients import norms
from mezzo.step.storage import PLAIN
from mezzo.step.update import rule
from mezzo.step.verdict import counted, judge, updated

LOW = [torch.float16, torch.bfloat16]
SHAPES = [(300_001,), (20, 30), (3,), (), (0,)]


def gradients_of(dtype, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize(
    "max_norm, dtype", [*zip([None, 0.5, 1e6, torch.tensor(0.5)], [torch.float32, *LOW, torch.float32], strict=True)]
)
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


def test_an_infinity_that_unscaling_makes_and_norms_that_overflow_together_are_found():
    assert judge(torch.tensor([1e30]), torch.tensor(1e10)).found_inf
    assert not judge(torch.tensor([1e30]), torch.tensor(1e-10)).found_inf
    assert judge(torch.tensor([3e38, 3e38]), torch.tensor(1.0)).found_inf
    verdict = judge(Portable().norms([]), torch.tensor(1.0), max_norm=1.0)  # no gradients at all
    assert (verdict.grad_norm, verdict.found_inf) == (0, False)
    verdict = judge(torch.tensor([2.0]), torch.tensor(1.0), max_norm=torch.tensor(1.0, dtype=torch.float64))
    assert (verdict.multiplier.dtype, verdict.multiplier.item()) == (torch.float32, pytest.approx(0.5))


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


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64, torch.complex64])
def test_norms_are_those_of_float64_and_summed_in_fp32_on_any_device(dtype):
    """Of what FP16 holds, and its norm of 94,868 does not; on other devices than CPUs where torch takes them."""
    gradients = [torch.full((1_000,), 3_000.0, dtype=dtype), torch.linspace(-1, 1, 999).to(dtype)]
    exact = [torch.linalg.vector_norm(g.to(torch.complex128)).real for g in gradients]
    torch.testing.assert_close(norms(gradients, torch.device("cpu")).double(), torch.stack(exact), rtol=2e-5, atol=0)
    gradients = [torch.empty(8, dtype=dtype, device="meta") for _ in range(3)]
    assert norms(gradients, torch.device("meta")).dtype == torch.float32
