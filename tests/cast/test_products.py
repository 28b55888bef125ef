"""Products below sixteen bits, against float64 products of operands that are quantised apart.

Operands are multiples of 2⁻⁴ below 4, so that a rotation of sixteen of them is exact in FP32.
"""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import UnsupportedError, formats
from mezzo.cast.mode import PolicyMode
from mezzo.cast.products import native, operands, recipes
from mezzo.formats.convert import quantized
from mezzo.formats.noise import drawn

from ..support.refusals import refused
from ..support.releases import SCALED_MM_ON_CPU

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
DTYPES = [torch.bfloat16, torch.float16]
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
NVFP4 = ["none", "rht", "stochastic", "2d", "rht+stochastic", "rht+2d", "stochastic+2d", "rht+stochastic+2d"]
RECIPES = {
    **{f"fp8_recipe={name},fp8=*": name for name in ("tensorwise", "rowwise", "delayed")},
    "mxfp8=*": "mxfp8",
    **{f"nvfp4_tricks={tricks},nvfp4=*": f"nvfp4 {tricks}" for tricks in NVFP4},
}
FORMS = {  # of activation, weight and gradient
    "tensorwise": ("tensorwise_e4m3", "tensorwise_e4m3", "tensorwise_e5m2"),
    "delayed": ("tensorwise_e4m3", "tensorwise_e4m3", "tensorwise_e5m2"),
    "rowwise": ("rowwise_e4m3",) * 3,
    "mxfp8": ("mxfp8_e4m3",) * 3,
    "nvfp4": ("nvfp4",) * 3,
}
SHORT = ["fp8=*", "fp8_recipe=rowwise,fp8=*", "fp8_recipe=delayed,fp8=*", "mxfp8=*", "nvfp4=*"]


def grid(*shape, seed=1):
    """Numbers that both formats of sixteen bits hold, and FP32 sums of sixteen of them too."""
    return torch.randint(-63, 64, shape, generator=torch.Generator().manual_seed(seed)) / 16


def hadamard():
    """By its definition: entry (i, j) is (−1)^(number of ones in i & j) / 4, with signs of columns."""
    return torch.tensor([[(-1) ** (i & j).bit_count() * SIGNS[j] / 4 for j in range(16)] for i in range(16)]).double()


def turned(x):
    """Sixteen rows at a time, rotated."""
    return torch.cat([hadamard() @ part.double() for part in x.split(16)]).float()


class Oracle:
    """The three products of a weight in float64, and how far FP32 sums and one rounding may be off.

    Args:
        recipe: A value of ``RECIPES``.
        low: ``low_products``.
        key: What makes the next key of the noise.
    """

    def __init__(self, recipe, low="none", key=None):
        name, _, tricks = recipe.partition(" ")
        self.tricks, self.low, self.key = tricks.split("+"), low, key
        self.activation, self.weight, self.gradient = FORMS[name]
        if "2d" in self.tricks:
            self.weight = "nvfp4_2d"

    def quantised(self, x, form, dim, *, draws=False):
        key = self.key() if draws and "stochastic" in self.tricks else None
        return quantized(x, formats.block_format(form), dim, key=key).wide().double()

    def forward(self, x, w, b):
        if self.low == "forward":
            return product(x.double(), w.double().T, b)
        return product(self.quantised(x, self.activation, 1), self.quantised(w, self.weight, 1).T, b)

    def backward(self, x, w, g):
        """As many keys are drawn as the gradient is written down: once where no scale depends on the dimension."""
        along_out = self.quantised(g, self.gradient, 1, draws=True)
        grad_x = product(along_out, self.quantised(w, self.weight, 0))
        if self.low == "wgrad":
            return grad_x, product(g.double().T, x.double())
        if "rht" in self.tricks:
            x, g = turned(x), turned(g)
        return grad_x, product(self.quantised(g, self.gradient, 0, draws=True).T, self.quantised(x, self.activation, 0))


def product(a, b, bias=None):
    """A product in float64, and the bound of its FP32 sum: a unit of 2⁻²⁴ for each term, of the sum of magnitudes."""
    out, size = a @ b, a.abs() @ b.abs()
    if bias is not None:
        out, size = out + bias.double(), size + bias.double().abs()
    return out, (a.shape[1] + 2) * 2.0**-24 * size


def assert_near(result, expected, rounding=1):
    """Within an FP32 sum and so many roundings to the dtype: half a unit in the last place, and subnormal numbers."""
    value, bound = expected
    info = torch.finfo(result.dtype)
    half = rounding * (info.eps / 2 * (value.abs() + bound) + info.smallest_normal * info.eps / 2)
    off = (result.double() - value).abs() - bound - half
    assert off.max() <= 0, f"{off.max():.3g} beyond; {(off > 0).sum()} of {off.numel()}"


def assert_off(result, other):
    """The test can tell: what is not quantised is elsewhere."""
    assert (result.double() - other[0]).abs().max() > 20 * other[1].max()


def seeded_keys():
    generator = torch.Generator().manual_seed(5)
    return lambda: drawn(torch.device("cpu"), generator)


def run(text, dtype, call, *operands, gradient=None):
    """Return the output of a call in a region and the gradients of its operands, which are leaves."""
    with mezzo.autocast(f"O1,dtype={NAMES[dtype]},{text}"):
        out = call(*operands)
    torch.manual_seed(5)
    grads = torch.autograd.grad(out, [operand for operand in operands if operand.requires_grad], gradient)
    return out, grads


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low", ["none", "wgrad", "forward"])
@pytest.mark.parametrize("text", RECIPES)
def test_three_products_and_a_bias_are_those_of_quantised_operands(text, low, dtype):
    x, w, b, g = grid(64, 96), grid(32, 96, seed=2) / 8, grid(32, seed=3), grid(64, 32, seed=4) / 4
    leaves = [nn.Parameter(tensor) for tensor in (x, w, b)]
    text = f"emulate=true,low_products={low},{text}"
    out, (grad_x, grad_w, grad_b) = run(text, dtype, functional.linear, *leaves, gradient=g.to(dtype))
    oracle = Oracle(RECIPES[text.partition(f"{low},")[2]], low, seeded_keys())
    assert out.dtype == dtype
    assert_near(out, oracle.forward(x, w, b))
    wanted_x, wanted_w = oracle.backward(x, w, g)
    assert_near(grad_x.to(dtype), wanted_x)
    assert_near(grad_w.to(dtype), wanted_w)
    assert torch.equal(grad_b, g.to(dtype).float().sum(0).to(dtype).float())
    if low != "forward":
        assert_off(out, product(x.double(), w.double().T, b))
    if low != "wgrad":
        assert_off(grad_w, product(g.double().T, x.double()))
    assert_off(grad_x, product(g.double(), w.double()))


CALLS = {
    "linear without a bias": lambda x, w, b: functional.linear(x, w),
    "linear by keywords": lambda x, w, b: functional.linear(bias=b, weight=w, input=x),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm, a method": lambda x, w, b: b.addmm(x, w.T),
    "addmm by keywords": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w.mT),
    "addmm of aten": lambda x, w, b: torch.ops.aten.addmm(b, x, w.t()),
    "addmm of aten by keywords": lambda x, w, b: torch.ops.aten.addmm.default(self=b, mat1=x, mat2=w.t()),
    "mm": lambda x, w, b: torch.mm(x, w.t()),
    "mm, a method": lambda x, w, b: x.mm(w.t()),
    "mm by keywords": lambda x, w, b: torch.mm(input=x, mat2=w.t()),
    "mm of aten": lambda x, w, b: torch.ops.aten.mm(x, w.t()),
    "mm of aten by keywords": lambda x, w, b: torch.ops.aten.mm.default(self=x, mat2=w.t()),
    "mm, the weight first": lambda x, w, b: torch.mm(w, x.t()).t(),
    "matmul": lambda x, w, b: torch.matmul(x, w.t()),
    "matmul by keywords": lambda x, w, b: torch.matmul(input=x, other=w.t()),
    "matmul, a method": lambda x, w, b: x.matmul(w.t()),
    "an operator": lambda x, w, b: x @ w.t(),
    "an operator's method": lambda x, w, b: w.t().__rmatmul__(x),
    "matmul, the weight first": lambda x, w, b: (w @ x.t()).t(),
    "matmul, the weight's view first": lambda x, w, b: (w.view(16, 2, 48).view(32, 48) @ x.t()).t(),
    "linear of batches": lambda x, w, b: functional.linear(x.view(4, 2, 8, 48), w, b).view(64, 32),
    "matmul of batches": lambda x, w, b: (x.view(4, 16, 48) @ w.t()).view(64, 32),
    "linear of rows with gaps": lambda x, w, b: functional.linear(x.t().contiguous().t(), w, b),
    "linear, its result transposed": lambda x, w, b: functional.linear(x, w, b).t().contiguous().t(),
}


@pytest.mark.parametrize("text", ["fp8=*", "nvfp4_tricks=rht+2d,nvfp4=*"])
@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_write_a_product_of_a_weight(name, text):
    x, w, b, g = grid(64, 48), grid(32, 48, seed=2) / 8, grid(32, seed=3), grid(64, 32, seed=4) / 4
    leaves = [x.clone().requires_grad_(), nn.Parameter(w), nn.Parameter(b)]
    with mezzo.autocast(f"O1,dtype=bfloat16,{text}"):
        out = CALLS[name](*leaves)
    out.backward(g.bfloat16())
    oracle = Oracle(RECIPES.get(text, "tensorwise"))
    assert_near(out, oracle.forward(x, w, b if leaves[2].grad is not None else None))
    wanted_x, wanted_w = oracle.backward(x, w, g)
    assert_near(leaves[0].grad.bfloat16(), wanted_x)
    assert_near(leaves[1].grad.bfloat16(), wanted_w)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (64, 1), (64, 32), (1,), ()])
def test_a_bias_of_another_shape_is_added_before_the_one_rounding(shape):
    x, w, b, g = grid(64, 48), grid(32, 48, seed=2) / 8, grid(*shape, seed=3), grid(64, 32, seed=4) / 4
    leaves = [nn.Parameter(tensor) for tensor in (b, x, w)]
    out, (grad_b, *_) = run("fp8=*", torch.bfloat16, lambda b, x, w: torch.addmm(b, x, w.t()), *leaves, gradient=g)
    assert_near(out, Oracle("tensorwise").forward(x, w, b))
    assert torch.equal(grad_b, g.sum_to_size(shape).bfloat16().float())


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["fp8_module=1", "mxfp8_module=1", "nvfp4_tricks=rht+2d,nvfp4_module=1"])
def test_weights_in_halves_and_low_ones_are_quantised_from_what_they_are(text, dtype, level):
    x, w, b, g = grid(64, 64), grid(32, 64, seed=2) / 8, grid(32, seed=3), grid(64, 32, seed=4) / 4
    model = nn.Sequential(nn.Identity(), nn.Linear(64, 32))
    model[1].load_state_dict({"weight": w, "bias": b})
    prepared = mezzo.prepare(model, f"{level},dtype={NAMES[dtype]},{text}")
    x_leaf = x.to(dtype).requires_grad_()
    with prepared.autocast():
        out = model(x_leaf)
    out.backward(g.to(out.dtype))
    oracle = Oracle({"f": "tensorwise", "m": "mxfp8", "n": "nvfp4 rht+2d"}[text[0]])
    assert_near(out.to(dtype), oracle.forward(x, w, b))
    wanted_x, wanted_w = oracle.backward(x, w, g)
    assert_near(x_leaf.grad, wanted_x)
    assert_near(model[1].weight.grad.to(dtype), wanted_w)


def test_gradients_that_are_rounded_at_random_are_right_on_average():
    x, w, g = grid(16, 32), grid(16, 32, seed=2), grid(16, 16, seed=4)
    g[:, 0] = 4.0  # the largest of each block: no scale is rounded down, beyond which numbers would saturate
    text, leaves = "nvfp4_tricks=stochastic,nvfp4=*", (nn.Parameter(x), nn.Parameter(w))
    with mezzo.autocast(f"O1,dtype=bfloat16,{text}"):
        out = functional.linear(*leaves)
    draws = [torch.autograd.grad(out, leaves[0], g.bfloat16(), retain_graph=True)[0] for _ in range(400)]
    mean, spread = torch.stack(draws).double().mean(0), torch.stack(draws).double().std(0)
    kept = formats.quantize(w, "nvfp4", 0).wide().double()
    off = (mean - g.double() @ kept).abs() / (spread / 20 + 1e-3)
    assert spread.min() > 0
    assert off.max() < 5  # five standard errors, of 512 numbers
    assert off.mean() < 1.2  # 0.8 for a normal distribution, and some for BF16's rounding


def test_a_rotation_changes_no_product_of_two():
    a, b = turned(grid(64, 8)).double(), turned(grid(64, 4, seed=2)).double()
    assert torch.equal(a.T @ b, grid(64, 8).double().T @ grid(64, 4, seed=2).double())


# Which products -------------------------------------------------------------------------------------------------------


class Written:
    """What operands were written down, in the order in which they were: formats and dimensions."""

    def __init__(self, monkeypatch):
        self.calls = []
        real = operands.quantized

        def quantized(x, form, dim, **options):
            self.calls.append((str(form), dim))
            return real(x, form, dim, **options)

        monkeypatch.setattr(operands, "quantized", quantized)

    def of(self, call):
        """Return the formats that a call has needed, and what it returned."""
        self.calls.clear()
        out = call()
        return [form for form, _ in self.calls], out


@pytest.fixture
def written(monkeypatch):
    return Written(monkeypatch)


class Kinds(nn.Module):
    """Attention, a convolution, recurrent cells and products of activations beside one linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.rnn = nn.Linear(32, 32), nn.Conv1d(32, 32, 3, padding=1), nn.GRU(32, 32)
        self.linear, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):  # (32, 2, 32)
        x = self.conv(self.first(x).permute(1, 2, 0)).permute(2, 0, 1)
        x = self.rnn(x)[0]
        x = functional.scaled_dot_product_attention(x, x, x)
        x = torch.bmm(x, x.mT) @ x
        x = x + x @ torch.eye(32)
        return self.last(self.linear(x))


def test_nothing_but_products_of_weights_is_quantised_or_changes_its_dtype():
    def kernels(text):
        torch.manual_seed(0)
        model = Kinds()
        with mezzo.prepare(model, f"O1,dtype=bfloat16{text}").autocast(), Seen() as seen:
            model(grid(32, 2, 32) / 8)
        return seen.dtypes

    plain, quantised = kernels(""), kernels(",fp8_module=*")
    others = [name for name in plain if any(word in name for word in ("convolution", "bmm", "gru", "attention"))]
    assert len(others) >= 2, others  # recurrent cells are mm here
    for name in others:
        assert plain[name] == quantised[name]
    assert len(quantised["_to_copy"]) > 0
    assert plain != quantised


class Seen(TorchDispatchMode):
    """Kernels with the dtypes of what they are given."""

    def __init__(self):
        super().__init__()
        self.dtypes = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [str(leaf.dtype) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.dtypes[func.overloadpacket.__name__].append(given)
        return func(*args, **kwargs or {})


STAY = {
    "rows": (lambda w: functional.linear(grid(24, 48), w), "24 rows, no multiple of 16"),
    "no rows": (lambda w: functional.linear(grid(0, 48), w), "0 rows, no multiple of 16"),
    "one row": (lambda w: functional.linear(grid(48), w), "1 rows, no multiple of 16"),
    "features": (
        lambda w: functional.linear(grid(16, 40), w[:8, :40]), "40 features in and 8 features out, no multiple of 16",
    ),
    "scaled": (lambda w: torch.addmm(grid(32), grid(16, 48), w.t(), alpha=2), "it scales its operands"),
    "half a bias": (lambda w: torch.addmm(grid(32), grid(16, 48), w.t(), beta=0.5), "it scales its operands"),
    "a batch": (lambda w: w @ grid(4, 48, 16), "it is no product of a matrix with a weight"),
    "a vector": (lambda w: w @ grid(48), "it is no product of a matrix with a weight"),
    "activations": (lambda w: grid(16, 48) @ grid(48, 32), "no operand is a parameter"),
}  # fmt: skip


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(grid(32, 48, seed=2) / 8), call

    def forward(self):
        return self.call(self.weight)


@pytest.mark.parametrize("name", STAY)
def test_other_products_stay_low_and_explain_says_why(name, written):
    call, why = STAY[name]
    model = Calls(call)
    x_text = "O1,dtype=bfloat16"
    with mezzo.autocast(f"{x_text},emulate=true,fp8=*"):
        forms, out = written.of(model)
    with mezzo.autocast(f"{x_text},emulate=true"):
        expected = model()
    assert forms == []
    assert torch.equal(out, expected)
    assert why in " ".join(str(mezzo.explain(model, policy=f"{x_text},fp8=*")).split())


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
def test_what_torch_takes_by_old_positions_stays_low(written):
    x, w = grid(16, 48), nn.Parameter(grid(32, 48))
    with mezzo.autocast("O1,dtype=bfloat16,fp8=*"):
        forms, _ = written.of(lambda: torch.addmm(2, grid(32), 1, x, w.t()))
    assert forms == []


def test_blocks_of_32_ask_for_multiples_of_32(written):
    w = nn.Parameter(grid(32, 48))
    for text, names in (("mxfp8=*", set()), ("nvfp4=*", {"nvfp4", "nvfp4_2d"})):
        with mezzo.autocast(f"O1,dtype=bfloat16,{text}"):
            assert {*written.of(lambda: functional.linear(grid(16, 48), w))[0]} == names


def test_other_dtypes_are_left_alone(written):
    w = nn.Parameter(grid(32, 48).double())
    with mezzo.autocast("O1,dtype=bfloat16,fp8=*"):
        forms, out = written.of(lambda: functional.linear(grid(16, 48).double(), w))
        assert (forms, out.dtype) == ([], torch.float64)
        with torch.autocast("cpu", enabled=False):
            forms, out = written.of(lambda: functional.linear(grid(16, 48), w.detach().float()))
        assert (forms, out.dtype) == ([], torch.float32)
        ones = torch.ones(16, 16, dtype=torch.int64)
        assert torch.mm(ones, ones).dtype == torch.int64
        out = torch.empty(16, 16)
        assert written.of(lambda: torch.mm(grid(16, 16), grid(16, 16), out=out))[0] == []


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.b(self.a(x))


@mezzo.fp32
class Pinned(Part):
    """Whose class says FP32."""


class Model(nn.Module):
    def __init__(self, part=Part):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(32, 32), nn.ModuleList([part(), Part()]), nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LAYERS = ("first", "blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b", "head")


def precisions(model, policy, written):
    """Return the precision of each layer: of its weight's operand, or of its output."""
    prepared, seen = mezzo.prepare(model, policy), {}
    for path in LAYERS:
        model.get_submodule(path).register_forward_pre_hook(lambda *_: written.calls.clear())
        model.get_submodule(path).register_forward_hook(
            lambda _m, _a, out, path=path: seen.update({path: written.calls[1][0] if written.calls else str(out.dtype)})
        )
    with prepared.autocast():
        model(grid(32, 32)).float().sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())
    words = {"torch.bfloat16": "low", "torch.float32": "fp32", "tensorwise_e4m3": "fp8", "mxfp8_e4m3": "mxfp8"}
    return " ".join(words.get(seen[path], "nvfp4") for path in LAYERS)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "rules, expected",
    [
        ("fp8_module=*", "low fp8 fp8 fp8 fp8 low"),
        ("fp8=linear", "low fp8 fp8 fp8 fp8 low"),
        ("fp8_param=*", "low fp8 fp8 fp8 fp8 low"),
        ("fp8_module=*d", "low low low low low fp8"),
        ("fp8_param=head.weight", "low low low low low fp8"),
        ("fp8_param=first.*,fp8_param=*", "fp8 fp8 fp8 fp8 fp8 low"),
        ("fp8_module=head,mxfp8_module=*", "low mxfp8 mxfp8 mxfp8 mxfp8 fp8"),
        ("mxfp8_module=*,fp8_module=head", "low mxfp8 mxfp8 mxfp8 mxfp8 low"),
        ("fp8=linear@blocks.0*,mxfp8_module=blocks.*,nvfp4_param=blocks.1.b.weight", "low fp8 fp8 mxfp8 nvfp4 low"),
        ("low_module=blocks.0,fp8_module=*", "low low low fp8 fp8 low"),
        ("fp32_module=head,fp8_module=*", "low fp8 fp8 fp8 fp8 fp32"),
        ("fp32=linear@h*,fp8_module=*", "low fp8 fp8 fp8 fp8 fp32"),
        ("fp32_module=blocks.0,fp8_module=blocks.*", "low fp32 fp32 fp8 fp8 low"),
        ("fp8_module=blocks.*,fp32_module=blocks.0", "low fp8 fp8 fp8 fp8 low"),
        ("fp8_module=blocks.1.a,fp32_module=blocks.1*", "low low low fp8 fp32 low"),
        ("fp32_module=blocks.1,fp8_param=blocks.1.a.weight", "low low low fp8 fp32 low"),
        ("fp32=linear,fp8_module=blocks.*", "fp32 fp32 fp32 fp32 fp32 fp32"),
        ("fp8_module=blocks.*,fp32=linear", "fp32 fp8 fp8 fp8 fp8 fp32"),
        ("fp32=linear,fp8_param=*.a.weight", "fp32 fp8 fp32 fp8 fp32 fp32"),
    ],
)
def test_the_first_rule_decides_and_ends_stay_low_unless_they_are_named(rules, expected, level, written):
    assert precisions(Model(), f"{level},dtype=bfloat16,{rules}", written) == expected


def test_the_only_layer_of_a_model_stays_low_by_one_rule():
    prepared = mezzo.prepare(nn.Sequential(nn.Linear(32, 32)), "O1,dtype=bfloat16,fp8=linear")
    assert str(prepared.policy) == "O1,dtype=bfloat16,low=linear@0,fp8=linear"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_class_that_is_pinned_to_fp32_stays_so(level, written):
    policy = f"{level},dtype=bfloat16,fp8_module=blocks.*"
    assert precisions(Model(Pinned), policy, written) == "low fp32 fp32 fp8 fp8 low"


def test_a_parameters_rule_follows_a_tied_weight_and_a_modules_does_not(written):
    for rule, expected in (("param=blocks.0.a.weight", "low fp8 low low low fp8"),
                           ("module=blocks.0", "low fp8 fp8 low low low")):  # fmt: skip
        model = Model()
        model.head.weight = model.blocks[0].a.weight
        assert precisions(model, f"O1,dtype=bfloat16,fp8_{rule}", written) == expected


# What is kept --------------------------------------------------------------------------------------------------------


def kept(text, x, w):
    """Bytes of each tensor that is saved for the backward pass."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with mezzo.autocast(f"O1,dtype=bfloat16,{text}"), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = functional.linear(x, w)
    assert out.requires_grad == (x.requires_grad or w.requires_grad)
    return sizes


X, W = 64 * 96, 32 * 96


@pytest.mark.parametrize(
    "text, of_x, of_w",
    [
        ("fp8=*", [X, 4], [W, 4]),
        ("fp8_recipe=rowwise,fp8=*", [X, 4 * 96], [W, 4 * 96]),
        ("fp8_recipe=delayed,fp8=*", [X, 4], [W, 4]),
        ("mxfp8=*", [X, X // 32], [W, W // 32]),
        ("nvfp4=*", [X // 2, X // 16, 4], [W // 2, W // 256, 4]),
        ("nvfp4_tricks=none,nvfp4=*", [X // 2, X // 16, 4], [W // 2, W // 16, 4]),
        ("low_products=forward,mxfp8=*", [X, X // 32], [W, W // 32]),
        ("low_products=wgrad,mxfp8=*", [2 * X], [W, W // 32]),
        ("low_products=wgrad,fp8=*", [2 * X], [W, 4]),
    ],
)
def test_one_byte_an_element_is_kept_and_nothing_low(text, of_x, of_w):
    x, w = grid(64, 96).bfloat16(), grid(32, 96).bfloat16()
    for needs_x, needs_w in ((True, True), (True, False), (False, True), (False, False)):
        leaves = x.detach().clone().requires_grad_(needs_x), nn.Parameter(w, requires_grad=needs_w)
        assert kept(text, *leaves) == (of_x if needs_w else []) + (of_w if needs_x else [])


@pytest.mark.parametrize("text", SHORT)
def test_without_a_backward_pass_operands_are_written_down_once(text, written):
    x, w = grid(32, 96).bfloat16(), nn.Parameter(grid(32, 96).bfloat16())
    outs = []
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context(), mezzo.autocast(f"O1,dtype=bfloat16,{text}"):
            for call in (lambda: functional.linear(x, w), lambda: x @ w.t()):
                forms, out = written.of(call)
                outs.append(out.detach())
                assert len(forms) == 2 or context is torch.enable_grad
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_regions_around_are_not_asked_about_what_a_product_reads(monkeypatch):
    """They are for each function, and each attribute of a tensor: a model's region around that of a block."""
    asked, real = [], PolicyMode._handle
    monkeypatch.setattr(PolicyMode, "_handle", lambda self, func, *args: asked.append(func) or real(self, func, *args))
    x, w = grid(32, 96).requires_grad_(), nn.Parameter(grid(32, 96))
    with mezzo.autocast("O1,dtype=bfloat16,nvfp4=*"), mezzo.autocast("O1,dtype=bfloat16,nvfp4=*"):
        asked.clear()
        functional.linear(x, w)
    assert len(asked) < 40


@pytest.mark.parametrize("text", SHORT)
def test_a_frozen_weight_or_input_has_no_product_for_its_gradient(text, written):
    x, w, g = grid(32, 96), grid(32, 96, seed=2) / 8, grid(32, 32, seed=3).bfloat16()
    gradients = {}
    for trains in ("x", "w", "xw"):
        leaves = x.clone().requires_grad_("x" in trains), nn.Parameter(w, requires_grad="w" in trains)
        with mezzo.autocast(f"O1,dtype=bfloat16,nvfp4_tricks=rht+2d,{text}"):
            out = functional.linear(*leaves)
        written.of(lambda out=out: out.backward(g))
        assert {dim for _, dim in written.calls} <= {1 if "x" in trains else 0, 0 if "w" in trains else 1}
        gradients[trains] = leaves[0].grad, leaves[1].grad
    assert torch.equal(gradients["x"][0], gradients["xw"][0])
    assert torch.equal(gradients["w"][1], gradients["xw"][1])
    assert gradients["x"][1] is gradients["w"][0] is None


# Numbers that are not finite ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", ["none", "wgrad", "forward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("text", SHORT)
def test_what_is_not_finite_reaches_all_that_it_is_multiplied_into(text, value, low):
    for which, (of_out, of_x, of_w) in {0: (True, False, True), 1: (True, True, False), 2: (False, True, True)}.items():
        given = [grid(32, 64), grid(32, 64, seed=2), grid(32, 32, seed=3)]
        given[which][3, 5] = value
        x, w = given[0].requires_grad_(), nn.Parameter(given[1])
        with mezzo.autocast(f"O1,dtype=bfloat16,emulate=true,low_products={low},{text}"):
            out = functional.linear(x, w)
        out.backward(given[2].bfloat16())
        assert bool(out[3 if which == 0 else slice(None), 3 if which == 1 else 0].isfinite().all()) != of_out
        assert bool(x.grad.isfinite().all()) != of_x
        assert bool(w.grad.isfinite().all()) != of_w


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("which", ["x", "w", "g"])
def test_a_step_with_what_is_not_finite_is_skipped(which, text):
    model = nn.Sequential(nn.Identity(), nn.Linear(32, 32))
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), f"O1,dtype=bfloat16,{text}_module=1")
    if which == "w":
        model[1].weight.data[3, 5] = float("inf")
    before = model[1].weight.detach().clone()
    x = grid(32, 32)
    x[3, 5] = float("inf") if which == "x" else x[3, 5]
    with amp.autocast():
        out = model(x)
    amp.backward((out.float() * (1.0 if which != "g" else float("inf"))).nan_to_num(nan=1.0).sum() if which == "x"
                 else (out.float() * (float("inf") if which == "g" else 1.0)).sum())  # fmt: skip
    assert bool(amp.step().skipped)
    assert torch.equal(model[1].weight, before)


# Transforms, recomputation, compiled code -----------------------------------------------------------------------------


TRANSFORMED = {
    "grad": lambda x, w: torch.func.grad(lambda w: functional.linear(x, w).sum())(w.detach()),
    "vmap": lambda x, w: torch.func.vmap(lambda x: functional.linear(x, w))(x.expand(3, -1, -1)),
    "jacrev": lambda x, w: torch.func.jacrev(lambda x: functional.linear(x, w).sum(0))(x),
    "jvp": lambda x, w: torch.func.jvp(lambda x: functional.linear(x, w), (x,), (x,)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own imports
@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func_is_refused_and_the_cure_works(name):
    x, w = grid(16, 32), nn.Parameter(grid(32, 32))
    with mezzo.autocast("O1,dtype=bfloat16,fp8=*"):
        with pytest.raises(mezzo.UnsupportedError) as caught:
            TRANSFORMED[name](x, w)
        assert str(caught.value).splitlines()[0] == "products in fp8 are not transformed by torch.func"
        assert "low=linear" in str(caught.value)
    with mezzo.autocast("O1,dtype=bfloat16,low=linear,fp8=*"):
        TRANSFORMED[name](x, w)


def test_gradients_are_differentiated_once_and_the_cure_works():
    def penalty(text, **options):
        x, w = grid(16, 32).requires_grad_(), nn.Parameter(grid(32, 32))
        with mezzo.autocast(f"O1,dtype=bfloat16,{text}fp8=*"):
            out = functional.linear(x, w).float().square().sum()
        return w, torch.autograd.grad(out, x, **options)[0].square().sum()

    w, value = penalty("", create_graph=True)
    assert torch.equal(value.detach(), penalty("")[1])
    with pytest.raises(mezzo.UnsupportedError) as caught:
        value.backward()
    assert str(caught.value).splitlines()[0] == "gradients of products in fp8 cannot be differentiated again"
    assert w.grad is None
    w, value = penalty("low=linear,", create_graph=True)
    value.backward()
    assert w.grad.count_nonzero() > 0


def test_gradients_of_several_outputs_at_once_are_refused():
    x, w = grid(16, 32).requires_grad_(), nn.Parameter(grid(32, 32))
    with mezzo.autocast("O1,dtype=bfloat16,fp8=linear"):
        out = functional.linear(x, w)
    with pytest.raises(mezzo.UnsupportedError, match="not transformed by torch"):
        torch.autograd.grad(out, x, torch.ones(4, 16, 32).bfloat16(), is_grads_batched=True)


class Checkpointed(Model):
    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def trained(model, policy, wrap=lambda model: model):
    """Return the output, gradients and what is remembered after a pass."""
    prepared = mezzo.prepare(model, policy)
    called = wrap(model)
    with prepared.autocast():
        out = called(grid(32, 32))
    out.float().square().mean().backward()
    memory = prepared.params.memory
    remembered = [] if memory is None else [memory.window, memory.draws]
    prepared.remove()
    return [out.detach(), *(param.grad for param in model.parameters()), *remembered]


EVERY = [text.replace("=*", "_module=*") for text in SHORT]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("text", EVERY)
def test_recomputed_products_are_the_same_and_remember_no_more(text, level):
    policy = f"{level},dtype=bfloat16,{text}"
    plain = trained(seeded(Checkpointed), policy)
    for reentrant in (True, False):
        recomputed = trained(seeded(lambda r=reentrant: Checkpointed(r)), policy)
        assert all(map(torch.equal, recomputed, plain))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo looks at, unless warnings are errors
@pytest.mark.filterwarnings("ignore:Dynamo")  # what it cannot trace it runs in Python
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("text", ["O2,dtype=bfloat16,fp8_module=*", *(f"O1,dtype=bfloat16,{text}" for text in EVERY)])
def test_a_compiled_model_has_the_same_bits(text):
    torch._dynamo.reset()
    compiled = trained(seeded(Model), text, lambda model: torch.compile(model, backend="aot_eager"))
    assert all(map(torch.equal, compiled, trained(seeded(Model), text)))


@pytest.mark.parametrize(
    "text",
    [
        "fp8=*", "low_products=forward,fp8_recipe=rowwise,fp8=*", "low_products=wgrad,mxfp8=*",
        "nvfp4_tricks=rht+2d,nvfp4=*",
    ],
)  # fmt: skip
def test_compiled_functions_have_the_same_bits(text):
    def run(x, w):
        with mezzo.autocast(f"O1,dtype=bfloat16,{text}"):
            ways = [
                functional.linear(x.view(4, 8, 32), w, w[0]).view(32, 32), x @ w.t(), (w @ x.t()).t(),
                torch.addmm(x, x, w.t()), torch.mm(x, w),
            ]  # fmt: skip
            return torch.stack(ways)

    w, x, runs = nn.Parameter(grid(32, 32) / 8), grid(32, 32, seed=2), []
    torch._dynamo.reset()
    for called in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = called(leaf, w)
        runs.append([out.detach(), *torch.autograd.grad(out.float().square().mean(), (leaf, w))])
    assert all(map(torch.equal, *runs))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # inductor's own imports
@pytest.mark.slow
def test_inductor_leaves_products_as_they_are():
    def run(x, w):
        with mezzo.autocast("O1,dtype=bfloat16,nvfp4_tricks=rht+2d,nvfp4=*"):
            return functional.linear(x, w, w[0])

    w, x, runs = nn.Parameter(grid(32, 32) / 8), grid(32, 32, seed=2), []
    torch._dynamo.reset()
    for called in (run, torch.compile(run, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = called(leaf, w)
        runs.append([out.detach(), *torch.autograd.grad(out, (leaf, w), grid(32, 32, seed=3).bfloat16())])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    torch.testing.assert_close(runs[0][2], runs[1][2], rtol=2.0**-8, atol=2.0**-8)  # the bias adds to one row


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_rotation_made_without_values_is_not_kept():
    """What estimates memory runs models so."""
    operands._ROTATIONS.clear()
    text = "O1,dtype=bfloat16,nvfp4=*"
    with FakeTensorMode(), mezzo.autocast(text):
        nn.Linear(32, 32)(torch.randn(32, 32)).sum().backward()
    linear = nn.Linear(32, 32)
    with mezzo.autocast(text):
        linear(grid(32, 32)).sum().backward()
    assert type(linear.weight.grad) is torch.Tensor
    assert linear.weight.grad.isfinite().all()


def test_a_model_is_given_back_and_copies_are_plain():
    for level in ("O1", "O2"):
        model = seeded(Model)
        plain = model(grid(32, 32))
        prepared = mezzo.prepare(model, f"{level},dtype=bfloat16,fp8_recipe=delayed,fp8_module=*")
        with prepared.autocast():
            assert not torch.equal(model(grid(32, 32)).float(), plain)
        for copied in (copy.deepcopy(model), saved_and_loaded(model)):
            assert torch.equal(copied(grid(32, 32)), plain)
        prepared.remove()
        assert torch.equal(model(grid(32, 32)), plain)


def saved_and_loaded(model):
    return pickle.loads(pickle.dumps(model))


def seeded(build):
    torch.manual_seed(0)
    return build()


def test_only_rules_that_speak_about_recurrent_cells_are_reported_there(caplog):
    model = Kinds()
    mezzo.prepare(model, "O1,dtype=bfloat16,low=linear@conv,fp8_module=*").remove()
    assert "does not reach" not in caplog.text
    mezzo.prepare(model, "O1,dtype=bfloat16,low=linear@r*,fp8_module=*").remove()
    assert "the rule low=linear@r* does not reach linear inside rnn" in caplog.text


def test_what_no_device_here_has_is_refused_where_emulation_is():
    words = "products", "cannot be computed natively on this cpu", "the text emulate=auto"
    texts = "fp8=*", "fp8=*,fp8_recipe=rowwise", "mxfp8_module=*", "nvfp4_param=*.weight", "low_products=wgrad,mxfp8=mm"
    for text in texts:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        with refused(UnsupportedError, *words, parts=[model]):
            mezzo.prepare(model, f"O1,dtype=bfloat16,emulate=false,{text}")


@pytest.mark.skipif(not SCALED_MM_ON_CPU, reason="needs a torch with scaled_mm on a CPU")
def test_products_of_the_device_are_explained_as_such(monkeypatch):
    """A CPU's own products of tensor-wise FP8, which are slow, stand for a GPU's."""
    monkeypatch.setattr(recipes, "support_on", lambda device_type, left, right, dtype: native.Support("", dtype))
    policy = "O1,dtype=bfloat16,fp8_history=77,fp8_module=*"  # what is found out of it is kept: no other test has it
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    explanation = mezzo.explain(model, torch.randn(32, 64), policy)
    (mine,) = (entry for entry in explanation.products if entry.dtype == "float8_e4m3fn")
    assert (mine.module, mine.count, mine.flops) == ("1", 1, 2 * 32 * 64 * 64)
    (row,) = (row for row in explanation.rows if row.module == "1")
    assert (row.computes_in, row.returns, row.emulated) == (("float8_e4m3fn",), ("bfloat16",), False)
    assert explanation.emulated == ()
    assert not [finding for finding in explanation.findings if finding.kind == "disagreement"]
