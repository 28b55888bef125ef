"""Gradients of low-precision parameters, on their way to FP32 masters."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from functools import cache
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_not
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mezzo.tensors import LOW

__all__ = ["gather"]

#: Where one launch casts many gradients to FP32.
_LAUNCHING: Final = "cuda"
#: Elements that it casts at most, but for the last gradient's: so that few low-precision ones wait for it.
_TOGETHER: Final = 1 << 24
#: Elements of FP32 in 256 bytes.
_ALIGNED: Final = 64
_GRADIENT: Final = attrgetter("grad")
_NONE: Final = repeat(None)
_KIND: Final = attrgetter("device", "dtype")
#: What gradients of one launch have in common.
_ALIKE: Final = (type, Tensor.get_device, attrgetter("dtype"))


def gather(masters: Mapping[Tensor, nn.Parameter], *, accumulate: bool) -> None:
    """Move the gradients of parameters to their masters, in FP32, freeing each as its copy is made.

    Args:
        masters: By parameter.
        accumulate: Add to what the master already holds, instead of replacing it.
    """
    params = list[Any](masters)
    gradients: list[Any] = list(map(_GRADIENT, params))
    sizes = _sizes_of_alike(gradients) if params and params[0].device.type == _LAUNCHING else []
    if not sizes or (accumulate and any(map(is_not, map(_GRADIENT, masters.values()), _NONE))):
        del gradients  # or none would be freed until all are copied
        _gather_each(masters, accumulate=accumulate)
        return
    own = list[Any](masters.values())
    while params:
        end = _fitting(sizes)
        _cast_together(params[:end], own[:end], gradients[:end], sizes[:end])
        del params[:end], own[:end], gradients[:end], sizes[:end]


def _gather_each(masters: Mapping[Tensor, nn.Parameter], *, accumulate: bool) -> None:
    """Look at each gradient by itself: some are cast together, and some are missing, or move in another way."""
    waiting: list[tuple[Tensor, nn.Parameter, Tensor, int]] = []
    elements = 0
    for param, master in masters.items():
        if (gradient := param.grad) is None:
            continue
        if accumulate and master.grad is not None and master.grad is not gradient:  # a scaler shows one on both
            master.grad.add_(gradient)
        elif gradient.device.type == _LAUNCHING and (sizes := _sizes_of_alike([gradient])):
            if waiting and (elements >= _TOGETHER or _KIND(waiting[0][2]) != _KIND(gradient)):
                _cast_together(*map(list, zip(*waiting, strict=True)))
                waiting, elements = [], 0
            waiting.append((param, master, gradient, sizes[0]))
            elements += sizes[0]
            continue
        else:
            master.grad = gradient.to(torch.float32)
        param.grad = None
    if waiting:
        _cast_together(*map(list, zip(*waiting, strict=True)))


def _sizes_of_alike(gradients: list[Any]) -> list[int]:
    """Return how many elements gradients have, if one launch can cast all of them; the first is where launches are."""
    first = gradients[0]
    are_alike = (
        first is not None
        and first.dtype in LOW  # FP32 moves without a copy
        and not is_traceable_wrapper_subclass(first)
        and all(len({*map(what, gradients)}) == 1 for what in _ALIKE)
        and all(map(Tensor.is_contiguous, gradients))  # as no sparse one is
    )
    sizes = list(map(Tensor.numel, gradients)) if are_alike else []
    return sizes if all(sizes) else []


def _fitting(sizes: list[int]) -> int:
    """Return how many gradients, from the first on, are cast together."""
    return min(bisect_left(list(accumulate(sizes)), _TOGETHER) + 1, len(sizes))


@torch.no_grad()
def _cast_together(params: list[Any], masters: list[Any], gradients: list[Any], sizes: list[int]) -> None:
    """Move the gradients of parameters to their masters in FP32, with one launch, into one buffer.

    Each begins at a multiple of 256 bytes, as the allocator's own tensors do, and has a version of its own.
    """
    gaps = [-size % _ALIGNED for size in sizes]
    buffer = torch.empty(sum(sizes) + sum(gaps), dtype=torch.float32, device=gradients[0].device)
    shapes, step = gradients, 1
    if any(gaps):
        shapes, step = list(chain.from_iterable(zip(gradients, map(_gap, gaps), strict=True))), 2
    # Below what keeps account of views, which would give all of them one version, and takes as long as all the rest.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        wide = torch._C._nn.unflatten_dense_tensors(buffer, shapes)[::step]
    torch._foreach_copy_(wide, gradients)
    deque(map(setattr, masters, repeat("grad"), wide), 0)
    deque(map(setattr, params, repeat("grad"), _NONE), 0)


@cache
def _gap(elements: int) -> Tensor:
    """Return a tensor of so many elements, for its shape alone."""
    return torch.empty(elements, device="meta")
