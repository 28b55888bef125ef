"""How far a tensor is from its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["cosine", "sqnr", "together"]


def sqnr(reference: Tensor, value: Tensor) -> float:
    r"""Return the signal-to-quantisation-noise ratio, ``10·log10(Σ r² / Σ (v − r)²)``, in dB; a host sync.

    Where the reference is not finite, elements are left out. A value that alone is not finite gives −inf.

    Returns:
        The ratio; inf for equal tensors, NaN where the reference is zero everywhere, and the value finite.

    Example:
        >>> round(sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])), 6)
        20.0
    """
    known = torch.isfinite(reference)
    wide = reference.double()
    error = torch.where(known, value.double() - wide, 0.0)
    signal = torch.where(known, wide, 0.0)
    return _decibels(*torch.stack([signal.square().sum(), error.square().sum()]).tolist())


def _decibels(signal: float, noise: float) -> float:
    """Return the ratio of two energies in dB, as :func:`sqnr` does."""
    if not math.isfinite(noise):
        return -math.inf
    if not signal:
        return math.nan
    return 10.0 * math.log10(signal / noise) if noise else math.inf


def together(references: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> float:
    """Return the ratio of all tensors together, as of one."""
    energies = torch.zeros(2, dtype=torch.float64)
    for name, reference in references.items():
        wide = reference.double()
        energies += torch.stack([wide.square().sum(), (values[name].double() - wide).square().sum()]).cpu()
    return _decibels(*energies.tolist())


def cosine(one: Tensor, other: Tensor) -> float | None:
    """Return the cosine of the angle between two tensors; ``None`` where one of them is zero."""
    a, b = one.double().flatten(), other.double().flatten()
    product, first, second = torch.stack([a @ b, a @ a, b @ b]).tolist()
    length = math.sqrt(first) * math.sqrt(second)
    return product / length if length else None
