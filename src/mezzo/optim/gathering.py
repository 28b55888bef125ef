"""Gradients of low-precision parameters, on their way to FP32 masters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mezzo.step.whole import Call, at_once
from mezzo.tensors import LOW

__all__ = ["gather"]

#: Where one launch casts many gradients to FP32.
_LAUNCHING: Final = "cuda"
#: Elements that it casts at most, but for the last gradient's: so that few low-precision ones wait for it.
_TOGETHER: Final = 1 << 24
#: Elements of FP32 in 256 bytes.
_ALIGNED: Final = 64
_KIND: Final = attrgetter("device", "dtype")


def gather(masters: Mapping[Tensor, nn.Parameter], *, accumulate: bool) -> None:
    """Move the gradients of parameters to their masters, in FP32, freeing each as its copy is made.

    Args:
        masters: By parameter.
        accumulate: Add to what the master already holds, instead of replacing it.
    """
    together: list[tuple[Tensor, nn.Parameter, Tensor]] = []
    elements = 0
    for param, master in masters.items():
        if (gradient := param.grad) is None:
            continue
        move: Call
        if accumulate and master.grad is not None:
            move = partial(master.grad.add_, gradient)
        elif gradient.device.type == _LAUNCHING and _is_cast_together(gradient):
            if together and (elements >= _TOGETHER or _KIND(together[0][2]) != _KIND(gradient)):
                _cast_together(together)
                together, elements = [], 0
            together.append((param, master, gradient))
            elements += gradient.numel()
            continue
        else:
            move = partial(setattr, master, "grad", gradient.to(torch.float32))
        at_once(move, partial(setattr, param, "grad", None))  # or an interrupt would lose it, or count it twice
    if together:
        _cast_together(together)


def _is_cast_together(gradient: Tensor) -> bool:
    """Whether a gradient is one of many that one launch casts, which reads memory as it is."""
    return (
        gradient.dtype in LOW  # FP32 moves without a copy
        and gradient.layout == torch.strided
        and gradient.is_contiguous()
        and not gradient.is_neg()
        and not is_traceable_wrapper_subclass(gradient)
    )


@torch.no_grad()
def _cast_together(moving: list[tuple[Tensor, nn.Parameter, Tensor]]) -> None:
    """Move the gradients of parameters to their masters in FP32, with one launch, into one buffer.

    Each begins at a multiple of 256 bytes, as the allocator's own tensors do, and has a version of its own.
    """
    params, masters, gradients = zip(*moving, strict=True)
    ends = list(accumulate([-(-gradient.numel() // _ALIGNED) * _ALIGNED for gradient in gradients]))
    buffer = torch.empty(ends[-1], dtype=torch.float32, device=gradients[0].device)
    wide = [
        buffer.as_strided(gradient.shape, gradient.stride(), start).data
        for start, gradient in zip([0, *ends], gradients, strict=False)
    ]
    torch._foreach_copy_(wide, gradients)
    given = map(setattr, masters, repeat("grad"), wide)
    at_once(partial(deque, chain(given, map(setattr, params, repeat("grad"), repeat(None))), 0))
