"""One small training under one policy with one optimizer, everything measured that the verdict asks for."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from mezzo import optim
from mezzo.policy import Policy
from mezzo.selftest.task import Digits, TrialNet, build
from mezzo.session import MixedPrecision, load, save
from mezzo.tensors import tensors
from mezzo.trace.products import Products

__all__ = ["STEPS", "Measured", "Reference", "Trial", "measured", "reference"]

#: Steps of a training, the last of which are compared with FP32's; and where its checkpoint is taken.
STEPS: Final = 60
COMPARED: Final = 20
CHECKPOINT: Final = 45
_RATE: Final = 3e-3

OptimizerName = Literal["torch", "mezzo"]
Resumed = Literal["bit for bit", "otherwise", "not repeatable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried.

    Attributes:
        level: ``O1`` or ``O2``.
        dtype: ``float16`` or ``bfloat16``.
        optimizer: Whose AdamW: ``torch``'s fused one, or ``mezzo``'s.
    """

    level: str
    dtype: str
    optimizer: OptimizerName

    @property
    def policy(self) -> str:
        """The policy's text."""
        return f"{self.level},dtype={self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a trial measured.

    Attributes:
        trial: What was tried.
        arithmetic: ``native``, or ``emulated``: in FP32 from rounded operands.
        low_share: Share of the floating-point operations of all products, forward and backward, whose kernels read
            the format, or that were emulated in it.
        loss: Mean training loss of the last steps.
        fp32_loss: FP32's, of the same steps.
        gradient_error: Distance of the first gradient to FP32's, over the norm of FP32's.
        skipped: Whether a step with infinite gradients was skipped, and left every bit of weights and optimizer alone.
        scale: The loss scale of that step.
        next_scale: The loss scale after it.
        backoff: What a loss scale is multiplied by after an overflow; ``None`` for one that stays.
        resumed: How a run goes on from its checkpoint in new objects: ``not repeatable`` where two resumed runs differ
            from each other, so that nothing can be said.
        notes: What mezzo logged meanwhile, as warnings.
        seconds: How long it took.
    """

    trial: Trial
    arithmetic: Literal["native", "emulated"]
    low_share: float
    loss: float
    fp32_loss: float
    gradient_error: float
    skipped: bool
    scale: float
    next_scale: float
    backoff: float | None
    resumed: Resumed
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Reference:
    """The same training in FP32, in plain torch.

    Attributes:
        losses: Of each step.
        gradient: Of the first step, of all parameters, flat.
    """

    losses: list[float]
    gradient: Tensor


def reference(data: Digits) -> Reference:
    """Train in FP32 without mezzo."""
    model = build(0, data.images.device)
    optimizer = _optimizer("torch", model)
    losses, gradient = [], torch.empty(0)
    for number in range(STEPS):
        loss = _loss(model, data, number)
        loss.backward()  # type: ignore[no-untyped-call]
        if number == 0:
            gradient = _flat(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Reference(losses, gradient)


def measured(trial: Trial, data: Digits, fp32: Reference) -> Measured:
    """Carry a trial out.

    Args:
        trial: What to try.
        data: On the device to try it on.
        fp32: The reference, on the same data and device.

    Raises:
        UnsupportedError: The device cannot do what the policy asks for.
    """
    begin = time.perf_counter()
    run = _Run(trial, data, seed=0)
    kernels = Products(Policy.parse(trial.policy).dtype)
    with _logged() as notes:
        with kernels:
            run.backward(0)
        run.amp.zero_grad()
        losses = [run.train(number) for number in range(CHECKPOINT)]
    skipped, scale, next_scale = run.overflow()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        save(path, **dict(run.parts()))
        losses += [run.train(number) for number in range(CHECKPOINT, STEPS)]
        resumed = _compared(run.bits(), lambda: _resumed(trial, data, path))
    is_emulated, rule = run.amp.emulated, run.amp.policy.loss_scale
    run.amp.close()
    return Measured(
        trial=trial,
        arithmetic="emulated" if is_emulated else "native",
        low_share=kernels.low_share,
        loss=sum(losses[-COMPARED:]) / COMPARED,
        fp32_loss=sum(fp32.losses[-COMPARED:]) / COMPARED,
        gradient_error=float((run.gradient - fp32.gradient).norm() / fp32.gradient.norm()),
        skipped=skipped,
        scale=scale,
        next_scale=next_scale,
        backoff=rule.backoff if rule.mode == "dynamic" else None,
        resumed=resumed,
        notes=tuple(notes),
        seconds=time.perf_counter() - begin,
    )


# One run ------------------------------------------------------------------------------------------------------------


class _Run:
    """A network, its optimizer and their session, driven as users drive them."""

    def __init__(self, trial: Trial, data: Digits, *, seed: int) -> None:
        self.data = data
        self.model = build(seed, data.images.device)
        self.optimizer = _optimizer(trial.optimizer, self.model)
        self.amp = MixedPrecision(self.model, self.optimizer, trial.policy)
        self.gradient = torch.empty(0)  # of the first step, of all parameters, flat

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield what has a state, by name."""
        yield from (("model", self.model), ("optimizer", self.optimizer), ("amp", self.amp))

    def backward(self, number: int) -> float:
        """Run the forward and backward pass of a step; return the loss."""
        with self.amp.autocast():
            loss = _loss(self.model, self.data, number)
        self.amp.backward(loss)
        return loss.item()

    def train(self, number: int) -> float:
        """Take a whole step; return its loss. One that overflows is taken again: then FP32 has taken the same ones."""
        while True:
            loss = self.backward(number)
            if number == 0:
                self.amp.unscale_()
                self.gradient = _flat(self.model)
            step = self.amp.step()
            self.amp.zero_grad()
            if not step.skipped or step.next_scale == step.scale:
                return loss

    def overflow(self) -> tuple[bool, float, float]:
        """Take a step with infinite gradients: whether nothing was written, and the loss scale before and after."""
        before = self.bits()
        with self.amp.autocast():
            loss = _loss(self.model, self.data, STEPS, infinite_gradient=True)
        self.amp.backward(loss)
        step = self.amp.step()
        self.amp.zero_grad()
        return bool(step.skipped) and _same(before, self.bits()), float(step.scale), float(step.next_scale)

    def bits(self) -> list[Tensor]:
        """Copy all bits of weights, masters and optimizer state, on the CPU."""
        state = self.optimizer.state_dict()["state"]
        kept = (*self.model.state_dict().values(), *self.amp.master_params(), *tensors(list(state.values())))
        return [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone() for each in kept]


def _resumed(trial: Trial, data: Digits, path: Path) -> list[Tensor]:
    """Go on from the checkpoint in a network of other weights; return all bits in the end."""
    run = _Run(trial, data, seed=1)
    saved = load(path, map_location=data.images.device)
    for name, part in run.parts():
        part.load_state_dict(saved[name])
    for number in range(CHECKPOINT, STEPS):
        run.train(number)
    bits = run.bits()
    run.amp.close()
    return bits


def _compared(whole: list[Tensor], resumed: Callable[[], list[Tensor]]) -> Resumed:
    """Compare a whole run with a resumed one; where they differ, this with another resumed one."""
    first = resumed()
    if _same(whole, first):
        return "bit for bit"
    return "otherwise" if _same(first, resumed()) else "not repeatable"


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# Its parts ----------------------------------------------------------------------------------------------------------


def _optimizer(name: OptimizerName, model: TrialNet) -> Optimizer:
    if name == "mezzo":
        return optim.AdamW(model.parameters(), lr=_RATE)
    has_fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return AdamW(model.parameters(), lr=_RATE, fused=has_fused)


def _loss(model: TrialNet, data: Digits, number: int, *, infinite_gradient: bool = False) -> Tensor:
    images, labels = data.batch(number)
    scores = model(images)
    if infinite_gradient:
        scores.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    return functional.cross_entropy(scores.float(), labels)


def _flat(model: TrialNet) -> Tensor:
    gradients = [param.grad.detach().float().flatten() for param in model.parameters() if param.grad is not None]
    return torch.cat(gradients)


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what mezzo logs as a warning inside the block, each text once."""
    logger, texts = logging.getLogger("mezzo"), list[str]()
    handler = MemoryHandler(0)  # which has nothing to hand records on to, and so keeps them
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        texts.extend(dict.fromkeys(record.getMessage() for record in handler.buffer))
