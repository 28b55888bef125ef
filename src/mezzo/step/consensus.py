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

from mezzo.errors import DistributedError, PolicyError, StateError, UnsupportedError, shown, some_of
from mezzo.step.ranks import PROBLEMS, Problem, Ranks
from mezzo.tensors import is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Consensus", "Heard", "Sharding"]

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

    def require_within(self, ranks: Sequence[int] = ()) -> None:
        """Refuse parameters that are sharded over ranks which do not step with a session.

        Args:
            ranks: Those that do; this one alone when omitted.

        Raises:
            PolicyError: There are such parameters.
        """
        for group in self.groups:
            ours = {*ranks} or {torch.distributed.get_rank()}
            if missing := set(torch.distributed.get_process_group_ranks(group)) - ours:
                raise PolicyError(
                    "parameters are sharded over ranks that are not in the session's process group",
                    where=f"rank {some_of(list(map(str, sorted(missing))))}",
                    why="an overflow in their shards would not be seen here",
                    write="MixedPrecision(…) without process_group=; or a group of all ranks of the mesh",
                )


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heard:
    """What the ranks have told each other of a step, as tensors that are equal on all of them.

    Attributes:
        consensus: The ranks.
        blame: 0-d float32: of the first rank that found something not finite; see :attr:`rank_found`.
        problem: 0-d float32: the number of a :class:`Problem`, 0 where all ranks could go on.
    """

    consensus: Consensus
    blame: Tensor
    problem: Tensor

    @property
    def rank_found(self) -> Tensor:
        """0-d int64: which rank found something not finite, -1 for none.

        The first whose own loss, or gradients inside it, were not finite; else the first with such gradients.
        """
        size = self.consensus.size
        rank = torch.where(self.blame > size, 2 * size, size) - self.blame
        return torch.where(self.blame > 0, rank, -1).long()

    def told(self, blame: float, number: float, step: int) -> tuple[DistributedError | None, str, str]:
        """Return what the host has read of an account: an error to raise, else a vote, and which rank was the first.

        Args:
            blame: The value of ``blame``.
            number: The value of ``problem``.
            step: The step's number.
        """
        size, problem = self.consensus.size, Problem.of(number, self.consensus.size)
        first = f" on rank {int(2 * size - blame if blame > size else size - blame)}" if blame else ""
        if problem is None:
            return None, "", first
        said = f"rank {problem.rank} had {PROBLEMS[problem.code]}"
        return None if problem.is_vote else self.consensus.failure(problem, step), said, first

    def require_none(self) -> None:
        """Raise the problem of another rank; the host waits for the device.

        Raises:
            DistributedError: With the rank and the step.
        """
        problem = Problem.of(float(self.problem), self.consensus.size)
        if problem is not None and not problem.is_vote:
            raise self.consensus.failure(problem, self.consensus.step)


class Consensus(Ranks):
    """The ranks that step together, and what they exchange.

    Args:
        everyone: All ranks that take the same steps.
        stages: Ranks whose models are parts of one, so that its gradients are those of all of them.

    Attributes:
        everyone: See above.
        stages: See above.
        sharding: Which ranks hold shards of what.

    **Cost**: two small collectives a step, one where nothing is sharded. No host sync with NCCL.
    """

    def __init__(self, everyone: ProcessGroup, stages: ProcessGroup | None = None) -> None:
        super().__init__(everyone)
        self.stages, self.sharding = stages, Sharding([], [], {})
        self._known: tuple[list[int], Tensor, Tensor, list[Tensor]] | None = None

    @classmethod
    def of(cls, process_group: ProcessGroup | None = None, stage_group: ProcessGroup | None = None) -> Consensus | None:
        """Return what the ranks of a session share; ``None`` where there is one rank.

        Args:
            process_group: The ranks that step together; those of the default group when omitted.
            stage_group: Ranks of these whose models are parts of one, such as the stages of a pipeline.

        Raises:
            PolicyError: This rank is not in a group, or what was given is none.
            StateError: A group was given, and torch.distributed is not initialised.
        """
        dist = torch.distributed
        given: dict[str, Any] = {"process_group": process_group, "stage_group": stage_group}
        if not (dist.is_available() and dist.is_initialized()):
            for name in (name for name, group in given.items() if group is not None):
                raise StateError(
                    f"{name}= names ranks, and there are none",
                    where="torch.distributed is not initialised",
                    write="torch.distributed.init_process_group() first",
                )
            return None
        for name, group in given.items():
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise PolicyError(
                    f"this rank is not in the session's {name}",
                    where=f"rank {dist.get_rank()}",
                    write=f"MixedPrecision(…, {name}=group) on the ranks of the group alone",
                )
            if not (group is None or isinstance(group, dist.ProcessGroup)):
                raise PolicyError(
                    f"{name} is {shown(group)}, not a process group",
                    write=f"MixedPrecision(…, {name}=torch.distributed.new_group([0, 1]))",
                )
        everyone: Any = dist.group.WORLD if process_group is None else process_group
        stages = None if stage_group is None or stage_group.size() == 1 else stage_group
        return None if everyone.size() == 1 else cls(everyone, stages)

    def follow(self, params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Find out over which ranks parameters are sharded; arguments and errors as of :meth:`Sharding.of`.

        Raises:
            PolicyError: See :meth:`Sharding.require_within`.
        """
        self.sharding, self._known = Sharding.of(params, name_of), None
        self.sharding.require_within(torch.distributed.get_process_group_ranks(self.everyone))

    def require(self, device: torch.device) -> None:
        """Refuse a device whose tensors the group has no backend for.

        Raises:
            UnsupportedError: It has none.
        """
        there = [each.type for each in self.everyone._device_types]
        if device.type not in there:
            raise UnsupportedError(
                f"the process group cannot exchange tensors of {device.type}",
                where=f"rank {self.rank} of {self.size}; it has backends for {some_of(there)}",
                why="the ranks agree on each step through tensors of the loss scale's device",
                write='torch.distributed.init_process_group("cpu:gloo,cuda:nccl"); or MixedPrecision(…, device=…)',
            )

    def backend(self, device: torch.device) -> str:
        """Return the name of what carries out exchanges of a device's tensors."""
        return str(self.everyone._get_backend(device).name()).lower()

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
        at, places, members = self._places(params, norms.device)
        # All sharded parameters, whatever has a gradient here: ranks that differ in that exchange as many numbers.
        squares = norms.new_zeros(len(sharding.places), dtype=torch.float64)
        squares.index_copy_(0, places, norms.index_select(0, at).double().square())
        for group, held in zip(sharding.groups, members, strict=True):
            part = squares if len(held) == len(squares) else squares.index_select(0, held)
            self.exchanged(part, torch.distributed.ReduceOp.SUM, group, "the norms of gradients")
            if part is not squares:
                squares.index_copy_(0, held, part)
        return norms.index_copy(0, at, _norm_of(squares).index_select(0, places))

    def _places(self, params: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return indices on the device: of the sharded ones of some parameters, of their places, of each group's."""
        ids = list(map(id, params))
        if self._known is None or self._known[0] != ids:
            known = [(at, place) for at, key in enumerate(ids) if (place := self.sharding.places.get(key)) is not None]
            pairs = torch.tensor(known, dtype=torch.long).reshape(-1, 2).to(device)
            members = [torch.tensor(held, dtype=torch.long).to(device) for held in self.sharding.members]
            self._known = ids, pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), members
        return self._known[1:]

    def of_stages(self, norms: Tensor) -> Tensor:
        """Return norms whose 2-norm is that of all gradients, those of other stages' models among them.

        Args:
            norms: (params,) float32: of the whole gradients of this rank's parameters.
        """
        if self.stages is None:
            return norms
        total = norms.double().square().sum().reshape(1)
        return _norm_of(self.exchanged(total, torch.distributed.ReduceOp.SUM, self.stages, "the norms of stages"))

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the largest of each number over all ranks, in place."""
        return self.exchanged(numbers, torch.distributed.ReduceOp.MAX, self.everyone, "what they found")

    def exchanged(self, numbers: Tensor, op: Any, group: ProcessGroup, what: str) -> Tensor:
        """Reduce numbers over the ranks of a group, in place: the one place where a step of mezzo's waits for others.

        Args:
            numbers: On a device of the group's.
            op: How; ``None`` takes those of the group's first rank.
            group: Which ranks.
            what: What the numbers are, for errors.

        Raises:
            DistributedError: A rank did not answer.
        """
        begun = time.monotonic()
        with self.naming(f"the exchange of {what}"):
            if op is None:
                torch.distributed.broadcast(numbers, group=group, group_src=0)
            else:
                torch.distributed.all_reduce(numbers, op=op, group=group)
        self.waited_s += time.monotonic() - begun
        return numbers

    def gathered(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, in their order; the host waits.

        Args:
            value: This rank's; it can be pickled.
            what: What these are, for errors.
        """
        found: list[Any] = [None] * self.size
        with self.naming(f"the exchange of {what}"):
            torch.distributed.all_gather_object(found, value, group=self.everyone)
        return found


def _norm_of(squares: Tensor) -> Tensor:
    return squares.masked_fill(squares > _LARGEST, torch.inf).sqrt().float()
