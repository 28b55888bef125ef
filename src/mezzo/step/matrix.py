"""Updates of whole matrices, by torch's own operations in torch's own order, so that their bits are torch's.

On CPUs ``lerp`` and ``add`` round once in vectors and twice in the last elements of a tensor: no kernel that is written
for one element could repeat that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

#: A number on the host, or a 0-d tensor on the device, which a captured step reads anew.
Number: TypeAlias = float | Tensor

#: How a learning rate follows the shape of a matrix, (rows, columns), by torch's names.
RATIOS: Final[Mapping[str | None, Callable[[int, int], float]]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


@dataclass(frozen=True, slots=True)
class Products:
    """How BF16 matrices are multiplied: ``torch.mm`` and ``torch.addmm``, or what stands for them."""

    mm: Callable[[Tensor, Tensor], Tensor]
    addmm: Callable[..., Tensor]


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.float(), b.float()).bfloat16()


def _addmm(summand: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    return torch.addmm(summand.float(), a.float(), b.float(), beta=beta, alpha=alpha).bfloat16()


NATIVE: Final = Products(torch.mm, torch.addmm)
#: In FP32, and rounded once, for processors on which BF16 products are wrong, or end the process.
EMULATED: Final = Products(_mm, _addmm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What an update knows of a matrix of which this rank may have a part alone.

    Attributes:
        shape: Of the whole.
        whole_of: Returns the whole, from this rank's part of a matrix that lies as the weight does.
        part_of: Returns this rank's part of a whole.
        on_host: Whether the numbers of a step are in host memory.
        products: How BF16 matrices are multiplied here.
    """

    shape: torch.Size
    whole_of: Callable[[Tensor], Tensor]
    part_of: Callable[[Tensor], Tensor]
    on_host: bool
    products: Products = NATIVE


def orthogonal(
    direction: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, products: Products = NATIVE
) -> Tensor:
    """Return a matrix with the singular vectors of another one, and singular values near 1: Newton–Schulz in BF16.

    Args:
        direction: BF16, two-dimensional; it may be overwritten.
        coefficients: Of the polynomial ``a X + b X Xᵀ X + c X Xᵀ X Xᵀ X``.
        steps: How often it is applied.
        eps: The least norm that is divided by.
        products: How matrices are multiplied.

    Returns:
        BF16.

    **Cost**: three products a step, and some BF16 copies of the matrix. No host sync.

    References:
        Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024.
    """
    a, b, c = coefficients
    is_tall = direction.size(0) > direction.size(1)
    x = direction.T if is_tall else direction  # (least, most)
    x.div_(x.norm().clamp(min=eps))  # so the largest singular value is 1 at most
    for _ in range(steps):
        gram = products.mm(x, x.T)  # (least, least)
        update = products.addmm(gram, gram, gram, beta=b, alpha=c)
        x = products.addmm(x, update, x, beta=a)
    return x.T if is_tall else x


def muon(
    gradient: Tensor,
    weight: Tensor,
    states: tuple[Tensor, ...],
    numbers: Mapping[str, Number],
    *,
    matrix: Matrix,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    nesterov: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Muon: the momentum, made orthogonal.

    .. math::
        b &\leftarrow \mu b + (1 - \mu) g, \qquad
        d = \begin{cases} (1 - \mu) g + \mu b & \text{nesterov} \\ b & \text{otherwise} \end{cases} \\
        w &\leftarrow (1 - \eta\lambda)\,w - \eta\,r(\text{shape})\,\mathrm{NewtonSchulz}(d)

    Args:
        gradient: FP32, this rank's part, as every other tensor.
        weight: FP32; it is written in place.
        states: The momentum, FP32 and laid out as the gradient is; it is written in place.
        numbers: ``decay``, ``momentum``, ``gain``, which FP32 holds, and ``lr``, which is rounded behind the ratio.
        matrix: What the whole of it is.
        ns_coefficients: Of :func:`orthogonal`.
        ns_steps: Of :func:`orthogonal`.
        eps: Of :func:`orthogonal`.
        adjust_lr_fn: One of :data:`RATIOS`.
        nesterov: Whether to look ahead along the momentum.

    Returns:
        The weight and the momentum: the same tensors.
    """
    (momentum,) = states
    momentum.lerp_(gradient, numbers["gain"])
    direction = gradient.lerp(momentum, numbers["momentum"]) if nesterov else momentum
    sixteen = direction.to(torch.bfloat16, copy=True)
    whole = orthogonal(matrix.whole_of(sixteen), ns_coefficients, ns_steps, eps, matrix.products)
    step = matrix.part_of(whole)
    rate = numbers["lr"] * (RATIOS[adjust_lr_fn](*matrix.shape) if matrix.shape.numel() else 1.0)
    weight.mul_(numbers["decay"])
    if matrix.on_host:
        weight.add_(step, alpha=-float(rate))
    else:
        weight.addcmul_(step.float(), -torch.as_tensor(rate).float())
    return weight, states
