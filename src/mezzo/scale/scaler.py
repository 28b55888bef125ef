"""The device tensors that hold a loss scale's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.scale.config import LossScale
from mezzo.scale.host import next_scale_on_host, value_of
from mezzo.scale.rules import held, next_scale
from mezzo.scale.state import ScaleState

__all__ = ["Scaler"]


class Scaler:
    """Hold the state of one loss scale; the rules themselves are :func:`mezzo.scale.next_scale`.

    Args:
        config: The rules.
        device: Where the state lives.
    """

    def __init__(self, config: LossScale, device: torch.device | str) -> None:
        self.config = config
        self.state = config.start(device)

    @property
    def changes_gradients(self) -> bool:
        """Whether scaled gradients can differ from plain ones: not without a scale, nor with a constant 1."""
        return self.config.mode == "dynamic" or (self.config.mode == "constant" and self.config.init != 1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, at least in FP32, so that the product itself cannot overflow."""
        if not self.changes_gradients:
            return loss
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self.state.scale.to(loss.device, non_blocking=True)

    def update(self, found_inf: Tensor, *, made_with: Tensor | None = None, hold: Tensor | None = None) -> None:
        """Move to the next state; no host sync.

        Args:
            found_inf: 0-d bool: whether gradients were not finite.
            made_with: The scale that these gradients carried. If the scale moved since, finite ones say nothing of
                the new scale, and others count only where it has not gone below theirs already.
            hold: 0-d bool: stay where it is, whatever was found.
        """
        if self.state.scale.device.type == "cpu":
            self._update_on_host(found_inf, made_with, hold)
            return
        state = next_scale(self.state, found_inf, self.config)
        if made_with is not None and made_with is not self.state.scale:
            outdated = ~found_inf | (self.state.scale < made_with)
            hold = outdated if hold is None else hold | outdated
        self.state = state if hold is None else held(self.state, state, hold)

    def _update_on_host(self, found_inf: Tensor, made_with: Tensor | None, hold: Tensor | None) -> None:
        found = bool(value_of(found_inf))
        earlier = None if made_with is self.state.scale else made_with
        if earlier is not None and (not found or value_of(self.state.scale) < value_of(earlier)):
            return
        if hold is None or not value_of(hold):
            self.state = next_scale_on_host(self.state, found, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; a host sync."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            StateError: Not the state of a loss scale.
        """
        self.state = ScaleState.from_state_dict(state, device=self.state.scale.device)
