"""Block formats in Triton, by :mod:`mezzo.formats.rules`: one launch, or two where the whole tensor has a scale.

A kernel reads a tensor as it lies, rows or columns side by side, and writes codes with ``dim`` last.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mezzo.emit.triton import function
from mezzo.formats import rules
from mezzo.formats.blocks import BlockFormat
from mezzo.formats.cpp import layout
from mezzo.formats.definitions import E2M1, FP32
from mezzo.launched import Launch, has_triton, jitted, on

logger = logging.getLogger(__name__)

#: Elements of a program, and the fewest side by side in memory that are read at once: 128 bytes in 16 bits.
TILE: Final = 1 << 12
SIDE: Final = 1 << 6
#: Elements of the largest block that a program holds at a time.
WIDEST: Final = 1 << 9
#: How many programs look for the largest magnitude of a tensor; each that quantises reads what all found.
LOOKERS: Final = 1 << 9
#: Places are counted in 32 bits.
MOST: Final = (1 << 31) - (1 << 16)
#: Arithmetic as in torch's own operations.
_OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False, "enable_reflect_ftz": False}


def encoded(
    moved: Tensor, fmt: BlockFormat, block: tuple[int, int], key: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Quantise a tensor on a GPU: see :func:`mezzo.formats.cpp.encoded`."""
    tile = _tile(fmt, block, moved.shape[-1])
    if tile is None or moved.numel() >= MOST or not _works_on(moved.device):
        return None
    lie = _lie(moved)
    if lie is None:  # with gaps, or in an order of its own
        moved = moved.contiguous()
        lie = _Lie(1, 0, moved.numel() // moved.shape[-1], moved.shape[-1], moved.shape[-1], is_turned=False)
    lines, width = block
    *before, last = moved.shape
    count, device, is_whole = moved.numel(), moved.device, fmt.block is None
    packed = fmt.element == E2M1
    codes = torch.empty((*before, last // 2 if packed else last), dtype=torch.uint8, device=device)
    scales = torch.empty(
        () if is_whole else (count // (lines * width),),
        dtype=torch.float32 if fmt.scale == FP32 else torch.uint8,
        device=device,
    )
    tensor_scale = torch.empty((), dtype=torch.float32, device=device) if fmt.tensor_scale else None
    if not lie.is_turned and lines == 1 and not tile.is_walked:  # one line, so that short ones are as fast as long ones
        lie = _Lie(1, 0, 1, count, count, is_turned=False)
    bits = moved.view(torch.int16) if moved.dtype == torch.bfloat16 else moved
    tops, many, given = codes, 0, 0
    if amax is not None:
        amax, given = amax.contiguous(), 1 + int(amax.dim() > 0)
    with on(device):
        if amax is None and (is_whole or fmt.tensor_scale):
            many = min(LOOKERS, -(-count // TILE))
            tops = torch.empty(many, dtype=torch.int32, device=device)
            along = _unit(moved, _Lie(1, 0, 1, count, count, is_turned=False))
            _looking(moved.dtype, fmt.tensor_scale, along)(many, device, bits, tops, count // along)
        high, wide = tile.sizes(lie)
        bands, segments = -(-lie.inner // high), 1 if tile.is_walked else -(-lie.last // wide)
        unit = _unit(moved, lie)
        kernel = _quantising(fmt, block if tile.is_blocked else (1, 0), moved.dtype, _Case(
            high=high, wide=wide, turned=lie.is_turned, walked=tile.is_walked, random=key is not None, given=given,
            unit=unit,
        ))  # fmt: skip
        kernel(
            lie.outer * bands * segments,
            device,
            bits,
            tops,
            codes if amax is None else amax,
            codes if key is None else key.reshape(1).view(torch.int32),
            codes,
            scales,
            scales if tensor_scale is None else tensor_scale,
            lie.inner // unit if lie.is_turned else lie.inner,
            lie.last // unit,
            lie.outer_stride // unit,
            lie.stride // unit,
            many,
        )
    return codes, scales, tensor_scale


# What a program does ----------------------------------------------------------------------------------------


class _Lie(NamedTuple):
    """Where elements lie: slabs of lines of ``last`` elements, in which either these or lines are side by side."""

    outer: int
    outer_stride: int
    inner: int
    last: int
    stride: int  # of what is not side by side
    is_turned: bool


class _Tile(NamedTuple):
    """How a tensor is cut for programs.

    Attributes:
        lines: What a tile's height is a multiple of.
        width: What its width is a multiple of.
        is_walked: Whether a program walks along its lines, twice: for the scale, and for the codes.
        is_blocked: Whether it has several scales.
    """

    lines: int
    width: int
    is_walked: bool
    is_blocked: bool

    def sizes(self, lie: _Lie) -> tuple[int, int]:
        """Return how many lines, and how many of their elements, a program holds at a time."""
        if self.is_walked:
            wide = TILE // 16 if lie.is_turned else min(TILE // 2, _power(lie.last))
            return 16 if lie.is_turned else max(1, TILE // 2 // wide), wide
        if not lie.is_turned and self.lines == 1:
            wide = max(self.width, min(TILE, _power(lie.last)))
            return max(1, TILE // wide), wide
        high = max(self.lines, min(SIDE if lie.is_turned else SIDE // 2, TILE // self.width))
        return high, max(self.width, TILE // high)


class _Case(NamedTuple):
    """What a kernel is compiled for, besides a format and a dtype."""

    high: int
    wide: int
    turned: bool
    walked: bool
    random: bool
    given: int
    unit: int


def _power(size: int) -> int:
    """Return the least power of two that is not less, sixteen at least."""
    return max(16, 1 << (size - 1).bit_length())


def _tile(fmt: BlockFormat, block: tuple[int, int], last: int) -> _Tile | None:
    """Return how a tensor is cut, or None where blocks are of other sizes than powers of two, or larger than a tile."""
    if fmt.block is None:
        return _Tile(1, 1, is_walked=False, is_blocked=False)
    lines, width = block
    if lines == 1 and (fmt.block == -1 or (width == last and width > WIDEST)):
        return _Tile(1, 1, is_walked=True, is_blocked=False)
    is_even = all(size & (size - 1) == 0 for size in block)
    return _Tile(lines, width, is_walked=False, is_blocked=True) if is_even and lines * width <= WIDEST else None


def _lie(moved: Tensor) -> _Lie | None:
    """Return how a tensor without gaps lies, or None where neither its lines nor its columns are side by side."""
    strides = layout(moved)
    if strides is None:
        return None
    outer, outer_stride, inner, inner_stride, last, step = strides
    expected = 1
    for stride, size in sorted(
        pair for pair in ((outer_stride, outer), (inner_stride, inner), (step, last)) if pair[1] > 1
    ):
        if stride != expected:
            return None
        expected *= size
    if last == 1 or step == 1:
        return _Lie(outer, outer_stride, inner, last, inner_stride, is_turned=False)
    return _Lie(outer, outer_stride, inner, last, step, is_turned=True) if inner == 1 or inner_stride == 1 else None


def _unit(moved: Tensor, lie: _Lie) -> int:
    """Return 16 where all that a thread may move at once stands at multiples of 16 elements, else 1."""
    along = (lie.inner,) if lie.is_turned else ()
    numbers = (moved.data_ptr(), lie.last, lie.outer_stride, lie.stride, *along)
    return 16 if all(number % 16 == 0 for number in numbers) else 1


@cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton can launch a kernel on a device: it builds what launches them with a C compiler."""
    if device.type == "cuda" and not has_triton():
        return False
    try:
        one = torch.ones(1, dtype=torch.float32, device=device)
        with on(device):
            _looking(torch.float32, False, 1)(1, device, one, one.view(torch.int32), 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's, a linker's, a file's
        logger.info("tensors on %s are quantised with torch's operations: %s", device, error)
        return False
    return True


@cache
def _looking(dtype: torch.dtype, is_finite: bool, unit: int) -> Launch:
    constants = {"UNIT": unit, "BITS": dtype == torch.bfloat16, "FINITE": is_finite, "BLOCK": TILE}
    return Launch(jitted(_READING, "largest"), _OPTIONS, **constants)


@cache
def _quantising(fmt: BlockFormat, block: tuple[int, int], dtype: torch.dtype, case: _Case) -> Launch:
    constants: dict[str, Any] = {
        "BITS": dtype == torch.bfloat16,
        "PACKED": fmt.element == E2M1,
        "WHOLE": fmt.block is None,
        "TENSOR_SCALE": fmt.tensor_scale,
        "H": block[0],
        "W": block[1],
        **{name.upper(): value for name, value in case._asdict().items()},
        "LOOKERS": LOOKERS,
    }
    return Launch(jitted(_source(fmt, is_random=case.random), "quantise"), _OPTIONS, **constants)


@cache
def _source(fmt: BlockFormat, *, is_random: bool) -> str:
    """Write the kernel ``quantise``: the rules' arithmetic, and the walk."""
    functions = (function(*part) for part in rules.quantising(fmt, is_random=is_random))
    return "".join((_READING, *functions, _QUANTISING))


_READING: Final = f'''\
@triton.jit
def sized(pattern):
    return pattern & {rules.SIZE}


@triton.jit
def read(x, at, mask, BITS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the bits of FP32 values, zeros beyond the mask."""
    value = tl.load(tl.multiple_of(x + at, (FIRST, SECOND)), mask=mask, other=0)
    return value.to(tl.int32) << 16 if BITS else value.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["x", "tops"])
def largest(x, tops, count, UNIT: tl.constexpr, BITS: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest magnitude of a part of a tensor, or of its finite elements: its bits."""
    top = tl.full((1, BLOCK), 0, tl.int32)
    count = count * UNIT
    first = tl.program_id(0) * BLOCK
    while first < count:
        places = first + tl.arange(0, BLOCK)[None, :]
        size = sized(read(x, places, places < count, BITS, 1, UNIT))
        top = tl.maximum(top, tl.where(size < {rules.EXPONENT}, size, 0) if FINITE else size)
        first += tl.num_programs(0) * BLOCK
    tl.store(tops + tl.program_id(0), tl.max(tl.max(top, axis=1), axis=0))


'''

_QUANTISING: Final = '''\
@triton.jit
def written(
    codes, pattern, by, lines, first, last, mask, key, slab_lines,
    PACKED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, RANDOM: tl.constexpr, UNIT: tl.constexpr, inner,
):
    """Write the codes of elements, the first of which has a place in each line."""
    start = (slab_lines + lines) * last
    drawn = 0
    if RANDOM:
        drawn = noise(start + (first + tl.arange(0, WIDE)[None, :]), key)
    code = code_of(pattern, by, drawn)
    if PACKED:
        low, high = tl.split(tl.reshape(code, (HIGH, WIDE // 2, 2)))
        columns = first // 2 + tl.arange(0, WIDE // 2)[None, :]
        place = tl.multiple_of(codes + (start // 2 + columns), (1, UNIT // 2 if UNIT > 1 else 1))
        tl.store(place, (low | (high << 4)).to(tl.uint8), mask=(lines < inner) & (columns < last // 2))
    else:
        place = tl.multiple_of(codes + (start + first + tl.arange(0, WIDE)[None, :]), (1, UNIT))
        tl.store(place, code.to(tl.uint8), mask=mask)


@triton.jit(
    do_not_specialize=["inner", "last", "far", "stride", "many"],
    do_not_specialize_on_alignment=["x", "tops", "amax", "key", "codes", "scales", "tensor_scale"],
)
def quantise(
    x, tops, amax, key, codes, scales, tensor_scale, inner, last, far, stride, many,
    BITS: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr, TENSOR_SCALE: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TURNED: tl.constexpr, WALKED: tl.constexpr,
    RANDOM: tl.constexpr, GIVEN: tl.constexpr, UNIT: tl.constexpr, LOOKERS: tl.constexpr,
):
    """Quantise a tile, or some whole lines."""
    # Sizes came in units, so that the compiler knows what they are multiples of.
    inner = inner * UNIT if TURNED else inner
    last, far, stride = last * UNIT, far * UNIT, stride * UNIT
    drawn = tl.load(key) if RANDOM else 0
    segments = 1 if WALKED else (last + WIDE - 1) // WIDE
    bands = (inner + HIGH - 1) // HIGH
    program = tl.program_id(0)
    first, band = program % segments * WIDE, program // segments
    slab = band // bands
    lines = band % bands * HIGH + tl.arange(0, HIGH)[:, None]
    columns = first + tl.arange(0, WIDE)[None, :]
    x += slab * far
    FIRST: tl.constexpr = UNIT if TURNED else 1
    SECOND: tl.constexpr = 1 if TURNED else UNIT
    tensor = tl.full((), 1.0, tl.float32)
    code_type = scales.dtype.element_ty
    if WHOLE or TENSOR_SCALE:
        if GIVEN:
            top = sized(tl.load(amax).to(tl.int32, bitcast=True))
        else:
            looked = tl.arange(0, LOOKERS)
            top = tl.max(tl.load(tops + looked, mask=looked < many, other=0), axis=0)
        if WHOLE:
            code, by = scale_of(top, tensor)
            if program == 0:
                tl.store(scales, code.to(code_type))
        else:
            tensor = tensor_scale_of(top)
            if program == 0:
                tl.store(tensor_scale, tensor)
    if WALKED:
        if GIVEN == 0:
            tops_seen = tl.full((HIGH, WIDE), 0, tl.int32)
            start = 0
            while start < last:
                at = lines + (start + columns) * stride if TURNED else lines * stride + (start + columns)
                mask = (lines < inner) & (start + columns < last)
                tops_seen = tl.maximum(tops_seen, sized(read(x, at, mask, BITS, FIRST, SECOND)))
                start += WIDE
            tops_of = tl.max(tops_seen, axis=1)[:, None]
        else:
            at = amax + (slab * inner + lines if GIVEN == 2 else lines * 0)
            tops_of = sized(tl.load(at, mask=lines < inner, other=0.0).to(tl.int32, bitcast=True))
        code, by = scale_of(tops_of, tensor)
        tl.store(scales + (slab * inner + lines), code.to(code_type), mask=lines < inner)
        start = 0
        while start < last:
            at = lines + (start + columns) * stride if TURNED else lines * stride + (start + columns)
            mask = (lines < inner) & (start + columns < last)
            written(
                codes, read(x, at, mask, BITS, FIRST, SECOND), by, lines, start, last, mask, drawn, slab * inner,
                PACKED, HIGH, WIDE, RANDOM, UNIT, inner,
            )
            start += WIDE
    else:
        mask = (lines < inner) & (columns < last)
        pattern = read(x, lines + columns * stride if TURNED else lines * stride + columns, mask, BITS, FIRST, SECOND)
        if not WHOLE:
            down, across = HIGH // H, WIDE // W
            rows = band % bands * down + tl.arange(0, HIGH // H)[:, None]
            groups = first // W + tl.arange(0, WIDE // W)[None, :]
            place = (slab * (inner // H) + rows) * (last // W) + groups
            inside = (rows < inner // H) & (groups < last // W)
            if GIVEN and not TENSOR_SCALE:
                at = amax + (place if GIVEN == 2 else place * 0)
                tops_of = sized(tl.load(at, mask=inside, other=0.0).to(tl.int32, bitcast=True))
            elif H == 1:
                tops_of = tl.max(tl.reshape(sized(pattern), (HIGH, WIDE // W, W)), axis=2)
            else:
                tops_of = tl.max(tl.reshape(sized(pattern), (HIGH // H, H, WIDE // W, W)), axis=3)
                tops_of = tl.max(tops_of, axis=1)
            code, by_group = scale_of(tops_of, tensor)
            tl.store(scales + place, code.to(code_type), mask=inside)
            by = tl.reshape(by_group, (HIGH // H, 1, WIDE // W, 1))
            by = tl.reshape(tl.broadcast_to(by, (HIGH // H, H, WIDE // W, W)), (HIGH, WIDE))
        written(
            codes, pattern, by, lines, first, last, mask, drawn, slab * inner,
            PACKED, HIGH, WIDE, RANDOM, UNIT, inner,
        )
'''
