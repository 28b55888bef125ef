"""What a step found out: the values on the device, and what ``amp.step()`` returns of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo.scale import ScaleState
from mezzo.step.passes import Verdict

if TYPE_CHECKING:
    from mezzo.overflow import Changed, Overflow

__all__ = ["Step", "StepOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step as the device knows it, once its loss scales have adapted.

    Attributes:
        verdict: On its gradients.
        params: The tensors whose gradients these are.
        before: The scale that gradients carried, by loss.
        after: The state of each of these losses' scales now.
        loss_failed: 0-d bool: whether a loss was not finite by itself, so that its scale stayed.
    """

    verdict: Verdict
    params: list[Tensor]
    before: Mapping[int, Tensor]
    after: Mapping[int, ScaleState]
    loss_failed: Tensor

    def numbers(self) -> list[Tensor]:
        """Return what the host wants to know: whether it was skipped, and of each scale its value and its wait."""
        scales = (t for state in self.after.values() for t in (state.scale, state.floor_overflows))
        return [self.verdict.found_inf, self.loss_failed, *scales]

    def step(self, overflow: Overflow | Changed | None, check: Callable[[], None]) -> Step:
        """Return what ``amp.step()`` returns.

        Args:
            overflow: Where an overflow began, if that was looked for.
            check: Raises once the loss scale has collapsed, as far as the host knows.
        """
        return Step(
            skipped=self.verdict.found_inf,
            scale=_one_or_all(list(self.before.values())),
            next_scale=_one_or_all([state.scale for state in self.after.values()]),
            grad_norm=self.verdict.grad_norm,
            overflow=overflow,
            check=check,
        )


def _one_or_all(scales: list[Tensor]) -> Tensor:
    return scales[0] if len(scales) == 1 else torch.stack(scales)


class Step:
    """What one optimizer step did, as device tensors: reading one as a Python value waits for the device.

    Those of a step that :func:`mezzo.capture` captured are the same tensors each time: its next call overwrites them.

    Reading an attribute raises :class:`ScaleCollapsed` once the host knows that the loss scale has collapsed.
    """

    __slots__ = ("_check", "_grad_norm", "_next_scale", "_overflow", "_scale", "_skipped")

    def __init__(
        self,
        *,
        skipped: Tensor,
        scale: Tensor,
        next_scale: Tensor,
        grad_norm: Tensor,
        overflow: Overflow | Changed | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._skipped, self._scale, self._next_scale, self._grad_norm = skipped, scale, next_scale, grad_norm
        self._overflow, self._check = overflow, check

    @property
    def skipped(self) -> Tensor:
        """0-d bool: whether a gradient was not finite, so that nothing was updated."""
        self._check()
        return self._skipped

    @property
    def scale(self) -> Tensor:
        """Float32: the loss scale that the gradients carried; 0-d, or one for each loss if several took part."""
        self._check()
        return self._scale

    @property
    def next_scale(self) -> Tensor:
        """Float32: the loss scale from now on, in the shape of ``scale``."""
        self._check()
        return self._next_scale

    @property
    def grad_norm(self) -> Tensor:
        """0-d float32: 2-norm of all unscaled gradients, before clipping."""
        self._check()
        return self._grad_norm

    @property
    def overflow(self) -> Overflow | Changed | None:
        """Where the overflow began, with ``on_overflow="explain"``; ``None`` for a step that was taken.

        :class:`mezzo.overflow.Changed` names inputs that were changed in place since, so that nothing could be rerun.
        """
        return self._overflow

    def __repr__(self) -> str:
        return (
            f"Step(skipped={self._skipped}, scale={self._scale}, next_scale={self._next_scale}, "
            f"grad_norm={self._grad_norm})"
        )
