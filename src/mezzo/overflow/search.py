"""``locate``: one watched forward and backward pass, and the first non-finite tensor that leads on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.cast.region import autocast
from mezzo.errors import PolicyError
from mezzo.overflow.diagnose import Context, diagnose, highest_scale
from mezzo.overflow.report import Overflow
from mezzo.overflow.watch import Watch
from mezzo.policy import Policy
from mezzo.tensors import LOW, each_tensor
from mezzo.trace.measure import is_finite
from mezzo.trace.modes import hooked, watching
from mezzo.trace.names import numbered
from mezzo.trace.sandbox import gradients_aside, leaves_of, untouched
from mezzo.trace.where import Where

#: Runs a backward pass from several tensors, as ``torch.autograd.backward`` does.
Backward = Callable[..., None]


def locate(
    fn: Callable[[], Any],
    model: nn.Module | Iterable[nn.Module],
    *,
    loss_scale: float | Tensor = 1.0,
    policy: Policy | str | os.PathLike[str] | None = None,
) -> Overflow | None:
    """Find the first tensor of a training step that is not finite and leads on, forward or backward.

    ``fn`` is run once with a look at every kernel's results, then the backward pass of what it returns times the loss
    scale. A tensor counts if it reaches the loss or a gradient: an attention mask's -inf, which a softmax consumes, is
    not blamed. A gradient that overflows because of the loss scale is told from others by trying lower scales.

    Gradients, buffers and random states are as before afterwards; what ``fn`` writes to other objects is written.

    Args:
        fn: Runs the forward pass, in its own autocast region if there is one, and returns the loss, or any tensors in
            containers, whose sum then takes the loss's place.
        model: The model, or the models, that ``fn`` runs; they give modules and parameters their names.
        loss_scale: What the loss is multiplied by.
        policy: The policy that ``fn`` trains under, its text or file. It makes the cure exact, and lets activation
            checkpoints of plain functions be recomputed under its rules.

    Returns:
        The report, or ``None`` where the loss and all gradients are finite.

    Raises:
        PolicyError: ``fn`` returned no floating tensor, ``model`` is not a module, or the loss scale is not positive.

    **Cost**: one training step with a host sync and up to 1 ms of Python for each kernel, a copy of all buffers, and
    for a gradient that overflows some more backward passes, three where the first guess at the scale is right.

    Example:
        >>> import mezzo, torch
        >>> from mezzo.overflow import locate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> policy = mezzo.Policy.O1("float16", emulate=True)
        >>> def fn():
        ...     with mezzo.autocast(policy):
        ...         return model(torch.full((2, 4), 6e4)).square().sum()
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(4 * torch.eye(4))
        >>> overflow = locate(fn, model, policy=policy)
        >>> overflow.module, overflow.op, overflow.phase, overflow.tensor.dtype, overflow.cure
        ('0', 'linear', 'forward', 'float16', 'policy = policy.keep_fp32(modules=["0"])   # the text fp32_module=0')
    """
    models = checked_models(model)
    policy = None if policy is None else Policy.of(policy)
    scale = float(loss_scale)
    if not 0.0 < scale < float("inf"):
        raise PolicyError(f"the loss scale is {scale!r}", why="a scale is positive and finite", write="loss_scale=1.0")
    search = Search(Context(models, policy, scale))
    backward: Backward = torch.autograd.backward if policy is None else autocast(policy).run_backward
    with untouched(models), search.hooked():
        ends = [tensor for _, tensor in each_tensor(search.forward(fn)) if tensor.is_floating_point()]
        if not ends:
            raise PolicyError(
                "fn returned no floating tensor",
                why="a search begins at the loss and goes backward",
                write="mezzo.overflow.locate(lambda: criterion(model(x), y), model)",
            )
        origin = search.watch.first(ends)
        if origin is not None and (
            not origin.may_be_meant or any(end.numel() == 1 and not is_finite(end) for end in ends)
        ):
            return diagnose(origin, search.context)
        starts = [_wide(end) * scale for end in ends if end.requires_grad]
        return search.backward(starts, [torch.ones_like(start) for start in starts], backward) if starts else None


def checked_models(model: Any) -> list[nn.Module]:
    """Return a list of models, or refuse what is none.

    Raises:
        PolicyError: Something is not an ``nn.Module``, or there is nothing.
    """
    models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else [model]
    if not models or not all(isinstance(each, nn.Module) for each in models):
        kinds = ", ".join(type(each).__name__ for each in models) or "nothing"
        raise PolicyError(f"a model must be an nn.Module, not {kinds}", write="mezzo.overflow.locate(fn, model)")
    return models


class Search:
    """A watched forward pass, and backward passes from it.

    Args:
        context: The models, their policy and the loss scale.
        where: Where the pass begins.
    """

    def __init__(self, context: Context, where: Where | None = None) -> None:
        self.context = context
        self.watch = Watch(context, where or Where())

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook every module inside the block, so that it is known which one runs."""
        with ExitStack() as hooks:
            for prefix, model in numbered(self.context.models):
                learn = partial(self._learn, prefix)
                hooks.callback(model.register_forward_pre_hook(learn, prepend=True, with_kwargs=True).remove)
            hooks.enter_context(hooked(self.watch, self.context.models))
            yield

    def _learn(self, prefix: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.watch.names.put_inputs(prefix, args, kwargs)

    def forward(self, fn: Callable[[], Any]) -> Any:
        """Run a forward pass, watched."""
        with watching(self.watch):
            return fn()

    def backward(self, starts: Sequence[Tensor], gradients: Sequence[Tensor], run: Backward) -> Overflow | None:
        """Run a backward pass, watched, and report what makes a gradient non-finite.

        Args:
            starts: Where it starts.
            gradients: The gradients that arrive there.
            run: What runs it.
        """
        with gradients_aside(leaves := self._leaves(starts)):
            with watching(self.watch, backward=True):
                run(starts, grad_tensors=gradients, retain_graph=True)
            found = [leaf.grad for leaf in leaves if leaf.grad is not None]
        origin = self.watch.first(found)
        if origin is None:
            return None
        if origin.phase == "forward" or origin.source != "made":
            return diagnose(origin, self.context)

        def is_finite_at(scale: float) -> bool:
            lower = [gradient * (scale / self.context.loss_scale) for gradient in gradients]
            with gradients_aside(leaves):
                run(starts, grad_tensors=lower, retain_graph=True)
                return all(is_finite(leaf.grad) for leaf in leaves if leaf.grad is not None)

        lowered = highest_scale(self.context.loss_scale, origin.needed, torch.finfo(origin.dtype).max, is_finite_at)
        # In a wider format a scale below 1 would only hide that the gradient itself has no bound.
        is_cure = origin.dtype == torch.float16 or (lowered or 0) >= 1
        return diagnose(origin, self.context, lowered if is_cure else None)

    def _leaves(self, starts: Iterable[Tensor]) -> list[Tensor]:
        """Find every tensor that a backward pass may give a gradient to."""
        # Reentrant checkpoints hide parameters from the graph, and a loss may read leaves that are no parameters.
        params = (param for model in self.context.models for param in model.parameters())
        found = (*(param for param in params if param.requires_grad), *leaves_of(starts))
        return list({id(leaf): leaf for leaf in found}.values())


def _wide(loss: Tensor) -> Tensor:
    """Widen a loss as a session does before it multiplies it with the scale."""
    return loss.float() if loss.dtype in LOW else loss
