"""What an explanation says about dtypes and casts, against counts by hand and an independent trace."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mezzo.cast.products import linear, recipes
from mezzo.cast.products.native import Support
from mezzo.explanation import Cast, explain

BF16 = "O1,dtype=bfloat16,emulate=false"
POLICIES = [
    "O0",
    *(f"O{level},dtype=bfloat16,emulate=false" for level in (1, 2, 3)),
    "O1,dtype=float16,emulate=true",
]


def cast(module, phase, what, before, after, count, num_bytes, by="policy", op="linear"):
    return Cast(
        module=module, op=op, phase=phase, what=what, before=before, after=after, by=by, count=count,
        num_bytes=num_bytes,
    )  # fmt: skip


# Casts ----------------------------------------------------------------------------------------------

# x has 12 numbers; first has 32 + 8, second 16 + 2 parameters; a cast moves 4 + 2 bytes a number. relu's result is
# low already, x needs no gradient, and the backward pass starts from ones in the output's dtype.
BY_HAND = {
    cast("first", "forward", "activation", "float32", "bfloat16", 1, 12 * 6),
    cast("first", "forward", "parameter", "float32", "bfloat16", 2, 40 * 6),
    cast("second", "forward", "parameter", "float32", "bfloat16", 2, 18 * 6),
    cast("first", "backward", "gradient", "bfloat16", "float32", 2, 40 * 6),
    cast("second", "backward", "gradient", "bfloat16", "float32", 2, 18 * 6),
}


def test_casts_of_two_layers_counted_by_hand(two_layers):
    explanation = explain(*two_layers, BF16)
    assert set(explanation.casts) == BY_HAND
    assert explanation.num_casts() == 9
    assert explanation.cast_bytes() == (12 + 2 * 40 + 2 * 18) * 6
    assert explanation.num_casts(what="parameter") == 4
    assert explanation.cast_bytes(phase="backward", module="first") == 240


def test_emulation_is_told_apart_from_the_policy(two_layers):
    explanation = explain(*two_layers, "O1,dtype=bfloat16,emulate=true")
    assert {cast for cast in explanation.casts if cast.by != "emulation"} == BY_HAND
    # Forward: x, weight, bias widened and the result rounded, twice. Backward: gradient, weight and input widened, and
    # gradients of weight, bias and input rounded; the first layer needs no gradient of its input, nor its weight.
    assert explanation.num_casts(by="emulation", phase="forward") == 8
    assert explanation.num_casts(by="emulation", phase="backward") == 6 + 4
    assert explanation.emulated
    assert all(row.emulated == (row.op == "linear") for row in explanation.rows)
    assert {row.computes_in for row in explanation.rows} == {("bfloat16",)}


def test_weights_in_halves_are_cast_nowhere(two_layers):
    """Their biases are plain; gradients are FP32 under O1 and O2."""
    explanation = explain(*two_layers, "O2,dtype=bfloat16,emulate=false")
    assert set(explanation.casts) == {cast for cast in BY_HAND if cast.what != "parameter"} | {
        cast("first", "forward", "parameter", "float32", "bfloat16", 1, 8 * 6),
        cast("second", "forward", "parameter", "float32", "bfloat16", 1, 2 * 6),
    }
    line = "weights: 48 of 58 elements in halves: 96 + 96 bytes, and 40 bytes plain"
    assert line in explanation.answer.points
    assert line in " ".join(str(explanation).split())
    assert "in halves" not in str(explain(*two_layers, BF16))


def test_a_model_stored_low_casts_what_its_first_module_takes_in_and_what_it_gives_out(two_layers):
    explanation = explain(*two_layers, "O3,dtype=bfloat16,emulate=false")
    assert set(explanation.casts) == {
        cast("first", "forward", "activation", "float32", "bfloat16", 1, 12 * 6, op=""),
        cast("", "forward", "activation", "bfloat16", "float32", 1, 6 * 6, op=""),
        cast("", "backward", "gradient", "float32", "bfloat16", 1, 6 * 6, op=""),
    }


def test_whose_cast_it_is():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            low = self.layer(x)  # 12 numbers
            return low.float() + low * self.gain

    explanation = explain(Mixed(), torch.randn(3, 4), BF16)
    by = {name: {cast for cast in explanation.casts if cast.by == name} for name in ("policy", "model", "torch")}
    assert by["model"] == {
        cast("", "forward", "activation", "bfloat16", "float32", 1, 72, "model", "float"),
        cast("", "backward", "gradient", "float32", "bfloat16", 1, 72, "model", "float"),
    }
    # The product of both dtypes is FP32; the gradient of its low factor has to go back.
    assert by["torch"] == {cast("", "backward", "gradient", "float32", "bfloat16", 1, 72, "torch", "mul")}
    assert {(cast.module, cast.what) for cast in by["policy"]} == {
        ("layer", "activation"), ("layer", "parameter"), ("layer", "gradient"),
    }  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_counts_as_backward(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Checkpointed(), torch.randn(3, 4, requires_grad=True)
    explanation = explain(model, x, "O1,dtype=bfloat16,emulate=false,lists=portable")
    assert [(row.module, row.op, row.count) for row in explanation.rows] == [
        ("inner.0", "linear", 1),
        ("inner.1", "softmax", 1),
    ]
    again = {(e.module, e.what, e.before) for e in explanation.casts if e.phase == "backward"}
    assert ("inner.1", "activation", "bfloat16") in again  # what softmax reads is widened once more
    assert ("inner.0", "gradient", "bfloat16") in again


KERNELS = {
    "linear": {"addmm", "mm"},
    "conv2d": {"convolution"},
    "layer_norm": {"native_layer_norm"},
    "batch_norm": {"native_batch_norm"},
    "gelu": {"gelu"},
    "relu": {"relu"},
    "embedding": {"embedding"},
    "scaled_dot_product_attention": {"_scaled_dot_product_flash_attention_for_cpu"},
}


@pytest.mark.parametrize("name", ["two-layers", "conv", "gpt", "attention", "lstm"])
def test_casts_and_dtypes_are_those_of_an_independent_trace(make, independent, name):
    for policy in POLICIES:
        explanation = explain(*make(name), policy)
        model, inputs = make(name)
        truth = independent(model, inputs, policy)
        for phase, kernels in (("forward", truth.forward), ("backward", truth.backward)):
            mine = Counter()
            for cast in explanation.casts:
                if cast.phase == phase:
                    mine[cast.before, cast.after] += cast.count
            assert mine == kernels.casts, (policy, phase)
        num_bytes = sum(cast.num_bytes for cast in explanation.casts)
        assert num_bytes == truth.forward.num_bytes + truth.backward.num_bytes, policy
        # What a layer returns is what a hook sees; attention is one layer, whose weights torch reads from outside.
        last = {row.module: row.returns[0] for row in explanation.rows}
        assert {path: last[path] for path in truth.outputs} == truth.outputs, policy
        assert len(truth.outputs) >= 2 or name == "attention"
        if "emulate=true" in policy or name in ("attention", "lstm"):
            continue
        for op, kernels in KERNELS.items():
            mine, theirs = Counter(), Counter()
            for row in explanation.rows:
                if row.op == op:
                    mine[frozenset(row.computes_in)] += row.count
            for (kernel, dtypes), count in truth.forward.calls.items():
                if kernel in kernels:
                    theirs[dtypes] += count
            assert mine == theirs, (policy, op)


def test_the_ops_inside_attention_are_seen_one_by_one(make):
    for policy in ("O0", BF16, "O2,dtype=bfloat16,emulate=false"):
        rows = explain(*make("attention"), policy).rows
        ops = Counter()
        for row in rows:
            ops[row.op] += row.count
        assert ops["linear"] == ops["bmm"] == 2
        assert ops["softmax"] == 1
        assert "multi_head_attention_forward" not in ops
        assert {row.module for row in rows} == {"mha"}
    by_op = {row.op: row for row in explain(*make("attention"), BF16).rows}
    assert by_op["softmax"].computes_in == by_op["softmax"].returns == ("float32",)
    assert by_op["softmax"].treatment == "fp32"
    assert by_op["bmm"].computes_in == ("bfloat16",)


def test_integers_and_views_are_no_rows():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            picked = torch.arange(3) + 1
            return self.layer(x).view(12)[picked]

    assert [row.op for row in explain(Model(), torch.randn(3, 4), BF16).rows] == ["linear", "getitem"]


# Lines ----------------------------------------------------------------------------------------------


def test_the_line_is_the_user_s():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            x = self.layers(x)  # the line of what torch's own modules do
            return functional.softmax(x, -1)

    explanation = explain(Model(), torch.randn(3, 4), BF16, loss=lambda output: output.square().mean())
    first = Model.forward.__code__.co_firstlineno
    lines = {row.op: row.line for row in explanation.rows}
    assert lines["linear"] == lines["relu"] == f"{__file__}:{first + 1}"
    assert lines["softmax"] == f"{__file__}:{first + 2}"
    assert lines["square"] == lines["mean"] == f"{__file__}:{first + 4}"
    rows = explain(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4), BF16).rows
    assert [row.line for row in rows] == [None]  # without code of the user's


# Below sixteen bits ---------------------------------------------------------------------------------


def test_what_a_kernel_returns_is_said_where_the_policy_has_another_dtype(monkeypatch):
    def emulated(a, b, dims, bias, output):
        left, right = (factor.wide() if dim else factor.wide().mT for factor, dim in zip((a, b), dims, strict=True))
        return (left @ right.mT + (0 if bias is None else bias.float())).to(output)

    monkeypatch.setattr(recipes, "support_on", lambda recipe, left, right, dtype: Support("", torch.bfloat16))
    monkeypatch.setattr(linear, "scaled_mm", emulated)
    reason = "float16 is rounded from bfloat16, which the device's kernel returns"
    cases = (("float16", "auto", True), ("bfloat16", "auto", False), ("float16", "true", False))
    for dtype, emulate, expected in cases:
        # A history that no other test has: what devices have is remembered by policy.
        policy = f"O1,dtype={dtype},emulate={emulate},fp8_history=977,fp8_module=1"
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        rows = {row.module: row.reason for row in explain(model, torch.randn(16, 16), policy=policy).rows}
        assert (reason in rows["1"], reason in rows["0"]) == (expected, False), rows
