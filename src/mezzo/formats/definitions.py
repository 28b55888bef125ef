"""Number formats as a table, and what each does to a value: decode, encode, spacing, round, coverage.

The scalar methods are plain Python and bit-exact, the reference for everything in the package that rounds; the tensor
methods agree with them bit for bit (tests/formats/test_table.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from mezzo.errors import PolicyError, nearest, shown

#: Tensors that :meth:`Format.round` takes; each embeds exactly in float64.
ROUNDABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Elements that :meth:`Format.coverage` handles at a time, to bound its float64 scratch memory.
CHUNK = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many values of a tensor land where in a format; the first six counts add up to ``total``.

    Args:
        zero: Values that were zero already.
        underflow: Non-zero values that become zero.
        subnormal: Values that become a subnormal number, and so lose significant bits.
        normal: Values that become a normal number.
        overflow: Values that leave the finite range; infinities of the tensor count here.
        nan: Values that were NaN already.
        total: The number of elements.
        exact: Whether the counts are counted; if not, some are interpolated from a histogram.
    """

    zero: int
    underflow: int
    subnormal: int
    normal: int
    overflow: int
    nan: int
    total: int
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point format: one sign bit, then exponent, then mantissa.

    A pattern with exponent field ``E`` and mantissa field ``M`` stands for
    ``± 2^(E − bias) · 1.M``, or ``± 2^(1 − bias) · 0.M`` where ``E = 0``. A format without a sign bit and without
    mantissa (E8M0) holds powers of two alone: ``E = 0`` stands for ``2^−bias``, and there is no zero.

    Args:
        name: The word torch uses for it; ``by_name`` also knows the short ones.
        dtype: torch's dtype that stores it, one value an element; None for TF32, which torch keeps in float32, and for
            E2M1, of which ``torch.float4_e2m1fn_x2`` holds two.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the mantissa field, without the hidden bit.
        bias: What is subtracted from the exponent field.
        max: Largest finite value.
        smallest_normal: Smallest positive value with a hidden bit.
        smallest_subnormal: Smallest positive value; also the spacing below ``smallest_normal``, where there are values.
        eps: Distance from 1 to the next larger value.
        has_inf: Whether the top exponent means infinity and NaN, as in IEEE 754. Without it (E4M3, E8M0) the
            top exponent holds numbers too, and only all ones is NaN.
        has_nan: Whether there is a NaN. Where there is none (E2M1) all ones is the largest number.
        signed: Whether there is a sign bit. E8M0 has none, and no negative numbers.

    Example:
        >>> FP16.decode(0x3555)
        0.333251953125
        >>> hex(FP16.encode(1 / 3))
        '0x3555'
        >>> FP16.spacing(2.0**-3) == 2.0**-13
        True
    """

    name: str
    dtype: torch.dtype | None
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    has_inf: bool
    has_nan: bool = True
    signed: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def num_bits(self) -> int:
        """Width of a pattern, sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def _sign(self) -> int:
        """The sign bit; in a format without one, the bit beyond the pattern."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def _infinity(self) -> int:
        """The first magnitude that is no number: infinity where there is one, else NaN, else beyond all patterns."""
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        return top if self.has_inf else self._sign - self.has_nan

    @property
    def _beyond(self) -> int:
        """What a magnitude beyond the largest number becomes: the first that is no number, or the largest number."""
        return min(self._infinity, self._sign - 1)

    @property
    def _nan(self) -> int:
        """The quiet NaN: in IEEE formats the leading mantissa bit is set. Without NaN, the largest number."""
        return self._beyond | (1 << self.mantissa_bits >> 1)

    def decode(self, bits: int) -> float:
        """Return the number that a bit pattern stands for.

        Args:
            bits: The pattern, ``0 <= bits < 2**num_bits``.

        Returns:
            The exact value; every format here embeds in Python's float64. A NaN keeps its sign.

        Raises:
            PolicyError: ``bits`` is no such integer.

        Example:
            >>> E4M3.decode(0x7E), E4M3.decode(0x7F), FP16.decode(0x8000)
            (448.0, nan, -0.0)
        """
        pattern = operator.index(bits) if hasattr(bits, "__index__") else -1
        if not 0 <= pattern < 1 << self.num_bits:
            raise PolicyError(
                f"{bits!r} is no bit pattern of {self.name}",
                why=f"{self.name} has {self.num_bits} bits",
                write=f"an integer from 0 to {(1 << self.num_bits) - 1:#x}",
            )
        magnitude = pattern & (self._sign - 1)
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude >= self._infinity:
            value = math.inf if self.has_inf and magnitude == self._infinity else math.nan
        elif exponent == 0 and self.mantissa_bits:
            value = mantissa * self.smallest_subnormal
        else:
            hidden = 1 << self.mantissa_bits
            value = math.ldexp(hidden + mantissa, exponent - self.bias - self.mantissa_bits)
        return math.copysign(value, -1.0 if pattern & self._sign else 1.0)

    def encode(self, value: float) -> int:
        """Return the bit pattern nearest to a real number, ties to even.

        Rounds once, straight from float64. What is half a spacing or more beyond ``max`` becomes infinity,
        in E4M3 and E8M0 NaN (E4M3's tie, 464, goes to 448, whose mantissa is even). E2M1 saturates: what is beyond 6
        becomes 6. In E8M0 what is below ``2^−127``, zero too, becomes ``2^−127``, a negative number NaN, and a tie the
        larger power. It is a format of scales, whose exponents the OCP specification computes without a rounding
        (:mod:`mezzo.formats.blocks`), and of other numbers in it says nothing.

        Returns:
            The pattern. NaN becomes the format's quiet NaN with the sign kept, if it has signs. In E2M1 it becomes 6,
            as NVIDIA's conversion has it.

        Raises:
            PolicyError: ``value`` is no real number.

        Example:
            >>> [hex(FP16.encode(x)) for x in (65504.0, 65519.99, 65520.0, -0.0)]
            ['0x7bff', '0x7bff', '0x7c00', '0x8000']
            >>> [E2M1.encode(x) for x in (6.0, 1e9, -1e9)], [E8M0.encode(x) for x in (1.0, 0.0, -1.0)]
            ([7, 7, 15], [127, 0, 255])

        References:
            OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 5.4. NVIDIA PTX ISA, ``cvt``.
        """
        try:
            sign = self._sign if self.signed and math.copysign(1.0, value) < 0.0 else 0
        except (TypeError, ValueError, OverflowError):  # or a tensor of several, an integer beyond float64
            raise PolicyError(f"{shown(value)} has no bit pattern", write="a real number, such as 1.5") from None
        if math.isnan(value):
            return (sign if self.has_nan else 0) | self._nan
        if not self.signed and value < 0.0:
            return self._nan
        if math.isinf(value):
            return sign | self._beyond
        binade = self._binade(value)
        # A whole number of spacings, exact until Python's round takes the nearest even one.
        steps = round(math.ldexp(abs(value), self.mantissa_bits - binade))
        # Patterns are consecutive across binades, so a carry out of the mantissa needs no special case.
        pattern = steps + ((binade - 1 + self.bias) << self.mantissa_bits)
        return sign | min(max(pattern, 0), self._beyond)

    def spacing(self, value: float) -> float:
        """Return the distance between neighbours of the format in the binade of a value.

        For ``2^k <= |value| < 2^(k+1)`` it is ``2^(k − mantissa_bits)``: at a power of two the distance to
        the neighbour *away from zero* (the one towards zero is half as far). Zero and subnormals:
        ``smallest_subnormal``.

        Args:
            value: A Python float; it need not be on the grid.

        Returns:
            The spacing, a power of two; NaN where there is no grid (beyond ``max``, infinities, NaN, and below zero
            where there is no sign).

        Example:
            >>> FP16.spacing(2048.0), FP16.spacing(2047.0), FP16.spacing(1e9)
            (2.0, 1.0, nan)
        """
        if not abs(value) <= self.max or (value < 0.0 and not self.signed):
            return math.nan
        return math.ldexp(1.0, self._binade(value) - self.mantissa_bits)

    def spacings(self, tensor: Tensor) -> Tensor:
        """Return :meth:`spacing` of every element, from the bits of its exponent.

        Args:
            tensor: float16, bfloat16, float32 or float64, any shape and device.

        Returns:
            Exact powers of two in float64, NaN where there is no grid.

        Raises:
            PolicyError: It is no such tensor.

        **Cost**: no host sync; 16 bytes of scratch memory per element.

        Example:
            >>> BF16.spacings(torch.tensor([1.0, -2.5, 0.0])).log2()
            tensor([  -7.,   -6., -133.], dtype=torch.float64)
        """
        self._check(tensor)
        values = tensor.detach().double()
        steps = self._steps(values)
        has_grid = values.abs() <= self.max
        return steps.masked_fill_(~(has_grid if self.signed else has_grid & (values >= 0.0)), math.nan)

    def round(self, tensor: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Round every element to the format's grid, in the tensor's own dtype.

        Nearest rounding equals ``decode(encode(x))`` for float64 input too, where torch's own cast to float16 rounds
        twice. Stochastic rounding takes one of the two neighbours of ``x`` with probabilities that make the mean ``x``
        (to within 2^-53 of a spacing); values on the grid stay, and what is beyond ``max`` follows the nearest rule.
        Overflow is not hidden where the format can show it: E4M3 gives NaN, whether or not this torch's own cast
        saturates; E2M1, which has neither NaN nor infinity, gives its largest number.

        Args:
            tensor: float16, bfloat16, float32 or float64, any shape and device.
            stochastic: Round to a random neighbour instead of the nearest.
            generator: Source of randomness on the tensor's device; torch's default one when None. Nearest
                rounding does not use it.

        Returns:
            A new tensor of the same dtype, shape and device, outside autograd. What float16 input cannot hold of the
            results is its infinity, 65536 of BF16 and E8M0, or its zero, the smallest numbers of E8M0.

        Raises:
            PolicyError: It is no tensor, or one of an integer, complex, bool or 8-bit dtype.

        **Cost**: no host sync. Two casts where torch's cast is exact; otherwise (float64 input to a 16- or 8-bit
        format, TF32, stochastic) about ten element-wise kernels and 32 bytes of scratch per element.

        Example:
            >>> FP16.round(torch.tensor([0.1, 70000.0, 1e-9]))
            tensor([0.1000,    inf, 0.0000])
            >>> FP16.round(torch.tensor([0.125 + 2**-14], dtype=torch.float64)).item()
            0.125
        """
        self._check(tensor)
        source = tensor.detach()
        if self._holds(source.dtype):
            return source.clone()
        # torch casts float64 to every format below float32 through float32: two roundings.
        once = source.dtype != torch.float64 or self.dtype == torch.float32
        # torch's cast to E8M0 drops the sign.
        if self.dtype is not None and once and not stochastic and self.signed:
            rounded = source.to(self.dtype).to(source.dtype)
            if self.has_inf:
                return rounded
            # torch's cast to E4M3 saturates since 2.12 (pytorch#178817) and gave NaN before.
            return rounded.masked_fill_(source.abs() > self.max + self.spacing(self.max) / 2, math.nan)
        return self._round64(source.double(), stochastic, generator).to(source.dtype)

    def coverage(self, tensor: Tensor, scale: float = 1.0) -> Coverage:
        """Count what ``tensor * scale`` loses in this format, under nearest rounding.

        Args:
            tensor: float16, bfloat16, float32 or float64, any shape and device.
            scale: A loss scale to try, positive and finite. The product is taken in float64, so nothing
                overflows on the way.

        Returns:
            Counts that partition the elements. The class is that of the rounded value: what rounds up to
            ``smallest_normal`` is normal. What E2M1 saturates has overflowed, and so have E8M0's negative numbers.

        Raises:
            PolicyError: A scale or tensor as above is not given.

        **Cost**: one host sync, at the end; less than 128 MiB of scratch memory, whatever the size.

        Example:
            >>> FP16.coverage(torch.tensor([0.0, 1e-8, 1e-6, 1.0, 1e5, float("nan")]))
            Coverage(zero=1, underflow=1, subnormal=1, normal=1, overflow=1, nan=1, total=6, exact=True)
            >>> FP16.coverage(torch.tensor([1e-8]), scale=1024.0).subnormal
            1
        """
        self._check(tensor)
        if not 0.0 < scale < math.inf:
            raise PolicyError(
                f"coverage cannot be taken at scale {scale!r}",
                why="a loss scale is a positive finite number",
                write=f"{self.name} coverage with scale=1024.0, say",
            )
        counts = torch.zeros(6, dtype=torch.int64, device=tensor.device)
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            chunk = flat[start : start + CHUNK]
            rounded = self._unbounded64(chunk.double() * scale).abs_()
            nan, zero, gone = chunk.isnan(), chunk == 0, rounded == 0
            # Written so that an E4M3 overflow, which is NaN, counts as one.
            finite = rounded <= self.max
            small = rounded < self.smallest_normal
            # E8M0 has no zero: there a zero is none that rounds to one.
            parts = (zero, gone & ~zero, small & ~gone, finite & ~small & ~zero, ~finite & ~nan, nan)
            counts += torch.stack([part.sum() for part in parts])
        names = ("zero", "underflow", "subnormal", "normal", "overflow", "nan")
        return Coverage(**dict(zip(names, counts.tolist(), strict=True)), total=tensor.numel())

    def _binade(self, value: float) -> int:
        """Return floor(log2|value|), held to the lowest binade, which zero and the subnormals share."""
        _, exponent = math.frexp(value)
        _, lowest = math.frexp(self.smallest_normal)
        return (max(exponent, lowest) if value else lowest) - 1

    def _holds(self, dtype: torch.dtype) -> bool:
        """Whether every value of a dtype is on this grid already."""
        other = next((entry for entry in FORMATS.values() if entry.dtype == dtype), None)
        return (
            other is not None
            and other.mantissa_bits <= self.mantissa_bits
            and other.max <= self.max
            and other.smallest_subnormal >= self.smallest_subnormal
        )

    def _check(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise PolicyError(f"{shown(tensor)} cannot be rounded to {self.name}", write="torch.tensor([1.0, 2.0])")
        if tensor.dtype not in ROUNDABLE:
            raise PolicyError(
                f"{tensor.dtype} tensors cannot be rounded to {self.name}",
                where=f"tensor of shape {tuple(tensor.shape)} on {tensor.device}",
                why="rounding takes float16, bfloat16, float32 and float64",
                write="torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.float()",
            )

    def _round64(self, values: Tensor, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Round float64 values once; every step but the rounding itself is exact."""
        rounded = self._unbounded64(values, stochastic, generator)
        if self.has_nan:
            return rounded
        return rounded.clamp_(-self.max, self.max).nan_to_num_(nan=self.max)

    def _steps(self, values: Tensor) -> Tensor:
        """Return the spacing at float64 values, and beyond the range that of the binade above it."""
        power = (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)  # the exponent alone
        # 2^floor(log2|x|), within the format's binades: zeros and subnormals share the lowest one, and
        # what is beyond the highest stays beyond it whatever the spacing.
        return power.clamp_(min=self.smallest_normal, max=2.0 * self.max).mul_(self.eps)

    def _unbounded64(
        self, values: Tensor, stochastic: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Round so, with infinity or NaN for what is beyond the range in a format that has no NaN, too."""
        step = self._steps(values)
        steps = values.abs().div_(step)
        rounded = steps.round()
        if stochastic:
            lower = steps.floor()
            chance = torch.rand(values.shape, dtype=torch.float64, device=values.device, generator=generator)
            drawn = lower + (chance < steps - lower)
            rounded = torch.where(values.abs() <= self.max, drawn, rounded)
        rounded = rounded.mul_(step)
        beyond = math.inf if self.has_inf or not self.has_nan else math.nan
        rounded = rounded.masked_fill_(rounded > self.max, beyond)
        if self.signed:
            return rounded.copysign_(values)
        return rounded.clamp_(min=self.smallest_normal).masked_fill_(values < 0.0, math.nan)


def _describe(
    name: str,
    dtype: torch.dtype | None,
    exponent_bits: int,
    mantissa_bits: int,
    *,
    has_inf: bool = True,
    has_nan: bool = True,
) -> Format:
    """Fill in what follows from the two widths, in a format with a sign."""
    bias = 2 ** (exponent_bits - 1) - 1
    # The highest binade of numbers, and how far its last number is below the next power of two.
    highest, missing = (bias, 1) if has_inf else (bias + 1, 1 + has_nan)
    return Format(
        name=name,
        dtype=dtype,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        max=math.ldexp(2.0 - missing * 2.0**-mantissa_bits, highest),
        smallest_normal=math.ldexp(1.0, 1 - bias),
        smallest_subnormal=math.ldexp(1.0, 1 - bias - mantissa_bits),
        eps=2.0**-mantissa_bits,
        has_inf=has_inf,
        has_nan=has_nan,
    )


FP32 = _describe("float32", torch.float32, 8, 23)  # IEEE 754 binary32
TF32 = _describe("tf32", None, 8, 10)  # NVIDIA Ampere whitepaper: float32's range, float16's precision
FP16 = _describe("float16", torch.float16, 5, 10)  # IEEE 754 binary16
BF16 = _describe("bfloat16", torch.bfloat16, 8, 7)  # the high half of binary32
E4M3 = _describe("float8_e4m3fn", torch.float8_e4m3fn, 4, 3, has_inf=False)  # Micikevicius et al. 2022
E5M2 = _describe("float8_e5m2", torch.float8_e5m2, 5, 2)  # Micikevicius et al. 2022: IEEE-like
E2M1 = _describe("float4_e2m1fn", None, 2, 1, has_inf=False, has_nan=False)  # OCP Microscaling 1.0, section 5.3.3
E8M0 = Format(  # OCP Microscaling 1.0, section 5.4.1: the exponent field of binary32 by itself
    name="float8_e8m0fnu",
    dtype=torch.float8_e8m0fnu,
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max=2.0**127,
    smallest_normal=2.0**-127,
    smallest_subnormal=2.0**-127,
    eps=1.0,
    has_inf=False,
    signed=False,
)

#: Every format by its name, widest first; last E8M0, the format of scales.
FORMATS: Mapping[str, Format] = MappingProxyType({
    entry.name: entry for entry in (FP32, TF32, FP16, BF16, E4M3, E5M2, E2M1, E8M0)
})  # fmt: skip

#: What else people write.
_ALIASES: Mapping[str, Format] = MappingProxyType({
    "fp32": FP32, "float": FP32, "single": FP32, "tensorfloat32": TF32, "fp16": FP16, "half": FP16, "bf16": BF16,
    "e4m3": E4M3, "e4m3fn": E4M3, "fp8_e4m3": E4M3, "float8_e4m3": E4M3, "e5m2": E5M2, "fp8_e5m2": E5M2,
    "e2m1": E2M1, "e2m1fn": E2M1, "fp4": E2M1, "fp4_e2m1": E2M1, "float4_e2m1": E2M1, "float4_e2m1fn_x2": E2M1,
    "e8m0": E8M0, "e8m0fnu": E8M0, "float8_e8m0": E8M0,
})  # fmt: skip


def by_name(name: str | torch.dtype | Format) -> Format:
    """Find a format by what a user calls it.

    Args:
        name: A name in any case (``"float16"``, ``"fp16"``, ``"half"``, ``"torch.float16"``), a dtype, or a ``Format``.

    Returns:
        The format.

    Raises:
        PolicyError: There is no such format; the message names the nearest one.

    Example:
        >>> by_name("half") is by_name(torch.float16) is FP16
        True
    """
    if isinstance(name, Format):
        return name
    word = str(name).strip().lower().removeprefix("torch.")
    fmt = FORMATS.get(word) or _ALIASES.get(word)
    if fmt is None or not isinstance(name, str | torch.dtype):
        raise PolicyError(
            f"unknown number format {name!r}",
            why=nearest(word if isinstance(name, str) else "", (*FORMATS, *_ALIASES)),  # a dtype is no misspelt word
            write='by_name("float16"), by_name("fp16") or by_name(torch.float16)',
        )
    return fmt
