"""The first station, the window: scaled backward passes, whose gradients wait for the step that takes them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError, some_of
from mezzo.scale.scaler import Scaler
from mezzo.session.core import Core, current
from mezzo.session.refusals.calls import check_loss_id
from mezzo.session.weights.shards import Shards
from mezzo.session.window.group import GradientGroup
from mezzo.session.window.wrappers import Reduction
from mezzo.step.gradients import norms
from mezzo.step.passes import judge

__all__ = ["WindowPass", "backward", "differentiate", "scaler_of"]


def backward(core: Core, loss: Tensor, optimizers: list[Optimizer], loss_id: int, options: dict[str, Any]) -> None:
    """Scale a loss and run its backward pass, into the windows of some optimizers.

    Args:
        core: The session.
        loss: The loss.
        optimizers: Whose parameters get gradients.
        loss_id: Whose scale.
        options: What ``Tensor.backward`` takes besides.
    """
    scaler = scaler_of(core, loss_id)
    around = WindowPass(core, optimizers)
    if len(optimizers) < len(core.optimizers):
        options.setdefault("inputs", _differentiable(around.groups, optimizers))
    if core.weights.shards and (inputs := options.get("inputs")) is not None:
        options["inputs"] = core.weights.shards.summed_at([inputs] if isinstance(inputs, Tensor) else list(inputs))
    try:
        around.begin(scaler, scaler.state.scale, loss_id, loss)
        core.runs_backward = True
        with nullcontext() if core.consensus is None else core.consensus.naming("a backward pass"):
            core.weights.region().run_backward(scaler.scaled(loss), **options)
        around.end()
    except BaseException:
        around.come_back()
        raise
    finally:
        core.runs_backward = False


class WindowPass:
    """A backward pass into the windows of some optimizers: what is done before it and after it, whatever call runs it.

    Args:
        core: The session.
        optimizers: Whose parameters get gradients.

    Attributes:
        groups: These optimizers and those that share gradients with them.

    Raises:
        UnsupportedError: Low-precision parameters that were added or thawed since would train without masters.
        StateError: ``fully_shard`` gave the models new parameters.
    """

    def __init__(self, core: Core, optimizers: list[Optimizer]) -> None:
        self._core = core
        core.weights.low.check()
        core.group_optimizers()
        if not core.has_begun:
            core.weights.refuse_replaced(leaf for group in core.groups for _, leaf in group.with_leaves())
        self.groups = [group for group in core.groups if not set(group.optimizers).isdisjoint(optimizers)]
        self._reductions: dict[GradientGroup, Reduction] = {}
        self._changes_gradients = False

    def begin(self, scaler: Scaler, scale: Tensor, loss_id: int, loss: Tensor) -> None:
        """Open the windows; once for a pass, before it makes its first gradient.

        Args:
            scaler: Whose scale the gradients will carry.
            scale: That scale, as it was when the loss was multiplied by it.
            loss_id: The loss's number.
            loss: The loss itself.

        Raises:
            StateError: The last step's gradients are still there; or those of a loss with another scale are not
                reduced, or were edited.
        """
        core, self._changes_gradients = self._core, scaler.changes_gradients
        _prepare_shards(core.weights.shards, self.groups, scaler, scale)
        for group in self.groups:
            group.take_clearing()
        wrappers = core.weights.wrappers
        if wrappers is not None:
            self._reductions = wrappers.reductions(self.groups, scaled=scaler.changes_gradients)
        if not core.has_begun:
            core.refuse_other_ranks()
            core.has_begun = True
        for group in self.groups:
            group.begin(scaler, scale, loss_id, loss, self._reductions.get(group))
        core.weights.keep_casts()

    def end(self) -> None:
        """Take note of what the pass has made."""
        for group in self.groups:
            group.end()
        self._let_go()
        if self._changes_gradients:
            self._core.edits.remember(leaf for group in self.groups for leaf in group.leaves())

    def come_back(self) -> None:
        """Put earlier gradients back that made way for a pass that has failed."""
        for group in self.groups:
            group.come_back()
        self._let_go()

    def _let_go(self) -> None:
        """Have wrappers know that the pass is over."""
        if self._core.weights.wrappers is not None:
            self._core.weights.wrappers.end(self._reductions)


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
    if options.get("create_graph"):
        core.weights.shards.refuse_second_pass()
    scaler = scaler_of(core, loss_id)
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


def scaler_of(core: Core, loss_id: int) -> Scaler:
    """Return the scaler whose scale gradients are about to carry."""
    scaler = core.scalers[check_loss_id(loss_id, len(core.scalers), core.weights.words.begin)]
    current().begin(scaler)
    return scaler


def _prepare_shards(shards: Shards, involved: list[GradientGroup], scaler: Scaler, scale: Tensor) -> None:
    """Make ready for a backward pass whose gradients ``fully_shard`` sums in other tensors, and reduces."""
    if any(group.sets_aside(scaler, scale) for group in involved):
        shards.refuse_unreduced("they carry the scale of another loss, and would be added to those of this one")
    ranks = shards.ranks_summed(scaled=scaler.changes_gradients)
    for group in involved:
        group.waiting.usual = ranks


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
