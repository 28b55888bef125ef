"""Averages of weights that torch makes while a session stands: of FP32 values, where the session stores others."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from mezzo.session.weights.weights import Weights
from mezzo.tensors import LOW

__all__ = ["ExactAverages", "in_fp32"]


#: Those of the sessions that are asked now; torch has its own function again when there is none.
_ASKED: Final[list[weakref.ref[Weights]]] = []
#: What torch's function was before, and what is bound meanwhile.
_BOUND: Final[list[Callable[..., None]]] = []


class ExactAverages:
    """Have ``AveragedModel.update_parameters`` read FP32 values, until it is removed, or the session is no more.

    An average that is stored in low precision itself reads what is stored.

    Args:
        weights: The session's.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weakref.ref(weights)
        if not _ASKED:
            _BOUND[:] = AveragedModel.update_parameters, _reading_fp32(AveragedModel.update_parameters)
            AveragedModel.update_parameters = _BOUND[1]  # type: ignore[method-assign]
        _ASKED.append(self._weights)
        weakref.finalize(weights, _forget, self._weights)

    def remove(self) -> None:
        """Ask this session no more."""
        _forget(self._weights)


def _forget(weights: weakref.ref[Weights]) -> None:
    _ASKED[:] = [each for each in _ASKED if each is not weights]
    if not _ASKED and AveragedModel.update_parameters is _BOUND[-1]:  # or others have wrapped it since
        AveragedModel.update_parameters = _BOUND[0]  # type: ignore[method-assign]


def _reading_fp32(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        is_low = any(param.dtype in LOW for param in self.module.parameters())
        plain(self, model if is_low else in_fp32(model))

    return update_parameters


def in_fp32(model: nn.Module) -> Any:
    """Return what has a model's parameters and buffers in FP32, with the values that sessions keep of them.

    Args:
        model: The model, or a wrapper of it.
    """
    return _InFP32(model) if any(param.dtype in LOW for param in model.parameters()) else model


class _InFP32:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: list[Callable[[Tensor], Tensor | None]] = []
        for weights in (each() for each in _ASKED):
            if weights is not None:
                weights.take_edits()
                self._values.append(weights.fp32_values())

    def parameters(self) -> Iterator[Tensor]:
        return map(self._in_fp32, self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return map(self._in_fp32, self._model.buffers())

    def _in_fp32(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in LOW:
            return tensor
        values = (value_of(tensor) for value_of in self._values)
        return next((value for value in values if value is not None), tensor.float())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
