"""What Lightning's Trainer and Fabric have in common: modules that are called by their parts, and state in shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.errors import UnsupportedError

__all__ = ["check_gathers", "parts_of"]


def parts_of(module: nn.Module) -> nn.Module:
    """Return a module with the same parts under the same names, which is never called itself.

    The wrapper of ``strategy="ddp"`` calls ``training_step`` as if it were the module's ``forward``: casts at its door
    would give it batches, and losses, in low precision. The parts are called from within it.
    """
    parts = nn.Module()
    for name, child in module.named_children():
        parts.add_module(name, child)
    for name, param in module.named_parameters(recurse=False):
        parts.register_parameter(name, param)
    for name, buffer in module.named_buffers(recurse=False):
        parts.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    return parts


def check_gathers(strategy: Any, optimizers: Iterable[Optimizer]) -> None:
    """Refuse a strategy that gathers sharded state for one file, where there is state that no rank can be sent.

    Raises:
        UnsupportedError: The remainders of split masters are such.
    """
    states = (tensor for each in optimizers for state in each.state.values() for tensor in state.values())
    is_split = any(isinstance(tensor, Tensor) and tensor.dtype == torch.int16 for tensor in states)
    if is_split and not getattr(strategy, "_save_distributed_checkpoint", True):
        raise UnsupportedError(
            "the state of a sharded mezzo optimizer cannot be gathered into one file",
            where=type(strategy).__name__,
            why="the remainders of its weights are int16, which neither gloo nor NCCL sends",
            write="ModelParallelStrategy(save_distributed_checkpoint=True), a folder; or an optimizer of torch's",
        )
