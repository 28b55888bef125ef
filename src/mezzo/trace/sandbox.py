"""Running a model again without leaving a trace: random states, buffers and gradients as they were before."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.compiling import uncompiled
from mezzo.errors import PolicyError, UnsupportedError, some_of
from mezzo.hooks import without_accumulation_hooks


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of every generator that a model may draw from: torch's on each device, NumPy's and Python's.

    **Cost**: about 10 KB and some microseconds on the host; an accelerator's state is read without a sync.
    """

    cpu: Tensor
    accelerators: tuple[tuple[torch.device, Tensor], ...]
    numpy: Any
    python: Any

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Self:
        """Return the present states.

        Args:
            devices: The devices that hold the model.
        """
        accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        return cls(
            torch.get_rng_state(),
            tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in accelerators),
            np.random.get_state(),
            random.getstate(),
        )

    def restore(self) -> None:
        """Set every generator to its state."""
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators:
            torch.get_device_module(device).set_rng_state(state, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def devices_of(models: Iterable[nn.Module]) -> tuple[torch.device, ...]:
    """Return the devices of the models' parameters and buffers."""
    return tuple(dict.fromkeys(t.device for model in models for t in (*model.parameters(), *model.buffers())))


def require_python(model: nn.Module, done: str) -> None:
    """Refuse a model that runs without Python.

    Args:
        model: The model.
        done: What cannot be done with it, as in ``explained``.

    Raises:
        UnsupportedError: It has scripted modules.
    """
    scripted = [
        path or type(model).__name__ for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)
    ]
    if scripted:
        raise UnsupportedError(
            f"scripted modules cannot be {done}",
            where=some_of(scripted),
            why="TorchScript runs them without Python, where nothing is watched and no rule reaches an op",
            write="the module as it was before torch.jit.script or torch.jit.trace",
        )


def copied(model: nn.Module, write: str) -> nn.Module:
    """Return a deep copy, so that the user's own model stays as it is.

    Args:
        model: The model.
        write: The call on a model that can be copied, for the error.

    Raises:
        UnsupportedError: It cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedError(
            "the model cannot be copied, and yours must stay as it is",
            where=type(model).__name__,
            why=f"copy.deepcopy: {type(error).__name__}: {error}",
            write=f"{write}, a model that has not run; or give it __deepcopy__",
        ) from error


@contextmanager
def as_training_runs(devices: Iterable[torch.device]) -> Iterator[None]:
    """Run the block with gradients and compiled programs uncompiled, and restore the random states after it.

    Args:
        devices: The devices that hold the model.
    """
    states = RandomStates.now(devices)
    try:
        with torch.inference_mode(False), torch.enable_grad(), uncompiled():
            yield
    finally:
        states.restore()


@contextmanager
def untouched(models: list[nn.Module]) -> Iterator[None]:
    """Restore random states, buffers and gradients after models have run inside the block.

    They are as before after an exception too; gradients are ``None`` inside. Programs that torch compiled run
    uncompiled, and a DDP model reduces nothing. Tensors that a model has as plain attributes are not restored.

    **Cost**: a copy of all buffers.
    """
    params = list({id(p): p for model in models for p in model.parameters()}.values())
    with as_training_runs(devices_of(models)), _buffers_restored(models), gradients_aside(params), ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
        yield


@contextmanager
def gradients_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Run backward passes inside the block into empty gradients, and restore the former ones after it.

    Hooks that run once a gradient is accumulated, as optimizers in the backward pass do, are off meanwhile.
    """
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    with without_accumulation_hooks(leaf for leaf, _ in gradients):
        try:
            for leaf, _ in gradients:
                leaf.grad = None
            yield
        finally:
            for leaf, gradient in gradients:
                leaf.grad = gradient


def leaves_of(starts: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the leaves that backward passes from these tensors may give a gradient to."""
    nodes = [start.grad_fn for start in starts if isinstance(start, Tensor) and start.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        following = {target for target, _ in node.next_functions if target is not None} - seen
        seen |= following
        nodes += following


@contextmanager
def _buffers_restored(models: list[nn.Module]) -> Iterator[None]:
    modules = [module for model in models for module in model.modules()]
    tables = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
    buffers = {id(b): b for _, table in tables for b in table.values() if b is not None}
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    try:
        yield
    finally:
        for buffer, copied in copies:
            # Versions do not show that batch norm wrote to a buffer, so that each is copied back; through .data, which
            # counts no version, so that a graph that waits for its backward pass still runs.
            buffer.data.copy_(copied)
        for table, before in tables:
            table.clear()
            table.update(before)


def require_scalar(loss: Any, headline: str, write: str, *, trains: bool = False) -> Tensor:
    """Return a loss, if it is one floating number.

    Args:
        loss: What a user's function returned.
        headline: The first line of the error.
        write: What to write instead.
        trains: Whether it must have a gradient as well.

    Raises:
        PolicyError: It is anything else.
    """
    returned = type(loss).__name__
    if isinstance(loss, Tensor):
        is_scalar = loss.numel() == 1 and loss.is_floating_point()
        if is_scalar and (loss.requires_grad or not trains):
            return loss
        returned = f"{tuple(loss.shape)} {loss.dtype}{', without a gradient' if is_scalar else ''}"
    raise PolicyError(headline, where=f"it returned {returned}", write=write)
