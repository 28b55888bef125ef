"""Where the values of a tensor lie on the scale of powers of two, and what a number format would make of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mezzo.errors import NumericsError, PolicyError, shown
from mezzo.formats import Coverage, Format, by_name
from mezzo.tensors import dtype_name
from mezzo.trace.observe import (
    BINS,
    COUNTABLE,
    FIRST,
    INFS,
    LARGEST,
    NANS,
    ROW,
    WIDTH,
    ZEROS,
    move_row,
    observe,
)


@dataclass(slots=True, eq=False, repr=False)
class ExponentHistogram:
    """How many values of a tensor lie in each binade, from 2^−149, float32's smallest number, to 2^127.

    Made by :func:`exponent_histogram`. The counts stay on the tensor's device until the first of them is read: that
    waits for the device once, and all later reads are free.

    Example:
        >>> import torch
        >>> histogram = exponent_histogram(torch.tensor([0.0, 1.0, 1.5, -2.0, 6e-8, float("inf")]))
        >>> histogram.count(0), histogram.count(1), histogram.zeros, histogram.infs, histogram.total
        (2, 1, 1, 1, 6)
        >>> histogram.max_abs
        2.0
        >>> histogram.coverage("float16").subnormal, histogram.coverage("float16", scale=2.0**15).subnormal
        (1, 0)
    """

    row: Tensor
    _numbers: list[int] | None = field(default=None, init=False)

    def __repr__(self) -> str:
        exponents = [exponent for exponent in range(FIRST, FIRST + BINS) if self.count(exponent)]
        binades = f"2^{exponents[0]} to 2^{exponents[-1]}, " if exponents else ""
        return (
            f"ExponentHistogram({self.total} values, {binades}max_abs={self.max_abs:.6g}, zeros={self.zeros}, "
            f"infs={self.infs}, nans={self.nans})"
        )

    @classmethod
    def total_of(cls, histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
        """Return the histogram of the values of several together, on the host.

        Example:
            >>> import torch
            >>> parts = (exponent_histogram(torch.full((3,), 2.0**k)) for k in (0, 4))
            >>> ExponentHistogram.total_of(parts)
            ExponentHistogram(6 values, 2^0 to 2^4, max_abs=16, zeros=0, infs=0, nans=0)
        """
        total = torch.zeros(ROW, dtype=torch.int64)
        for histogram in histograms:
            move_row(torch.tensor(histogram.numbers), total)
        return cls(total)

    @property
    def numbers(self) -> list[int]:
        """The row on the host, as :mod:`mezzo.trace.observe` describes it."""
        if self._numbers is None:
            self._numbers = self.row.tolist()
        return self._numbers

    def count(self, exponent: int) -> int:
        """Return how many values have ``floor(log2|x|) == exponent``; 0 outside of −149 to 127."""
        index = exponent - FIRST
        return self.numbers[index] + self.numbers[BINS + index] if 0 <= index < BINS else 0

    @property
    def zeros(self) -> int:
        """How many values are zero, of either sign."""
        return self.numbers[ZEROS]

    @property
    def infs(self) -> int:
        """How many values are infinite."""
        return self.numbers[INFS]

    @property
    def nans(self) -> int:
        """How many values are NaN."""
        return self.numbers[NANS]

    @property
    def total(self) -> int:
        """How many values there are."""
        return sum(self.numbers[:LARGEST])

    @property
    def max_abs(self) -> float:
        r"""The largest finite \|x\|, exactly; 0 where no value is finite."""
        return torch.tensor(self.numbers[LARGEST], dtype=torch.int32).view(torch.float32).item()

    def coverage(self, format: str | torch.dtype | Format, scale: float = 1.0) -> Coverage:
        """Count what ``x * scale`` loses in a format under nearest rounding, as :meth:`Format.coverage` of the tensor.

        Where a limit of the format, divided by the scale, lies inside a bin that holds values, their share beyond it is
        interpolated, as if they lay evenly between the bin's edges; ``Coverage.exact`` is then False. Whether anything
        overflows is always right: it comes from :attr:`max_abs`.

        Args:
            format: Any of ``mezzo.formats`` that holds values without a scale, or a name of one.
            scale: A loss scale to try, positive and finite.

        Raises:
            PolicyError: A format or scale as above is not given.
        """
        target = standing_alone(format)
        if not 0.0 < scale < math.inf:
            raise PolicyError(
                f"coverage cannot be taken at scale {scale!r}",
                why="a loss scale is a positive finite number",
                write=f'histogram.coverage("{target.name}", scale=1024.0), say',
            )
        half = target.smallest_subnormal / 2
        # Ties go to the even neighbour: zero, the smallest normal number, and infinity, or in E4M3 the largest number.
        limits = (half, True), (target.smallest_normal - half, False), _overflow(target)
        below, certain = zip(*(self._below(limit / scale, hit) for limit, hit in limits), strict=True)
        finite = sum(self.numbers[:ZEROS])
        # What is beyond the last limit by max_abs is there, whatever interpolation says.
        beyond = self._reaches(limits[2], scale)
        overflow = max(finite - below[2], 1) if beyond else 0
        under, small = min(below[0], finite - overflow), min(below[1], finite - overflow)
        return Coverage(
            zero=self.zeros,
            underflow=under,
            subnormal=small - under,
            normal=finite - overflow - small,
            overflow=overflow + self.infs,
            nan=self.nans,
            total=self.total,
            exact=all(certain[:2]) and (certain[2] or not beyond),
        )

    def best_scale(self, format: str | torch.dtype | Format = "float16") -> float:
        """Return the largest power of two with ``scale * max|x| < format.max``, which leaves every value finite.

        Raises:
            NumericsError: There is an infinity or NaN among the values, or nothing but zeros: no scale helps, or any.

        Example:
            >>> import torch
            >>> exponent_histogram(torch.tensor([3e-6, -1.5])).best_scale("float16")
            32768.0

        References:
            Micikevicius et al., Mixed Precision Training (2018), section 3.2.
        """
        target = standing_alone(format)
        largest = self.max_abs
        if self.infs or self.nans or not largest:
            why, write = "every value is zero", ""
            if self.infs or self.nans:
                why = f"{self.infs} inf and {self.nans} nan"
                write = "mezzo.overflow.locate(fn, model), which finds the first of them"
            raise NumericsError(f"there is no best scale for {target.name}", why=why, write=write)
        scale = math.ldexp(1.0, math.frexp(target.max)[1] - math.frexp(largest)[1])
        return scale if scale * largest < target.max else scale / 2

    def _reaches(self, limit: tuple[float, bool], scale: float) -> bool:
        """Whether the largest value, scaled, is beyond a limit; ``hit`` says that the limit itself is not."""
        value, hit = limit
        scaled = scale * self.max_abs
        return scaled > value or (scaled == value and not hit)

    def _below(self, limit: float, hit: bool) -> tuple[int, bool]:
        """Return how many non-zero values are below a limit, or hit it where those count, and whether that is exact."""
        if limit > self.max_abs:
            return sum(self.numbers[:ZEROS]), True
        if limit < math.ldexp(1.0, FIRST):
            return 0, True
        fraction, exponent = math.frexp(limit)
        index = exponent - 1 - FIRST  # that of the limit's bin, at most that of the largest value
        between, powers = self.numbers[:BINS], self.numbers[BINS : 2 * BINS]
        count = sum(between[:index]) + sum(powers[:index])
        if fraction == 0.5:
            return count + (powers[index] if hit else 0), True
        return count + powers[index] + round(between[index] * (2.0 * fraction - 1.0)), not between[index]


def standing_alone(format: str | torch.dtype | Format) -> Format:
    """Find a format that values of a run can be stored in without a scale beside them.

    Raises:
        PolicyError: There is none of this name, or it is E2M1 or E8M0.
    """
    target = by_name(format)
    if not (target.signed and target.has_nan):
        raise PolicyError(
            f"values by themselves are not stored in {target.name}",
            why="its numbers are scales"
            if not target.signed
            else "its numbers mean something beside their scales only",
            write='mezzo.formats.quantize(tensor, "nvfp4").wide() beside the tensor; or "float8_e4m3fn" here',
        )
    return target


def exponent_histogram(tensor: Tensor) -> ExponentHistogram:
    r"""Count the values of a tensor by their binade.

    Args:
        tensor: float32, float16, bfloat16 or an 8-bit float, any shape, layout and device.

    Returns:
        The histogram: one bin for each power of two from −149 to 127 (float32's subnormals have their own), zeros,
        infinities, NaNs, and the exact largest \|x\|.

    Raises:
        PolicyError: It is no tensor, or one of another dtype. float64 has values beyond all bins.

    **Cost**: reads the tensor once, in one kernel, without a host sync; 4.5 KB on its device.
    """
    if not isinstance(tensor, Tensor):
        raise PolicyError(
            f"{shown(tensor)} has no histogram of exponents", write="exponent_histogram(torch.tensor([1.0, 2.0]))"
        )
    if tensor.dtype not in COUNTABLE or tensor.layout != torch.strided:
        dense = "torch.view_as_real(tensor).float()" if tensor.is_complex() else "tensor.float()"
        if tensor.layout != torch.strided:
            dense = f"tensor.{'coalesce().' * (tensor.layout == torch.sparse_coo)}values()"
        unusable = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise PolicyError(
            f"{dtype_name(unusable)} tensors have no histogram of exponents",
            where=f"tensor of shape {tuple(tensor.shape)} on {tensor.device}",
            why=f"it takes dense {', '.join(map(dtype_name, COUNTABLE))}",
            write=f"exponent_histogram({dense})",
        )
    row = torch.zeros(WIDTH, dtype=torch.int64, device=tensor.device)
    observe(tensor.detach(), row, torch.ones(1, dtype=torch.int32, device=tensor.device))
    return ExponentHistogram(row[:ROW])


def _overflow(target: Format) -> tuple[float, bool]:
    """Return the first magnitude that leaves a format's range, and whether that one itself still stays."""
    return target.max + target.spacing(target.max) / 2, not target.has_inf
