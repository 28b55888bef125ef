"""The kernels of a GPU, interpreted on the CPU: bit by bit what torch's operations make."""

import dataclasses
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

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

from ..step.executors.test_compiled_kernels import facts
from .test_quantize import LAYOUTS, alike, as_exact, bits, by_torch, wild

#: With the shape of a matrix, more than one tile of it, and not a whole number of them.
SHAPES = {
    **dict.fromkeys(BLOCK_FORMATS.values(), (96, 96)),
    BlockFormat(E4M3, FP32, (2, 8)): (6, 24),
    BlockFormat(E5M2, FP32, 128): (3, 256),
    BlockFormat(E2M1, FP32, -1): (3, 2100),
    BlockFormat(E5M2, E4M3, 8, tensor_scale=True): (40, 24),
}


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Kernels:
    """The launches of a device, and how tensors come out there."""

    def __init__(self, device):
        self.device, self.names = torch.device(device), []

    def agree(self, x, fmt, dim=-1, key=None, amax=None):
        """Assert that kernels make what torch's operations do on the CPU; return the names of what was launched."""
        key = None if key is None else torch.tensor(key)
        there = {
            name: None if tensor is None else tensor.to(self.device) for name, tensor in (("key", key), ("amax", amax))
        }
        given = x
        if self.device.type == "cuda":  # where it lies as here
            storage = x.untyped_storage().cuda()
            given = torch.empty(0, dtype=x.dtype, device="cuda").set_(storage, x.storage_offset(), x.shape, x.stride())
        self.names.clear()
        result = quantized(given, fmt, dim, **there)
        made = {name: getattr(result, name) for name in ("values", "scales", "tensor_scale")}
        made = {name: tensor if tensor is None else tensor.cpu() for name, tensor in made.items()}
        alike(dataclasses.replace(result, **made), by_torch(x, fmt, dim, key=key, amax=amax))
        return [*self.names]


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=CUDA)])
def kernels(request, monkeypatch):
    """Triton's kernels, for tensors of the CPU interpreted."""
    caches = triton._looking, triton._quantising, triton._works_on
    launches, run = Kernels("cuda" if request.param == "cuda" else "cpu"), triton.Launch.__call__
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(convert, "_KERNELS", {"cpu": triton})
    for cached in caches:
        cached.cache_clear()

    def noted(launch, *given):
        launches.names.append(launch.kernel.fn.__name__)
        run(launch, *given)

    monkeypatch.setattr(triton.Launch, "__call__", noted)
    assert triton._works_on(launches.device)
    yield launches
    for cached in caches:
        cached.cache_clear()


def launched(fmt):
    """Two, where the whole tensor has a scale."""
    return ["largest"] * (fmt.block is None or fmt.tensor_scale) + ["quantise"]


@pytest.mark.parametrize("fmt", SHAPES, ids=str)
def test_kernels_and_torchs_operations_agree(fmt, kernels):
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
        assert kernels.agree(x.to(dtype), fmt, dim, key) == launched(fmt)


def test_kernels_are_exact_arithmetic(kernels):
    if kernels.device.type == "cuda":
        pytest.skip("agreement with torch's operations is tested there")
    for fmt, shape in ((MXFP8_E4M3, (4, 64)), (NVFP4, (4, 64)), (ROWWISE_E4M3, (4, 64)), (TENSORWISE_E4M3, (2, 32))):
        for key in (None, 11):
            as_exact(wild(shape, 3, spread=5), fmt, key=key)


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, NVFP4_2D, TENSORWISE_E4M3, ROWWISE_E4M3], ids=str)
def test_kernels_read_any_layout(fmt, kernels):
    x = wild((64, 96), 0).view(2, 32, 96)
    x[1, 5, 3], x[0, -1, -1] = math.nan, math.inf
    for name in ("rows", "transposed", "with gaps", "channels last", "broadcast"):
        assert kernels.agree(LAYOUTS[name](x), fmt, -2) == launched(fmt)
    part = torch.cat([x, x * 16], -1)[..., :96]
    assert kernels.agree(part, fmt, -1) == launched(fmt)
    beside = torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)  # at no multiple of 16 bytes
    assert kernels.agree(beside, fmt, -1, key=3) == launched(fmt)


def test_a_largest_magnitude_that_is_given_is_not_looked_for(kernels):
    for fmt in (ROWWISE_E4M3, MXFP8_E4M3, TENSORWISE_E4M3, NVFP4, BlockFormat(E4M3, FP32, (2, 8))):
        x = wild((6, 64), 1)
        scales = torch.rand(by_torch(x, fmt).scales.shape, generator=torch.Generator().manual_seed(2))
        for amax in (torch.tensor(0.25), scales) if not fmt.tensor_scale else (torch.tensor(0.25),):
            assert kernels.agree(x, fmt, amax=amax) == ["quantise"]


def test_blocks_of_odd_sizes_are_for_torchs_operations(kernels):
    for fmt, shape in ((BlockFormat(E4M3, FP32, 3), (4, 24)), (BlockFormat(E4M3, FP32, (3, 8)), (6, 24))):
        assert kernels.agree(wild(shape, 0), fmt) == []


def test_without_a_compiler_torchs_operations_do_it(kernels, monkeypatch, caplog):
    def none(source, name):
        raise OSError("no C compiler")

    monkeypatch.setattr(triton, "jitted", none)
    for cached in (triton._looking, triton._works_on):
        cached.cache_clear()
    with caplog.at_level("INFO", logger="mezzo"):
        for _ in range(2):
            assert kernels.agree(wild((4, 64), 0), MXFP4) == []
    assert caplog.text.count("quantised with torch's operations: no C compiler") == 1


def on_sm_90(folder, fmt, dtype, *, turned):
    """What the kernels of a large matrix are compiled to, for an H100."""
    x = torch.empty(4096, 4096, dtype=dtype, device="meta")
    launches, moved = [], x.t() if turned else x
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_works_on", lambda device: True)
        patch.setattr(triton.Launch, "__call__", lambda self, *given: launches.append((self, given)))
        patch.setattr(Tensor, "data_ptr", lambda self: 0)
        key = torch.empty((), dtype=torch.int64, device="meta")
        triton.encoded(moved, fmt, convert._block(fmt, 2, 1, 4096), key, None)
    names = {torch.float32: "*fp32", torch.int16: "*i16", torch.int32: "*i32", torch.uint8: "*u8"}
    for launch, (_, _, *given) in launches:
        kinds = ["i32" if isinstance(argument, int) else names[argument.dtype] for argument in given]
        arguments = dict(zip(launch.kernel.arg_names, kinds, strict=False))
        yield facts(launch.kernel, arguments, 90, folder, launch.options, **launch.constants)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler for Linux")
@pytest.mark.parametrize("fmt", [TENSORWISE_E4M3, pytest.param(NVFP4, marks=pytest.mark.slow), ROWWISE_E4M3], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_an_h100_gets_ieee_arithmetic_without_spills_that_moves_vectors(fmt, turned, monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(os.environ["XDG_CACHE_HOME"], "mezzo", "triton")))
    for binary in on_sm_90(tmp_path, fmt, torch.bfloat16, turned=turned):
        assert binary.stack == 0
        assert binary.registers <= 128  # two programs of 256 threads on a multiprocessor
        assert {*binary.loads} <= {32, 128}  # elements, and beside them numbers
        assert binary.loads[128] >= 2
        assert not any(instruction in binary.ptx for instruction in ("fma.rn", "mad.f", "approx", ".ftz", "div.full"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_a_graph_quantises_what_is_there_when_it_is_replayed_and_nothing_waits(fmt, computing):
    x, key = wild((64, 64), 4).bfloat16().cuda(), torch.tensor(17, device="cuda")
    other = wild((64, 64), 5).bfloat16().cuda()
    quantized(x, fmt, key=key)
    with computing.unread():
        expected = quantized(other, fmt, key=key + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = quantized(x, fmt, key=key)
    x.copy_(other)
    key += 1
    graph.replay()
    for mine, theirs in ((result.values, expected.values), (result.scales, expected.scales)):
        assert torch.equal(bits(mine), bits(theirs))
