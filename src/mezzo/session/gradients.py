"""The gradients of one step: their values, their norm, and the optimizer's step or its skip."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["dense", "global_norm", "multiply", "step_or_skip"]


def dense(param: Tensor, gradient: Tensor) -> Tensor:
    """Return the tensor that holds a gradient's values: of a sparse one, those of its coalesced form."""
    if gradient.layout == torch.sparse_coo:
        param.grad = gradient = gradient.coalesce()
        values: Tensor = gradient._values()
        return values
    return gradient


def global_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """2-norm of all gradients together, accumulated in FP32, without a sync."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients).to(device)
    each = [torch.linalg.vector_norm(gradient, dtype=torch.float32).to(device) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return total


def multiply(gradients: list[Tensor], multiplier: Tensor) -> None:
    """Multiply gradients in place by one device tensor, in as few kernels as devices and dtypes allow."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[gradient.device, gradient.dtype].append(gradient)
    for (device, _), group in alike.items():
        torch._foreach_mul_(group, multiplier.to(device, non_blocking=True))


def step_or_skip(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Step if the gradients are finite. Fused optimizers take the flag to the device; others need a sync."""
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not _lacks_momentum(optimizer):
        fused: Any = optimizer
        fused.found_inf, fused.grad_scale = found_inf.to(torch.float32), None
        try:
            optimizer.step()
        finally:
            del fused.found_inf, fused.grad_scale
    elif not bool(found_inf):
        optimizer.step()


def _lacks_momentum(optimizer: Optimizer) -> bool:
    """Whether torch's fused SGD has momentum buffers to make: a skipped kernel would leave them uninitialised."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    )
