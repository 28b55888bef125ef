"""Which optimizers share gradients: found once, and again when one was given parameter groups."""

from __future__ import annotations

from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.masters import MasterWeights
from mezzo.session.window.group import GradientGroup

__all__ = ["grouped", "regrouped"]


def grouped(optimizers: list[Optimizer], masters: dict[int, MasterWeights]) -> list[GradientGroup]:
    """Group optimizers that share parameters.

    Args:
        optimizers: All of a session's.
        masters: Their masters, by ``id`` of the optimizer.
    """
    groups: list[tuple[list[Optimizer], set[int]]] = []
    for optimizer in optimizers:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        together, apart = [optimizer], []
        for others, theirs in groups:
            if theirs & params:
                together, params = [*others, *together], params | theirs
            else:
                apart.append((others, theirs))
        groups = [*apart, (together, params)]
    return [GradientGroup(found, [masters[id(o)] for o in found if id(o) in masters]) for found, _ in groups]


def regrouped(
    known: list[GradientGroup], optimizers: list[Optimizer], masters: dict[int, MasterWeights]
) -> list[GradientGroup]:
    """Group optimizers anew if they were given parameter groups since, outside an accumulation window.

    Args:
        known: How they were grouped.
        optimizers: As of :func:`grouped`.
        masters: As of :func:`grouped`.

    Raises:
        StateError: Two of them have a master of the same parameter now.
    """
    if not any(group.has_grown for group in known) or any(group.window for group in known):
        return known
    found = grouped(optimizers, masters)
    leaves = [id(leaf) for group in found for _, leaf in group.with_leaves()]
    if len(set(leaves)) < len(leaves):
        raise StateError(
            "two optimizers update the same parameters, which can have only one master each",
            where="a parameter group that was added since the last step",
            write="add_param_group with parameters of no other optimizer; or O1, which needs no masters",
        )
    stale = {key: kept for group in known for key, kept in group.stale.items()}
    for group in found:
        group.stale = dict(stale)
    return found
