"""Loss scales of gradients inside of losses: penalties and higher derivatives, each with one of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from mezzo.scale.device_state import Compute

#: A scale that overflowed is multiplied by the first; the second gives the largest scale that is tried again.
_FALL: Final = 2.0**-8
_LOWER: Final = 2.0**-4
#: The bound of the largest result: its terms may be 2⁸ times larger in FP16, and terms 2²² times smaller are normal.
_LARGEST: Final = 2.0**8
#: The largest first scale: the gradient of a sum is the scale itself, and FP16 ends at 65504.
_FIRST: Final = 2.0**15
#: The most calls of a step that have scales of their own; further calls share the last one's.
_MOST: Final = 64


class InnerScales:
    """A loss scale for each call that differentiates inside of a loss: the k-th since the last pass has the k-th.

    Each begins where the loss's scale is then, or at 2¹⁵: derivatives of another order may be larger by any factor.
    One that overflowed falls by 2⁸ at once. Each clean call doubles it while the largest result has room for that, up
    to a bound: 2⁻⁴ of what overflowed last, and twice as much after ``interval`` of clean calls.

    Args:
        compute: How pure functions of a few tensors are computed.
        interval: See above.

    Attributes:
        num_calls: How many calls there were since the last pass.

    **Cost**: no host sync; a launch a call on an accelerator.
    """

    def __init__(self, compute: Compute, interval: int) -> None:
        self._compute, self._growth = compute, 2.0 ** (1 / interval)
        self._each: list[tuple[Tensor, Tensor]] = []  # scale and bound, 0-d float32
        self.num_calls = 0

    def next(self, scale: Tensor) -> Tensor:
        """Return the next call's scale, 0-d float32, which nothing writes.

        Args:
            scale: The loss's.
        """
        self.num_calls = min(self.num_calls + 1, _MOST)
        if self.num_calls > len(self._each):
            first = scale.clamp_max(_FIRST)
            self._each.append((first, first.clone()))
        return self._each[self.num_calls - 1][0].clone()

    def record(self, outputs: Tensor, results: Tensor) -> None:
        """Update the scale of the last call of :meth:`next` by what that call has returned.

        Args:
            outputs: 0-d: not finite where what was differentiated is not.
            results: 0-d: at least the largest gradient, without the scale; not finite where one is not.
        """
        numbers = self._each[self.num_calls - 1]
        tensors = [*numbers, outputs, results]
        for number, value in zip(numbers, self._compute(moved_on, (self._growth,), tensors), strict=True):
            number.copy_(value)  # in place: a captured graph holds addresses

    # State ------------------------------------------------------------------------------------------------

    def rows(self) -> list[list[float]]:
        """Return the scale and bound of each call as numbers; a host sync if there was a call."""
        return [[float(scale), float(bound)] for scale, bound in self._each]

    def load(self, rows: Iterable[Sequence[float]], device: torch.device) -> None:
        """Load what :meth:`rows` returned."""
        pairs = (torch.tensor(row, dtype=torch.float32, device=device).unbind() for row in rows)
        self._each[:], self.num_calls = [(scale.clone(), bound.clone()) for scale, bound in pairs], 0


def moved_on(growth: float, scale: Tensor, bound: Tensor, outputs: Tensor, results: Tensor) -> tuple[Tensor, Tensor]:
    """Return a call's scale and bound after it, as one pure function of 0-d tensors; bad outputs move neither.

    Args:
        growth: What a clean call multiplies the bound by.
        scale: The scale.
        bound: The bound.
        outputs: Not finite where what was differentiated is not.
        results: The largest gradient, without the scale.
    """
    overflowed, is_held = results * 0.0 != 0.0, outputs * 0.0 != 0.0
    higher, doubled = bound * growth, scale * 2.0
    has_room = (doubled - higher <= 0.0) & (doubled * results <= _LARGEST)
    new_scale = torch.where(overflowed, scale * _FALL, torch.where(has_room, doubled, scale))
    higher = torch.where(overflowed, scale * _LOWER, higher)
    return torch.where(is_held, scale, new_scale), torch.where(is_held, bound, higher)
