"""A step's few shared numbers in one launch: Triton's interpreter against the functions themselves, bit for bit."""

import math
from itertools import product

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.scale import scaler
from mezzo.scale.config import LossScale
from mezzo.session import scale, stats
from mezzo.step import passes
from mezzo.step.update import rule

from .test_contract import HYPERS

triton = pytest.importorskip("triton", reason="needs Triton")
from mezzo.step.executors.triton import launch  # noqa: E402
from mezzo.step.executors.triton import shared as programs  # noqa: E402


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


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_the_numbers_of_a_rule(interpreted, launched, name):
    rules, compute = rule(name), programs.Shared()
    hypers = [torch.tensor(HYPERS[name][each], dtype=torch.float64) for each in rules.hypers]
    steps = [1, 2, 3, 10, 999, 123_456]
    for step in steps:
        tensors = [torch.tensor(step), *hypers]
        same(compute(launch._scalars, (rules,), tensors), launch._scalars(rules, *tensors))
    assert launched == ["scalars"] * len(steps)


def test_powers_are_those_of_float64(interpreted):
    rules = rule("adam")
    hypers = [torch.tensor(HYPERS["adam"][each], dtype=torch.float64) for each in rules.hypers]
    (found,) = programs.Shared()(launch._scalars, (rules,), [torch.tensor(1234), *hypers])
    beta2 = HYPERS["adam"]["beta2"]
    want = torch.tensor(1 / math.sqrt(1 - beta2**1234), dtype=torch.float64).float()
    assert found[rules.numbers.index("correction2")] == want


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
    outcomes = "......X.XhXX....XXXhXXX..." + "." * 60
    for mark in outcomes:
        tensors = [torch.tensor(mark in "Xh"), torch.tensor(mark == "h"), *state]
        expected = scaler.moved_on(config, *tensors)
        same(compute(scaler.moved_on, (config,), tensors), expected)
        state = expected[1:]
    assert launched == ["moved_on"] * len(outcomes)


def test_the_next_scale_where_skipped_steps_are_counted(interpreted, launched):
    config = LossScale.dynamic(init=1024, interval=4, hysteresis=9, skip_rate_limit=0.5)
    compute, start = programs.Shared(), config.start()
    for found, held, skipped in product((False, True), (False, True), range(5)):
        flags = [torch.tensor(found), torch.tensor(held)]
        tensors = [*flags, start.scale, start.clean_steps, start.budget, start.floor_overflows, torch.tensor(skipped)]
        expected = scaler.moved_on(config, *tensors)
        same(compute(scaler.moved_on, (config,), tensors), expected)
        assert bool(expected[-1]) == (found and not held and skipped > 2)
    assert {*launched} == {"moved_on"}


def test_what_has_no_scale_is_accounted_for_in_one_launch_too(interpreted, launched):
    config = LossScale.none()
    for loss, flag in product((1.0, math.nan), (False, True)):
        tensors = [t(flag), t(loss), t(flag), t(1.0), t(3), t(1), t(0)]
        failed, told, hold, *moved = programs.Shared()(scale._adapted, ((config, 1, 0, 4),), tensors)
        assert told.tolist() == [flag, math.isnan(loss), 1.0, 0.0]
        assert (failed.item(), hold.item()) == (math.isnan(loss), flag and math.isnan(loss))
        same(moved[1:], tensors[3:])
    assert {*launched} == {"adapted"}


def test_the_scales_of_two_losses_move_in_one_launch(interpreted, launched):
    config = LossScale.dynamic(init=1024, interval=2)
    states = [[t(1024.0), t(1), t(1), t(0)], [t(8.0), t(0), t(1), t(2)]]
    kinds = ((config, 1, 0, 4), (config, 2, 1, 4))
    compute = programs.Shared()
    for loss, *flags in product((1.0, math.inf), *[(False, True)] * 4):
        one, *others = map(t, flags)
        tensors = [t(any(flags)), t(loss), one, *states[0], t(2.0), *others, *states[1]]
        failed, told, *found = compute(scale._adapted, kinds, tensors)
        same([failed, told, *found], scale._adapted(*kinds, *tensors))
        assert bool(failed) == math.isinf(loss)
        holds, nexts = (found[0], found[6]), (found[2], found[8])
        assert [bool(hold) for hold in holds] == [math.isinf(loss) and flags[0], False]
        expected = [1024.0 if hold else 512.0 if flag else 2048.0 for hold, flag in [(holds[0], flags[0])]]
        expected.append(4.0 if any(flags[1:]) else 8.0)
        assert [each.item() for each in nexts] == expected
        assert [each.tolist() for each in found[-2:]] == [[1024.0, 8.0], expected]
        floors = [found[5].item(), found[11].item()]
        assert told.tolist() == [any(flags), math.isinf(loss), expected[0], floors[0], expected[1], floors[1]]
    assert {*launched} == {"adapted"}


t = torch.tensor
NORMS = [[3.0, 4.0], [0.0], [1e30, math.inf], [math.nan, 1.0], [1e20, 1e20]]


@pytest.mark.parametrize("max_norm", [None, 0.001, 7.3])
@pytest.mark.parametrize("scale", [None, 1024.0, 1000.3])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_verdict(interpreted, launched, scale, max_norm, is_told):
    compute, given = programs.Shared(), (scale is not None, max_norm is not None, is_told)
    numbers = [*([] if scale is None else [torch.tensor(scale)]), *([] if max_norm is None else [max_norm])]
    for norms in NORMS:
        tensors = [torch.tensor(norms), *numbers]
        found = compute(passes.decided, given, tensors)
        same(found, passes.decided(*given, *tensors))
        if is_told:  # the flag, and what to divide gradients by where they are clipped
            divisors = [] if max_norm is None else [found[2].reciprocal()]
            same(found[3:], [found[1].float(), *divisors])
    assert launched == ["decided"] * len(NORMS)


def test_a_norm_of_more_numbers_than_a_block_holds(interpreted):
    norms = torch.rand(5000)
    found, *_ = programs.Shared()(passes.decided, (False, False, False), [norms])
    assert abs(found / norms.double().norm() - 1) < 1e-6


def test_counts_of_steps(interpreted, launched):
    for skipped in (False, True):
        tensors = [torch.tensor(skipped), *(torch.tensor(count) for count in (0, 7, 1 << 40))]
        counts = programs.Shared()(passes.counted, (), tensors)
        assert [count.tolist() for count in counts] == [count.item() + (not skipped) for count in tensors[1:]]
    assert launched == ["counted"] * 2


def test_losses_that_fail_by_themselves(interpreted, launched):
    compute = programs.Shared()
    for loss in (1.5, math.inf, math.nan):
        for dtype in (torch.float32, torch.float64):
            for flags in ([False], [True], [True, True], [False, True], [True, False]):
                tensors = [torch.tensor(loss, dtype=dtype), *map(torch.tensor, flags)]
                same(compute(scale._told, (), tensors), scale._told(*tensors))
    assert {*launched} == {"told"}


def test_the_account_takes_numbers_of_several_dtypes(interpreted, launched):
    tensors = [torch.tensor(True), torch.tensor(False), torch.tensor(0.5), torch.tensor(7)]
    (vector,) = programs.Shared()(stats.account, (), tensors)
    assert (vector.tolist(), vector.dtype) == ([1.0, 0.0, 0.5, 7.0], torch.float32)
    assert launched == ["account"]


def given_back(number, vector):
    return number + 1, vector


def test_what_is_given_comes_back_as_it_is(interpreted):
    vector = torch.ones(3)
    assert programs.Shared()(given_back, (), [torch.ones(()), vector])[1] is vector


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
        programs.written(function, (), [(tensor.dtype, tensor.dim())])
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
