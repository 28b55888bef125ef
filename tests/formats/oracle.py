"""Block formats in exact Python: fractions, patterns read off the specifications' tables, and each FP32 rounding by
its definition. It shares no code with ``mezzo.formats``."""

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

LARGEST = {"E4M3": Fraction(448), "E5M2": Fraction(57344), "E2M1": Fraction(6)}
#: Exponent bits, mantissa bits, bias.
WIDTHS = {"E4M3": (4, 3, 7), "E5M2": (5, 2, 15), "E2M1": (2, 1, 1)}
NOT_A_NUMBER = {"E4M3": 0x7F, "E5M2": 0x7E, "E2M1": 0x7}


def meaning(element: str, code: int) -> Fraction | None:
    """What a code stands for; None for infinities and NaN."""
    exponent_bits, mantissa_bits, bias = WIDTHS[element]
    sign, rest = divmod(code, 1 << exponent_bits + mantissa_bits)
    exponent, mantissa = divmod(rest, 1 << mantissa_bits)
    part = Fraction(mantissa, 1 << mantissa_bits)
    size = (1 + part) * Fraction(2) ** (exponent - bias) if exponent else part * Fraction(2) ** (1 - bias)
    return None if size > LARGEST[element] else -size if sign else size


TABLES = {
    element: [size for code in range(1 << e + m) if (size := meaning(element, code)) is not None]
    for element, (e, m, _) in WIDTHS.items()
}


def log2_floor(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1


def fp32(value: Fraction) -> Fraction:
    """The nearest FP32 number, ties to even; none of what is rounded here is beyond the largest."""
    if value == 0:
        return value
    unit = Fraction(2) ** (max(log2_floor(value), -126) - 23)
    return round(value / unit) * unit


def noise(index: int, key: int) -> int:
    """The published mixer "lowbias32", of index + key."""
    mixed = (index + key) % 2**32
    mixed = (mixed ^ mixed >> 16) * 0x7FEB352D % 2**32
    mixed = (mixed ^ mixed >> 15) * 0x846CA68B % 2**32
    return mixed ^ mixed >> 16


def rounded(size: Fraction, element: str, drawn: int | None) -> int:
    """The code of a magnitude up to the largest: of two neighbours the nearer or even one, or by the bits drawn."""
    table = TABLES[element]
    above = next(code for code, value in enumerate(table) if value >= size)
    if table[above] == size:
        return above
    below, share = above - 1, (size - table[above - 1]) / (table[above] - table[above - 1])
    if drawn is None:
        return above if share > Fraction(1, 2) or (share == Fraction(1, 2) and above % 2 == 0) else below
    kept = WIDTHS[element][1]
    bits = 23 - kept if below >> kept else 30 - kept  # normal, or subnormal
    return above if math.floor(share * 2**bits) + drawn % 2**bits >= 2**bits else below


@dataclass(frozen=True)
class Recipe:
    """A block format by words."""

    element: str
    scale: str
    tensor_scale: bool = False
    floored: bool = False


def tensor_scale(values: list[float], element: str) -> Fraction:
    sizes = [abs(Fraction(value)) for value in values if math.isfinite(value)]
    return fp32(max([*sizes, Fraction(2) ** -100]) / (LARGEST[element] * 448))


def scaled(values: list[float], recipe: Recipe, shared: Fraction, amax: float | None) -> tuple[int | float, object]:
    """The scale of a block, as it is stored, and what its elements are multiplied by, None if that is NaN."""
    given = values if amax is None else [amax]
    if not all(map(math.isfinite, given)):
        return {"E8M0": 255, "FP32": math.nan, "E4M3": 0x7F}[recipe.scale], None
    top, most = max(abs(Fraction(value)) for value in given), LARGEST[recipe.element]
    if recipe.scale == "E8M0":
        exponent = -127 if top == 0 else max(-127, min(127, log2_floor(top) - log2_floor(most)))
        return exponent + 127, Fraction(2) ** -exponent
    if recipe.scale == "FP32":
        multiplier = fp32(most / max(top, Fraction(2) ** -100))
        if recipe.floored:
            multiplier = Fraction(2) ** log2_floor(multiplier)
        return float(fp32(1 / multiplier)), multiplier
    code = rounded(min(fp32(fp32(top / most) / shared), Fraction(448)), "E4M3", None)
    size = meaning("E4M3", code)
    return code, fp32(1 / fp32(size * shared)) if size else Fraction(0)


def element(value: float, multiplier: Fraction | None, recipe: Recipe, drawn: int | None) -> int:
    """The code of an element."""
    if multiplier is None or not math.isfinite(value):
        return NOT_A_NUMBER[recipe.element]
    size = min(fp32(abs(Fraction(value)) * multiplier), LARGEST[recipe.element])
    sign = math.copysign(1.0, value) < 0
    return rounded(size, recipe.element, drawn) | sign << sum(WIDTHS[recipe.element][:2])


def quantised(groups: list[list[tuple[int, float]]], recipe: Recipe, key: int | None = None, amax: float | None = None):
    """Quantise groups of (place, value): codes by place, scales in the order of the groups, the tensor's scale."""
    everything = [value for group in groups for _, value in group]
    shared = (
        tensor_scale(everything if amax is None else [amax], recipe.element) if recipe.tensor_scale else Fraction(1)
    )
    codes, scales = {}, []
    for group in groups:
        own = None if recipe.tensor_scale else amax
        scale, multiplier = scaled([value for _, value in group], recipe, shared, own)
        scales.append(scale)
        for position, value in group:
            codes[position] = element(value, multiplier, recipe, None if key is None else noise(position, key))
    return [codes[position] for position in sorted(codes)], scales, shared


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]
