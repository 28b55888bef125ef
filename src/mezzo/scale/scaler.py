"""The device tensors that hold a loss scale's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.scale.config import LossScale
from mezzo.scale.rules import next_scale
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

    def update(self, found_inf: Tensor) -> None:
        """Move to the next state; no host sync."""
        self.state = next_scale(self.state, found_inf, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; a host sync."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            StateError: Not the state of a loss scale.
        """
        self.state = ScaleState.from_state_dict(state, device=self.state.scale.device)
