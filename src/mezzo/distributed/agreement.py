"""Something that all ranks are about to do to a model: done alike by all of them, or refused by all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mezzo.errors import DistributedError, MezzoError, PolicyError, some_of

__all__ = ["agreed"]

T = TypeVar("T")


def agreed(mesh: DeviceMesh, plan: Callable[[], T], told: Callable[[T], str]) -> T:
    """Return what a rank plans to do, once all ranks of a mesh are known to plan the same.

    Args:
        mesh: The ranks.
        plan: Makes this rank's plan, or raises what stands against it.
        told: Writes a plan as text.

    Raises:
        MezzoError: What :func:`plan` raised here.
        DistributedError: Another rank has raised.
        PolicyError: Another rank plans something else.
    """
    try:
        mine = plan()
    except MezzoError as error:
        if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is not None:  # the other ranks wait for this one
            _said_by_all(mesh, (True, str(error)))
        raise
    text = told(mine)
    known = _said_by_all(mesh, (False, text))
    if failed := sorted(rank for rank, (is_error, _) in known.items() if is_error):
        raise DistributedError(
            "another rank cannot shard the model",
            where=f"rank {some_of([str(rank) for rank in failed])}",
            why=known[failed[0]][1],
            write="what its message says; nothing was sharded on any rank",
        )
    if others := sorted(rank for rank, (_, theirs) in known.items() if theirs != text):
        raise PolicyError(
            "ranks are about to shard the model differently",
            where=f"rank {dist.get_rank()} and rank {some_of([str(rank) for rank in others])}",
            why=_first_difference(text, known[others[0]][1]),
            write="the same model, policy and wrap on all ranks",
        )
    return mine


def _said_by_all(mesh: DeviceMesh, mine: tuple[bool, str]) -> dict[int, tuple[bool, str]]:
    """Return by rank whether it has raised, and its plan or its error as text."""
    known = {dist.get_rank(): mine}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        there: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(there, known, group)
        for each in there:
            known |= each
    return known


def _first_difference(mine: str, theirs: str) -> str:
    ours, other = mine.split("\n"), theirs.split("\n")
    pairs = ((a, b) for a, b in zip([*ours, ""], [*other, ""], strict=False) if a != b)
    a, b = next(pairs, (f"{len(ours)} modules", f"{len(other)} modules"))
    return f"here {a or 'nothing'}, there {b or 'nothing'}"
