"""``mezzo.script.rehearse``: one step of a script, and what policies would make of it."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.errors import MezzoError
from mezzo.explanation import Explanation, explain
from mezzo.policy import Policy
from mezzo.script.program import Enough, Program, Seams, own_traceback
from mezzo.tensors import tensors

__all__ = ["Rehearsed", "rehearse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What one step of a script has shown.

    Attributes:
        explanations: What the policies make of each model whose forward pass was part of it: those of the first policy,
            then those of the next.
        left_alone: Models that could not be explained, and why.
        error: What the script raised before the step was done; ``None`` where nothing.
    """

    explanations: tuple[Explanation, ...]
    left_alone: dict[str, str]
    error: BaseException | None


def rehearse(program: Program, policies: Policy | Sequence[Policy], *, steps: int = 1) -> Rehearsed:
    """Run a script in FP32 until an optimizer has stepped, and explain each model that it calls on the way there.

    Where the script gives a model's output to ``cross_entropy``, that is part of what is explained.

    Args:
        program: The script, which runs once.
        policies: The policy, or several.
        steps: The step to explain; those before it run as they are.

    Returns:
        What that has shown; what the script writes until then is written.

    **Cost**: that of :func:`mezzo.explain` for each model and policy, and of the script until that step.
    """
    watched = _Watched([policies] if isinstance(policies, Policy) else policies, steps)
    error: BaseException | None = None
    with Seams() as seams:
        watched.watch(seams)
        after = register_optimizer_step_post_hook(watched.stepped)
        try:
            program.run()
        except Enough:
            pass
        except BaseException as raised:
            error = raised.with_traceback(own_traceback(raised))
        finally:
            after.remove()
    found = tuple(explained for each in zip(*watched.explained, strict=True) for explained in each)
    return Rehearsed(explanations=found, left_alone=watched.left_alone, error=error)


class _Watched:
    """Explains each outermost module that is called where gradients are made, at its first call in one step.

    Attributes:
        explained: Of each model, what each policy makes of it.
        left_alone: Models that could not be explained, and why.
    """

    def __init__(self, policies: Iterable[Policy], steps: int) -> None:
        self.explained: list[list[Explanation]] = []
        self.left_alone: dict[str, str] = {}
        self._policies, self._steps = tuple(policies), steps
        self._taken = Counter[int]()
        self._known: set[nn.Module] = set()
        self._outputs: list[tuple[int, list[Tensor], nn.Module, Any]] = []

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """End the script when an optimizer has taken the step."""
        self._taken[id(optimizer)] += 1
        if self._taken[id(optimizer)] >= self._steps:
            raise Enough

    def watch(self, seams: Seams) -> None:
        """Hear of the calls of modules and of the loss."""
        plain, entropy = vars(nn.Module)["__call__"], nn.functional.cross_entropy
        depth = 0

        @functools.wraps(plain)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                if depth > 1 or module in self._known or not (self._is_due() and _trains(module)):
                    return plain(module, *args, **kwargs)
                self._known.add(module)
                self._explain(module, args, kwargs)
                return plain(module, *args, **kwargs)
            finally:
                depth -= 1

        seams.replace(nn.Module, "__call__", call)

    def _is_due(self) -> bool:
        return torch.is_grad_enabled() and max(self._taken.values(), default=0) == self._steps - 1
