"""Numbers and formats as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["byte_text", "counted", "format_text", "share_text"]

#: Formats by dtype name, short enough for tables.
_FORMATS: Final[Mapping[str, str]] = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
}


def byte_text(count: int) -> str:
    """Write a number of bytes with its unit.

    Example:
        >>> byte_text(864), byte_text(3 * 2**20)
        ('864 B', '3 MiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def share_text(part: float, whole: float) -> str:
    """Write a share in per cent; what is not all is never rounded to all, nor what is something to nothing.

    Example:
        >>> share_text(1, 3), share_text(3, 3), share_text(999_999, 1_000_000), share_text(1, 1_000_000)
        ('33.3 %', '100 %', 'over 99.9 %', 'under 0.1 %')
    """
    share = 100 * part / whole if whole else 0.0
    if 99.9 < share < 100:
        return "over 99.9 %"
    return "under 0.1 %" if 0 < share < 0.1 else f"{share:.3g} %"


def counted(count: int, noun: str) -> str:
    """Write a number of things.

    Example:
        >>> counted(1, "product"), counted(1200, "cast")
        ('1 product', '1,200 casts')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_text(dtypes: Iterable[str]) -> str:
    """Write formats, short.

    Example:
        >>> format_text(["float16", "float32"]), format_text([])
        ('FP16+FP32', '–')
    """
    return "+".join(_FORMATS.get(name, name) for name in dtypes) or "–"
