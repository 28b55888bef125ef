"""The report as a value: text, JSON, and what is refused."""

import dataclasses
import json

import pytest
import torch
from torch import nn

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


def test_json_has_every_field():
    data = json.loads(json.dumps(OVERFLOW.to_dict(), allow_nan=False))
    assert [*data] == [field.name for field in dataclasses.fields(Overflow)]
    assert data["tensor"]["shape"] == [2, 3]
    assert data["inputs"][0]["name"] == "head.weight"


def test_reports_of_every_kind_are_json():
    model = nn.Linear(2, 2)
    for loss in (
        lambda y: (y * 0).log(),
        lambda y: (y.abs() * 1e30).exp(),
        lambda y: y * torch.inf,
        lambda y: y.half() * 1e9,
    ):
        overflow = locate(lambda loss=loss: loss(model(torch.ones(2))).sum(), model)
        assert json.loads(json.dumps(overflow.to_dict(), allow_nan=False))["kind"] == overflow.kind


def test_it_is_a_frozen_value():
    assert hash(OVERFLOW) == hash(dataclasses.replace(OVERFLOW))
    with pytest.raises(dataclasses.FrozenInstanceError):
        OVERFLOW.cure = ""
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        Overflow("range")
