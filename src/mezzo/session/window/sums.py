"""Sums of gradients whose losses had different scales: unscaled, in FP32, in few launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo.session.window.together import in_dtype
from mezzo.session.window.wide import added
from mezzo.shards import locals_of, sharded_as
from mezzo.tensors import local, moved

__all__ = ["unscaled"]


def unscaled(gradients: list[Any], factor: Tensor | None, sums: list[Tensor | None]) -> list[Tensor]:
    """Return gradients in FP32 or wider, multiplied, and added to the sums that there are.

    Args:
        gradients: Of one of :func:`.together.batches`.
        factor: 0-d float32: what to multiply by; ``None`` for nothing.
        sums: What to add to, by place.
    """
    if (shards := locals_of(gradients)) is not gradients:
        totals = unscaled(shards, factor, [None if total is None else local(total) for total in sums])
        return list(map(sharded_as, totals, gradients))
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    factor = None if factor is None else moved(factor, gradients[0].device)
    if gradients[0].layout != torch.strided:
        (gradient,), (before,) = gradients, sums
        wide = gradient.to(dtype) if factor is None else gradient.to(dtype) * factor
        return [wide if before is None else added(before, wide)]
    found = in_dtype(gradients, dtype)
    if factor is not None:
        found = list(torch._foreach_mul(found, factor))
    dense = [before for before in sums if before is not None and before.layout == torch.strided]
    if len(dense) == len(sums):
        return list(torch._foreach_add(dense, found))
    pairs = zip(sums, found, strict=True)
    return [wide if before is None else added(before, wide) for before, wide in pairs]
