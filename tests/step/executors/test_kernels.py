"""Kernels that find tensors by their addresses, in C++ and in Triton: the pure function, bit for bit."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.step.executors.cpp.launch import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.step.passes import judge, updated
from mezzo.step.rounding import keys
from mezzo.step.storage import PLAIN, SPLIT

from .test_contract import (
    BF16,
    FP16,
    FP32,
    ODD,
    advance,
    bucket_of,
    check_against_torch,
    gradients_of,
    random,
    same_bits,
    take,
    tensors_of,
)

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(2500,), (3, 5), (1024,), ()]  # whole blocks with and without a rest, and short ones
RULES = [
    "adamw",
    "adamw amsgrad",
    "adam",
    "adam amsgrad maximize",
    "sgd maximize",
    "sgd momentum",
    "sgd momentum nesterov maximize",
]
RULES += ["lion", "lion maximize"]
STORAGES = [SPLIT, PLAIN]


class Kernels(NamedTuple):
    """An executor, and where it runs."""

    executor: Any
    device: torch.device
    is_interpreted: bool = False


@pytest.fixture(params=["cpp", "interpreted", pytest.param("cuda", marks=CUDA)])
def kernels(request):
    """C++ on the CPU; Triton interpreted there, or compiled."""
    if request.param == "cpp":
        return Kernels(Cpp, torch.device("cpu"))
    pytest.importorskip("triton", reason="needs Triton")
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    from mezzo.step.executors.triton.launch import Triton

    is_interpreted = request.param == "interpreted"
    return Kernels(Triton, torch.device("cpu" if is_interpreted else "cuda"), is_interpreted)


class Ieee(TorchDispatchMode):
    """Correctly rounded roots: a root in float64 rounds to FP32 as the exact one does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_root = func is torch.ops.aten.sqrt.default and type(args[0]) is torch.Tensor  # not one that is traced
        if is_root and args[0].dtype == FP32:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


def moved(bucket, device):
    """A copy of a bucket, on another device or not."""

    def to(tensor):
        return None if tensor is None else torch.empty_like(tensor, device=device).copy_(tensor)

    return dataclasses.replace(
        bucket,
        hypers={name: to(value) for name, value in bucket.hypers.items()},
        step=to(bucket.step),
        weights=[to(weight) for weight in bucket.weights],
        extras=[to(extra) for extra in bucket.extras],
        states=[tuple(to(state) for state in states) for states in bucket.states],
    )


def made(device, *args, **kwargs):
    return moved(bucket_of(*args, **kwargs), device)


def pure_step(bucket, gradients, verdict):
    """What every executor is measured against, predicated like this one."""
    seeds = keys(bucket.step, len(gradients), bucket.seed)
    for index, gradient in enumerate(gradients):
        scalars, targets = bucket.rule.scalars(bucket.hypers, bucket.step), bucket.targets(index)
        order = torch.arange(gradient.numel(), dtype=torch.int32, device=gradient.device).view(gradient.shape)
        numbers = scalars, verdict.multiplier, seeds[index], order
        with Ieee():
            values = updated(bucket.rule, bucket.storage, gradient, targets, *numbers)
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


def step(executor, bucket, update, gradients, **kwargs):
    inverse = torch.tensor(1 / 1024, device=bucket.step.device)
    before = [gradient.clone() for gradient in gradients]
    verdict = judge(executor.norms(gradients), inverse, **kwargs)
    advance([bucket.step], verdict.found_inf)
    update(gradients, verdict)
    assert same_bits(gradients, before)
    return verdict


def on(device, tensors):
    return [tensor.to(device) for tensor in tensors]


def assert_same_but_for_nan(mine, theirs):
    """Bits are equal wherever a weight is a number, and NaN is NaN."""
    for index, (one, other) in enumerate(zip(mine.weights, theirs.weights, strict=True)):
        assert torch.equal(one.isnan(), other.isnan())
        keep = ~one.isnan()
        pairs = [(one, other), *zip(mine.states[index], theirs.states[index], strict=True)]
        pairs += [(mine.extras[index], theirs.extras[index])] if mine.extras[index] is not None else []
        for a, b in pairs:
            assert same_bits([a[keep]], [b[keep]])


def check_bits(kernels, name, kept, dtype, gradient_dtype, state_dtype):
    special = torch.cat([torch.tensor([*ODD[:9], math.inf, -math.inf, math.nan]), random((1100,), 7, 0.1)])
    weights = [special, *(random(shape, seed, 0.1) for seed, shape in enumerate(SHAPES[1:]))]
    mine = made(kernels.device, name, kept, dtype, state_dtype=state_dtype, weights=weights)
    theirs, executor = moved(mine, kernels.device), kernels.executor()
    update = executor.update_of(mine)
    for number in range(2):
        gradients = on(kernels.device, gradients_of(mine, number, gradient_dtype))
        gradients[0][:3] = gradients[0][20:40] = 0.0
        verdict = step(executor, mine, update, gradients, max_norm=1.0)
        advance([theirs.step], verdict.found_inf)
        pure_step(theirs, gradients, verdict)
        assert_same_but_for_nan(mine, theirs)
    assert mine.weights[0].isnan().any()


#: Every rule with every storage, dtypes by turns.
PAIRED = [
    (name, kept, dtype, (dtype, FP32)[i // 4 % 2], (FP32, BF16)[i // 8 % 2])
    for i, (name, kept) in enumerate(itertools.product(RULES, STORAGES))
    for dtype in ((BF16, FP16)[(i + i // 2) % 2],)
]
PAIRED += [(name, PLAIN, FP32, gradient, FP32) for name, gradient in zip(RULES, [FP32, BF16, FP16] * 3, strict=True)]
ALL = [
    case
    for name, kept, dtype, state in itertools.product(RULES, STORAGES, (BF16, FP16), (FP32, BF16))
    for gradient in dict.fromkeys((dtype, FP32, BF16))
    if (case := (name, kept, dtype, gradient, state)) not in PAIRED
]


def test_two_steps_are_the_pure_function_bit_for_bit(kernels):
    # Each takes half a second, interpreted or compiled; every rule, storage and dtype is in any third case.
    for case in PAIRED[kernels.is_interpreted :: 3]:
        check_bits(kernels, *case)


@pytest.mark.slow
def test_two_steps_are_the_pure_function_bit_for_bit_in_every_combination(kernels):
    for case in (*PAIRED, *ALL):
        check_bits(kernels, *case)


def test_eight_clipped_scaled_steps_are_torch_s(kernels):
    if kernels.device.type != "cpu":
        pytest.skip("the reference is on the CPU")
    several = [("adamw", BF16), ("adam amsgrad maximize", FP16), ("sgd momentum nesterov", BF16)]
    for name, dtype in several[: 1 if kernels.is_interpreted else 3]:  # whose bits are the pure function's, above
        check_against_torch(kernels.executor(), name, dtype, dtype, [(2500,), (3, 5), ()])


def test_random_bits_are_every_executor_s(kernels):
    if kernels.device.type != "cpu":
        pytest.skip("another executor on the CPU is the reference")
    for kept in STORAGES:
        mine, theirs = (bucket_of("lion", kept, BF16, SHAPES, state_dtype=BF16) for _ in range(2))
        updates = kernels.executor().update_of(mine), Portable().update_of(theirs)
        for number in range(2):
            gradients = gradients_of(mine, number, BF16)
            take(kernels.executor(), mine, updates[0], gradients)
            take(kernels.executor(), theirs, updates[1], gradients)
        assert same_bits(tensors_of(mine), tensors_of(theirs))


def test_a_skipped_step_writes_nothing(kernels):
    for bad, state in ((math.inf, FP32), (math.nan, BF16)):
        check_that_nothing_is_written(kernels, bad, state)


def check_that_nothing_is_written(kernels, bad, state):
    bucket, executor = made(kernels.device, "adamw", SPLIT, BF16, SHAPES, state_dtype=state), kernels.executor()
    odd = torch.zeros(6, 10, dtype=BF16, device=kernels.device)[:, :5]  # updated by torch's operations
    bucket = dataclasses.replace(
        bucket,
        weights=[*bucket.weights, odd],
        extras=[*bucket.extras, torch.zeros(6, 5, dtype=torch.int16, device=kernels.device)],
        states=[*bucket.states, tuple(torch.zeros(6, 5, dtype=state, device=kernels.device) for _ in range(2))],
    )
    update = executor.update_of(bucket)
    step(executor, bucket, update, on(kernels.device, gradients_of(bucket, 0, BF16)))
    before = [tensor.clone() for tensor in tensors_of(bucket)]
    gradients = on(kernels.device, gradients_of(bucket, 1, BF16))
    gradients[1][2, 3] = bad
    assert step(executor, bucket, update, gradients).found_inf
    assert same_bits(tensors_of(bucket), before)
    assert not step(executor, bucket, update, on(kernels.device, gradients_of(bucket, 2, BF16))).found_inf
    assert bucket.step == 2
    assert not any(same_bits([one], [other]) for one, other in zip(bucket.weights, before, strict=False))


LAYOUTS = {
    "channels last": lambda: random((4, 20, 3, 9), 0).to(memory_format=torch.channels_last),
    "transposed": lambda: random((40, 30), 0).t(),
    "empty": lambda: random((0, 3), 0),
    "gaps": lambda: random((40, 60), 0)[:, ::2],
    "not at 16 bytes": lambda: random((2001,), 0)[1:],
}


def test_any_layout_of_weight_and_gradient(kernels):
    for layout in LAYOUTS:
        check_layout(kernels, layout)


def check_layout(kernels, layout):
    weight = LAYOUTS[layout]()
    mine = made(kernels.device, "adamw", SPLIT, BF16, weights=[weight, weight.clone()])
    holder = LAYOUTS[layout]().to(kernels.device, BF16)  # torch keeps gaps in no copy
    if layout in ("gaps", "not at 16 bytes"):
        base = torch.zeros(40, 60, dtype=BF16, device=kernels.device) if layout == "gaps" else holder.new_zeros(2001)
        holder = base[:, ::2] if layout == "gaps" else base[1:]
        mine.weights[0] = holder.copy_(mine.weights[0])
    theirs, executor = moved(mine, kernels.device), kernels.executor()
    update = executor.update_of(mine)
    for number in range(2):
        gradients = [random(weight.shape, number + 9 * i).to(kernels.device, BF16).contiguous() for i in range(2)]
        if number:  # laid out as the weight is, this time
            gradients = [torch.empty_like(weight, dtype=BF16, device=kernels.device).copy_(each) for each in gradients]
        with Ieee():  # weights with gaps are updated by torch's operations
            verdict = step(executor, mine, update, gradients)
        advance([theirs.step], verdict.found_inf)
        pure_step(theirs, gradients, verdict)
    assert mine.weights[0].stride() == holder.stride()
    assert_same_but_for_nan(mine, theirs)


def test_states_that_lie_otherwise_than_their_weight_are_updated_too(kernels):
    mine = made(kernels.device, "adamw", SPLIT, BF16, [(5,), (40, 30)], state_dtype=BF16)
    mine.states[1] = tuple(torch.zeros(30, 40, dtype=BF16, device=kernels.device).t() for _ in range(2))
    theirs, executor = moved(mine, kernels.device), kernels.executor()
    gradients = on(kernels.device, gradients_of(mine, 0, BF16))
    with Ieee():
        verdict = step(executor, mine, executor.update_of(mine), gradients)
    advance([theirs.step], verdict.found_inf)
    pure_step(theirs, gradients, verdict)
    assert_same_but_for_nan(mine, theirs)


NORMED = [((1 << 14) + 3,), (0, 3), (7, 5), (), (5000,)]


def test_norms_are_those_of_each_gradient(kernels):
    for dtypes in ([FP32] * 5, [BF16] * 5, [BF16, FP32, FP16, BF16, torch.float64]):
        check_norms(kernels, dtypes)


def check_norms(kernels, dtypes):
    gradients = [random(shape, i, 100.0).to(dtype) for i, (shape, dtype) in enumerate(zip(NORMED, dtypes, strict=True))]
    gradients[2] = gradients[2].t()
    gradients += [random((30, 40), 1).to(BF16)[:, ::2], random((30, 40), 2).to(BF16)[:, 1:]]
    wanted = torch.stack([gradient.double().norm() for gradient in gradients])
    moved = on(kernels.device, gradients)
    moved[-2:] = [
        random((30, 40), 1).to(kernels.device, BF16)[:, ::2],
        random((30, 40), 2).to(kernels.device, BF16)[:, 1:],
    ]
    assert [each.stride() for each in moved[-2:]] == [(40, 2), (40, 1)]  # torch keeps gaps in no copy
    found = kernels.executor().norms(moved)
    assert found.dtype == FP32
    # squares and sums: a tree of at most 14 + 2 additions of positive numbers
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=17 * 2.0**-24, atol=0)
    assert same_bits([kernels.executor().norms(on(kernels.device, gradients))], [found])


def test_norms_of_what_is_not_finite_are_not(kernels):
    for bad, dtype in itertools.product([math.inf, -math.inf, math.nan], [BF16, FP16, FP32]):
        gradients = [torch.ones(2000, dtype=dtype, device=kernels.device) for _ in range(2)]
        gradients[1][1999] = bad
        found = kernels.executor().norms(gradients)
        assert found.isfinite().tolist() == [True, False]


def test_a_finite_gradient_beyond_the_root_of_the_largest_number_counts_as_infinite(kernels):
    assert kernels.executor().norms([torch.full((3,), 2e19, device=kernels.device)]).isinf().all()


def test_without_gradients_there_are_no_norms(kernels):
    assert kernels.executor().norms([]).shape == (0,)


def test_norms_do_not_depend_on_where_gradients_lie(kernels):
    """Vectors and single elements are summed in one order: a resumed run finds the same norm at another address."""
    for dtype in (BF16, FP16, FP32):
        check_norms_elsewhere(kernels, dtype)


def check_norms_elsewhere(kernels, dtype):
    gradient = on(kernels.device, [random((20_003,), 0, 1024.0).to(dtype)])[0]
    executor, expected = kernels.executor(), gradient.double().norm()
    found = []
    for first in (0, 1, 3):
        there = torch.empty(len(gradient) + first, dtype=dtype, device=kernels.device)[first:].copy_(gradient)
        found += [executor.norms([there]) for _ in range(2)]
    assert same_bits(found[:-1], found[1:])
    torch.testing.assert_close(found[0].double()[0], expected, rtol=2**-20, atol=0.0)


def test_rows_that_no_batch_holds_are_updated_as_torch_updates_them(kernels):
    """Zero gradients and moments: quotients and roots take their slow paths, and weights still decay."""
    for name, state in itertools.product(["adamw", "sgd momentum", "lion"], [FP32, BF16]):
        check_untouched_rows(kernels, name, state)


def check_untouched_rows(kernels, name, state):
    mine = made(kernels.device, name, SPLIT, BF16, [(1100,), (3, 5)], state_dtype=state)
    theirs, executor = moved(mine, kernels.device), kernels.executor()
    update = executor.update_of(mine)
    for number in range(2):
        gradients = [torch.zeros_like(gradient) for gradient in on(kernels.device, gradients_of(mine, number, BF16))]
        verdict = step(executor, mine, update, gradients, max_norm=1.0)
        advance([theirs.step], verdict.found_inf)
        pure_step(theirs, gradients, verdict)
        assert same_bits(on("cpu", tensors_of(mine)), on("cpu", tensors_of(theirs)))
