"""What stands against a session, or a step, as part of a captured graph, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.errors import MezzoError, StateError, UnsupportedError
from mezzo.optim.optimizer import OnePassOptimizer
from mezzo.step.gradients import can_fold, lacks_momentum

if TYPE_CHECKING:
    from mezzo.session.session import MixedPrecision

__all__ = ["check_capturable", "refuse_host_arguments", "refuse_raw_capture", "unfinished"]

_ONE_SYNC: Final = "the host would have to ask the device for it, and a replayed graph has no host"


def unfinished(session: MixedPrecision) -> bool:
    """Whether there are gradients that no step has taken yet."""
    return bool(session._on_the_way) or any(cluster.window for cluster in session._clusters)


def check_capturable(session: MixedPrecision, device: torch.device) -> None:
    """Raise all that keeps a session's steps from being captured.

    Args:
        session: The session.
        device: The graph's.

    Raises:
        StateError: An accumulation window is open.
        UnsupportedError: Anything else.
    """
    if unfinished(session):
        raise StateError(
            "a train step cannot be captured inside an accumulation window",
            why="the gradients that are there now would be part of every replay, or of none",
            write="amp.step() or amp.zero_grad() before mezzo.capture(…)",
        )
    if problems := list(_problems(session, device)):
        raise type(problems[0]).together(problems)


def _problems(session: MixedPrecision, device: torch.device) -> Iterator[MezzoError]:
    if session.on_overflow != "skip":
        yield UnsupportedError(
            f'on_overflow="{session.on_overflow}" cannot be captured',
            why=f"whether a step overflowed decides what happens next; {_ONE_SYNC}",
            write='on_overflow="skip", and mezzo.numerics.locate(fn, model) once amp.stats() shows skipped steps',
        )
    params = [param for model in session._models for param in model.parameters()]
    elsewhere = {str(t.device) for t in (*params, session.loss_scale) if t.device != device}
    if elsewhere:
        yield UnsupportedError(
            "a graph is of one device, and the session is not",
            where=f"graph on {device}, parameters and loss scale on {', '.join(sorted(elsewhere))} too",
            write=f'model.to("{device}") before the session is made, and an example batch there',
        )
    for optimizer in session._optimizers:
        if not isinstance(optimizer, OnePassOptimizer):
            yield from _of_torchs(optimizer, device)


def _of_torchs(optimizer: Optimizer, device: torch.device) -> Iterator[UnsupportedError]:
    """Yield what keeps an optimizer that is not mezzo's from being captured."""
    name = type(optimizer).__name__
    if not can_fold(optimizer) and not lacks_momentum(optimizer):
        yield UnsupportedError(
            f"{name} cannot skip a step on the device",
            why=f"its step runs or it does not; {_ONE_SYNC}",
            write="mezzo.optim.AdamW(…), or torch.optim.AdamW(…, fused=True, capturable=True, lr=torch.tensor(…))",
        )
        return
    if _makes_momentum(optimizer):
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


def _makes_momentum(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and param.requires_grad and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
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


def refuse_raw_capture(device: torch.device) -> None:
    """Refuse a step in a graph that :func:`mezzo.capture` knows nothing of.

    Its account of the step would become part of that graph, with an event that nobody may ask afterwards.

    Args:
        device: Where the session's loss scales are.

    Raises:
        UnsupportedError: The device's current stream is being captured.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):  # torch asks the current device's stream
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise UnsupportedError(
            "amp.step() cannot be captured by torch.cuda.graph",
            where=f"the current stream of {device}",
            why="loss scales, hyper-parameters and the account of skipped steps live on between replays",
            write="mezzo.capture(train_step, *example_batch), which makes the graph",
        )
