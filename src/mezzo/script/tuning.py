"""``mezzo.script.tune``: precision chosen for a script's model, on the batches and the gradients of its own loop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
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
    tuned_policy = tunable(policy)
    if after < 0:
        raise PolicyError(f"after must be 0 or a positive integer, not {after}", write="after=100")
    recorder = _CallRecorder(after=after)
    ended = run(program, "O0", steps=after + steps, on_step=recorder.stepped, around=recorder.watching)
    if recorder.problem is not None:
        raise recorder.problem
    if ended.failure is not None:
        raise ended.failure
    batches = [call for call in recorder.calls if any(gradient is not None for gradient in call.gradients)][:steps]
    if recorder.model is None or not batches:
        raise never_trains(program.name, ended.report.left_alone)
    make = None if recorder.optimizer is None else _maker(recorder.optimizer)
    return tuned(recorder.model, _loss, batches, optimizer=make, policy=tuned_policy, steps=len(batches))


@dataclass(slots=True)
class _RecordedCall:
    """A call of the model: its arguments, and the gradients of the tensors that it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: list[Tensor | None] = field(default_factory=list)


class _Weighted(torch.autograd.Function):
    """A number whose gradients in some tensors are given: no op of it is one that trials could keep in FP32."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * factor for gradient in ctx.gradients)


def _loss(model: nn.Module, call: _RecordedCall) -> Tensor:
    """Return a number whose gradients in the model's outputs are those of the script's own loss."""
    output = model(*call.args, **call.kwargs)
    outputs_of = zip(tensors(output), call.gradients, strict=True)
    pairs = [(gradient, tensor) for tensor, gradient in outputs_of if gradient is not None]
    gradients, outputs = zip(*pairs, strict=True)
    loss: Tensor = _Weighted.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return loss


class _CallRecorder:
    """The calls of a script's model, with the gradients that the script's loss gives its outputs.

    Args:
        after: How many steps come before the first recorded call.

    Attributes:
        model: A copy of the model as it was at the first recorded call.
        optimizer: The optimizer that stepped last.
        calls: The calls.
        problem: Why nothing can be recorded.
    """

    def __init__(self, after: int) -> None:
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.calls: list[_RecordedCall] = []
        self.problem: UnsupportedError | None = None
        self._after, self._num_steps = after, 0

    def stepped(self, record: StepRecord) -> None:
        """Count a step."""
        self._num_steps = record.step

    @contextmanager
    def watching(self, models: list[nn.Module]) -> Iterator[None]:
        """Record the calls of the model inside the block."""
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
        if self._num_steps < self._after or self.problem is not None or not model.training:
            return
        try:
            if self.model is None:
                self.model = copied(model, _WRITE)
            self.calls.append(_RecordedCall(*copy.deepcopy((args, kwargs))))
        except UnsupportedError as error:
            self.problem = error
        except RuntimeError as error:
            self.problem = UnsupportedError("the model's arguments cannot be copied", why=str(error), write=_WRITE)

    def _returned(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self.calls or self.problem is not None or self.calls[-1].gradients:
            return
        call = self.calls[-1]
        outputs = list(tensors(output))
        call.gradients += [None] * len(outputs)
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_storing(call, index))  # type: ignore[no-untyped-call]


def _storing(call: _RecordedCall, index: int) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        before = call.gradients[index]
        call.gradients[index] = gradient.detach().clone() if before is None else before + gradient.detach()

    return add


def _maker(optimizer: Optimizer) -> Callable[[Any], Optimizer] | None:
    """Return a function that makes an optimizer with the settings of this one's first group, if there can be one."""
    optimizer_class = type(optimizer)
    parameters = inspect.signature(optimizer_class).parameters
    settings = {
        name: value for name, value in optimizer.param_groups[0].items() if name in parameters and name != "params"
    }

    def make(params: Any) -> Optimizer:
        return optimizer_class(params, **settings)

    try:
        make([nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[0]["params"][:1]])
    except Exception:  # whatever a script's own class asks for
        return None
    return make
