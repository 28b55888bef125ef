"""Models that ``fully_shard`` has sharded, in a session: their gradients on the way, and what is gathered of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from mezzo.cast.model import sharding
from mezzo.errors import StateError, UnsupportedError

__all__ = ["Shards"]


class Shards:
    """What the models of a session hold in parts.

    Args:
        units: The modules of the models that were sharded.
    """

    def __init__(self, units: list[Any]) -> None:
        self._units = units
        self._sums: bool | None = None

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> Shards | None:
        """Return what models hold in parts; ``None`` where they hold none."""
        units = [unit for model in models for unit in sharding.units(model)]
        return cls(units) if units else None

    def refuse_unreduced(self, why: str) -> None:
        """Refuse what would leave gradients behind that wait to be reduced over ranks.

        Args:
            why: What is wrong with that here.
        """
        if sharding.has_unreduced(self._units):
            raise StateError(
                "gradients wait to be reduced over ranks",
                where="model.set_requires_gradient_sync(False) is in force, or was in the last amp.backward()",
                why=why,
                write="model.set_requires_gradient_sync(True) before the last amp.backward() of a window",
            )

    def summed_at(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return the tensors in which a backward pass sums the gradients of some parameters."""
        whole = {part: each for each, part in sharding.parts_of(self._units).items()}
        return [whole.get(leaf, leaf) for leaf in leaves]

    def ranks_summed(self, *, scaled: bool) -> int:
        """Return over how many ranks gradients of shards are summed, and not divided: 1 where they are means.

        In FP16, dividing before the sum flushes small ones, and dividing after it may be too late. Those that carry a
        loss scale are divided where they are unscaled.

        Args:
            scaled: Whether they carry one.
        """
        if self._sums is None:
            self._sums = scaled and sharding.sum_over_ranks(self._units)
        return sharding.ranks_summed(self._units) if self._sums else 1

    def refuse_second_pass(self) -> None:
        """Refuse a backward pass that another is to go through, where the first lets go of what is gathered."""
        if sharding.reshards_after_backward(self._units):
            raise UnsupportedError(
                "a gradient that is differentiated again needs parameters that are let go after the first pass",
                where="amp.grad(…, create_graph=True) of a model that fully_shard has sharded",
                write="model.set_reshard_after_backward(False) before amp.grad, and (True) before amp.backward",
            )

    def reshard(self) -> None:
        """Let go of gathered parameters, which a step has changed: the next forward pass gathers them anew."""
        sharding.reshard(self._units)

    def average(self) -> None:
        """Let gradients be means over ranks again."""
        if self._sums:
            sharding.average_over_ranks(self._units)
        self._sums = None

    def forget_gradients(self) -> None:
        """Clear gradients that wait to be reduced over ranks."""
        sharding.forget_gradients(self._units)
