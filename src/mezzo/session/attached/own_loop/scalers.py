"""A ``GradScaler`` of a loop's own, which would scale a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler  # itself: under `mezzo run` torch.amp has a script's, which scales nothing
from torch.optim import Optimizer

from mezzo.errors import StateError
from mezzo.session.attached.own_loop.bound import Bound

__all__ = ["refuse_scalers"]


def refuse_scalers(bound: Bound, scales: Callable[[Optimizer], bool]) -> None:
    """Refuse ``scaler.unscale_(optimizer)`` and ``scaler.step(optimizer)`` where a session scales for that optimizer.

    Args:
        bound: What binds both.
        scales: Whether the session does.
    """

    def refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def refuse(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled() and scales(optimizer):
                raise StateError(
                    "a GradScaler scales the loss besides the session",
                    where=f"{type(scaler).__name__}.{plain.__name__}({type(optimizer).__name__})",
                    why="the gradients carry both scales, and each would count the overflows of the other",
                    write="GradScaler(enabled=False), with which the loop stays as it is: the policy has the scale",
                )
            return plain(scaler, optimizer, *args, **kwargs)

        return refuse

    for name in ("unscale_", "step"):
        bound.replace(GradScaler, name, refusing)
