"""The cache of weight casts: each weight is cast once, however often and in however many micro-batches it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["WeightCasts"]


@dataclass(frozen=True, slots=True)
class _Cast:
    param: nn.Parameter
    version: int
    address: int
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


class WeightCasts:
    """Casts of parameters, until :meth:`clear`.

    An entry serves as long as the parameter has not been written: its version and address are compared at each use.
    Casts made without gradients never serve training, nor the other way round, and nothing is kept in inference mode,
    under ``torch.func`` or while torch.compile traces.

    Each use has an autograd node of its own: the gradients of a weight that is used several times meet in the
    parameter's dtype, bit for bit as those of several casts would. Eager, compiled and recomputed code therefore give
    the same bits, as long as torch adds in the same order. It does not where ``.grad`` is added to in the middle of a
    backward pass, by a reentrant checkpoint around some of three or more uses, or where only some of them stand in
    one compiled graph: each such part adds its own first, in plain FP32 training too.

    **Cost**: 2 bytes for each weight of a low-precision op, from its first use until the step. Each further use is a
    Python autograd function: some 10 µs forward and backward together, beside torch's own node for the first.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype, bool], _Cast] = {}

    def __len__(self) -> int:
        return len(self._casts)

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
            or torch._C._are_functorch_transforms_active()
        ):
            return param.to(dtype)
        trains = torch.is_grad_enabled() and param.requires_grad
        key = (id(param), dtype, trains)
        found = self._casts.get(key)
        if found is None or found.version != param._version or found.address != param.data_ptr():
            found = self._casts[key] = _Cast(param, param._version, param.data_ptr(), param.to(dtype))
            return found.cast
        return cast(Tensor, _FurtherUse.apply(param, found)) if trains else found.cast  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Forget every cast."""
        self._casts.clear()
