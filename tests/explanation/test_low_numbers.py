"""What reports ask for: each kind is found in a planted program, in numbers of our own, and in none that is right."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo

BF16, FP16 = "O1,dtype=bfloat16,emulate=true", "O1,dtype=float16,emulate=true"
ASKED = {"sum by hand", "positions", "basis", "criterion", "forward derivative", "codes"}
EXACT = {"bfloat16": 2**8, "float16": 2**11}


def findings(model, *inputs, policy=BF16, loss=None):
    explanation = mezzo.explain(model, *inputs, policy=policy, loss=loss)
    return [finding for finding in explanation.findings if finding.kind in ASKED]


def line_of(model, name):
    """Write the line so many below the beginning of a model's forward pass."""
    return f"({__file__}:{type(model).forward.__code__.co_firstlineno + name})"


class Linear(nn.Module):
    """A layer, for the programs that follow."""

    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(width, width)


X = torch.rand(8, 16, generator=torch.Generator().manual_seed(1))


# Sums by hand -------------------------------------------------------------------------------------------


class Sums(Linear):
    def __init__(self, times, start=lambda: 0.0):
        super().__init__()
        self.times, self.start = times, start

    def forward(self, x):
        y, total = self.lin(x).abs(), self.start()
        for _ in range(self.times):
            total += y.mean()
        return total


class Subtracts(Linear):
    def forward(self, x):
        y = self.lin(x).abs()
        total = torch.zeros(16, dtype=y.dtype)
        for _ in range(800):
            total = total - y.mean()
        return total


def test_a_sum_by_hand_is_named_with_what_it_should_have_come_to():
    model = Sums(800)
    (finding,) = findings(model, X)
    assert (finding.kind, finding.where) == ("sum by hand", f"(model) add_ {line_of(model, 3)}")
    came, should = map(float, re.search(r"come to (\S+) for (\S+),", finding.text).groups())
    exact = 800 * model.lin(X).double().abs().mean().item()
    assert should == pytest.approx(exact, rel=2**-7)
    assert came < should * 0.7  # where a half step of the format is larger than the terms
    assert 'of FP32\'s 24 bits lost: write the sum in FP32, total = total + term.float(), or policy.fp32("mean"), ' in (
        finding.text
    )
    assert findings(model, X, policy=f"{BF16},fp32=mean") == []


def test_a_sum_whose_terms_are_subtracted_from_many_numbers():
    (finding,) = findings(Subtracts(), X)
    assert finding.kind == "sum by hand"
    came, should = map(float, re.search(r"come to (\S+) for (\S+),", finding.text).groups())
    assert should < came < 0


def test_sums_in_fp32_short_ones_and_residual_streams_are_none():
    assert findings(Sums(800, lambda: torch.zeros(())), X) == []
    assert findings(Sums(40), X) == []
    assert findings(Sums(500), X, policy=FP16) == []


class Residual(Linear):
    """A hundred blocks on one line, whose stream may be so large that it hardly moves."""

    def __init__(self, start):
        super().__init__()
        self.start = start

    def forward(self, x):
        x = self.lin(x) + self.start
        for _ in range(100):
            x = x + (1 + self.lin(x).tanh()) * 0.1
        return x


# Positions, anchors and grids ---------------------------------------------------------------------------


class Places(Linear):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        y = self.lin(x)
        return self.make(y.dtype) * y.sum()


def centres(dtype):
    return (torch.arange(161, dtype=dtype) + 0.5) * 8


def masked(dtype):
    return torch.ones(600, dtype=torch.bool).to(dtype).cumsum(0, dtype=dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.arange(512, dtype=dtype),
        lambda dtype: torch.linspace(-1, 1, 640, dtype=dtype),
        centres,
        masked,
        lambda dtype: torch.arange(600).to(dtype),
    ],
)
def test_positions_are_counted(make):
    (finding,) = findings(Places(make), X)
    different, all_of_them = (make(dtype).unique().numel() for dtype in (torch.bfloat16, torch.float64))
    assert finding.kind == "positions"
    assert f"{different:,} of {all_of_them:,} positions are different in BF16" in finding.text
    assert "in FP32, and no cast of positions" in finding.text
    assert findings(Places(make), X, policy=FP16) == []


def test_positions_that_the_format_holds_are_none():
    for make in (
        lambda dtype: torch.arange(200, dtype=dtype),
        lambda dtype: torch.arange(512)[:3],
        lambda dtype: torch.linspace(-1, 1, 64, dtype=dtype),
        lambda dtype: (torch.arange(100, dtype=dtype) + 0.5) * 8,
        lambda dtype: torch.arange(512) / 512,
    ):
        assert findings(Places(make), X) == []


# Filter banks -------------------------------------------------------------------------------------------


class Bank(nn.Module):
    def __init__(self, basis, right=False):
        super().__init__()
        self.right = right
        self.register_buffer("basis", basis)

    def forward(self, x):
        return x @ self.basis.T if self.right else (self.basis @ x.T).T


class Features(nn.Module):
    """The logarithm of what a filter bank gives."""

    def __init__(self, basis, right=False):
        super().__init__()
        self.bank = Bank(basis, right)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.bank(x).abs().clamp_min(1e-5).log() * self.scale


N = 256
COSINES = torch.cos(2 * math.pi / N * torch.outer(torch.arange(N / 2 + 1), torch.arange(float(N))))


def tones():
    """Eight loud tones between two bins, with little of all others."""
    times = torch.arange(float(N))
    return torch.stack([torch.cos(2 * math.pi / N * 20 * times + k) for k in range(8)]) + 1e-4 * torch.randn(8, N)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("policy, dtype", [(BF16, torch.bfloat16), (FP16, torch.float16)])
def test_a_filter_bank_is_told_by_its_quiet_bins(right, policy, dtype):
    torch.manual_seed(0)
    x = tones()
    (finding,) = findings(Features(COSINES, right), x, policy=policy)
    assert (finding.kind, finding.where) == ("basis", f"bank matmul {line_of(Bank(COSINES), 1)}")
    exact = x.double() @ COSINES.double().T
    wrong = x.to(dtype).double() @ COSINES.to(dtype).double().T
    wrong = wrong - exact
    ratios = 10 * (exact.square().sum(0) / wrong.square().sum(0)).log10()
    quiet = int(re.search(r"(\d+) of 129 results", finding.text)[1])
    assert abs(quiet - int((ratios < 30).sum())) <= 3
    assert finding.text.endswith('write policy.keep_fp32(modules=["bank"]), the text fp32_module=bank')
    assert findings(Features(COSINES, right), x, policy=f"{policy},fp32_module=bank") == []


class Projects(nn.Module):
    """Products with constants that need no more than sixteen bits: random features, an average over a graph, a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(64, 4)
        self.register_buffer("random", torch.randn(16, 64))
        self.register_buffer("graph", torch.rand(8, 8).softmax(-1))
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x):
        y = self.lin((self.graph @ x @ self.random).abs())
        scores = (y @ y.mT).masked_fill(self.mask == 0, -torch.inf)
        return scores.softmax(-1) @ y + self.mask @ y


# Losses -------------------------------------------------------------------------------------------------


def squares(output):
    return ((output - TARGET.to(output.dtype)) ** 2).mean()


TARGET = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))


class SquareLoss(nn.Module):
    def forward(self, output):
        return squares(output)


class WithLoss(Linear):
    def __init__(self):
        super().__init__()
        self.criterion = SquareLoss()

    def forward(self, x):
        return self.criterion(self.lin(x))


def test_a_loss_of_low_outputs_is_measured():
    line = f"({__file__}:{squares.__code__.co_firstlineno + 1})"
    (finding,) = findings(nn.Linear(16, 16), X, loss=squares)
    assert (finding.kind, finding.where) == ("criterion", f"(loss) sub {line}")
    assert 'write criterion(output.float(), target), or policy.fp32("sub"), the text fp32=sub' in finding.text
    (finding,) = findings(WithLoss(), X)
    assert (finding.kind, finding.where) == ("criterion", f"criterion sub {line}")
    assert findings(WithLoss(), X, policy=f"{BF16},fp32=sub") == []
    assert findings(nn.Linear(16, 16), X, loss=lambda output: squares(output.float())) == []


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: functional.cross_entropy(output, torch.arange(8)),
        lambda output: functional.mse_loss(output, TARGET),
        lambda output: functional.smooth_l1_loss(output, TARGET),
    ],
)
def test_losses_that_the_policy_computes_in_fp32_are_none(loss):
    assert findings(nn.Linear(16, 16), X, loss=loss) == []


# Derivatives --------------------------------------------------------------------------------------------


class Penalty(Linear):
    def __init__(self, region=None):
        super().__init__()
        self.region = region

    def forward(self, x):
        with mezzo.autocast(self.region or BF16):
            (gradient,) = torch.autograd.grad(self.lin(x).sum(), x, create_graph=True)
        return gradient.square().mean()


class Slopes(Linear):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        y = self.lin(x * self.scale)
        return y[1:] - y[:-1]


def test_derivatives_in_the_forward_pass():
    x = X.clone().requires_grad_()
    (finding,) = findings(Penalty(), x)
    assert (finding.kind, finding.where) == ("forward derivative", f"lin linear {line_of(Penalty(), 2)}")
    assert finding.text.endswith('write policy.keep_fp32(modules=["lin"]), the text fp32_module=lin')
    assert findings(Penalty("O0"), x) == []
    assert findings(Penalty(f"{BF16},fp32_module=lin"), x, policy=f"{BF16},fp32_module=lin") == []


def test_differences_of_neighbours():
    model = Slopes(1e-3)
    (finding,) = findings(model, X)
    low = [tensor.bfloat16().float() for tensor in (X * 1e-3, model.lin.weight, model.lin.bias)]
    y = functional.linear(*low).bfloat16()
    share = y[1:].double().abs().sum() / (y[1:] - y[:-1]).double().abs().sum()
    assert (finding.kind, finding.where) == ("forward derivative", f"(model) sub {line_of(model, 2)}")
    assert float(re.search(r"are 1/(\S+) of", finding.text)[1]) == pytest.approx(share.item(), rel=0.01)
    assert findings(model, X, policy=f"{BF16},fp32_module=lin") == []
    assert findings(Slopes(1.0), X) == []


# Codes and indices --------------------------------------------------------------------------------------


class Codes(Linear):
    """Digits of base 8 as one number."""

    def forward(self, digits):
        table = torch.zeros(4, 16)
        table[torch.arange(4), torch.arange(4)] = 1.0
        index = functional.linear(digits, torch.tensor([[1.0, 8.0, 64.0, 512.0]]))[:, 0].long()
        return self.lin(digits @ table) * index[:, None]


class Bins(Linear):
    def __init__(self, bins):
        super().__init__()
        self.bins = bins

    def forward(self, x):
        y = self.lin(x)
        return y * (y.clamp(0, 1) * self.bins).floor().long() + y.argmax(-1)[:, None]


def test_codes_of_low_numbers():
    digits = torch.randint(0, 8, (1000, 4), generator=torch.Generator().manual_seed(0)).float()
    digits[0] = 7.0
    (finding,) = findings(Codes(), digits)
    assert (finding.kind, finding.where) == ("codes", f"(model) long {line_of(Codes(), 3)}")
    assert "integers up to 4,096 are read off numbers in BF16, which holds all up to 256 only, 4 of " in finding.text
    assert finding.text.endswith(
        'write a function under @mezzo.fp32 for this linear, or policy.fp32("linear"), the text fp32=linear'
    )


def test_few_bins_and_what_is_an_integer_before():
    assert findings(Bins(8), X) == []


# Right programs -----------------------------------------------------------------------------------------


class Embeds(Linear):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(512, 16)

    def forward(self, x):
        return self.lin(self.embed(torch.arange(512)))


class Routes(Linear):
    def forward(self, x):
        y = self.lin(x)
        weights, chosen = y.softmax(-1).topk(2)
        return (weights[..., None] * y[chosen % len(y)]).sum(1)


class Border(Linear):
    """Differences in a field that is constant, of numbers that BF16 holds and of some that it does not."""

    def forward(self, x):
        y = self.lin(x[:1]).expand(8, -1) * 1e-3 + 1
        z = self.lin(x) * 0 + 1
        return (y[1:] - y[:-1]) + (z[1:] - z[:-1]) + self.lin(x)[1:]


RIGHT = {
    "constant fields": (Border, X),
    "a residual stream": (lambda: Residual(0.0), X),
    "one that hardly moves": (lambda: Residual(200.0), X),
    "an embedding of many positions": (Embeds, X),
    "products with constants": (Projects, X),
    "top-k routing": (Routes, X),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), torch.rand(4, 4, 9)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs(name):
    build, x = RIGHT[name]
    for policy in (BF16, FP16, BF16.replace("O1", "O2")):
        assert findings(build(), x, policy=policy) == []
