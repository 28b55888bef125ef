"""Whole training steps in each way that a user could take them, ready to be timed."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

import mezzo
from mezzo import optim
from mezzo.numerics.footprint import state_bytes
from mezzo.session import MixedPrecision

from .nets import Batch, loss_of

__all__ = ["WAYS", "Task", "Training", "Way"]

_LEARNING_RATE: Final = 1e-4
_MAX_NORM: Final = 1.0
_SCALE: Final = 1024.0  # one that no network here overflows with, so that no step that is timed is a skipped one


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained.

    Attributes:
        name: One that no other task has.
        model: In FP32.
        batch: Inputs and targets, the same for every step.
        dtype: The low precision.
        compiled: Whether the model goes through ``torch.compile``, in a function that calls it.
    """

    name: str
    model: nn.Module
    batch: Batch
    dtype: torch.dtype
    compiled: bool

    def forward(self) -> Callable[[Tensor], Tensor]:
        """Return what computes logits."""
        if not self.compiled:
            return self.model
        model = self.model

        def forward(inputs: Tensor) -> Tensor:
            logits: Tensor = model(inputs)
            return logits

        # torch counts recompilations by code object and gives up after eight, and tells sizes that change by the name.
        name = re.sub(r"\W", "_", self.name)
        code = forward.__code__.replace(co_name=name)
        own = types.FunctionType(code, forward.__globals__, name, None, forward.__closure__)
        compiled: Callable[[Tensor], Tensor] = torch.compile(own)
        return compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training under way.

    Attributes:
        step: Takes one training step and returns the loss before it, on the device.
        held_bytes: The bytes that live from one step to the next.
        emulated: Whether low-precision products are computed in FP32 from rounded operands.
    """

    step: Callable[[], Tensor]
    held_bytes: Callable[[], int]
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train.

    Attributes:
        start: From a task to a training.
        tf32: Whether FP32 products may use TF32 on a GPU.
        captured: Whether a step is a replay of a CUDA graph, which is made from a copy of the weights.
        absent: From a device type to why this way is not there; empty where it is.
    """

    start: Callable[[Task], Training]
    tf32: bool = False
    captured: bool = False
    absent: Callable[[str], str] = lambda device_type: ""


def _torch(*, low: bool) -> Callable[[Task], Training]:
    """The loop of torch.amp's documentation; without ``low`` its FP32 twin, with nothing cast and nothing scaled."""

    def start(task: Task) -> Training:
        (inputs, targets), model, forward = task.batch, task.model, task.forward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
        scaled = low and task.dtype == torch.float16
        scaler = torch.amp.GradScaler(inputs.device.type, init_scale=_SCALE, enabled=scaled)

        def step() -> Tensor:
            with torch.autocast(inputs.device.type, dtype=task.dtype, enabled=low):
                loss = loss_of(forward(inputs), targets)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return Training(step=step, held_bytes=lambda: _held(task, optimizer))

    return start


def _mezzo(
    level: str, make: Callable[..., torch.optim.Optimizer], *, captured: bool = False
) -> Callable[[Task], Training]:
    def start(task: Task) -> Training:
        (inputs, targets), model = task.batch, task.model
        optimizer = make(model.parameters(), lr=_LEARNING_RATE)
        scale = f",loss_scale=dynamic(init={_SCALE:g})" if task.dtype == torch.float16 else ""
        policy = f"{level},dtype={str(task.dtype).removeprefix('torch.')}{scale}"
        amp = MixedPrecision(model, optimizer, policy, max_grad_norm=_MAX_NORM)
        forward = task.forward()

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            with amp.autocast():
                loss = loss_of(forward(inputs), targets)
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
            return loss.detach()

        run: Callable[[Tensor, Tensor], Tensor] = step
        if captured:
            run = mezzo.capture(step, amp)
            for _ in range(4):  # three real steps; then the graph is recorded
                run(inputs, targets)
        return Training(
            step=lambda: run(inputs, targets),
            held_bytes=lambda: _held(task, optimizer),
            emulated=amp.emulated,
        )

    return start


def _held(task: Task, optimizer: torch.optim.Optimizer) -> int:
    return state_bytes(task.model, optimizer).total + sum(tensor.nbytes for tensor in task.batch)


def _fused(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


def _no_tf32(device_type: str) -> str:
    return "" if device_type == "cuda" else f"the {device_type} has no TF32"


def _no_capture(device_type: str) -> str:
    if not hasattr(mezzo, "capture"):
        return "there is no mezzo.capture"
    return "" if device_type == "cuda" else f"on the {device_type} a captured step is the plain call"


#: By name. Losses are compared with the first one's, times with torch.amp's. All clip, and all use AdamW: torch's
#: fused kernel, or mezzo's own with split storage under O2.
WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        "fp32": Way(start=_torch(low=False)),
        "fp32 TF32": Way(start=_torch(low=False), tf32=True, absent=_no_tf32),
        "torch.amp": Way(start=_torch(low=True)),
        "mezzo O1": Way(start=_mezzo("O1", _fused)),
        "mezzo O2": Way(start=_mezzo("O2", optim.AdamW)),
        "mezzo O2 captured": Way(start=_mezzo("O2", optim.AdamW, captured=True), captured=True, absent=_no_capture),
    }
)
