"""What an explanation comes to: shares of FLOPs and bytes, against counts; the answer first, in twelve lines."""

import collections
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import mezzo
from mezzo.explanation import explain
from mezzo.weights import Halves

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


# What runs low ------------------------------------------------------------------------------------------


def test_products_and_flops_are_those_of_torch_s_counter():
    model, x = net()
    explanation = explain(model, x, BF16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert sum(product.flops for product in explanation.products) == counter.get_total_flops()
    assert sum(product.count for product in explanation.products) == 2 + 3 * 4
    assert explanation.answer.headline == f"All 14 products of Net run in BF16 under {BF16}: 100 % of their FLOPs"


def test_what_does_not_run_low_is_named_with_who_decided():
    model, x = net()
    explanation = explain(model, x, f"{BF16},fp32_module=blocks.*.proj")
    share = 100 - 100 * 3 * 2 * 16 * 16 * 16 / sum(product.flops for product in explanation.products)
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


def test_nothing_runs_low():
    for policy, headline in (
        ("O0", "All 14 products of Net run in FP32 under O0, which asks for nothing lower"),
        (f"{BF16},fp32=linear+matmul", f"No product of Net runs in BF16 under {BF16},fp32=linear+matmul"),
    ):
        answer = explain(*net(), policy).answer
        assert (answer.headline, answer.write) == (headline, "")
    answer = explain(nn.Softmax(-1), torch.randn(2, 8, requires_grad=True), BF16).answer
    assert answer.headline == f"Softmax under {BF16}: no matrix product or convolution was counted"


# Bytes --------------------------------------------------------------------------------------------------


CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten._lazy_clone.default)


class Moved(TorchDispatchMode):
    """Add up what kernels read and write, each tensor once: of tables no more than is looked up, of expanded tensors
    what is in memory. Views, fresh memory and casts of weights in halves are left out.
    """

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        halves = isinstance(next(iter(args), None), Halves) and func in CASTS  # whose high one comes out
        is_moved = not any(word in func.name() for word in ("_unsafe_view", "aten::empty", "new_empty"))
        if not func.is_view and is_moved and not halves:
            leaves = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            if func.name() in ("aten::embedding", "aten::index.Tensor"):
                leaves = [*leaves[1:], out.clone()]  # as much of the table as comes out
            own = {
                id(leaf): math.prod(n for n, s in zip(leaf.shape, leaf.stride(), strict=True) if s) for leaf in leaves
            }
            self.num_bytes += sum(own[key] * size for key, size in {id(t): t.element_size() for t in leaves}.items())
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
    emulated = explain(model, x, BF16)
    assert emulated.moved_bytes == native.moved_bytes
    assert emulated.answer.points == native.answer.points
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


# Length -------------------------------------------------------------------------------------------------


def test_the_answer_takes_at_most_twelve_lines_whatever_there_is_to_say():
    """Six reasons for products in FP32, names of 60 letters, shapes to pad and every kind of finding."""

    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            names = [f"a_module_whose_name_is_as_long_as_some_are_that_are_made_{number}" for number in range(6)]
            self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
            self.times = nn.Linear(1, 8)

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return functional.cross_entropy(x + self.times(torch.arange(300.0)[:, None]), torch.zeros(300).long())

    rules = "+".join(f"layers.*_{number}" for number in range(3))
    policy = f"{BF16},fp32_module={rules},fp32_param=layers.*_5.weight,fp32=log+exp+softmax"
    lines = str(explain(Long(), torch.randn(300, 8), policy)).splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("measured in one step"))
    assert 4 < end <= 12
    assert "more for other reasons" in "".join(lines[:end])
    assert "findings below: idle rule" in "".join(lines[:end])
