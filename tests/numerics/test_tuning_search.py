"""Parts of tuning: the bisection against trying every subset, ratios against NumPy, rules against lists, dropout."""

import itertools
import math
import random

import numpy
import pytest
import torch
from torch.nn import functional

import mezzo
from mezzo.numerics.tuning.search import all_low, before, pins, smallest
from mezzo.numerics.tuning.trial import NoDropout, sqnr
from mezzo.policy import Policy

FP16 = Policy.O1("float16")


def test_what_is_left_passes_and_nothing_of_it_can_go():
    generator = random.Random(0)
    for size in range(1, 9):
        for _ in range(8):
            # Any monotone test: it passes where one of some causes lies wholly in the part.
            causes = [
                {*generator.sample(range(size), generator.randint(1, size))} for _ in range(generator.randint(1, 3))
            ]

            def passes(part, causes=causes):
                return any(cause <= {*part} for cause in causes)

            answer = smallest(range(size), passes)
            assert answer == sorted(answer)
            assert passes(answer)
            assert not any(passes([*answer[:i], *answer[i + 1 :]]) for i in range(len(answer)))
            # Of all minimal parts the one that does without the last items for longest: QuickXplain's order.
            minimal = [
                part
                for count in range(size + 1)
                for part in itertools.combinations(range(size), count)
                if passes(part) and not any(passes([*part[:i], *part[i + 1 :]]) for i in range(count))
            ]
            assert answer == list(min(minimal, key=lambda part: sorted(part, reverse=True)))


def test_ratios_are_those_of_float64():
    generator = numpy.random.default_rng(0)
    signal = generator.normal(size=(7, 5)).astype("float32")
    noisy = (signal + 0.01 * generator.normal(size=(7, 5))).astype("float32")
    wide, error = signal.astype("float64"), noisy.astype("float64") - signal.astype("float64")
    expected = 10 * math.log10((wide**2).sum() / (error**2).sum())
    one, other = torch.from_numpy(signal), torch.from_numpy(noisy)
    assert sqnr(one, other) == pytest.approx(expected, rel=1e-12)
    inf, nan = math.inf, math.nan
    for reference, value, expected in (
        ([1.0, 2.0], [1.0, 2.0], inf),
        ([1.0, 2.0], [1.0, inf], -inf),
        ([1.0, 2.0], [1.0, nan], -inf),
        ([1.0, -inf], [1.0, -inf], inf),  # a mask
        ([1.0, nan], [1.0, 3.0], inf),
        ([1.0, 1.0], [0.0, 0.0], 0.0),
    ):
        assert sqnr(torch.tensor(reference), torch.tensor(value)) == expected, (reference, value)
    assert math.isnan(sqnr(torch.tensor([0.0]), torch.tensor([1.0])))


def test_every_op_starts_low_that_runs_and_that_the_table_keeps_or_refuses():
    spots = [("linear", "a"), ("softmax", "a"), ("mul", "b"), ("binary_cross_entropy", ""), ("sum", "b"), ("sum", "c")]
    assert str(all_low(Policy.O1("bfloat16"), spots)) == "O1,dtype=bfloat16,low=softmax+binary_cross_entropy+sum"
    kept = all_low(Policy.O1("bfloat16").fp32("softmax"), spots)
    assert str(kept) == "O1,dtype=bfloat16,fp32=softmax,low=binary_cross_entropy+sum"
    without = all_low(FP16, spots, {"softmax", "binary_cross_entropy"})
    assert str(without) == "O1,dtype=float16,fp32=binary_cross_entropy,low=sum"


def test_pins_mean_exactly_what_is_chosen():
    generator = random.Random(1)
    modules = ["", "head", "blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc", "blocks.1.fc.inner", "blocks.10.fc"]
    running = [(op, module) for op in ("sum", "linear", "mul", "cat") for module in modules]
    base = all_low(FP16, running)
    for _ in range(25):
        chosen = [spot for spot in running if generator.random() < 0.4]
        rules = pins(base, chosen, running)
        policy = before(base, rules)
        assert Policy.parse(str(policy)) == policy
        for op, module in running:
            treatment = policy.explain(op, module or None).treatment
            expected = "fp32" if (op, module) in chosen else base.explain(op).treatment
            assert treatment == expected, (str(policy), op, module)


def test_pins_leave_alone_what_is_in_fp32_already():
    running = [("linear", module) for module in ("", "bank", "bank.fc", "body", "body.fc")]
    base = all_low(FP16.keep_fp32(modules=["bank"]), running)
    for chosen, text in (
        (["", "body", "body.fc"], "fp32=linear"),
        (["body"], "low=linear@body.fc,fp32=linear@body"),
        (["", "body"], "low=linear@body.fc,fp32=linear"),
    ):
        assert ",".join(map(str, pins(base, [("linear", module) for module in chosen], running))) == text


def test_pins_are_written_as_people_would():
    running = [("linear", f"blocks.{number}.{name}") for number in range(3) for name in ("fc", "out")]
    running += [("sum", ""), ("sum", "pool"), ("mul", "a"), ("mul", "0"), ("mul", "1")]
    base = all_low(FP16, running)

    def text(*chosen):
        return ",".join(map(str, pins(base, chosen, running)))

    assert text(*running[0:6:2]) == "fp32=linear@blocks.*.fc"
    assert text(*running[0:4:2]) == "fp32=linear@blocks.0.fc,fp32=linear@blocks.1.fc"
    assert text(("sum", "pool")) == "fp32=sum@pool"
    assert text(("sum", "")) == "low=sum@pool,fp32=sum"  # what runs in no module has no path of its own
    assert text(("mul", "0"), ("mul", "1")) == "fp32=mul@0,fp32=mul@1"  # and not all modules there are


def test_paths_with_characters_that_a_text_uses():
    running = [("sum", "heads.a+b"), ("sum", "heads.c"), ("linear", "x[0]")]
    base = all_low(FP16, running)
    policy = before(base, pins(base, [running[0], running[2]], running))
    assert str(policy).endswith("fp32=sum@heads.a[+]b+linear@x[[]0],low=sum")
    assert Policy.parse(str(policy)) == policy
    running = [("linear", f"my heads.{number}.fc*") for number in range(2)] + [("linear", "body")]
    policy = before(base, pins(base, running[:2], running))
    assert str(policy.rules[0]) == "fp32=linear@my[ ]heads.*.fc[*]"
    assert str(before(base, pins(base, running[:1], running)).rules[0]) == "fp32=linear@my[ ]heads.0.fc[*]"
    assert Policy.parse(str(policy)) == policy


def test_dropout_drops_nothing_in_trials():
    x = torch.ones(64, 64)
    calls = [
        lambda x: functional.dropout(x, 0.25),
        lambda x: functional.dropout(input=x, p=0.25),
        lambda x: functional.dropout(x.clone(), p=0.25, inplace=True),
        lambda x: functional.alpha_dropout(x, 0.25, training=True),
        lambda x: functional.dropout2d(x[None, :, None], 0.25)[0, :, 0],
        lambda x: torch.dropout(x, 0.25, True),
        lambda x: torch.dropout(x, p=0.25, train=True),
        torch.nn.Dropout(0.25),
    ]
    for call in calls:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with NoDropout(), mezzo.autocast("O1,dtype=bfloat16"):
                assert torch.equal(call(x.to(dtype)), x.to(dtype))
        assert not torch.equal(call(x), x)
    query = torch.randn(2, 4, 8)
    plain = functional.scaled_dot_product_attention(query, query, query)
    with NoDropout():
        assert torch.equal(functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5), plain)
        assert torch.equal(functional.scaled_dot_product_attention(query, query, query, None, 0.5), plain)
