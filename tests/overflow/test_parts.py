"""Parts of a search: what counts as an origin, kernel by kernel; the highest scale that is finite; the report."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from mezzo.overflow import Overflow, Range, locate
from mezzo.overflow.diagnose import Context, highest_scale
from mezzo.overflow.watch import Watch

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


def test_the_text_of_a_range():
    for changed, text in (
        ({}, "|x| from 0.5 to 3.275e+04, 50 % of the range, 1 powers of two left, 2 inf, 1 nan"),
        ({"num_zeros": 3}, "|x| from 0.5 to 3.275e+04, 50 % of the range, 1 powers of two left, 3 zeros, 2 inf, 1 nan"),
        ({"share": 1e-6, "headroom": 20.0}, "|x| from 0.5 to 3.275e+04, 20 powers of two left, 2 inf, 1 nan"),
        ({"headroom": None, "num_zeros": 3}, "all zero, 2 inf, 1 nan"),
        ({"headroom": None}, "no finite number, 2 inf, 1 nan"),
    ):
        assert str(dataclasses.replace(RANGE, **changed)) == f"output (float16, 2×3): {text}"


def test_json_has_every_field():
    data = json.loads(json.dumps(OVERFLOW.to_dict(), allow_nan=False))
    assert [*data] == [field.name for field in dataclasses.fields(Overflow)]
    assert data["tensor"]["shape"] == [2, 3]
    assert data["inputs"][0]["name"] == "head.weight"
    model = nn.Linear(2, 2)
    for loss in (lambda y: (y * 0).log(), lambda y: y * torch.inf, lambda y: y.half() * 1e9):
        overflow = locate(lambda: loss(model(torch.ones(2))).sum(), model)  # noqa: B023 - called at once
        assert json.loads(json.dumps(overflow.to_dict(), allow_nan=False))["kind"] == overflow.kind


# Origins ----------------------------------------------------------------------------------------------


@pytest.fixture
def watch():
    return Watch(Context([nn.Linear(1, 1)], None))


def sources(watch):
    return [origin.source for origin in watch.origins]


def test_a_number_has_one_origin_however_far_it_is_handed_on(watch):
    x = torch.zeros(3)
    with watch.recorder.kernel_mode:
        y = (x.log() + 1).view(3, 1).expand(3, 2).contiguous()[1:]
    assert sources(watch) == ["made"]
    assert watch.first([x, y]) is watch.origins[0]
    assert watch.first([x]) is None


def test_the_first_of_several_is_blamed(watch):
    x = torch.zeros(3)
    with watch.recorder.kernel_mode:
        a = x.log()
        b = x.reciprocal()
        y = a + b
    assert sources(watch) == ["made", "made"]
    assert watch.first([y]).kernel == "aten::log"
    assert watch.first([b]).kernel == "aten::reciprocal"


def test_what_is_meant_is_blamed_last(watch):
    x = torch.zeros(3)
    with watch.recorder.kernel_mode:
        y = x.masked_fill(torch.tensor([True, False, False]), -torch.inf) + x.log()
    assert sources(watch) == ["written", "made"]
    assert watch.first([y]).kernel == "aten::log"


def test_memory_that_nothing_was_written_to(watch):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        with watch.recorder.kernel_mode:
            x = torch.empty(3)
            assert bool(x.isnan().all())
            y = torch.add(torch.ones(3), 1, out=x)
    finally:
        torch.use_deterministic_algorithms(before)
    assert not watch.origins
    assert watch.first([y]) is None


def test_a_sparse_tensor_that_a_cast_takes_beyond_its_range(watch):
    """It is followed by the numbers that it holds: what is cast is blamed, and nothing that reads it."""
    with watch.recorder.kernel_mode:
        y = torch.full((3,), 1e6).mul(torch.ones(3)).to_sparse().to(torch.float16).to_dense()
    assert not y.isfinite().any()
    assert sources(watch) == ["made"]
    assert watch.first([y]).kernel == "aten::_to_sparse"


# The highest scale, against trying every one -----------------------------------------------------------


@example(limit=9, scale=2.0**16, needed=65504.0 * 100)
@example(limit=9, scale=2.0**16, needed=0.0)
@given(
    limit=st.integers(-30, 30),
    scale=st.floats(2.0**-20, 2.0**40),
    needed=st.one_of(st.none(), st.just(math.inf), st.floats(1.0, 1e12)),
)
def test_the_highest_scale_is_the_one_that_trying_all_finds(limit, scale, needed):
    tried = []

    def is_finite_at(value):
        tried.append(value)
        return value <= 2.0**limit

    top = math.ceil(math.log2(scale)) - 1
    wanted = max((2.0**e for e in range(top - 40, top + 1) if 2.0**e <= 2.0**limit), default=None)
    assert highest_scale(scale, needed, 65504.0, is_finite_at) == wanted
    assert all(value < scale for value in tried)
    assert len(tried) <= 1 + 41
    if (limit, scale, needed) == (9, 2.0**16, 65504.0 * 100):  # a good guess needs three passes
        assert tried == [2.0**-25, 2.0**9, 2.0**10]
