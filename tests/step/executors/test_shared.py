"""A step's few shared numbers in one launch: Triton's interpreter against the functions themselves, bit for bit."""

import math

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.scale.config import LossScale
from mezzo.scale.rules import next_scale
from mezzo.scale.state import ScaleState
from mezzo.step.executors.scalars import spelled
from mezzo.step.update import rule

from .test_contract import HYPERS

triton = pytest.importorskip("triton", reason="needs Triton")
from mezzo.step.executors.triton import shared as programs  # noqa: E402

EMPTY = torch.zeros(0, dtype=torch.bool)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels launched."""
    names, run = [], triton.runtime.interpreter.InterpretedFunction.run
    monkeypatch.setattr(
        triton.runtime.interpreter.InterpretedFunction,
        "run",
        lambda kernel, *args, **kwargs: names.append(kernel.fn.__name__) or run(kernel, *args, **kwargs),
    )
    return names


def same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other) or (one.isnan() & other.isnan()).all()


def numbers_of(rule, step, *hypers):
    return (rule.scalars(dict(zip(rule.hypers, hypers, strict=True)), step),)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_the_numbers_of_a_rule(interpreted, launched, name):
    update, compute = rule(name), programs.Shared()
    hypers = [torch.tensor(HYPERS[name][each], dtype=torch.float64) for each in update.hypers]
    steps = [1, 2, 3, 10, 999, 123_456]
    for step in steps:
        tensors = [torch.tensor(step), *hypers]
        same(compute(numbers_of, (update,), tensors), numbers_of(update, *tensors))
    assert launched == ["numbers_of"] * len(steps)


def test_powers_are_those_of_float64(interpreted):
    update = rule("adam")
    hypers = [torch.tensor(HYPERS["adam"][each], dtype=torch.float64) for each in update.hypers]
    (found,) = programs.Shared()(numbers_of, (update,), [torch.tensor(1234), *hypers])
    beta2 = HYPERS["adam"]["beta2"]
    want = torch.tensor(1 / math.sqrt(1 - beta2**1234), dtype=torch.float64).float()
    assert found[update.numbers.index("correction2")] == want


def moved_on(config, scale, clean_steps, budget, floor_overflows, found_inf):
    before = ScaleState(
        scale=scale, clean_steps=clean_steps, budget=budget, floor_overflows=floor_overflows, window=EMPTY
    )
    after = next_scale(before, found_inf, config)
    return after.scale, after.clean_steps, after.budget, after.floor_overflows


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
    state = [start.scale, start.clean_steps, start.budget, start.floor_overflows]
    outcomes = "..........X.X.XX....XXXXXX....." + "." * 60
    for mark in outcomes:
        tensors = [*state, torch.tensor(mark == "X")]
        state = moved_on(config, *tensors)
        same(compute(moved_on, (config,), tensors), state)
    assert launched == ["moved_on"] * len(outcomes)


def judged(norms, inverse, max_norm):
    norm = torch.linalg.vector_norm(norms) * inverse
    clip = torch.clamp((norm + 1e-6).reciprocal() * max_norm, max=1.0)
    return norm, (norm * 0).ne(0), ~torch.isfinite(norm), inverse * clip


@pytest.mark.parametrize("norms", [[3.0, 4.0], [0.0], [1e30, math.inf], [math.nan, 1.0], [1e20, 1e20]], ids=str)
def test_a_verdict(interpreted, norms):
    tensors = [torch.tensor(norms), torch.tensor(1 / 1024), torch.tensor(0.001)]
    same(programs.Shared()(judged, (), tensors), judged(*tensors))


def test_a_norm_of_more_numbers_than_a_block_holds(interpreted):
    norms = torch.rand(5000)
    (found, *_) = programs.Shared()(judged, (), [norms, torch.ones(()), torch.ones(())])
    assert abs(found / norms.double().norm() - 1) < 1e-6


def packed(flag, count, scale, norms):
    return torch.stack([each.to(torch.float32) for each in (flag, count, scale)]), norms


def test_numbers_of_several_dtypes_are_packed_and_what_is_given_comes_back_as_it_is(interpreted):
    tensors = [torch.tensor(True), torch.tensor(7), torch.tensor(0.5, dtype=torch.float64), torch.ones(3)]
    vector, norms = programs.Shared()(packed, (), tensors)
    assert vector.tolist() == [1.0, 7.0, 0.5]
    assert norms is tensors[3]


def of_a_vector(vector):
    return ((vector * 2).sum(),)


def of_an_error_function(value):
    return (value.erf(),)


@pytest.mark.parametrize(
    "function, tensor, why",
    [
        (of_a_vector, torch.ones(3), r"(?s)no program for aten\.mul\.Tensor of vectors.*function of_a_vector.*norm"),
        (of_an_error_function, torch.ones(()), r"(?s)no Triton for aten\.erf\.default.*function of_an_error_function"),
    ],
)
def test_what_cannot_be_written_goes_by_torch_s_operations(interpreted, launched, function, tensor, why):
    with pytest.raises(UnsupportedError, match=why):
        spelled(function, (), [(tensor.dtype, tensor.dim())], programs.NUMBERS)
    compute = programs.Shared()
    for _ in range(2):
        same(compute(function, (), [tensor]), function(tensor))
    assert launched == []


def plus_one(one, other):
    return one + 1, other + 1


def test_numbers_on_several_devices_go_by_torch_s_operations(interpreted, launched):
    there = torch.ones((), device="meta")
    found = programs.Shared()(plus_one, (), [torch.ones(()), there])
    assert (found[0], found[1].device.type) == (2, "meta")
    assert launched == []
