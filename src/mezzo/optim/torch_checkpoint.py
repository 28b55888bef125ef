"""What ``torch.distributed.checkpoint`` asks of an optimizer that it cannot read."""

from __future__ import annotations

import sys

from torch.optim import Optimizer

from mezzo.errors import UnsupportedError

__all__ = ["is_asked_by_checkpoint", "no_distributed_checkpoint"]


def is_asked_by_checkpoint() -> bool:
    """Whether ``torch.distributed.checkpoint.state_dict`` is calling.

    It gives an optimizer no sign of itself, and would fail on the masters with a bare ``KeyError``; so the stack is
    looked at, from the method that torch called to the caller of what wraps it.
    """
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def no_distributed_checkpoint(optimizer: Optimizer) -> UnsupportedError:
    """Build the error of masters that ``torch.distributed.checkpoint.state_dict`` asks for."""
    name = type(optimizer).__name__
    return UnsupportedError(
        "torch.distributed.checkpoint cannot read an optimizer whose parameters have FP32 masters",
        where=name,
        why="it looks for the model's parameters in the optimizer, and the masters stand in their places",
        write='torch.distributed.checkpoint.save({"app": amp.stateful()}, checkpoint_id=folder)   # masters by name'
        "\nor mezzo.optim, whose optimizers it reads and writes",
    )
