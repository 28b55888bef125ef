"""Clearing the gradients of a session's models and optimizers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.step.gradients import clear_to_zeros

__all__ = ["clear"]


def clear(optimizers: list[Optimizer], models: list[nn.Module], stored: Iterable[Tensor], set_to_none: bool) -> None:
    """Clear the gradients of optimizers and models, in classes' own ways where they have any.

    Args:
        optimizers: The optimizers.
        models: The models.
        stored: Parameters whose FP32 values the optimizers keep, and which they clear along with those.
        set_to_none: Whether to let go of gradients; otherwise they become zeros.
    """
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none)
    groups = () if set_to_none else (group for optimizer in optimizers for group in optimizer.param_groups)
    done = {id(param) for param in (*stored, *(param for group in groups for param in group["params"]))}
    for model in models:
        if set_to_none or type(model).zero_grad is not nn.Module.zero_grad or "zero_grad" in vars(model):
            model.zero_grad(set_to_none)
        else:  # which would launch a kernel for each gradient
            clear_to_zeros(param for param in model.parameters() if id(param) not in done)
