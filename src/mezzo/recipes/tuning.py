"""Precision chosen for a recipe: :func:`mezzo.numerics.tune` on its own model, loss, batches and optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mezzo.errors import PolicyError
from mezzo.machine import default_device
from mezzo.numerics.tuning import Tuned
from mezzo.numerics.tuning import tune as tuned
from mezzo.numerics.tuning.tuned import Objective
from mezzo.recipes.parallel import require_one_process
from mezzo.recipes.recipe import Batch, Recipe

__all__ = ["tune"]


def tune(
    recipe: Recipe,
    *,
    dtype: str = "float16",
    steps: int = 3,
    objective: Objective = "speed",
    after: int = 0,
    seed: int = 0,
    device: torch.device | None = None,
) -> Tuned:
    """Find the fewest ops of a recipe that need FP32, and the loss scale.

    Args:
        recipe: The recipe.
        dtype: ``float16`` or ``bfloat16``.
        steps: How many steps each trial takes, from the recipe's own batches with its own optimizer.
        objective: ``speed`` or ``memory``.
        after: How many FP32 steps the weights train before.
        seed: Of initial weights and batches.
        device: Where; the accelerator if there is one.

    Returns:
        The policy and the evidence.

    Raises:
        PolicyError: ``after`` is negative, or as :func:`mezzo.numerics.tune`.
        UnsupportedError: The data's package is missing, or the device cannot compute in ``dtype``.
        NumericsError: As :func:`mezzo.numerics.tune`.

    **Cost**: that of :func:`mezzo.numerics.tune`, and ``after`` FP32 steps.

    Example:
        >>> from mezzo.recipes import get
        >>> found = tune(get("digits-cnn"), steps=1)
        >>> found.evidence.steps, found.policy.level
        (1, 'O1')
    """
    require_one_process("tune")
    if isinstance(after, bool) or not isinstance(after, int) or after < 0:
        raise PolicyError(f"after must be 0 or a positive integer, not {after!r}", write="after=100")
    device = device or default_device()
    model, batches = recipe.build(seed).to(device), recipe.batches(recipe.load(), seed)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = (tensor.to(device) for tensor in batch)
        return recipe.loss(model(inputs), targets)

    if after:
        optimizer = recipe.optimizer(model)
        schedule = recipe.schedule(optimizer, max(after, recipe.steps))
        for _ in range(after):
            optimizer.zero_grad()
            torch.autograd.backward(loss_fn(model, next(batches)))
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            optimizer.step()
            schedule.step()

    def make(params: Any) -> torch.optim.Optimizer:
        return recipe.optimizer(nn.ParameterList(params))

    return tuned(model, loss_fn, batches, dtype=dtype, optimizer=make, steps=steps, objective=objective)
