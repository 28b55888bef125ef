"""Hyper-parameters where kernels read them, following ``param_groups`` where schedulers change them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mezzo.optim.checks import check_group

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

        Raises:
            PolicyError: A value that no update can work with was written to the group; nothing was uploaded of it.
        """
        for name, tensor in self.tensors.items():
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                tensor.copy_(value, non_blocking=True)
                self._uploaded.pop(name, None)
                continue
            number: Any = float(value.detach().double().reshape(()).numpy()) if isinstance(value, Tensor) else value
            if isinstance(number, Real):  # NumPy's among them; what is no number is the check's to refuse
                number = float(number)
            if name not in self._uploaded or self._uploaded[name] != number:
                check_group({**group, "params": None, **({} if name.startswith("beta") else {name: number})})
                tensor.fill_(number)
                self._uploaded[name] = number
