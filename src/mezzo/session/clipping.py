"""Telling when a user clipped gradients that still carry the loss scale.

torch's ``clip_grad_*`` leave no trace but the gradients themselves: ``clip_grad_norm_`` writes all of them once and
leaves a norm that is a round number, ``clip_grad_value_`` writes them twice and leaves a round largest value. Norms
of gradients are not round by themselves, so that a user's other edits hardly ever look like it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.errors import message
from mezzo.session.gradients import mark

__all__ = ["EditWatch", "Edited", "clipping_warning", "edited", "round_number"]

#: Gradients looked at; clipping writes to all of them.
_WATCHED = 16


class EditWatch:
    """How often all gradients were written between the last backward pass and :meth:`look`.

    Attributes:
        times: How often; 0 if some were written more often than others.
        eps: Of the gradients' dtype.
    """

    def __init__(self) -> None:
        self.times = 0
        self.eps = 0.0
        self._seen: list[tuple[Tensor, tuple[int, int]]] = []

    def remember(self, leaves: Iterable[Tensor]) -> None:
        """Note the gradients as a backward pass left them."""
        having = (leaf for leaf in leaves if leaf.grad is not None)
        self._seen = [(leaf, mark(leaf.grad)) for leaf in itertools.islice(having, _WATCHED) if leaf.grad is not None]

    def look(self) -> None:
        """Compare with the gradients as they are now, and forget them."""
        written, self.times = set(), 0
        for leaf, (address, version) in self._seen:
            now, count = mark(leaf.grad) if leaf.grad is not None else (0, 0)
            written.add(count - version if now == address else 0)
            self.eps = torch.finfo(leaf.dtype).eps
        self._seen = []
        if len(written) == 1:
            (self.times,) = written


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """What clipping would have made round.

    Attributes:
        size: 0-d float32: the gradients' norm, or their largest magnitude.
        scale: 0-d float32: the loss scale they carry.
        tolerance: Relative: how far rounding moves the size from what it was clipped to.
    """

    size: Tensor
    scale: Tensor
    tolerance: float


def edited(watch: EditWatch, gradients: list[Tensor], norm: Tensor, scale: Tensor) -> Edited | None:
    """Return what clipping would have made round: after one edit the norm, after two the largest magnitude.

    Args:
        watch: What saw the edits.
        gradients: The gradients, still scaled.
        norm: Their 2-norm, 0-d float32.
        scale: What they carry.

    Returns:
        ``None`` where nothing was edited, or not as clipping does.
    """
    if watch.times == 1:
        # clip_grad_norm_ adds 1e-6 to the norm that it divides by, and takes norms in the gradients' own dtype.
        return Edited(size=norm, scale=scale, tolerance=4e-6 + 2 * watch.eps)
    if watch.times != 2:
        return None
    largest = [g.abs().amax().to(norm.device, torch.float32, non_blocking=True) for g in gradients if g.numel()]
    return Edited(size=torch.stack(largest).max(), scale=scale, tolerance=watch.eps)


def round_number(value: float, tolerance: float) -> float | None:
    """Return the number of two digits that a value is, of one where the tolerance is wide.

    Args:
        value: Not negative.
        tolerance: Relative.

    Example:
        >>> round_number(0.9999998, 4e-6), round_number(0.25, 0), round_number(7.1234, 4e-6)
        (1.0, 0.25, None)
    """
    if not 0 < value < math.inf:
        return None
    unit = 10.0 ** (math.floor(math.log10(value) + tolerance) - (tolerance < 1e-4))
    nearby = round(value / unit) * unit
    return float(f"{nearby:.3g}") if abs(nearby - value) <= tolerance * value else None


def clipping_warning(limit: float, scale: float, step: int) -> str:
    """Say what happened and what to write instead."""
    return message(
        "gradients were clipped while they still carry the loss scale",
        where=f"step {step}, all gradients edited in place to a round {limit:g} since amp.backward()",
        why=f"they are {scale:g} times too large there, so {limit:g} clips them to {limit / scale:.3g}",
        write=f"MixedPrecision(…, max_grad_norm={limit:g}); or amp.unscale_() before torch.nn.utils.clip_grad_…",
    )
