"""Gradients that one launch takes together, few enough at a time that memory holds them twice."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.shards import locals_of, sharded_as

__all__ = ["batches", "cast", "in_dtype"]

#: Elements of a batch at most, but for its last gradient's: so that few gradients wait for what becomes of all.
_TOGETHER: Final = 1 << 24
_KIND: Final = attrgetter("device", "dtype", "layout")


def batches(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in their order, together as long as one launch can widen and unscale their gradients.

    Args:
        params: Tensors that all have a gradient.
    """
    kinds: list[Any] = [_KIND(param.grad) for param in params]
    first, elements = 0, 0
    for place, param in enumerate(params):
        if place > first and (
            kinds[place] != kinds[first] or kinds[first][-1] != torch.strided or elements >= _TOGETHER
        ):
            yield params[first:place]
            first, elements = place, 0
        elements += param.numel()
    if params:
        yield params[first:]


def cast(params: list[Any], dtype: torch.dtype) -> Iterator[tuple[Any, Tensor]]:
    """Yield parameters, each with its gradient in a dtype; the gradients of a batch may go while the next is cast.

    Args:
        params: Tensors that all have a gradient.
        dtype: Of the gradients that are yielded: the same tensors where they have it.
    """
    for together in batches(params):
        gradients: list[Any] = [param.grad for param in together]
        yield from zip(together, in_dtype(gradients, dtype), strict=True)


def in_dtype(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return gradients in a dtype, in one launch; the same ones where they have it.

    Args:
        gradients: Of one of :func:`batches`.
        dtype: Theirs afterwards.
    """
    if gradients[0].dtype == dtype:
        return gradients
    if gradients[0].layout != torch.strided:
        return [gradient.to(dtype) for gradient in gradients]
    if (shards := locals_of(gradients)) is not gradients:
        return list(map(sharded_as, in_dtype(shards, dtype), gradients))
    found = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]
    torch._foreach_copy_(found, gradients)
    return found
