"""What the first rank does for all: the others wait for it, and its failure is theirs. It waits for none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mezzo.errors import DistributedError, StateError, some_of
from mezzo.tensors import described, each_tensor, is_distributed

__all__ = ["by_first", "refuse_parts", "several"]


def several() -> bool:
    """Whether this is one of several ranks."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def by_first(path: str | os.PathLike[str], write: Callable[[], None], check: Callable[[], None]) -> None:
    """Write a file on the first rank; on any other one wait until it is there.

    The store by which the ranks have met says how the writing ended, so that nothing is exchanged if only the first
    rank comes here. A path's first, second, … writing is told apart by how often each rank has asked for it.

    Args:
        path: The file.
        write: Writes it.
        check: Raises what stands against it.

    Raises:
        DistributedError: The first rank raised, or did not come here within the store's timeout.
    """
    rank, store = torch.distributed.get_rank(), torch.distributed.distributed_c10d._get_default_store()
    name = f"mezzo.save/{os.path.abspath(os.fsdecode(path))}"
    outcome = f"{name}/{store.add(f'{name} of rank {rank}', 1)}"
    if rank == 0:
        ended = "it was interrupted"
        try:
            check()
            write()
            ended = ""
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
            raise
        finally:
            store.set(outcome, ended)
        return
    check()
    begun = time.monotonic()
    try:
        ended = store.get(outcome).decode()
        problem = f"rank 0 could not save {os.fsdecode(path)}"
        write_instead = "the last checkpoint that was saved is whole"
    except RuntimeError as error:
        ended, problem = str(error).partition("\n")[0], f"rank 0 did not save {os.fsdecode(path)}"
        write_instead = "mezzo.save(…) on rank 0 too; with each_rank=True each rank writes a file of its own"
    if ended:
        where = f"rank {rank} of {torch.distributed.get_world_size()}, after {time.monotonic() - begun:.3g} s"
        raise DistributedError(problem, where=where, why=ended, write=write_instead)


def refuse_parts(state: Any) -> None:
    """Refuse to let one rank save what each of several has a part of.

    Raises:
        StateError: A tensor that is sharded, or a session's state in the middle of an accumulation window.
    """
    sharded = [f"{path} ({described(each)})" for path, each in each_tensor(state) if is_distributed(each)]
    if sharded:
        raise StateError(
            "one rank has only its own part of sharded tensors",
            where=some_of(sharded),
            write='torch.distributed.checkpoint.save({"app": amp.stateful()}, checkpoint_id=folder)',
        )
    if any(_unfinished(state)):
        raise StateError(
            "a session is in the middle of an accumulation window, and each rank has gradients of its own",
            where="amp.state_dict() of rank 0 would be saved for all",
            write="amp.step() first; or mezzo.save(state, a path for each rank, each_rank=True)",
        )


def _unfinished(state: Any) -> Iterator[bool]:
    """Yield, for each session's state in nested mappings, whether it holds gradients of one rank alone."""
    if isinstance(state, Mapping):
        if isinstance(windows := state.get("windows"), list) and "loss_scales" in state:
            yield any(windows) and "rank" in state
        for each in state.values():
            yield from _unfinished(each)
