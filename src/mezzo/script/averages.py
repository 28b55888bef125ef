"""Averages of weights that torch makes, of FP32 values where a policy stores weights in low precision."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from mezzo.script.seams import Seams
from mezzo.tensors import LOW

__all__ = ["replace_averages"]


def replace_averages(seams: Seams) -> None:
    """Let ``AveragedModel.update_parameters`` read what a model's state dict holds: the FP32 values of its weights."""
    plain = AveragedModel.update_parameters

    @functools.wraps(plain)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        is_low = any(param.dtype in LOW for param in model.parameters())
        plain(self, _Wide(model) if is_low else model)  # type: ignore[arg-type]

    seams.replace(AveragedModel, "update_parameters", update_parameters)


class _Wide:
    """The parameters and buffers of a model with the values of its state dict.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._saved = model, model.state_dict()

    def parameters(self) -> Iterator[Tensor]:
        return (self._saved.get(name, param.detach()) for name, param in self._model.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        return (self._saved.get(name, buffer) for name, buffer in self._model.named_buffers())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
