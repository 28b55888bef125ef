"""Products below sixteen bits tell listeners what they quantise, and know of nobody where nobody listens."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.cast import notes
from mezzo.cast.notes import LISTENERS, listening
from mezzo.cast.products import functions
from mezzo.formats import Quantized, quantized

pytestmark = pytest.mark.usefixtures("emulating")


class Heard:
    """Writes down what it is told."""

    def __init__(self):
        self.operands, self.ended = [], []

    def quantised(self, call, role, operand, made):
        self.operands.append((call, role, operand.detach().clone(), made))

    def differentiated(self, call, kept):
        self.ended.append((call, kept))


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x):
        return x @ self.weight


def differentiate(model, rule, heard=None, frozen=False):
    model.requires_grad_(not frozen)
    x = torch.randn(32, 32, requires_grad=True)
    with mezzo.autocast(f"O1,bf16,{rule}"):
        out = model(x)
    if heard is None:
        out.float().square().sum().backward()
        return out
    with listening(heard):
        with mezzo.autocast(f"O1,bf16,{rule}"):
            out = model(x)
        out.float().square().sum().backward()
    return out


def test_a_listener_is_told_of_each_operand_of_the_weight_and_what_became_of_it():
    torch.manual_seed(0)
    for model, rule in (
        (nn.Linear(32, 64), "mxfp8=linear"), (Held(), "mxfp8=matmul"), (nn.Linear(32, 64), "fp8=linear"),
        (nn.Linear(32, 64), "nvfp4=linear,nvfp4_tricks=rht"),
    ):  # fmt: skip
        heard = Heard()
        differentiate(model, rule, heard)
        roles = [role for _, role, _, _ in heard.operands]
        twice = rule not in ("fp8=linear",)
        assert roles == [role for role in ("activation", "weight", "gradient") for _ in range(1 + twice)], rule
        (call,) = {call for call, *_ in heard.operands}
        assert call.weight is model.weight or call.weight._base is model.weight
        for _, role, operand, made in heard.operands:
            again = quantized(operand, made.format, made.dim)
            assert torch.equal(again.wide(), made.wide()), (rule, role)
        if "rht" in rule:
            rotated = [operand.dtype == torch.float32 for _, _, operand, _ in heard.operands]
            assert rotated == [False, True, False, False, False, True]
        ((ended, kept),) = heard.ended
        assert ended is call
        assert isinstance(kept, Quantized)
        assert torch.equal(kept.wide(), heard.operands[twice][3].wide())


def test_where_the_weight_has_no_quantised_gradient_nothing_is_said_to_be_multiplied():
    for rule, frozen in (("mxfp8=linear,low_products=wgrad", False), ("mxfp8=linear", True)):
        heard = Heard()
        differentiate(nn.Linear(32, 64), rule, heard, frozen)
        assert [kept for _, kept in heard.ended] == [None], rule


def test_nothing_is_made_for_nobody_and_a_listener_that_left_is_told_nothing(monkeypatch):
    heard, made, plain = Heard(), [], notes.ProductCall

    def call(weight):
        made.append(weight)
        return plain(weight)

    monkeypatch.setattr(functions, "ProductCall", call)
    model = nn.Linear(32, 64)
    differentiate(model, "mxfp8=linear")
    assert made == []
    with listening(heard), mezzo.autocast("O1,bf16,mxfp8=linear"):
        out = model(torch.randn(32, 32))
    assert (len(made), LISTENERS.now) == (1, ())
    count = len(heard.operands)
    out.float().sum().backward()
    assert (len(heard.operands), heard.ended) == (count, [])
