"""What can be asked of a session, and set between its steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.policy import Policy
from mezzo.session.core import Core
from mezzo.session.refusals import beginning

__all__ = ["Settings"]


class Settings:
    """A session's policy, options and loss scales, as users read and set them."""

    _core: Core

    @property
    def policy(self) -> Policy:
        """The policy, for as long as the session is open."""
        return self._core.policy

    @property
    def max_grad_norm(self) -> float | None:
        """What the 2-norm of a step's gradients is clipped to; ``None`` does not clip. It may be set between steps."""
        return self._core.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        for problem in beginning.wrong_norm(value):
            raise problem
        self._core.max_grad_norm = value

    @property
    def on_overflow(self) -> Literal["skip", "explain", "raise"]:
        """What a skipped step does besides; ``"skip"`` and ``"raise"`` may be exchanged between steps."""
        return self._core.on_overflow

    @on_overflow.setter
    def on_overflow(self, value: Literal["skip", "explain", "raise"]) -> None:
        for problem in beginning.unknown_reaction(value):
            raise problem
        before = self._core.on_overflow
        if "explain" in (value, before) and value != before:
            raise PolicyError(
                f'on_overflow is "{before}", and cannot become "{value}"',
                why="what explains an overflow watches the models from the start",
                write=f'MixedPrecision(…, on_overflow="{value}")',
            )
        self._core.on_overflow = value

    @property
    def waited_s(self) -> float:
        """Seconds that this process has waited for other ranks in the session's exchanges; 0 where there is one rank.

        Over gloo that is all of it; over NCCL devices wait for each other, and the host does not.
        """
        agreement = self._core.agreement
        return 0.0 if agreement is None else agreement.consensus.waited_s

    @property
    def emulated(self) -> bool:
        """Whether GEMMs and convolutions compute in FP32 from rounded operands on this device."""
        return self._core.weights.region().emulated

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, 0-d float32 on the device; one for each loss where there are several."""
        states = ((scaler.state.scale, scaler.in_graph) for scaler in self._core.scalers)
        scales = [scale.clone() if in_graph else scale for scale, in_graph in states]
        return scales[0] if len(scales) == 1 else torch.stack(scales)
