"""Findings, decisions and shapes: what the policy's rules did, and what they could not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mezzo import Policy, Rule
from mezzo.explanation import explain

LOW = Policy.O1("bfloat16", emulate=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return functional.softmax(self.head(torch.relu(self.body(x))), -1)


def explained(policy, model=None, x=None):
    return explain(model or Model(), torch.randn(8, 8) if x is None else x, policy)


def findings_of(explanation, wanted):
    return {finding.where: finding.text for finding in explanation.findings if finding.kind == wanted}


# Decisions ------------------------------------------------------------------------------------------


def test_each_row_says_who_decided():
    policy = LOW.evolve(rules=(Rule("fp32", module="head", reason="logits"), Rule("low", op="softmax")))
    rows = {(row.module, row.op): row for row in explained(policy).rows}
    head, softmax, body = rows["head", "linear"], rows["", "softmax"], rows["body", "linear"]
    assert (head.rule, head.treatment, head.reason, head.source) == ("fp32_module=head", "fp32", "logits", "policy")
    assert head.computes_in == head.returns == ("float32",)
    assert (softmax.rule, softmax.treatment, softmax.returns) == ("low=softmax", "low", ("bfloat16",))
    assert (body.rule, body.treatment, body.reason) == (None, "low", "gemm")
    assert body.source == LOW.explain("linear").source
    assert rows["", "relu"].treatment == "native"
    assert {finding.kind for finding in explained(policy).findings} == {"FP32 product"}


def test_a_parameter_rule_decides_the_ops_that_read_it():
    rows = {row.module: row for row in explained(LOW.keep_fp32(params=["head.bias"])).rows if row.op == "linear"}
    assert (rows["head"].rule, rows["head"].treatment) == ("fp32_param=head.bias", "fp32")
    assert rows["head"].reason == "it reads head.bias, which the rule fp32_param=head.bias pins"
    assert rows["head"].computes_in == rows["head"].returns == ("float32",)
    assert rows["body"].returns == ("bfloat16",)


class Counting(nn.Module):
    """A buffer that each pass writes, and a scale for a rule."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.body(x) * torch.sigmoid(self.scale)


def test_what_o3_itself_does_to_buffers_and_ruled_parameters_is_no_disagreement():
    explanation = explained("O3,dtype=bfloat16,emulate=false,fp32_param=scale", Counting())
    rows = {row.op: row for row in explanation.rows}
    assert (rows["add_"].computes_in, rows["add_"].returns) == (("bfloat16",), ("bfloat16",))
    assert (rows["sigmoid"].computes_in, rows["sigmoid"].returns) == (("float32",), ("bfloat16",))
    assert findings_of(explanation, "disagreement") == {}


@pytest.mark.parametrize("norms, returns", [("fp32", "float32"), ("fp32_math", "bfloat16")])
def test_norms(norms, returns):
    (row,) = [row for row in explained(LOW.evolve(norms=norms)).rows if row.op == "softmax"]
    assert (row.given, row.computes_in, row.returns, row.treatment) == (("bfloat16",), ("float32",), (returns,), norms)
    assert row.disagreement == ""


# Rules without effect -------------------------------------------------------------------------------


class Spare(Model):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 8)


def test_rules_that_decide_nothing():
    policy = LOW.fp32("exp", "softmax").fp32("relu")
    assert findings_of(explained(policy), "idle rule") == {
        "fp32=exp": "it decided nothing in this run: no op that exp matches was called"
    }
    assert findings_of(explained(LOW.keep_fp32(modules=["spare"]), Spare()), "idle rule") == {
        "fp32_module=spare": "it decided nothing in this run: no module that spare matches was called"
    }
    elsewhere = Policy.parse(f"{LOW},fp32=softmax@head")
    assert findings_of(explained(elsewhere), "idle rule") == {
        "fp32=softmax@head": "it decided nothing in this run: softmax ran only in (model)"
    }


def test_shadowed_rules():
    policy = Policy.parse(f"{LOW},fp32_module=head,low_module=he*")
    texts = findings_of(explained(policy), "shadowed rule")
    assert texts == {
        "low_module=he*": "all that it matches is decided before, by fp32_module=head; put it first, or drop it"
    }
    by_two = Policy.parse(f"{LOW},fp32=linear+relu,low_module=body")
    assert findings_of(explained(by_two), "shadowed rule") == {}  # other ops of that module are left to it
    params = Policy.parse(f"{LOW},fp32_param=head.*,low_param=head.bias")
    assert list(findings_of(explained(params), "shadowed rule")) == ["low_param=head.bias"]
    half = Policy.parse(f"{LOW},fp32_module=head,low=linear")
    assert findings_of(explained(half), "shadowed rule") == {}  # it still decides about body


# Products in FP32 -------------------------------------------------------------------------------------


class Products(nn.Module):
    """24·4·8·2 operations in a linear layer, as many in the second product, half of them in the third."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4, bias=False)

    def forward(self, x):  # (24, 8)
        y = self.body(x)  # (24, 4)
        z = torch.tensordot(x.float(), self.body.weight.T, 1)  # (24, 4)
        return y.float() + z + torch.mv(torch.ones(24, 24), torch.ones(24)).sum()


@pytest.mark.parametrize("emulate", [True, False])
def test_products_that_stay_in_fp32_are_named_with_their_share(emulate):
    policy = Policy.O1("bfloat16", emulate=emulate)
    total = 2 * 24 * 8 * 4 * 2 + 2 * 24 * 24
    explanation = explained(policy, Products(), torch.randn(24, 8))
    ((where, text),) = findings_of(explanation, "FP32 product").items()
    assert where.startswith("(model) tensordot (")
    share = f"{100 * 2 * 24 * 8 * 4 / total:.3g} %"
    assert text == f"ran in float32: {share} of the FLOPs of the forward pass's products; type-mixing"
    assert text in explanation.text(full=True, width=None)
    assert explanation.answer.points[0] == f"1 in FP32, {share} of the FLOPs: (model) tensordot (type-mixing)"
    explanation = explained(policy.keep_fp32(modules=["body"]).low("tensordot"), Products(), torch.randn(24, 8))
    ((where, text),) = findings_of(explanation, "FP32 product").items()
    assert where.startswith("body linear")
    assert text.endswith("rule fp32_module=body")
    assert findings_of(explained(Policy.O0(), Products(), torch.randn(24, 8)), "FP32 product") == {}


# Out of reach ---------------------------------------------------------------------------------------


def test_a_rule_on_an_op_inside_a_composite():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unsqueeze(1).split(8, -1)
            return functional.scaled_dot_product_attention(q, k, v)

    explanation = explained(LOW.fp32_math("softmax"), Attend(), torch.randn(2, 8, 8))
    (row,) = [row for row in explanation.rows if row.op == "scaled_dot_product_attention"]
    assert (row.treatment, row.computes_in) == ("low", ("bfloat16",))
    assert findings_of(explanation, "unreachable") == {
        "(model) scaled_dot_product_attention": "the rule fp32_math=softmax does not reach softmax inside "
        "scaled_dot_product_attention, which gets low as a whole; write "
        'policy.fp32_math("scaled_dot_product_attention"), the text fp32_math=scaled_dot_product_attention, or '
        "call softmax by itself"
    }
    assert findings_of(explanation, "idle rule") == {
        "fp32_math=softmax": "it decided nothing in this run: softmax ran only inside scaled_dot_product_attention"
    }
    whole = explained(LOW.fp32("scaled_dot_product_attention"), Attend(), torch.randn(2, 8, 8))
    assert whole.findings == ()


def test_a_rule_reaches_inside_python_functions(make):
    explanation = explain(*make("attention"), LOW.low("softmax"))
    (row,) = [row for row in explanation.rows if row.op == "softmax"]
    assert (row.rule, row.returns) == ("low=softmax", ("bfloat16",))
    assert explanation.findings == ()


# Measured is not decided ----------------------------------------------------------------------------


def test_attention_with_dropout_computes_in_fp32_on_a_cpu():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    explanation = explain(layer, torch.randn(2, 8, 16), LOW)
    (row,) = [row for row in explanation.rows if row.op == "scaled_dot_product_attention"]
    assert row.computes_in == ("float32",)  # torch has a low kernel only without dropout
    (text,) = findings_of(explanation, "disagreement").values()
    assert text.startswith(
        "decided: bfloat16; measured: float32 in, bfloat16 out; torch runs it as one C++ function, whose parts it "
        "casts by itself; its kernels: "
    )
    assert text == f"{row.disagreement} (treatment low, {row.source})"


def test_calls_that_the_policy_does_not_reach():
    class Acts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                torch.sum(self.layer(x), -1, dtype=torch.bfloat16)
            return self.layer(x)

    texts = findings_of(explained(LOW, Acts()), "disagreement")
    assert len(texts) == 1
    assert "the call's own dtype= wins" in next(iter(texts.values()))


@pytest.mark.parametrize("policy", [str(LOW), f"{LOW},fp32=exp+mul+relu,low=lerp", f"{LOW},fp32_param=token"])
def test_what_writes_computes_as_was_decided_and_keeps_the_dtype_of_what_it_writes_to(policy):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.token = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x):
            h = self.layer(x)
            rows = torch.tensor([0, 1])
            for y in (h.clone(), torch.zeros_like(h, dtype=torch.float32)):
                y[rows] = h[rows]
                y[0] = self.token
                y.index_add_(0, rows, h[rows]).lerp_(h, 0.5).mul_(self.token).addmm_(h, torch.ones(8, 8)).exp_()
                torch.exp(h.detach(), out=y.detach())
                functional.relu(y, inplace=True)
            return h

    explanation = explained(policy, Writes())
    assert findings_of(explanation, "disagreement") == {}
    rows = {(row.op, row.given[0]): (row.treatment, row.returns) for row in explanation.rows if row.given}
    assert rows["index_add_", "bfloat16"] == ("fp32_math", ("bfloat16",))
    assert rows["exp_", "bfloat16"] == ("fp32", ("bfloat16",))
    assert rows["lerp_", "float32"] == ("low" if "low=lerp" in policy else "promote", ("float32",))


def test_autocast_switched_off_by_the_model():
    class Off(Model):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.head(self.body(x))

    texts = findings_of(explained(LOW, Off()), "disagreement")
    line = Off.forward.__code__.co_firstlineno + 2
    assert set(texts) == {f"body linear ({__file__}:{line})", f"head linear ({__file__}:{line})"}
    assert all("the model's code switches autocast off here" in text for text in texts.values())


def test_nothing_to_differentiate():
    explanation = explain(nn.Linear(8, 8).requires_grad_(False), torch.randn(8, 8), LOW)
    assert list(findings_of(explanation, "no backward")) == ["Linear"]
    assert explanation.num_casts(phase="backward") == 0
    assert explanation.num_casts(phase="forward") == 3


# Shapes ---------------------------------------------------------------------------------------------


def test_a_vocabulary_that_is_no_multiple_of_eight():
    (entry,) = explain(nn.Linear(16, 50257), torch.randn(8, 16), LOW).misaligned
    assert entry.shape == (("M", 8), ("N", 50257), ("K", 16))
    assert entry.pads == "N 50257 → 50264"
    assert (entry.module, entry.op, entry.dtype, entry.multiple, entry.count) == ("", "linear", "bfloat16", 8, 1)


def test_aligned_and_fp32_products_are_not_mentioned():
    assert explain(nn.Linear(16, 24), torch.randn(8, 16), LOW).misaligned == ()
    assert explain(nn.Linear(3, 5), torch.randn(7, 3), "O0").misaligned == ()
    assert explain(nn.Linear(3, 5), torch.randn(7, 3), LOW.fp32("linear")).misaligned == ()


def test_convolutions_and_batched_products():
    for layer, shape, pads in (
        (nn.Conv2d(3, 8, 3), (2, 3, 8, 8), "channels in 3 → 8"),
        (nn.Conv2d(16, 24, 3, groups=2), (2, 16, 8, 8), "channels out 12 → 16"),
        (nn.Conv2d(16, 16, 3, groups=16), (2, 16, 8, 8), ""),
        (nn.Conv2d(12, 12, 3, groups=12), (2, 12, 8, 8), "channels 12 → 16"),
        (nn.ConvTranspose2d(8, 5, 3), (2, 8, 8, 8), "channels out 5 → 8"),
        (nn.Conv1d(1, 8, 3), (2, 1, 8), "channels in 1 → 8"),
        (nn.LSTM(6, 16), (3, 8, 6), "6 → 8"),  # by torch's kernel for the layer, or where it lacks one by products
    ):
        for emulate in ("true", "false"):
            entries = explain(layer, torch.randn(shape), f"O1,dtype=bfloat16,emulate={emulate}").misaligned
            assert pads in "".join(entry.pads for entry in entries), layer
            assert bool(pads) == bool(entries), layer

    class Products(nn.Module):
        def forward(self, x, y):
            heads = x.unsqueeze(1)  # (batch, 1, tokens, head_dim)
            attended = functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
            return torch.bmm(attended.mT, y)  # (2, 12, 10) @ (2, 10, 16)

    inputs = torch.randn(2, 10, 12, requires_grad=True), torch.randn(2, 10, 16)
    by_op = {entry.op: entry for entry in explain(Products(), inputs, LOW).misaligned}
    assert by_op["scaled_dot_product_attention"].shape == (("queries", 10), ("keys", 10), ("head_dim", 12))
    assert by_op["bmm"].shape == (("M", 12), ("N", 16), ("K", 10))
    assert by_op["bmm"].pads == "M 12 → 16, K 10 → 16"
