"""What a finding says to write is written: the finding is gone, and the numbers are FP32's, or nearly."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo.policy import Policy

BF16 = "O1,dtype=bfloat16,emulate=true"
ASKED = {"sum by hand", "positions", "basis", "criterion", "forward derivative", "codes"}
X = torch.rand(64, 16, generator=torch.Generator().manual_seed(1))
TARGET = torch.rand(64, 16, generator=torch.Generator().manual_seed(2))
TONES = torch.cos(torch.outer(torch.arange(8.0), torch.ones(256)) + 2 * math.pi / 256 * 20 * torch.arange(256.0))
TONES = TONES + 1e-4 * torch.randn(8, 256, generator=torch.Generator().manual_seed(3))
COSINES = torch.cos(2 * math.pi / 256 * torch.outer(torch.arange(129.0), torch.arange(256.0)))


class Program(nn.Module):
    """Two layers, and what is done with them."""

    def __init__(self, run, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.run = nn.Linear(width, width), nn.Linear(width, width), run
        self.bank = Bank()
        self.register_buffer("cosines", COSINES)

    def forward(self, x):
        return self.run(self, x)


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cosines", COSINES)

    def forward(self, x):
        return x @ self.cosines.T


def asked_findings(program, x, policy):
    explanation = mezzo.explain(Program(program), x, policy=policy, loss=lambda output: output.float().sum())
    return [finding for finding in explanation.findings if finding.kind in ASKED]


def error(program, x, policy, right):
    """Return how far a program is from what is right, in FP32, as a share of it."""
    results = []
    for run, of_policy in ((program, policy), (right, "O0")):
        model = Program(run)
        handle = mezzo.prepare(model, of_policy)
        with handle.autocast():
            results.append(model(copy.deepcopy(x)).detach().double())
    return ((results[0] - results[1]).norm() / results[1].norm()).item()


@mezzo.fp32
def in_fp32(function, *args):
    return function(*args)


def total(start, add):
    def run(model, x):
        y = model.one(x).abs()
        total = start(y)
        for _ in range(200):
            total = add(total, y.mean())
        return total

    return run


def positions(make, change=lambda positions, y: positions):
    return lambda model, x: change(make(model.one(x)), model.one(x)) + 0 * model.one(x).sum()


def slopes(model, x, one=lambda model, x: model.one(x)):
    y = one(model, x) * 1e-3 + 1
    return y[:, 1:] - y[:, :-1]


def slopes_of_two(model, x):
    y = (model.one(x) + model.two(x)) * 0.01 + 1
    return y[:, 1:] - y[:, :-1]


def gradient(model, x, one=lambda model, x: model.one(x)):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(one(model, x).sum(), x, create_graph=True)[0]


def codes(model, x, one=lambda model, x: model.one(x)):
    y = one(model, x)
    return y * 0 + (y.sigmoid() * 1000).long()


def codes_of_two(model, x):
    return model.one(x) * 0 + ((model.one(x) + model.two(x)).sigmoid() * 1000).long()


# The kind, the program, what it is given, and the program as the finding says to write it, if it does.
CASES = {
    "a sum": ("sum by hand", total(lambda y: 0.0, lambda a, b: a + b), X,
              total(lambda y: 0.0, lambda a, b: a + b.float())),
    "a sum in place": ("sum by hand", total(lambda y: 0.0, lambda a, b: a.__iadd__(b) if torch.is_tensor(a) else a + b),
                       X, total(lambda y: 0.0, lambda a, b: a + b.float())),
    "a total that was made low": (
        "sum by hand", total(lambda y: torch.zeros((), dtype=y.dtype), lambda a, b: a.add_(b)), X,
        total(lambda y: torch.zeros((), dtype=y.dtype), lambda a, b: a + b.float()),
    ),
    "a range": ("positions", positions(lambda y: torch.arange(512, dtype=y.dtype)), X,
                positions(lambda y: torch.arange(512, device=y.device))),
    "centres": ("positions", positions(lambda y: torch.arange(161, dtype=y.dtype), lambda p, y: (p + 0.5) * 8), X,
                positions(lambda y: torch.arange(161, device=y.device), lambda p, y: (p + 0.5) * 8)),
    "positions that are cast last": ("positions", positions(lambda y: torch.arange(512.0).to(y.dtype)), X,
                                     positions(lambda y: torch.arange(512.0))),
    "a bank": ("basis", lambda model, x: model.bank(x).abs().clamp_min(1e-5).log() + 0 * model.one.bias.sum(), TONES,
               None),
    "a bank of no module's": (
        "basis", lambda model, x: (x @ model.cosines.T).abs().clamp_min(1e-5).log() + 0 * model.one.bias.sum(), TONES,
        lambda model, x: in_fp32(lambda: x @ model.cosines.T).abs().clamp_min(1e-5).log() + 0 * model.one.bias.sum(),
    ),
    "a derivative": ("forward derivative", gradient, X, None),
    "a derivative of no module's": (
        "forward derivative",
        lambda model, x: gradient(model, x, lambda model, x: functional.linear(x, model.one.weight)), X,
        lambda model, x: gradient(
            model, x, lambda model, x: in_fp32(lambda x: functional.linear(x, model.one.weight), x)
        ),
    ),
    "slopes that are all 0": ("forward derivative", slopes, X, None),
    "slopes of two layers": ("forward derivative", slopes_of_two, X, None),
    "slopes of no module's": (
        "forward derivative",
        lambda model, x: slopes(model, x, lambda model, x: functional.linear(x, model.one.weight)), X,
        lambda model, x: slopes(model, x, lambda model, x: in_fp32(lambda: functional.linear(x, model.one.weight))),
    ),
    "slopes of the model's own cast": (
        "forward derivative", lambda model, x: slopes(model, x, lambda model, x: x.bfloat16()) + 0 * model.one.bias[1:],
        X, lambda model, x: slopes(model, x, lambda model, x: x) + 0 * model.one.bias[1:],
    ),
    "codes": ("codes", codes, X, None),
    "codes of the model's own cast": (
        "codes", lambda model, x: codes(model, x, lambda model, x: x.bfloat16()) + 0 * model.one.bias, X,
        lambda model, x: codes(model, x, lambda model, x: x) + 0 * model.one.bias,
    ),
    "codes of two layers": ("codes", codes_of_two, X, None),
    "codes of no module's": (
        "codes", lambda model, x: codes(model, x, lambda model, x: functional.linear(x, model.one.weight)), X,
        lambda model, x: codes(model, x, lambda model, x: in_fp32(lambda: functional.linear(x, model.one.weight))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_finding_says_to_write_cures_it(case):
    wanted, program, x, rewritten = CASES[case]
    (finding,) = asked_findings(program, x, BF16)
    assert finding.kind == wanted
    right = rewritten or program
    before = error(program, x, BF16, right)
    cures = [] if rewritten is None else [(rewritten, BF16)]
    if finding.rule:
        python, text = re.search(r"(policy\.\w+\(.*?\)), the text (\S+)$", finding.text).groups()
        ruled = Policy.parse(f"{BF16},{finding.rule}")
        assert text == finding.rule
        assert eval(python, {"policy": Policy.parse(BF16)}) == ruled
        cures.append((program, ruled))
    assert cures
    for cured, policy in cures:
        assert asked_findings(cured, x, policy) == []
        assert error(cured, x, policy, right) < before / 8


def test_codes_of_a_layer_and_of_the_model_itself_need_both_cures():
    def run(linear):
        return lambda model, x: (
            model.one(x) * 0 + ((model.one(x) + linear(x, model.two.weight)).sigmoid() * 1000).long()
        )

    (finding,) = asked_findings(run(functional.linear), X, BF16)
    words, rule = "a function under @mezzo.fp32 for this linear", "fp32_module=one"
    assert finding.text.endswith(f'write {words}, and policy.keep_fp32(modules=["one"]), the text {rule}')
    cured = run(lambda x, weight: in_fp32(functional.linear, x, weight))
    assert asked_findings(run(functional.linear), X, f"{BF16},{rule}") != []
    assert asked_findings(cured, X, BF16) != []
    assert asked_findings(cured, X, f"{BF16},{rule}") == []


class Squares(nn.Module):
    def __init__(self, shift=lambda output: output):
        super().__init__()
        self.shift = shift

    def forward(self, output):
        output = self.shift(output)
        return (((output - TARGET.to(output.dtype)) * 3).square() * 0.5).mean()


def test_what_is_said_of_a_loss_cures_it():
    """All that computes low on a line is named at once."""
    model = nn.Linear(16, 16)
    (finding,) = (
        finding for finding in mezzo.explain(model, X, policy=BF16, loss=Squares()).findings if finding.kind in ASKED
    )
    assert finding.rule.startswith("fp32=")
    assert {"sub", "mul"} <= set(finding.rule.removeprefix("fp32=").split("+"))
    assert "write criterion(output.float(), target), or policy.fp32(" in finding.text
    for loss, policy in ((Squares(lambda output: output.float()), BF16), (Squares(), f"{BF16},{finding.rule}")):
        findings = mezzo.explain(model, X, policy=policy, loss=loss).findings
        assert [finding for finding in findings if finding.kind in ASKED] == []
