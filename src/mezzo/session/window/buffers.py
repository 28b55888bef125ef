"""Batch norm's statistics, put back after a step that was skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mezzo.step.gradients import alike
from mezzo.tensors import moved

__all__ = ["NormBuffers"]


class NormBuffers:
    """The running statistics of norm layers before the first forward pass of a window.

    **Cost**: copies of the statistics for each step, in as many kernels for all layers as for one; no host sync. A walk
    through the models' modules for each forward pass.

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
        buffers = dict.fromkeys(buffer for layer in layers for buffer in layer.buffers(recurse=False))
        fresh = [buffer for buffer in buffers if buffer not in self.before]
        for places in alike(fresh).values():
            here = [fresh[place] for place in places]
            self.before |= zip(here, _parts(_joined(here), here), strict=True)

    def restore_where(self, found_inf: Tensor) -> None:
        """Put the statistics back on the device where the step was skipped, and forget them."""
        buffers, saved = list(self.before), list(self.before.values())
        for (device, _), places in alike(buffers).items():
            here, before = ([each[place] for place in places] for each in (buffers, saved))
            chosen = torch.where(moved(found_inf, device), _joined(before), _joined(here))
            torch._foreach_copy_(here, _parts(chosen, here))
        self.before = {}


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])


def _parts(joined: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = torch.split(joined, list(map(Tensor.numel, like)))
    return [part.view(buffer.shape) for part, buffer in zip(parts, like, strict=True)]
