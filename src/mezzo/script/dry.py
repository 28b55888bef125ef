"""``mezzo.script.rehearse``: one step of a script, and what policies would make of it."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.errors import MezzoError
from mezzo.explanation import Explanation, explain
from mezzo.explanation.run import own
from mezzo.policy import Policy
from mezzo.script.program import Enough, Program, Seams, own_traceback
from mezzo.tensors import tensors
from mezzo.trace.sandbox import copied

__all__ = ["Rehearsed", "rehearse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What one step of a script has shown.

    Attributes:
        explanations: What the policies make of each model whose forward pass was part of it: all models under the
            first policy, then under the next.
        left_alone: Models that could not be explained, and why.
        error: What the script raised before the step was done; ``None`` where nothing.
    """

    explanations: tuple[Explanation, ...]
    left_alone: dict[str, str]
    error: BaseException | None


def rehearse(program: Program, policies: Policy | Sequence[Policy], *, steps: int = 1) -> Rehearsed:
    """Run a script in FP32 until an optimizer has stepped, and explain each model that it calls on the way there.

    What the script makes of a model's output by ``cross_entropy`` is part of what is explained.

    Args:
        program: The script, which runs once.
        policies: The policy, or several.
        steps: The step to explain; those before it run as they are.

    Returns:
        What that has shown; what the script writes until then is written.

    **Cost**: that of :func:`mezzo.explain` for each model and policy, a copy of each model, and the script until then.
    """
    calls = _Calls(steps)
    error: BaseException | None = None
    with Seams() as seams:
        calls.watch(seams)
        after = register_optimizer_step_post_hook(calls.stepped)
        try:
            program.run()
        except Enough:
            pass
        except BaseException as raised:
            error = raised.with_traceback(own_traceback(raised))
        finally:
            after.remove()
    found = []
    for policy in [policies] if isinstance(policies, Policy) else policies:
        for call in calls.seen:
            try:
                found.append(explain(call.model, call.inputs, policy=policy, loss=call.loss))
            except (MezzoError, TypeError) as failed:
                calls.left_alone[type(call.model).__name__] = str(failed)
    return Rehearsed(explanations=tuple(found), left_alone=calls.left_alone, error=error)


@dataclass(slots=True)
class _Call:
    """A model as it was called: copies of it and of its inputs, the shapes that it returned, and the loss."""

    model: nn.Module
    inputs: Any
    shapes: tuple[torch.Size, ...] = ()
    loss: Callable[[Any], Tensor] | None = None


class _Calls:
    """Keep each outermost module that is called where gradients are made, as it was at its first call in one step.

    Attributes:
        seen: The calls.
        left_alone: Modules that could not be copied, and why.
    """

    def __init__(self, steps: int) -> None:
        self.seen: list[_Call] = []
        self.left_alone: dict[str, str] = {}
        self._steps, self._taken = steps, Counter[int]()
        self._known: set[nn.Module] = set()

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """End the script when an optimizer has taken the step."""
        self._taken[id(optimizer)] += 1
        if self._taken[id(optimizer)] >= self._steps:
            raise Enough

    def watch(self, seams: Seams) -> None:
        """Hear of the calls of modules, and of the loss."""
        plain, entropy = vars(nn.Module)["__call__"], nn.functional.cross_entropy
        depth = 0

        @functools.wraps(plain)
        def call(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                kept = self._kept(self_, args, kwargs) if depth == 1 else None
                out = plain(self_, *args, **kwargs)
                if kept is not None:
                    kept.shapes = tuple(each.shape for each in tensors(out))
                return out
            finally:
                depth -= 1

        @functools.wraps(entropy)
        def cross_entropy(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 (torch's name)
            for kept in reversed(self.seen):
                if kept.loss is None and any(_holds(shape, input) for shape in kept.shapes):
                    kept.loss = functools.partial(_loss, entropy, input.shape, args, kwargs)
                    break
            return entropy(input, *args, **kwargs)

        seams.replace(nn.Module, "__call__", call)
        seams.replace(nn.functional, "cross_entropy", cross_entropy)

    def _kept(self, module: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        is_due = torch.is_grad_enabled() and max(self._taken.values(), default=0) == self._steps - 1
        if not is_due or module in self._known or not any(param.requires_grad for param in module.parameters()):
            return None
        self._known.add(module)
        try:
            inputs = own(_inputs(module, args, kwargs))
            self.seen.append(_Call(copied(module, "mezzo.explain(build_model(), inputs, policy)"), inputs))
        except (MezzoError, TypeError) as error:  # arguments of which no mapping can be made
            self.left_alone[type(module).__name__] = str(error)
            return None
        return self.seen[-1]


def _holds(shape: torch.Size, logits: Any) -> bool:
    """Whether logits are an output of this shape, or rows of one."""
    if not isinstance(logits, Tensor) or not logits.requires_grad or not shape:
        return False
    return logits.shape == shape or (
        logits.dim() == 2 and shape[-1] == logits.shape[-1] and shape.numel() >= logits.numel()
    )


def _loss(entropy: Any, shape: torch.Size, args: Any, kwargs: Any, output: Any) -> Tensor:
    logits = next(each for each in tensors(output) if each.is_floating_point() and each.shape[-1:] == shape[-1:])
    if logits.shape != shape:
        logits = logits.reshape(-1, shape[-1])[: shape[0]]
    loss: Tensor = entropy(logits, *args, **kwargs)
    return loss.mean() if loss.dim() else loss


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and kwargs:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    return args or kwargs
