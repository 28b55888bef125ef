"""How a weight lies in memory: the tensor that the model computes with, and what the optimizer adds to it.

A storage takes the stored tensors of a weight, its *parts*, to one FP32 value and back, element by element. Rules see
FP32 only; executors know no particular storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from mezzo import errors
from mezzo.errors import PolicyError
from mezzo.step import split
from mezzo.step.rounding import nearest, stochastic
from mezzo.tensors import LOW

__all__ = ["FULL", "KAHAN", "PLAIN", "SPLIT", "STOCHASTIC", "Parts", "Storage", "storage"]

Parts: TypeAlias = tuple[Tensor, ...]
Bits: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One way to store weights.

    Args:
        name: What messages and compiled kernels call it.
        extra: The name of the tensor that the optimizer keeps beside each weight, or None where there is none.
        make: ``(w, dtype, name) -> (weight, extra)``: store the FP32 weights of the parameter ``name``.
        read: ``(parts) -> w``: the FP32 value of stored elements. Pure and element-wise.
        write: ``(w, dtype, bits) -> values``: what to copy into each part, as FP32 or int32. Pure and
            element-wise; ``bits()`` gives random int32.
        random: Whether ``write`` asks for random bits.
    """

    name: str
    extra: str | None
    make: Callable[[Tensor, torch.dtype, str | None], tuple[Tensor, Tensor | None]] = field(repr=False)
    read: Callable[[Parts], Tensor] = field(repr=False)
    write: Callable[[Tensor, torch.dtype, Bits], Parts] = field(repr=False)
    random: bool = False

    def parts(self, weight: Tensor, extra: Tensor | None) -> Parts:
        """Return the stored tensors of a weight, the model's first."""
        return (weight,) if extra is None else (weight, extra)


def _make_split(w: Tensor, dtype: torch.dtype, name: str | None) -> tuple[Tensor, Tensor]:
    return split.encode(w, dtype, name=name)


def _read_split(parts: Parts) -> Tensor:
    weight, remainder = parts
    return split.joined(weight.to(torch.float32), remainder.to(torch.int32), weight.dtype)


def _make_full(w: Tensor, dtype: torch.dtype, name: str | None) -> tuple[Tensor, Tensor]:
    return split.halves(w.detach(), dtype)[0].to(dtype), w.detach().clone()


def _make_plain(w: Tensor, dtype: torch.dtype, name: str | None) -> tuple[Tensor, None]:
    return w.detach().to(dtype, copy=True), None


def _write_plain(w: Tensor, dtype: torch.dtype, bits: Bits) -> Parts:
    return (w if dtype == torch.float32 else nearest(w, dtype),)


def _make_kahan(w: Tensor, dtype: torch.dtype, name: str | None) -> tuple[Tensor, Tensor]:
    value, dropped = _write_kahan(w.detach(), dtype, lambda: w)
    return value.to(dtype), dropped.to(dtype)


def _write_kahan(w: Tensor, dtype: torch.dtype, bits: Bits) -> Parts:
    value = nearest(w, dtype)
    dropped = torch.where(value.abs() <= torch.finfo(dtype).max, w - value, 0.0)
    return value, nearest(dropped, dtype)


#: The high half of the FP32 value, and 16 remainder bits as int16 (:mod:`mezzo.step.split`): 4 bytes a weight.
SPLIT: Final = Storage(
    name="split",
    extra="remainder",
    make=_make_split,
    read=_read_split,
    write=lambda w, dtype, bits: split.halves(w, dtype),
)
#: An FP32 master, and its rounding (as split storage rounds) for the model: 6 bytes a weight.
FULL: Final = Storage(
    name="full",
    extra="master",
    make=_make_full,
    read=lambda parts: parts[1],
    write=lambda w, dtype, bits: (split.halves(w, dtype)[0], w),
)
#: The weight is all there is: FP32, or low precision rounded to nearest after every update.
PLAIN: Final = Storage(
    name="plain",
    extra=None,
    make=_make_plain,
    read=lambda parts: parts[0].to(torch.float32),
    write=_write_plain,
)
#: Low-precision weights rounded to a random neighbour, so that small updates count on average.
STOCHASTIC: Final = Storage(
    name="stochastic",
    extra=None,
    make=_make_plain,
    read=PLAIN.read,
    write=lambda w, dtype, bits: (stochastic(w, dtype, bits()),),
    random=True,
)
#: What rounding dropped, itself in the weight's dtype, is added next time: 4 bytes a weight; 16 significant bits in
#: BF16, 22 in FP16 but in steps of 2^-24 (Kahan 1965; Zamirai et al., *Revisiting BFloat16 Training*, 2020, §4).
KAHAN: Final = Storage(
    name="kahan",
    extra="compensation",
    make=_make_kahan,
    read=lambda parts: parts[0].to(torch.float32) + parts[1].to(torch.float32),
    write=_write_kahan,
)

_WITHOUT_MASTER: Final = {"nearest": PLAIN, "stochastic": STOCHASTIC, "kahan": KAHAN}


_MASTERS: Final = ("split", "full", None)


def storage(
    master: Literal["split", "full"] | None,
    dtype: torch.dtype,
    *,
    rounding: Literal["nearest", "stochastic", "kahan"] = "nearest",
) -> Storage:
    """Return how weights of a dtype are stored; FP32 weights are always stored as they are.

    Args:
        master: ``"split"``, ``"full"``, or ``None`` for low-precision weights without a master.
        dtype: The dtype that the model computes with.
        rounding: What happens to the bits that do not fit where there is no master.

    Raises:
        PolicyError: An unknown word, ``rounding`` beside a master, or a dtype that is none of the three.

    Example:
        >>> import torch
        >>> storage("split", torch.bfloat16).extra, storage("split", torch.float32).extra
        ('remainder', None)
    """
    for what, word, known in (("master", master, _MASTERS), ("rounding", rounding, _WITHOUT_MASTER)):
        if word not in known:
            raise PolicyError(f"unknown {what} {word!r}", why=errors.nearest(str(word), map(str, known)))
    if master is not None and rounding != "nearest":
        raise PolicyError(
            f'rounding="{rounding}" beside master="{master}"',
            why="with a master no bit of an update is dropped",
            write=f'master=None, rounding="{rounding}"',
        )
    if dtype == torch.float32:
        return PLAIN
    if dtype not in LOW:
        raise PolicyError(f"weights of {dtype}", why="weights are float32, float16 or bfloat16", write="model.float()")
    if master is None:
        return _WITHOUT_MASTER[rounding]
    return FULL if master == "full" else SPLIT
