"""A session's engine as a ``GradScaler`` by type, for frameworks that take one and call its four verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.session.stats import Step

if TYPE_CHECKING:
    from mezzo.session.session import MixedPrecision

__all__ = ["SessionScaler"]


class SessionScaler(torch.amp.GradScaler):
    """Scale, unscale, step and update as a session does.

    The scale moves in :meth:`update` alone, once for all optimizers that have stepped since.

    Args:
        amp: The session.

    Attributes:
        amp: The session.
        last_step: What the last :meth:`step` found and did; ``None`` before the first.
    """

    def __init__(self, amp: MixedPrecision) -> None:
        super().__init__(amp.engine.device.type, enabled=False)  # nothing of torch's own runs
        self._enabled = True
        self.amp = amp
        self.last_step: Step | None = None
        amp.engine.waits = True

    def scale(self, outputs: Any) -> Any:
        """Return a loss, or nested ones, times the scale; the pass that differentiates it is the session's."""
        if isinstance(outputs, Tensor):
            return self.amp.engine.scale(outputs)
        return type(outputs)(map(self.scale, outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Make an optimizer's gradients FP32 and plain, where they are not already."""
        if not self.amp.engine.plain:
            self.amp.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, or skip.

        Args:
            optimizer: One of the session's. What a framework has bound as its ``step`` is called only if it is not
                skipped, which is how the framework learns of that.
            *args: A closure, for optimizers that evaluate the loss by themselves.
            **kwargs: The same, by name.

        Returns:
            What the closure returned first, if there is one.
        """
        closure = kwargs.get("closure", args[0] if args else None)
        if closure is None:
            bound = vars(optimizer).get("step")
            self.last_step = self.amp.engine.step([optimizer], by=bound)
            return None
        losses: list[Any] = []

        def evaluate() -> Any:
            losses.append(closure())
            return losses[-1]

        self.last_step = self.amp.engine.step([optimizer], evaluate)
        return losses[0] if losses else None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale on.

        Args:
            new_scale: Go on with this one instead.
        """
        self.amp.engine.update()
        if new_scale is not None:
            self.amp.engine.scaler.set(new_scale)

    def get_scale(self) -> float:
        """Return the scale; a host sync."""
        return float(self.amp.loss_scale)

    def _get_scale_async(self) -> Tensor:
        return self.amp.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state."""
        return self.amp.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the session's state, or another scaler's."""
        self.amp.load_state_dict(state_dict)
