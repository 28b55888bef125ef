"""Products below sixteen bits tell listeners what they quantise."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mezzo
from mezzo.cast.notes import LISTENING, listening
from mezzo.formats import Quantized, quantized

pytestmark = pytest.mark.usefixtures("emulating")


class Heard:
    """Writes down what it is told of all calls."""

    def __init__(self):
        self.calls, self.operands, self.ended = [], [], []

    def asked(self, weight):
        self.calls.append(Call(self, weight))
        return self.calls[-1]


class Call:
    def __init__(self, heard, weight):
        self.heard, self.weight = heard, weight

    def quantised(self, role, operand, made):
        self.heard.operands.append((self, role, operand.detach().clone(), made))

    def differentiated(self, kept):
        self.heard.ended.append((self, kept))


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
    with listening(heard.asked):
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


def test_calls_are_asked_about_inside_the_block_alone_and_one_may_be_left_out():
    heard, model = Heard(), nn.Linear(32, 64)
    differentiate(model, "mxfp8=linear")
    with listening(heard.asked), listening(lambda weight: None), mezzo.autocast("O1,bf16,mxfp8=linear"):
        model(torch.randn(32, 32))
    assert (len(heard.calls), LISTENING.now) == (1, ())
    differentiate(model, "mxfp8=linear")
    assert len(heard.calls) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_compiled_code_is_the_same_whether_there_are_listeners_or_not():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    counts = CompileCounterWithBackend("eager")

    @torch.compile(backend=counts)
    def run(x):
        with mezzo.autocast("O1,bf16"):
            return model(x)

    run(x := torch.randn(4, 32))
    with listening(Heard().asked):
        run(x)
    assert counts.frame_count == 1
