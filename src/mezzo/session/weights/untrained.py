"""Weights and buffers that a session stores low and no optimizer updates: what they were before."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.cast.model.prepare import Prepared
from mezzo.optim.keeper import Keeper

__all__ = ["Untrained"]


class Untrained:
    """What a session's models had before conversion, where no keeper of an optimizer's has it.

    It is for what programs get back: forward passes read the rounded weights. An element that was written since counts
    as it is now.

    Args:
        prepared: The models under the policy; more may be added.
    """

    def __init__(self, prepared: list[Prepared]) -> None:
        self._prepared = prepared

    def __bool__(self) -> bool:
        return any(each.kept.values for each in self._prepared)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return the value that a tensor had, on its device; ``None`` where none is kept."""
        values = (each.kept.value_of(tensor) for each in self._prepared)
        return next((value for value in values if value is not None), None)

    def values_of(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return the values before conversion of those parameters of which they are kept."""
        return {param: value for param in params if (value := self.value_of(param)) is not None}

    def put_aside(self) -> None:
        """Move these values to the host's memory."""
        for each in self._prepared:
            each.kept.put_aside()

    def release(self, of: Container[Tensor]) -> None:
        """Forget the values of some tensors."""
        for each in self._prepared:
            each.kept.release(of)

    def take_loaded(self, tensor: Tensor, incoming: Any, name: str) -> None:
        """Keep what is about to be loaded into a tensor.

        Raises:
            UnsupportedError: It would become infinite there.
        """
        for each in self._prepared:
            each.kept.take(tensor, incoming, name)

    @torch.no_grad()
    def hand_over(self, keepers: Mapping[Tensor, Keeper]) -> None:
        """Give keepers the values before conversion of parameters that came to them, rounded, since.

        Args:
            keepers: By parameter.
        """
        for param, keeper in keepers.items():
            if (value := self.value_of(param)) is not None:
                now = keeper.master_of(param).detach()
                # But where it has moved by then.
                keeper.write(param, torch.where(now == param, value, now), refines=True)
