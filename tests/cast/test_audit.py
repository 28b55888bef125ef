"""The audit of emulation: every product against float64 on the same rounded operands, in units in the last place.

A result that is rounded once is half a unit off at most. FP32 sums add some units of their own: 2⁻²⁰ of the largest
number in a result leaves room for sixteen of FP32's roundings at that size. Numbers that come to less than a 64th of
the largest are held to the spacing there: cancellation leaves nothing more of an FP32 sum. In FP16, whose spacing there
is at least 2⁻¹⁷ of the largest, this comes to an eighth of a unit.
"""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.cast.emulate import EMULATED
from mezzo.policy.ops import in_place_forms
from mezzo.tensors import LOW, tensors

DTYPES = [torch.float16, torch.bfloat16]
#: Half a unit of the one rounding, and an eighth of FP32's sums.
MOST = 0.625

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # Dynamo, of autograd functions
]


def recurrent(layer_class, *sizes, x=(5, 2, 8), packed=False, **options):
    """A recurrent layer as a function of its input and weights, and their shapes."""
    layer = layer_class(*sizes, **options)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *weights):
        given = pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
        return functional_call(layer, dict(zip(names, weights, strict=True)), (given,))

    return run, [x, *(tuple(weight.shape) for weight in layer.parameters())]


def bag(*ends, **options):
    def run(table, weights=None):
        return functional.embedding_bag(BAG, table, torch.tensor(ends), per_sample_weights=weights, **options)

    return run


def attend(*shapes, **options):
    return functools.partial(functional.scaled_dot_product_attention, **options), list(shapes)


def of_dims(dims):
    """The convolutions over so many dimensions: grouped, strided, dilated, depthwise, padded, without a batch."""
    space, kernel = (9, 8, 5)[:dims], (3,) * dims
    convolve, transpose = getattr(functional, f"conv{dims}d"), getattr(functional, f"conv_transpose{dims}d")
    given = functools.partial
    return {
        f"conv{dims}d": (convolve, [(2, 4, *space), (6, 4, *kernel), (6,)]),
        f"conv{dims}d with all": (
            given(convolve, stride=2, padding=2, dilation=2, groups=2), [(2, 4, *space), (6, 2, *kernel), (6,)],
        ),
        f"conv{dims}d, depthwise, same, one": (
            given(convolve, padding="same", groups=4), [(4, *space), (4, 1, *(2,) * dims)],
        ),
        f"conv_transpose{dims}d": (transpose, [(2, 4, *space), (4, 6, *kernel), (6,)]),
        f"conv_transpose{dims}d with all": (
            given(transpose, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
            [(2, 4, *space), (4, 3, *kernel), (6,)],
        ),
        f"conv_transpose{dims}d of one": (
            given(transpose, stride=3, output_padding=2), [(4, *space), (4, 3, *kernel), (3,)],
        ),
    }  # fmt: skip


def in_place(name):
    def run(x, *factors):
        written = x.clone()
        out = getattr(written, name)(*factors, beta=0.5, alpha=2.0)
        assert out is written
        return out

    return run


def grouped(ends):
    """The products of a mixture of experts, by torch and one after another: torch has no such product in float64."""
    offsets = torch.tensor(ends, dtype=torch.int32)

    def run(tokens, experts):
        if tokens.dtype != torch.float64:
            return functional.grouped_mm(tokens, experts, offs=offsets)
        begins = [0, *ends]
        if experts.dim() == 3:
            parts = [tokens[a:b] @ expert for a, b, expert in zip(begins, ends, experts, strict=False)]
            return torch.cat(parts)
        return torch.stack([tokens[:, a:b] @ experts[a:b] for a, b in zip(begins, ends, strict=False)])

    return run


BAG = torch.tensor([0, 3, 3, 7, 1, 9, 2, 2])
MASK = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) > 0.3
HEADS = (2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8)
PRODUCT = (4, 33), (33, 6)
BATCHES = (3, 4, 33), (3, 33, 6)
SCALED = {"beta": 0.5, "alpha": 2.0}

CASES = {
    "linear": (functional.linear, [(2, 5, 33), (7, 33), (7,)]),
    "linear to a number": (functional.linear, [(5, 33), (33,)]),
    "linear to nothing": (functional.linear, [(5, 33), (0, 33)]),
    "matmul": (torch.matmul, [(3, 1, 4, 17), (5, 17, 6)]),
    "mm": (torch.mm, [*PRODUCT]),
    "mm of nothing": (torch.mm, [(4, 0), (0, 6)]),
    "bmm": (torch.bmm, [*BATCHES]),
    "mv": (torch.mv, [(4, 33), (33,)]),
    "dot": (torch.dot, [(33,), (33,)]),
    "vdot": (torch.vdot, [(33,), (33,)]),
    "vecdot": (torch.linalg.vecdot, [(4, 33), (4, 33)]),
    "inner": (torch.inner, [(4, 33), (2, 33)]),
    "tensordot": (functools.partial(torch.tensordot, dims=2), [(4, 5, 9), (5, 9, 3)]),
    "addmm": (functools.partial(torch.addmm, **SCALED), [(6,), *PRODUCT]),
    "addmv": (functools.partial(torch.addmv, **SCALED), [(4,), (4, 33), (33,)]),
    "addr": (functools.partial(torch.addr, **SCALED), [(4, 6), (4,), (6,)]),
    "addbmm": (torch.addbmm, [(4, 6), *BATCHES]),
    "baddbmm": (functools.partial(torch.baddbmm, **SCALED), [(6,), *BATCHES]),
    "addmm_": (in_place("addmm_"), [(4, 6), *PRODUCT]),
    "addmv_": (in_place("addmv_"), [(4,), (4, 33), (33,)]),
    "addr_": (in_place("addr_"), [(4, 6), (4,), (6,)]),
    "addbmm_": (in_place("addbmm_"), [(4, 6), *BATCHES]),
    "baddbmm_": (in_place("baddbmm_"), [(3, 4, 6), *BATCHES]),
    "grouped_mm": (grouped([8, 16, 24]), [(24, 16), (3, 16, 8)]),
    "grouped_mm of weights": (grouped([8, 16, 24]), [(16, 24), (24, 8)]),
    "einsum of one": (lambda a: torch.einsum("iij->j", a), [(5, 5, 7)]),
    "einsum of two": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), [(2, 5, 33), (2, 6, 33)]),
    "einsum of three": (lambda a, b, c: torch.einsum("bi,bj,ijk->bk", a, b, c), [(4, 9), (4, 8), (9, 8, 5)]),
    "einsum of five": (
        lambda *factors: torch.einsum("ab,bc,cd,de,ef->af", *factors), [(4, 9), (9, 8), (8, 7), (7, 5), (5, 6)],
    ),
    "einsum of a list": (lambda *factors: torch.einsum("ab,bc,...cd->...ad", factors), [(4, 9), (9, 8), (2, 8, 7)]),
    "einsum of sublists": (lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), [(4, 9), (9, 8)]),
    "chain_matmul": (torch.chain_matmul, [(4, 9), (9, 8), (8, 5)]),
    "multi_dot": (lambda *factors: torch.linalg.multi_dot(factors), [(4, 9), (9, 8), (8, 5)]),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a / 4, 3), [(6, 6)]),
    "matrix_exp": (lambda a: torch.linalg.matrix_exp(a / 4), [(6, 6)]),
    "cov": (torch.cov, [(4, 30)]),
    "corrcoef": (torch.corrcoef, [(4, 30)]),
    "bilinear": (functional.bilinear, [(4, 9), (4, 8), (5, 9, 8), (5,)]),
    "embedding_bag": (bag(0, 3, 6, mode="sum"), [(12, 5)]),
    "embedding_bag, means": (bag(0, 3, 3, mode="mean", padding_idx=3), [(12, 5)]),
    "embedding_bag, largest": (bag(0, 3, 6, mode="max"), [(12, 5)]),
    "embedding_bag, weighed": (bag(0, 3, 6, mode="sum"), [(12, 5), (8,)]),
    "embedding_bag, last offset": (
        bag(0, 3, 8, mode="sum", include_last_offset=True), [(12, 5), (8,)],
    ),
    "embedding_bag, by frequency": (bag(0, 3, 6, mode="sum", scale_grad_by_freq=True), [(12, 5)]),
    **of_dims(1), **of_dims(2), **of_dims(3),
    "conv_tbc": (torch.conv_tbc, [(9, 3, 4), (3, 4, 5), (5,)]),
    "convolution": (
        lambda *operands: torch.convolution(*operands, [2], [1], [1], True, [1], 1), [(2, 4, 9), (4, 3, 3), (3,)],
    ),
    "attention": attend(*HEADS),
    "attention, causal": attend(*[(2, 4, 9, 8)] * 3, is_causal=True, scale=0.3),
    "attention, masked": attend(*HEADS, attn_mask=MASK),
    "attention, biased": attend(*HEADS, (7, 9)),
    "attention, grouped": attend((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8), enable_gqa=True),
    "attention, other values": attend((4, 7, 8), (4, 9, 8), (4, 9, 5)),
    "rnn": recurrent(nn.RNN, 8, 6),
    "rnn, relu, both ways": recurrent(nn.RNN, 8, 6, 2, nonlinearity="relu", bidirectional=True),
    "rnn, packed": recurrent(nn.RNN, 8, 6, packed=True),
    "lstm": recurrent(nn.LSTM, 8, 6),
    "lstm, both ways": recurrent(nn.LSTM, 8, 6, 2, bidirectional=True, batch_first=True, x=(2, 5, 8)),
    "lstm without bias": recurrent(nn.LSTM, 8, 6, bias=False),
    "lstm, projected": recurrent(nn.LSTM, 8, 6, proj_size=4),
    "lstm, packed, projected, both ways": recurrent(nn.LSTM, 8, 6, 2, packed=True, proj_size=4, bidirectional=True),
    "gru": recurrent(nn.GRU, 8, 6, 2),
    "gru of one": recurrent(nn.GRU, 8, 6, x=(5, 8)),
    "gru, packed, both ways": recurrent(nn.GRU, 8, 6, packed=True, bidirectional=True),
    "lstm cell": recurrent(nn.LSTMCell, 8, 6, x=(2, 8)),
    "gru cell": recurrent(nn.GRUCell, 8, 6, x=(2, 8)),
    "rnn cell": recurrent(nn.RNNCell, 8, 6, x=(2, 8)),
}  # fmt: skip


def drawn(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) / 2).to(dtype) for shape in shapes]


def leaves(out):
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    return [leaf for part in out if part is not None for leaf in leaves(part)]


def units(results, wanted, dtype):
    """The largest error in some tensors, in units in the last place."""
    most = 0.0
    for got, want in zip(results, wanted, strict=True):
        assert (got is None) == (want is None)
        if got is None or not got.numel():
            continue
        assert got.dtype == dtype
        assert got.shape == want.shape
        least = max(want.abs().max().item() / 64, torch.finfo(dtype).tiny)
        spacing = torch.finfo(dtype).eps * 2.0 ** want.abs().clamp(min=least).log2().floor()
        most = max(most, ((got.double() - want).abs() / spacing).max().item())
    return most


class LowKernels(TorchDispatchMode):
    """Collect the kernels that read low numbers and do more than move or widen them."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in MOVES and any(x.dtype in LOW for x in tensors((args, kwargs or {}))):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


#: ``div`` is that of the cases themselves.
MOVES = set("""
    _to_copy copy_ clone detach view _unsafe_view slice select squeeze unsqueeze constant_pad_nd transpose permute
    expand _pack_padded_sequence as_strided empty_like zeros_like div t slice_backward new_empty_strided select_backward
""".split())  # fmt: skip

#: Of what torch itself knows no second derivative, in FP32 either.
ONCE = ("embedding_bag, weighed", "embedding_bag, last offset", "attention")


def derivatives(function, operands, dtype, again):
    """Results, their gradients in drawn directions, and the gradients of these."""
    out = leaves(function(*operands))

    def along(these, seed):
        return [
            direction.to(x.dtype)
            for direction, x in zip(drawn([x.shape for x in these], dtype, seed), these, strict=True)
        ]

    first = torch.autograd.grad(out, operands, along(out, 1), create_graph=True)
    curved = [(x, direction) for x, direction in zip(first, along(first, 2), strict=True) if x.requires_grad]
    if not again or not curved:
        return out, first, []
    second = torch.autograd.grad(
        [x for x, _ in curved], operands, [direction for _, direction in curved], allow_unused=True
    )
    return out, first, second


def audited(name, dtype, *, again):
    """How far results, gradients and second derivatives are off under emulation, in units in the last place."""
    function, shapes = CASES[name]
    operands = drawn(shapes, dtype)
    wanted = derivatives(function, [x.double().requires_grad_() for x in operands], dtype, again)
    low = [x.clone().requires_grad_() for x in operands]
    with LowKernels() as kernels, mezzo.autocast(mezzo.Policy.O3(dtype, emulate=True), "cpu"):
        results = derivatives(function, low, dtype, again)
    assert kernels.names <= {"add", "add_", "mul"}, name  # the engine's sums of gradients
    return tuple(units(mine, theirs, dtype) for mine, theirs in zip(results, wanted, strict=True))


def test_the_audit_has_every_op_that_is_emulated():
    """By the names of its cases; five are audited below, or by their results in ``test_emulate.py``."""
    named = " ".join(CASES).replace("matrix_", "linalg_matrix_").replace("multi_dot", "linalg_multi_dot")
    named = named.replace("vecdot", "linalg_vecdot").replace("attention", "scaled_dot_product_attention")
    others = {"_addmm_activation", "_native_multi_head_attention", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"}
    others |= {"rnn_tanh_cell", "rnn_relu_cell"}
    in_place = [f"{op}_" for op in EMULATED if in_place_forms(op)]
    assert in_place
    assert {op for op in (*EMULATED, *in_place) if op not in others} <= set(named.replace(",", "").split())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_product_is_rounded_once_and_its_derivatives_too(dtype):
    table = {name: audited(name, dtype, again=not name.startswith(ONCE)) for name in CASES}
    with sdpa_kernel(SDPBackend.MATH):
        attention = [name for name in CASES if name.startswith("attention")]
        table |= {f"{name}, in steps": audited(name, dtype, again=True) for name in attention}
    assert {name: row for name, row in table.items() if not max(row) <= MOST} == {}
    # A table of exact numbers would be one in which nothing was rounded.
    assert sum(max(row) > 0.4 for row in table.values()) > 0.9 * len(table)


# The same in other ways to run it ---------------------------------------------------------------------------


def region(dtype):
    return mezzo.autocast(mezzo.Policy.O3(dtype, emulate=True), "cpu")


def gradients(function, operands):
    """Results and gradients, as ``torch.autograd`` finds them."""
    low = [x.clone().requires_grad_() for x in operands]
    out = leaves(function(*low))
    return [x.detach() for x in out], torch.autograd.grad(out, low, [torch.ones_like(x) for x in out])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_gradients_and_under_torch_func_results_are_the_same(dtype):
    """Bit for bit without gradients; ``torch.func`` differentiates FP32 steps, which round once as well."""
    for name, (function, shapes) in CASES.items():
        operands = drawn(shapes, dtype)
        with region(dtype):
            out, grads = gradients(function, operands)
            with torch.no_grad():
                plain = leaves(function(*operands))
            with torch.inference_mode():
                inferred = leaves(function(*operands))
            assert all(map(torch.equal, plain, out)), name
            assert all(map(torch.equal, inferred, out)), name
            if any(word in name for word in ("packed", "rnn", "lstm", "gru")):  # whose layers hold parameters
                continue

            def total(*given):
                return sum(x.float().sum() for x in leaves(function(*given)))  # noqa: B023

            slopes = torch.func.grad(total, argnums=tuple(range(len(operands))))(*operands)
        for mine, theirs in zip(slopes, grads, strict=True):
            assert mine.dtype == dtype, name
            spacing = torch.finfo(dtype).eps * theirs.abs().max().double() if theirs.numel() else 0.0
            assert ((mine.double() - theirs.double()).abs() <= spacing).all(), name


@pytest.mark.parametrize("name", ["embedding_bag, weighed", "matrix_exp", "baddbmm_", "attention, biased",
                                  "conv_transpose2d with all", "einsum of five"])  # fmt: skip
def test_compiled_and_recomputed_products_are_the_same(name):
    function, shapes = CASES[name]
    dtype = torch.bfloat16
    operands = drawn(shapes, dtype)
    with region(dtype):
        out, grads = gradients(function, operands)
        recomputed = functools.partial(checkpoint, function, use_reentrant=False, context_fn=mezzo.checkpoint_contexts)
        for other in (torch.compile(function, backend="aot_eager"), recomputed):
            torch.compiler.reset()
            outputs, theirs = gradients(other, operands)
            for mine, wanted in zip((*outputs, *theirs), (*out, *grads), strict=True):
                assert mine.dtype == dtype
                assert ((mine.double() - wanted.double()).abs() <= torch.finfo(dtype).eps * wanted.abs().max()).all()


# What is more than one product -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_layers_run_no_low_product_whichever_way_they_go(dtype):
    """Torch's fast path for inference, a kernel of its own, is not taken where a mode looks on."""
    torch.manual_seed(0)
    x = drawn([(2, 5, 8)], dtype)[0]
    attention = [nn.MultiheadAttention(8, 2, batch_first=True), nn.MultiheadAttention(8, 2, add_bias_kv=True),
                 nn.MultiheadAttention(8, 2, kdim=8, vdim=8, bias=False, add_zero_attn=True)]  # fmt: skip
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    calls = [functools.partial(attends, need_weights=weights) for attends in attention for weights in (True, False)]
    calls = [functools.partial(lambda attends, x: attends(x, x, x)[0], call) for call in calls] + [encoder]
    for layer in (*attention, encoder):
        layer.to(dtype)
    for training in (True, False):
        for call in calls:
            for layer in (*attention, encoder):
                layer.train(training)
            with LowKernels() as kernels, region(dtype), torch.set_grad_enabled(training):
                out = call(x)
            assert out.dtype == dtype
            assert not kernels.names & {"addmm", "mm", "bmm", "baddbmm", "linear", "_native_multi_head_attention",
                                        "_transformer_encoder_layer_fwd"}  # fmt: skip
            assert not any("scaled_dot_product" in kernel for kernel in kernels.names)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_as_one_kernel_is_rounded_once(dtype):
    x, inner, inner_bias, outer, outer_bias = drawn([(2, 5, 8), (24, 8), (24,), (8, 8), (8,)], dtype)
    fast = (8, 2, inner, inner_bias, outer, outer_bias)
    with torch.no_grad():
        with LowKernels() as kernels, region(dtype):
            (attended, _) = torch._native_multi_head_attention(x, x, x, *fast, need_weights=False)
        wide = x.double().transpose(0, 1)
        exact, _ = functional.multi_head_attention_forward(
            wide, wide, wide, 8, 2, inner.double(), inner_bias.double(), None, None, False, 0.0, outer.double(),
            outer_bias.double(), need_weights=False,
        )  # fmt: skip
    assert kernels.names == set()
    assert units([attended], [exact.transpose(0, 1)], dtype) <= MOST


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_bags_keep_what_torch_asks_of_a_table(dtype):
    table = drawn([(12, 5)], dtype)[0]
    for options in ({"sparse": True}, {"max_norm": 0.5}, {"max_norm": 0.5, "norm_type": 1.0, "mode": "sum"}):
        mine, theirs = (table.clone().requires_grad_() for _ in range(2))
        with region(dtype):
            out = functional.embedding_bag(BAG, mine, torch.tensor([0, 3, 6]), **options)
        wanted = functional.embedding_bag(BAG, theirs, torch.tensor([0, 3, 6]), **options)
        assert torch.equal(mine, theirs), "rows that are too long are made shorter"
        assert ("max_norm" in options) != torch.equal(mine, table)
        assert (out.double() - wanted.double()).abs().max() <= torch.finfo(dtype).eps
        out.float().sum().backward()
        assert (mine.grad.layout, mine.grad.dtype) == (
            torch.sparse_coo if "sparse" in options else torch.strided,
            dtype,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_dtype_of_the_result_is_what_is_rounded_to(dtype):
    a, b, c = drawn([*PRODUCT, (6,)], dtype)
    with region(dtype):
        products = [torch.mm(a, b, out_dtype=torch.float32), torch.mm(a, b, torch.float32),
                 torch.bmm(a[None], b[None], out_dtype=torch.float32)[0],
                 torch.addmm(c, a, b, out_dtype=torch.float32) - c.float()]  # fmt: skip
    for product in products:
        assert product.dtype == torch.float32
        torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


def test_what_torch_refuses_is_refused():
    """Where what is emulated would compute something: other dimensions, other dtypes, padding that is not defined."""
    dtype = torch.float16
    a, b, image, kernel = drawn([*PRODUCT, (2, 4, 9), (6, 4, 3)], dtype)
    calls = [
        (lambda: torch.mm(a[None], b), "must be a matrix"),
        (lambda: torch.bmm(a[None], torch.stack([b, b])), "Expected size for first two dimensions of batch2"),
        (lambda: torch.mv(a, b), "vector"),
        (lambda: a @ b.int(), "same dtype"),
        (lambda: functional.linear(a, b.mT.int()), "same dtype"),
        (lambda: functional.conv1d(image[None], kernel), "Expected 2D"),
        (lambda: functional.conv1d(image, kernel, stride=2, padding="same"), "not supported for strided"),
        (lambda: functional.conv1d(image, kernel, padding="all"), "Invalid padding string"),
    ]
    for call, says in calls:
        for context in (torch.enable_grad(), region(dtype)):
            with context, pytest.raises(RuntimeError, match=says):
                call()
