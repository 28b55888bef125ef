"""The kernels of a GPU, interpreted on the CPU: bit by bit what torch's operations make."""

import math

import pytest
import torch

from mezzo.formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    E5M2,
    FP32,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    NVFP4_2D,
    ROWWISE_E4M3,
    TENSORWISE_E4M3,
    BlockFormat,
    convert,
    quantized,
    triton,
)

from .test_quantize import LAYOUTS, alike, by_torch, wild

#: With the shape of a matrix, more than one tile of it, and not a whole number of them.
SHAPES = {
    **dict.fromkeys(BLOCK_FORMATS.values(), (96, 96)),
    BlockFormat(E4M3, FP32, (2, 8)): (6, 24),
    BlockFormat(E5M2, FP32, 128): (3, 256),
    BlockFormat(E2M1, FP32, -1): (3, 2100),
    BlockFormat(E5M2, E4M3, 8, tensor_scale=True): (40, 24),
}


@pytest.fixture
def launches(interpreted, monkeypatch):
    """Tensors of the CPU go to Triton's kernels, whose names are kept."""
    for each in (triton._looking, triton._quantising, triton._works_on):
        each.cache_clear()
    names, run = [], triton.Launch.__call__
    monkeypatch.setattr(
        triton.Launch, "__call__", lambda self, *given: names.append(self.kernel.fn.__name__) or run(self, *given)
    )
    monkeypatch.setattr(convert, "_KERNELS", {"cpu": triton})
    assert triton._works_on(torch.device("cpu"))
    names.clear()
    yield names
    for each in (triton._looking, triton._quantising, triton._works_on):
        each.cache_clear()


def launched(fmt):
    """Two, where the whole tensor has a scale."""
    return ["largest"] * (fmt.block is None or fmt.tensor_scale) + ["quantise"]


@pytest.mark.parametrize("fmt", SHAPES, ids=str)
def test_kernels_and_torchs_operations_agree(fmt, launches):
    rows = wild(SHAPES[fmt], len(str(fmt)), spread=5)
    columns = rows.t().contiguous()
    for x, dim, dtype, key in (
        (rows, -1, torch.float32, 5),
        (rows, -1, torch.float16, None),
        (columns.t(), -1, torch.bfloat16, 2**40 - 7),
        (columns, 0, torch.bfloat16, None),
    ):
        if dim == 0 and isinstance(fmt.block, tuple) and fmt.block[0] != fmt.block[1]:
            continue
        given, key = x.to(dtype), None if key is None else torch.tensor(key)
        launches.clear()
        alike(quantized(given, fmt, dim, key=key), by_torch(given, fmt, dim, key=key))
        assert launches == launched(fmt)


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, NVFP4_2D, TENSORWISE_E4M3, ROWWISE_E4M3], ids=str)
def test_kernels_read_any_layout(fmt, launches):
    x = wild((64, 96), 0).view(2, 32, 96)
    x[1, 5, 3], x[0, -1, -1] = math.nan, math.inf
    for name in ("transposed", "with gaps", "channels last"):
        given = LAYOUTS[name](x)
        launches.clear()
        alike(quantized(given, fmt, -2), by_torch(given, fmt, -2))
        assert launches == launched(fmt)


def test_a_largest_magnitude_that_is_given_is_not_looked_for(launches):
    for fmt in (ROWWISE_E4M3, MXFP8_E4M3, TENSORWISE_E4M3, NVFP4, BlockFormat(E4M3, FP32, (2, 8))):
        x = wild((6, 64), 1)
        one = torch.tensor(0.25)
        each = torch.rand(quantized(x, fmt).scales.shape, generator=torch.Generator().manual_seed(2))
        for amax in (one, each) if not fmt.tensor_scale else (one,):
            launches.clear()
            alike(quantized(x, fmt, amax=amax), by_torch(x, fmt, amax=amax))
            assert launches == ["quantise"]


def test_blocks_of_odd_sizes_are_for_torchs_operations(launches):
    for fmt, shape in ((BlockFormat(E4M3, FP32, 3), (4, 24)), (BlockFormat(E4M3, FP32, (3, 8)), (6, 24))):
        launches.clear()
        x = wild(shape, 0)
        alike(quantized(x, fmt), by_torch(x, fmt))
        assert launches == []


def test_without_a_compiler_torchs_operations_do_it(launches, monkeypatch, caplog):
    def none(source, name):
        raise OSError("no C compiler")

    monkeypatch.setattr(triton, "jitted", none)
    triton._looking.cache_clear()
    triton._works_on.cache_clear()
    x = wild((4, 64), 0)
    with caplog.at_level("INFO", logger="mezzo"):
        for _ in range(2):
            alike(quantized(x, MXFP4), by_torch(x, MXFP4))
    assert launches == []
    assert caplog.text.count("quantised with torch's operations: no C compiler") == 1
