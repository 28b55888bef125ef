"""The second station of a step, after its verdict: the optimizers update, or skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim.masters import MasterWeights
from mezzo.optim.optimizer import as_one_pass
from mezzo.session.verdict import Judged
from mezzo.session.writes import Writes
from mezzo.step.gradients import multiplications
from mezzo.step.whole import Piece

__all__ = ["lacks_momentum", "takes_flag", "update"]


def update(
    writes: Writes,
    judged: Judged,
    optimizers: list[Optimizer],
    alone: set[Optimizer],
    overflowed: Callable[[], bool],
    masters: Mapping[int, MasterWeights],
) -> list[Piece]:
    """Return what updates the weights, or skips; all that mezzo's optimizers can refuse is refused here.

    Optimizers whose kernels can do it unscale, clip and skip on the device; for the others the gradients are
    multiplied before, and the host asks whether to skip.

    Args:
        writes: What does it.
        judged: The gradients.
        optimizers: Those that step.
        alone: Optimizers that share no gradient: only they may leave the multiplying to their kernels, since another
            one would read the same gradients.
        overflowed: Whether to skip; the host waits for the answer.
        masters: The masters of those optimizers that have any, by ``id``.
    """
    writes.params = judged.params
    verdict = judged.verdict
    on_device = {optimizer for optimizer in optimizers if skips_on_device(optimizer)}
    multiplying = on_device & alone
    pieces: list[Piece] = []
    if len(multiplying) < len(optimizers) and not verdict.is_one:
        apart = {id(param) for o in multiplying for group in o.param_groups for param in group["params"]}
        pairs = zip(judged.params, judged.gradients, strict=True)
        gradients = [g for param, g in pairs if id(param) not in apart] if apart else judged.gradients
        calls = multiplications(gradients, verdict.multiplier)
        pieces.append(lambda: calls)
    flags: tuple[Tensor, Tensor | None] | None = None
    for optimizer in optimizers:
        its_masters = masters.get(id(optimizer))
        if (own := as_one_pass(optimizer)) is not None:
            # Prepared before any piece runs: what one optimizer refuses is refused before another has stepped.
            its_verdict = verdict if optimizer in multiplying else verdict.applied()
            own.prepare(its_verdict, keep=optimizer in multiplying)
            pieces += writes.steps_of_mezzo(own, its_verdict)
        elif optimizer in on_device:
            found_inf, grad_scale = flags = flags or _flags(judged)
            pieces += writes.steps_on_device(
                optimizer, its_masters, found_inf, grad_scale if optimizer in multiplying else None
            )
        elif not overflowed():
            pieces += writes.steps(optimizer, its_masters)
    return pieces


def _flags(judged: Judged) -> tuple[Tensor, Tensor | None]:
    """Return a verdict as torch's fused optimizers take it: whether to skip, and what to divide gradients by."""
    # Unclipped, the scale itself: the inverse of its inverse is another number, unless it is a power of two.
    divisor = judged.verdict.multiplier.reciprocal() if judged.is_clipped else judged.scale
    return judged.verdict.found_inf.to(torch.float32), divisor


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels are told on the device whether to skip, as torch's fused ones and mezzo's are."""
    return takes_flag(optimizer) and not lacks_momentum(optimizer, lambda param: param.grad is not None)


def takes_flag(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels take a flag for skipping; a loaded state may have turned them off."""
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and fused


def lacks_momentum(optimizer: Optimizer, steps: Callable[[Tensor], bool]) -> bool:
    """Whether torch's fused SGD has momentum buffers to make: a skipped kernel would leave them uninitialised.

    Args:
        optimizer: Any optimizer.
        steps: Which of its parameters are asked about.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and steps(param) and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )
