"""Loss scales of gradients inside of losses: penalties and higher derivatives, each with one of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from mezzo.scale.scaler import Compute
from mezzo.step.passes import not_finite

#: The factor between a scale that overflowed and the largest that is tried again.
_LOWER: Final = 2.0**-4
_CEILING: Final = 2.0**24
#: Where the largest result has room: what it is made of may be 2⁸ times larger in FP16, and what is 2²² times smaller
#: is a normal number.
_LARGEST: Final = 2.0**8
#: At most what one begins with: a sum's gradient is the scale itself, and FP16 ends at 65504.
_FIRST: Final = 2.0**15
#: Calls of one step that are told from each other; further ones share the last one's scale.
_MOST: Final = 64


class InnerScales:
    """A loss scale for each call that differentiates inside of a loss: the k-th since the last pass has the k-th.

    Each begins where the loss's scale is then, or at 2¹⁵: derivatives of another order may be larger by any factor.
    One that overflowed falls by 2⁸ at once. Each clean call doubles it while the largest result has room for that, up
    to a bound: 2⁻⁴ of what overflowed last, twice as much after each ``interval`` of clean calls.

    Args:
        compute: How pure functions of a few tensors are computed.
        interval: See above.

    **Cost**: no host sync; a launch a call on an accelerator, else some 20 µs.
    """

    def __init__(self, compute: Compute, interval: int) -> None:
        self._compute, self._interval = compute, interval
        self._each: list[tuple[Tensor, ...]] = []  # scale, bound, clean calls: 0-d float32
        self._place = 0

    def begin_again(self) -> None:
        """Have the next call be the first."""
        self._place = 0

    def next(self, scale: Tensor) -> Tensor:
        """Return the next call's scale, 0-d float32, which nothing writes.

        Args:
            scale: The loss's.
        """
        self._place = min(self._place + 1, _MOST)
        if self._place > len(self._each):
            first = scale.clamp_max(_FIRST)
            self._each.append((first, first.clone(), torch.zeros_like(scale)))
        return self._each[self._place - 1][0].clone()

    def told(self, outputs: Tensor, results: Tensor) -> Tensor:
        """Take note of a call, the last one of :meth:`next`; return whether it overflowed, 0-d bool.

        Args:
            outputs: 0-d: not finite where what was differentiated is not.
            results: 0-d: at least the largest gradient, without the scale; not finite where one is not.
        """
        numbers = self._each[self._place - 1]
        overflowed, *after = self._compute(moved_on, (self._interval,), [*numbers, outputs, results])
        for number, value in zip(numbers, after, strict=True):  # in place: a captured graph holds addresses
            number.copy_(value)
        return overflowed

    # State ------------------------------------------------------------------------------------------------

    def rows(self) -> list[list[float]]:
        """Return the numbers of each as plain values; a host sync where there are any."""
        return (
            torch.stack([number for each in self._each for number in each]).view(-1, 3).tolist() if self._each else []
        )

    def load(self, rows: Iterable[Sequence[float]], device: torch.device) -> None:
        """Go on from what :meth:`rows` returned."""
        made = (torch.tensor(row, dtype=torch.float32, device=device).unbind() for row in rows)
        self._each[:], self._place = [tuple(map(torch.clone, each)) for each in made], 0


def moved_on(
    interval: int, scale: Tensor, bound: Tensor, clean: Tensor, outputs: Tensor, results: Tensor
) -> tuple[Tensor, ...]:
    """Return whether a call's gradients are not finite, and its three numbers after it; no scale cures bad outputs."""
    overflowed, is_held = not_finite(results), not_finite(outputs)
    clean = torch.where(is_held, clean, torch.where(overflowed, 0.0, clean + 1.0))
    grows = clean >= float(interval)
    clean = torch.where(grows, 0.0, clean)
    higher = torch.where(grows, (bound * 2.0).clamp_max(_CEILING), bound)
    bound = torch.where(is_held, bound, torch.where(overflowed, scale * _LOWER, higher))
    doubled = scale * 2.0
    doubled = torch.where(doubled - bound > 0.0, bound, doubled)
    doubled = torch.where(doubled * results > _LARGEST, scale, doubled)
    scale = torch.where(is_held, scale, torch.where(overflowed, bound * _LOWER, doubled))
    return overflowed, scale, bound, clean
