"""One trial: the gradients of a policy's steps, beside those of FP32."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from mezzo.cast.differences import OPENED
from mezzo.cast.mode import OPENED_BACKWARD
from mezzo.cast.model.prepare import Prepared
from mezzo.cast.region import autocast
from mezzo.compiling import compiled_inside_alone
from mezzo.errors import MezzoError, NumericsError, PolicyError, printable, shown, some_of
from mezzo.overflow import locate
from mezzo.overflow.diagnose import highest_scale
from mezzo.policy import Policy
from mezzo.scale import LossScale
from mezzo.tensors import LOW
from mezzo.trace.sandbox import RandomStates, copied, devices_of, gradients_aside, leaves_of, require_scalar

# The FP32 steps that policies are measured against, on a copy of the model that drops nothing.

LossFunction = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Any], Optimizer]
Gradients = dict[str, Tensor]
T = TypeVar("T")  # Python 3.11 has no `def f[T]`

#: A gradient this much smaller than others of its module is the rounding noise of a sum that is zero, as that of a bias
#: before a softmax or a batch norm is: in 16 bits it is other noise, and says nothing.
_NOISE: Final = 1e-5
_OPTIMIZER: Final = "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
_NO_LOSS: Final = (
    "loss_fn must return one floating number to differentiate",
    "def loss_fn(model, batch): return criterion(model(batch[0]), batch[1])   # a scalar",
)


def sqnr(reference: Tensor, value: Tensor) -> float:
    r"""Return the signal-to-quantisation-noise ratio, ``10·log10(Σ r² / Σ (v − r)²)``, in dB; a host sync.

    Elements whose reference is not finite are left out. A value that alone is not finite gives −inf.

    Returns:
        The ratio; inf for equal tensors, NaN where the reference is zero everywhere, and the value finite.

    Example:
        >>> round(sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])), 6)
        20.0
    """
    is_finite, wide = torch.isfinite(reference), reference.double()
    error = torch.where(is_finite, value.double() - wide, 0.0).square().sum()
    signal, noise = torch.stack([torch.where(is_finite, wide, 0.0).square().sum(), error]).tolist()
    if not math.isfinite(noise):
        return -math.inf
    if not signal:
        return math.nan
    return 10.0 * math.log10(signal / noise) if noise else math.inf


@dataclass(slots=True)
class Pass:
    """A forward pass under a policy, and backward passes from it.

    Attributes:
        loss: What the loss function returned.
        region: The policy's region.
        params: The parameters that train, by path.
    """

    loss: Tensor
    region: autocast
    params: dict[str, nn.Parameter]

    def gradients(self, scale: float) -> Gradients:
        """Run a backward pass from the loss times a scale; return unscaled FP32 gradients, zeros for none."""
        loss = self.loss.float() if self.loss.dtype in LOW else self.loss
        leaves = {id(leaf): leaf for leaf in (*self.params.values(), *leaves_of([loss]))}
        with NoDropout(), gradients_aside(leaves.values()):
            self.region.run_backward(loss * scale, retain_graph=True)
            return {
                name: torch.zeros_like(param) if param.grad is None else param.grad.to_dense().detach().float() / scale
                for name, param in self.params.items()
            }


class Shadow:
    """A copy of a model, and the FP32 steps that it takes.

    Args:
        model: The model; only read.
        loss_fn: From the model and a batch to the loss.
        batches: One for each step.
        optimizer: Makes the optimizer of some parameters; where there is none, weights stay where they are.

    Attributes:
        model: The copy.
        params: Its parameters that train, by path.
        gradients: The FP32 gradients of each step.
        judged: The parameters of each step whose gradients are more than rounding noise.
        unjudged: Those that are in no step.

    Raises:
        UnsupportedError: The model cannot be copied.
        PolicyError: Nothing trains, or the loss or the optimizer is none.
        NumericsError: A loss or gradient is not finite in FP32.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Sequence[Any],
        optimizer: MakeOptimizer | None,
    ) -> None:
        self.model = copied(model, "mezzo.numerics.tune(build_model(), …)")
        self.loss_fn, self.batches = loss_fn, batches
        self.devices = devices_of([model])
        self.params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):  # whose kernels drop by themselves
                module.dropout = 0.0
        for param in self.model.parameters():
            param.grad = None
        if not self.params:
            raise PolicyError(
                "the model has no parameter that trains",
                where=type(model).__name__,
                why="policies are judged by gradients",
                write="model.requires_grad_(True)",
            )
        # It raises for models that cannot be prepared.
        self._handle = Prepared(self.model, Policy.O0(), logs_unreached_rules=False)
        if low := [name for name, param in self.params.items() if param.dtype in LOW]:
            raise PolicyError(
                "weights that train are stored low already",
                where=some_of(low),
                why="policies are compared with FP32 training, which needs the weights in FP32",
                write="tune(model.float(), …)",
            )
        self._states: list[list[Tensor]] = []
        self._randoms: list[RandomStates] = []
        self.gradients: list[Gradients] = []
        self._updates = None if optimizer is None else _OptimizerSteps(optimizer, self.params)
        for step in range(len(batches)):
            self._states.append([tensor.detach().clone() for tensor in self._tensors()])
            self._randoms.append(RandomStates.now(self.devices))
            self.gradients.append(self._fp32(step))
            if self._updates is not None:
                self._updates.step(self.gradients[step])
        self.judged = [_above_noise(gradients) for gradients in self.gradients]
        self._names = [name for name in self.params if any(name in judged for judged in self.judged)]
        self.unjudged = tuple(name for name in self.params if name not in self._names)
        if not self._names:
            raise PolicyError(
                "no parameter got a gradient",
                where=f"{len(batches)} steps of loss_fn",
                why="all are zero, as where loss_fn runs another model than it is given",
                write="def loss_fn(model, batch): return criterion(model(batch[0]), batch[1])",
            )
        if self._updates is not None:  # the weights are about to go back
            self._total_update = self._updates.total_update(self._names)

    def forward(
        self,
        policy: Policy,
        step: int,
        inside: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it holds nothing
        on_batch: Callable[[Any], None] | None = None,
    ) -> Pass:
        """Run the forward pass of a step under a policy, from the weights and random states of the FP32 run.

        Args:
            policy: The policy.
            step: Which step.
            inside: What is entered inside the policy's region.
            on_batch: Called with the copy of the batch before the pass.
        """
        for tensor, value in zip(self._tensors(), self._states[step], strict=True):
            tensor.data.copy_(value)
        self._randoms[step].restore()
        if self._handle.policy != policy:
            self._handle.remove()
            # Trials show what a rule does, whatever it says.
            self._handle = Prepared(self.model, policy, logs_unreached_rules=False)
        region, batch = self._handle.autocast(), _copy_of(self.batches[step])
        if on_batch is not None:
            on_batch(batch)
        with NoDropout(), region, inside:
            loss = self.loss_fn(self.model, batch)
        return Pass(loss, region, self.params)

    def updates_db(self, gradients: Sequence[Gradients]) -> float | None:
        """Compare what the optimizer makes of some gradients of all steps with what it makes of those in FP32.

        Returns:
            Signal to noise in dB; ``None`` without an optimizer, or where it adds zero.
        """
        if self._updates is None:
            return None
        low = self._updates.anew()
        for gradients_of_step in gradients:
            low.step(gradients_of_step)
        ratio = sqnr(self._total_update, low.total_update(self._names))
        return None if math.isnan(ratio) else ratio

    def _tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _fp32(self, step: int) -> Gradients:
        run = self.forward(Policy.O0(), step)
        require_scalar(run.loss, *_NO_LOSS, trains=True)
        gradients = run.gradients(1.0)
        if math.isfinite(run.loss.item()) and not _not_finite(gradients):
            return gradients
        batch = _copy_of(self.batches[step])  # not under the search's eyes, which would blame the copy
        self._randoms[step].restore()
        origin = locate(lambda: self.loss_fn(self.model, batch), self.model)
        raise NumericsError(
            f"the model is not finite in FP32, in step {step + 1} of {len(self.batches)}",
            where=str(origin) if origin is not None else "",
            why="precision is chosen by comparing with FP32, and there is nothing to compare with",
            write="what the first non-finite tensor's report says, and then tune again",
        )


def _above_noise(gradients: Gradients) -> list[str]:
    """Return the parameters whose gradients are more than noise beside those of their module, or of all."""
    sizes = {name: float(gradient.abs().amax()) if gradient.numel() else 0.0 for name, gradient in gradients.items()}

    def beside(name: str) -> list[str]:
        module = name.rpartition(".")[0]
        siblings = [other for other in sizes if other.rpartition(".")[0] == module]
        return siblings if len(siblings) > 1 else list(sizes)

    return [name for name, size in sizes.items() if size > _NOISE * max(sizes[other] for other in beside(name))]


def _not_finite(gradients: Gradients) -> list[str]:
    return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]


class _OptimizerSteps:
    """Steps on a copy of the weights, to compare what an optimizer makes of gradients.

    Args:
        make: Makes it of parameters.
        params: What it updates, by path.

    Raises:
        PolicyError: It is no optimizer, or one of other parameters.
    """

    def __init__(self, make: MakeOptimizer, params: dict[str, nn.Parameter]) -> None:
        optimizer: Any = make(list(params.values()))
        if not isinstance(optimizer, Optimizer):
            raise PolicyError(f"optimizer= returned {shown(optimizer)}, no optimizer", write=_OPTIMIZER)
        param_ids = {id(param) for param in params.values()}
        if any(id(param) not in param_ids for group in optimizer.param_groups for param in group["params"]):
            raise PolicyError(
                "the optimizer updates other parameters than those it was given",
                why="steps are taken on a copy of the model",
                write=_OPTIMIZER,
            )
        self._make, self._optimizer, self._params = make, optimizer, params
        self._before = {name: param.detach().clone() for name, param in params.items()}

    def anew(self) -> _OptimizerSteps:
        """Return the steps of a new optimizer, from the same weights."""
        return _OptimizerSteps(self._make, {name: nn.Parameter(value.clone()) for name, value in self._before.items()})

    def step(self, gradients: Gradients) -> None:
        """Step the optimizer with these gradients."""
        for name, param in self._params.items():
            param.grad = gradients[name].to(param.dtype)
        try:
            self._optimizer.step()
        except TypeError as error:
            what = f"{type(self._optimizer).__name__} takes no step without a closure"
            raise PolicyError(what, why=str(error), write=_OPTIMIZER) from error
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def total_update(self, names: Sequence[str]) -> Tensor:
        """Return the sum of all steps' updates of some parameters, concatenated."""
        return torch.cat([(self._params[name].detach() - self._before[name]).flatten() for name in names])


def _copy_of(batch: Any) -> Any:
    """Return a copy of a batch: a loss function may write into it, and the next trial needs the batch as it was."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # an object that cannot be copied, or a tensor inside a graph: the batch is used as it is
        return batch


# Dropout ----------------------------------------------------------------------------------------------

_DROP: Final = frozenset(
    {functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
     functional.feature_alpha_dropout, torch.dropout}
)  # fmt: skip
#: Functions that hand themselves over whole; opened, they let a mode stay active meanwhile.
_OPENED: Final = {
    torch.autograd.backward: OPENED_BACKWARD,
    functional.multi_head_attention_forward: OPENED[functional.multi_head_attention_forward],
}


class NoDropout(TorchFunctionMode):
    """Drop nothing inside the block, in what checkpoints recompute too.

    A GPU's threads take more elements of a smaller dtype, and fused attention has its own way in each, so that two
    precisions would drop different elements, and differ by more than rounding.
    """

    @compiled_inside_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if func in _DROP:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


#: Where dynamic loss scales start; half of it is the largest power of two that a float16 loss itself can be given.
DEFAULT_SCALE: Final = LossScale.dynamic().init
_LARGEST_SEED: Final = 2.0**15
#: How far a higher scale is looked for.
_RANGE: Final = 2.0**41
#: A gradient with less than this is a fault.
FAULT_DB: Final = 20.0
#: All steps together may be further off: an optimizer that divides by a gradient's size turns the noise of its smallest
#: elements into whole updates.
_UPDATES_DB: Final = 10.0
#: A share of a gradient that a higher scale could save from zero.
_MUCH_FLUSHED: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial came to.

    Attributes:
        sqnr_db: Signal to noise of the worst gradient against FP32's, in dB; −inf where one is not finite.
        tensor: Path of its parameter; ``loss`` where the forward pass is not finite or fails.
        step: In which step, from 1.
        loss_scale: What the loss was multiplied by.
        low_loss: Whether the loss itself is a float16 number, which a scale above 32768 takes to infinity.
        updates_db: The same of what an optimizer makes of all gradients; ``None`` without one, or where it adds zero.
        note: Why the forward pass failed, where it did.
    """

    sqnr_db: float
    tensor: str
    step: int
    loss_scale: float
    low_loss: bool = False
    updates_db: float | None = None
    note: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the gradients are too far from FP32's to train with."""
        return self.sqnr_db < FAULT_DB or (self.updates_db is not None and self.updates_db < _UPDATES_DB)

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are."""
        return self.sqnr_db > -math.inf

    def gain(self, other: Outcome) -> float:
        """Return by how many dB this outcome is better than another, in its worst gradient or in the updates."""
        if not other.is_finite:
            return math.inf if self.is_finite else 0.0
        ratios = [(self.sqnr_db, other.sqnr_db), (self.updates_db, other.updates_db)]
        return max(mine - its for mine, its in ratios if mine is not None and its is not None)

    def __str__(self) -> str:
        if self.note:
            return f"the forward pass of step {self.step} fails with {self.note}"
        if not self.is_finite:
            what = "the loss" if self.tensor == "loss" else f"the gradient of {self.tensor}"
            return f"{what} is not finite in step {self.step}"
        updates = f"; what the optimizer makes of all: {ratio_text(self.updates_db)}" if self.updates_db else ""
        return f"the worst gradient, {self.tensor}'s, has {ratio_text(self.sqnr_db)}{updates}"


def ratio_text(ratio: float) -> str:
    """Write a signal-to-noise ratio.

    Example:
        >>> ratio_text(41.23), ratio_text(float("-inf")), ratio_text(float("inf"))
        ('41 dB', 'not finite', 'exact')
    """
    if math.isinf(ratio):
        return "exact" if ratio > 0 else "not finite"
    return f"{ratio:.0f} dB"


def failure_text(error: Exception) -> str:
    """Write an error in one line."""
    return printable(f"{type(error).__name__}: {error}".splitlines()[0])


def attempted(run: Callable[[], T], again: Callable[[], object] | None = None) -> T | Exception:
    """Run what low precision may make fail, as where dtypes do not go together.

    Args:
        run: What is run.
        again: What is run a second time where it fails; the same when omitted.

    Returns:
        What it returns; the error, where it fails in the same way twice.

    Raises:
        Exception: It fails once, or in two ways: precision is not why.
    """
    try:
        return run()
    except Exception as error:
        try:
            (again or run)()
        except Exception as second:
            if failure_text(second) == failure_text(error):
                return error
            raise second from error
        raise


class Trials:
    """Policies tried one after the other from the same states, batches and random numbers.

    Args:
        shadow: The FP32 steps.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self._outcomes: dict[str, Outcome] = {}
        self._order = list(range(len(shadow.batches)))

    @property
    def count(self) -> int:
        """How many policies were tried."""
        return len(self._outcomes)

    def outcome(self, policy: Policy) -> Outcome:
        """Run every step under a policy; each policy once.

        The loss scale is the one that sessions start with where that does, else one that keeps every gradient finite.
        All steps share it, and begin where FP32's did.

        Raises:
            MezzoError: The device cannot do what the policy asks for.
        """
        key = str(policy)
        if key not in self._outcomes:
            self._outcomes[key] = self._run(policy)
        return self._outcomes[key]

    def _run(self, policy: Policy) -> Outcome:
        """Run the steps until all can do with one loss scale: first each may raise it, and then only lower it."""
        scale, may_rise = DEFAULT_SCALE if policy.dtype == torch.float16 else 1.0, True
        while True:
            outcomes, gradients = dict[int, Outcome](), dict[int, Gradients]()
            for step in self._order:
                outcomes[step], gradients[step] = self._tried(policy, step, scale, may_rise)
                if outcomes[step].is_fault:
                    self._order.sort(key=lambda number: number != step)  # tried first from now on
                    return outcomes[step]
            scales = {outcome.loss_scale for outcome in outcomes.values()}
            if len(scales) == 1:
                worst = min(outcomes.values(), key=lambda outcome: (outcome.sqnr_db, outcome.step))
                return replace(
                    worst, updates_db=self.shadow.updates_db([gradients[step] for step in sorted(gradients)])
                )
            scale, may_rise = max(scales) if max(scales) > scale else min(scales), False

    def _tried(self, policy: Policy, step: int, scale: float, may_rise: bool) -> tuple[Outcome, Gradients]:
        """Run a step under a policy; where low precision makes it fail, say so.

        Raises:
            Exception: It fails in FP32 too, or only once: low precision is not why.
        """
        outcome = attempted(partial(self._step, policy, step, scale, may_rise))
        if isinstance(outcome, MezzoError | torch.OutOfMemoryError):
            raise outcome
        if not isinstance(outcome, Exception):
            return outcome
        self.shadow.forward(Policy.O0(), step).gradients(1.0)
        return _failed_outcome(step, scale, failure_text(outcome)), {}

    def _step(self, policy: Policy, step: int, scale: float, may_rise: bool) -> tuple[Outcome, Gradients]:
        run = self.shadow.forward(policy, step)
        if not math.isfinite(run.loss.item()):
            return _failed_outcome(step, scale), {}
        low_loss = run.loss.dtype == torch.float16
        reference, judged = self.shadow.gradients[step], self.shadow.judged[step]

        def at(scale: float) -> tuple[Outcome, Gradients]:
            gradients = run.gradients(scale)
            ratios = {name: sqnr(reference[name], gradients[name]) for name in judged}
            ratios |= dict.fromkeys(_not_finite(gradients), -math.inf)
            worst = min(ratios, key=lambda name: ratios[name], default="")
            ratio = ratios.get(worst, math.inf)
            return Outcome(sqnr_db=ratio, tensor=worst, step=step + 1, loss_scale=scale, low_loss=low_loss), gradients

        if policy.dtype != torch.float16:
            return at(1.0)
        scale = min(scale, _LARGEST_SEED) if low_loss else scale
        outcome, gradients = at(scale)
        if outcome.is_finite:
            if not (may_rise and outcome.is_fault):
                return outcome, gradients
            zeros = (gradients[outcome.tensor] == 0) & (reference[outcome.tensor] != 0)
            if float(zeros.float().mean()) <= _MUCH_FLUSHED:
                return outcome, gradients
            scale *= _RANGE
        limit = torch.finfo(torch.float16).max
        highest = highest_scale(scale, None, limit, lambda scale: not _not_finite(run.gradients(scale)))
        if highest is None:
            return outcome, gradients
        roomy = at(highest / 2)
        return at(highest) if roomy[0].is_fault else roomy


def _failed_outcome(step: int, scale: float, note: str = "") -> Outcome:
    return Outcome(sqnr_db=-math.inf, tensor="loss", step=step + 1, loss_scale=scale, note=note)
