"""Calls whose arguments decide: products that contract nothing, equations, gathers, sums, sparse and complex operands.

The oracle is the same program in torch in FP32, and torch's own CPU autocast where that casts at products, too.
"""

import functools
import math
import random

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = {"bf16": BF16, "fp16": FP16}
BOTH = pytest.mark.parametrize("low", sorted(LOW))
DYNAMO = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated", "ignore:The .grad attribute", "ignore:Dynamo"
)
POLICIES = pytest.mark.parametrize("text", [f"{level},{low}" for level in ("O1", "O2") for low in LOW])


def region(low="bf16"):
    return mezzo.autocast(f"O1,{low},emulate=true")


def rand(*sizes, seed=0, dtype=FP32, trains=False):
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_(trains)


# Products that contract nothing -----------------------------------------------------------------------------

#: A product, and shapes of operands of which it contracts one value; with ``n`` for one it contracts several.
ELEMENTWISE = {
    "matmul": (torch.matmul, lambda k: [(5, k), (k, 4)]),
    "batched matmul": (lambda a, b: a @ b, lambda k: [(2, 5, k), (k, 4)]),
    "matmul of a vector": (torch.matmul, lambda k: [(5, k), (k,)]),
    "mm": (torch.mm, lambda k: [(5, k), (k, 4)]),
    "mm by name": (lambda a, b: torch.mm(input=a, mat2=b), lambda k: [(5, k), (k, 4)]),
    "bmm": (torch.bmm, lambda k: [(2, 5, k), (2, k, 4)]),
    "mv": (torch.mv, lambda k: [(5, k), (k,)]),
    "linear": (F.linear, lambda k: [(6, k), (4, k), (4,)]),
    "addmm": (torch.addmm, lambda k: [(5, 4), (5, k), (k, 4)]),
    "addmv": (torch.addmv, lambda k: [(5,), (5, k), (k,)]),
    "baddbmm": (torch.baddbmm, lambda k: [(2, 5, 4), (2, 5, k), (2, k, 4)]),
    "addbmm": (torch.addbmm, lambda k: [(5, 4), (k, 5, k), (k, k, 4)]),
    "vecdot": (torch.linalg.vecdot, lambda k: [(5, k), (5, k)]),
    "chain_matmul": (lambda *operands: torch.linalg.multi_dot(operands), lambda k: [(5, k), (k, k), (k, 4)]),
    "conv1d": (F.conv1d, lambda k: [(2, k, 7), (3, k, 1), (3,)]),
    "conv1d of each channel": (lambda x, w: F.conv1d(x, w, groups=4), lambda k: [(2, 4, 7), (4, 1, k)]),
    "conv2d": (F.conv2d, lambda k: [(2, 1, 7, 7), (3, 1, k, 1)]),
    "conv3d": (F.conv3d, lambda k: [(2, k, 3, 4, 5), (3, k, 1, 1, 1)]),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), lambda k: [(2, k, 7), (k, 3, 2)]),
    "conv_transpose2d": (F.conv_transpose2d, lambda k: [(2, 1, 5, 5), (1, 3, k, 1)]),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, [1], [0], [1], False, [0], 1), lambda k: [(2, k, 7), (3, k, 1)]
    ),
    "einsum": (lambda a, b: torch.einsum("ab,bc->ac", a, b), lambda k: [(5, k), (k, 4)]),
}  # fmt: skip


def differentiated(function, operands):
    """The result of a function and its gradients, on copies of operands."""
    operands = [x.detach().clone().requires_grad_() for x in operands]
    out = function(*operands)
    out.backward(torch.ones_like(out) / 3)
    return [out.detach(), *[x.grad for x in operands]]


@BOTH
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_product_of_single_values_is_left_as_it_is(name, low):
    function, shapes = ELEMENTWISE[name]
    operands = [rand(*shape, seed=i) for i, shape in enumerate(shapes(1))]
    expected = differentiated(function, operands)
    with region(low):
        results = differentiated(function, operands)
        several = function(*[rand(*shape) for shape in shapes(3)])
        mixed = function(operands[0].to(LOW[low]), *operands[1:])
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == FP32
        assert torch.equal(one, other)
    assert mixed.dtype == FP32
    assert several.dtype == LOW[low]


@BOTH
@pytest.mark.parametrize("name", ["matmul", "linear", "bmm", "conv1d", "einsum"])
def test_low_operands_are_multiplied_where_other_low_products_are(name, low):
    """No kernel of a format that the device may lack; the product is rounded once, as torch's is."""
    function, shapes = ELEMENTWISE[name]
    operands = [rand(*shape, seed=i, dtype=LOW[low]) for i, shape in enumerate(shapes(1)[:2])]
    products = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.convolution):
                products.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with region(low), Watch():
        out = function(*operands)
    assert out.dtype == LOW[low]
    assert torch.equal(out, function(*[x.float() for x in operands]).to(LOW[low]))
    assert LOW[low] not in products


@BOTH
def test_an_outer_product_of_vectors_adds_up_nothing(low):
    bias, a, b = rand(5, 4), rand(5, seed=1), rand(4, seed=2)
    with region(low):
        assert torch.addr(bias, a, b).dtype == LOW[low]  # which torch's CUDA list names
        assert torch.equal(torch.outer(a, b), a[:, None] * b)
        assert torch.equal(torch.kron(a, b), (a[:, None] * b).flatten())


@BOTH
def test_a_rule_on_the_op_is_about_all_of_its_calls(low):
    with mezzo.autocast(f"O1,{low},emulate=true,low=mm+einsum"):
        assert torch.mm(rand(5, 1), rand(1, 4)).dtype == LOW[low]
        assert torch.einsum("i,j->ij", rand(5), rand(4)).dtype == LOW[low]


@POLICIES
def test_positions_keep_their_numbers(text):
    """Rotary embeddings and encodings of times, masses and the like, as they are written in public models."""
    positions, frequencies = torch.arange(2048.0), 10_000 ** -torch.linspace(0, 1, 32)
    expected = torch.outer(positions, frequencies)
    ways = [
        lambda: torch.einsum("i,j->ij", positions, frequencies),
        lambda: torch.einsum("i , j -> i j", positions, frequencies),
        lambda: torch.einsum(positions, [0], frequencies, [1], [0, 1]),
        lambda: torch.einsum("...,j->...j", positions, frequencies),
        lambda: positions[:, None] @ frequencies[None],
        lambda: F.linear(positions[:, None], frequencies[:, None]),
        lambda: torch.einsum("bi,j->bij", positions[None], frequencies)[0],
    ]
    with mezzo.autocast(f"{text},emulate=true"):
        for way in ways:
            assert torch.equal(way(), expected)
            assert len(way()[:, 0].unique()) == 2048

    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 2)

        def forward(self, t):
            self.seen = self.first(t[:, None])
            return self.second(self.seen.sin())

    torch.manual_seed(0)
    model = Embeds()
    expected = F.linear(positions[:, None], model.first.weight, model.first.bias).detach()
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), policy=f"{text},emulate=true")
    with amp.autocast():
        out = model(positions)
    assert out.dtype == LOW[text[3:]]
    scale = expected.abs().max() * (0 if text.startswith("O1") else 2**-17)  # a tie in halves is rounded otherwise
    assert (model.seen - expected).abs().max() <= scale


# Equations --------------------------------------------------------------------------------------------------


def equations(count, seed=0):
    """Draw equations of one to four operands, with sizes; some letters have size one, in one operand or in all."""
    draw = random.Random(seed)
    for _ in range(count):
        letters = "abcdef"[: draw.randint(2, 6)]
        sizes = {letter: draw.choice([1, 2, 3, 4]) for letter in letters}
        terms = [
            "".join(draw.sample(letters, draw.randint(1, min(3, len(letters))))) for _ in range(draw.randint(1, 4))
        ]
        used = sorted(set("".join(terms)))
        output = "".join(draw.sample(used, draw.randint(0, min(3, len(used)))))
        shapes = [[1 if draw.random() < 0.1 else sizes[letter] for letter in term] for term in terms]
        if draw.random() < 0.2:  # dimensions behind an ellipsis, none to two, from the right
            terms, output = [f"...{term}" for term in terms], f"...{output}"
            shapes = [[*(2, 3)[draw.randint(0, 2) :], *shape] for shape in shapes]
        yield f"{','.join(terms)}->{output}", shapes


def test_equations_cast_where_torch_s_own_autocast_reaches_products():
    num_low, num_wide = 0, 0
    for equation, shapes in equations(400):
        operands = [rand(*shape, seed=i) for i, shape in enumerate(shapes)]
        plain = torch.einsum(equation, *operands)
        with torch.autocast("cpu", BF16):
            dtype = torch.einsum(equation, *operands).dtype
        with region():
            product = torch.einsum(equation, *operands)
        assert product.dtype == dtype, (equation, shapes)
        if dtype == FP32 and len(operands) < 3:
            assert torch.equal(product, plain), (equation, shapes)
        else:
            bound = torch.einsum(equation, *[x.abs() for x in operands])
            assert ((product.float() - plain).abs() <= bound * 2**-6 + 1e-6).all(), (equation, shapes)
        num_low += dtype == BF16
        num_wide += dtype == FP32
    assert min(num_low, num_wide) > 60


@BOTH
def test_what_torch_permutes_sums_and_multiplies_by_elements_is_what_torch_gives(low):
    x, y = rand(6, 6), rand(6, 6, seed=1)
    for equation, expected in {
        "ab->ba": x.t(), "ab->a": x.sum(1), "aa->a": x.diagonal(), "ab->": x.sum(), "...->...": x, "ii": x.trace(),
    }.items():  # fmt: skip
        with region(low):
            result = torch.einsum(equation, x)
        assert result.dtype == FP32
        assert torch.equal(result, torch.einsum(equation, x))
        assert torch.allclose(result, expected)
    with region(low):
        assert torch.equal(torch.einsum("ab,ab->ab", x, y), x * y)
        assert torch.equal(torch.einsum("ab,b->ab", x, y[0]), x * y[0])
        assert torch.einsum("ab,ab->a", x, y).dtype == LOW[low]


def test_a_letter_of_one_operand_is_summed_over_in_fp32_and_each_pair_gets_its_own():
    x, y, z = rand(4, 3000, trains=True), rand(4, 8, seed=1, trains=True), rand(8, seed=2)
    for function in (
        lambda: torch.einsum("ab,ac->c", x, y),
        lambda: torch.einsum("ab,ac,c->ac", x, y, z),  # elementwise, with a sum
        lambda: torch.einsum("ac,bc,a->bc", y, y, y[:, 0]),
        lambda: torch.einsum("ab,ac,c->", x, y, z),
    ):
        expected = function()
        gradient, _ = torch.autograd.grad(expected.sum(), (x, y), allow_unused=True)
        with region():
            output = function()
        mine, _ = torch.autograd.grad(output.float().sum(), (x, y), allow_unused=True)
        assert torch.allclose(output.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
        if gradient is not None:
            assert mine.dtype == FP32
            assert torch.allclose(mine, gradient, rtol=2e-2, atol=2e-2 * gradient.abs().max().item())
    with region():
        assert torch.einsum("ab,ac,c->ac", x, y, z).dtype == FP32


@BOTH
@pytest.mark.parametrize("wrong", ["ab,bc->az", "ab,bcd->ad", "ab->ab", "a b,bc", "ab,bc->aa"])
def test_a_wrong_equation_is_refused_in_torch_s_words(wrong, low):
    operands = rand(2, 3), rand(3, 4)
    with pytest.raises((RuntimeError, ValueError)) as plain:
        torch.einsum(wrong if wrong != "a b,bc" else "ab,,bc", *operands)
    with region(low), pytest.raises((RuntimeError, ValueError)) as refusal:
        torch.einsum(wrong if wrong != "a b,bc" else "ab,,bc", *operands)
    assert str(plain.value) in str(refusal.value)


@DYNAMO
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_code_decides_as_eager_code_does(inside):
    index = torch.zeros(600, dtype=torch.long)

    def body(x, w):
        h = F.linear(x, w)
        return (
            h[index].float().sum() + h.gather(0, index[:, None].expand(-1, 4)).float().sum(), h[:, 0], x[:, :1] @ w[:1],
            torch.einsum("i,j->ij", x[0], w[0]), torch.einsum("ab,cb,a->c", h, h, x[:, 0]), torch.polar(h, h).abs(),
        )  # fmt: skip

    def within(*given):
        with region():
            return body(*given)

    torch._dynamo.reset()
    compiled = torch.compile(within if inside else body, fullgraph=True, backend="aot_eager")
    x, w = rand(5, 3), rand(4, 3, seed=1, trains=True)
    with region():
        expected = body(x, w)
        outputs = compiled(x, w)
    assert [output.dtype for output in outputs] == [FP32, BF16, FP32, FP32, BF16, FP32]
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(one, other)
    (mine,), (eager,) = (torch.autograd.grad(results[0], w) for results in (outputs, expected))
    assert torch.equal(mine, eager)
    assert torch.allclose(mine, 1200 * x[0].expand(4, 3), rtol=1e-2, atol=1200 * 2**-7)


@DYNAMO
def test_sizes_that_compiled_code_learns_when_it_runs():
    def body(x):
        rows = x.nonzero()[:, 0].float()
        return torch.einsum("i,i->", rows, rows) + rows[None] @ rows[:, None]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
        for count in (3, 7, 9):
            with region():
                assert torch.equal(compiled(torch.ones(count)), body(torch.ones(count)))


# Gathers and running sums -----------------------------------------------------------------------------------

NUM = 4000
HUB = torch.zeros(NUM, dtype=torch.long)

#: What reads one row of ``x`` (3, 4) or its first element 4,000 times.
GATHERS = {
    "tensor": lambda x: x[HUB],
    "several": lambda x: x[HUB, HUB],
    "behind a slice": lambda x: x[:2, HUB],
    "list": lambda x: x[[0] * NUM],
    "vector": lambda x: x[:, 0][HUB],
    "numpy": lambda x: x[HUB.numpy()],
    "with a mask": lambda x: x[:, [True, False, False, False]][HUB],
    "index_select": lambda x: x[:, 0].index_select(0, HUB),
    "index_select by name": lambda x: torch.index_select(input=x, dim=0, index=HUB),
    "gather": lambda x: x[:, 0].gather(0, HUB),
    "take": lambda x: x.take(HUB),
    "take_along_dim": lambda x: torch.take_along_dim(x, HUB[:, None], 0),
    "repeat_interleave": lambda x: x[:, 0].repeat_interleave(torch.tensor([NUM, 1, 1])),
    "embedding": lambda x: F.embedding(HUB, x),
    "embedding_bag": lambda x: F.embedding_bag(HUB[:, None], x, mode="sum"),
    "unfold": lambda x: F.unfold(x.expand(1, 1, 3, 4).contiguous(), (64, 64), padding=64)[:, :, :NUM],
    "a view of windows": lambda x: F.pad(x[:1, :1], (NUM, NUM)).unfold(1, NUM, 1),
    "max_pool1d": lambda x: F.max_pool1d(F.pad(x[:1, :1].abs(), (NUM, NUM)), NUM, 1),
    "max_pool2d": lambda x: F.max_pool2d(F.pad(x[None, :1, :1].abs(), (64, 64, 64, 64)), 64, 1),
    "max_pool2d, with places": lambda x: F.max_pool2d(
        F.pad(x[None, :1, :1].abs(), (64,) * 4), 64, 1, return_indices=True
    )[0],
    "avg_pool1d": lambda x: F.avg_pool1d(F.pad(x[:1, :1], (NUM, NUM)), NUM, 1) * NUM,
    "avg_pool2d": lambda x: F.avg_pool2d(F.pad(x[None, :1, :1], (64, 64, 64, 64)), (64, 64), stride=1) * 64 * 64,
}


def low_of(w):
    """What a product gives, with a row of ones for its first."""
    return F.linear(torch.eye(3), w.t())


@BOTH
@pytest.mark.parametrize("name", GATHERS)
def test_the_gradient_of_a_gather_is_right(name, low):
    gathers, w = GATHERS[name], rand(3, 4, trains=True)
    (expected,) = torch.autograd.grad(gathers(low_of(w)).sum(), w)
    with region(low):
        h = low_of(w)
        gathered = gathers(h)
        with torch.no_grad():
            assert torch.equal(gathered, gathers(h))
    assert gathered.dtype == LOW[low]
    (mine,) = torch.autograd.grad(gathered.float().sum(), w)
    assert expected.max() >= 1000
    assert torch.allclose(mine, expected, rtol=1e-2)


@BOTH
def test_slices_stay_views_and_masks_and_numbers_are_what_they_were(low):
    with region(low):
        h = rand(5, 4, dtype=LOW[low], trains=True) * 1
        index = torch.tensor(1)
        for view in (h[1], h[1:3], h[..., 0], h[:, None], h[index], h[index, 1:], h[()]):
            assert view._base is not None
        assert h[h > 0].dtype == LOW[low]
        assert h[torch.tensor([0, 0])].dtype == LOW[low]
        (h * 1)[1].zero_()  # a write through a view is seen


def test_gathers_differentiate_in_every_way():
    x, w = rand(5, 3), rand(4, 3, seed=1)
    index = HUB[:1000]

    def total(w, x):
        with region():
            return F.linear(x, w)[index].float().sum()

    def twice(w, context):
        with context:
            loss = F.linear(x, w)[index].float().square().mean()
        (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), w)[0]

    expected = 1000 * x[0].expand(4, 3)
    tolerances = {"rtol": 1e-2, "atol": 1000 * 2**-8}
    assert torch.allclose(grad(total)(w, x), expected, **tolerances)
    assert torch.allclose(vmap(grad(total), (None, 0))(w, x[None])[0], expected, **tolerances)
    assert torch.allclose(grad(lambda w: vmap(total, (None, 0))(w, x[None]).sum())(w), expected, **tolerances)
    seconds = [twice(w.clone().requires_grad_(), context) for context in (region(), torch.enable_grad())]
    assert torch.allclose(*seconds, rtol=4e-2, atol=4e-2 * seconds[1].abs().max().item())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gathers_in_checkpoints(reentrant):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.inner = nn.Linear(3, 4, bias=False), nn.Identity()

        def forward(self, x):
            return checkpoint(lambda x: self.linear(x)[HUB], x, use_reentrant=reentrant).float().sum()

    torch.manual_seed(0)
    model, x = Reads(), rand(5, 3, trains=True)
    amp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), policy="O1,bf16,emulate=true")
    with amp.autocast():
        loss = model(x)
    amp.backward(loss)
    expected = NUM * x[0].detach().expand(4, 3)
    assert torch.allclose(model.linear.weight.grad, expected, rtol=1e-2, atol=NUM * 2**-8)


@POLICIES
def test_a_mean_over_a_hub(text):
    """4,000 leaves send to one node, and read it back: a step of a graph network, forward and backward."""
    source, target = torch.arange(NUM) + 1, HUB

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.one(x)
            total = h.new_zeros(h.shape).index_add(0, target, h[source])
            count = h.new_zeros(len(h)).index_put((target,), h.new_ones(NUM), accumulate=True)
            back = (total / count.clamp_min(1)[:, None])[target]
            return self.two(torch.cat([back, h[target] + back]))

    x, weight = rand(NUM + 1, 8) + 0.5, rand(2 * NUM, 8, seed=3).abs() / NUM
    results = {}
    for policy in (None, f"{text},emulate=true,loss_scale=1"):
        torch.manual_seed(0)
        model = Mean()
        amp = policy and mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), 0.1), policy=policy)
        with amp.autocast() if amp else torch.enable_grad():
            out = model(x)
        loss = (out.float() * weight).sum()
        amp.backward(loss) if amp else loss.backward()
        results[policy is None] = [loss.detach(), out.detach().float(), *[p.grad for p in model.parameters()]]
    for one, other in zip(results[False], results[True], strict=True):
        assert (one - other).abs().max() <= 1e-2 * other.abs().max()


#: What adds up 4,000 ones, by a function of ones of some shape.
SUMS = {
    "index_put": lambda ones: ones(2).mul(0).index_put((HUB,), ones(NUM), accumulate=True)[0],
    "index_put of rows": lambda ones: ones(2, 3).mul(0).index_put((HUB,), ones(NUM, 3), accumulate=True)[0, 0],
    "put": lambda ones: ones(2).mul(0).put(HUB, ones(NUM), accumulate=True)[0],
    "segment_reduce": lambda ones: torch.segment_reduce(ones(NUM), "sum", lengths=torch.tensor([NUM]))[0],
    "segment_reduce mean": lambda ones: torch.segment_reduce(ones(NUM), "mean", lengths=torch.tensor([NUM]))[0] * NUM,
    "fold": lambda ones: F.fold(ones(1, NUM, NUM), (1, 2 * NUM - 1), (1, NUM)).max(),
    "embedding_bag": lambda ones: F.embedding_bag(HUB[None], ones(2, 3), mode="sum")[0, 0],
    "bincount": lambda ones: torch.bincount(HUB, weights=ones(NUM))[0],
    "nansum": lambda ones: ones(NUM, 3).nansum(0)[0],
    "trapezoid": lambda ones: torch.trapezoid(ones(NUM + 1)),
    "sum over a letter": lambda ones: torch.einsum("ab,b->b", ones(NUM, 3), ones(3))[0],
}


@BOTH
@pytest.mark.parametrize("name", SUMS)
def test_running_sums_round_once(name, low):
    with region(low):
        total = SUMS[name](lambda *shape: torch.ones(shape, dtype=LOW[low]))
    assert math.isclose(total.item(), NUM, rel_tol=1e-2)


@BOTH
def test_what_indices_do_not_add_to_keeps_its_dtypes(low):
    with region(low):
        x = torch.zeros(3, dtype=LOW[low])
        assert x.index_put((HUB[:2],), torch.ones(2, dtype=LOW[low])).dtype == LOW[low]
        wide = torch.zeros(3).index_put((HUB,), torch.ones(NUM, dtype=LOW[low]), accumulate=True)
        assert wide.dtype == FP32
        assert wide[0] == NUM


# Sparse operands --------------------------------------------------------------------------------------------

LAYOUTS = ("coo", "csr", "csc")


def graph(layout):
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 50, (2, 400), generator=g)
    edges[0, :100] = 7
    adjacency = torch.sparse_coo_tensor(edges, torch.rand(400, generator=g), (50, 50)).coalesce()
    return adjacency if layout == "coo" else getattr(adjacency, f"to_sparse_{layout}")()


SPARSE = {
    "@": lambda a, h: a @ h,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda a, h: torch.addmm(torch.zeros(a.shape[0], h.shape[1]), a, h),
    "sparse.addmm": lambda a, h: torch.sparse.addmm(torch.zeros(a.shape[0], h.shape[1]), a, h),
}


def trained(make, x, text):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = text and mezzo.MixedPrecision(model, optimizer, policy=f"{text},emulate=true,loss_scale=256")
    losses = []
    for _ in range(4):
        with amp.autocast() if amp else torch.enable_grad():
            loss = model(x).float().square().mean()
        amp.backward(loss) if amp else loss.backward()
        amp.step() if amp else optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@POLICIES
@pytest.mark.filterwarnings("ignore:Sparse C")
def test_graph_networks_with_sparse_adjacency_train(text):
    class Convolves(nn.Module):
        def __init__(self, adjacency, product):
            super().__init__()
            self.one, self.two, self.product = nn.Linear(8, 16), nn.Linear(16, 4), product
            self.register_buffer("adjacency", adjacency)

        def forward(self, x):
            h = self.product(self.adjacency, self.one(x)).relu()
            return self.product(self.adjacency, self.two(h))

    for layout in LAYOUTS:
        for name, product in SPARSE.items():
            make = functools.partial(Convolves, graph(layout), product)
            expected, low = (trained(make, rand(50, 8), policy) for policy in (None, text))
            for one, other in zip(low, expected, strict=True):
                assert math.isclose(one, other, rel_tol=2e-2), (layout, name)


@POLICIES
def test_attention_over_edges_trains_through_a_sparse_matrix(text):
    edges = graph("coo").indices()

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.score = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x):
            h = self.one(x)
            score = (self.score(h)[edges[0]] + self.score(h)[edges[1]]).squeeze(-1).sigmoid()
            return torch.sparse_coo_tensor(edges, score, (50, 50)) @ h

    expected, low = (trained(Attends, rand(50, 8), policy) for policy in (None, text))
    for one, other in zip(low, expected, strict=True):
        assert math.isclose(one, other, rel_tol=2e-2)


@BOTH
@pytest.mark.filterwarnings("ignore:Sparse C")
def test_other_products_and_reductions_of_sparse_tensors(low):
    coo, csr, h = graph("coo"), graph("csr"), rand(50, 4)
    v, batch = rand(50), rand(2, 50, 50).relu().to_sparse()
    functions = {
        "mv": lambda c: torch.mv(coo.to(c), v.to(c)),
        "coo @ v": lambda c: coo.to(c) @ v.to(c),
        "csr @ v": lambda c: csr.to(c) @ v.to(c),
        "h @ csr": lambda c: h.t().to(c) @ csr.to(c),
        "linear": lambda c: F.linear(h.t().to(c), coo.to(c)),
        "bmm": lambda c: torch.bmm(batch.to(c), h.expand(2, 50, 4).to(c)),
        "coo @ coo": lambda c: (coo.to(c) @ coo.to(c)).to_dense(),
        "csr @ csr": lambda c: (csr.to(c) @ csr.to(c)).to_dense(),
        "sampled_addmm": lambda c: torch.sparse.sampled_addmm(csr.to(c), h.to(c), h.t().to(c)).to_dense(),
        "softmax": lambda c: torch.sparse.softmax(coo.to(c), 1).to_dense(),
        "log_softmax": lambda c: torch.sparse.log_softmax(coo.to(c), 1).to_dense(),
        "sparse.sum": lambda c: torch.sparse.sum(coo.to(c), 1).to_dense(),
        "smm": lambda c: torch.smm(coo.to(c), h.to(c)).to_dense(),
    }
    for name, function in functions.items():
        expected = function(FP32)
        with region(low):
            for dtype in (FP32, LOW[low]):
                result = function(dtype)
                assert result.dtype == FP32, name
                assert torch.allclose(result, expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item()), name
            assert torch.equal(function(FP32), expected), name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_other_layouts_are_left_to_torch():
    ragged = torch.nested.nested_tensor([rand(2, 4), rand(3, 4)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([rand(2, 4), rand(3, 4)], layout=torch.strided)
    w = rand(4, 4, seed=1)
    with region():
        assert F.linear(ragged, w).dtype == BF16
        assert F.linear(strided, w).dtype == BF16
        if torch.backends.mkldnn.is_available():
            assert F.linear(rand(2, 4).to_mkldnn(), w).to_dense().dtype == FP32


# Complex numbers --------------------------------------------------------------------------------------------

COMPLEX = {
    "complex": torch.complex,
    "exp": lambda a, b: a * torch.exp(1j * b),
    "sum": lambda a, b: a + 1j * b,
    "difference": lambda a, b: (a - 2j) - b,
    "from the left": lambda a, b: (2j - a) * b,
    "quotient": lambda a, b: a / 3j + 1j / b,
    "a number": lambda a, b: torch.mul(a, 1j) * b,
    "a scalar tensor": lambda a, b: a * torch.tensor(1j) + b,
    "a tensor": lambda a, b: a * torch.complex(b, b),
    "where": lambda a, b: torch.where(a > 0, a.detach(), 1j * b),
    "a choice": lambda a, b: torch.where(a > 0, b, 1j),
    "polar": lambda a, b: torch.polar(a.abs(), b),
    "view": lambda a, b: torch.view_as_complex(torch.stack([a, b], -1)),
    "added": lambda a, b: torch.add(b, 1j),
    "power": lambda a, b: a.abs() ** (1j * b),
    "then a product": lambda a, b: torch.complex(a, b) @ torch.complex(a, b).mH,
}


@BOTH
@pytest.mark.parametrize("name", COMPLEX)
def test_a_complex_number_of_real_ones_is_made_in_fp32(name, low):
    function, a, b = COMPLEX[name], rand(4, 4, dtype=LOW[low], trains=True), rand(4, 4, seed=1, dtype=LOW[low])
    wide = a.detach().float().requires_grad_()
    expected = function(wide, b.float())
    with region(low):
        number = function(a, b)
    assert number.dtype == torch.complex64
    assert torch.equal(number, expected)
    if expected.requires_grad:
        (mine,), (gradient,) = (torch.autograd.grad(y.abs().sum(), x) for y, x in ((number, a), (expected, wide)))
        assert mine.dtype == LOW[low]
        assert torch.allclose(mine.float(), gradient, rtol=2**-7, atol=2**-7)


@BOTH
def test_a_complex_number_is_written_into_no_real_tensor(low):
    x, z = rand(3, dtype=LOW[low]), torch.complex(rand(3), rand(3, seed=1))
    with region(low):
        for write in (lambda: x.mul_(1j), lambda: x.addcmul_(z, z), lambda: torch.mul(x, 1j, out=x.clone())):
            with pytest.raises(RuntimeError, match="can't be cast"):
                write()
        assert torch.equal(torch.zeros(3, dtype=z.dtype).add_(z).mul_(x), z * x)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("rule", ["", ",fp32=matmul"])
def test_complex_numbers_of_half_the_width_compute_in_fp32(rule):
    z = torch.complex(rand(3, 3), rand(3, 3, seed=1)).to(torch.complex32)
    wide = z.to(torch.complex64)
    with mezzo.autocast(f"O1,fp16,emulate=true{rule}"):
        assert torch.equal(z @ z.mH, wide @ wide.mH)
        assert torch.equal(torch.exp(z), torch.exp(wide))
        assert torch.equal(wide @ wide.mH, wide.mm(wide.mH))


# Observers, norms under vmap, variances ---------------------------------------------------------------------


@POLICIES
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_quantisation_aware_training(text, backend):
    from torch.ao import quantization

    results = {}
    for policy in (None, text):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).train()
        model.qconfig = quantization.get_default_qat_qconfig(backend)
        quantization.prepare_qat(model, inplace=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        amp = policy and mezzo.MixedPrecision(model, optimizer, policy=f"{policy},emulate=true,loss_scale=256")
        losses = []
        for seed in range(10):
            with amp.autocast() if amp else torch.enable_grad():
                loss = F.mse_loss(model(rand(32, 8, seed=seed)).float(), rand(32, 4, seed=seed + 50))
            amp.backward(loss) if amp else loss.backward()
            amp.step() if amp else optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = {name: value.clone() for name, value in model.state_dict().items() if "_val" in name}
        results[policy is None] = losses, state
    (losses, state), (expected, plain) = results[False], results[True]
    for one, other in zip(losses, expected, strict=True):
        assert math.isclose(one, other, rel_tol=1e-2)
    assert plain
    for name, value in state.items():
        assert value.dtype == FP32
        spacing = torch.finfo(LOW[text[3:]]).eps * max(1.0, plain[name].abs().max().item())
        assert (value - plain[name]).abs().max() <= 2 * spacing, name


@BOTH
def test_norms_with_statistics_under_vmap(low):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False))
    images, conv = rand(2, 5, 3, 8, 8), nn.Conv2d(3, 4, 3)

    def batch(x):
        return layers(x)

    def instance(x):
        return F.instance_norm(conv(x))

    def total(params, x):
        return functional_call(layers, params, (x,)).float().square().mean()

    x = rand(3, 16, 4)
    for function, given in ((batch, x), (instance, images)):
        expected = vmap(function)(given)
        with region(low):
            normed = vmap(function)(given)
        assert normed.dtype == LOW[low]
        assert torch.allclose(normed.float(), expected, atol=4e-2)
    with region(low):
        grads = vmap(grad(total), (None, 0))(dict(layers.named_parameters()), x)
    assert all(gradient.dtype == FP32 and gradient.isfinite().all() for gradient in grads.values())


@BOTH
def test_variances_are_fp32(low):
    x = rand(4, 64) * 1000
    rounded = x.to(LOW[low])
    with region(low):
        for function in (torch.var, torch.std, torch.var_mean, torch.std_mean):
            variances, expected = function(rounded, -1), function(rounded.float(), -1)
            for one, other in zip(
                *((result if isinstance(result, tuple) else (result,)) for result in (variances, expected)), strict=True
            ):
                assert one.dtype == FP32
                assert torch.equal(one, other)
        normed = (rounded - rounded.mean(-1, keepdim=True)) * torch.rsqrt(rounded.var(-1, keepdim=True) + 1e-5)
    assert (normed.float().std(-1) - 1).abs().max() < 2e-2


# What is said -----------------------------------------------------------------------------------------------


def test_an_explanation_says_what_each_call_got_and_why():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(1, 8), nn.Linear(8, 8)

        def forward(self, t):
            h = self.two(self.one(t[:, None]))
            chain = torch.einsum("ab,bc,a->ac", h, h.t(), t)
            return (
                h[HUB].sum()
                + (torch.eye(len(t)).to_sparse() @ h).sum()
                + chain.sum()
                + torch.einsum("a,b->ab", t, t).sum()
            )

    explanation = mezzo.explain(Model(), torch.rand(8), "O1,bf16,emulate=true", loss=lambda y: y)
    rows = {(row.module, row.op, row.treatment): row for row in explanation.rows}
    expected = {
        ("one", "linear", "promote"): (("float32",), "contracts nothing"),
        ("two", "linear", "low"): (("bfloat16",), "gemm"),
        ("", "getitem", "fp32_math"): (("float32",), "added up"),
        ("", "matmul", "fp32"): (("float32",), "not strided"),
        ("", "einsum", "low"): (("bfloat16",), "gemm"),
        ("", "einsum", "promote"): (("float32",), "contracts nothing"),
    }
    for key, (computes_in, reason) in expected.items():
        assert rows[key].computes_in == computes_in
        assert reason in rows[key].reason
    assert all(row.disagreement == "" for row in explanation.rows)
