"""Telling when a user clipped gradients that still carry the loss scale.

torch's ``clip_grad_*`` leave no trace but the gradients themselves, written once or twice each. So a few values are
kept from before: ``clip_grad_norm_`` multiplies all of them by one number below 1, which is nobody's choice and leaves
a norm that is round, and ``clip_grad_value_`` cuts them at the largest magnitude there is. A user's other edits do
neither: they treat values differently, or their factor is a round number itself and the norm is not. Only a factor
that is new at each step can look like it, in FP32 about once in 10⁴ steps; FP16 knows its norms less well, and there
a factor below 1/200 (a count of tokens) does in 3 of 100.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import message
from mezzo.scale.transfer import moved
from mezzo.session.gradients import dense, mark, norms

__all__ = ["EditWatch", "Edited", "clipping_warning"]

#: Gradients looked at; clipping writes to all of them.
_WATCHED: Final = 16

#: Of every fourth of these a few values are kept.
_EVERY: Final = 4
_VALUES: Final = 32

#: Relative: how far the rounding of sums moves an FP32 norm.
_NORM_TOLERANCE: Final = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """What gradients look clipped to.

    Attributes:
        limit: 0-d float32: the norm or value; NaN where it does not look like clipping.
        scale: 0-d float32: the loss scale that they carried.
    """

    limit: Tensor
    scale: Tensor


class EditWatch:
    """Sees what is written to gradients between the last backward pass and :meth:`look`.

    **Cost**: one small kernel for each backward pass. Gradients that were all written in place are read once more.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop what was noted."""
        self._seen: list[tuple[Tensor, tuple[int, int]]] = []
        self._others: Iterator[Tensor] = iter(())
        self._before: Tensor | None = None

    @torch.no_grad()
    def remember(self, leaves: Iterable[Tensor]) -> None:
        """Note the gradients as a backward pass left them.

        Args:
            leaves: The parameters that may have one; most are only asked for if the first were edited.
        """
        others = iter(leaf for leaf in leaves if leaf.grad is not None)
        self._seen = [(leaf, mark(leaf.grad)) for leaf in itertools.islice(others, _WATCHED) if leaf.grad is not None]
        self._others = others
        self._before = _some_values([leaf for leaf, _ in self._seen])

    def look(self, scale: Tensor | None) -> Edited | None:
        """Compare with the gradients as they are now, and forget them.

        Args:
            scale: What they carry; ``None`` for nothing, and nothing is looked at.

        Returns:
            ``None`` where they were not all written once, or all twice.
        """
        seen, others, before = self._seen, self._others, self._before
        self.forget()
        if scale is None or before is None or (times := _times_written(seen)) not in (1, 2):
            return None
        leaves = [leaf for leaf, _ in seen]
        after = _some_values(leaves)
        if after is None or after.shape != before.shape:
            return None
        gradients = dense([*leaves, *others])
        dtype = min((g.dtype for g in gradients), key=lambda dtype: torch.finfo(dtype).bits)
        before, after = (moved(values, scale.device, torch.float64) for values in (before, after))
        limit = _value_cut_at(before, after, dtype)
        if times == 1 and dtype != torch.bfloat16:  # whose norms tell nothing
            norm = norms(gradients, scale.device)[0].double()
            by_norm = _norm_clipped_to(before, after, norm, dtype)
            limit = torch.where(by_norm.isnan(), limit, by_norm)  # values that are all alike look cut, too
        return Edited(limit=limit.float(), scale=scale)


def _times_written(seen: list[tuple[Tensor, tuple[int, int]]]) -> int:
    """Return how often each gradient was written in place; 0 if some were more often than others."""
    written = set()
    for leaf, (address, version) in seen:
        now, count = mark(leaf.grad) if leaf.grad is not None else (0, 0)
        written.add(count - version if now == address else 0)
    return written.pop() if len(written) == 1 else 0


def _some_values(leaves: list[Tensor]) -> Tensor | None:
    """Return a copy of a few values of a few gradients, one after the other; ``None`` where there are none to see."""
    gradients = [leaf.grad for leaf in leaves[::_EVERY] if leaf.grad is not None]
    plain = [g for g in gradients if type(g) is Tensor and g.layout == torch.strided and g.is_contiguous()]
    if not plain or any(g.device != plain[0].device or g.is_complex() for g in plain):
        return None
    return torch.cat([g.as_strided((min(g.numel(), _VALUES),), (1,)) for g in plain])


def _value_cut_at(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the magnitude at which values were cut, NaN if they were not."""
    largest = after.abs().max()
    cut = torch.maximum(torch.minimum(before, largest), -largest)
    # Infinities cut at the end of a format were replaced, not clipped.
    is_cut = (before.abs() > 2 * largest).any() & (largest > 0) & (largest < torch.finfo(dtype).max / 2)
    return largest.masked_fill(~(_close(after, cut, dtype) & is_cut), torch.nan)


def _norm_clipped_to(before: Tensor, after: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm that gradients were clipped to, NaN if they were not.

    Args:
        before: A few values, float64.
        after: The same, as they are now.
        norm: 2-norm of all gradients as they are now.
        dtype: Of the gradients; the lowest.
    """
    info, is_half = torch.finfo(dtype), dtype == torch.float16
    factor = (before * after).sum() / before.square().sum()
    fits = _close(after, before * factor, dtype) & (factor < 0.5)
    # A user divides by a count, or multiplies by a short number. From many values it is known better than from one.
    known = info.eps / 4
    chosen = _rounded(factor, _unit(factor) / 10, known).isfinite()
    chosen |= _rounded(1 / factor, torch.ones_like(factor), known).isfinite() & (1 / factor < 0.05 / known)
    # torch divides by the norm plus 1e-6. In FP16 it rounds norms and factor to that, and a small factor to 2⁻²⁴.
    spread = 2 * info.eps + 2.0**-25 / factor if is_half else torch.full_like(norm, _NORM_TOLERANCE)
    limit = _rounded(norm + 1e-6 * factor, _unit(norm) / (2 if is_half else 10), spread)
    limit = limit.masked_fill(chosen | ~fits, torch.nan)
    # An FP16 norm above 65504 is infinite, and clips everything to zero.
    return limit.masked_fill((norm == 0) & before.any() & is_half, 0.0)


def _close(values: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether values are what was expected, but for one rounding each to a dtype."""
    info = torch.finfo(dtype)
    return ((values - expected).abs() <= info.eps * expected.abs() + info.smallest_normal * info.eps).all()


def _unit(value: Tensor) -> Tensor:
    """Return the power of ten of a number's first digit."""
    return 10 ** value.log10().floor()


def _rounded(value: Tensor, unit: Tensor, tolerance: Tensor | float) -> Tensor:
    """Return the nearest multiple of a unit, NaN where it is farther away than a relative tolerance."""
    nearby = (value / unit).round() * unit
    return nearby.masked_fill(~((nearby - value).abs() <= tolerance * value), torch.nan)


def clipping_warning(limit: float, scale: float, step: int) -> str:
    """Say what happened and what to write instead.

    Args:
        limit: The norm or value that gradients were clipped to; 0 where an FP16 norm overflowed.
        scale: The loss scale that they carried.
        step: The step's number.
    """
    why = f"they are {scale:g} times too large there, so {limit:.3g} clips them to {limit / scale:.3g}"
    if limit == 0:
        why = f"they are {scale:g} times too large there: their float16 norm was infinite, and clipped them to 0"
    shown = f"{limit:.3g}" if limit else "1.0"
    return message(
        "gradients were clipped while they still carry the loss scale",
        where=f"step {step}, all gradients edited in place to {limit:.3g} since amp.backward()",
        why=why,
        write=f"MixedPrecision(…, max_grad_norm={shown}); or amp.unscale_(), and then "
        f"torch.nn.utils.clip_grad_…(amp.master_params(), {shown})",
    )
