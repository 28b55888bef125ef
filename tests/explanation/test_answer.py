"""What an explanation comes to: shares of FLOPs and bytes, round trips and what saves them, against counts."""

import collections
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import mezzo
from mezzo import UnsupportedError
from mezzo.explanation import explain, table
from mezzo.explanation.answer import comparison

BF16 = "O1,dtype=bfloat16,emulate=true"


class Attend(nn.Module):
    """Tokens of 16 numbers; softmax and norm are FP32 under O1, between products that are not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.proj = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        weights = functional.dropout(torch.softmax(q @ k.mT, -1), 0.1)
        return x + self.proj(weights @ v)


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Attend() for _ in range(blocks))
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(2, 8, 8)


def trips_of(explanation):
    return {(trip.module, trip.asked_by): trip for trip in explanation.round_trips}


# What runs low ------------------------------------------------------------------------------------------


def test_products_and_flops_are_those_of_torch_s_counter():
    model, x = net()
    explanation = explain(model, x, BF16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert sum(each.flops for each in explanation.products) == counter.get_total_flops()
    assert sum(each.count for each in explanation.products) == 2 + 3 * 4
    assert explanation.answer.headline == f"All 14 products of Net run in BF16 under {BF16}: 100 % of their FLOPs"


def test_what_does_not_run_low_is_named_with_who_decided():
    model, x = net()
    explanation = explain(model, x, f"{BF16},fp32_module=blocks.*.proj")
    share = 100 - 100 * 3 * 2 * 16 * 16 * 16 / sum(each.flops for each in explanation.products)
    assert explanation.answer.headline.startswith("11 of 14 products of Net run in BF16")
    assert explanation.answer.headline.endswith(f": {share:.3g} % of their FLOPs")
    assert explanation.answer.points[0] == (
        f"3 in FP32, {100 - share:.3g} % of the FLOPs: blocks.{{0..2}}.proj ×3 linear (rule fp32_module=blocks.*.proj)"
    )
    (section,) = re.findall(r"do not run in BF16\n\n(.*?)\n\n", str(explanation), re.DOTALL)
    assert section.splitlines()[-1].split()[:4] == ["blocks.{0..2}.proj", "×3", "linear", "FP32"]


def test_an_island_of_the_model_s_own_is_named_as_such():
    class Island(Net):
        def forward(self, x):
            x = self.stem(x)
            with torch.autocast("cpu", enabled=False):
                return self.head(x.float())

    points = explain(Island(), torch.randn(2, 8), BF16).answer.points
    assert points[0].endswith("head linear (the model's code switches autocast off here)")


@pytest.mark.parametrize(
    "policy, headline",
    [
        ("O0", "All 14 products of Net run in FP32 under O0, which asks for nothing lower"),
        (f"{BF16},fp32=linear+matmul", f"No product of Net runs in BF16 under {BF16},fp32=linear+matmul"),
    ],
)
def test_nothing_runs_low(policy, headline):
    answer = explain(*net(), policy).answer
    assert (answer.headline, answer.write) == (headline, "")


def test_a_model_without_products():
    answer = explain(nn.Softmax(-1), torch.randn(2, 8, requires_grad=True), BF16).answer
    assert answer.headline == f"Softmax under {BF16}: no matrix product or convolution was counted"


# Round trips --------------------------------------------------------------------------------------------


def test_round_trips_are_named_with_their_bytes():
    """Softmax over (2, 8, 8), the norm over (2, 8, 16): up and down, forward and backward, 6 bytes a number each."""
    trips = trips_of(explain(*net(), BF16))
    ops = (("", "softmax"), (".norm", "layer_norm"))
    assert set(trips) == {(f"blocks.{number}{where}", op) for number in range(3) for where, op in ops}
    for (_, op), trip in trips.items():
        assert trip.num_bytes == 4 * 6 * (128 if op == "softmax" else 256)
        assert (trip.low, trip.by, trip.count, trip.rules) == ("bfloat16", "policy", 1, ())
        assert (trip.write, trip.risk) == (f"low={op}", "")


def test_what_saves_a_round_trip_is_measured():
    """The rule takes exactly these casts away; a norm's weights are cast instead, there and their gradients back."""
    model, x = net()
    before = explain(model, x, BF16)
    size = {op: sum(t.num_bytes for t in before.round_trips if t.asked_by == op) for op in ("softmax", "layer_norm")}
    for op, new in (("softmax", 0), ("layer_norm", 3 * 2 * 16 * 6 * 2)):
        after = explain(model, x, f"{BF16},low={op}")
        assert before.cast_bytes() - after.cast_bytes() == size[op] - new
        assert {trip.asked_by for trip in after.round_trips} == set(size) - {op}
    assert before.answer.write == f"{BF16},low=layer_norm+softmax"
    assert explain(model, x, before.answer.write).round_trips == ()
    assert explain(model, x, before.answer.write).answer.write == ""


def test_a_chain_of_fp32_ops_is_one_trip_and_says_its_risk():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.two(torch.relu(torch.log(self.one(x).abs() + 1)).square())

    explanation = explain(Chain(), torch.randn(4, 8), BF16)
    (trip,) = explanation.round_trips
    assert (trip.ops, trip.count, trip.num_bytes) == (("log", "square"), 1, 4 * 6 * 32)
    assert (trip.write, trip.risk) == ("low=log+square", "exponential range")
    assert explanation.answer.write == ""  # it is not for us to take that risk
    assert "low=log+square, at the risk of: exponential range" in " ".join(str(explanation).split())


def test_a_module_that_a_rule_keeps_in_fp32_is_one_trip():
    for level in ("O1", "O2"):
        explanation = explain(*net(), f"{level},dtype=bfloat16,emulate=true,fp32_module=blocks.1")
        trip = next(trip for trip in explanation.round_trips if trip.rules)
        assert (trip.module, trip.asked_by) == ("blocks.1.norm", "fp32_module=blocks.1")
        assert trip.write == "without fp32_module=blocks.1"


def test_conversions_of_the_model_s_own_are_trips_that_no_rule_saves():
    class Own(Net):
        def forward(self, x):
            low = self.stem(x)
            return self.head((low.float() * 2).to(low.dtype))

    explanation = explain(Own(), torch.randn(2, 8), BF16)
    (trip,) = explanation.round_trips
    assert (trip.asked_by, trip.by, trip.write) == ("the model's own conversions", "model", "")
    assert trip.line == f"{__file__}:{Own.forward.__code__.co_firstlineno + 2}"


def test_what_only_goes_up_or_is_fp32_for_another_reason_is_no_trip():
    class Residual(Net):
        def forward(self, x):
            wide = torch.softmax(self.stem(x), -1)  # up; and then the sum is FP32 because of x, too
            return self.head(wide[..., :16] + torch.cat([x, x], -1)), torch.logsumexp(self.stem(x), -1)

    assert explain(Residual(), torch.randn(2, 8), BF16).round_trips == ()
    assert explain(*net(), "O0").round_trips == ()


def test_in_place_ops_and_recomputation_change_no_trip():
    class InPlace(Attend):
        def forward(self, x):
            weights = torch.softmax(self.qkv(x), -1) * 2
            weights.add_(1).relu_()
            return self.proj(weights[..., :16])

    class Checkpointed(Attend):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    x = torch.randn(2, 8, 16)
    (trip,) = explain(InPlace(), x, BF16).round_trips
    assert trip.ops == ("softmax",)
    # Recomputed casts are the backward pass's; the way there and back is the same.
    assert {t.asked_by for t in explain(Checkpointed(), x, BF16).round_trips} == {"softmax"}


# Bytes --------------------------------------------------------------------------------------------------


class Moved(TorchDispatchMode):
    """Add up what kernels read and write, views and fresh memory left out."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not any(word in func.name() for word in ("_unsafe_view", "aten::empty", "new_empty")):
            leaves = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
            self.num_bytes += sum(each.numel() * each.element_size() for each in leaves)
        return out


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bfloat16,emulate=false", "O2,dtype=bfloat16,emulate=false"])
@pytest.mark.parametrize("name", ["two-layers", "conv", "gpt"])
def test_all_bytes_are_those_of_an_independent_count(make, name, policy):
    explanation = explain(*make(name), policy)
    model, inputs = make(name)
    region = mezzo.prepare(model, policy).autocast()
    with Moved() as forward, region:
        output = model(inputs)
    gradient = torch.ones_like(output)
    with Moved() as backward:
        region.run_backward(output, grad_tensors=[gradient])
    assert explanation.moved_bytes == forward.num_bytes + backward.num_bytes


def test_emulation_moves_no_bytes_of_its_own():
    """A device with the arithmetic reads and writes what native arithmetic does here."""
    model, x = net()
    native = explain(model, x, "O1,dtype=bfloat16,emulate=false")
    assert explain(model, x, BF16).moved_bytes == native.moved_bytes
    share = f"{100 * native.cast_bytes() / native.moved_bytes:.3g} % of all bytes"
    assert sum(share in point for point in native.answer.points) == 1


def test_the_cheap_end_of_a_table_is_added_up():
    """Twelve layers of other names and widths: eight rows are shown, and the others' share is that of their casts."""
    widths = [8 * (number + 1) for number in range(12)]
    layers = {f"of_{a}": nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], 8], strict=True)}
    model = nn.Sequential(collections.OrderedDict(layers))
    explanation = explain(model, torch.randn(2, 8), BF16)
    own = sorted((cast.num_bytes for cast in explanation.casts if cast.by != "emulation"), reverse=True)
    share = 100 * sum(own[8:]) / explanation.moved_bytes
    assert f"  and {len(own) - 8} more rows, {share:.3g} % together\n" in str(explanation)
    changed = table.plain(table.difference_renderables(explanation, explain(model, torch.randn(2, 8), "O0")))
    assert f"  and {len(own) - 8} more rows, which differ by less" in changed


# Two policies -------------------------------------------------------------------------------------------


def test_what_a_second_policy_changes():
    model, x = net()
    first, second = explain(model, x, BF16), explain(model, x, f"{BF16},low=softmax")
    text = table.plain(table.difference_renderables(first, second))
    assert comparison(first, second).headline == (
        f"{BF16},low=softmax instead of {BF16}: 9 of 26 ops run in another precision"
    )
    assert text.startswith(f"{BF16},low=softmax instead of {BF16}: 9 of 26 ops")
    saved = sum(each.num_bytes for each in first.round_trips if each.asked_by == "softmax")
    assert saved == first.cast_bytes() - second.cast_bytes() == 3 * 4 * 6 * 128
    assert "round trips: 6, 27.0 KiB → 3, 18.0 KiB" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:2] == ["blocks.{0..2}", "×3"]]
    assert ["blocks.{0..2}", "×3", "softmax", "BF16", "→", "FP32", "BF16"] in rows
    assert ["blocks.{0..2}", "×3", "dropout", "FP32", "BF16"] in rows
    assert ["blocks.{0..2}", "×3", "activation,", "forward", "4.50", "KiB", "0", "B"] in rows


# The page -----------------------------------------------------------------------------------------------


def test_the_page_holds_what_the_text_does_and_needs_nothing(tmp_path):
    model, x = net()
    outer = nn.Sequential(model)
    outer.add_module("<script>alert(1)</script>\x1b", nn.Softmax(-1))
    explanation = explain(outer, x, BF16)
    path = tmp_path / "page.html"
    explanation.save_html(path)
    page = path.read_text()
    assert f"<h1>{explanation.answer.headline}</h1>" in page
    for text in (
        "0.blocks.{0..2}.norm ×3",
        "low=layer_norm",
        "low=layer_norm+softmax",
        "every row",
        "0.blocks.2.norm",
        "&lt;script&gt;",
        r"\x1b",
    ):
        assert text in page
    assert not re.search(r"https?://|src=|<script", page)


def test_a_page_without_jinja2(tmp_path, monkeypatch):
    explanation = explain(*net(), BF16)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match="writing a page needs jinja2") as caught:
        explanation.save_html(tmp_path / "page.html")
    assert 'write  pip install "jinja2>=3.1" "matplotlib>=3.9" "plotly>=6.0"' in str(caught.value)
    assert list(tmp_path.iterdir()) == []
