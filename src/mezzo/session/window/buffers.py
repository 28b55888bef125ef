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
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._saved: list[tuple[Tensor, Tensor]] = []

    def remember(self) -> None:
        """Copy the statistics of layers that train, each once since the last step."""
        known = {id(buffer) for buffer, _ in self._saved}
        self._saved += [(buffer, buffer.detach().clone()) for buffer in self._statistics() if id(buffer) not in known]

    def _statistics(self) -> list[Tensor]:
        found = {
            buffer: None
            for model in self._models
            for module in model.modules()
            if isinstance(module, _NormBase) and module.training
            for buffer in module.buffers(recurse=False)
        }
        return list(found)

    def restore_where(self, found_inf: Tensor) -> None:
        """Put the statistics back on the device where the step was skipped, and forget them."""
        for buffer, saved in self._saved:
            buffer.copy_(torch.where(moved(found_inf, buffer.device), saved, buffer))
        self._saved = []

    def remembered(self) -> list[tuple[Tensor, Tensor]]:
        """Return the statistics that a skipped step puts back, each with what it puts back."""
        return list(self._saved)

    def recall(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Put back these after a skipped step, and no others: what :meth:`remembered` returned, or nothing."""
        self._saved = list(pairs)
