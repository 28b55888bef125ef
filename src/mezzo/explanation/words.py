"""Numbers and formats as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

#: Formats by dtype name, short enough for tables.
_FORMATS: Final[Mapping[str, str]] = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
}


def byte_text(num_bytes: int) -> str:
    """Write a size with three digits and a binary unit.

    Example:
        >>> byte_text(512), byte_text(1536), byte_text(10_485_760)
        ('512 B', '1.50 KiB', '10.0 MiB')
    """
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{num_bytes} B"
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


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


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Write a number of things; their plural only where it has more than an s.

    Example:
        >>> counted(1, "product"), counted(1200, "cast"), counted(2, "policy", "policies")
        ('1 product', '1,200 casts', '2 policies')
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def format_text(dtypes: Iterable[str]) -> str:
    """Write formats, short.

    Example:
        >>> format_text(["float16", "float32"]), format_text([])
        ('FP16+FP32', '–')
    """
    return "+".join(_FORMATS.get(name, name) for name in dtypes) or "–"


def scale_text(scale: float | None) -> str:
    """Write a loss scale: powers of two as such, since that is what they all should be.

    Example:
        >>> scale_text(65536.0), scale_text(1.0), scale_text(1000.0), scale_text(None)
        ('2^16', '1', '1000', '–')
    """
    if scale is None:
        return "–"
    scale = float(scale)  # which may be one of the texts for what JSON lacks
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and scale != 1 else f"{scale:.6g}"
