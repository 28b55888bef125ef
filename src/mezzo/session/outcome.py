"""What a step found out: the values on the device, and what ``amp.step()`` returns of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        scale: Float32: the scale that gradients carried; 0-d, or one for each loss if several took part.
        next_scale: Float32: the scale from now on, in the shape of ``scale``.
        after: The state of each of these losses' scales now.
        loss_failed: 0-d bool: whether a loss was not finite by itself, so that its scale stayed.
    """

    verdict: Verdict
    params: list[Tensor]
    scale: Tensor
    next_scale: Tensor
    after: Mapping[int, ScaleState]
    loss_failed: Tensor

    def numbers(self) -> list[Tensor]:
        """Return what the host wants to know: whether it was skipped, and of each scale its value and its wait."""
        scales = (t for state in self.after.values() for t in (state.scale, state.floor_overflows))
        return [self.verdict.found_inf, self.loss_failed, *scales]


class Step:
    """What one optimizer step did, as device tensors: reading one as a Python value waits for the device.

    Those of a step that :func:`mezzo.capture` captured are the same tensors each time: its next call overwrites them.

    Reading an attribute raises :class:`ScaleCollapsed` once the host knows that the loss scale has collapsed.
    """

    __slots__ = ("_check", "_outcome", "_overflow")

    def __init__(
        self, outcome: StepOutcome, check: Callable[[], None], overflow: Overflow | Changed | None = None
    ) -> None:
        self._outcome, self._check, self._overflow = outcome, check, overflow

    @property
    def skipped(self) -> Tensor:
        """0-d bool: whether a gradient was not finite, so that nothing was updated."""
        self._check()
        return self._outcome.verdict.found_inf

    @property
    def scale(self) -> Tensor:
        """Float32: the loss scale that the gradients carried; 0-d, or one for each loss if several took part."""
        self._check()
        return self._outcome.scale

    @property
    def next_scale(self) -> Tensor:
        """Float32: the loss scale from now on, in the shape of ``scale``."""
        self._check()
        return self._outcome.next_scale

    @property
    def grad_norm(self) -> Tensor:
        """0-d float32: 2-norm of all unscaled gradients, before clipping."""
        self._check()
        return self._outcome.verdict.grad_norm

    @property
    def overflow(self) -> Overflow | Changed | None:
        """Where the overflow began, with ``on_overflow="explain"``; ``None`` for a step that was taken.

        :class:`mezzo.overflow.Changed` names inputs that were changed in place since, so that nothing could be rerun.
        """
        return self._overflow

    def __repr__(self) -> str:
        made, verdict = self._outcome, self._outcome.verdict
        scales = f"scale={made.scale}, next_scale={made.next_scale}"
        return f"Step(skipped={verdict.found_inf}, {scales}, grad_norm={verdict.grad_norm})"
