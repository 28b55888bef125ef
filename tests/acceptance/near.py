"""Numbers with what rounding may have done to them: tolerances that follow from units in the last place.

A reference in float64 knows the exact result of a formula; a machine that computes it in a narrower format rounds after
each operation, in an order of its own. :class:`Near` carries both through the same formula: the value, and how far a
computation in ``dtype`` may be from it.
"""

import numpy as np

#: Unit roundoff (half a unit in the last place, relative) and smallest subnormal of each format.
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
LARGEST = {"float32": (2 - 2.0**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
#: Other spellings of the same formula (torch's ``lerp``, a fused multiply-add) round at most so many times as often.
SPELLINGS = 4


def spacing(values, dtype):
    """The distance between neighbours of a format, at values."""
    size = np.maximum(np.abs(values), TINY[dtype])
    return np.maximum(2.0 ** np.floor(np.log2(size)) * 2 * UNIT[dtype], TINY[dtype])


def rounded(values, dtype, *, away=False):
    """The nearest values of a format, ties to even or away from zero; what is too large becomes infinite."""
    values = np.asarray(values, dtype=np.float64)
    finite = np.where(np.isfinite(values), values, 0.0)
    unit = spacing(finite, dtype)
    scaled = finite / unit
    nearest = (np.trunc(scaled + np.copysign(0.5, scaled)) if away else np.rint(scaled)) * unit
    nearest = np.where(np.abs(nearest) > LARGEST[dtype], np.copysign(np.inf, nearest), nearest)
    return np.where(np.isfinite(values), nearest, values)


class Near:
    """A float64 value and a bound of the distance of what a format computes.

    Args:
        value: The exact value.
        error: How far the computed one may be off.
        dtype: The format that computes.
    """

    def __init__(self, value, error=0.0, dtype="float32"):
        self.value = np.asarray(value, dtype=np.float64)
        self.error = np.broadcast_to(np.asarray(error, dtype=np.float64), self.value.shape)
        self.dtype = dtype

    def _made(self, value, error):
        return Near(value, error + SPELLINGS * (UNIT[self.dtype] * np.abs(value) + TINY[self.dtype]), self.dtype)

    def _other(self, other):
        # A Python number reaches kernels in FP32 or wider, whatever they compute in.
        return other if isinstance(other, Near) else Near(other, np.abs(other) * UNIT["float32"], self.dtype)

    def __add__(self, other):
        other = self._other(other)
        return self._made(self.value + other.value, self.error + other.error)

    def __sub__(self, other):
        return self + self._other(other) * -1.0

    def __mul__(self, other):
        other = self._other(other)
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return self._made(self.value * other.value, error)

    def __truediv__(self, other):
        other = self._other(other)
        quotient = self.value / other.value
        least = np.maximum(np.abs(other.value) - other.error, TINY[self.dtype])
        return self._made(quotient, (self.error + np.abs(quotient) * other.error) / least)

    def sqrt(self):
        root = np.sqrt(self.value)
        return self._made(root, np.sqrt(self.value + self.error) - np.sqrt(np.maximum(self.value - self.error, 0.0)))

    def sign(self):
        """The sign, which is anything where rounding may have decided it."""
        return Near(np.sign(self.value), np.where(np.abs(self.value) <= self.error, 2.0, 0.0), self.dtype)

    def stored(self, dtype, *, spacings=0.5):
        """As another format stores it, at most so many of its spacings away."""
        return Near(self.value, self.error + spacings * spacing(np.abs(self.value) + self.error, dtype), self.dtype)

    def coded(self, *, is_signed):
        """As one of two neighbours among codes: a sixteenth of it away, and of what codes next to zero stand for."""
        sizes = np.abs(self.value) + self.error
        groups = np.pad(sizes.reshape(-1), (0, -sizes.size % 32)).reshape(-1, 32)
        scales = np.repeat(groups.max(1) * (1 + 2.0**-7), 32)[: sizes.size].reshape(sizes.shape)
        return Near(self.value, self.error + (sizes + scales * 2.0 ** -(7 if is_signed else 15)) / 16, self.dtype)

    def holds(self, values):
        """Whether each of the computed values may come from here."""
        return np.abs(values - self.value) <= self.error
