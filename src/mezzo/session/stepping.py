"""What follows the check: the optimizers' step or its skip, and the next loss scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.scale import ScaleState
from mezzo.scale.scaler import Scaler
from mezzo.scale.transfer import moved
from mezzo.session.checked import Checked
from mezzo.session.gradients import can_fold, multiply, not_finite, step_on_device
from mezzo.session.window import Share

__all__ = ["Adapted", "Found", "adapt", "update"]


class Found:
    """Whether a step overflowed; asked from Python it waits for the device, once."""

    def __init__(self, found_inf: Tensor) -> None:
        self._found_inf = found_inf
        self._known: bool | None = None

    def __bool__(self) -> bool:
        if self._known is None:
            self._known = bool(self._found_inf)
        return self._known


def update(
    checked: Checked, optimizers: list[Optimizer], alone: set[Optimizer], max_norm: float | None, found: Found
) -> None:
    """Update the weights, or skip.

    Optimizers whose kernels can do it unscale, clip and skip on the device; for the others the gradients are
    multiplied before, and the host asks whether to skip.

    Args:
        checked: The gradients.
        optimizers: Those that step.
        alone: Optimizers that share no gradient, which therefore may rewrite theirs.
        max_norm: What to clip the norm of all gradients to.
        found: Whether to skip.
    """
    on_device = {optimizer for optimizer in optimizers if can_fold(optimizer)}
    folding = on_device & alone
    if len(folding) < len(optimizers) and (factor := checked.multiplier(max_norm)) is not None:
        apart = {id(param) for optimizer in folding for group in optimizer.param_groups for param in group["params"]}
        pairs = zip(checked.params, checked.gradients, strict=True)
        multiply([g for param, g in pairs if id(param) not in apart] if apart else checked.gradients, factor)
    divisor = checked.divisor(max_norm) if folding else None
    for optimizer in optimizers:
        if optimizer in on_device:
            step_on_device(optimizer, checked.found_inf, divisor if optimizer in folding else None)
        elif not found:
            optimizer.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """The loss scales around a step.

    Attributes:
        before: The scale that gradients carried, by loss.
        after: The state of each of these losses' scales now.
        loss_failed: 0-d bool: whether a loss was not finite by itself, so that its scale stayed.
    """

    before: Mapping[int, Tensor]
    after: Mapping[int, ScaleState]
    loss_failed: Tensor


def adapt(scalers: list[Scaler], checked: Checked, on_the_way: Mapping[int, Tensor]) -> Adapted:
    """Move the scale of each loss that took part, on the device.

    A loss that is not finite itself leaves its scale alone, unless gradients inside it overflowed on their way there.

    Args:
        scalers: The scale of each loss.
        checked: What the check found.
        on_the_way: Whether gradients that a loss was computed from had overflowed, by loss.
    """
    device = checked.norm.device
    failed = torch.zeros((), dtype=torch.bool, device=device)
    before, after = {}, {}
    for loss_id, parts in _by_loss(checked.shares).items():
        scaler = scalers[loss_id]
        of_these = [loss for number, loss in checked.losses if number == loss_id or not scaler.keeps_apart]
        bad, overflowed = _not_finite(of_these, device), on_the_way.get(loss_id)
        if overflowed is not None:
            bad = bad & ~overflowed
        failed = bad if len(scalers) == 1 else failed | bad
        for scale, found_inf in parts:
            found_inf = found_inf if overflowed is None else found_inf | overflowed
            scaler.update(found_inf, made_with=scale, hold=found_inf & bad)
        before[loss_id], after[loss_id] = parts[-1][0], scaler.state
    return Adapted(before=before, after=after, loss_failed=failed)


def _by_loss(shares: Iterable[Share]) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Group shares by loss, lowest id first: each scale that gradients carried, and whether they overflowed."""
    groups: defaultdict[tuple[int, int], list[Share]] = defaultdict(list)
    for share in shares:
        groups[share.loss_id, id(share.scale)].append(share)
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for (loss_id, _), alike in sorted(groups.items(), key=lambda group: group[0][0]):
        flags = [share.found_inf for share in alike]
        pair = alike[0].scale, flags[0] if len(flags) == 1 else torch.stack(flags).any()
        found.setdefault(loss_id, []).append(pair)
    return found


def _not_finite(losses: list[Tensor], device: torch.device) -> Tensor:
    """Return whether any loss is not finite, 0-d on a device, without a sync."""
    if len(losses) == 1:
        return moved(not_finite(losses[0]).reshape(()), device)
    # In float64 only where a loss is: on float32 it would be infinite above 3.4e38.
    dtype = torch.float64 if any(loss.dtype == torch.float64 for loss in losses) else torch.float32
    there = [moved(loss.reshape(()), device, dtype) for loss in losses]
    return (torch.stack(there) * 0).ne(0).any()
