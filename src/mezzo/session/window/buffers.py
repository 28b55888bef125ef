"""Batch norm's statistics, put back after a step that was skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.tensors import moved

__all__ = ["NormBuffers"]


class NormBuffers:
    """The running statistics of norm layers before the first forward pass of a window.

    **Cost**: a copy of the statistics for each step, and one kernel for each of them; no host sync. A walk through the
    models' modules for each forward pass.

    Args:
        models: The models.

    Attributes:
        before: The statistics that a skipped step puts back, each with what it puts back.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self.before: dict[Tensor, Tensor] = {}

    def remember(self) -> None:
        """Copy the statistics of layers that train, each once since the last step."""
        modules = (module for model in self._models for module in model.modules())
        layers = [module for module in modules if isinstance(module, _NormBase) and module.training]
        for buffer in (buffer for layer in layers for buffer in layer.buffers(recurse=False)):
            if buffer not in self.before:
                self.before[buffer] = buffer.detach().clone()

    def restore_where(self, found_inf: Tensor) -> None:
        """Put the statistics back on the device where the step was skipped, and forget them."""
        for buffer, saved in self.before.items():
            buffer.copy_(torch.where(moved(found_inf, buffer.device), saved, buffer))
        self.before = {}
