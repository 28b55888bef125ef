"""Which parts of sharded parameters a session stores in low precision, as what they are gathered in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.cast.model.sharding import Shard, shards
from mezzo.errors import UnsupportedError, some_of
from mezzo.optim.optimizer import as_one_pass

__all__ = ["halved"]


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
    together: defaultdict[nn.Module, list[Shard]] = defaultdict(list)
    for part in chain.from_iterable(map(shards, models)):
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
