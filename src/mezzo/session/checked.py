"""The check that comes before every step: one pass over the gradients, and nothing written that it could not undo."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.optim.optimizer import OnePassOptimizer
from mezzo.scale.state import inverse
from mezzo.session.cluster import Cluster
from mezzo.session.gradients import alike, dense, norms, not_finite
from mezzo.session.window import Share
from mezzo.step.passes import clip_coefficient

__all__ = ["Checked", "check", "together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The gradients of one step.

    Attributes:
        params: What will be updated: masters, or the parameters themselves.
        gradients: Their gradients, dense.
        dtypes: Those that the gradients have.
        norm: 0-d float32: 2-norm of all of them, unscaled.
        each: ``(len(params),)`` float32: 2-norm of each, as it stands.
        found_inf: 0-d bool: whether any is not finite, before or after unscaling.
        scale: 0-d float32: what the gradients still carry; ``None`` for nothing.
        inverse: 1/scale, rounded once; ``None`` for nothing.
        shares: What each loss contributed.
        losses: The losses themselves, detached, with their ids.
    """

    params: list[Tensor]
    gradients: list[Tensor]
    dtypes: Set[torch.dtype]
    norm: Tensor
    each: Tensor
    found_inf: Tensor
    scale: Tensor | None
    inverse: Tensor | None
    shares: list[Share]
    losses: list[tuple[int, Tensor]]

    def divisor(self, max_norm: float | None) -> Tensor | None:
        """Return scale / clip coefficient; ``None`` where that is 1 by construction."""
        if max_norm is None:
            return self.scale
        clip = clip_coefficient(self.norm, max_norm)
        return clip.reciprocal() if self.scale is None else self.scale / clip

    def multiplier(self, max_norm: float | None) -> Tensor | None:
        """Return clip coefficient / scale; ``None`` where that is 1 by construction."""
        if max_norm is None:
            return self.inverse
        clip = clip_coefficient(self.norm, max_norm)
        return clip if self.inverse is None else self.inverse * clip


def check(involved: list[Cluster], optimizers: Iterable[Optimizer], device: torch.device) -> Checked:
    """Gather, norm and check the gradients of some optimizers, leaving the unscaling to the step where it can be.

    Args:
        involved: The optimizers' clusters, with open windows.
        optimizers: Those that step.
        device: Where the loss scale lives.

    Raises:
        StateError: No parameter has a gradient, or a scale was written to.
    """
    windows = [cluster.window for cluster in involved if cluster.window is not None]
    for window in windows:
        window.require_unchanged()
    carried = {w.carried.kind: w.carried for w in windows if w.carried is not None}
    # One scale that all gradients carry is unscaled on the way to the weights; several have to be before.
    one = next(iter(carried.values())) if len(carried) == 1 and all(w.is_plain for w in windows) else None
    scale = None if one is None or one.is_one else one.scale
    for cluster in involved:
        cluster.gather() if one is not None else cluster.settle()
    params = [param for cluster in involved for param in cluster.params(optimizers) if param.grad is not None]
    if not params:
        raise StateError(
            "no parameter has a gradient",
            why="every optimizer's gradients are None: frozen, detached, or cleared since backward()",
            write="amp.zero_grad() only after amp.step()",
        )
    gradients = dense(params)
    over_scale = None if scale is None else inverse(scale)
    stepping = (o for cluster in involved for o in cluster.optimizers if o in optimizers)
    groups = alike(gradients)
    one_pass = all(isinstance(o, OnePassOptimizer) for o in stepping)
    norm, each = norms(gradients, device, one_pass=one_pass, groups=groups)
    if over_scale is not None:
        # The norm of the scaled gradients times 1/scale also finds an infinity that unscaling would make.
        norm = norm * over_scale
    found_inf = not_finite(norm)
    if one is not None:
        shares = [Share(loss_id=one.loss_id, scale=one.scale, found_inf=found_inf)]
    elif not (shares := [share for window in windows for share in window.settled]):
        raise StateError(
            "these are gradients that no amp.backward() made",
            why="nothing had a gradient when they were unscaled, so that nobody knows what they carry",
            write="amp.backward(loss), and edits of .grad after it",
        )
    dtypes = {dtype for _, dtype in groups}
    return Checked(
        params=params, gradients=gradients, dtypes=dtypes, norm=norm, each=each, found_inf=found_inf, scale=scale,
        inverse=over_scale, shares=shares, losses=[pair for window in windows for pair in window.losses],
    )  # fmt: skip


def together(evaluations: list[Checked]) -> Checked:
    """Return the last evaluation of one step, with what all of them found."""
    shares = [share for each in evaluations for share in each.shares]
    losses = [pair for each in evaluations for pair in each.losses]
    return replace(evaluations[-1], shares=shares, losses=losses)
