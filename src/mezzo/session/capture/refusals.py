"""What stands against a session, or a step, as part of a captured graph, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import MezzoError, StateError, UnsupportedError
from mezzo.optim.optimizer import as_one_pass
from mezzo.session.core import Core
from mezzo.session.update import lacks_momentum, takes_flag

__all__ = ["check_capturable", "refuse_host_arguments"]

_ONE_SYNC: Final = "the host would have to ask the device for it, and a replayed graph has no host"


def check_capturable(core: Core, device: torch.device) -> None:
    """Raise all that keeps a session's steps from being captured.

    Args:
        core: The session.
        device: The graph's.

    Raises:
        StateError: An accumulation window is open.
        UnsupportedError: Anything else.
    """
    if core.has_gradients_to_step:
        raise StateError(
            "a train step cannot be captured inside an accumulation window",
            why="the gradients that are there now would be part of every replay, or of none",
            write="amp.step() or amp.zero_grad() before mezzo.capture(…)",
        )
    if problems := list(_problems(core, device)):
        raise type(problems[0]).together(problems)


def _problems(core: Core, device: torch.device) -> Iterator[MezzoError]:
    if core.on_overflow != "skip":
        yield UnsupportedError(
            f'on_overflow="{core.on_overflow}" cannot be captured',
            why=f"whether a step overflowed decides what happens next; {_ONE_SYNC}",
            write='on_overflow="skip", and mezzo.numerics.locate(fn, model) once amp.stats() shows skipped steps',
        )
    params = [param for model in core.models for param in model.parameters()]
    elsewhere = {str(t.device) for t in (*params, *core.scale_tensors()) if t.device != device}
    if elsewhere:
        yield UnsupportedError(
            "a graph is of one device, and the session is not",
            where=f"graph on {device}, parameters and loss scale on {', '.join(sorted(elsewhere))} too",
            write=f'model.to("{device}") before the session is made, and an example batch there',
        )
    for optimizer in core.optimizers:
        if as_one_pass(optimizer) is None:
            yield from _of_torchs(optimizer, device)


def _of_torchs(optimizer: Optimizer, device: torch.device) -> Iterator[UnsupportedError]:
    """Yield what keeps an optimizer that is not mezzo's from being captured."""
    name = type(optimizer).__name__
    if not takes_flag(optimizer):
        yield UnsupportedError(
            f"{name} cannot skip a step on the device",
            why=f"its step runs or it does not; {_ONE_SYNC}",
            write="mezzo.optim.AdamW(…), or torch.optim.AdamW(…, fused=True, capturable=True, lr=torch.tensor(…))",
        )
        return
    if lacks_momentum(optimizer, lambda param: param.requires_grad):
        yield UnsupportedError(
            f"torch's fused {name} has no momentum yet",
            why="its first step differs from all others, and only one step is captured",
            write="one step of the train step before mezzo.capture(…), or mezzo.optim.SGD(…)",
        )
    for number, group in enumerate(optimizer.param_groups):
        if not group.get("capturable", True):
            yield UnsupportedError(
                f"{name} was not made to be captured",
                where=f"group {number}, capturable=False",
                write=f"torch.optim.{name}(…, fused=True, capturable=True, lr=torch.tensor(…))",
            )
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device != device:
            kind = f"on {lr.device}" if isinstance(lr, Tensor) else "a Python number"
            yield UnsupportedError(
                f"the learning rate of {name} would be frozen into the graph",
                where=f"group {number}, lr={float(lr):.4g}, {kind}",
                why="its kernel gets the number it has while the graph is made, and no scheduler reaches it there",
                write=f'lr=torch.tensor({float(lr):.4g}, device="{device}"); or mezzo.optim.{name}(…)',
            )


def refuse_host_arguments(closure: Any, scheduler: Any) -> None:
    """Refuse what makes a step ask the host."""
    if closure is not None:
        raise UnsupportedError(
            "closure= cannot be captured",
            where="amp.step(closure=…) in a train step under mezzo.capture",
            why=f"whether an evaluation overflowed decides what the optimizer does next; {_ONE_SYNC}",
            write="amp.backward(loss), then amp.step(); or the train step without mezzo.capture",
        )
    if scheduler is not None:
        raise UnsupportedError(
            "scheduler= cannot be captured",
            where="amp.step(scheduler=…) in a train step under mezzo.capture",
            why=f"it waits for whether the weights moved; {_ONE_SYNC}",
            write="scheduler.step() after each call of the captured step",
        )
