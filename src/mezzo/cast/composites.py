"""Functions that torch composes in C++ of products, written in Python so that a region reaches those products.

Each runs the steps of its C++ original in the same order, and gives the same bits. ``torch.autocast`` reaches the
products inside; a function mode sees only the whole, and could neither emulate them nor apply a rule to them.

Source: ``aten/src/ATen/native/LinearAlgebra.cpp`` and ``Correlation.cpp``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["COMPOSITES"]


def _matrix_power(input: Tensor, n: int) -> Tensor:  # noqa: A002 - torch's own names, here and below
    """Multiply a matrix by itself, by repeated squaring from the fourth power on."""
    if n in (0, 1) or input.shape[-1:] != input.shape[-2:-1]:  # no product, or torch's own error
        with torch._C.DisableTorchFunction():
            return torch.matrix_power(input, n)
    base = torch.linalg.inv(input) if n < 0 else input
    n = abs(n)
    if n == 3:
        return torch.matmul(torch.matmul(base, base), base)
    result = None
    while True:
        if n % 2:
            result = base if result is None else torch.matmul(result, base)
        n //= 2
        if not n:
            assert result is not None
            return result
        base = torch.matmul(base, base)


def _cov(
    input: Tensor,  # noqa: A002
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Estimate the covariance of the rows."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input  # (variables, observations)
    with torch._C.DisableTorchFunction():
        # Its errors and its warning, without its product: a float64 row is never cast.
        like = torch.zeros_like(rows[..., :1, :], dtype=None if input.dtype == torch.bool else torch.float64)
        torch.cov(like, correction=correction, fweights=fweights, aweights=aweights)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any = rows.shape[1] if weights is None else weights.sum()
    mean = (rows if weights is None else rows * weights).sum(1) / total
    freedom = total - correction
    if weights is not None and aweights is not None and correction != 0:
        freedom = total - correction * (weights * aweights).sum() / total
    freedom = torch.as_tensor(freedom).clamp(min=0)
    rows = rows - mean.unsqueeze(1)
    product = torch.mm(rows, (rows if weights is None else rows * weights).t().conj())
    return torch.true_divide(product, freedom).squeeze()


def _corrcoef(input: Tensor) -> Tensor:  # noqa: A002
    """Estimate the correlation of the rows."""
    covariance = torch.cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviation = torch.sqrt(covariance.diag().real if input.is_complex() else covariance.diag())
    scaled = covariance / deviation.view(-1, 1) / deviation.view(1, -1)
    if input.is_complex():
        return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
    return scaled.clip(-1, 1)


def _rmatmul(self: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, self)


#: What stands for each function inside a region that handles the products in it.
COMPOSITES: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = types.MappingProxyType(
    {
        torch.linalg.matrix_power: _matrix_power,
        torch.matrix_power: _matrix_power,
        torch.Tensor.matrix_power: _matrix_power,
        torch.cov: _cov,
        torch.Tensor.cov: _cov,
        torch.corrcoef: _corrcoef,
        torch.Tensor.corrcoef: _corrcoef,
        torch.Tensor.__rmatmul__: _rmatmul,
    }
)
