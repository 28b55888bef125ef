"""Products below sixteen bits by the device's own kernels, held to float64 products of the same quantised operands."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mezzo
from mezzo import optim
from mezzo.cast import products
from mezzo.cast.products import linear
from mezzo.cast.products.native import OF_RESULT, OF_SUM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: As ``mezzo doctor`` calls them, and a policy's words; none is rounded at random.
KINDS = {
    "fp8, tensorwise": "fp8=*",
    "fp8, rowwise": "fp8_recipe=rowwise,fp8=*",
    "mxfp8": "mxfp8=*",
    "nvfp4": "nvfp4_tricks=rht+2d,nvfp4=*",
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: Rows, features in and out.
SIZES = [(256, 512, 384), (32, 96, 160)]


@pytest.fixture(params=[(recipe, dtype) for recipe in KINDS for dtype in DTYPES], ids="-".join)
def policy(request, computing):
    """A policy of which the device has the products."""
    recipe, dtype = request.param
    if lacks := products.recipe_support("cuda", DTYPES[dtype])[recipe].lacks:
        pytest.skip(f"needs a device that has {recipe}: {lacks}")
    return f"O1,dtype={dtype},emulate=false,{KINDS[recipe]}"


def rows_of(operand, dim):
    wide = operand.wide().double()
    return wide if dim == 1 else wide.mT


@pytest.fixture
def multiplied_sizes(monkeypatch):
    """Hold each product to the exact one of its operands when it is computed; give the shapes of those held."""
    seen, multiplied = [], linear.multiplied

    def watched(a, b, dims, bias, dtype, recipe):
        out = multiplied(a, b, dims, bias, dtype, recipe)
        left, right = rows_of(a, dims[0]), rows_of(b, dims[1])
        want, total = left @ right.mT, left.abs() @ right.abs().mT
        if bias is not None:
            want, total = want + bias, total + bias.abs()
        assert recipe.native
        assert out.dtype == dtype
        assert ((out.double() - want).abs() <= OF_RESULT * want.abs() + OF_SUM * total).all()
        seen.append(tuple(out.shape))
        return out

    monkeypatch.setattr(linear, "multiplied", watched)
    return seen


def operands(rows, features, out):
    """Input, weight, bias and the output's gradient, of many sizes."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, features), (out, features), (out,), (rows, out)
    x, w, b, g = (torch.randn(shape, generator=generator).cuda() for shape in shapes)
    x *= torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float()).cuda()
    return nn.Parameter(x), nn.Parameter(w / 8), nn.Parameter(b), g / 64


def run(policy, call, *leaves, gradient):
    with mezzo.autocast(policy, "cuda"):
        out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_all_three_products_are_those_of_the_quantised_operands(policy, sizes, has_bias, multiplied_sizes):
    x, w, b, g = operands(*sizes)
    rows, features, out = sizes
    run(policy, functional.linear, x, w, *([b] if has_bias else []), gradient=g)
    assert multiplied_sizes == [(rows, out), (rows, features), (out, features)]


def test_emulation_is_as_near(policy):
    """By results alone: what a run on a machine without such products would have."""
    x, w, b, g = operands(*SIZES[0])
    native = run(policy, functional.linear, x, w, b, gradient=g)
    emulated = run(policy.replace("emulate=false", "emulate=true"), functional.linear, x, w, b, gradient=g)
    sums = x.abs() @ w.abs().mT + b.abs(), g.abs() @ w.abs(), g.abs().mT @ x.abs()
    for mine, theirs, total in zip(native, emulated, sums, strict=False):
        # Each is rounded once; magnitudes of sums are those before quantising, which adds a fourth at most.
        slack = 2 * OF_RESULT * theirs.double().abs() + 2 * OF_SUM * total.double()
        assert ((mine.double() - theirs.double()).abs() <= slack).all()
    assert torch.equal(native[3], emulated[3])


def test_compiled_code_computes_what_eager_code_does(policy):
    x, w, b, g = operands(*SIZES[0])
    expected = run(policy, functional.linear, x, w, b, gradient=g)
    compiled = run(policy, torch.compile(functional.linear, fullgraph=True), x, w, b, gradient=g)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled, expected, strict=True))


def test_nothing_waits_for_the_device(policy, computing):
    x, w, b, g = operands(*SIZES[0])
    run(policy, functional.linear, x, w, b, gradient=g)
    with computing.unread():
        run(policy, functional.linear, x, w, b, gradient=g)


# Sessions -------------------------------------------------------------------------------------------------------------


def session(policy):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))).cuda()
    return model, mezzo.MixedPrecision(model, optim.AdamW(model.parameters(), lr=1e-3), policy)


def stepped(model, amp, x):
    with amp.autocast():
        loss = functional.gelu(model(x)).float().square().mean()
    amp.backward(loss)
    amp.step()
    amp.zero_grad()
    return loss


#: By the device's kernels where it has them, emulated where it does not.
WORDS = (
    "fp8_module=1", "fp8_recipe=rowwise,fp8_module=1", "fp8_recipe=delayed,fp8_module=1", "mxfp8_module=1",
    "nvfp4_module=1",
)  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("words", WORDS)
def test_captured_steps_are_eager_ones(words, level, computing):
    """Histories of delayed scaling and draws of NVFP4's noise move in the graph, too."""
    (eager, one), (other, two) = (session(f"{level},dtype=bfloat16,{words}") for _ in range(2))
    captured = mezzo.capture(functools.partial(stepped, other, two), two)
    for number in range(8):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(number)).cuda() * 2.0**number
        assert torch.equal(stepped(eager, one, x), captured(x))
    for mine, theirs in zip(eager.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
