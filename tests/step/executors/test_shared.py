"""A step's few shared numbers in one launch: Triton's interpreter against the functions themselves, bit for bit."""

import math
import re
from itertools import product

import pytest
import torch

from mezzo.emit.tracing import NoKernel
from mezzo.scale import device_state
from mezzo.scale.config import LossScale
from mezzo.step import verdict
from mezzo.step.update import rule

from .implementations import HYPERS

triton = pytest.importorskip("triton", reason="needs Triton")
from mezzo.step.executors import triton as programs  # noqa: E402


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels launched."""
    names, run = [], triton.runtime.interpreter.InterpretedFunction.run
    monkeypatch.setattr(
        triton.runtime.interpreter.InterpretedFunction,
        "run",
        lambda kernel, *args, warmup, **kwargs: (
            None if warmup else names.append(kernel.fn.__name__) or run(kernel, *args, warmup=warmup, **kwargs)
        ),
    )
    return names


def same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other) or (one.isnan() & other.isnan()).all()


def test_the_numbers_of_a_rule(interpreted, launched):
    for name in ("adamw", "adam", "sgd", "lion"):
        rules, compute = rule(name), programs.Shared()
        hypers = [torch.tensor(HYPERS[name][hyper], dtype=torch.float64) for hyper in rules.hypers]
        for step in (1, 2, 999):
            for found_inf in (False, True):
                tensors = [torch.tensor(found_inf), torch.tensor(step - 1), torch.tensor(step + 3), *hypers, *hypers]
                same(
                    compute(verdict.numbers_of_step, ((rules, rules),), tensors),
                    verdict.numbers_of_step((rules, rules), *tensors),
                )
    assert launched == ["numbers_of_step"] * 24


CONFIGS = [
    LossScale.dynamic(init=1024, interval=3),
    LossScale.dynamic(
        init=1000.3, growth=1.7, backoff=0.9, interval=2, hysteresis=2, refill="clean+backoff", floor=900
    ),
    LossScale.dynamic(init=2.0**100, interval=1, ceiling=None, growth=3.0, refill="growth"),
    LossScale.dynamic(init=64, interval=2, growth_offset=3, floor=32, ceiling=128),
    LossScale.constant(128),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_next_scale(interpreted, launched, config):
    compute, start = programs.Shared(), config.start()
    state = start.tensors()
    outcomes = "....X.XhXX...Xh....."
    for mark in outcomes:
        tensors = [*state, torch.tensor(mark in "Xh"), torch.tensor(mark == "h")]
        expected = device_state.moved_on(config, *tensors)
        same(compute(device_state.moved_on, (config,), tensors), expected)
        state = expected
    assert launched == ["moved_on"] * len(outcomes)


def test_the_next_scale_after_several_steps(interpreted, launched):
    config, compute = LossScale.dynamic(init=1024, interval=2), programs.Shared()
    for flags in product((False, True), repeat=4):
        tensors = [*config.start().tensors(), *map(torch.tensor, flags)]
        results = compute(device_state.moved_on, (config,), tensors)
        same(results, device_state.moved_on(config, *tensors))
        counting = [flag for flag, hold in (flags[:2], flags[2:]) if not hold]
        assert [number.item() for number in results[:2]] == (
            [512.0, 0] if any(counting) else [1024.0, int(bool(counting))]
        )
    assert {*launched} == {"moved_on"}


NORMS = [[3.0, 4.0], [0.0], [1e30, math.inf], [math.nan, 1.0], [1e20, 1e20]]


@pytest.mark.parametrize("scale, max_norm", [(None, None), (1000.3, 0.001), (1024.0, None), (None, 7.3)])
def test_a_verdict(interpreted, launched, scale, max_norm):
    compute, given = programs.Shared(), (scale is not None, max_norm is not None)
    numbers = [*([] if scale is None else [torch.tensor(scale)]), *([] if max_norm is None else [max_norm])]
    for norms in NORMS:
        tensors = [torch.tensor(norms), *numbers]
        results = compute(verdict.judge_numbers, given, tensors)
        same(results, verdict.judge_numbers(*given, *tensors))
    assert launched == ["judge_numbers"] * len(NORMS)


@pytest.mark.parametrize("inner, losses", [([False], [1.0, math.inf]), ([True], [1.0, math.inf])])
def test_a_verdict_with_all_that_is_known_of_losses(interpreted, launched, inner, losses):
    """A loss that is not finite skips the step and leaves the scale, unless gradients that it came of were not, too."""
    compute = programs.Shared()
    for norms, flag in product(NORMS, (False, True)):
        tensors = [torch.tensor(norms), torch.tensor(1024.0), 7.3, *map(torch.tensor, (*inner, *losses, flag))]
        given = True, True, True, len(inner), len(losses)
        results = compute(verdict.judge_step_numbers, given, tensors)
        same(results, verdict.judge_step_numbers(*given, *tensors))
        grad_norm, found_inf, multiplier, failed, *stats = results
        same([grad_norm, multiplier], verdict.judge_numbers(True, True, *tensors[:3])[::2])
        assert found_inf.item() == (not math.isfinite(grad_norm) or any(inner) or math.inf in losses or flag)
        assert failed.item() == (math.inf in losses or any(inner))
        same(stats, [found_inf.float(), multiplier.reciprocal()])
    assert {*launched} == {"judge_step_numbers"}


def test_a_norm_of_more_numbers_than_a_block_holds(interpreted):
    norms = torch.rand(5000)
    norm, *_ = programs.Shared()(verdict.judge_numbers, (False, False), [norms])
    assert abs(norm / norms.double().norm() - 1) < 1e-6


def test_counts_of_steps(interpreted, launched):
    for skipped in (False, True):
        tensors = [torch.tensor(skipped), *(torch.tensor(count) for count in (0, 7, 1 << 40))]
        counts = programs.Shared()(verdict.counted, (), tensors)
        assert [count.tolist() for count in counts] == [count.item() + (not skipped) for count in tensors[1:]]
    assert launched == ["counted"] * 2


def of_a_vector(vector):
    return ((vector * 2).sum(),)


def of_an_error_function(value):
    return (value.erf(),)


def of_another_norm(vector):
    return (torch.linalg.vector_norm(vector, 1),)


def of_one_bound(value):
    return (value.clamp(max=0.5),)


def of_a_constant(value):
    return (value + torch.tensor(0.5),)


def of_a_complex_number(value):
    return (torch.complex(value, value).angle(),)


def test_what_cannot_be_written_goes_by_torch_s_operations(interpreted, launched, lacking, caplog):
    number, vector = torch.ones(()), torch.tensor([3.0, -4.0, 12.0])
    for function, tensor, what in (
        (of_a_vector, vector, "aten.mul.Tensor of vectors"),
        (of_another_norm, vector, "aten.linalg_vector_norm.default, 1"),
        (of_an_error_function, number, "aten.erf.default"),
        (of_one_bound, number, "aten.clamp.default, None, 0.5"),
        (of_a_constant, number, "constant tensors (torch.tensor)"),
        (of_a_complex_number, number, "aten.complex.default of torch.complex64"),
    ):
        words = f"no Triton for {what} of torch {torch.__version__}\n"
        with pytest.raises(NoKernel, match=re.escape(words)):
            programs.spelled_function(function, (), [(tensor.dtype, tensor.dim())])
        caplog.clear()
        for _ in range(2):
            compute = programs.Shared()
            for _ in range(2):
                same(compute(function, (), [tensor]), function(tensor))
        assert [words in entry.getMessage() for entry in caplog.records if entry.name.startswith("mezzo")] == [True]
    results = programs.Shared()(
        verdict.counted, (), [torch.tensor(False), torch.tensor(1), torch.tensor(1, device="meta")]
    )
    assert (results[0], results[1].device.type) == (2, "meta")  # numbers on several devices
    assert launched == []
