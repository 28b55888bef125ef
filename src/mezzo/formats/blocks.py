"""Block formats as values: elements of at most eight bits that share scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import torch

from mezzo.errors import PolicyError, nearest, shown
from mezzo.formats.definitions import E2M1, E4M3, E5M2, E8M0, FP32, Format, by_name

ELEMENTS: Final = (E4M3, E5M2, E2M1)
SCALES: Final = (E8M0, E4M3, FP32)

Block: TypeAlias = int | tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Elements that share scales: each stands for element × scale, times one more scale of the whole tensor in some.

    ``str`` writes its name, which :func:`block_format` reads: a name such as ``nvfp4``, else
    ``element/scale/block`` with block ``tensor``, ``row``, ``32`` or ``16x16``, and ``/tensor_scale`` or ``/floored``.

    Args:
        element: E4M3, E5M2 or E2M1.
        scale: E8M0, E4M3 or FP32.
        block: How many neighbours along ``dim`` share a scale; −1 is all of them, a row; a pair counts neighbours along
            the last two dimensions; None is the whole tensor.
        tensor_scale: Whether one FP32 scale of the whole tensor comes on top. It puts the largest block scale where
            the scale's format ends; E4M3 scales alone need it.
        floored: Whether what elements are multiplied by, largest element / amax, is floored to a power of two. FP32
            scales only; E8M0's are powers of two by themselves.

    Raises:
        PolicyError: Formats, a block or flags that do not go together.

    Example:
        >>> NVFP4
        BlockFormat('nvfp4')
        >>> str(BlockFormat(E4M3, FP32, 128)), block_format("e4m3/fp32/128") == BlockFormat(E4M3, FP32, 128)
        ('float8_e4m3fn/float32/128', True)

    References:
        OCP Microscaling Formats (MX) Specification 1.0. NVIDIA, Pretraining Large Language Models with NVFP4,
        https://arxiv.org/abs/2509.25149.
    """

    element: Format
    scale: Format
    block: Block
    tensor_scale: bool = False
    floored: bool = False

    def __post_init__(self) -> None:
        what = "these formats make no block format"
        if self.element not in ELEMENTS or self.scale not in SCALES:
            raise PolicyError(
                what,
                where=f"element {shown(self.element)}, scale {shown(self.scale)}".replace("\n", " "),
                why="elements are E4M3, E5M2 or E2M1, scales E8M0, E4M3 or FP32",
                write="BlockFormat(E4M3, E8M0, 32)",
            )
        if not _is_block(self.block):
            raise PolicyError(
                f"{shown(self.block)} is no block",
                why="a block is a number of neighbours, −1 for a row, a pair of numbers, or None for the whole tensor",
                write="BlockFormat(E4M3, E8M0, 32), or block=(16, 16), block=None",
            )
        if self.tensor_scale and (self.scale != E4M3 or self.block is None):
            raise PolicyError(
                "a scale of the tensor beside these scales",
                where=f"scale {self.scale.name}, block {self.block}",
                why="E8M0 and FP32 scales reach every tensor by themselves; E4M3 scales of blocks do not",
                write=f"BlockFormat({self.element.name}, E4M3, 16, tensor_scale=True)",
            )
        if self.floored and self.scale != FP32:
            raise PolicyError(
                f"a {self.scale.name} scale cannot be floored",
                why="only FP32 scales are; E8M0's are powers of two by themselves",
                write="BlockFormat(E4M3, FP32, -1, floored=True)",
            )
        if self.element == E2M1 and any(size % 2 for size in _sizes(self.block)):
            raise PolicyError(
                f"a block of {self.block} elements of four bits",
                why="two of them share a byte, which must not lie in two blocks",
                write="BlockFormat(E2M1, E4M3, 16, tensor_scale=True)",
            )

    def __str__(self) -> str:
        return next((name for name, entry in BLOCK_FORMATS.items() if _same(entry, self)), _text(self))

    def __repr__(self) -> str:
        return f"BlockFormat({str(self)!r})"

    @property
    def name(self) -> str:
        """Its name, as ``str`` writes it."""
        return str(self)

    @property
    def bits_per_element(self) -> float:
        """Bits of an element and of its share of a block's scale; scales of rows and tensors are not counted.

        Example:
            >>> NVFP4.bits_per_element, MXFP8_E4M3.bits_per_element
            (4.5, 8.25)
        """
        sizes = [size for size in _sizes(self.block) if size > 0]
        shared = 1
        for size in sizes:
            shared *= size
        return self.element.num_bits + (self.scale.num_bits / shared if sizes else 0)


def _is_block(block: object) -> bool:
    if isinstance(block, tuple):
        return len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    return block is None or (type(block) is int and (block > 0 or block == -1))


def _sizes(block: Block) -> tuple[int, ...]:
    """The numbers of neighbours that a block counts."""
    if isinstance(block, tuple):
        return block
    return () if block is None or block == -1 else (block,)


def _same(left: BlockFormat, right: BlockFormat) -> bool:
    return left is right or left == right


def _text(fmt: BlockFormat) -> str:
    sizes = "x".join(map(str, _sizes(fmt.block)))
    block = sizes or ("tensor" if fmt.block is None else "row")
    flags = [flag for flag in ("tensor_scale", "floored") if getattr(fmt, flag)]
    return "/".join([fmt.element.name, fmt.scale.name, block, *flags])


MXFP8_E4M3 = BlockFormat(E4M3, E8M0, 32)  # OCP Microscaling 1.0, section 5
MXFP8_E5M2 = BlockFormat(E5M2, E8M0, 32)
MXFP4 = BlockFormat(E2M1, E8M0, 32)
NVFP4 = BlockFormat(E2M1, E4M3, 16, tensor_scale=True)  # arXiv 2509.25149, section 2
NVFP4_2D = BlockFormat(E2M1, E4M3, (16, 16), tensor_scale=True)  # the same, section 4.3: weights
TENSORWISE_E4M3 = BlockFormat(E4M3, FP32, None)  # torchao's and Transformer Engine's scaling of whole tensors
TENSORWISE_E5M2 = BlockFormat(E5M2, FP32, None)
ROWWISE_E4M3 = BlockFormat(E4M3, FP32, -1, floored=True)  # torchao's recipe "rowwise", round_scales_to_power_of_2
ROWWISE_E5M2 = BlockFormat(E5M2, FP32, -1, floored=True)

#: Every block format that has a name.
BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType({
    "mxfp8_e4m3": MXFP8_E4M3, "mxfp8_e5m2": MXFP8_E5M2, "mxfp4": MXFP4, "nvfp4": NVFP4, "nvfp4_2d": NVFP4_2D,
    "tensorwise_e4m3": TENSORWISE_E4M3, "tensorwise_e5m2": TENSORWISE_E5M2,
    "rowwise_e4m3": ROWWISE_E4M3, "rowwise_e5m2": ROWWISE_E5M2,
})  # fmt: skip

#: What else people write.
_ALIASES: Final[Mapping[str, BlockFormat]] = {"mxfp8": MXFP8_E4M3, "mxfp4_e2m1": MXFP4}


def block_format(name: str | torch.dtype | Format | BlockFormat) -> BlockFormat:
    """Find a block format by what a user calls it.

    Args:
        name: A name in any case (``"nvfp4"``), a text as ``str`` writes it, a ``BlockFormat``; or a plain format of at
            most eight bits, its name or its dtype, which gets one FP32 scale for the whole tensor.

    Raises:
        PolicyError: There is no such format; the message names the nearest one.

    Example:
        >>> block_format("MXFP4") is MXFP4, block_format("e4m3") == TENSORWISE_E4M3
        (True, True)
    """
    if isinstance(name, BlockFormat):
        return name
    word = name.strip().lower().replace("-", "_") if isinstance(name, str) else ""
    if named := BLOCK_FORMATS.get(word) or _ALIASES.get(word):
        return named
    if "/" in word:
        return _parsed(word)
    try:
        plain = by_name(name)
    except PolicyError:
        plain = None
    if plain not in ELEMENTS:
        why = nearest(word, (*BLOCK_FORMATS, *_ALIASES))
        if plain is not None:
            why = f"{plain.name} is no format of elements with a scale; those are E4M3, E5M2 and E2M1"
        raise PolicyError(
            f"unknown block format {shown(name)}",
            why=why,
            write='block_format("mxfp8_e4m3"), "nvfp4", "e4m3", or "e4m3/e8m0/32" for element, scale and block',
        )
    return BlockFormat(plain, FP32, None)


def _parsed(text: str) -> BlockFormat:
    element, scale, block, *flags = (*text.split("/"), "", "")[: max(3, text.count("/") + 1)]
    words: dict[str, Block] = {"tensor": None, "row": -1}
    sizes = block.split("x")
    is_known = block in words or (len(sizes) <= 2 and all(size.isdecimal() for size in sizes))
    if not is_known or {*flags} - {"tensor_scale", "floored"} or len({*flags}) < len(flags):
        raise PolicyError(
            f"unknown block format {shown(text)}",
            why="a block is tensor, row, a number or two with an x, and after it may come tensor_scale or floored",
            write='block_format("e4m3/e8m0/32"), "e2m1/e4m3/16x16/tensor_scale" or "e4m3/fp32/row/floored"',
        )
    numbers = [int(size) for size in sizes] if block not in words else []
    size = words[block] if block in words else (numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1]))
    return BlockFormat(by_name(element), by_name(scale), size, "tensor_scale" in flags, "floored" in flags)
