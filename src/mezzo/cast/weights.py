"""The cache of weight casts: each weight is cast once, however often and in however many micro-batches it is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["WeightCasts"]


@dataclass(frozen=True, slots=True)
class _Cast:
    param: nn.Parameter
    version: int
    address: int
    cast: Tensor


class WeightCasts:
    """Casts of parameters, until :meth:`clear`.

    An entry serves as long as the parameter has not been written: its version and address are compared at each use.
    Casts made without gradients never serve training, nor the other way round, and nothing is kept in inference mode
    or while torch.compile traces.

    **Cost**: 2 bytes for each weight of a low-precision op, from its first use until the step.
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
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or param.is_inference():
            return param.to(dtype)
        key = (id(param), dtype, torch.is_grad_enabled())
        found = self._casts.get(key)
        if found is None or found.version != param._version or found.address != param.data_ptr():
            found = self._casts[key] = _Cast(param, param._version, param.data_ptr(), param.to(dtype))
        return found.cast

    def clear(self) -> None:
        """Forget every cast."""
        self._casts.clear()
