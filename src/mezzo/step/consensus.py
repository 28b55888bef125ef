"""What ranks agree on: the norms of gradients that several of them hold shards of, and the largest of a few numbers.

Every collective of mezzo's own inside a step goes through one function, which names rank, step and group when it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mezzo.errors import DistributedError, PolicyError, UnsupportedError
from mezzo.tensors import is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Consensus", "Sharding"]

#: Squared norms above this are infinite in FP32, in which each tensor's own sum is.
_LARGEST: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """Over which ranks the parameters of a session are sharded.

    Attributes:
        groups: Each process group that holds shards of some parameters, in an order that is the same on all ranks.
        members: By group: the places, among all sharded parameters, of those that it holds.
        places: Of each sharded parameter, by ``id``.
    """

    groups: list[ProcessGroup]
    members: list[list[int]]
    places: dict[int, int]

    @classmethod
    def of(cls, params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> Sharding:
        """Find the groups from the placements of parameters.

        Args:
            params: What the optimizers update.
            name_of: Gives a parameter's name, for errors.

        Raises:
            UnsupportedError: A parameter is a sum over ranks that nobody has taken, or its mesh lacks this rank.
        """
        members: dict[ProcessGroup, list[int]] = {}
        places: dict[int, int] = {}
        for param in params:
            if id(param) not in places and (groups := _sharding_groups(param, name_of)):
                places[id(param)] = len(places)
                for group in groups:
                    members.setdefault(group, []).append(places[id(param)])
        return cls(list(members), list(members.values()), places)


def _sharding_groups(param: Any, name_of: Callable[[Tensor], str]) -> list[ProcessGroup]:
    """Return the process groups of more than one rank over which a parameter is sharded."""
    if not is_distributed(param):
        return []
    mesh = param.device_mesh
    partial = [placement for placement in param.placements if placement.is_partial()]
    if partial:
        raise UnsupportedError(
            "a parameter is a sum over ranks that was never taken",
            where=f"{name_of(param)}, placements {param.placements}",
            why="each rank would update a part of the sum by itself",
            write="param.redistribute(placements=[Replicate()]), or [Shard(0)], before the optimizer",
        )
    if mesh.get_coordinate() is None:
        raise UnsupportedError(
            "a parameter's mesh does not hold this rank",
            where=f"{name_of(param)}, {mesh}",
            write="a session on the ranks of the mesh alone; or a mesh of all ranks",
        )
    sharded = (dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())
    return [group for dim in sharded if (group := mesh.get_group(dim)).size() > 1]


class Consensus:
    """The ranks that step together, and what they exchange.

    Args:
        everyone: All ranks that take the same steps.

    Attributes:
        everyone: See above.
        sharding: Which of them hold shards of what.
        rank: This rank's number in the group.
        size: How many ranks there are.
        step: How many steps were exchanged, for messages.

    **Cost**: two small collectives a step, one where nothing is sharded. No host sync with NCCL.
    """

    def __init__(self, everyone: ProcessGroup) -> None:
        self.everyone, self.sharding = everyone, Sharding([], [], {})
        self.rank, self.size, self.step = everyone.rank(), everyone.size(), 0

    @classmethod
    def of(cls, process_group: ProcessGroup | None = None) -> Consensus | None:
        """Return what the ranks of a session share; ``None`` where there is one rank.

        Args:
            process_group: The ranks that step together; those of the default group when omitted.

        Raises:
            PolicyError: This rank is not in the group.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        everyone: Any = torch.distributed.group.WORLD if process_group is None else process_group
        if everyone is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise PolicyError(
                "this rank is not in the session's process group",
                where=f"rank {torch.distributed.get_rank()}",
                write="MixedPrecision(…, process_group=group) on the ranks of the group alone",
            )
        return None if everyone.size() == 1 else cls(everyone)

    def follow(self, params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Find out over which ranks parameters are sharded; arguments and errors as of :meth:`Sharding.of`."""
        self.sharding = Sharding.of(params, name_of)

    # Exchanges --------------------------------------------------------------------------------------------

    def norms(self, params: Sequence[Tensor], norms: Tensor) -> Tensor:
        """Return the norms of whole gradients.

        The squares are summed over ranks in float64. A sum beyond what FP32 holds is infinite, as it is on one rank.

        Args:
            params: Whose gradients they are of.
            norms: (params,) float32: of this rank's shards.
        """
        sharding = self.sharding
        if not sharding.groups:
            return norms
        # All sharded parameters, whatever has a gradient here: ranks that differ in that exchange as many numbers.
        known = [(at, place) for at, p in enumerate(params) if (place := sharding.places.get(id(p))) is not None]
        at, places = ([each[part] for each in known] for part in (0, 1))
        squares = norms.new_zeros(len(sharding.places), dtype=torch.float64)
        squares[places] = norms[at].double().square()
        for group, members in zip(sharding.groups, sharding.members, strict=True):
            if len(members) == len(squares):
                self.exchanged(squares, torch.distributed.ReduceOp.SUM, group, "the norms of gradients")
            else:
                part = squares[members]
                self.exchanged(part, torch.distributed.ReduceOp.SUM, group, "the norms of gradients")
                squares[members] = part
        whole = squares.masked_fill(squares > _LARGEST, torch.inf).sqrt().float()
        found = norms.clone()
        found[at] = whole[places]
        return found

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the largest of each number over all ranks, in place."""
        return self.exchanged(numbers, torch.distributed.ReduceOp.MAX, self.everyone, "what was found")

    def of_first(self, numbers: Tensor, group: ProcessGroup, what: str) -> Tensor:
        """Return the numbers of a group's first rank, in place; arguments and errors as of :meth:`exchanged`."""
        return self.exchanged(numbers, None, group, what)

    def exchanged(self, numbers: Tensor, op: Any, group: ProcessGroup, what: str) -> Tensor:
        """Reduce numbers over the ranks of a group, in place: the one place where mezzo waits for other ranks.

        Args:
            numbers: On the consensus' device.
            op: How; ``None`` takes those of the group's first rank.
            group: Which ranks.
            what: What the numbers are, for errors.

        Raises:
            DistributedError: A rank did not answer.
        """
        begun = time.monotonic()
        try:
            if op is None:
                torch.distributed.broadcast(numbers, group=group, group_src=0)
            else:
                torch.distributed.all_reduce(numbers, op=op, group=group)
        except RuntimeError as error:
            raise DistributedError(
                f"the ranks could not exchange {what} of step {self.step}",
                where=f"rank {self.rank} of {self.size}, after {time.monotonic() - begun:.3g} s",
                why=str(error).splitlines()[0],
                write="the last checkpoint is whole: start again from it",
            ) from error
        return numbers
