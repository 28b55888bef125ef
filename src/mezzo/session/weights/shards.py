"""Models that ``fully_shard`` has sharded, in a session: how parts are stored, and gradients on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast.model import sharding
from mezzo.errors import StateError, UnsupportedError, some_of
from mezzo.optim.optimizer import as_one_pass

__all__ = ["Shards", "halved"]


class Shards:
    """The parameters of a session's models that are sharded; where there are none, nothing is done.

    Args:
        models: The models.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._units = [unit for model in models for unit in sharding.units(model)]
        self._sums: bool | None = None

    def __bool__(self) -> bool:
        return bool(self._units)

    def refuse_unreduced(self, why: str) -> None:
        """Refuse what would leave gradients behind that wait to be reduced over ranks.

        Args:
            why: What is wrong with that here.
        """
        if self._units and sharding.has_unreduced(self._units):
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
        """Refuse a first backward pass of two through one graph, where it frees the gathered parameters."""
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


def halved(models: Iterable[nn.Module], optimizers: list[Optimizer], name_of: Callable[[Tensor], str]) -> set[Tensor]:
    """Return the parts of which an optimizer of mezzo's keeps the other half, and those that none updates.

    The latter only where nothing that is gathered with them is updated in FP32: torch reduces the gradients of a module
    in one dtype, and they may be thawed. Where ``master="full"``, and for other optimizers, an FP32 part is a master.

    Args:
        models: The models, which ``fully_shard`` may have sharded.
        optimizers: All that update them.
        name_of: Gives a parameter's name, for errors.

    Raises:
        UnsupportedError: Parameters that are gathered together are updated in both ways.
    """
    halving, whole = set[Tensor](), set[Tensor]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            keeps_half = as_one_pass(optimizer) is not None and group["master"] != "full"
            (halving if keeps_half else whole).update(group["params"])
    together: defaultdict[nn.Module, list[sharding.Shard]] = defaultdict(list)
    for part in chain.from_iterable(map(sharding.shards, models)):
        together[part.unit].append(part)
    found, mixed = set[Tensor](), list[str]()
    for parts in together.values():
        low = [part.param for part in parts if part.param in halving]
        wide = [part.param for part in parts if part.param in whole]
        if low and any(param.requires_grad for param in wide):
            mixed.append(f"{name_of(low[0])} and {name_of(wide[0])}")
        elif low or not wide:
            found.update(part.param for part in parts if part.param not in whole)
    if mixed:
        raise UnsupportedError(
            "parameters that are gathered together are kept in two ways",
            where=some_of(mixed),
            why='mezzo.optim with master="split" keeps parts in low precision, master="full" and other optimizers '
            "keep them in FP32,\nand fully_shard reduces the gradients of a module in one dtype",
            write='one kind of optimizer for each module that is sharded by itself; or master="full" for all of them',
        )
    return found
