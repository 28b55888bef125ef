"""``paddle.auto_cast``: regions inside regions, and models whose weights are stored in halves."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import Policy
from mezzo.compat import paddle


@pytest.fixture(autouse=True)
def _emulating(emulating):
    """Products in FP16 are slow here."""


@pytest.fixture
def conv():
    return nn.Conv2d(1, 6, 3, bias=False)


image = torch.rand(1, 1, 6, 6)
x = torch.rand(2, 3)


# Regions -----------------------------------------------------------------------------------------------


def test_each_region_replaces_the_one_around_it(conv):
    def dtypes():
        return conv(image).dtype, functional.softmax(x.half(), 1).dtype

    with paddle.auto_cast(custom_white_list=["softmax"]):
        before = dtypes()
        with paddle.auto_cast(enable=False):
            assert dtypes() == (torch.float32, torch.float16)
        with paddle.auto_cast(level="O0"):
            assert dtypes() == (torch.float32, torch.float16)
        with paddle.auto_cast(dtype="bfloat16"):
            assert dtypes() == (torch.bfloat16, torch.float32)
        with mezzo.autocast("O1,dtype=bfloat16"):
            assert dtypes() == (torch.bfloat16, torch.float32)
        assert dtypes() == before == (torch.float16, torch.float16)
    assert dtypes() == (torch.float32, torch.float16)


def test_it_decorates_functions_and_is_planned_once(conv):
    @paddle.auto_cast(custom_white_list=("gelu", "softmax"))
    def forward(features):
        return functional.softmax(functional.gelu(features), 1)

    assert forward(x).dtype == torch.float16
    one = paddle.auto_cast(custom_white_list={"softmax", "gelu"})
    assert one.region is paddle.auto_cast(custom_white_list={"gelu", "softmax"}).region
    assert isinstance(one, mezzo.autocast)


def test_levels_and_dtypes_are_read_as_paddle_reads_them(conv):
    assert paddle.amp is paddle  # for programs that import it whole
    for level, dtype in (("o1", "FLOAT16"), ("O1", "fp16"), ("O1", torch.float16)):
        with paddle.auto_cast(level=level, dtype=dtype):
            assert conv(image).dtype == torch.float16


# Models whose weights are stored in halves -------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.inside = None

    def forward(self, features):
        hidden = functional.gelu(self.fc(features))
        out = functional.softmax(self.out(self.norm(hidden)), 1)
        self.inside = (hidden.dtype, out.dtype)
        return out


@pytest.fixture
def block():
    model = Block()
    mezzo.prepare(model, Policy.O2("float16", output_dtype=None).keep_fp32(modules=["norm"]))
    return model


def test_a_region_holds_inside_a_prepared_model(block):
    block(x)
    assert block.inside == (torch.float32, torch.float32)  # no region: FP32 weights
    for level, custom, expected in (
        ("O2", {}, (torch.float16, torch.float16)),
        ("O2", {"custom_black_list": ["softmax"]}, (torch.float16, torch.float32)),
        ("O2", {"custom_black_list": ["gelu"]}, (torch.float32, torch.float16)),
        ("O1", {}, (torch.float16, torch.float32)),  # softmax is black there
        ("OD", {}, (torch.float32, torch.float32)),
    ):
        with paddle.auto_cast(level=level, **custom):
            out = block(x)
        assert (level, custom, block.inside) == (level, custom, expected)
        assert out.dtype == expected[1]  # nothing is cast on the way out
    with paddle.auto_cast(level="O2"), paddle.auto_cast(enable=False):
        assert block(x).dtype == torch.float32  # no region again
    with mezzo.autocast("O1,dtype=float16,fp32=softmax"):
        assert block(x).dtype == torch.float32  # as any region does
