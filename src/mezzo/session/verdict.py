"""The second station, the verdict: the gradients of some optimizers are gathered from their windows, and judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim.optimizer import one_pass
from mezzo.session.window.group import GradientGroup
from mezzo.session.window.window import CarriedScale, LossShare, NoGradient
from mezzo.step.consensus import Heard
from mezzo.step.executors.choose import shared
from mezzo.step.gradients import alike, dense, norms
from mezzo.step.passes import Verdict, decided, not_finite

__all__ = ["Judged", "judge_groups", "together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The gradients of one step, with the verdict on them.

    Attributes:
        params: What will be updated: masters, or the parameters themselves.
        gradients: Their gradients, dense.
        dtypes: Those that the gradients have.
        verdict: Whether to update, and what to multiply the gradients by.
        scale: 0-d float32: what the gradients are to be divided by; ``None`` for nothing.
        is_clipped: Whether the verdict's multiplier clips.
        shares: What each loss contributed.
        losses: The losses themselves, detached, with their ids.
        found_here: 0-d bool: whether this rank's own part of the gradients is not finite.
        heard: What all ranks have told; ``None`` where there is one, or nothing was asked yet.
    """

    params: list[Tensor]
    gradients: list[Tensor]
    dtypes: set[torch.dtype]
    verdict: Verdict
    scale: Tensor | None
    is_clipped: bool
    shares: list[LossShare]
    losses: list[tuple[int, Tensor]]
    found_here: Tensor
    heard: Heard | None = None

    def overflowed(self) -> bool:
        """Whether to skip; the host waits for the device.

        Raises:
            DistributedError: Another rank has raised.
        """
        if self.heard is not None:
            self.heard.require_none()
        return bool(self.verdict.found_inf)


def judge_groups(
    groups: list[GradientGroup],
    optimizers: list[Optimizer],
    device: torch.device,
    max_norm: float | None,
    whole: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Judged:
    """Gather and judge the gradients of some optimizers, leaving the unscaling to the update where it can be.

    Args:
        groups: The optimizers' groups, with open windows.
        optimizers: Those of them that step.
        device: Where the loss scale lives.
        max_norm: What to clip the norm of all gradients to.
        whole: Where there are several ranks: gives, from parameters and the norms of this rank's gradients, the norms
            of the whole gradients, and norms whose own norm is that of all of them.

    Raises:
        NoGradient: No parameter has a gradient.
    """
    windows = [group.window for group in groups if group.window is not None]
    # One scale that all gradients carry is unscaled on the way to the weights; several have to be before.
    one = _common_scale([window.carried if window.is_plain else None for window in windows])
    for group in groups:
        group.gather() if one is not None else group.settle()
    params, gradients = dense([param for group in groups for param in group.params(optimizers)])
    if not params:
        raise NoGradient(
            "no parameter has a gradient",
            why="every optimizer's gradients are None: frozen, detached, or cleared since backward()",
            write="amp.zero_grad() only after amp.step()",
        )
    # Where mezzo's optimizers take all of them, their executor reads the gradients once for all norms.
    places = alike(gradients)
    are_all = one_pass(optimizers) == optimizers
    each = norms(gradients, device, one_pass=are_all, groups=places)
    scale = None if one is None or one.is_one else one.scale if one.ranks == 1 else one.divisor()
    numbers: list[Tensor | float] = [] if scale is None else [scale]
    numbers += [] if max_norm is None else [float(max_norm)]
    # One launch on a GPU: the same pure function that the contract suite tests, traced and spelled as one kernel.
    here, (each, total) = each, (each, each) if whole is None else whole(params, each)
    given = scale is not None, max_norm is not None, not are_all
    found = shared(decided, given, [total, *numbers])
    names = dict(zip(("grad_norm", "found_inf", "multiplier"), found, strict=False))
    verdict = Verdict(norms=each, **names, is_one=not numbers, as_fused=tuple(found[3:]))
    # What was found once of gradients whose owner has edited them since counts still, where it did in their own system.
    if windows[0].is_found and windows[0].settled:
        known = (share.found_inf for window in windows for share in window.settled)
        verdict = verdict.flagged(reduce(or_, known, verdict.found_inf))
    for window in windows:
        if window.overflowed is not None:
            verdict = verdict.flagged(verdict.found_inf | window.overflowed)
    if one is not None:
        shares = [LossShare(loss_id=one.loss_id, scale=one.scale, found_inf=verdict.found_inf)]
    elif not (shares := [share for window in windows for share in window.settled]):
        raise NoGradient(
            "these are gradients that no amp.backward() made",
            why="nothing had a gradient when they were unscaled, so that their scale is not known",
            write="amp.backward(loss), and edits of .grad after it",
        )
    return Judged(
        params=params,
        gradients=gradients,
        dtypes={dtype for _, dtype in places},
        verdict=verdict,
        scale=scale,
        is_clipped=max_norm is not None,
        shares=shares,
        losses=[pair for window in windows for pair in window.losses],
        found_here=found[1] if total is here else not_finite(here.sum()),
    )


def _common_scale(carried: list[CarriedScale | None]) -> CarriedScale | None:
    """Return the scale that all windows carry, if there is one."""
    known = [each for each in carried if each is not None]
    return known[-1] if len(known) == len(carried) and len({each.kind for each in known}) == 1 else None


def together(evaluations: list[Judged]) -> Judged:
    """Return the last evaluation of one step, with what all of them found."""
    shares = [share for each in evaluations for share in each.shares]
    losses = [pair for each in evaluations for pair in each.losses]
    return replace(evaluations[-1], shares=shares, losses=losses)
