"""The cache of weight casts: in one region a weight is cast once, however often it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mezzo.tensors import is_transformed, mark

__all__ = ["WeightCasts", "is_further_use"]


@dataclass(frozen=True, slots=True)
class _Cast:
    param: nn.Parameter  # while it and the alias are held, nothing else can be given this id and this address
    alias: Tensor
    mark: tuple[int, int]
    cast: Tensor


class _FurtherUse(torch.autograd.Function):
    """A cast that exists already, connected to its parameter once more.

    The engine itself casts a gradient to the dtype of what it belongs to, and only then adds it to others. There is no
    ``setup_context``, which would cost more than all the rest: under ``torch.func`` nothing is cached.
    """

    @staticmethod
    def forward(ctx: Any, param: nn.Parameter, found: _Cast) -> Tensor:
        return found.cast.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def is_further_use(node: Any) -> bool:
    """Whether an autograd node connects a cast with its parameter once more: its gradient is the parameter's."""
    return getattr(node, "_forward_cls", None) is _FurtherUse


class WeightCasts:
    """Casts of parameters, as long as the outermost region lasts: each makes its own, for those inside it as well.

    An entry serves as long as the parameter has not been written: its version and its memory are compared at each use.
    Writes through ``.data`` leave no such trace; they are seen by the next region, as with torch's own cache, which is
    as long and compares nothing.

    Casts made without gradients never serve training, nor the other way round, and nothing is kept in inference mode,
    under ``torch.func``, in forward-mode AD or while torch.compile traces.

    Each use has an autograd node of its own: the gradients of a weight that is used several times meet in the
    parameter's dtype, bit for bit as those of several casts would. Eager, compiled and recomputed code therefore give
    the same bits, as long as torch adds in the same order. It does not where ``.grad`` is added to in the middle of a
    backward pass, by a reentrant checkpoint around some of three or more uses, or where only some of them stand in
    one compiled graph: each such part adds its own first, in plain FP32 training too.

    **Cost**: 2 bytes for each weight of a low-precision op, from its first use in a region to the region's end. Each
    further use is a Python autograd function: some 10 µs forward and backward together, beside torch's own node for
    the first.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype, bool, bool], _Cast] = {}

    def cast(self, param: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return the parameter in another dtype, connected to it for gradients.

        Args:
            param: A floating parameter.
            dtype: The target; the parameter itself is returned where it is its own.
        """
        if param.dtype == dtype:
            return param
        if (
            torch.compiler.is_compiling()
            or torch.is_inference_mode_enabled()
            or param.is_inference()
            or is_transformed()
        ):
            return param.to(dtype)
        with_gradients = torch.is_grad_enabled()
        trains = with_gradients and param.requires_grad
        key = (id(param), dtype, with_gradients, trains)
        found = self._casts.get(key)
        if found is None or found.mark != mark(param):
            made = param.to(dtype)
            self._casts[key] = _Cast(param, param.detach(), mark(param), made)
            return made
        return cast(Tensor, _FurtherUse.apply(param, found)) if trains else found.cast  # type: ignore[no-untyped-call]
