"""The ranks that step together, and the one exchange of each of their steps.

A step asks :class:`Ranks` twice: for the norms of whole gradients, where parameters are sharded, and for what holds on
all ranks. What follows from the two is a pure function of equal inputs, so that ranks that began alike stay alike:
skips, scales, clipping and weights. Where there is one rank, :class:`OneRank` has the same methods, and exchanges
nothing. The second part is what a session does beside ``DistributedDataParallel``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.compiling import never_compiled
from mezzo.errors import DistributedError, PolicyError, StateError, UnsupportedError, some_of
from mezzo.hooks import OwnHook
from mezzo.releases import private, require_all
from mezzo.sharded import is_distributed

#: For how many seconds a rank waits for what the others have to say of a vote.
VOTE_SECONDS = 300.0
#: Squared norms above this are infinite in FP32, in which each tensor's own sum is.
_LARGEST: Final = torch.finfo(torch.float32).max


#: By the name of a group: numbers of the sessions that step in it, the same on all its ranks.
_SESSIONS: Final[defaultdict[str, Iterator[int]]] = defaultdict(count)


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Over which ranks parameters are sharded; both in an order that is the same on all ranks.

    Attributes:
        indices: By ``id`` of a sharded parameter its place among all of them.
        groups: By group of ranks that holds shards the places of the parameters that it holds.
    """

    indices: dict[int, int] = field(default_factory=dict)
    groups: dict[Any, list[int]] = field(default_factory=dict)


class Ranks:
    """The ranks of a process group that take the same steps.

    A step calls :meth:`norms`, then :meth:`agree`. A rank on which anything raises before :meth:`agree` has answered
    calls :meth:`absent` and raises: it takes part in the exchanges that the others are in, and ends their step.

    Args:
        group: The ranks.

    Attributes:
        group: See above.
        size: How many ranks there are.
        rank: This rank's number among them.
        shards: Over which of them parameters are sharded: what :meth:`shards_of` has returned.
        is_behind: Whether the others may have written a step that this rank has not.

    **Cost**: one small collective a step; one more for each group of ranks that holds shards of parameters. On an
    accelerator no host sync.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.shards = Shards()
        self._name = f"{group.group_name}/{next(_SESSIONS[group.group_name])}"
        self._votes: Counter[str] = Counter()
        self._has_summed = False
        self._heard: BaseException | None = None
        self.is_behind = False

    @staticmethod
    def of(process_group: Any = None) -> Ranks:
        """Return the ranks that step together: :class:`OneRank` where there is one.

        Args:
            process_group: A group; the default group of ``torch.distributed`` when omitted.

        Raises:
            PolicyError: This rank is not in the group.
            StateError: A group was given, and ``torch.distributed`` is not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is None:
                return OneRank()
            raise StateError(
                "process_group= names ranks, and there are none",
                where="torch.distributed is not initialised",
                write="torch.distributed.init_process_group() first",
            )
        group: Any = dist.group.WORLD if process_group is None else process_group
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise PolicyError(
                "this rank is not in the session's process_group",
                where=f"rank {dist.get_rank()}",
                write="MixedPrecision(…, process_group=group) on the ranks of the group alone",
            )
        return OneRank() if group.size() == 1 else Ranks(group)

    # Who holds what ---------------------------------------------------------------------------------------

    def shards_of(self, params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> Shards:
        """Return over which ranks parameters are sharded.

        Args:
            params: All parameters of which :meth:`norms` is going to be asked, in the same order on all ranks.
            name_of: Gives a parameter's name, for errors.

        Raises:
            PolicyError: See :meth:`require_within`.
            UnsupportedError: A parameter is a sum over ranks that was never taken.
        """
        shards = Shards()
        same_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}  # equal meshes may have groups of their own
        for param in filter(is_distributed, params):
            if id(param) not in shards.indices and (groups := _groups_of(param, name_of)):
                index = shards.indices[id(param)] = len(shards.indices)
                for group in groups:
                    members = tuple(dist.get_process_group_ranks(group))
                    shards.groups.setdefault(same_ranks.setdefault(members, group), []).append(index)
        for group in shards.groups:
            self.require_within(group, "parameters are sharded over")
        return shards

    def require_within(self, group: dist.ProcessGroup, what: str) -> None:
        """Refuse to share gradients with ranks that do not step with this one: their loss scale may be another.

        Args:
            group: The ranks that share them.
            what: What they do, for the error: "DistributedDataParallel reduces over".

        Raises:
            PolicyError: Some of them are not in the session's process group.
        """
        ours = {*dist.get_process_group_ranks(self.group)}
        if missing := sorted({*dist.get_process_group_ranks(group)} - ours):
            raise PolicyError(
                f"{what} ranks that are not in the session's process group",
                where=f"rank {some_of(list(map(str, missing)))}",
                why="an overflow there would not be seen here, and the loss scales would drift apart",
                write="MixedPrecision(…) without process_group=, or with a group that has them all",
            )

    # The exchanges of a step ------------------------------------------------------------------------------

    def norms(self, params: Sequence[Tensor], norms: Tensor) -> Tensor:
        """Return the norms of whole gradients; those of parameters that are not sharded stay as they are.

        Squares are summed over ranks in float64. A sum beyond what FP32 holds is infinite, as it is on one rank.

        Args:
            params: The parameters whose gradients they are of; those of :meth:`shards_of`, or some of them.
            norms: ``(len(params),)`` float32: of what this rank holds of their gradients.

        Returns:
            ``(len(params),)`` float32, equal on all ranks.

        Raises:
            DistributedError: A rank did not answer.

        **Cost**: one all-reduce of 8 bytes for each sharded parameter, over each distinct group that holds shards.
        """
        self._has_summed = True
        shards = self.shards
        if not shards.groups:
            return norms
        whole_norms, squares_here = list(norms.unbind()), norms.double().square().unbind()
        at = {
            index: number
            for number, key in enumerate(map(id, params))
            if (index := shards.indices.get(key)) is not None
        }
        # All sharded parameters, whatever has a gradient here: ranks that differ in that exchange as many numbers.
        zero = norms.new_zeros((), dtype=torch.float64)
        squares = [squares_here[at[index]] if index in at else zero for index in range(len(shards.indices))]
        for group, indices in shards.groups.items():
            part = torch.stack([squares[index] for index in indices])
            self._reduce(part, dist.ReduceOp.SUM, group, "the norms of gradients")
            for index, total in zip(indices, part.unbind(), strict=True):
                squares[index] = total
        sums = torch.stack(squares)
        wholes = sums.masked_fill(sums > _LARGEST, torch.inf).sqrt().float().unbind()
        for index, number in at.items():
            whole_norms[number] = wholes[index]
        return torch.stack(whole_norms) if whole_norms else norms

    def agree(
        self, found_inf: Tensor, failed: Tensor, *, step: int, largest: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return flags that are equal on all ranks: their elementwise MAX.

        Args:
            found_inf: 0-d bool: whether this rank's gradients, or shards of them, were not finite.
            failed: 0-d bool: whether a loss itself was not finite here.
            step: The step's number, for errors.
            largest: float32, written in place: further numbers of which all ranks are to have the largest.

        Returns:
            Three 0-d tensors that are equal on all ranks: ``found_inf`` and ``failed`` of any rank, bool; and
            ``absent``, float32: 0 where all ranks take the step, else a number that :meth:`ended_by` reads. Where a
            rank is absent, the first two are set: the step is skipped, and the loss scale stays.

        Raises:
            DistributedError: A rank did not answer; or, where tensors are on a CPU, a rank was absent. On an
                accelerator, for which the host does not wait, the number travels with the account of the step, and
                raises at the next call.
        """
        self._has_summed = False
        # The third is this rank's number where it is behind, and the fourth 0: a product of 0 where all of them are.
        numbers = torch.stack([found_inf, failed, torch.zeros_like(found_inf), torch.ones_like(found_inf)]).float()
        if self.is_behind:
            numbers[2:].copy_(torch.tensor([self._number, 0.0]))
        numbers = torch.cat([numbers, *(extra.flatten().to(numbers.device) for extra in largest)])
        self._reduce(numbers, dist.ReduceOp.MAX, self.group, f"step {step}")
        (found_inf, failed, absent, keeps_up), rest = numbers[:4].unbind(), numbers[4:]
        absent = absent * keeps_up
        self.is_behind = self.is_behind and bool(absent)
        for extra in largest:
            extra.copy_(rest[: extra.numel()].view_as(extra))
            rest = rest[extra.numel() :]
        if numbers.device.type == "cpu" and (error := self.ended_by(float(absent), step)) is not None:
            raise error
        return found_inf + absent > 0, failed + absent > 0, absent

    def absent(self, error: BaseException, device: torch.device, *, step: int, largest: Sequence[Tensor] = ()) -> None:
        """Send the other ranks that this rank cannot take the step, in the exchanges that they wait in.

        Args:
            error: What is about to be raised here. What the exchange itself has raised is known to all ranks.
            device: Where the loss scale lives.
            step: The step's number, for errors.
            largest: As of :meth:`agree`, of which only the sizes count.
        """
        if error is self._heard:
            return
        with suppress(DistributedError):  # a rank that is gone needs not be told
            if not self._has_summed:
                self.norms([], torch.zeros(0, device=device))
            self._has_summed = False
            numbers = [0.0, 0.0, self._number, 1.0, *[0.0] * sum(extra.numel() for extra in largest)]
            self._reduce(torch.tensor(numbers, device=device), dist.ReduceOp.MAX, self.group, f"step {step}")

    def fall_behind(self, error: BaseException) -> None:
        """Record that this rank has agreed to a step, and has written nothing.

        Exchanges end the steps of all from now on, unless no rank has written: all have run out of memory alike.

        Args:
            error: What is about to be raised here.
        """
        self._heard, self.is_behind = error, True

    @property
    def _number(self) -> float:
        return float(self.size - self.rank)  # the first rank's is the largest

    def ended_by(self, absent: float, step: int) -> DistributedError | None:
        """Return the error of a step that another rank did not take; ``None`` where all took it.

        Args:
            absent: The value of the third tensor that :meth:`agree` returned.
            step: The step's number.

        Returns:
            An error that names the rank, the first of several. All ranks know of it: :meth:`absent` does not tell it.
        """
        if not absent:
            return None
        rank = self.size - int(absent)
        self._heard = error = DistributedError(
            f"rank {rank} ended step {step} with an error, or had no gradient left",
            where=f"told to rank {self.rank} of {self.size}",
            why="all ranks take a step, or none does: weights and loss scales would drift apart",
            write=f"look at what rank {rank} wrote; it may have had fewer batches than the others",
        )
        return error

    # Votes between two steps ------------------------------------------------------------------------------

    def vote(self, call: str, word: str, problem: BaseException | None, *, step: int) -> None:
        """Return if all ranks make a call with the same word, and none has a problem; else raise, on all of them.

        No collective is made, to which a rank that does not call would answer with another one: votes go through the
        store of ``torch.distributed``, and a rank that waits in vain raises, with all that come later.

        Args:
            call: What is voted on, the same on all ranks.
            word: What it is called with.
            problem: What this rank would raise; it is raised here.
            step: How many steps were taken.

        Raises:
            DistributedError: Another rank has a problem, or another word, or has not called in time.

        **Cost**: some round trips to the store; nothing on a device.
        """
        get_store = private("torch.distributed.distributed_c10d._get_default_store")
        store, at = get_store(), f"mezzo/{self._name}/{call}/{step}"
        key = f"{at}/{self._votes[at]}"
        self._votes[at] += 1
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        why = (str(problem) or type(problem).__name__).splitlines()[0]
        store.set(keys[self.rank], f"yes {word}" if problem is None else f"no {why}")
        if problem is not None:
            store.compare_set(key, "", "stop")
            raise problem
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=VOTE_SECONDS))
        votes = [store.get(it).decode() if store.check([it]) else "" for it in keys]
        is_alike = set(votes) == {f"yes {word}"}
        is_made = store.compare_set(key, "", "go" if is_alike else "stop").decode() == "go"  # by who is first
        if is_alike and is_made:
            return
        missing = [f"rank {rank}" for rank, vote in enumerate(votes) if not vote]
        refusing = [f"rank {rank}: {vote[3:]}" for rank, vote in enumerate(votes) if vote.startswith("no ")]
        if refusing:
            problem_text, where = f"another rank cannot carry out {call}", some_of(refusing)
        elif missing or is_alike:
            problem_text = f"not all ranks have called {call} within {VOTE_SECONDS:g} s"
            where = some_of(missing or [f"rank {self.rank} came late"])
        else:
            problem_text = f"the ranks call {call} with different policies"
            where = "\n".join(f"rank {rank}: {vote[4:]}" for rank, vote in enumerate(votes))
        raise DistributedError(
            problem_text,
            where=where,
            why="all ranks do it between the same two steps, or none does",
            write=f"amp.{call} on all ranks, with one policy; the former one is in force on all",
        )

    def _reduce(self, numbers: Tensor, op: Any, group: dist.ProcessGroup, what: str) -> None:
        with self._naming(what):
            dist.all_reduce(numbers, op=op, group=group)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Name the exchange that failed, in place of torch's error about source files of gloo."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self._heard = DistributedError(
                f"the ranks could not agree on {what}",
                where=f"rank {self.rank} of {self.size}, after {time.monotonic() - begun:.3g} s",
                why=str(error).splitlines()[0],
                write="look at what the other ranks wrote last; torchrun --max-restarts=… starts all of them again",
            )
            raise self._heard from error


class OneRank(Ranks):
    """One rank alone, which has nothing to exchange."""

    def __init__(self) -> None:
        self.size, self.rank, self.is_behind, self.shards = 1, 0, False, Shards()
        self._none: Tensor | None = None

    def require_within(self, group: dist.ProcessGroup, what: str) -> None:
        """Refuse gradients that several ranks share; see :meth:`Ranks.require_within`.

        Raises:
            PolicyError: There are several: the session has a group of its own rank alone, or is older than the ranks.
        """
        if group.size() > 1:
            raise PolicyError(
                f"{what} {group.size()} ranks, and the session steps alone",
                where=f"rank {dist.get_rank()}",
                why="an overflow on one of them would not be seen on the others, and the loss scales would drift apart",
                write="torch.distributed.init_process_group() first, then MixedPrecision(…) on all of these ranks",
            )

    def norms(self, params: Sequence[Tensor], norms: Tensor) -> Tensor:
        """Return the norms as they are."""
        return norms

    def agree(
        self, found_inf: Tensor, failed: Tensor, *, step: int, largest: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return both flags as they are, and a zero: no rank is absent."""
        if self._none is None or self._none.device != found_inf.device:
            self._none = torch.zeros((), device=found_inf.device)
        return found_inf, failed, self._none

    def absent(self, error: BaseException, device: torch.device, *, step: int, largest: Sequence[Tensor] = ()) -> None:
        """No-op: there is no other rank."""

    def fall_behind(self, error: BaseException) -> None:
        """No-op: there is no other rank."""

    def vote(self, call: str, word: str, problem: BaseException | None, *, step: int) -> None:
        """Raise the problem, if there is one: there is no other rank."""
        if problem is not None:
            raise problem

    def ended_by(self, absent: float, step: int) -> DistributedError | None:
        """No-op: there is no other rank."""
        return None


def _groups_of(param: Any, name_of: Callable[[Tensor], str]) -> list[dist.ProcessGroup]:
    """Return the groups of more than one rank over which a DTensor is sharded."""
    if any(placement.is_partial() for placement in param.placements):
        raise UnsupportedError(
            "a parameter is a sum over ranks that was never taken",
            where=f"{name_of(param)}, placements {param.placements}",
            why="each rank would update a part of the sum by itself",
            write="param.redistribute(placements=[Replicate()]), or [Shard(0)], before the optimizer",
        )
    sharded = (dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())
    return [group for dim in sharded if (group := param.device_mesh.get_group(dim)).size() > 1]


# Beside DistributedDataParallel ---------------------------------------------------------------------------


class Wrappers:
    """The ``DistributedDataParallel`` wrappers that models of a session run in.

    A wrapper may be made before the session or after; it is found when a model runs in it.

    Args:
        ranks: The ranks that step together; a wrapper over other ranks is refused.

    Attributes:
        are_there: Whether a wrapper was found: gradients then have the dtypes of parameters, as its buckets have.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.are_there = ranks, False
        # Whether a wrapper reduces the gradients of the last forward pass in it; ``None`` before one.
        self._met: WeakKeyDictionary[DistributedDataParallel, bool | None] = WeakKeyDictionary()
        self._paused: dict[DistributedDataParallel, bool] = {}
        self._pauses = 0

    def watch(self, models: Iterable[nn.Module]) -> Iterator[Callable[[], None]]:
        """Watch which wrappers models run in, where there are ranks; yield what ends that."""
        if dist.is_available() and dist.is_initialized():
            require_all("distributed/exchange.py")
            for model in models:
                inner = model.module if isinstance(model, DistributedDataParallel) else model
                yield inner.register_forward_pre_hook(OwnHook(self._enter)).remove

    @never_compiled
    def _enter(self, model: nn.Module, *_: Any) -> None:
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None or not torch.is_grad_enabled():
            return
        if wrapper not in self._met:
            self._ranks.require_within(wrapper.process_group, "DistributedDataParallel reduces over")
            _require_plain(wrapper)
        if self._pauses:
            self._pause(wrapper)
        self._met[wrapper], self.are_there = wrapper.require_backward_grad_sync, True

    @contextmanager
    def no_sync(self, models: Iterable[nn.Module], units: Collection[Any]) -> Iterator[None]:
        """Exchange no gradients of forward passes in here.

        Args:
            models: Those of the session.
            units: Modules that were given to torch's ``fully_shard``.
        """
        self._pauses += 1
        try:
            if self._pauses == 1:
                for wrapper in (*self._met, *(model for model in models if isinstance(model, DistributedDataParallel))):
                    self._pause(wrapper)
                for unit in units:
                    unit.set_requires_gradient_sync(False, recurse=False)
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                for wrapper, before in self._paused.items():
                    wrapper.require_backward_grad_sync = before
                self._paused.clear()
                for unit in units:
                    unit.set_requires_gradient_sync(True, recurse=False)

    def _pause(self, wrapper: DistributedDataParallel) -> None:
        # A wrapper reads this at the end of its forward pass, so that setting it inside the first one is early enough.
        self._paused.setdefault(wrapper, wrapper.require_backward_grad_sync)
        wrapper.require_backward_grad_sync = False

    # A backward pass --------------------------------------------------------------------------------------

    def reduced_with(self, reached: set[int]) -> set[int]:
        """Add to parameters, by ``id``, those that a wrapper reduces with them: other ranks may have reached these."""
        for wrapper, reduces in self._met.items():
            if reduces and not reached.isdisjoint(mine := {id(param) for param in wrapper.parameters()}):
                reached = reached | mine
        return reached

    def end_pass(self) -> None:
        """Forget which wrappers reduce: the backward pass has ended."""
        for wrapper in self._met:
            self._met[wrapper] = None


def _require_plain(wrapper: DistributedDataParallel) -> None:
    """Refuse a wrapper around parameters that tensor parallelism has cut.

    Raises:
        UnsupportedError: Some are DTensors.
    """
    if cut := [name for name, param in wrapper.module.named_parameters() if is_distributed(param)]:
        raise UnsupportedError(
            "DistributedDataParallel around parameters that tensor parallelism has cut",
            where=some_of(cut),
            why="its buckets are plain tensors, and the gradients are DTensors",
            write='mezzo.fully_shard(model, policy, mesh=mesh["data"]) in its place',
        )
