"""Loss scales of gradients inside of losses: penalties and higher derivatives, each with one of its own."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mezzo.scale.scaler import Compute
from mezzo.step.passes import not_finite

#: The factor between a scale that overflowed and the largest that is tried again.
_LOWER: Final = 2.0**-4
_CEILING: Final = 2.0**24
#: Calls of one step that are told from each other; further ones share the last one's scale.
_MOST: Final = 64


class InnerScales:
    """A loss scale for each call that differentiates inside of a loss: the k-th since the last pass has the k-th.

    Each begins where the loss's scale is then: derivatives of another order may be larger by any factor. One that
    overflowed falls by 2⁸ at once, and each clean call doubles it, up to a bound: 2⁻⁴ of what overflowed last, twice
    as much after each ``interval`` of clean calls. So at most two overflows find a scale 2⁸ below the first one.

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
            scale: What a new one begins with.
        """
        self._place = min(self._place + 1, _MOST)
        if self._place > len(self._each):
            self._each.append((scale.clone(), scale.clone(), torch.zeros_like(scale)))
        return self._each[self._place - 1][0].clone()

    def told(self, outputs: Tensor, results: Tensor) -> Tensor:
        """Take note of a call, the last one of :meth:`next`; return whether it overflowed, 0-d bool.

        Args:
            outputs: 0-d: not finite where what was differentiated is not.
            results: 0-d: not finite where a gradient is not.
        """
        numbers = self._each[self._place - 1]
        overflowed, *after = self._compute(moved_on, (self._interval,), [*numbers, outputs, results])
        for number, value in zip(numbers, after, strict=True):  # in place: a captured graph holds addresses
            number.copy_(value)
        return overflowed


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
    scale = torch.where(is_held, scale, torch.where(overflowed, bound * _LOWER, doubled))
    return overflowed, scale, bound, clean
