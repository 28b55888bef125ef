"""The FP32 training steps that policies are measured against, on a copy of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mezzo.cast.model.prepare import Prepared
from mezzo.cast.region import autocast
from mezzo.errors import NumericsError, PolicyError, shown, some_of
from mezzo.numerics.tuning.dropout import SameDropout
from mezzo.numerics.tuning.measures import sqnr, together
from mezzo.overflow import locate
from mezzo.policy import Policy
from mezzo.tensors import LOW
from mezzo.trace.sandbox import RandomStates, copied, devices_of, gradients_aside, leaves_of, require_scalar

__all__ = ["Gradients", "LossFunction", "Pass", "Shadow"]

LossFunction = Callable[[nn.Module, Any], Tensor]
Gradients = dict[str, Tensor]

#: A gradient that moves by more than a hundredth (40 dB) when weights move by a millionth is rounding noise, as
#: that of a bias before a softmax is: nothing can be said of it in 16 bits.
_KNOWN_DB: Final = 40.0
#: Below this ratio (in dB) of two FP32 runs from weights a millionth apart, steps say nothing about 16 bits.
_STEADY_DB: Final = 80.0
_MILLIONTH: Final = 2.0**-20
#: The rate of torch's SGD, and the share of a tensor that its first step may move it by.
_RATE: Final = 1e-3
_MOVED: Final = 0.01

_NO_LOSS: Final = (
    "loss_fn must return one floating number to differentiate",
    "def loss_fn(model, batch): return criterion(model(batch[0]), batch[1])   # a scalar",
)


@dataclass(slots=True)
class Pass:
    """A forward pass under a policy, and backward passes from it.

    Attributes:
        loss: What the loss function returned.
        region: The policy's region.
        params: The parameters that train, by path.
        around: What backward passes run in.
        others: What else the loss is made of, such as the loss function's own parameters; their gradients stay.
    """

    loss: Tensor
    region: autocast
    params: dict[str, nn.Parameter]
    around: AbstractContextManager[Any]
    others: list[Tensor]

    def gradients(self, scale: float) -> Gradients:
        """Run a backward pass from the loss times a scale; return unscaled FP32 gradients, zeros for none."""
        for param in self.params.values():
            param.grad = None
        loss = self.loss.float() if self.loss.dtype in LOW else self.loss
        with self.around, gradients_aside(self.others):
            self.region.run_backward(loss * scale, retain_graph=True)
        found = {}
        for name, param in self.params.items():
            gradient, param.grad = param.grad, None
            dense = torch.zeros_like(param) if gradient is None else gradient.to_dense()
            found[name] = dense.detach().float() / scale
        return found


class Shadow:
    """A copy of a model, and the FP32 steps that it takes.

    Args:
        model: The model; only read.
        loss_fn: From the model and a batch to the loss.
        batches: One for each step.
        optimizer: Makes the optimizer of some parameters; SGD when omitted, at a rate that moves no tensor by more than
            a hundredth in the first step.

    Attributes:
        model: The copy.
        params: Its parameters that train, by path.
        gradients: The FP32 gradients of each step.
        judged: The parameters of each step whose gradients FP32 knows: not zero, and more than rounding noise.
        updates: What all steps together add to each parameter.
        steady: Whether the steps lead to the same weights from weights that differ by a millionth.

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
        optimizer: Callable[[Any], Optimizer] | None,
    ) -> None:
        self.model = copied(model, "mezzo.numerics.tune(build_model(), …)")
        self.loss_fn, self.batches, self._optimizer = loss_fn, batches, optimizer
        self.devices = devices_of([model])
        self.params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        for param in self.model.parameters():
            param.grad = None
        if not self.params:
            raise PolicyError(
                "the model has no parameter that trains",
                where=type(model).__name__,
                why="policies are judged by gradients",
                write="model.requires_grad_(True)",
            )
        self._handle: Prepared | None = None
        self._prepared(Policy.O0())  # refuses what other rooms do
        if low := [name for name, param in self.params.items() if param.dtype in LOW]:
            raise PolicyError(
                "weights that train are stored low already",
                where=some_of(low),
                why="policies are compared with FP32 training, which needs the weights in FP32",
                write="tune(model.float(), …)",
            )
        on_cpu = all(device.type == "cpu" for device in self.devices)
        self._dropout: AbstractContextManager[Any] = nullcontext() if on_cpu else SameDropout()
        self._states: list[list[Tensor]] = []
        self._randoms: list[RandomStates] = []
        self.gradients: list[Gradients] = []
        self._train()
        self.updates = self._added()
        self.judged = [self._known(step) for step in range(len(batches))]
        if not any(self.judged):
            raise PolicyError(
                "no parameter got a gradient that FP32 itself knows to a hundredth",
                where=f"{len(batches)} steps of loss_fn",
                why="all are zero or rounding noise, as where loss_fn runs another model than it is given",
                write="def loss_fn(model, batch): return criterion(model(batch[0]), batch[1])",
            )
        self.restore(0)
        self._perturb(0)
        moved = self.taken(Policy.O0(), 1.0, goes_on=True)
        self.steady = together(self.updates, moved) >= _STEADY_DB

    def optimizer(self) -> Optimizer:
        """Return an optimizer that has taken no step yet."""
        if self._optimizer is None:
            return SGD(self.params.values(), lr=self._rate())
        made = self._optimizer(list(self.params.values()))
        own = {id(param) for param in self.params.values()}
        if not isinstance(made, Optimizer):
            raise PolicyError(
                f"optimizer= returned {shown(made)}, no optimizer",
                write="optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
            )
        if any(id(param) not in own for group in made.param_groups for param in group["params"]):
            raise PolicyError(
                "the optimizer updates other parameters than those it was given",
                why="steps are taken on a copy of the model",
                write="optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
            )
        return made

    def _rate(self) -> float:
        """Return a learning rate that keeps the steps near the weights that they begin at, whatever those are."""
        sizes = {name: _size(value) for name, value in zip(self.params, self._starts(), strict=True)}
        rate = _RATE
        for name, gradient in self.gradients[0].items():
            # What begins at zero is measured by its neighbours in the module, a bias by its matrix.
            module = name.rpartition(".")[0]
            beside = max(size for other, size in sizes.items() if other.rpartition(".")[0] == module)
            size, length = sizes[name] or beside or max(sizes.values()), _size(gradient)
            rate = min(rate, _MOVED * size / length) if length else rate
        return rate

    # State --------------------------------------------------------------------------------------------

    def _tensors(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _starts(self) -> list[Tensor]:
        """Return the values of the parameters that train before the first step."""
        values = {id(tensor): value for tensor, value in zip(self._tensors(), self._states[0], strict=True)}
        return [values[id(param)] for param in self.params.values()]

    def restore(self, step: int) -> None:
        """Give the model the weights and buffers that the FP32 run had before a step."""
        for tensor, value in zip(self._tensors(), self._states[step], strict=True):
            tensor.data.copy_(value)

    @contextmanager
    def forward(
        self,
        policy: Policy,
        step: int,
        *,
        goes_on: bool = False,
        inside: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it holds nothing
    ) -> Iterator[Pass]:
        """Run the forward pass of a step under a policy.

        Args:
            policy: The policy.
            step: Which step: its batch, its random states, and weights as the FP32 run had them.
            goes_on: Whether to begin at the model's present weights, and not at those of the FP32 run.
            inside: What is entered inside the policy's region.
        """
        if not goes_on:
            self.restore(step)
        self._randoms[step].restore()
        region, batch = self._prepared(policy).autocast(), _own(self.batches[step])
        with self._dropout, region, inside:
            loss = self.loss_fn(self.model, batch)
        own = {id(param) for param in self.params.values()}
        others = [leaf for leaf in leaves_of([loss]) if id(leaf) not in own]
        yield Pass(loss, region, self.params, self._dropout, others)

    def _prepared(self, policy: Policy) -> Prepared:
        """Prepare the copy, which stays so until another policy is tried."""
        if self._handle is None or self._handle.policy != policy:
            if self._handle is not None:
                self._handle.remove()
            self._handle = None
            self._handle = Prepared(self.model, policy, tells=False)  # trials do, whatever their rules say
        return self._handle

    # FP32 ---------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Take all steps in FP32, and note from where, and with which gradients."""
        optimizer: Optimizer | None = None
        for step in range(len(self.batches)):
            self._states.append([tensor.detach().clone() for tensor in self._tensors()])
            self._randoms.append(RandomStates.now(self.devices))
            self.gradients.append(self._gradients(step))
            optimizer = optimizer or self.optimizer()
            self.step(optimizer, self.gradients[step])

    def _gradients(self, step: int) -> Gradients:
        with self.forward(Policy.O0(), step) as run:
            require_scalar(run.loss, *_NO_LOSS, trains=True)
            gradients = run.gradients(1.0)
            is_finite = math.isfinite(run.loss.item()) and all(bool(g.isfinite().all()) for g in gradients.values())
        if not is_finite:
            raise self._not_finite(step)
        return gradients

    def _known(self, step: int) -> list[str]:
        """Find the gradients that stay what they are where weights move by a millionth."""
        gradients = self.gradients[step]
        known = list(gradients)
        for seed in range(2):  # noise has few bits, and may be the same by chance
            self.restore(step)
            self._perturb(seed)
            with self.forward(Policy.O0(), step, goes_on=True) as run:
                others = run.gradients(1.0)
            known = [name for name in known if sqnr(gradients[name], others[name]) >= _KNOWN_DB]
        return known

    def _perturb(self, seed: int) -> None:
        """Change each weight by at most a millionth of it."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.params.values():
            noise = torch.rand(param.shape, generator=generator).to(param.device)
            param.data.mul_(1.0 + _MILLIONTH * (2.0 * noise - 1.0))

    def taken(self, policy: Policy, scale: float, *, goes_on: bool = False) -> Gradients:
        """Take all steps in a row under a policy, and return what they add to each parameter.

        Args:
            policy: The policy.
            scale: The loss scale.
            goes_on: Whether to begin at the model's present weights, and not at those of the FP32 run.
        """
        if not goes_on:
            self.restore(0)
        optimizer = self.optimizer()
        for step in range(len(self.batches)):
            with self.forward(policy, step, goes_on=True) as run:
                gradients = run.gradients(scale)
            self.step(optimizer, gradients)
        return self._added()

    def _added(self) -> Gradients:
        starts = zip(self.params.items(), self._starts(), strict=True)
        return {name: param.detach() - before for (name, param), before in starts}

    def step(self, optimizer: Optimizer, gradients: Gradients) -> None:
        """Take one step with gradients."""
        for name, param in self.params.items():
            param.grad = gradients[name].to(param.dtype)
        try:
            optimizer.step()
        except TypeError as error:
            raise PolicyError(
                f"{type(optimizer).__name__} takes no step without a closure",
                why=str(error),
                write="optimizer=lambda params: torch.optim.SGD(params, lr=1e-3)",
            ) from error
        finally:
            optimizer.zero_grad(set_to_none=True)

    def _not_finite(self, step: int) -> NumericsError:
        self.restore(step)
        self._randoms[step].restore()
        batch = _own(self.batches[step])  # not under the search's eyes, which would blame the copy
        found = locate(lambda: self.loss_fn(self.model, batch), self.model)
        return NumericsError(
            f"the model is not finite in FP32, in step {step + 1} of {len(self.batches)}",
            where=str(found) if found is not None else "",
            why="precision is chosen by comparing with FP32, and there is nothing to compare with",
            write="what the first non-finite tensor's report says, and then tune again",
        )


def _size(tensor: Tensor) -> float:
    """Return the root mean square."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _own(batch: Any) -> Any:
    """Copy a batch, so that what a loss function writes into it is gone in the next trial."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # it holds what cannot be copied, or tensors in the middle of a graph: it is read only, then
        return batch
