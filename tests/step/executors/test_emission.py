"""What a release of torch may trace a function to: operations that change no value, and those that no table has."""

import dataclasses
import logging
import re

import pytest
import torch
from torch import nn

import mezzo
from mezzo.emit.tracing import NoKernel, spelled
from mezzo.step.executors import choose, cpp_source, triton_source
from mezzo.step.executors.cpp import Cpp
from mezzo.step.executors.cpp_source import CPP
from mezzo.step.executors.portable import Portable
from mezzo.step.executors.triton import NUMBERS, Triton
from mezzo.step.executors.triton_source import TRITON
from mezzo.step.storage import PLAIN, SPLIT, key_of
from mezzo.step.update import rule

from .implementations import (
    BF16,
    FP16,
    FP32,
    INT8,
    INT16,
    assert_same,
    bucket_of,
    clones,
    copied,
    gradients_of,
    pure_step,
    same_bits,
    tensors_of,
    whole_step,
)

ATEN = torch.ops.aten

#: What changes no value of a tensor, by the names of this release and of others.
NEUTRAL = {
    "alias": ATEN.alias.default,
    "detach": ATEN.detach.default,
    "lift_fresh": ATEN.lift_fresh.default,
    "positive": torch.positive,
    "unsafe_view": lambda x: ATEN._unsafe_view.default(x, x.shape),
    "convert_element_type": lambda x: torch.ops.prims.convert_element_type.default(x, x.dtype),
    "clone": torch.clone,
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "view": lambda x: x.view(x.shape),
    "view of its own dtype": lambda x: x.view(x.dtype),
    "reshape": lambda x: ATEN._reshape_alias.default(x, x.shape, x.stride()),
    "expand": lambda x: x.expand(x.shape),
    "as_strided": lambda x: x.as_strided(x.shape, x.stride()),
    "transpose": lambda x: x.t(),
    "copy of its own dtype": lambda x: x.to(x.dtype, copy=True),
    "alias_copy": ATEN.alias_copy.default,
    "detach_copy": ATEN.detach_copy.default,
    "lift_fresh_copy": ATEN.lift_fresh_copy.default,
    "view_copy": lambda x: ATEN.view_copy.default(x, x.shape),
    "expand_copy": lambda x: ATEN.expand_copy.default(x, x.shape),
}


def neutral(x):
    """Let a tensor through all that changes no value of it."""
    for operation in NEUTRAL.values():
        x = operation(x)
    return x


def spelled_in(dialect, function, *examples):
    """Return a function's lines, and what its results are called."""
    names = [f"given{position}" if example.dim() == 0 else ("one", "two") for position, example in enumerate(examples)]
    of = spelled(function, examples, names, dialect)
    return of.body, [result.word for result in of.results]


@pytest.mark.parametrize("dialect", [CPP, TRITON, NUMBERS], ids=["c++", "triton", "numbers"])
def test_operations_that_change_no_value_are_left_out_whatever_they_are_called(dialect):
    numbers = [torch.ones((), dtype=dtype) for dtype in (FP32, FP16, BF16, torch.int32)]
    for name, operation in {**NEUTRAL, "all of them": neutral}.items():

        def through(vector, *others, its=operation):
            return *its(vector).unbind(), *map(its, others)

        spelling = spelled_in(dialect, through, torch.ones(2), *numbers)
        assert spelling == ([], ["one", "two", "given1", "given2", "given3", "given4"]), name


def test_what_reads_the_bits_as_another_number_is_none_of_them():
    """A view of another dtype, by either name; and a cast."""
    one = torch.ones(())
    for view in (lambda x: x.view(torch.int32), lambda x: ATEN.view_copy.dtype(x, torch.int32)):
        for dialect, line in ((CPP, "bits<I>(given0)"), (TRITON, "given0.to(tl.int32, bitcast=True)")):
            (text,), _ = spelled_in(dialect, lambda x, view=view: (view(x),), one)
            assert line in text
    (text,), _ = spelled_in(TRITON, lambda x: (x.double(),), one)
    assert "given0.to(tl.float64)" in text


def test_views_of_other_elements_or_of_negated_ones_are_none_of_them():
    one, vector = torch.ones(()), torch.ones(2)
    for wrong, *examples in (
        (lambda x: (torch._neg_view(x),), one),
        (lambda x: (ATEN._neg_view_copy.default(x),), one),
        (lambda x: (x.unbind()[1].as_strided((), (), 0),), vector),
        (lambda x: (x.as_strided((2,), (0,)).unbind()[1],), vector),
        (lambda x: (x.flip(0).unbind()[1],), vector),
    ):
        for dialect in (CPP, TRITON):
            with pytest.raises(NoKernel, match=rf"no .* for aten\.\w+\.default.* of torch {torch.__version__[:4]}"):
                spelled_in(dialect, wrong, *examples)


def test_rules_with_such_operations_are_the_same_program():
    plain = rule("adamw", "amsgrad")

    def apply(gradient, weight, states, numbers):
        numbers = {name: neutral(number) for name, number in numbers.items()}
        weight, states = plain.apply(neutral(gradient), neutral(weight), tuple(map(neutral, states)), numbers)
        return neutral(weight), tuple(map(neutral, states))

    odd = dataclasses.replace(plain, apply=apply)
    coded = (INT8, BF16, torch.uint8, BF16, torch.uint8, BF16)
    for source_of in (cpp_source, triton_source):
        for storage, dtypes in ((SPLIT, (BF16, BF16, INT16, *coded)), (PLAIN, (FP16, FP32, FP32, FP32, FP32))):
            texts = []
            for variant in (plain, odd):
                source_of.update_source.cache_clear()  # rules of one name and options are equal
                words = re.findall(r"\w+|[^\w\s]", source_of.update_source(variant, storage, dtypes))
                texts.append([words.index(word) for word in words])  # what values are called is another matter
            source_of.update_source.cache_clear()
            assert texts[0] == texts[1]


# What no table has ------------------------------------------------------------------------------------------


@torch.library.custom_op("mezzo_tests::halves_of", mutates_args=())
def halves_of(value: torch.Tensor) -> torch.Tensor:
    """An operation that torch cannot trace: nobody says which shape its result has."""
    return value * 0.5


def odd_rule(operation):
    """Lion, with an operation in addition, whose results are exact."""
    lion = rule("lion")

    def apply(gradient, weight, states, numbers):
        weight, states = lion.apply(gradient, weight, states, numbers)
        return operation(weight), states

    return dataclasses.replace(lion, name=f"lion_{id(operation)}", apply=apply)  # kernels are found by it


def messages(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name.startswith("mezzo")]


#: Storages, and dtypes of weights, gradients and moments.
STORED = [(SPLIT, BF16, BF16, FP32), (SPLIT, FP16, FP16, BF16), (SPLIT, BF16, FP32, INT8)]
STORED += [(PLAIN, FP32, FP32, FP32), (PLAIN, FP32, BF16, INT8), (PLAIN, BF16, BF16, BF16)]


@pytest.mark.parametrize("operation", [lambda x: (x * 64).floor() / 64, halves_of], ids=["floor", "untraced"])
def test_a_rule_with_an_unknown_operation_is_the_pure_rule_and_one_warning_says_so(
    implementation, operation, monkeypatch, lacking, caplog
):
    """By every executor: torch's own operations know it, and no table."""
    executor, update_rule = implementation.make(), odd_rule(operation)
    monkeypatch.setattr(choose, "executor_for", lambda device: executor)
    is_known = isinstance(executor, Portable)
    for storage, dtype, gradient_dtype, state_dtype in STORED[:: 2 if implementation.is_costly else 1]:
        how = {"state_dtype": state_dtype, "device": implementation.device, "seed": 3}
        mine = dataclasses.replace(bucket_of("lion", storage, dtype, **how), rule=update_rule)
        theirs, update = copied(mine), choose.update_of(mine)
        before = clones(tensors_of(mine))
        update.ready(gradients_of(mine, 0, gradient_dtype))
        assert same_bits(before, tensors_of(mine))
        for number in range(2):
            gradients = gradients_of(mine, number, gradient_dtype)
            pure_step(theirs, gradients, whole_step(executor, mine, update, gradients))
            assert_same(mine, theirs, True)
        before = clones(tensors_of(mine))
        gradients[0][1] = torch.inf
        assert whole_step(executor, mine, update, gradients).found_inf
        assert same_bits(before, tensors_of(mine))
    warned = messages(caplog)
    assert len(warned) == (not is_known)
    for text in warned:
        assert "optimizer steps go on by torch's own operations" in text
        assert torch.__version__ in text
        assert ("halves_of" if operation is halves_of else "aten.floor.default") in text


def whole(x):
    """Integers of both signs, and zeros."""
    return (x * 100).to(torch.int32)


#: What operations mean for dtypes: True where kernels are written of them, else what no language has a line for.
DTYPES = {
    "int * number": (lambda w: whole(w) * 0.5, True),
    "int + number": (lambda w: w + (whole(w) + 0.5), True),
    "int < number": (lambda w: torch.where(whole(w) < 0.5, w, w * 2), True),
    "int / int": (lambda w: whole(w) / 3, True),
    "root of ints": (lambda w: whole(w).abs().sqrt(), True),
    "inverse of ints": (lambda w: (whole(w).abs() + 1).reciprocal(), True),
    "int or float": (lambda w: torch.where(w > 0, whole(w), w), True),
    "int or number": (lambda w: whole(w).clamp(-0.5, 0.5), True),
    "int and all bits": (lambda w: (whole(w) & 0x7FFFFFFF).to(FP32), True),
    "bool * float": (lambda w: w * (w > 0), True),
    "no bound": (lambda w: w.clamp(-0.05, torch.inf), True),
    "a number between two of FP32": (lambda w: w * (1 + 2.0**-24), True),
    "nan": (lambda w: torch.where(w > 0, w * torch.nan, w), True),
    "a shift": (lambda w: (whole(w) << 3).to(FP32), True),
    "bfloat16": (lambda w: w.bfloat16().float(), "aten._to_copy.default of torch.bfloat16"),
    "float16": (lambda w: w.half().float(), "aten._to_copy.default of torch.float16"),
    "int8": (lambda w: w.to(INT8).float(), "aten._to_copy.default of torch.int8"),
    "round of ints": (lambda w: whole(w).round().float(), "aten.round.default of torch.int32"),
    "sign of ints": (lambda w: whole(w).sign().float(), "aten.sign.default of torch.int32"),
    "bool + bool": (lambda w: ((w > 0) + (w < 1)).float(), "aten.add.Tensor of torch.bool"),
    "bounds of another order": (lambda w: w.clamp(0.5, -0.5), "aten.clamp.default, 0.5, -0.5"),
    "a bound of nan": (lambda w: w.clamp(torch.nan, 1.0), "aten.clamp.default, nan, 1.0"),
    "a constant": (lambda w: w * torch.tensor(2.0), "constant tensors (torch.tensor)"),
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("executor_name", ["cpp", "interpreted"])
def test_operations_on_any_dtypes_are_as_torch_computes_them(
    executor_name, name, request, monkeypatch, lacking, caplog
):
    executor = Cpp()
    if executor_name == "interpreted":
        request.getfixturevalue("interpreted")
        executor = Triton()
    operation, expected = DTYPES[name]
    monkeypatch.setattr(choose, "executor_for", lambda device: executor)
    for storage, dtype in ((PLAIN, FP32), (SPLIT, BF16)):
        mine = dataclasses.replace(bucket_of("lion", storage, dtype, seed=3), rule=odd_rule(operation))
        theirs, update = copied(mine), choose.update_of(mine)
        gradients = gradients_of(mine, 0, dtype)
        pure_step(theirs, gradients, whole_step(executor, mine, update, gradients))
        assert_same(mine, theirs, name != "root of ints")  # MKL has roots that are a unit off on some processors
    warned = messages(caplog)
    assert len(warned) == (expected is not True)
    for text in warned:
        assert f"no {'C++' if executor_name == 'cpp' else 'Triton'} for {expected} of torch {torch.__version__}" in text


def test_dtypes_of_one_kind_are_not_mixed():
    """Of a number torch takes the elements' dtype, and a kernel does not know which is which."""
    one, wide = torch.ones(()), torch.ones((), dtype=torch.float64)
    with pytest.raises(NoKernel, match=r"aten\.mul\.Tensor of torch\.float32 and torch\.float64 of torch"):
        spelled_in(TRITON, lambda x, other: (x * other,), one, wide)
    with pytest.raises(NoKernel, match=r"aten\.bitwise_and\.Scalar of torch\.int32 and 4294967296 of torch"):
        spelled_in(TRITON, lambda x: (x.to(torch.int32) & 2**32,), one)
    with pytest.raises(NoKernel, match=r"aten\.__rshift__\.Scalar, 32 of torch"):
        spelled_in(CPP, lambda x: (x.to(torch.int32) >> 32,), one)


def trained(policy, steps=3, **options):
    """Train a small model, and return its weights and the moments of its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-2, **options)
    amp = mezzo.MixedPrecision(model, optimizer, policy)
    batch = torch.randn(6, 8)
    for _ in range(steps):
        with amp.autocast():
            loss = model(batch).float().square().mean()
        amp.backward(loss)
        amp.step()
        amp.zero_grad()
    states = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [*(param.detach().clone() for param in model.parameters()), *states]


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("executor_name", ["cpp", "interpreted"])
def test_sessions_train_where_a_release_traces_rules_to_other_operations(
    executor_name, request, monkeypatch, lacking, caplog
):
    executor = Cpp()
    if executor_name == "interpreted":
        request.getfixturevalue("interpreted")
        executor = Triton()
    lacking("aten.sqrt.", "aten.sign.")
    for policy, options in (("O2,bf16", {}), ("O2,fp16", {"state_dtype": "int8"}), ("O1", {"state_dtype": "bfloat16"})):
        ways = []
        for its_executor in (Portable(), executor):
            monkeypatch.setattr(choose, "_working", lambda device, its_executor=its_executor: its_executor)
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="mezzo"):
                ways.append(trained(policy, **options))
        assert same_bits(*ways)
        warned = [message for message in messages(caplog) if "optimizer steps" in message]
        assert len(warned) == (policy == "O2,bf16")  # once a process
        for message in warned:
            assert f"for aten.sqrt.default of torch {torch.__version__}" in message


def test_keys_of_random_bits_are_asked_of_the_table_too(lacking):
    lacking("aten.bitwise_xor.")
    with pytest.raises(NoKernel, match=r"no Triton for aten\.bitwise_xor\.Tensor"):
        triton_source._key()
    assert key_of(*(torch.ones((), dtype=torch.int32) for _ in range(3))).dtype == torch.int32
