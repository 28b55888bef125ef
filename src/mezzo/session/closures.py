"""Optimizers that evaluate the loss inside their step: each evaluation checked, all undone if one overflows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mezzo.errors import PolicyError, StateError, some_of
from mezzo.session.core import Core
from mezzo.session.refusals.calls import check_numbers
from mezzo.session.verdict import Judged, together
from mezzo.session.window.group import GradientGroup
from mezzo.step.gradients import multiplications
from mezzo.step.whole import Call, Piece, at_once

__all__ = ["evaluated"]


def evaluated(
    core: Core,
    optimizers: list[Optimizer],
    closure: Callable[[], Any],
    judge: Callable[[list[GradientGroup], list[Optimizer]], Judged],
) -> tuple[list[GradientGroup], Judged, Callable[[], bool], list[Piece]]:
    """Let one optimizer evaluate the loss itself, each evaluation judged, unscaled and clipped.

    Args:
        core: The session.
        optimizers: The one.
        closure: Clears the gradients, computes the loss, and runs its backward pass.
        judge: Gathers and judges the gradients of some groups' optimizers.

    Returns:
        The optimizer's group, its gradients, whether an evaluation overflowed, and what is left to do.
    """
    if len(optimizers) > 1:
        raise PolicyError(
            "a closure is for one optimizer",
            where=f"amp.step(closure=…) for {some_of([type(o).__name__ for o in optimizers])}",
            why="each optimizer moves its weights between two evaluations of the loss",
            write="amp.step(optimizers=optimizer, closure=closure), for one after the other",
        )
    (optimizer,) = optimizers
    (group,) = (group for group in core.groups if optimizer in group.optimizers)
    check_numbers([optimizer])
    masters = core.weights.masters.get(id(optimizer))
    evaluations: list[Judged] = []
    found: list[bool] = []

    @torch.no_grad()
    def unscale() -> None:
        if group.window is None:
            raise StateError("the closure computed no gradient", write="amp.backward(loss) in the closure")
        judged = judge([group], [optimizer])
        evaluations.append(judged)
        if not judged.verdict.is_one:
            at_once(*multiplications(judged.gradients, judged.verdict.multiplier))
        group.close()
        core.weights.forget_casts()  # the optimizer is about to move the weights, through .data it may be
        found.append(bool(judged.verdict.found_inf))
        if found[-1]:
            raise Overflowed

    def evaluate() -> Any:
        if masters is not None:
            masters.round_to_params()  # the optimizer may have moved them since the last evaluation
            group.wide.give_back()  # for closures that clear the model's gradients, and not the optimizer's
        if core.agreement is not None:
            core.agreement.begin(core.stats.begun + 1)
        with torch.enable_grad():  # as torch's own optimizers do, and others may not
            loss = closure()
        unscale()
        return loss

    if masters is not None:
        masters.take_edits()
    weights = [(param, param.detach().clone()) for param in group.params([optimizer])]
    wrapped = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]  # as SAM wraps one
    remembering = [_remembering(each) for each in (optimizer, *wrapped)]

    @torch.no_grad()
    def rounded(*, back: bool = False) -> list[Call]:
        """Round masters into the model, or put everything back first; to do it twice is to do it once."""
        if back:
            for param, weight in weights:
                param.copy_(weight)
            for restore in remembering:
                restore()
        if masters is not None:
            masters.round_to_params()
        return []

    def undo() -> None:
        rounded(back=True)
        group.abandon()

    core.writes.undo.append(undo)  # for whatever is raised before the step counts
    core.evaluating = optimizer
    try:
        if group.window is not None:
            unscale()
        core.writes.step_of(optimizer)(evaluate)
    except Overflowed:
        pass
    if not evaluations:
        what = f"{type(optimizer).__name__}.step() did not evaluate the closure"
        raise StateError(what, write="amp.backward(loss), then amp.step() without closure=")
    core.evaluating = None
    return [group], together(evaluations), lambda: found[-1], [partial(rounded, back=found[-1])]


class Overflowed(Exception):  # noqa: N818 - it never leaves the session
    """An evaluation's gradients are not finite; caught by the session."""


def _remembering(optimizer: Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's state and options back, tensors of its state in the same memory.

    **Cost**: a copy of the state.
    """
    # By parameter, and what users note down beside them.
    state = {key: dict(kept) if isinstance(kept, dict) else kept for key, kept in optimizer.state.items()}
    values = {key: _copied(kept) for key, kept in state.items()}
    groups = optimizer.param_groups
    options = [_copied({key: value for key, value in group.items() if key != "params"}) for group in groups]

    def restore() -> None:
        optimizer.state.clear()
        for key, kept in values.items():
            if isinstance(there := state[key], dict):  # an optimizer may know the addresses of its tensors
                kept = {n: there[n].copy_(value) if isinstance(value, Tensor) else value for n, value in kept.items()}
            optimizer.state[key] = kept
        for group, before in zip(optimizer.param_groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(params=params, **before)

    return restore


def _copied(value: Any) -> Any:
    """Copy a tensor, any plain value, and whatever containers hold them."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), value)
