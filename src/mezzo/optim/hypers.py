"""Hyper-parameters where kernels read them, following ``param_groups`` where schedulers change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.cast.model.sharding import flags_of_all
from mezzo.optim.checks import check_group, in_host_memory
from mezzo.tensors import is_distributed, local


def changes_nothing(groups: Iterable[Mapping[str, Any]], gradients: Iterable[Tensor]) -> bool:
    """Whether learning rates and gradients are all zero, as where ``torch.distributed.checkpoint`` has state made.

    The gradients are looked at, which waits for the device, and for other ranks where they are shards, only where every
    rate is a zero in host memory.
    """
    rates = [group.get("lr") for group in groups]
    if any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates):
        return False
    found = list(gradients)
    changes = any((shard._values() if shard.is_sparse else shard).any() for shard in map(local, found))
    if not any(map(is_distributed, found)):
        return not changes
    return not flags_of_all(torch.tensor([changes], device=found[0].device), found).any()


class Hypers:
    """One group's hyper-parameters as 0-d float64 tensors of one device.

    Args:
        names: Which, as the update rule calls them: ``beta1`` and ``beta2`` are the two of ``betas``.
        device: Where they live.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.tensors = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self._uploaded: dict[str, float] = {}

    def upload(self, group: Mapping[str, Any], where: str = "") -> None:
        """Bring over what changed, without waiting for the device.

        Tensors in host memory count as the numbers that they hold, so that a graph captured meanwhile copies nothing
        from there.

        Args:
            group: The parameter group.
            where: Which it is, for errors.

        Raises:
            PolicyError: A value that no update can work with was written to the group; nothing was uploaded of it.
        """
        for name, tensor in self.tensors.items():
            value = group["betas"][int(name[-1]) - 1] if name.startswith("beta") else group[name]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                tensor.copy_(value, non_blocking=True)
                self._uploaded.pop(name, None)
                continue
            number: Any = in_host_memory(value) if isinstance(value, Tensor) else value
            if name not in self._uploaded or self._uploaded[name] != number:
                check_group({**group, "params": None, **({} if name.startswith("beta") else {name: number})}, where)
                self._uploaded.pop(name, None)  # until it is there: an interrupt may come in between
                tensor.fill_(float(number))  # of NumPy's, say
                self._uploaded[name] = float(number)
