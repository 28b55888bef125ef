"""The report as a value: text, JSON, and what is refused."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from mezzo import StateError
from mezzo.overflow import Overflow, Range, locate

RANGE = Range(
    name="output", dtype="float16", shape=(2, 3), smallest=0.5, largest=32752.0, num_zeros=0, num_inf=2, num_nan=1,
    share=0.5, headroom=1.0,
)  # fmt: skip
OVERFLOW = Overflow(
    kind="range", module="head", op="linear", kernel="aten::mm", phase="forward", tensor=RANGE,
    inputs=(dataclasses.replace(RANGE, name="head.weight", shape=(), num_inf=0, num_nan=0),), needed=131008.0,
    share=2.0, line="/home/me/model.py:7", code="return self.head(x)", loss_scale=1.0, cause="it is too large",
    cure="policy",
)  # fmt: skip


def test_the_text():
    assert str(OVERFLOW) == (
        "the first non-finite tensor: output, in the forward pass of head linear\n"
        "  where  head linear (aten::mm), output (float16, 2×3): 2 inf and 1 nan\n"
        "         /home/me/model.py:7  return self.head(x)\n"
        "         reads head.weight (float16, scalar): |x| from 0.5 to 3.275e+04, "
        "50 % of the range, 1 powers of two left\n"
        "  why    it is too large\n"
        "  write  policy"
    )
    bare = dataclasses.replace(OVERFLOW, module="", op="", kernel="", line=None, code=None, inputs=())
    assert str(bare).splitlines()[:3] == [
        "the first non-finite tensor: output, in the forward pass of (model)",
        "  where  (model), output (float16, 2×3): 2 inf and 1 nan",
        "  why    it is too large",
    ]
    assert "\n         /home/me/model.py:7\n" in str(dataclasses.replace(OVERFLOW, code=None))


@pytest.mark.parametrize(
    "changed, text",
    [
        ({}, "|x| from 0.5 to 3.275e+04, 50 % of the range, 1 powers of two left, 2 inf, 1 nan"),
        ({"num_zeros": 3}, "|x| from 0.5 to 3.275e+04, 50 % of the range, 1 powers of two left, 3 zeros, 2 inf, 1 nan"),
        ({"share": 1e-6, "headroom": 20.0}, "|x| from 0.5 to 3.275e+04, 20 powers of two left, 2 inf, 1 nan"),
        ({"headroom": None, "num_zeros": 3}, "all zero, 2 inf, 1 nan"),
        ({"headroom": None}, "no finite number, 2 inf, 1 nan"),
    ],
)
def test_the_text_of_a_range(changed, text):
    assert str(dataclasses.replace(RANGE, **changed)) == f"output (float16, 2×3): {text}"


def test_to_json_and_back():
    assert Overflow.from_json(OVERFLOW.to_json()) == OVERFLOW
    data = OVERFLOW.to_dict()
    assert data["version"] == 1
    assert data["tensor"]["shape"] == [2, 3]
    assert data["inputs"][0]["name"] == "head.weight"
    assert [*data][1:] == [field.name for field in dataclasses.fields(Overflow)]


def test_reports_of_every_kind_are_json():
    model = nn.Linear(2, 2)
    for loss in (
        lambda y: (y * 0).log(),
        lambda y: (y.abs() * 1e30).exp(),
        lambda y: y * torch.inf,
        lambda y: y.half() * 1e9,
    ):
        overflow = locate(lambda loss=loss: loss(model(torch.ones(2))).sum(), model)
        assert Overflow.from_json(overflow.to_json()) == overflow
        json.loads(overflow.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "not JSON: Expecting"),
        ("[]", "it names no version"),
        ("{}", "it names no version"),
        ('{"version": 1}', "a field is wrong: it has no .*, tensor, "),
        (OVERFLOW.to_json().replace('"kind"', '"sort"'), "a field is wrong: 'sort'"),
    ],
)
def test_what_is_no_overflow(text, why):
    with pytest.raises(StateError, match=f"this is no overflow\n  why    {why}") as caught:
        Overflow.from_json(text)
    assert "write  overflow.to_json(), read back with Overflow.from_json(text)" in str(caught.value)


def test_another_version():
    with pytest.raises(StateError, match="the overflow has version 9\n  why    this mezzo reads version 1"):
        Overflow.from_json(OVERFLOW.to_json().replace('"version": 1', '"version": 9'))


def test_it_is_a_frozen_value():
    assert hash(OVERFLOW) == hash(Overflow.from_json(OVERFLOW.to_json()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        OVERFLOW.cure = ""
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        Overflow("range")


def test_json_nested_without_end_is_refused():
    with pytest.raises(StateError, match="this is no overflow"):
        Overflow.from_json("[" * 100_000)
