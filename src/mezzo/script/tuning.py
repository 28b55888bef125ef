"""``mezzo.script.tune``: precision chosen for a script's model, on the batches and the gradients of its own loop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.numerics.tuning import Tuned
from mezzo.numerics.tuning import tune as tuned
from mezzo.numerics.tuning.search import tunable
from mezzo.policy import Policy
from mezzo.script.program import Program, StepRecord, never_trains, require_one_process
from mezzo.script.runner import name_of, run
from mezzo.tensors import tensors
from mezzo.trace.sandbox import copied

_WRITE = "mezzo.numerics.tune(model, loss_fn, batches)"


def tune(
    program: Program,
    policy: Policy | str = "O1,dtype=float16",
    *,
    steps: int = 3,
    after: int = 0,
) -> Tuned:
    """Find the fewest ops of a script's model that need FP32, and the loss scale.

    The script runs in FP32 until its model was called often enough. Of each call the arguments are kept, and the
    gradients that the script's loss gave its outputs. Trials call a copy of the model with these arguments, and begin
    their backward passes with these gradients: in FP32 they end in the script's own. The loss function, which
    ``mezzo run`` leaves in FP32, takes no part.

    Args:
        program: The script.
        policy: Level O1, which gives the format; its rules and fields are kept.
        steps: How many calls are kept; each is a step of a trial.
        after: How many steps the script takes before.

    Returns:
        The policy and the evidence. Steps of trials are those of the script's optimizer where another one can be made
        of its settings; else all begin at the script's weights.

    Raises:
        PolicyError: ``policy`` cannot be used, ``after`` is negative, or the script never trains.
        UnsupportedError: It trains several models at a time; its model or arguments cannot be copied.
        NumericsError: As :func:`mezzo.numerics.tune`.
        BaseException: What the script raises.
    """
    require_one_process("tune")
    kept_policy = tunable(policy)
    if after < 0:
        raise PolicyError(f"after must be 0 or a positive integer, not {after}", write="after=100")
    kept = _OwnCalls(calls=steps, after=after)
    ended = run(program, "O0", steps=after + steps, told=kept.stepped, around=kept.watching)
    if kept.problem is not None:
        raise kept.problem
    if ended.failure is not None:
        raise ended.failure
    batches = [call for call in kept.made if any(gradient is not None for gradient in call.gradients)][:steps]
    if kept.model is None or not batches:
        raise never_trains(program.name, ended.report.left_alone)
    make = None if kept.optimizer is None else _maker(kept.optimizer)
    return tuned(kept.model, _loss, batches, optimizer=make, policy=kept_policy, steps=len(batches))


@dataclass(slots=True)
class _KeptCall:
    """A call of the model: its arguments, and the gradients of the tensors that it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: list[Tensor | None] = field(default_factory=list)


class _Weighted(torch.autograd.Function):
    """A number whose gradients in some tensors are given: no op of it is one that trials could keep in FP32."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * factor for gradient in ctx.gradients)


def _loss(model: nn.Module, call: _KeptCall) -> Tensor:
    """Return what has the gradients of the script's own loss, in the model's outputs."""
    output = model(*call.args, **call.kwargs)
    pairs = [(g, t) for t, g in zip(tensors(output), call.gradients, strict=True) if g is not None]
    loss: Tensor = _Weighted.apply([each[0] for each in pairs], *(each[1] for each in pairs))  # type: ignore[no-untyped-call]
    return loss


class _OwnCalls:
    """What is kept of a script's run.

    Args:
        calls: How many calls with gradients.
        after: How many steps come before.

    Attributes:
        model: A copy of the model as it was at the first call that was kept.
        optimizer: What updates the model.
        made: The calls.
        problem: Why nothing can be kept.
    """

    def __init__(self, calls: int, after: int) -> None:
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.made: list[_KeptCall] = []
        self.problem: UnsupportedError | None = None
        self._calls, self._after, self._taken = calls, after, 0

    def stepped(self, record: StepRecord) -> None:
        """Count a step."""
        self._taken = record.step

    @contextmanager
    def watching(self, models: list[nn.Module]) -> Iterator[None]:
        """Keep calls inside the block."""
        if len(models) > 1:
            self.problem = UnsupportedError(
                "tuning finds rules for one model",
                where=", ".join(map(name_of, models)),
                why="the gradients of each depend on the others",
                write=_WRITE,
            )
            yield
            return
        with ExitStack() as handles:
            before = models[0].register_forward_pre_hook(self._before, with_kwargs=True)
            handles.callback(before.remove)
            handles.callback(models[0].register_forward_hook(self._returned).remove)
            handles.callback(register_optimizer_step_post_hook(self._steps).remove)
            yield

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizer = optimizer

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._taken < self._after or self.problem is not None or not model.training:
            return
        try:
            if self.model is None:
                self.model = copied(model, _WRITE)
            self.made.append(_KeptCall(*copy.deepcopy((args, kwargs))))
        except UnsupportedError as error:
            self.problem = error
        except RuntimeError as error:
            self.problem = UnsupportedError("the model's arguments cannot be copied", why=str(error), write=_WRITE)

    def _returned(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self.made or self.problem is not None or self.made[-1].gradients:
            return
        call = self.made[-1]
        found = list(tensors(output))
        call.gradients += [None] * len(found)
        for place, tensor in enumerate(found):
            if tensor.requires_grad:
                tensor.register_hook(_keeping(call, place))  # type: ignore[no-untyped-call]


def _keeping(call: _KeptCall, place: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        before = call.gradients[place]
        call.gradients[place] = gradient.detach().clone() if before is None else before + gradient.detach()

    return keep


def _maker(optimizer: Optimizer) -> Callable[[Any], Optimizer] | None:
    """Return what makes an optimizer with the settings of another one's first group; ``None`` where that is unknown."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name in known and name != "params"}

    def make(params: Any) -> Optimizer:
        return kind(params, **settings)

    try:
        make([nn.Parameter(each.detach().clone()) for each in optimizer.param_groups[0]["params"][:1]])
    except Exception:  # whatever a script's own class asks for
        return None
    return make
