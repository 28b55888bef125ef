"""The window's station: scaled backward passes, whose gradients wait in windows for the step that takes them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError, some_of
from mezzo.scale.scaler import Scaler
from mezzo.session.core import Core, current
from mezzo.session.refusals import check_loss_id
from mezzo.session.weights.shards import Shards
from mezzo.session.window.group import GradientGroup
from mezzo.step.gradients import norms
from mezzo.step.passes import judge

__all__ = ["backward", "differentiate"]


def backward(core: Core, loss: Tensor, optimizers: list[Optimizer], loss_id: int, options: dict[str, Any]) -> None:
    """Scale a loss and run its backward pass, into the windows of some optimizers.

    Args:
        core: The session.
        loss: The loss.
        optimizers: Whose parameters get gradients.
        loss_id: Whose scale.
        options: What ``Tensor.backward`` takes besides.
    """
    scaler = _scaler(core, loss_id)
    core.weights.low.check()
    core.group_optimizers()
    if not core.has_begun:
        core.weights.refuse_replaced(leaf for group in core.groups for _, leaf in group.with_leaves())
    involved = [group for group in core.groups if not set(group.optimizers).isdisjoint(optimizers)]
    if len(optimizers) < len(core.optimizers):
        options.setdefault("inputs", _differentiable(involved, optimizers))
    if core.weights.shards is not None:
        _prepare_shards(core.weights.shards, involved, scaler, options)
    for group in involved:
        group.take_clearing()
    wrappers = core.weights.wrappers
    reductions = {} if wrappers is None else wrappers.reductions(involved, scaled=scaler.changes_gradients)
    if not core.has_begun:
        core.refuse_other_ranks()
        core.has_begun = True
    try:
        for group in involved:
            group.begin(scaler, loss_id, loss, reductions.get(group))
        core.weights.keep_casts()
        with nullcontext() if core.consensus is None else core.consensus.naming("a backward pass"):
            core.weights.region().run_backward(scaler.scaled(loss), **options)
        for group in involved:
            group.end()
    except BaseException:
        for group in involved:
            group.come_back()
        raise
    finally:
        if wrappers is not None:
            wrappers.end(reductions)
    if scaler.changes_gradients:
        core.edits.remember(leaf for group in involved for leaf in group.leaves())


def differentiate(
    core: Core, outputs: Tensor, inputs: list[Tensor], loss_id: int, **options: Any
) -> tuple[Tensor, ...]:
    """Differentiate scaled outputs, and return unscaled gradients in FP32 or wider.

    Args:
        core: The session.
        outputs: What to differentiate.
        inputs: What to differentiate by.
        loss_id: Whose scale.
        **options: What ``torch.autograd.grad`` takes besides.
    """
    if options.get("create_graph") and core.weights.shards is not None:
        core.weights.shards.refuse_second_pass()
    scaler = _scaler(core, loss_id)
    found = core.weights.region().run_grad(scaler.scaled(outputs), inputs, **options)
    # Inputs that were not used have none, with allow_unused=True.
    wide = [g if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in found]
    if not scaler.changes_gradients:
        return tuple(wide)
    inverse = scaler.state.inverse()
    unscaled = [g if g is None else g * inverse.to(g.device) for g in wide]
    if there := [g.detach() for g in unscaled if g is not None]:
        found_inf = judge(norms(there, inverse.device), None).found_inf
        before = core.inner_overflows.get(loss_id)
        core.inner_overflows[loss_id] = found_inf if before is None else before | found_inf
    return tuple(unscaled)


def _scaler(core: Core, loss_id: int) -> Scaler:
    """Return the scaler whose scale gradients are about to carry."""
    scaler = core.scalers[check_loss_id(loss_id, len(core.scalers))]
    current().begin(scaler)
    return scaler


def _prepare_shards(shards: Shards, involved: list[GradientGroup], scaler: Scaler, options: dict[str, Any]) -> None:
    """Make ready for a backward pass whose gradients ``fully_shard`` sums in other tensors, and reduces."""
    if any(group.sets_aside(scaler) for group in involved):
        shards.refuse_unreduced("they carry the scale of another loss, and would be added to those of this one")
    ranks = shards.ranks_summed(scaled=scaler.changes_gradients)
    for group in involved:
        group.waiting.usual = ranks
    if (inputs := options.get("inputs")) is not None:
        options["inputs"] = shards.summed_at([inputs] if isinstance(inputs, Tensor) else list(inputs))


def _differentiable(involved: list[GradientGroup], optimizers: list[Optimizer]) -> list[Tensor]:
    """Return the parameters that some optimizers' backward pass is for."""
    leaves = [leaf for group in involved for leaf in group.leaves(optimizers)]
    if not leaves:
        raise StateError(
            "these optimizers update no parameter that requires a gradient",
            where=some_of([type(optimizer).__name__ for optimizer in optimizers]),
            write="requires_grad_(True) on what they train, or amp.backward(loss) for all optimizers",
        )
    return leaves
