"""Emulated arithmetic against float64 sums of the rounded operands."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import mezzo
from mezzo.cast.emulate import EMULATED, emulate

from ..support.products import Products
from .models import assert_same

DTYPES = [torch.float16, torch.bfloat16]
FP32_EPS = 2.0**-24  # unit roundoff of FP32
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # unit roundoff of the format
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}  # half the smallest subnormal


def operands(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


CASES = {
    "linear": (functional.linear, [(5, 33), (7, 33), (7,)], {}),
    "linear without bias": (functional.linear, [(2, 3, 33), (7, 33)], {}),
    "linear of a vector": (functional.linear, [(33,), (7, 33), (7,)], {}),
    "matmul": (torch.matmul, [(4, 33), (33, 6)], {}),
    "matmul of vectors": (torch.matmul, [(33,), (33,)], {}),
    "matmul vector first": (torch.matmul, [(33,), (33, 6)], {}),
    "matmul vector last": (torch.matmul, [(2, 4, 33), (33,)], {}),
    "matmul broadcast": (torch.matmul, [(3, 1, 4, 17), (5, 17, 6)], {}),
    "mm": (torch.mm, [(4, 33), (33, 6)], {}),
    "bmm": (torch.bmm, [(3, 4, 33), (3, 33, 6)], {}),
    "mv": (torch.mv, [(4, 33), (33,)], {}),
    "inner": (torch.inner, [(4, 33), (2, 3, 33)], {}),
    "tensordot": (torch.tensordot, [(4, 5, 9), (9, 5, 3)], {"dims": ([1, 2], [1, 0])}),
    "convolution transposed": (
        torch.convolution,
        [(2, 4, 9), (4, 3, 3), (3,)],
        {"stride": [2], "padding": [0], "dilation": [1], "transposed": True, "output_padding": [1], "groups": 1},
    ),
    "addmm": (torch.addmm, [(6,), (4, 33), (33, 6)], {"beta": 0.5, "alpha": 2.0}),
    "baddbmm": (torch.baddbmm, [(3, 4, 6), (3, 4, 33), (3, 33, 6)], {}),
    "conv1d": (functional.conv1d, [(2, 4, 19), (6, 4, 3), (6,)], {"stride": 2, "padding": 1}),
    "conv2d": (functional.conv2d, [(2, 4, 9, 8), (6, 4, 3, 3), (6,)], {"padding": 1}),
    "conv2d grouped": (functional.conv2d, [(2, 4, 9, 8), (6, 2, 3, 3)], {"groups": 2, "dilation": (2, 1)}),
    "conv2d same": (functional.conv2d, [(2, 4, 9, 8), (6, 4, 2, 3), (6,)], {"padding": "same"}),
    "conv2d valid": (functional.conv2d, [(2, 4, 9, 8), (6, 4, 3, 3)], {"padding": "valid"}),
    "conv2d unbatched": (functional.conv2d, [(4, 9, 8), (6, 4, 3, 3), (6,)], {}),
    "conv3d": (functional.conv3d, [(1, 2, 5, 6, 7), (3, 2, 2, 3, 3), (3,)], {"stride": (1, 2, 1)}),
    "conv_transpose1d": (
        functional.conv_transpose1d,
        [(2, 4, 9), (4, 3, 3), (3,)],
        {"stride": 2, "output_padding": 1},
    ),
    "conv_transpose2d": (functional.conv_transpose2d, [(2, 4, 5, 6), (4, 3, 3, 3)], {"padding": 1}),
    "conv_transpose3d": (functional.conv_transpose3d, [(1, 2, 3, 4, 5), (2, 3, 2, 2, 2), (3,)], {}),
}


def name_of(function):
    return next(name for name in EMULATED if getattr(function, "__name__", "") == name)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # the reference's own copy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function, shapes, options", CASES.values(), ids=CASES)
def test_results_and_gradients_are_within_the_fp32_accumulation_bound(function, shapes, options, dtype):
    low = operands(shapes, dtype)
    out = emulate(name_of(function), function, tuple(low), options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, low, upstream)

    exact = [x.detach().double().requires_grad_() for x in low]
    magnitude = [x.detach().double().abs().requires_grad_() for x in low]
    wanted = function(*exact, **options)
    bound_out = function(*magnitude, **options)
    wanted_grads = torch.autograd.grad(wanted, exact, upstream.double())
    bound_grads = torch.autograd.grad(bound_out, magnitude, upstream.double().abs())

    terms = 4 * math.prod(max(shapes, key=len))  # more than any of these sums has
    for got, want, bound in zip((out, *gradients), (wanted, *wanted_grads), (bound_out, *bound_grads), strict=True):
        assert got.dtype == dtype
        assert got.shape == want.shape
        # |sum in FP32 − sum| ≤ n·u·Σ|terms| (Higham), then one rounding to the format
        slack = terms * FP32_EPS * bound + EPS[dtype] * want.abs() * (1 + 2 * EPS[dtype]) + TINY[dtype]
        assert ((got.double() - want).abs() <= slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_sums_are_the_correctly_rounded_result_bit_for_bit(dtype):
    """With integers every FP32 sum is exact, so the one rounding must be nearest-even on it."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-15, 16, (64, 50), generator=generator).to(dtype)
    b = torch.randint(-15, 16, (50, 64), generator=generator).to(dtype)
    exact = a.double() @ b.double()
    assert torch.equal(emulate("matmul", torch.matmul, (a, b), {}), exact.float().to(dtype))
    assert (exact.abs() > 256).any()  # beyond BF16's integers: the rounding does something


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_the_low_precision_operands_are_saved(dtype):
    for case in ("linear", "matmul", "bmm", "conv2d", "conv2d same", "conv_transpose2d"):
        function, shapes, options = CASES[case]
        low, saved = operands(shapes, dtype), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            emulate(name_of(function), function, tuple(low), options)
        assert all(tensor.dtype == dtype for tensor in saved), case
        most = sum(x.numel() * 2 for x in low[:2]) + (2 * low[0].numel() if options.get("padding") == "same" else 0)
        assert sum({t.data_ptr(): t.numel() * t.element_size() for t in saved}.values()) <= most, case


def test_dropout_inside_attention_is_the_same_in_the_backward_pass():
    query, key, value = operands([(1, 1, 32, 8)] * 3, torch.float16)
    torch.manual_seed(3)
    out = emulate(
        "scaled_dot_product_attention", functional.scaled_dot_product_attention,
        (query, key, value), {"dropout_p": 0.5},
    )  # fmt: skip
    torch.manual_seed(4)  # what happens between forward and backward must not matter
    (gradient,) = torch.autograd.grad(out.float().sum(), value)
    torch.manual_seed(3)
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    reference = functional.scaled_dot_product_attention(*wide, dropout_p=0.5)
    (expected,) = torch.autograd.grad(reference.sum(), wide[2])
    assert torch.equal(gradient, expected.half())


def test_gradients_can_be_differentiated_again():
    for case in ("linear", "matmul broadcast", "conv2d", "baddbmm"):
        function, shapes, options = CASES[case]
        low = operands(shapes, torch.bfloat16)
        out = emulate(name_of(function), function, tuple(low), options)
        (first,) = torch.autograd.grad(out.float().square().sum(), low[0], create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), low[1])
        exact = [x.detach().double().requires_grad_() for x in low]
        (want,) = torch.autograd.grad(function(*exact, **options).square().sum(), exact[0], create_graph=True)
        (want,) = torch.autograd.grad(want.square().sum(), exact[1])
        # several BF16 roundings deep
        assert ((second.double() - want).abs() <= 0.05 * want.abs().max()).all(), case


def test_what_is_not_asked_for_is_left_out_and_layouts_stay():
    x, weight, bias = operands([(5, 33), (7, 33), (7,)], torch.float16)
    emulate("linear", functional.linear, (x.detach(), weight, bias.detach()), {}).float().sum().backward()
    assert x.grad is None
    assert weight.grad.dtype == torch.float16
    sparse, dense = torch.eye(4).to_sparse(), torch.ones(4, 4)
    assert torch.equal(emulate("mm", torch.mm, (sparse, dense), {}), dense)  # by a kernel of its own
    x, weight = operands([(2, 8, 5, 5), (8, 8, 3, 3)], torch.float16)
    x = x.detach().contiguous(memory_format=torch.channels_last)
    out = emulate("conv2d", functional.conv2d, (x, weight), {"padding": 1})
    assert out.is_contiguous(memory_format=torch.channels_last)


COMPOSED = {
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (4, 9), (9, 5)),
    "inner": (torch.inner, (4, 9), (5, 9)),
    "dot": (torch.dot, (9,), (9,)),
    "vdot": (torch.Tensor.vdot, (9,), (9,)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (4, 9), (5, 9)),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b]), (4, 9), (9, 5)),
    "chain_matmul": (torch.chain_matmul, (4, 9), (9, 5)),
    "vecdot": (torch.linalg.vecdot, (4, 9), (4, 9)),
    "rmatmul": (lambda a, b: b.__rmatmul__(a), (4, 9), (9, 5)),
    "convolution": (
        lambda a, b: torch.convolution(a, b, None, [1], [1], [1], False, [0], 1), (2, 4, 9), (3, 4, 3),
    ),
    "_convolution": (
        lambda a, b: torch._convolution(a, b, None, [1], [1], [1], False, [0], 1, False, False, True, True),
        (2, 4, 9), (3, 4, 3),
    ),
}  # fmt: skip
#: What torch's CUDA lists promote to the widest operand, instead of casting it low.
PROMOTED = {"tensordot", "inner", "dot", "vdot"}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COMPOSED)
def test_composed_products_are_fp32_products_of_rounded_operands(case, dtype):
    function, *shapes = COMPOSED[case]
    policy = f"O1,dtype={str(dtype).removeprefix('torch.')},emulate=true"

    def run(region, compute, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with region:
            out = compute(*leaves)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    for is_low in (True, False):
        inputs = [x.detach().to(dtype if is_low else torch.float32) for x in operands(shapes, torch.float32)]

        def by_hand(*leaves):
            if not is_low and case in PROMOTED:  # noqa: B023
                return function(*leaves)
            return function(*(x.to(dtype).float() for x in leaves)).to(dtype)

        with Products() as products:
            mine = run(mezzo.autocast(policy, "cpu"), function, inputs)
        assert set(products.dtypes) <= {"float32"}
        assert_same(mine, run(torch.autocast("cpu", enabled=False), by_hand, inputs))
        if "convolution" not in case:  # and under torch's own lists the dtype is torch's
            with mezzo.autocast(f"{policy},lists=device", "cpu"):
                product = function(*inputs)
            with torch.autocast("cpu", dtype=dtype):
                assert product.dtype == function(*inputs).dtype


# What C++ composes of products -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_composites_of_products_are_rounded_once(dtype):
    """torch's autocast rounds each product inside; FP32 with one rounding is nearer to the FP32 result than that."""
    generator = torch.Generator().manual_seed(0)
    rows, square = torch.randn(3, 8, generator=generator), torch.randn(4, 4, generator=generator) / 2
    calls = [(lambda x: torch.linalg.matrix_power(x, 5), square), (lambda x: x.matrix_power(-2), square),
             (torch.cov, rows), (lambda x: torch.corrcoef(input=x), rows)]  # fmt: skip
    policy = f"O1,dtype={str(dtype).removeprefix('torch.')},emulate=true"
    for function, value in calls:
        for operand in (value, value.to(dtype)):
            x = operand.clone().requires_grad_()
            with mezzo.autocast(policy, "cpu"):
                out = function(x)
            wide = operand.float().requires_grad_()
            exact = function(wide)
            # FP32 sums depend on the processor and on where memory begins: bits are not compared, roundings are.
            slack = 2.0**-16 * exact.detach().abs().max()
            assert out.dtype == dtype
            assert ((out.float() - exact).abs() <= EPS[dtype] * exact.abs() + slack).all()
            (gradient,) = torch.autograd.grad(out.float().sum(), x)
            (wanted,) = torch.autograd.grad(exact.sum(), wide)
            assert gradient.dtype == operand.dtype
            once = EPS.get(operand.dtype, 0.0) * wanted.abs()
            assert ((gradient.float() - wanted).abs() <= once + 2.0**-16 * wanted.abs().max()).all()


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_run_low(dtype, emulate):
    """The products of a mixture of experts, against each expert's product by itself."""
    generator = torch.Generator().manual_seed(0)
    tokens, experts = torch.randn(24, 16, generator=generator), torch.randn(3, 16, 8, generator=generator)
    ends = torch.tensor([8, 16, 24], dtype=torch.int32)
    for function in (torch._grouped_mm, functional.grouped_mm, torch.ops.aten._grouped_mm):
        x, weight = tokens.clone().requires_grad_(), torch.nn.Parameter(experts.clone())
        with mezzo.autocast(mezzo.Policy.O1(dtype, emulate=emulate), "cpu"):
            out = function(x, weight, offs=ends)
            assert out.dtype == dtype
            out.float().square().sum().backward()
        a, b = (t.detach().to(dtype).double().requires_grad_() for t in (x, weight))
        wanted = torch.cat([part @ matrix for part, matrix in zip(a.split(8), b, strict=True)])
        torch.testing.assert_close(out.double(), wanted, rtol=EPS[dtype] * 1.01, atol=1e-5)
        wanted.square().sum().backward()
        for mine, theirs in ((x.grad, a.grad), (weight.grad, b.grad)):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=8 * EPS[dtype] * theirs.abs().max().item())
    with mezzo.autocast(mezzo.Policy.O2(dtype, emulate=emulate), "cpu"):
        out = functional.grouped_mm(tokens.to(dtype), experts.to(dtype), offs=ends)
    assert out.dtype == dtype


# Recurrent networks -----------------------------------------------------------------------------------


def recurrent():
    from torch.nn.utils.rnn import pack_padded_sequence

    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    packed = pack_padded_sequence(x, torch.tensor([5, 3]))
    nn = torch.nn
    return {
        "rnn": (nn.RNN(8, 8), x),
        "rnn relu": (nn.RNN(8, 8, 2, nonlinearity="relu", bidirectional=True), x),
        "lstm": (nn.LSTM(8, 8, 2, bidirectional=True), x),
        "lstm, projected": (nn.LSTM(8, 8, proj_size=4), x),
        "lstm, packed": (nn.LSTM(8, 8), packed),
        "lstm, batch first": (nn.LSTM(8, 8, batch_first=True), x),
        "gru": (nn.GRU(8, 8, 2), x),
        "gru, packed": (nn.GRU(8, 8, bidirectional=True), packed),
        "rnn, packed": (nn.RNN(8, 8), packed),
        "lstm cell": (nn.LSTMCell(8, 8), x[0]),
        "gru cell": (nn.GRUCell(8, 8), x[0]),
        "rnn cell": (nn.RNNCell(8, 8), x[0]),
    }


def leaves(out):
    if isinstance(out, Tensor):
        return [out]
    return [leaf for part in out if part is not None for leaf in leaves(part) if leaf.is_floating_point()]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lists", ["portable", "device"])
def test_recurrent_networks_have_the_dtypes_of_a_device_with_the_arithmetic(dtype, lists):
    for name, (network, given) in recurrent().items():
        for low in (False, True):
            x = given.to(dtype) if low else given
            with mezzo.autocast(mezzo.Policy.O1(dtype, lists=lists, emulate=True), "cpu"):
                out = leaves(network(x))
            with torch.no_grad():
                wide = leaves(network(given))
            # torch's CPU autocast, in BF16 which every CPU computes: where states enter in FP32 gated cells keep them.
            gated = name.startswith(("gru", "lstm cell", "lstm, packed"))
            states = [torch.float32 if gated else dtype] * len(out)
            if name == "lstm, projected":
                states[-1] = torch.float32
            wanted = [dtype] * len(out) if low or lists == "portable" else states
            assert [result.dtype for result in out] == wanted, name
            for mine, theirs in zip(out, wide, strict=True):
                torch.testing.assert_close(mine.float(), theirs, rtol=0, atol=16 * EPS[dtype])
            network.zero_grad()
            sum(result.float().sum() for result in out).backward()
            assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_the_one_rounding(dtype):
    """1 + u + u in units of half a spacing: each sum alone is a tie, which goes to 1, and both together are no tie."""
    half = torch.finfo(dtype).eps / 2
    x, weight = torch.tensor([[1.0, half]]).to(dtype), torch.ones(1, 2, dtype=dtype)
    bias = torch.tensor([half]).to(dtype)
    out = emulate("linear", functional.linear, (x, weight, bias), {})
    assert out.item() == 1.0 + 2 * half
