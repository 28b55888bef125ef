"""All implementations of both passes and all storages, as tables, with buckets to try them on.

A new executor is a row of ``IMPLEMENTATIONS``, a new way to store weights one of ``WEIGHTS``, a new dtype of moments
one of ``STATES``: the contract in ``test_contract.py`` runs over all of them, ``tests/step/test_exchange.py`` over the
executors.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.step.executors import cpp, portable
from mezzo.step.executors.cpp import Cpp
from mezzo.step.executors.portable import Portable
from mezzo.step.moments import GROUP, decode, zeros
from mezzo.step.storage import PLAIN, SPLIT, encode_into, keys
from mezzo.step.update import rule
from mezzo.step.verdict import Bucket, counted, judge, scales_among, updated

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT16, INT8 = torch.int16, torch.int8
CPU = torch.device("cpu")
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Implementations ------------------------------------------------------------------------------------------


class Predicated(Portable):
    """The portable executor as on a device where the verdict's flag stays."""

    def update_of(self, bucket):
        update = super().update_of(bucket)
        update.on_cpu = False
        return update


def triton():
    from mezzo.step.executors.triton import Triton

    return Triton()


class Implementation(NamedTuple):
    """One way to carry the passes out.

    Attributes:
        make: Makes the executor.
        device: Where tensors are.
        is_exact: Whether its arithmetic is IEEE's in each element: torch's vectors take roots that are 1 unit in the
            last place off on some processors.
        is_costly: Whether a case takes tenths of a second, as where it is traced or interpreted.
        cases: Which cases of the table it runs by default.
    """

    make: Callable[[], Any]
    device: torch.device = CPU
    is_exact: bool = False
    is_costly: bool = False
    cases: slice = slice(None)


RULES = ["adamw", "adamw amsgrad", "adam", "adam amsgrad maximize", "sgd maximize", "sgd momentum"]
RULES += ["sgd momentum nesterov maximize", "lion", "lion maximize"]
#: The first cases of the table: each rule once, storages by turns.
ONCE = slice(len(RULES))
IMPLEMENTATIONS = {
    "portable": Implementation(Portable),
    "predicated": Implementation(Predicated, cases=ONCE),
    "cpp": Implementation(Cpp, is_exact=True, cases=ONCE),
    "interpreted": Implementation(triton, is_exact=True, is_costly=True, cases=ONCE),
    "cuda": Implementation(triton, torch.device("cuda"), is_exact=True),
}
#: Elements that are read or written at a time.
PART = 1 << 11
#: As parameters of a fixture; what they need is put there by :func:`prepared`.
PARAMETERS = [pytest.param(name, marks=CUDA if name == "cuda" else ()) for name in IMPLEMENTATIONS]


def prepared(request, monkeypatch):
    """Return the implementation that a fixture asks for, with all that it runs on: in parts that small tensors fill."""
    name = request.param
    monkeypatch.setattr(portable, "CPU_BLOCK", 1 << 10)
    monkeypatch.setattr(cpp, "CHUNK", PART)
    if name == "interpreted":
        request.getfixturevalue("interpreted")
        tables = importlib.import_module("mezzo.step.executors.triton")
        monkeypatch.setattr(tables, "CHUNK", PART)
        monkeypatch.setattr(tables, "NORM_BLOCK", PART // 2)
    return IMPLEMENTATIONS[name]


# Storages -------------------------------------------------------------------------------------------------


def like(tensor, dtype, device=CPU):
    """Return memory of a dtype with a tensor's own strides and offset: torch keeps gaps in no copy."""
    base = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=dtype, device=device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def in_halves(w, dtype, device):
    high, rest = like(w, dtype, device), like(w, INT16, device)
    encode_into(w.to(device), high, rest)
    return high, rest


def plainly(w, dtype, device):
    return like(w, dtype, device).copy_(w), None


#: Storages of weights: how a weight is stored, and in which dtypes.
WEIGHTS = {SPLIT: (in_halves, (BF16, FP16)), PLAIN: (plainly, (BF16, FP16, FP32))}
#: Dtypes of moments.
STATES = (FP32, BF16, INT8)
STORED = [(kept, dtype) for kept, (_, dtypes) in WEIGHTS.items() for dtype in dtypes]
#: Every rule three times, with other storages, and each dtype of states; of gradients each beside each of states.
CASES = [
    (name, *STORED[(number + 2 * turn) % len(STORED)], (BF16, FP32, FP16)[at % 3], STATES[(at + 1 + number // 3) % 3])
    for turn in range(3)
    for number, name in enumerate(RULES)
    for at in [number + turn]
]

ODD = [0.0, -0.0, 1e-45, -1e-40, 2.0**-25, -(2.0**-25), 2.0**-14, 2.0**-14 - 2.0**-27, 6.1008e-05, 65504.0, 65519.9]
ODD += [65520.0, -1e30, math.inf, -math.inf, math.nan]
LAYOUTS = {
    "contiguous": lambda seed: random((3, 5), seed),
    "two chunks": lambda seed: random((PART + 5,), seed),
    "odd values": lambda seed: torch.tensor(ODD * 3).roll(seed),
    "channels last": lambda seed: random((2, 3, 4, 5), seed).to(memory_format=torch.channels_last),
    "transposed": lambda seed: random((40, 30), seed).t(),
    "scalar": lambda seed: random((), seed),
    "empty": lambda seed: random((0, 3), seed),
    "gaps": lambda seed: random((4, 6), seed)[:, ::2],
    "gaps, transposed": lambda seed: random((9, 10), seed).t()[::2],
    "not at 16 bytes": lambda seed: random((1101,), seed)[1:],
}

# Buckets --------------------------------------------------------------------------------------------------

HYPERS = {
    "adamw": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2},
    "lion": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
}
SHAPES = [(1101,), (3, 5), (1024,)]  # whole blocks with and without a rest, and a short one


def random(shape, seed, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def bucket_of(name, kept, dtype, shapes=SHAPES, *, state_dtype=FP32, weights=None, device=CPU, seed=0):
    update = rule(*name.split())
    values = weights if weights is not None else [random(shape, seed, 0.1) for seed, shape in enumerate(shapes)]
    made = [WEIGHTS[kept][0](w, dtype, device) for w in values]
    hypers = HYPERS[name.split()[0]] | ({"dampening": 0.0} if "nesterov" in name else {})
    return Bucket(
        rule=update,
        storage=kept,
        hypers={key: torch.tensor(value, dtype=torch.float64, device=device) for key, value in hypers.items()},
        step=torch.zeros((), dtype=torch.int64, device=device),
        weights=[weight for weight, _ in made],
        extras=[extra for _, extra in made],
        states=[tuple(t for name in update.states for t in zeros(name, w, state_dtype).values()) for w, _ in made],
        seed=seed,
    )


def copied(bucket):
    """Return the same bucket in other memory."""

    def to(tensor):
        return None if tensor is None else like(tensor, tensor.dtype, tensor.device).copy_(tensor)

    return dataclasses.replace(
        bucket,
        hypers={name: to(value) for name, value in bucket.hypers.items()},
        step=to(bucket.step),
        weights=[to(weight) for weight in bucket.weights],
        extras=[to(extra) for extra in bucket.extras],
        states=[tuple(to(state) for state in states) for states in bucket.states],
    )


def tensors_of(bucket):
    flat = [*bucket.weights, *bucket.extras, *(state for states in bucket.states for state in states), bucket.step]
    return [tensor for tensor in flat if tensor is not None]


def values_of(bucket):
    """Return the FP32 values that a bucket stands for."""
    parts = map(bucket.storage.parts, bucket.weights, bucket.extras)
    return [bucket.storage.read(part) for part in parts]


def moments_of(bucket, at):
    """Return the moments of a weight in FP32."""
    states = bucket.states[at]
    return (
        [*map(decode, states[::2], states[1::2])]
        if len(states) > len(bucket.rule.states)
        else [state.float() for state in states]
    )


def same_bits(one, other):
    return all(
        torch.equal(*(tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in (a, b)))
        for a, b in zip(one, other, strict=True)
    )


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


# Steps ----------------------------------------------------------------------------------------------------


def gradients_of(bucket, step, dtype, scale=10.24):
    return [random(w.shape, 1000 * step + i, scale).to(w.device, dtype) for i, w in enumerate(bucket.weights)]


def advance(steps, found_inf):
    """Count, as an optimizer does."""
    for step, new in zip(steps, counted(found_inf, *steps), strict=True):
        step.copy_(new)


def whole_step(executor, bucket, update, gradients, *, inverse=1 / 1024, max_norm=None):
    """Take one whole step, as a session would; whatever happens, gradients are never written."""
    before = clones(gradients)
    verdict = judge(executor.norms(gradients), torch.tensor(inverse, device=bucket.step.device), max_norm=max_norm)
    advance([bucket.step], verdict.found_inf)
    update(gradients, verdict)
    assert same_bits(gradients, before)
    return verdict


class Ieee(TorchDispatchMode):
    """Correctly rounded roots: a root in float64 rounds to FP32 as the exact one does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_root = func is torch.ops.aten.sqrt.default and type(args[0]) is torch.Tensor  # not one that is traced
        if is_root and args[0].dtype == FP32:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


def in_order(tensor, codes):
    """Return the elements of a tensor as groups in the order in which codes lie in memory, zeros at the end."""
    order = sorted(range(codes.dim()), key=codes.stride, reverse=True)
    vector = tensor.permute(order).reshape(-1)
    return torch.cat([vector, vector.new_zeros(-len(vector) % GROUP)]).view(-1, GROUP)


def pure_step(bucket, gradients, verdict):
    """Take the step by the pure function on whole tensors: what every executor is measured against."""
    advance([bucket.step], verdict.found_inf)
    seeds = keys(bucket.step, len(gradients), bucket.seed)
    for index, gradient in enumerate(gradients):
        scalars, targets = bucket.rule.scalars(bucket.hypers, bucket.step), bucket.targets(index)
        scales, first = scales_among(bucket.storage, targets), bucket.storage.num_parts
        given = [gradient, *targets]
        if scales:
            given = [
                operand.view(-1, 1) if position in scales else in_order(operand, targets[first])
                for position, operand in enumerate(given, start=-1)
            ]
        order = torch.arange(given[0].numel(), dtype=torch.int32, device=gradient.device).view(given[0].shape)
        with Ieee():
            numbers = scalars, verdict.multiplier, seeds[index], order
            values = updated(bucket.rule, bucket.storage, given[0], given[1:], *numbers)
        for position, (target, value) in enumerate(zip(targets, values, strict=True)):
            if scales and position not in scales:
                dims = sorted(range(target.dim()), key=targets[first].stride, reverse=True)
                target.permute(dims).copy_(value.view(-1)[: target.numel()].view(target.permute(dims).shape))
            else:
                target.copy_(value.view(target.shape))


def assert_same(mine, theirs, is_exact):
    """Compare buckets: bit for bit, or to a few units in the last place, wherever a weight is a number; NaN is NaN."""
    for at, (value, wanted) in enumerate(zip(values_of(mine), values_of(theirs), strict=True)):
        assert torch.equal(value.isnan(), wanted.isnan())
        keep, parts = ~wanted.isnan(), mine.storage.num_parts
        pairs = list(zip(mine.targets(at), theirs.targets(at), strict=True))
        assert not is_exact or all(same_bits([one[keep]], [other[keep]]) for one, other in pairs[:parts])
        torch.testing.assert_close(value[keep], wanted[keep], rtol=2.0**-22, atol=2.0**-24)
        for number, (one, other) in enumerate(zip(moments_of(mine, at), moments_of(theirs, at), strict=True)):
            assert torch.equal(one[keep].isnan(), other[keep].isnan())  # of codes all of a group is NaN
            here = keep & ~other.isnan()
            if is_exact:
                parts_of_state = (len(pairs) - parts) // len(mine.rule.states)
                first, *scales = pairs[parts + parts_of_state * number : parts + parts_of_state * (number + 1)]
                assert same_bits(*([tensor[here]] for tensor in first))
                assert all(same_bits(*([tensor.nan_to_num(7.0)] for tensor in pair)) for pair in scales)
            most = {FP32: 2.0**-20, BF16: 2.0**-7}.get(mine.states[at][0].dtype, 2.0**-6)
            largest = float(other[here].abs().max()) if here.any() else 0.0
            torch.testing.assert_close(one[here], other[here], rtol=most, atol=most * largest)
