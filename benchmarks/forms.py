"""Forms in which an optimizer's moments can be kept: curves of 8-bit codes, roundings and groups, as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mezzo.step import moments
from mezzo.step.storage import nearest, stochastic

#: From moments in groups, whether they are squares, and random numbers in [0, 1), to the values that are kept.
Keep = Callable[[Tensor, bool, Tensor], Tensor]
#: From codes as shares of the last one to sizes as shares of the largest one; ``"mezzo"`` is the library's.
CURVES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "linear": lambda code: code,
    "softsign": lambda code: code / (2 - code),
    "squares": torch.square,
    "fourth powers": lambda code: code**4,
}


def in_fp32(values: Tensor, squares: bool, chance: Tensor) -> Tensor:
    """Keep all."""
    return values


def in_bf16(values: Tensor, squares: bool, chance: Tensor) -> Tensor:
    """Keep BF16 values, rounded at random as the library does."""
    return stochastic(values, (chance * 2**16).to(torch.int32))


def by_library(*, at_random: tuple[bool, bool] = (True, True)) -> Keep:
    """Keep the library's codes: first and second moments rounded at random, or to nearest."""

    def keep(values: Tensor, squares: bool, chance: Tensor) -> Tensor:
        dtype = torch.uint8 if squares else torch.int8
        bits = (chance * 2 * moments.NEAREST).to(torch.int32) if at_random[squares] else moments.NEAREST
        codes, scales = moments.coded(values, dtype, bits)
        return moments.valued(codes.to(dtype), scales)

    return keep


def by_table(*curves: str, at_random: tuple[bool, bool] = (True, True), off_zero: bool = True) -> Keep:
    """Keep codes that stand for the values of a curve.

    Args:
        *curves: Of first and of second moments.
        at_random: Whether each is rounded so that the mean is the value, and not to the nearest one.
        off_zero: Whether no second moment becomes zero that was not.
    """
    tables = [table_of(curves[0], torch.int8), table_of(curves[-1], torch.uint8)]

    def keep(values: Tensor, squares: bool, chance: Tensor) -> Tensor:
        table, sizes = tables[squares], values.abs()
        scales = rounded_up(sizes.amax(-1, keepdim=True))
        shares = torch.where(scales > 0, sizes / scales, 0.0)
        below = (torch.bucketize(shares, table, right=True) - 1).clamp_max(len(table) - 2)
        low, high = table[below], table[below + 1]
        codes = below + (shares - low > (chance if at_random[squares] else 0.5) * (high - low))
        if squares and off_zero:
            codes = torch.maximum(codes, (sizes > 0).to(codes.dtype))
        return (table[codes] * scales).copysign(values)

    return keep


def table_of(curve: str, dtype: torch.dtype) -> Tensor:
    """Return the values of all codes that are not negative, as shares of a scale."""
    codes = torch.arange(torch.iinfo(dtype).max + 1, dtype=torch.int32)
    return moments.valued(codes.to(dtype), torch.ones(1)) if curve == "mezzo" else CURVES[curve](codes / codes[-1])


def rounded_up(values: Tensor) -> Tensor:
    """Round FP32 values that are not negative up to BF16's grid."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x1_0000).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to keep moments: what it is called, what it keeps of one, and how many neighbours share a scale."""

    name: str
    keep: Keep
    group: int = 0

    @property
    def bytes(self) -> float:
        """Of an element's two moments, with scales."""
        plain = {"float64": 16, "FP32": 8}.get(self.name, 4)
        return 2 + 2 * 2 / self.group if self.group else plain


NEAREST: Final = (False, False)
NAIVE: Final = "naive: linear, to nearest, may become zero"
#: "mezzo" is the library's own; others differ from it, or from squares, in what their names say.
FORMS: Final = (
    Form(name="FP32", keep=in_fp32),
    Form(name="BF16, at random", keep=in_bf16),
    Form(name="BF16, to nearest", keep=lambda values, squares, chance: nearest(values, torch.bfloat16)),
    *(Form(name=f"mezzo, groups of {group}", keep=by_library(), group=group) for group in (16, 64, 128)),
    *(Form(name=f"squares, groups of {group}", keep=by_table("squares"), group=group) for group in (16, 64, 128)),
    *(
        Form(name=name, keep=keep, group=moments.GROUP)
        for name, keep in {
            "mezzo": by_library(),
            "mezzo, to nearest": by_library(at_random=NEAREST),
            "mezzo, first moments to nearest": by_library(at_random=(False, True)),
            "mezzo, second moments to nearest": by_library(at_random=(True, False)),
            "mezzo, may become zero": by_table("mezzo", off_zero=False),
            "linear": by_table("linear"),
            "squares": by_table("squares"),
            "squares, to nearest": by_table("squares", at_random=NEAREST),
            "squares, first moments to nearest": by_table("squares", at_random=(False, True)),
            "squares, may become zero": by_table("squares", off_zero=False),
            "fourth powers": by_table("fourth powers"),
            "first moments by softsign, second by squares": by_table("softsign", "squares"),
            "first moments by squares, second by fourth powers": by_table("squares", "fourth powers"),
            "first moments by squares, second as mezzo": by_table("squares", "mezzo"),
            "first moments as mezzo, second by squares": by_table("mezzo", "squares"),
            "softsign and squares, to nearest, may become zero": by_table(
                "softsign", "squares", at_random=NEAREST, off_zero=False
            ),
            NAIVE: by_table("linear", at_random=NEAREST, off_zero=False),
        }.items()
    ),
)  # fmt: skip
