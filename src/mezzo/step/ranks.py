"""The ranks that step together: what they tell each other when one cannot take a step, and which of them are gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from mezzo.errors import DistributedError, some_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PROBLEMS", "Problem", "Ranks"]

#: What ranks tell each other of a step that they cannot take, by number, worse ones later.
PROBLEMS: Final = ("", "no gradient", "another error", "PolicyError", "UnsupportedError", "StateError", "NumericsError",
                   "ScaleCollapsed", "other losses or optimizers")  # fmt: skip
#: Seconds to wait for signs of life of other ranks, once a collective has failed, and between two looks.
_SIGNS_S: Final = 2.0
_LOOK_S: Final = 0.02


class Problem(NamedTuple):
    """Why ranks took no step: the number of a word in ``PROBLEMS``, and the first rank that said it."""

    code: int
    rank: int

    @classmethod
    def of(cls, number: float, size: int) -> Problem | None:
        """Read the largest number of all ranks; ``None`` where all of them could go on."""
        code, behind = divmod(int(number), size + 1)
        return cls(code, size - behind) if code else None

    def number(self, size: int) -> int:
        """Return what is exchanged: the largest over all ranks is the worst problem, and of its ranks the first."""
        return self.code * (size + 1) + size - self.rank

    @property
    def is_vote(self) -> bool:
        """Whether ranks only had no gradient."""
        return PROBLEMS[self.code] == "no gradient"


class Ranks:
    """The ranks of a process group, for errors that name them.

    Args:
        everyone: The group.

    Attributes:
        everyone: See above.
        rank: This rank's number in the group.
        size: How many ranks there are.
        step: The number of the step under way.
        peers: The host and the process of each rank, once a session has begun.
        waited_s: Seconds that the host has waited in exchanges so far: over gloo all of it, over NCCL, where devices
            wait for each other, next to nothing.
    """

    def __init__(self, everyone: ProcessGroup) -> None:
        self.everyone, self.rank, self.size, self.step = everyone, everyone.rank(), everyone.size(), 1
        self.peers: list[tuple[str, int]] = []
        self.waited_s = 0.0

    @contextmanager
    def naming(self, call: str) -> Iterator[None]:
        """Raise a :class:`DistributedError` with rank and step for what torch says of a rank that is gone.

        Args:
            call: What is done meanwhile.
        """
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self._raise_lost(error, f"{call}, after {time.monotonic() - begun:.3g} s")
            raise

    def lost_in_forward(self, error: BaseException) -> None:
        """Do as :meth:`naming` for what a forward pass has raised."""
        self._raise_lost(error, "a forward pass")

    def _raise_lost(self, error: BaseException, call: str) -> None:
        # What gloo raises is a plain error that names its source files.
        if isinstance(error, DistributedError) or not (
            isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        ):
            return
        gone = self._gone()
        who = f"rank {some_of(list(map(str, gone)))}" if gone else "another rank"
        raise DistributedError(
            f"{who} did not take part in step {self.step}",
            where=f"{call}, rank {self.rank} of {self.size}",
            why="; ".join([*filter(None, map(self._said, gone)), str(error).splitlines()[0]]),
            write=f"look at what {who} wrote last; torchrun --max-restarts=… starts all ranks again, from the last "
            "checkpoint if the program loads one",
        ) from error

    def failure(self, problem: Problem, step: int) -> DistributedError:
        """Build the error for what another rank has raised in a step, or does otherwise."""
        where = f"step {step}, told to rank {self.rank} of {self.size}"
        word = PROBLEMS[problem.code]
        if problem.rank == self.size:
            return DistributedError(
                f"the ranks step with {word}",
                where=where,
                why="each rank gave amp.step() and amp.backward() others; scales and weights would drift apart",
                write="the same optimizers and loss_ids on all ranks in each step",
            )
        return DistributedError(
            f"rank {problem.rank} ended step {step} with {word if word[0].islower() else 'a ' + word}",
            where=where,
            why=self._said(problem.rank) or "all ranks step together, or none does",
            write=f"what rank {problem.rank} wrote says more",
        )

    def say(self, text: str) -> None:
        """Leave the text of an error for the other ranks."""
        try:
            self._store().set(f"mezzo/said/{self.step}/{self.rank}", text.splitlines()[0][:500])
        except RuntimeError:
            return  # the store is gone with the rank that kept it

    def _said(self, rank: int) -> str:
        try:
            store = self._store()
            for step in (self.step, self.step - 1):  # the others may have gone on
                if store.check([key := f"mezzo/said/{step}/{rank}"]):
                    return f"{store.get(key).decode()} (rank {rank})"
            return ""
        except RuntimeError:
            return ""

    def _gone(self) -> list[int]:
        """Return the ranks that have ended, as far as can be told: those that give no sign of life."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + _SIGNS_S
        try:
            store = self._store()
            store.set(f"mezzo/alive/{self.step}/{self.rank}", "1")
            silent = others
            while silent and time.monotonic() < end:
                # One that has ended since may have been here before, for the same reason as this rank.
                silent = [rank for rank in silent if not store.check([f"mezzo/alive/{self.step}/{rank}"])]
                if dead := [rank for rank in silent if self._has_ended(rank)]:
                    return dead
                time.sleep(_LOOK_S)
            return silent
        except RuntimeError:
            return [rank for rank in others if self._has_ended(rank)]

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank on this machine is known to have ended."""
        host, process = self.peers[rank] if self.peers else ("", 0)
        if host != socket.gethostname():
            return False
        try:
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat")
            return state.exists() and state.read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def _store(self) -> Any:
        return torch.distributed.distributed_c10d._get_process_group_store(self.everyone)
