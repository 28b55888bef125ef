"""``mezzo formats``: the number formats, and the values by which each is known."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from mezzo.cli.app import app
from mezzo.cli.output import console_for, show_json
from mezzo.documents import jsonable
from mezzo.errors import PolicyError, nearest, shown
from mezzo.explanation.table import table
from mezzo.formats import FORMATS, Format, by_name
from mezzo.tensors import dtype_name

__all__ = ["Landmark", "described", "formats", "landmarks"]


@app.command("formats")
def formats(
    name: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(FORMATS)}, or a short name such as fp16.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Show the number formats side by side, or the telling bit patterns of one.

    [bold]mezzo formats[/bold]          range and precision of every format

    [bold]mezzo formats fp16[/bold]     its landmarks, from the smallest subnormal to infinity

    [bold]mezzo formats --json[/bold]   for a program to read
    """
    chosen = None if name is None else _named(name)
    if as_json:
        data = [described(entry) for entry in FORMATS.values()] if chosen is None else described(chosen, True)
        show_json(data)
        return
    console = console_for(160)
    if chosen is None:
        console.print(_overview(console.width))
        return
    widths = f"{chosen.exponent_bits} exponent bits (bias {chosen.bias}), {chosen.mantissa_bits} mantissa bits"
    console.print(f"{chosen.name}: 1 sign bit, {widths}", style="bold", highlight=False)
    console.print(_landmarks(chosen))


def _named(name: str) -> Format:
    try:
        return by_name(name)
    except PolicyError:  # which says what to write in Python
        why = nearest(name, FORMATS)
        raise PolicyError(
            f"unknown number format {shown(name)}", why=why, write="mezzo formats float16, or mezzo formats for all"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Landmark:
    """One telling bit pattern of a format.

    Args:
        bits: The pattern as an integer.
        value: The number it stands for.
        what: What is special about it.
    """

    bits: int
    value: float
    what: str


def landmarks(number_format: Format) -> list[Landmark]:
    """List the patterns by which a format is known, in the order of their bits.

    Example:
        >>> from mezzo.formats import FP16
        >>> landmarks(FP16)[1]
        Landmark(bits=1, value=5.960464477539063e-08, what='smallest subnormal')
    """
    encode, hidden, sign = number_format.encode, 1 << number_format.mantissa_bits, 1 << number_format.num_bits - 1
    one, largest, infinity = encode(1.0), encode(number_format.max), encode(math.inf)
    rows = [
        (0, "zero"),
        (1, "smallest subnormal"),
        (hidden - 1, "largest subnormal"),
        (hidden, "smallest normal"),
        (encode(1 / 3), "nearest to 1/3"),
        (one - 1, "largest below one"),
        (one, "one"),
        (one + 1, "smallest above one"),
        (largest, "largest"),
        *([(infinity, "+inf")] if number_format.has_inf else []),
        (encode(math.nan), "NaN"),
        (sign, "−0"),
        (encode(-2.0), "−2"),
        *([(sign | infinity, "−inf")] if number_format.has_inf else []),
    ]
    return [Landmark(bits=bits, value=number_format.decode(bits), what=what) for bits, what in rows]


def described(number_format: Format, with_landmarks: bool = False) -> dict[str, Any]:
    """Return a format as JSON can hold it.

    Args:
        number_format: The format.
        with_landmarks: Whether to add its telling bit patterns.

    Returns:
        Its fields under their own names; values that JSON lacks are the text ``inf``, ``-inf`` or ``nan``.

    Example:
        >>> from mezzo.formats import FP16
        >>> described(FP16)["max"], described(FP16)["dtype"]
        (65504.0, 'float16')
    """
    fields = dataclasses.asdict(number_format)
    fields |= {"dtype": number_format.dtype and dtype_name(number_format.dtype), "num_bits": number_format.num_bits}
    if with_landmarks:
        fields["landmarks"] = [_cells(number_format, mark) for mark in landmarks(number_format)]
    return fields


def _overview(width: int) -> Table:
    # Without padding every number has room in 80 columns; in fewer it is folded, and never cut.
    numbers = ("s/e/m", "bias", "max", "smallest normal", "smallest subnormal", "eps")
    rows = (
        (
            each.name,
            f"1/{each.exponent_bits}/{each.mantissa_bits}",
            str(each.bias),
            f"{each.max:.8g}",
            *map(_power, (each.smallest_normal, each.smallest_subnormal, each.eps)),
            "yes" if each.has_inf else "no, overflow is NaN",
        )
        for each in FORMATS.values()
    )
    stiff = ("format", "max") if width >= 80 else ()
    padding = (0, 0 if width < 100 else 1)
    return table(("format", *numbers, "infinity"), rows, right=numbers, stiff=stiff, padding=padding)


def _landmarks(number_format: Format) -> Table:
    marks = ((_cells(number_format, mark), mark) for mark in landmarks(number_format))
    rows = ((cells["bits"], cells["hex"], f"{mark.value:.8g}", mark.what) for cells, mark in marks)
    return table(("bits", "hex", "value", "what"), rows, right=("value",), stiff=("bits", "hex"))


def _cells(number_format: Format, mark: Landmark) -> dict[str, Any]:
    """Describe a pattern: its three fields, sign, exponent and mantissa; in hexadecimal; its value, and what it is."""
    digits = f"{mark.bits:0{number_format.num_bits}b}"
    mantissa = len(digits) - number_format.mantissa_bits
    return {
        "bits": f"{digits[0]} {digits[1:mantissa]} {digits[mantissa:]}",
        "hex": f"{mark.bits:0{-(-number_format.num_bits // 4)}x}",
        "value": jsonable(mark.value),
        "what": mark.what,
    }


def _power(value: float) -> str:
    """Write a power of two as one, with its decimal value."""
    return f"2^{math.frexp(value)[1] - 1} ≈ {value:.4g}"
