"""The contract of both passes, over every implementation: the pure function bit for bit, torch's optimizers in float64.

The tables of implementations, storages and cases are in ``implementations.py``.
"""

import itertools
import math

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.step import storage
from mezzo.step.executors.portable import Portable
from mezzo.step.storage import SPLIT
from mezzo.step.update import rule
from mezzo.step.verdict import Bucket, judge

from .implementations import (
    BF16,
    CASES,
    FP16,
    FP32,
    HYPERS,
    INT8,
    LAYOUTS,
    ODD,
    PART,
    SHAPES,
    WEIGHTS,
    advance,
    assert_same,
    bucket_of,
    clones,
    copied,
    gradients_of,
    like,
    pure_step,
    random,
    same_bits,
    tensors_of,
    values_of,
    whole_step,
)

# The pure function ----------------------------------------------------------------------------------------


def check_case(implementation, name, kept, dtype, gradient_dtype, state_dtype):
    """Take two steps and between them one that is skipped, the second tensor's with zeros for gradients."""
    special = torch.cat([torch.tensor([*ODD[:10], math.inf, -math.inf, math.nan]), random((1100,), 7, 0.1)])
    weights = [special, *(random(shape, seed, 0.1) for seed, shape in enumerate(SHAPES[1:]))]
    how = {"state_dtype": state_dtype, "weights": weights, "device": implementation.device, "seed": 3 * len(name)}
    mine = bucket_of(name, kept, dtype, **how)
    theirs, executor = copied(mine), implementation.make()
    update = executor.update_of(mine)
    for number, bad in enumerate((math.inf, math.nan)):
        gradients = gradients_of(mine, number, gradient_dtype)
        gradients[0][:3] = gradients[0][20:40] = gradients[1][:] = 0.0
        verdict = whole_step(executor, mine, update, gradients, max_norm=1.0)
        pure_step(theirs, gradients, verdict)
        # Without roots and torch's own kernel all arithmetic is IEEE's.
        assert_same(mine, theirs, implementation.is_exact or "lion" in name)
        before = clones(tensors_of(mine))
        gradients[1][2, 3] = bad
        assert whole_step(executor, mine, update, gradients).found_inf
        assert same_bits(tensors_of(mine), before)
    assert mine.weights[0].isnan().any()
    assert mine.step == theirs.step == 2


def test_steps_of_any_rule_and_storage_are_the_pure_function_and_skipped_ones_write_nothing(implementation):
    for case in CASES[implementation.cases]:
        check_case(implementation, *case)


@pytest.mark.slow
def test_so_are_those_of_the_cases_that_an_implementation_leaves_out(implementation):
    for case in CASES if implementation.is_exact else ():
        check_case(implementation, *case)


@pytest.mark.slow
def test_weights_and_gradients_of_any_layout_are_updated_or_skipped(implementation):
    """Weights with gaps, and those whose states lie otherwise, go by torch's operations beside the others."""
    for turn, (kept, (_, dtypes)) in enumerate(WEIGHTS.items()):
        weights = [layout(seed) for seed, layout in enumerate(LAYOUTS.values())]
        options = {"device": implementation.device, "state_dtype": (FP32, INT8)[turn]}
        mine = bucket_of("lion", kept, dtypes[0], weights=[*weights, weights[0]], **options)
        moment, *scales = mine.states[-1]
        mine.states[-1] = torch.zeros(5, 3, dtype=moment.dtype, device=implementation.device).t(), *scales
        strides = [weight.stride() for weight in mine.weights]
        theirs, executor = copied(mine), implementation.make()
        update = executor.update_of(mine)
        for is_alike in (turn % 2 > 0,) if implementation.is_costly else (False, True):
            gradients = [gradient.contiguous() for gradient in gradients_of(mine, turn, BF16)]
            if is_alike:  # laid out as the weight is
                gradients = [like(w, BF16, w.device).copy_(g) for w, g in zip(mine.weights, gradients, strict=True)]
            pure_step(theirs, gradients, whole_step(executor, mine, update, gradients))
            assert_same(mine, theirs, True)
        gradients[0][1, 2] = math.nan
        before = clones(tensors_of(mine))
        assert whole_step(executor, mine, update, gradients).found_inf
        assert same_bits(tensors_of(mine), before)
        assert [weight.stride() for weight in mine.weights] == strides
        gaps = mine.weights[list(LAYOUTS).index("gaps")]
        assert not gaps._base.view(4, 6)[:, 1::2].any()


def test_tensors_that_are_given_other_memory_another_layout_or_dtype_are_found_again(implementation):
    mine = bucket_of("lion", SPLIT, BF16, [(20, 20), (20,)], device=implementation.device)
    theirs, executor, dtype = copied(mine), implementation.make(), BF16
    update = executor.update_of(mine)

    def turn(bucket):  # at the same address, of the same shape: only strides differ
        bucket.weights[0].data = bucket.weights[0].data.t()

    def change(bucket):
        bucket.weights[1].data = bucket.weights[1].data.clone()
        bucket.extras[1].data = bucket.extras[1].data.clone()

    for edit in (None, change, turn, change):
        if edit is not None:
            edit(mine)
            edit(theirs)
        gradients = gradients_of(mine, 1, dtype)
        pure_step(theirs, gradients, whole_step(executor, mine, update, gradients, inverse=1.0))
        assert_same(mine, theirs, True)
        dtype = FP32


def test_neither_pass_asks_the_device_for_a_value():
    """Of the portable operations, on a device without values."""
    for kept in WEIGHTS:
        with torch.device("meta"):
            weights = [torch.empty(20, 30, dtype=BF16), torch.empty(5, dtype=BF16)]
            bucket = Bucket(
                rule=rule("adamw"),
                storage=kept,
                hypers={name: torch.tensor(0.5, dtype=torch.float64) for name in rule("adamw").hypers},
                step=torch.tensor(0),
                weights=weights,
                extras=[torch.empty_like(weight, dtype=torch.int16) if kept.extra else None for weight in weights],
                states=[(torch.zeros_like(w, dtype=BF16), torch.zeros_like(w, dtype=FP32)) for w in weights],
            )
            verdict = judge(Portable().norms(weights), torch.tensor(1.0), max_norm=1.0)
        advance([bucket.step], verdict.found_inf)
        Portable().update_of(bucket)(weights, verdict)


# Torch's optimizers in float64 ----------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Written from the paper, for a reference."""

    def __init__(self, params, **hypers):
        super().__init__(params, hypers)

    def step(self):
        h = self.param_groups[0]
        for param in h["params"]:
            m = self.state[param].setdefault("m", torch.zeros_like(param))
            direction = torch.sign(h["betas"][0] * m + (1 - h["betas"][0]) * param.grad)
            param.data.mul_(1 - h["lr"] * h["weight_decay"]).sub_(direction, alpha=h["lr"])
            m.mul_(h["betas"][1]).add_(param.grad, alpha=1 - h["betas"][1])


class Reference:
    """The same training in float64: unscaling by hand, torch's clipping and torch's optimizer."""

    def __init__(self, name, bucket):
        first, *options = name.split()
        self.params = [torch.nn.Parameter(value.double().cpu()) for value in values_of(bucket)]
        numbers = dict(HYPERS[first]) | ({"dampening": 0.0} if "nesterov" in options else {})
        if "beta1" in numbers:
            numbers["betas"] = numbers.pop("beta1"), numbers.pop("beta2")
        make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "lion": Lion}[first]
        self.optimizer = make(self.params, **numbers, **{option: True for option in options if option != "momentum"})

    def step(self, gradients, max_norm=None):
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient.double().cpu() / 1024
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()


AGAINST_TORCH = [("adamw", BF16, FP32), ("adam amsgrad maximize", FP16, FP16), ("sgd momentum nesterov", BF16, BF16)]
AGAINST_TORCH += [("lion", FP16, FP32)]


def test_clipped_scaled_steps_of_scheduled_rates_are_torch_s_and_compile_nothing_again(implementation):
    for name, dtype, gradient_dtype in AGAINST_TORCH[: 1 if implementation.is_costly else None]:
        bucket = bucket_of(name, SPLIT, dtype, [(1101,), (3, 5), ()], device=implementation.device)
        reference, executor = Reference(name, bucket), implementation.make()
        update = executor.update_of(bucket)
        for step in range(4):
            group = reference.optimizer.param_groups[0]
            group["lr"], group["weight_decay"] = group["lr"] * 0.9, group["weight_decay"] * 0.8
            for hyper in ("lr", "weight_decay"):
                bucket.hypers[hyper].fill_(group[hyper])
            gradients = gradients_of(bucket, step, gradient_dtype)
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                whole_step(executor, bucket, update, gradients, max_norm=1.0)
            reference.step(gradients, max_norm=1.0)
        for mine, theirs, weight in zip(values_of(bucket), reference.params, bucket.weights, strict=True):
            # Four FP32 updates of weights below 0.5, each within 2 units in the last place, and four times FP16's
            # fixed-point remainder. Lion's sign may differ where its argument is nearly 0.
            wrong = (mine.cpu() - theirs.detach()).abs() > 4 * (2 * 2.0**-25 + 2.0**-40)
            assert wrong.sum() <= (1 if name == "lion" else 0), (name, dtype)
            assert torch.equal(weight.float(), storage.halves(mine, dtype)[0].to(dtype).float())
        assert bucket.step == 4


def test_second_moments_in_bfloat16_shrink_as_they_should():
    """To nearest they would stay where they are for ever: 0.999 of a number rounds to itself."""
    count, steps, executor = 20_000, 60, Portable()
    bucket, exact = (bucket_of("adamw", SPLIT, BF16, [(count,)], state_dtype=dtype) for dtype in (BF16, FP32))
    updates = executor.update_of(bucket), executor.update_of(exact)
    for one in (bucket, exact):
        one.hypers["beta2"].fill_(0.999)
    for step in range(steps):
        gradient = [torch.full((count,), 1.0 if step == 0 else 1e-3)]
        whole_step(executor, bucket, updates[0], gradient, inverse=1.0)
        whole_step(executor, exact, updates[1], gradient, inverse=1.0)
    mine, theirs = bucket.states[0][1].double(), exact.states[0][1].double()
    assert theirs[0] < 0.00095
    # Each rounding is within 2^-7 of the value; 60 of them, at random, over 20 000 elements.
    assert abs(mine.mean() / theirs.mean() - 1) < 5 * 2.0**-7 * (steps / count) ** 0.5
    torch.testing.assert_close(values_of(bucket)[0], values_of(exact)[0], rtol=0, atol=0.03)


# Norms ----------------------------------------------------------------------------------------------------


def test_norms_are_float64_s_wherever_gradients_lie(implementation):
    """Of every dtype and layout, mixed where kernels take them mixed."""
    kinds = [[BF16, FP32, FP16, torch.float64]] if implementation.is_exact else [[FP32], [BF16], [FP16]]
    executor, layouts = implementation.make(), [*LAYOUTS.values(), lambda seed: random((3 * PART + 1,), seed)]
    layouts.pop(2)  # with infinities in it
    for dtypes in kinds:
        cycled = itertools.cycle(dtypes)
        wide = [layout(seed) for seed, layout in enumerate(layouts)]
        gradients = [
            like(w, dtype, implementation.device).copy_(w * 100) for w, dtype in zip(wide, cycled, strict=False)
        ]
        norms = executor.norms(gradients)
        assert norms.dtype == FP32
        exact = torch.stack([gradient.double().norm() for gradient in gradients])
        torch.testing.assert_close(norms.double(), exact, rtol=4e-6, atol=0)
        if implementation.is_exact:  # a resumed run finds the same norm at another address
            moved = [
                torch.empty(g.numel() + 3, dtype=g.dtype, device=g.device)[3:].copy_(g.flatten()) for g in gradients
            ]
            whole = [index for index, gradient in enumerate(gradients) if gradient.is_contiguous()]
            assert same_bits([executor.norms(moved)[whole]], [norms[whole]])
    assert executor.norms([]).shape == (0,)
    assert executor.norms([torch.full((3 * PART,), 65504.0, dtype=FP16, device=implementation.device)]).isfinite()
    huge = torch.full((3,), 2e19, device=implementation.device)
    assert executor.norms([huge]).isinf()  # a finite square counts as infinite


def test_one_bad_value_anywhere_is_found_and_placed(implementation):
    executor = implementation.make()
    for bad, dtype in zip([math.inf, -math.inf, math.nan], [BF16, FP16, FP32], strict=True):
        for position in ((0, 0), (0, PART), (1, 599), (2, 0)):
            gradients = [torch.ones(count, dtype=dtype, device=implementation.device) for count in (PART + 1, 600, 1)]
            gradients[position[0]][position[1]] = bad
            assert executor.norms(gradients).isfinite().tolist() == [index != position[0] for index in range(3)]


# Refusals -------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = func(
            *(argument.inner if isinstance(argument, Wrapped) else argument for argument in args), **(kwargs or {})
        )
        return cls(result) if isinstance(result, torch.Tensor) else result


def test_tensors_without_memory_are_refused_before_any_launch(implementation):
    if not implementation.is_exact:
        return  # torch's operations read what they like
    bucket = bucket_of("lion", SPLIT, BF16, [(20,), (20,)], device=implementation.device)
    executor = implementation.make()
    update = executor.update_of(bucket)
    gradients = [
        torch.ones(20, dtype=BF16, device=implementation.device),
        Wrapped(torch.ones(20, dtype=BF16, device=implementation.device)),
    ]
    one = torch.ones((), device=implementation.device)
    verdict, before = judge(torch.stack([one, one]), one), clones(tensors_of(bucket))
    for read in (lambda: executor.norms(gradients), lambda: update(gradients, verdict)):
        with pytest.raises(UnsupportedError, match=r"cannot find a tensor\n  where  Wrapped of shape \(20,\)"):
            read()
    assert same_bits(before, tensors_of(bucket))
