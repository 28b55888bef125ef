"""``mezzo.script.rehearse``: one step of a script, and what a policy would make of it."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.errors import MezzoError
from mezzo.explanation import Explanation, explain
from mezzo.policy import Policy
from mezzo.script.program import Enough, Program, Seams, own_traceback

__all__ = ["Rehearsed", "rehearse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What one step of a script has shown.

    Attributes:
        explanations: What the policy makes of each model whose forward pass was part of it.
        left_alone: Models that could not be explained, and why.
        error: What the script raised before its first step was done; ``None`` where nothing.
    """

    explanations: tuple[Explanation, ...]
    left_alone: dict[str, str]
    error: BaseException | None


def rehearse(program: Program, policy: Policy) -> Rehearsed:
    """Run a script in FP32 until an optimizer has stepped, and explain each model that it calls on the way there.

    Args:
        program: The script.
        policy: The policy.

    Returns:
        What that has shown; what the script writes until then is written.

    **Cost**: that of :func:`mezzo.explain` for each model, and of the script until its first step.
    """
    explained: dict[nn.Module, Explanation | None] = {}
    left_alone: dict[str, str] = {}
    error: BaseException | None = None
    with Seams() as seams:
        _watch(seams, policy, explained, left_alone)
        after = register_optimizer_step_post_hook(_enough)
        try:
            program.run()
        except Enough:
            pass
        except BaseException as raised:
            error = raised.with_traceback(own_traceback(raised))
        finally:
            after.remove()
    found = tuple(each for each in explained.values() if each is not None)
    return Rehearsed(explanations=found, left_alone=left_alone, error=error)


def _enough(*_: Any) -> None:
    raise Enough


def _watch(
    seams: Seams, policy: Policy, explained: dict[nn.Module, Explanation | None], left_alone: dict[str, str]
) -> None:
    """Explain each outermost module that is called where gradients are made, at its first call."""
    plain = vars(nn.Module)["__call__"]
    depth = 0

    @functools.wraps(plain)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            if depth == 1 and self not in explained and torch.is_grad_enabled() and _trains(self):
                explained[self] = None
                try:
                    explained[self] = explain(self, _inputs(self, args, kwargs), policy)
                except (MezzoError, TypeError) as error:  # arguments of which no mapping can be made
                    left_alone[type(self).__name__] = str(error)
            return plain(self, *args, **kwargs)
        finally:
            depth -= 1

    seams.replace(nn.Module, "__call__", call)


def _trains(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and kwargs:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    return args or kwargs
