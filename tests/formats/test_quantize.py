"""Tensors in block formats: bit by bit what exact Python makes of them, by torch's operations and by the kernel."""

import dataclasses
import math
import struct
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    FP32,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    NVFP4_2D,
    ROWWISE_E4M3,
    TENSORWISE_E4M3,
    TENSORWISE_E5M2,
    BlockFormat,
    block_format,
    convert,
    cpp,
    quantize,
    quantized,
)

from ..support.refusals import refused
from ..support.releases import BITS_UNDER_VMAP
from . import oracle

WORDS = {E4M3: "E4M3", E5M2: "E5M2", E2M1: "E2M1", E8M0: "E8M0", FP32: "FP32"}
PATHS = ("portable", "kernel")
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
#: Formats with the shape of what is quantised in them.
SHAPES = {
    MXFP8_E4M3: (3, 64), MXFP8_E5M2: (3, 64), MXFP4: (3, 64), NVFP4: (4, 32), NVFP4_2D: (32, 32),
    TENSORWISE_E4M3: (4, 30), TENSORWISE_E5M2: (4, 30), ROWWISE_E4M3: (5, 24), BlockFormat(E4M3, FP32, (2, 8)): (4, 24),
    BlockFormat(E2M1, FP32, -1): (4, 16), BlockFormat(E5M2, E4M3, 8, tensor_scale=True): (4, 24),
}  # fmt: skip


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    if request.param == "portable":
        monkeypatch.setattr(convert, "_is_plain", lambda x: False)
    else:
        for name in ("encoded", "decoded"):
            monkeypatch.setattr(convert.portable, name, None)  # called, it would raise
    return request.param


def wild(shape, seed, spread=12):
    """Values of many sizes, zeros of both signs, ties, and a row of small ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-spread, spread, shape, generator=generator).float())
    values = torch.where(
        torch.rand(shape, generator=generator) < 0.2, values.sign() * values.abs().log2().round().exp2(), values
    )
    values[torch.rand(shape, generator=generator) < 0.05] = -0.0
    values[0, :8] = torch.tensor([6.0, 5.0, -2.5, 0.25, 0.75, -1.75, 0.0, 3.5]) * 2.0**spread
    values[-1] *= 2.0**-20
    return values


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dtype != torch.float32 else tensor


def codes_of(quantised):
    """Codes in the order of memory."""
    values = bits(quantised.values).movedim(quantised.dim, -1)
    assert values.is_contiguous()
    if quantised.format.element is E2M1:
        values = torch.stack([values & 15, values >> 4], -1)
    return values.flatten().tolist()


def groups_of(moved, fmt, dim, ndim):
    """(place, value) of the elements that share a scale, scales in order; a place is one in memory."""
    values = moved.double().flatten().tolist()
    last, rows = moved.shape[-1], moved.numel() // moved.shape[-1]
    lines, width = (1, fmt.block) if isinstance(fmt.block, int) else (rows, last) if fmt.block is None else fmt.block
    if isinstance(fmt.block, tuple) and dim % ndim != ndim - 1:
        lines, width = width, lines
    width = last if width == -1 else width
    return [
        [
            (index, values[index])
            for line in range(lines)
            for index in range((row + line) * last + at, (row + line) * last + at + width)
        ]
        for row in range(0, rows, lines)
        for at in range(0, last, width)
    ]


def as_exact(x, fmt, dim=-1, key=None, amax=None):
    """Assert that a tensor is quantised as exact Python does."""
    recipe = oracle.Recipe(WORDS[fmt.element], WORDS[fmt.scale], fmt.tensor_scale, fmt.floored)
    groups = groups_of(x.movedim(dim, -1), fmt, dim, x.dim())
    codes, scales, shared = oracle.quantised(groups, recipe, key, amax)
    largest = None if amax is None else torch.tensor(amax)
    result = quantized(x, fmt, dim, key=None if key is None else torch.tensor(key), amax=largest)
    own = result.scales if not result.scales.dim() else result.scales.movedim(dim, -1)
    assert own.is_contiguous()
    assert [repr(scale) for scale in bits(own).flatten().tolist()] == [repr(scale) for scale in scales]
    assert codes_of(result) == codes
    assert (result.tensor_scale is None) == (not fmt.tensor_scale)
    if fmt.tensor_scale:
        assert result.tensor_scale.item() == float(shared)
    return result


@pytest.mark.parametrize("fmt", SHAPES, ids=str)
def test_bits_are_those_of_exact_arithmetic(fmt, path):
    for number, dtype in enumerate(INPUTS):
        if number and fmt not in BLOCK_FORMATS.values():
            continue
        x = wild(SHAPES[fmt], number, spread=5).to(dtype)
        as_exact(x, fmt)
        as_exact(x.t().contiguous().t(), fmt, key=number - 12345678901)
        if isinstance(fmt.block, tuple):
            as_exact(x, fmt, dim=-2, key=7)
        else:
            as_exact(x.t().contiguous(), fmt, dim=0)
        as_exact(x, fmt, amax=0.375)
        as_exact(x, fmt, amax=(x.float().abs().max() * 1.7).item(), key=5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), st.sampled_from(list(SHAPES)), st.booleans())
def test_any_bits_are_quantised_as_exact_arithmetic_does(patterns, fmt, is_random):
    """Infinities, NaN, subnormal numbers and the largest ones too."""
    x = torch.tensor([oracle.float_of(pattern) for pattern in patterns]).view(1, 32)
    if isinstance(fmt.block, tuple):
        x = x.expand(fmt.block[0], 32).contiguous()
        x = x if x.shape[1] % fmt.block[1] == 0 else x[:, : fmt.block[1]]
    result = as_exact(x, fmt, key=99 if is_random else None)
    wide = result.wide()
    assert wide.shape == x.shape
    # Beside a floored scale what is next to FP32's end rounds beyond it; nothing else is made infinite.
    fits = x.abs() < (2.0**127 if fmt.floored else torch.inf)
    assert not wide[fits].isinf().any()


# Worked by hand ---------------------------------------------------------------------------------------------


def test_mx_by_hand(path):
    """Section 6.3 of the OCP specification: the largest power of two in amax, over the largest in the format."""
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([1.5, -0.75, 3.0, 0.1, 0.0])
    result = quantize(x, MXFP4)
    assert bits(result.scales).tolist() == [[126]]  # amax 3, ⌊log2 3⌋ = 1, emax 2: 2^-1
    assert codes_of(result)[:5] == [5, 8 | 3, 7, 0, 0]  # 3, −1.5, 6, 0.2 → 0, 0
    assert bits(result.values)[0, :3].tolist() == [0xB5, 0x07, 0x00]  # the first element in the low four bits
    assert result.wide()[0, :5].tolist() == [1.5, -0.75, 3.0, 0.0, 0.0]
    x[0, 2] = 3.9  # 3.9 / 2^-1 = 7.8 saturates at 6: the scale is not rounded up
    assert quantize(x, MXFP4).wide()[0, 2].item() == 3.0
    assert bits(quantize(x, MXFP4).scales).item() == 126
    x[0, 0] = 500.0  # ⌊log2 500⌋ = 8 = emax of E4M3: scale 1, and 500 saturates
    assert (bits(quantize(x, MXFP8_E4M3).scales).item(), quantize(x, MXFP8_E4M3).wide()[0, 0].item()) == (127, 448.0)
    assert bits(quantize(torch.full((1, 32), 3e38), MXFP8_E4M3).scales).item() == 127 + 127 - 8
    zero = quantize(torch.zeros(1, 32), MXFP8_E4M3)
    assert (bits(zero.scales).item(), codes_of(zero)) == (0, [0] * 32)
    for wrong in (math.nan, -math.inf):
        x[0, 31] = wrong
        assert bits(quantize(x, MXFP8_E4M3).scales).item() == 255
        assert set(codes_of(quantize(x, MXFP8_E4M3))) == {0x7F}
        assert quantize(x, MXFP8_E4M3).dequantize().isnan().all()


def test_nvfp4_by_hand(path):
    """Appendix C of arXiv 2509.25149: two scales, the largest block's is 448, its largest element 6."""
    x = torch.zeros(2, 32)
    x[0, :3] = torch.tensor([2688.0, 448.0, -100.0])  # 6 · 448: a tensor scale of 1
    x[0, 16], x[1, 0], x[1, 16] = 12.0, 0.0054, 12.75
    result = quantize(x, NVFP4)
    assert result.tensor_scale.item() == 1.0
    # 2688/6, 12/6, 0.0009, which is less than half of E4M3's smallest, and 12.75/6 = 2.125, a tie to the even 2.
    assert result.scales.float().tolist() == [[448.0, 2.0], [0.0, 2.0]]
    assert result.wide()[0, :3].tolist() == [2688.0, 448.0, -0.0]
    assert (result.wide()[0, 16].item(), result.wide()[1, 0].item(), result.wide()[1, 16].item()) == (12.0, 0.0, 12.0)
    assert codes_of(result)[32:48] == [0] * 16
    x[1, 31] = math.inf
    result = quantize(x, NVFP4)
    assert (result.tensor_scale.item(), result.scales.isnan().tolist()) == (1.0, [[False, False], [False, True]])
    assert result.wide().isnan().sum() == 16
    assert quantize(torch.zeros(1, 16), NVFP4).wide().eq(0).all()


def test_scales_in_fp32_by_hand(path):
    x = torch.tensor([[7.0, -3.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    result = quantize(x, "e4m3")
    assert (result.scales.shape, result.scales.item(), result.wide()[0].tolist()) == ((), 1 / 64, [7.0, -3.5, 0.0, 1.0])
    rows = quantize(x, ROWWISE_E4M3)  # 448 / 7 = 64 is a power of two; of zeros 448 · 2^100 is floored
    assert rows.scales.tolist() == [[1 / 64], [2.0**-108]]
    assert quantize(x * 0.75, ROWWISE_E4M3).scales[0].item() == 1 / 64  # 448 / 5.25 = 85.3 → 64
    x[1, 2] = math.inf
    assert quantize(x, ROWWISE_E4M3).wide().isnan().tolist() == [[False] * 4, [True] * 4]
    assert quantize(x, "e5m2").wide().isnan().all()
    delayed = quantized(x, TENSORWISE_E4M3, amax=torch.tensor(3.5))  # as of a step before
    assert delayed.wide()[0].tolist() == [3.5, -3.5, 0.0, 1.0]  # saturated
    assert delayed.wide()[1].isnan().tolist() == [False, False, True, False]  # and no infinity hidden


# What there is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_shapes_memory_dtypes_and_bytes(fmt):
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    two = isinstance(fmt.block, tuple)
    for dim in (-1, 1) if two else (0, 1, -1):
        if dim == 0 and fmt.block not in (None, -1):
            continue
        result = quantize(x, fmt, dim)
        packed = fmt.element is E2M1
        shape = [2, 64, 32]
        shape[dim] //= 2 if packed else 1
        assert (list(result.values.shape), result.shape, result.dtype) == (shape, x.shape, torch.bfloat16)
        assert result.values.dtype == (torch.float4_e2m1fn_x2 if packed else fmt.element.dtype)
        scales = [2, 64, 32]
        if two:
            scales[1:] = [4, 2]
        else:
            scales[dim] = 1 if fmt.block == -1 else scales[dim] // (fmt.block or 1)
        assert list(result.scales.shape) == ([] if fmt.block is None else scales)
        assert result.scales.dtype == fmt.scale.dtype
        assert (result.dim, result.format) == (dim % 3, fmt)
        assert result.values.movedim(dim, -1).is_contiguous()
        assert result.values.nbytes == x.numel() * fmt.element.num_bits // 8
        assert result.scales.nbytes == result.scales.numel() * (fmt.scale.num_bits // 8)
        assert (result.tensor_scale is not None) == fmt.tensor_scale
        back = result.dequantize()
        assert (back.dtype, back.shape, back.requires_grad) == (x.dtype, x.shape, False)
        assert torch.equal(back, result.wide().bfloat16())
        error = (result.wide() - x).norm() / x.norm()
        assert error < (0.2 if packed else 0.08), dim


def test_wide_is_exact_where_fp32_holds_it():
    for fmt in (MXFP8_E4M3, MXFP8_E5M2, MXFP4):
        x = wild((4, 64), 3, spread=30)
        x[1, :32] *= 2.0**-100
        x[1, 32:] = x[1, 32:].sign() * 2.0**-130
        result = quantize(x, fmt)
        assert 0 in bits(result.scales)
        exact = [
            float(oracle.meaning(WORDS[fmt.element], code))
            * 2.0 ** (bits(result.scales).flatten().tolist()[at // 32] - 127)
            for at, code in enumerate(codes_of(result))
        ]
        assert result.wide().double().flatten().tolist() == exact
    for value in (0.0, -0.0):
        assert math.copysign(1, quantize(torch.full((1, 32), value), MXFP4).wide()[0, 0].item()) == math.copysign(
            1, value
        )


def same(one, two):
    """Whether FP32 tensors have the same bits, but for those of NaN."""
    return torch.equal(
        *(torch.where(tensor.isnan(), 7, tensor.contiguous().view(torch.int32)) for tensor in (one, two))
    )


def test_every_code_under_every_scale_is_read_as_it_is_defined(path):
    """And rounded as FP32 is: once for each scale."""
    generator = torch.Generator().manual_seed(0)
    for fmt in SHAPES:
        for dim in (-1, -2):
            result = quantize(wild((512, 96), 0) if fmt.block != (16, 16) else wild((512, 512), 0), fmt, dim)
            codes = torch.randint(256, result.values.shape, dtype=torch.uint8, generator=generator)
            scales = result.scales
            if fmt.scale is not FP32:  # every one
                scales = (torch.arange(scales.numel()) % 256).to(torch.uint8).view(scales.shape).view(scales.dtype)
            lie = [
                tensor.movedim(dim, -1).contiguous().movedim(-1, dim) if tensor.dim() else tensor
                for tensor in (codes, scales)
            ]
            result = dataclasses.replace(result, values=lie[0].view(result.values.dtype), scales=lie[1])
            exact = [oracle.meaning(WORDS[fmt.element], code) for code in range(1 << fmt.element.num_bits)]
            table = torch.tensor([math.nan if value is None else float(value) for value in exact])
            sign = 1 << fmt.element.num_bits - 1
            table[sign:] = -table[:sign]
            if fmt.element is E5M2:
                table[0x7C], table[0xFC] = math.inf, -math.inf
            elements = table[codes_of(result)].view(result.shape if dim == -1 else result.shape[::-1])
            assert same(result.elements().movedim(dim, -1), elements)
            factors = result.scales
            if fmt.scale is E8M0:
                factors = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), math.nan])[bits(factors).long()]
            factors = factors.float()
            if factors.dim():
                factors = factors.movedim(dim, -1)
                factors = factors.repeat_interleave(elements.shape[1] // factors.shape[1], 1)
                factors = factors.repeat_interleave(elements.shape[0] // factors.shape[0], 0)
            wide = elements * factors * (1.0 if result.tensor_scale is None else result.tensor_scale)
            assert same(result.wide().movedim(dim, -1), wide)


def test_empty_tensors():
    for fmt in BLOCK_FORMATS.values():
        for shape in ((0, 32), (32, 0), (0,)):
            if len(shape) == 1 and isinstance(fmt.block, tuple):
                continue
            result = quantize(torch.zeros(shape), fmt)
            assert result.wide().shape == shape
            assert result.values.numel() == 0


# Chance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, MXFP8_E5M2, NVFP4, TENSORWISE_E4M3], ids=str)
def test_stochastic_rounding_is_unbiased(fmt):
    """Of normal and subnormal numbers, by their means over many elements, in standard deviations of a draw."""
    count = 1 << 16
    for value in (0.3 + 1 / 64, 0.07, 3.0 * 2**-12, 1.0):
        x = torch.full((count // 16, 32), value)
        x[:, ::16] = 1.0  # the largest of each block
        rounded = quantize(x, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(1)).wide()
        drawn = rounded[:, 1::2].double()
        seen = Counter(drawn.flatten().tolist())
        low, high = min(seen), max(seen)
        assert len(seen) <= 2
        assert low <= value * (1 + 2**-20)
        assert high >= value * (1 - 2**-20)
        assert abs(drawn.mean().item() - value) <= 5 * (high - low) / 2 / math.sqrt(drawn.numel()) + value * 2**-20


def test_a_key_is_the_noise_and_a_generator_gives_a_key(path):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for key in (5, -5, 2**40 + 5):
        one, two, narrow = (
            quantized(x, MXFP4, key=torch.tensor(number, dtype=dtype))
            for number, dtype in ((key, torch.int64), (key, torch.int64), ((key + 2**31) % 2**32 - 2**31, torch.int32))
        )
        assert torch.equal(bits(one.values), bits(two.values))
        assert torch.equal(bits(one.values), bits(narrow.values))
    assert not torch.equal(bits(one.values), bits(quantized(x, MXFP4, key=torch.tensor(6)).values))
    first, again, other = (
        quantize(x, NVFP4, rounding="stochastic", generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(bits(first.values), bits(again.values))
    assert not torch.equal(bits(first.values), bits(other.values))
    assert torch.equal(bits(first.scales), bits(other.scales))  # scales are rounded to nearest
    before = torch.get_rng_state()
    quantize(x, NVFP4)
    assert torch.equal(torch.get_rng_state(), before)
    quantize(x, NVFP4, rounding="stochastic")
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)


# Both ways alike ------------------------------------------------------------------------------------------------


def by_torch(*arguments, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_is_plain", lambda x: False)
        return quantized(*arguments, **options)


def alike(one, two):
    pairs = [(one.values, two.values), (one.scales, two.scales), (one.tensor_scale, two.tensor_scale)]
    for mine, theirs in pairs:
        if mine is None:
            assert theirs is None
            continue
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert torch.equal(bits(mine).nan_to_num(7.0), bits(theirs).nan_to_num(7.0))


LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "with gaps": lambda x: torch.stack([x, x * 2], -1)[..., 0],
    "broadcast": lambda x: x[:1].expand(x.shape),
    "channels last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, NVFP4, NVFP4_2D, TENSORWISE_E5M2, ROWWISE_E4M3], ids=str)
def test_the_kernel_and_torchs_operations_agree_on_any_layout_size_and_thread(fmt):
    before = torch.get_num_threads()
    try:
        for number, shape in enumerate([(2, 32, 64), (2, 3, 32, 16 * 20), (96, 32 * 33), (1, 64), (2, 32, 9600)]):
            if shape[-2] % 16 and isinstance(fmt.block, tuple):
                continue
            torch.set_num_threads(1 + number % 2)
            x = wild((math.prod(shape) // shape[-1], shape[-1]), number).view(shape)
            x[..., -1, 3] = math.nan if shape[0] > 1 and number % 2 else 1.0
            for lay in LAYOUTS.values():
                for dim in (-1, -2):
                    if not isinstance(fmt.block, int) or fmt.block == -1 or x.shape[dim] % fmt.block == 0:
                        given = lay(x)
                        alike(quantized(given, fmt, dim), by_torch(given, fmt, dim))
    finally:
        torch.set_num_threads(before)


def test_the_kernel_and_torchs_operations_agree_on_noise_beyond_a_chunk():
    x = torch.full((1 << 12, 64), 0.3)
    for fmt in (MXFP8_E4M3, TENSORWISE_E4M3):
        key = torch.tensor(11)
        alike(quantized(x, fmt, key=key), by_torch(x, fmt, key=key))


def test_scales_of_a_history_each_or_one_for_all():
    x = wild((6, 64), 1)
    for fmt in (ROWWISE_E4M3, MXFP8_E4M3, BlockFormat(E4M3, FP32, (2, 8))):
        for dim in (-1, 0):
            if dim == 0 and isinstance(fmt.block, tuple):
                continue
            given = x if dim == -1 else x.t().contiguous()
            amax = torch.rand(quantized(given, fmt, dim).scales.shape, generator=torch.Generator().manual_seed(2))
            alike(quantized(given, fmt, dim, amax=amax), by_torch(given, fmt, dim, amax=amax))
            same = amax.new_full(amax.shape, 0.25)
            alike(quantized(given, fmt, dim, amax=same), quantized(given, fmt, dim, amax=torch.tensor(0.25)))
    own = quantized(x, NVFP4)
    alike(own, quantized(x, NVFP4, amax=x.abs().max()))


def test_without_a_compiler_torchs_operations_do_it(monkeypatch, caplog):
    def none(source):
        raise UnsupportedError("no C++ compiler for kernels")

    x, calls = wild((4, 64), 0), []
    expected = quantized(x, NVFP4)
    wide = expected.wide()
    monkeypatch.setattr(cpp, "built", none)
    monkeypatch.setattr(
        convert.portable, "encoded", lambda *args, real=convert.portable.encoded: calls.append(1) or real(*args)
    )
    cpp._kernel.cache_clear()
    cpp._decoding.cache_clear()
    try:
        with caplog.at_level("INFO", logger="mezzo"):
            alike(quantized(x, NVFP4), expected)
            alike(quantized(x, NVFP4), expected)
            assert torch.equal(expected.wide(), wide)
    finally:
        cpp._kernel.cache_clear()
        cpp._decoding.cache_clear()
    assert len(calls) == 2
    for verb in ("quantised", "read"):
        assert caplog.text.count(f"{verb} with torch's operations: no C++ compiler for kernels") == 1


def test_under_a_compiler_of_torchs_and_where_nothing_has_memory():
    x = wild((4, 64), 0)
    for fmt in (NVFP4, TENSORWISE_E4M3):

        def both(x, key, fmt=fmt):
            result = quantized(x, fmt, key=key)
            return bits(result.values), bits(result.scales), result.wide()

        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        key = torch.tensor(3)
        assert all(map(torch.equal, compiled(x, key), both(x, key)))
        shapes = quantized(x.to("meta"), fmt)
        assert (shapes.values.shape, shapes.scales.shape) == (
            quantized(x, fmt).values.shape,
            quantized(x, fmt).scales.shape,
        )
        with torch._subclasses.FakeTensorMode() as mode:
            assert quantized(mode.from_tensor(x), fmt).wide().shape == x.shape
        if BITS_UNDER_VMAP:
            rows = torch.func.vmap(lambda row, fmt=fmt: quantized(row, fmt).wide())(x)
            assert torch.equal(rows, torch.stack([quantized(row, fmt).wide() for row in x]))


def test_a_mode_of_torchs_sees_what_is_done():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    x, names = wild((4, 64), 0), set()
    expected = quantized(x, NVFP4)
    with Seen():
        result = quantized(x, NVFP4)
    assert {"amax", "mul", "where"} <= names
    alike(result, expected)


def test_nothing_is_asked_of_a_tensor(path):
    x, key = wild((4, 64), 0), torch.tensor(1)
    for fmt in (NVFP4, MXFP8_E4M3, TENSORWISE_E4M3):
        quantized(x, fmt, key=key)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
            quantized(x, fmt, key=key).wide()
        assert "aten::_local_scalar_dense" not in {event.name for event in profiled.events()}


# Names, and what is refused -------------------------------------------------------------------------------------


def test_names_go_round():
    for name, fmt in BLOCK_FORMATS.items():
        assert str(fmt) == fmt.name == name
        assert block_format(name) is block_format(name.upper()) is block_format(fmt) is fmt
    others = [
        BlockFormat(E4M3, FP32, 128),
        BlockFormat(E4M3, FP32, (128, 128), floored=True),
        BlockFormat(E2M1, E8M0, -1),
        BlockFormat(E5M2, E8M0, None),
        BlockFormat(E4M3, E4M3, 16, tensor_scale=True),
    ]
    assert str(others[0]) == "float8_e4m3fn/float32/128"
    assert str(others[1]) == "float8_e4m3fn/float32/128x128/floored"
    for fmt in others:
        assert block_format(str(fmt)) == fmt
    assert block_format("e4m3") is not None
    assert block_format(torch.float8_e5m2) == block_format(E5M2) == TENSORWISE_E5M2
    assert block_format("mxfp8") is MXFP8_E4M3
    assert [fmt.bits_per_element for fmt in (MXFP8_E4M3, MXFP4, NVFP4, TENSORWISE_E4M3)] == [8.25, 4.25, 4.5, 8]


ONES = torch.ones(4, 48)
REFUSED = [
    (lambda: quantize(ONES, MXFP4),
     ("a tensor of (4, 48) in mxfp4", "blocks of 32 do not divide dimension 1", "16 zeros more")),
    (lambda: quantize(ONES, NVFP4, dim=0), ("blocks of 16 do not divide dimension 0, which has 4", "12 zeros more")),
    (lambda: quantize(ONES, NVFP4_2D), ("blocks of 16 do not divide dimension 0",)),
    (lambda: quantize(torch.ones(16, 16, 16), NVFP4_2D, dim=0), ("lie in the last two", "dim=-1 or dim=-2")),
    (lambda: quantize(torch.ones(16), NVFP4_2D), ("lie in the last two",)),
    (lambda: quantize(ONES[:3], BlockFormat(E2M1, FP32, -1), dim=0),
     ("two elements share a byte", "dimension 0 is odd")),
    *((lambda dim=dim: quantize(ONES, MXFP8_E4M3, dim=dim), ("there is no such dimension of 2", "from 0 to 1"))
      for dim in (2, -3, 1.0, None, True)),
    (lambda: quantize(torch.tensor(1.0), "e4m3"), ("without dimensions", "x.reshape(1)")),
    (lambda: quantize(ONES.double(), MXFP8_E4M3),
     ("torch.float64 tensors cannot be quantised", "quantize(x.float(), …)")),
    (lambda: quantize(ONES.int(), MXFP8_E4M3), ("torch.int32 tensors cannot be quantised",)),
    (lambda: quantize(ONES.to_sparse(), MXFP8_E4M3), ("torch.sparse_coo cannot be quantised", "x.to_dense()")),
    (lambda: quantize([1.0], MXFP8_E4M3), ("[1.0] cannot be quantised",)),
    (lambda: quantize(ONES, "nvpf4"), ("unknown block format 'nvpf4'", "did you mean 'nvfp4'?")),
    (lambda: quantize(ONES, "fp16"), ("unknown block format 'fp16'", "float16 is no format of elements")),
    (lambda: quantize(ONES, E8M0), ("unknown block format", "float8_e8m0fnu is no format of elements")),
    (lambda: quantize(ONES, None), ("unknown block format None", 'block_format("mxfp8_e4m3")')),
    *((lambda text=text: block_format(text), ("unknown block format", "a block is tensor, row, a number"))
      for text in ("e4m3/fp32", "e4m3/fp32/1x2x3", "e4m3/fp32/x", "e4m3/fp32/8/floor", "e4m3/fp32/8/floored/floored")),
    (lambda: block_format("e4m4/fp32/8"), ("unknown number format 'e4m4'",)),
    (lambda: quantize(ONES, "e4m3", rounding="random"), ("unknown rounding 'random'", 'rounding="stochastic"')),
    (lambda: quantize(ONES, "e4m3", rounding=None), ("unknown rounding None",)),
    (lambda: quantize(ONES.to("meta"), "e4m3", generator=torch.Generator()),
     ("a generator on cpu for a tensor on meta",)),
    (lambda: quantize(ONES, "e4m3", rounding="stochastic", generator=3),
     ("3 is no generator", 'torch.Generator("cpu").manual_seed(0)')),
    (lambda: BlockFormat(FP16, E8M0, 32), ("these formats make no block format", "element")),
    (lambda: BlockFormat(E4M3, E5M2, 32), ("these formats make no block format", "scales E8M0, E4M3 or FP32")),
    *((lambda block=block: BlockFormat(E4M3, E8M0, block), ("is no block",))
      for block in (0, -2, 1.0, True, (1, 2, 3), (0, 1), (1, -1), "32")),
    (lambda: BlockFormat(E4M3, E8M0, 32, tensor_scale=True), ("a scale of the tensor beside these scales",)),
    (lambda: BlockFormat(E4M3, FP32, 32, tensor_scale=True), ("a scale of the tensor beside these scales",)),
    (lambda: BlockFormat(E2M1, E4M3, None, tensor_scale=True), ("a scale of the tensor beside these scales",)),
    (lambda: BlockFormat(E4M3, E8M0, 32, floored=True), ("a float8_e8m0fnu scale cannot be floored",)),
    (lambda: BlockFormat(E2M1, E8M0, 7), ("a block of 7 elements of four bits", "two of them share a byte")),
    (lambda: BlockFormat(E2M1, E8M0, (7, 2)), ("a block of (7, 2) elements of four bits",)),
]  # fmt: skip


def test_what_is_refused():
    for call, words in REFUSED:
        with refused(PolicyError, *words):
            call()


def test_parameters_are_quantised_as_tensors_are():
    weight = nn.Parameter(wild((4, 64), 0))
    alike(quantize(weight, MXFP8_E4M3), quantize(weight.detach(), MXFP8_E4M3))
    assert struct.pack("<f", quantize(weight, "e4m3").scales.item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_the_gpu_quantises_as_the_cpu_does(fmt):
    for dtype in INPUTS:
        x = wild((64, 64), 4).to(dtype)
        for key in (None, torch.tensor(17)):
            ours, theirs = quantized(x, fmt, key=key), quantized(x.cuda(), fmt, key=None if key is None else key.cuda())
            assert torch.equal(bits(theirs.values).cpu(), bits(ours.values))
            assert torch.equal(bits(theirs.scales).cpu(), bits(ours.scales))
            assert torch.equal(theirs.wide().cpu(), ours.wide())
