"""Models that were prepared before their session: what is converted, wrapped, and then given an optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from torch import nn

from mezzo.cast.model.originals import preparations_in
from mezzo.cast.model.prepare import Prepared
from mezzo.errors import MezzoError, PolicyError, StateError, raise_together
from mezzo.policy import Policy

__all__ = ["Handles", "with_handles"]

#: The models of a session that were prepared before: each with its handle, or a wrapper with those of what it wraps.
Handles: TypeAlias = Mapping[nn.Module, list[Prepared]]


def with_handles(
    given: Iterable[nn.Module | Prepared], policy: Policy | str | os.PathLike[str] | None
) -> tuple[list[nn.Module], Handles, Policy]:
    """Return the models of a session, the handles of those that were prepared before, and the policy of all.

    Args:
        given: Handles, models, and wrappers around them; of a wrapper, the handles of what it wraps are found.
        policy: The session's; where it is omitted, that of the handles, and without any ``"O1"``.

    Raises:
        PolicyError: Another policy than that of a handle.
        StateError: A model of which only a part was prepared, or that cannot be used as it is.
    """
    models, handles = list[nn.Module](), dict[nn.Module, list[Prepared]]()
    for each in given:
        model = each.model if isinstance(each, Prepared) else each
        models.append(model)
        if found := [each] if isinstance(each, Prepared) else preparations_in(each):
            handles[model] = found
    every = [handle for found in handles.values() for handle in found]
    asked = Policy.of(policy) if policy is not None else every[0].asked if every else Policy.of("O1")
    problems: list[MezzoError] = [*_other_policies(every, asked)]
    if len(set(every)) < len(every):
        problems.append(PolicyError("a prepared model is listed twice", write="each one once, or its wrapper"))
    for model, found in handles.items():
        problems += _parts(model, found)
    raise_together(problems)
    for handle in every:
        handle.require_whole()
    return models, handles, asked


def _other_policies(handles: list[Prepared], policy: Policy) -> Iterator[PolicyError]:
    for handle in handles:
        if handle.asked != policy:
            yield PolicyError(
                "the session's policy is not the one that its model was prepared with",
                where="\n".join([type(handle.model).__name__, *handle.asked.differences(policy)]),
                why="prepared → session; the model is converted already",
                write="MixedPrecision(prepared, optimizer)   # whose policy is that of prepared;\n"
                "or prepared.remove(), and mezzo.prepare(model, policy) with the other one",
            )


def _parts(model: nn.Module, handles: list[Prepared]) -> Iterator[StateError]:
    """Yield an error where handles do not cover exactly the tensors of a model."""
    covered = {id(param) for handle in handles for param in handle.model.parameters()}
    mine = {id(param) for param in model.parameters()}
    if covered != mine:
        bigger = "was prepared as part of a larger one" if covered - mine else "was prepared only in part"
        yield StateError(
            f"the model {bigger}",
            where=f"{type(model).__name__}, prepared: {', '.join(type(each.model).__name__ for each in handles)}",
            write="MixedPrecision([prepared, …], optimizer) with the handles that mezzo.prepare returned",
        )
