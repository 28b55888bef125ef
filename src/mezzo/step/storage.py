"""How a weight lies in memory: the tensor that the model computes with, and its remainder if it has one.

A storage takes the stored tensors of a weight, its *parts*, to one FP32 value and back, element by element. Rules see
FP32 only; executors know no particular storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from mezzo.errors import NumericsError, PolicyError, shown
from mezzo.formats.noise import noise, seeded
from mezzo.policy.rules import both, exact
from mezzo.tensors import dtype_of, flat, moved

# Rounding FP32 to a low format's grid, element by element: to the nearest, or to a random neighbour.
#
# Everything here is pure and spelled out on bit patterns and additions, because inductor removes
# ``w.to(low).to(float32)`` as pointless. Random bits are those of ``mezzo.formats.noise``.

SIGN: Final = -(1 << 31)
_EXPONENT: Final = 0x7F80_0000
_NAN: Final = 0x7FC0_0000


def one_nan(w: Tensor) -> Tensor:
    """Return values whose NaNs have the pattern 0x7FC00000 and their sign: 0x7FFFFFFF would round to −0.0 in BF16."""
    nan = ((w.view(torch.int32) & SIGN) | _NAN).view(torch.float32)
    return torch.where(w != w, nan, w)


def nearest(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values to the nearest of a low format, ties to even.

    Args:
        w: FP32, any shape.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Returns:
        FP32 values that a cast to ``dtype`` keeps, or turns into the infinity they stand for (FP16: from 65536 on).

    **Cost**: 9 element-wise operations, no sync; compilers fuse it whole.

    Example:
        >>> nearest(torch.tensor([0.1, 1 + 2**-9]), torch.bfloat16)
        tensor([0.1001, 1.0000])
    """
    if dtype == torch.bfloat16:
        bits = one_nan(w).view(torch.int32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    bits = w.view(torch.int32)
    # Next to `coarse` FP32's spacing is FP16's next to w, so that adding it rounds w to nearest even.
    coarse = _fp16_power(bits) * (1.5 * 2**13)
    rounded = ((w + coarse) - coarse).view(torch.int32)
    return (rounded | (bits & SIGN)).view(torch.float32)


def stochastic(w: Tensor, bits: Tensor) -> Tensor:
    """Round FP32 values to one of their two neighbours in BF16, at random, so that the mean is exactly the value.

    Args:
        w: FP32, any shape.
        bits: int32 of the same shape: random in their low 16 bits.

    Returns:
        FP32 values that a cast to BF16 keeps.

    Example:
        >>> eighths = torch.arange(8, dtype=torch.int32) << 13  # every eighth of 2^16
        >>> stochastic(torch.full((8,), 1 + 2**-9), eighths)
        tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0078, 1.0078])
    """
    pattern = one_nan(w).view(torch.int32)
    return ((pattern + (bits & 0xFFFF)) & -0x10000).view(torch.float32)


def keys(step: Tensor, count: int, seed: int = 0) -> Tensor:
    """Make the keys of :func:`mezzo.formats.noise.noise` for one step.

    Args:
        step: 0-d int64 on the device: the step under way.
        count: How many parameters need one.
        seed: Ranks that hold different parts of a model give different seeds.

    Returns:
        (count,) int32 on the step's device.

    **Cost**: about 10 kernels over ``count`` numbers, no host sync.
    """
    order = torch.arange(count, dtype=torch.int32, device=step.device)
    return key_of(order, step.to(torch.int32), step.new_full((), seeded(seed), dtype=torch.int32))


def key_of(order: Tensor, step: Tensor, start: Tensor) -> Tensor:
    """Make the keys of some parameters, element-wise: what kernels repeat.

    Args:
        order: int32: which parameters of their bucket.
        step: 0-d int32: the step under way.
        start: 0-d int32, of :func:`mezzo.formats.noise.seeded`.
    """
    return noise(order, noise(step, start), slot=-1)


def _fp16_power(bits: Tensor) -> Tensor:
    """The power of two at or below |w|, from where FP16 is subnormal to where it is infinite."""
    return (bits & _EXPONENT).view(torch.float32).clamp(2.0**-14, 2.0**16)


# Split storage: an FP32 weight as a low-precision value and 16 remainder bits.
#
# The high half *is* the weight that the forward pass reads; the remainder is the optimizer's. :func:`halves` and
# :func:`joined` are the one definition, element-wise and free of branches, that executors trace and kernels repeat.

_SMALLEST_NORMAL_FP16: Final = 2.0**-14
#: The largest |weight| that each format's high half can stand for; BF16's is just below the midpoint to 2^128.
_LARGEST: Final = {torch.float16: 65504.0, torch.bfloat16: (2.0 - 2.0**-8 - 2.0**-23) * 2.0**127}

#: Elements handled at a time: on the CPU so that temporaries stay within a cache, on others within a fraction of a GiB.
_CPU_BLOCK: Final = 1 << 18
_DEVICE_BLOCK: Final = 1 << 26


def halves(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    r"""Split FP32 values, element by element, into what a low format rounds them to and the remainder.

    - BF16, with ``bits`` the FP32 pattern and NaN first made :math:`\pm` ``0x7FC00000``:
      ``high = (bits + 0x8000) & ~0xFFFF`` (ties away from zero), ``remainder = bits − high``.
    - FP16: ``high`` is the nearest FP16 value (ties to even). Where :math:`|high| \ge 2^{-14}` the remainder is the
      difference of the two FP32 patterns, elsewhere :math:`rint((w - high) \cdot 2^{39})`.

    Args:
        w: FP32, any shape. In FP16 what rounds beyond 65504 becomes infinite, with remainder 0.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Returns:
        The high half as FP32 (a cast to ``dtype`` is exact, or gives the infinity), and the remainder as int32
        within int16's range.

    **Cost**: 7 element-wise operations for BF16, about 20 for FP16. No branch, no sync: compilers fuse it whole.
    """
    # Rounding is spelled out: inductor would remove w.to(low).to(float32) as pointless.
    if dtype == torch.bfloat16:
        bits = one_nan(w).view(torch.int32)
        rounded = (bits + 0x8000) & -0x10000
        return rounded.view(torch.float32), bits - rounded
    high = nearest(w, dtype)
    size = high.abs()
    fixed = torch.round((w - high) * 2.0**39).to(torch.int32)
    direct = w.view(torch.int32) - high.view(torch.int32)
    remainder = torch.where(size < _SMALLEST_NORMAL_FP16, fixed, direct)
    return high, torch.where(size > _LARGEST[dtype], 0, remainder)


def joined(high: Tensor, remainder: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the FP32 values that :func:`halves` took apart.

    Args:
        high: The high half, widened to FP32.
        remainder: int32.
        dtype: The high half's own dtype.

    Returns:
        FP32: in BF16 the very values (NaN in its one form), in FP16 too where |w| ≥ 2⁻¹⁶, and within 2⁻⁴⁰ below. Of a
        high half that was written since, beside the remainder of another value: at most half a spacing from it.
    """
    if dtype == torch.bfloat16:
        # No pattern is below that of zero: a negative remainder beside a zero is that of the value which the weight had
        # before it was set to zero, and the sum of patterns would be a NaN.
        bounded = torch.where(high.abs() > 0.0, remainder, remainder.clamp_min(0))
        # An infinity or NaN is the value, whatever the remainder is.
        bounded = torch.where(high.abs() <= _LARGEST[dtype], bounded, 0)
        return (high.view(torch.int32) + bounded).view(torch.float32)
    size = high.abs()
    # Half a spacing is 2^12 FP32 spacings, but just below 2^-14 it is 2^13: FP32's halves there, and FP16's does not.
    nearby = torch.where(
        size > _SMALLEST_NORMAL_FP16, remainder.clamp(-0x1000, 0x1000), remainder.clamp(-0x2000, 0x1000)
    )
    bounded = torch.where(size <= _LARGEST[dtype], nearby, 0)
    direct = (high.view(torch.int32) + bounded).view(torch.float32)
    # Remainders of subnormal weights, in units of 2^-39, are up to 2^14. Minus the negated remainder: −0.0 − 0.0 keeps
    # its sign, −0.0 + 0.0 does not.
    fixed = high - (-remainder.clamp(-0x4000, 0x4000)).to(torch.float32) * 2.0**-39
    return torch.where(size < _SMALLEST_NORMAL_FP16, fixed, direct)


@torch.no_grad()
def encode(w: Tensor, dtype: torch.dtype | str, *, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Store FP32 weights as low-precision weights and 16 remainder bits each.

    Args:
        w: FP32, any shape, layout and device.
        dtype: ``torch.bfloat16`` or ``torch.float16``, or a word for it.
        name: The parameter's name, for the error.

    Returns:
        ``hi`` of ``dtype``, which rounds ``w``, and ``lo`` (int16), both with the layout of ``w``.

    Raises:
        NumericsError: A finite weight that ``dtype`` would round to infinity (FP16: beyond 65504).
        PolicyError: ``w`` is not FP32, or ``dtype`` is another one.

    **Cost**: 4 bytes a weight read twice and 4 written; a few MiB of scratch. One host sync, for the refusal.

    Example:
        >>> import torch
        >>> hi, lo = encode(torch.tensor([1.0, 0.1]), torch.bfloat16)
        >>> hi, lo
        (tensor([1.0000, 0.1001], dtype=torch.bfloat16), tensor([     0, -13107], dtype=torch.int16))
        >>> decode(hi, lo)
        tensor([1.0000, 0.1000])
    """
    _check(_is(w, torch.float32), f"split storage of {_named(w)}", "encode(w.float(), torch.bfloat16)")
    low_dtype: torch.dtype = dtype_of(dtype)
    _check(
        low_dtype in _LARGEST, f"split storage with a {dtype} high half", "encode(w, torch.bfloat16) or torch.float16"
    )
    hi, lo = torch.empty_like(w, dtype=low_dtype), torch.empty_like(w, dtype=torch.int16)
    refuse_beyond([(w, low_dtype)], name)
    encode_into(w, hi, lo)
    return hi, lo


@torch.no_grad()
def encode_into(w: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Store FP32 weights in existing halves.

    Args:
        w: FP32. A finite weight beyond the range of ``hi`` becomes infinite.
        hi: BF16 or FP16, of the same shape.
        lo: int16, of the same shape.

    Raises:
        PolicyError: Another dtype, or shapes that differ.

    **Cost**: 4 bytes a weight read and 4 written; a few MiB of scratch. No host sync.
    """
    write = "encode_into(w, *encode(w, torch.bfloat16))"
    _check(_is(w, torch.float32), f"split storage of {_named(w)}", write)
    _check_halves(hi, lo, write)
    for source, high_half, remainder_half in _blocks(w, hi, lo):
        high, remainder = halves(one_nan(source), hi.dtype)
        if hi.dtype == torch.bfloat16:  # torch's own cast does not keep the sign of a NaN
            high_half.view(torch.int16).copy_(high.view(torch.int32) >> 16)
        else:
            high_half.copy_(high)
        remainder_half.copy_(remainder)


@torch.no_grad()
def decode(hi: Tensor, lo: Tensor) -> Tensor:
    """Return the FP32 weights that :func:`encode` stored.

    Args:
        hi: BF16 or FP16.
        lo: int16, of the same shape.

    Returns:
        FP32 weights with the layout of ``hi``.

    Raises:
        PolicyError: Another dtype, or shapes that differ.

    **Cost**: 4 bytes a weight read and 4 written; a few MiB of scratch. No host sync.
    """
    _check_halves(hi, lo, "decode(*encode(w, torch.bfloat16))")
    w = torch.empty_like(hi, dtype=torch.float32)
    for high_half, remainder_half, target in _blocks(hi, lo, w):
        target.copy_(joined(_widened(high_half), remainder_half.int(), hi.dtype))
    return w


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk through tensors of one shape together, block by block."""
    if wrong := [tuple(tensor.shape) for tensor in tensors if tensor.shape != tensors[0].shape]:
        raise PolicyError(
            "the halves of a split weight differ in shape",
            where=f"{tuple(tensors[0].shape)} and {wrong[0]}",
            write="tensors of one shape",
        )
    vectors = flat(*tensors)
    if vectors is None:
        yield tensors
    else:
        block = _CPU_BLOCK if tensors[0].device.type == "cpu" else _DEVICE_BLOCK
        yield from zip(*(torch.split(vector, block) for vector in vectors), strict=True)


def _widened(hi: Tensor) -> Tensor:
    if hi.dtype == torch.bfloat16:
        return hi.float()
    # torch's scalar cast from FP16 gives NaN another sign and payload than its vectorised one.
    signed = (hi.float().view(torch.int32) & ~SIGN) | (hi.view(torch.int16).int() & SIGN)
    return one_nan(signed.view(torch.float32))


def is_beyond(w: Tensor, dtype: torch.dtype) -> bool:
    """Whether a finite weight is beyond what halves in a low dtype hold (FP16: 65504); a host sync."""
    return bool(_count_beyond(w, dtype))


def refuse_beyond(weights: Sequence[tuple[Tensor, torch.dtype]], name: str | None = None) -> None:
    """Refuse weights of which :func:`is_beyond` is true; one host sync for all of them.

    Args:
        weights: Of any floating dtype, each with ``torch.bfloat16`` or ``torch.float16``.
        name: The parameter's name, for the error.

    Raises:
        NumericsError: For the first tensor with such weights, with their number.
    """
    counts = [_count_beyond(w, dtype) for w, dtype in weights]
    if not counts or not int(torch.stack([moved(count, counts[0].device) for count in counts]).sum()):
        return
    count, w, dtype = next((int(n), w, dtype) for n, (w, dtype) in zip(counts, weights, strict=True) if int(n))
    finite = w.masked_fill(~w.isfinite(), 0)
    raise NumericsError(
        f"{count} of {w.numel()} weights are beyond the range of {dtype}".replace("torch.", ""),
        where=f"{name or 'a tensor'}, shape {tuple(w.shape)}, largest {finite.abs().max().item():.6g}",
        why=f"beyond {_LARGEST[dtype]:.8g} the low-precision weight would be infinite",
        write=f"{both('fp32_param=' + exact(name or '…'))}; or bfloat16, whose range is FP32's",
    )


def _count_beyond(w: Tensor, dtype: torch.dtype) -> Tensor:
    limit = _LARGEST[dtype]
    sizes = (block.detach().abs() for (block,) in _blocks(w))
    return torch.stack([((size > limit) & (size < torch.inf)).sum() for size in sizes]).sum()


def _is(value: object, *dtypes: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype in dtypes


def _named(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else shown(value)


def _check_halves(hi: object, lo: object, write: str) -> None:
    _check(_is(hi, *_LARGEST), f"split storage with {_named(hi)} as its high half", write)
    _check(_is(lo, torch.int16), f"split storage with {_named(lo)} as its remainder", write)


def _check(fits: bool, mistake: str, write: str) -> None:
    if not fits:
        raise PolicyError(mistake, why="a FP32 weight is split into a FP16 or BF16 half and an int16 one", write=write)


Parts: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One way to store weights.

    Args:
        name: Its name in messages and compiled kernels.
        extra: Whether a second tensor lies beside each weight.
        read: ``(parts) -> w``: the FP32 value of stored elements. Pure and element-wise.
        write: ``(w, dtype) -> values``: the values to copy into each part, as FP32 or int32. Pure and element-wise.
            None where an update reads weights and does not write them.
    """

    name: str
    extra: bool
    read: Callable[[Parts], Tensor] = field(repr=False)
    write: Callable[[Tensor, torch.dtype], Parts] | None = field(repr=False)

    @property
    def num_parts(self) -> int:
        """How many tensors a weight is stored in."""
        return 1 + self.extra

    def parts(self, weight: Tensor, extra: Tensor | None) -> Parts:
        """Return the stored tensors of a weight, the model's first."""
        return (weight,) if extra is None else (weight, extra)


def _read_split(parts: Parts) -> Tensor:
    weight, remainder = parts
    return joined(weight.to(torch.float32), remainder.to(torch.int32), weight.dtype)


def _write_plain(w: Tensor, dtype: torch.dtype) -> Parts:
    return (w if dtype == torch.float32 else nearest(w, dtype),)


#: The high half of the FP32 value, and 16 remainder bits as int16: 4 bytes a weight.
SPLIT: Final = Storage(name="split", extra=True, read=_read_split, write=halves)
#: The same, for updates that read the weight and write other tensors alone.
READ: Final = Storage(name="read", extra=True, read=_read_split, write=None)
#: The weight alone: FP32, or low precision rounded to nearest after every update.
PLAIN: Final = Storage(name="plain", extra=False, read=lambda parts: parts[0].to(torch.float32), write=_write_plain)
