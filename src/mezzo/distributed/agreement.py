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
    error: MezzoError | None = None
    mine, text = None, ""
    try:
        mine = plan()
        text = told(mine)
    except MezzoError as raised:
        error = raised
    is_waited_for = isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is not None
    if not is_waited_for:
        assert error is not None, "what is no mesh of this rank was refused"
        raise error
    known: dict[int, tuple[bool, str]] = {dist.get_rank(): (error is not None, text if error is None else str(error))}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        there: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(there, known, group)
        for each in there:
            known |= each
    if error is not None:
        raise error
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
    assert mine is not None
    return mine


def _first_difference(mine: str, theirs: str) -> str:
    ours, other = mine.split("\n"), theirs.split("\n")
    pairs = ((a, b) for a, b in zip([*ours, ""], [*other, ""], strict=False) if a != b)
    a, b = next(pairs, (f"{len(ours)} modules", f"{len(other)} modules"))
    return f"here {a or 'nothing'}, there {b or 'nothing'}"
