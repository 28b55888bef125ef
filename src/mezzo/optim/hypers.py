"""Hyper-parameters where kernels read them, following ``param_groups`` where schedulers change them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.errors import PolicyError

__all__ = ["Hypers"]


class Hypers:
    """One group's hyper-parameters as 0-d float64 tensors of one device.

    Args:
        names: Which, as the update rule calls them: ``beta1`` and ``beta2`` are the two of ``betas``.
        device: Where they live.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.tensors = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self._uploaded: dict[str, float] = {}

    def upload(self, group: Mapping[str, Any]) -> None:
        """Bring over what changed, without waiting for the device.

        Tensors in host memory count as the numbers that they hold, so that a graph captured meanwhile copies nothing
        from there.
        """
        for name, tensor in self.tensors.items():
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                tensor.copy_(value, non_blocking=True)
                self._uploaded.pop(name, None)
                continue
            number = float(value.detach().double().reshape(()).numpy()) if isinstance(value, Tensor) else value
            if name not in self._uploaded or self._uploaded[name] != number:
                if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                    raise PolicyError(f"{name} is {number!r} now", why="it is a finite number", write=f"{name}=0.01")
                tensor.fill_(number)
                self._uploaded[name] = number
