"""What users ask for: integers that a low format does not hold, tied weights."""

import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import explain

SIGNIFICAND = {"bfloat16": 8, "float16": 11}
BOTH = [(level, dtype) for level in ("O1", "O2") for dtype in SIGNIFICAND]


def policy(level, dtype, *rules):
    return ",".join([f"{level},dtype={dtype},emulate=true", *rules])


def findings_of(wanted, model, *inputs, policy, loss=None):
    return [finding for finding in explain(model, *inputs, policy=policy, loss=loss).findings if finding.kind == wanted]


def num_changed(values, dtype):
    """How many integers change when they are rounded to so many bits, ties to even, in exact arithmetic."""
    changed = 0
    for value in map(abs, values):
        unit = 2 ** max(0, value.bit_length() - SIGNIFICAND[dtype])
        changed += round(Fraction(value, unit)) * unit != value or (dtype == "float16" and value >= 65520)
    return changed


# Exact integers -------------------------------------------------------------------------------------------


class Through(nn.Module):
    """Numbers through a linear layer, whatever makes them."""

    def __init__(self, make, width=1):
        super().__init__()
        self.make, self.embed, self.head = make, nn.Linear(width, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(self.make(x))))


def times(largest):
    return lambda x: torch.arange(largest + 1).float()[None]


@pytest.mark.parametrize("level, dtype", BOTH)
def test_positions_that_enter_a_low_product_rounded(level, dtype):
    bound = 2 ** SIGNIFICAND[dtype]
    for largest in (bound, bound + 1, 5000, *([70_000] if level == "O1" else [])):
        model = Through(times(largest), width=largest + 1)
        findings = findings_of("lost integers", model, torch.ones(1), policy=policy(level, dtype))
        changed = num_changed(range(largest + 1), dtype)
        assert bool(changed) == (largest > bound)
        if not changed:
            assert findings == []
            continue
        (finding,) = findings
        assert re.fullmatch(r"embed linear \(.*test_explain_asked.py:\d+\)", finding.where)
        name = {"bfloat16": "BF16", "float16": "FP16"}[dtype]
        assert f"up to {largest:,}, of which {changed:,} of {largest + 1:,} change in {name}" in finding.text
        assert 'policy.keep_fp32(modules=["embed"]), the text fp32_module=embed' in finding.text
        cured = policy(level, dtype, "fp32_module=embed")
        assert findings_of("lost integers", model, torch.ones(1), policy=cured) == []
    assert findings_of("lost integers", Through(times(5000), width=5001), torch.ones(1), policy="O0") == []


class Weighs(nn.Module):
    """Positions in a product, in the model itself."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("weights", torch.rand(3000, 4) / 3000, persistent=False)

    def forward(self, x):
        return self.proj(torch.arange(3000, device=x.device).float()[None] @ self.weights.to(x.dtype))


class Rotary(nn.Module):
    """Angles by an outer product, which adds up nothing, and is not rounded."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("frequencies", 10_000.0 ** -torch.linspace(0, 1, 4), persistent=False)

    def forward(self, x):
        positions = torch.arange(3000, device=x.device).float()
        angles = positions[:, None] @ self.frequencies[None] + torch.einsum("i,j->ij", positions, self.frequencies)
        return self.proj(angles.sin())


class OwnCast(nn.Module):
    """Integers that the model's own code casts to the dtype of its weights, and then joins with others."""

    def __init__(self):
        super().__init__()
        self.embed, self.low = nn.Linear(2, 4), torch.bfloat16

    def forward(self, x):
        steps = torch.arange(3000)[:, None]
        joined = torch.cat([steps.to(self.low), torch.rand(3000, 1).to(self.low)], 1)
        return self.embed(joined)


class Table(nn.Module):
    """Positions in a buffer, which O3 stores low."""

    def __init__(self, persistent=True):
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.register_buffer("positions", torch.arange(3000.0)[:, None], persistent=persistent)

    def forward(self, x):
        return self.embed(self.positions)


@pytest.mark.parametrize("dtype", SIGNIFICAND)
def test_a_product_of_positions_in_the_model_itself(dtype):
    assert findings_of("lost integers", Rotary(), torch.ones(1), policy=policy("O1", dtype)) == []
    (finding,) = findings_of("lost integers", Weighs(), torch.ones(1), policy=policy("O1", dtype))
    assert finding.where.startswith("(model) matmul (")
    assert f"{num_changed(range(3000), dtype):,} of 3,000" in finding.text
    assert "a function under @mezzo.fp32" in finding.text


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_integers_that_the_model_itself_casts_are_followed_through_cat(level):
    (finding,) = findings_of("lost integers", OwnCast(), torch.ones(1), policy=policy(level, "bfloat16"))
    line = OwnCast.forward.__code__.co_firstlineno + 2
    assert f"{num_changed(range(3000), 'bfloat16'):,} of 3,000 change in BF16, by the cast at {__file__}:{line}" in (
        finding.text
    )


@pytest.mark.parametrize("dtype", SIGNIFICAND)
def test_a_buffer_that_is_stored_low(dtype):
    (finding,) = findings_of("lost integers", Table(), torch.ones(1), policy=policy("O3", dtype))
    assert "of the buffer positions up to 2,999" in finding.text
    cure = "fp32_param=positions,fp32_module=embed"
    assert f"the text {cure};" in finding.text
    cured = policy("O3", dtype, cure)
    assert findings_of("lost integers", Table(), torch.ones(1), policy=cured) == []


def one_hot(x):
    return functional.one_hot(torch.arange(600), 600).float()


NEAR = {
    "fractions": lambda x: torch.cat([torch.arange(600.0), torch.tensor([0.5])])[None],
    "integers among fractions": lambda x: torch.linspace(0, 999, 600).index_fill(0, torch.tensor([5, 9]), 301)[None],
    "normalised": lambda x: torch.arange(600).float()[None] / 600,
    "zeros": lambda x: torch.zeros(1, 600),
    "multiples that the format holds": lambda x: 16 * torch.arange(200.0)[None],
    "pixels": lambda x: torch.arange(256.0)[None],
    "too large to be exact": lambda x: (torch.arange(600.0)[None] + 2.0**24) * 3,
    "not finite": lambda x: torch.arange(600.0)[None].index_fill(1, torch.tensor([3]), math.inf),
}


def test_near_misses_are_no_finding():
    for (level, dtype), (name, make) in itertools.product(BOTH, NEAR.items()):
        findings = findings_of(
            "lost integers", Through(make, make(None).shape[-1]), torch.ones(1), policy=policy(level, dtype)
        )
        assert findings == [], (level, dtype, name)


@pytest.mark.parametrize("level, dtype", BOTH)
def test_one_hot_masks_and_biases_are_no_finding(level, dtype):
    assert findings_of("lost integers", Through(one_hot, 600), torch.ones(1), policy=policy(level, dtype)) == []

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.head = nn.Linear(8, 8)
            nn.init.constant_(self.head.bias, 4097.0)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            mask = (torch.arange(6) < 3).to(q.dtype) * -10_001.0
            return self.head(functional.scaled_dot_product_attention(q, k, v, mask[None, None, None]))

    assert findings_of("lost integers", Masked(), torch.randn(2, 6, 8), policy=policy(level, dtype)) == []


def test_what_is_changed_in_place_after_its_cast_is_something_else():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(1, 4)

        def forward(self, x):
            steps = torch.arange(600.0)[:, None].bfloat16()
            steps.fill_(0.5)
            return self.embed(steps)

    assert findings_of("lost integers", InPlace(), torch.ones(1), policy=policy("O1", "bfloat16")) == []


# Tied weights ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(24, 8), nn.Linear(8, 8), nn.Linear(8, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.body(x.to(self.body.weight.dtype)).to(self.head.weight.dtype))


TOKENS = torch.arange(24)[None]


@pytest.mark.parametrize(
    "level, rule, dtype",
    [
        ("O1", "fp32_module=embed", "bfloat16"),
        ("O3", "fp32_module=head", "bfloat16"),
        ("O1", "fp32_param=embed.weight", "float16"),
        ("O3", "fp32_param=head.weight", "bfloat16"),
    ],
)
def test_one_tensor_under_two_treatments(level, rule, dtype):
    (finding,) = findings_of("tied weights", Tied(), TOKENS, policy=policy(level, dtype, rule))
    here, there = ("embed", "head") if "embed" in rule else ("head", "embed")
    assert finding.where == f"{here}.weight"
    assert (
        f"it and {there}.weight are one tensor: the rule {rule} keeps it in FP32 in {here}, and {there}" in finding.text
    )
    cure = f"fp32_param={here}.weight+{there}.weight"
    assert f"the text {cure} for both" in finding.text
    assert findings_of("tied weights", Tied(), TOKENS, policy=policy(level, dtype, cure)) == []


def test_one_treatment_or_two_tensors():
    for level, rules, tied in (
        ("O1", (), True),
        ("O2", (), True),
        ("O1", ("fp32_module=head",), True),  # an embedding is FP32 under O1 in any case
        ("O2", ("fp32_module=body",), True),
        ("O2", ("fp32_module=embed+head",), True),
        ("O1", ("fp32_module=embed",), False),
        ("O2", ("fp32_module=head",), False),
        ("O2", ("fp32=log",), True),
    ):
        for dtype in SIGNIFICAND:
            findings = findings_of("tied weights", Tied(tied), TOKENS, policy=policy(level, dtype, *rules))
            assert findings == [], (level, rules, tied, dtype)
