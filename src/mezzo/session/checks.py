"""What stands against a session, a loss or a saved state, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import MezzoError, PolicyError, StateError, UnsupportedError, some_of
from mezzo.policy import Policy
from mezzo.step.master import held_state

__all__ = ["check_loss", "check_session", "listed", "refuse_fp16_unscaling"]


def listed(optimizers: Any) -> list[Any]:
    """Return a list of what was given, be it one optimizer or several."""
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def check_session(models: list[nn.Module], optimizers: list[Any], policy: Policy, max_grad_norm: float | None) -> None:
    """Raise all that stands against a session, before anything is changed."""
    problems: list[MezzoError] = []
    if not models or not all(isinstance(model, nn.Module) for model in models):
        problems.append(PolicyError("models must be one nn.Module or more", write="MixedPrecision(model, optimizer)"))
    for optimizer in optimizers or [None]:
        if not isinstance(optimizer, Optimizer):
            problems.append(
                PolicyError(
                    f"an optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}",
                    write="MixedPrecision(model, torch.optim.AdamW(model.parameters()), policy)",
                )
            )
    if max_grad_norm is not None and not max_grad_norm > 0:
        problems.append(
            PolicyError(
                f"max_grad_norm is {max_grad_norm}",
                why="a norm to clip to is positive",
                write="max_grad_norm=1.0",
            )
        )
    if not problems:
        problems += _foreign_params(models, optimizers)
        if policy.master_weights:
            problems += _shared_params(optimizers)
        elif policy.param_dtype != torch.float32:
            problems += _lost_state(models, optimizers, policy)
    if problems:
        raise type(problems[0]).together(problems)


def _foreign_params(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[PolicyError]:
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        foreign = [
            f"group {i}, parameter {j} {tuple(param.shape)}"
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
            if id(param) not in known
        ]
        if foreign:
            yield PolicyError(
                "the optimizer updates parameters that are not the models'",
                where=f"{type(optimizer).__name__}: {some_of(foreign)}",
                why="casting and masters would not reach them; was the model copied or rebuilt after the optimizer?",
                write=f"{type(optimizer).__name__}(model.parameters(), …) after the model is final",
            )


def _shared_params(optimizers: list[Optimizer]) -> Iterator[PolicyError]:
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if shared := own & seen:
            yield PolicyError(
                "two optimizers update the same parameters, which can have only one master each",
                where=f"optimizer {number} ({type(optimizer).__name__}): {len(shared)} parameter(s)",
                write="one optimizer for each parameter, or O1, which needs no masters",
            )
        seen |= own


def _lost_state(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> Iterator[StateError]:
    names = {p: n for model in models for n, p in model.named_parameters() if p.dtype == torch.float32}
    for optimizer in optimizers:
        if held := held_state(optimizer, names):
            yield StateError(
                "the optimizer holds FP32 state for parameters that are about to be low precision",
                where=f"{type(optimizer).__name__}: {some_of(held)}",
                why=f"{policy.level} keeps no masters, so the state would have to be rounded to {policy.dtype}",
                write="a policy with masters (O2), or a new optimizer",
            )


def refuse_fp16_unscaling(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> None:
    """Refuse to unscale gradients in the FP16 of parameters that have no master, which would flush small ones."""
    scale = policy.loss_scale
    if policy.master_weights or scale.mode == "none" or (scale.mode == "constant" and scale.init == 1.0):
        return
    names = {param: name for model in models for name, param in model.named_parameters()}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        half = [f"{names[p]} (float16, {'×'.join(map(str, p.shape))})" for p in params if p.dtype == torch.float16]
        if half:
            raise UnsupportedError(
                "fp16 gradients cannot be unscaled in fp16",
                where=f"{some_of(half, 1)}, optimizer {type(optimizer).__name__}",
                why="dividing them by the loss scale in float16 flushes small ones to zero",
                write='MixedPrecision(model, optimizer, policy="O2")   # keeps FP32 masters; or model.float() first',
            )


def check_loss(loss: Any) -> None:
    """Refuse a loss that has no gradient, before anything is scaled."""
    if not isinstance(loss, Tensor):
        raise PolicyError(f"the loss is a {type(loss).__name__}, not a tensor", write="amp.backward(loss)")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise PolicyError(
            "the loss must be one floating number",
            where=f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}",
            why="a gradient is defined for a real scalar",
            write="amp.backward(loss.mean())" if loss.is_floating_point() else "a loss computed from floating outputs",
        )
    if not loss.requires_grad:
        raise StateError(
            "the loss depends on no parameter",
            why="it does not require a gradient: detached, computed under no_grad, or all parameters are frozen",
            write="compute it from the model's outputs, outside torch.no_grad()",
        )
