"""The device tensors that hold a loss scale's state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mezzo.scale.config import LossScale
from mezzo.scale.rules import fitted, next_numbers, next_scale_on_host, shifted
from mezzo.scale.state import ScaleState
from mezzo.tensors import LOW, moved

__all__ = ["Scaler", "moved_on"]

Pure: TypeAlias = Callable[..., Sequence[Tensor]]
Compute: TypeAlias = Callable[[Pure, tuple[Hashable, ...], Sequence[Tensor]], Sequence[Tensor]]


def _one_by_one(function: Pure, given: tuple[Hashable, ...], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return function(*given, *tensors)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What was found of the gradients that one scale made: numbers for a state on the CPU, 0-d tensors for any other.

    Attributes:
        before: The state whose scale they carried.
        overflowed: Whether some were not finite, and count.
        held: Whether some do not count.
    """

    before: ScaleState
    overflowed: Any
    held: Any


class Scaler:
    """Hold the state of one loss scale; the rules themselves are :func:`mezzo.scale.next_scale`.

    Args:
        config: The rules.
        device: Where the state lives.
        compute: How pure functions of a few tensors are computed: called with one of them, its first arguments, and
            the tensors.

    Attributes:
        config: The rules.
        state: The state now.
        in_graph: Whether the state's tensors are a captured graph's, which its next replay overwrites.
    """

    def __init__(self, config: LossScale, device: torch.device | str, compute: Compute = _one_by_one) -> None:
        self.config = config
        self._compute = compute
        self.state = config.start(device)
        self.in_graph = False
        self._last: _Judged | None = None

    @property
    def changes_gradients(self) -> bool:
        """Whether scaled gradients can differ from plain ones: not without a scale, nor with a constant 1."""
        return self.config.mode == "dynamic" or (self.config.mode == "constant" and self.config.init != 1.0)

    @property
    def keeps_apart(self) -> bool:
        """Whether gradients of several losses must be told apart: by their scales, or to count each one's overflows."""
        return self.config.mode == "dynamic" or (self.changes_gradients and self.config.patience is not None)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, at least in FP32, so that the product itself cannot overflow."""
        if not self.changes_gradients:
            return loss
        wide = loss.float() if loss.dtype in LOW else loss
        return wide * moved(self.state.scale, loss.device)

    def update(self, found_inf: Tensor, *, made_with: Tensor | None = None, hold: Tensor | None = None) -> None:
        """Move to the next state; no host sync.

        Args:
            found_inf: 0-d bool: whether gradients were not finite.
            made_with: The scale that these gradients carried. All that one scale made count as one step: those that
                come later are judged anew, together with the first. If the scale has moved on further, finite ones
                say nothing of it, and others count only where it has not gone below theirs already.
            hold: 0-d bool: these do not count, whatever was found.
        """
        if self.config.mode == "none":
            return
        known = _as_it_is if self._is_on_device else _on_host
        no = torch.zeros_like(found_inf) if hold is None else hold
        if made_with is None:
            made_with = self.state.scale
        if known is _as_it_is and Scaler.moves_at_once(self, made_with):  # held ones too: they move now
            self._move_together(found_inf, no)
            return
        back = known(no)
        overflowed, last = known(found_inf) & ~back, self._last
        if made_with is self.state.scale:
            self._judge(_Judged(self.state, overflowed, back), back)
        elif last is not None and made_with is last.before.scale:
            overflowed, back = last.overflowed | overflowed, last.held | back
            self._judge(_Judged(last.before, overflowed, back), back & ~overflowed)
        else:
            overflowed = overflowed & (known(self.state.scale) >= known(made_with))
            self._judge(_Judged(self.state, overflowed, known(torch.zeros_like(found_inf))), ~overflowed)

    @property
    def _is_on_device(self) -> bool:
        return self.in_graph or self.state.scale.device.type != "cpu"

    @property
    def counts_skips(self) -> bool:
        """Whether the rules ask how many of the last steps were skipped."""
        return self.config.skip_rate_limit is not None

    def moves_at_once(self, made_with: Tensor) -> bool:
        """Whether :func:`moved_on` says where a step's gradients move the scale, and :meth:`update` no more than that.

        Args:
            made_with: The scale that they carried.
        """
        is_known = self.config.mode != "none" and (self.counts_skips or not self.state.window.numel())
        return is_known and self._is_on_device and made_with is self.state.scale

    def numbers(self, found_inf: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return what :func:`moved_on` takes of the state, and the state's window with this step in it.

        Args:
            found_inf: 0-d bool: whether gradients were not finite.
        """
        window = shifted(self.state.window, found_inf, self.config)
        return [*self.state.tensors()[:4], *([window.sum()] if window.numel() else [])], window

    def move(self, moved: Sequence[Tensor], hold: Tensor, window: Tensor) -> None:
        """Move to the next state.

        Args:
            moved: Of :func:`moved_on`.
            hold: What it was given.
            window: Of :meth:`numbers`.
        """
        if self.config.mode == "none":
            return
        overflowed, *after = moved
        self._last = _Judged(self.state, overflowed, hold)
        if window.numel():
            kept, backs_off = fitted(self.state.window, self.config), after.pop()
            window = torch.where(hold, kept, window.masked_fill(backs_off, False))
        self.state = ScaleState.of(*after, window)

    def _move_together(self, found_inf: Tensor, hold: Tensor) -> None:
        numbers, window = self.numbers(found_inf)
        self.move(self._compute(moved_on, (self.config,), [found_inf, hold, *numbers]), hold, window)

    def _judge(self, judged: _Judged, stays: Any) -> None:
        """Follow the rules from the state before, or stay there."""
        before, self._last = judged.before, judged
        if isinstance(stays, Tensor):
            self.state = before
            self._move_together(judged.overflowed, stays)
            self._last = judged
        else:
            self.state = before if stays else next_scale_on_host(before, bool(judged.overflowed), self.config)
        if self.state.scale is before.scale:
            # A tensor of its own for each step, by which gradients of one step are told from those of the next.
            self.state = replace(self.state, scale=before.scale.clone())

    def remembering(self) -> Callable[[], None]:
        """Return what brings back what is known now, so that an update can begin again."""
        state, last = self.state, self._last

        def restore() -> None:
            self.state, self._last = state, last

        return restore

    # In a captured graph ----------------------------------------------------------------------------------

    def tensors(self) -> ScaleState:
        """Return a copy of the state for a graph, which reads it there and leaves the next one in the same memory."""
        return self._fitted().clone()

    def enter(self, tensors: ScaleState) -> None:
        """Go on in the tensors of a graph, with the values of now; no host sync.

        Args:
            tensors: Of :meth:`tensors`.
        """
        if self.state is not tensors:
            tensors.copy_(self._fitted())
        self.hold(tensors, in_graph=True)

    def leave(self) -> None:
        """Go on in tensors that no replay overwrites; no host sync."""
        if self.in_graph:
            self.hold(self.state.clone(), in_graph=False)

    def hold(self, state: ScaleState, *, in_graph: bool) -> None:
        """Go on from a state, between two steps: of gradients that were made before nothing is known any more.

        Args:
            state: The state; it is not copied.
            in_graph: Whether it is a graph's.
        """
        self.state, self.in_graph, self._last = state, in_graph, None

    def _fitted(self) -> ScaleState:
        return replace(self.state, window=fitted(self.state.window, self.config))

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; a host sync."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            StateError: Not the state of a loss scale.
        """
        self.hold(ScaleState.from_state_dict(state, device=self.state.scale.device), in_graph=False)


def moved_on(config: LossScale, found_inf: Tensor, hold: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Return whether gradients overflowed, the next state's numbers as new tensors, and whether a window starts over.

    Args:
        config: The rules.
        found_inf: 0-d bool: whether gradients were not finite.
        hold: 0-d bool: they do not count, whatever was found.
        *numbers: Of :meth:`Scaler.numbers`.
    """
    if config.mode == "none":
        return found_inf & ~hold, *numbers
    overflowed, before, skipped = found_inf & ~hold, numbers[:4], numbers[4] if numbers[4:] else None
    backs_off, *after = next_numbers(before, overflowed, skipped, config)
    moved = [torch.where(hold, old, new) for old, new in zip(before, after, strict=True)]
    return overflowed, *moved, *([] if skipped is None else [backs_off])


def _on_host(tensor: Tensor) -> Any:
    """Return the one value of a CPU tensor; through numpy, since nothing has to be asked of a device."""
    return tensor.numpy()[()]


def _as_it_is(tensor: Tensor) -> Any:
    return tensor
