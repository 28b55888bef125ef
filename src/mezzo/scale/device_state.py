"""The device tensors that hold a loss scale's state, and move when they are told to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, invert, not_, or_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mezzo.scale.config import LossScale
from mezzo.scale.state import ScaleState
from mezzo.scale.transition import next_numbers, next_scale_on_host
from mezzo.tensors import LOW, moved

Pure: TypeAlias = Callable[..., Sequence[Tensor]]
Compute: TypeAlias = Callable[[Pure, tuple[Hashable, ...], Sequence[Tensor]], Sequence[Tensor]]


def _one_by_one(function: Pure, given: tuple[Hashable, ...], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return function(*given, *tensors)


class Scaler:
    """Hold the state of one loss scale; the rules themselves are :func:`mezzo.scale.next_scale`.

    It moves in :meth:`advance` alone, once for all steps that it was told of since: several optimizers that step
    between two moves count as one step, which overflowed where one of them did.

    Args:
        config: The rules.
        device: Where the state lives.
        compute: How pure functions of a few tensors are computed: called with one of them, its first arguments, and
            the tensors.

    Attributes:
        config: The rules.
        state: The state now. Each move makes it anew, with a scale that is a tensor of its own: gradients of one step
            are told by it from those of the next.
        in_graph: Whether the state's tensors are a captured graph's, which its next replay overwrites.

    **Cost**: a move is host arithmetic where the state is on the CPU, else one launch of ``compute``. No host sync.

    Example:
        >>> import torch
        >>> from mezzo.scale import LossScale
        >>> scaler = Scaler(LossScale.dynamic(init=8.0), "cpu")
        >>> scaler.update(torch.tensor(False))
        >>> scaler.update(torch.tensor(True))
        >>> scaler.state.scale.item()
        8.0
        >>> scaler.advance()
        >>> scaler.state.scale.item()
        4.0
    """

    def __init__(self, config: LossScale, device: torch.device | str, compute: Compute = _one_by_one) -> None:
        self.config = config
        self.state, self.in_graph = config.start(device), False
        self._compute = compute
        self._reports: list[
            Tensor
        ] = []  # of each step since the last move whether it overflowed, and whether it is held

    @property
    def changes_gradients(self) -> bool:
        """Whether scaled gradients can differ from plain ones: not without a scale, nor with a constant 1."""
        return self.config.mode == "dynamic" or (self.config.mode == "constant" and self.config.init != 1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, at least in FP32, so that the product itself cannot overflow."""
        if not self.changes_gradients:
            return loss
        wide = loss.float() if loss.dtype in LOW else loss
        return wide * moved(self.state.scale, loss.device)

    def update(self, found_inf: Tensor, *, hold: Tensor | None = None) -> None:
        """Record whether a step has overflowed, for the next :meth:`advance`.

        Args:
            found_inf: 0-d bool: whether its gradients were not finite.
            hold: 0-d bool: the step does not count, whatever was found.
        """
        self._reports += found_inf, torch.zeros_like(found_inf) if hold is None else hold

    def advance(self) -> None:
        """Move to the next state; it stays where no step counts."""
        reports, self._reports = self._reports, []
        if not reports or self.config.mode == "none":
            return
        old_state = self.state
        if self.in_graph or old_state.scale.device.type != "cpu":
            self.state = ScaleState(*self._compute(moved_on, (self.config,), [*old_state.tensors(), *reports]))
            return
        values = list(map(bool, map(Tensor.numpy, reports)))  # numpy asks nothing of a device
        overflowed, is_held = _as_one_step(values, not_)
        new_state = old_state if is_held else next_scale_on_host(old_state, overflowed, self.config)
        self.state = (
            replace(new_state, scale=old_state.scale.clone()) if new_state.scale is old_state.scale else new_state
        )

    def set(self, scale: float | Tensor) -> None:
        """Set another scale, and drop what steps have reported; the count of clean steps goes on. No host sync.

        Args:
            scale: A number, or a tensor of one element.
        """
        here = self.state.scale
        if isinstance(scale, Tensor):
            value = scale.detach().to(here.device, here.dtype, copy=True).reshape(())
        else:
            value = torch.full_like(here, scale)
        self.hold(replace(self.state, scale=value), in_graph=False)

    def reconfigure(self, config: LossScale) -> None:
        """Change the rules; the scale and all counts stay, those of overflows since a clean step too."""
        spent = self.config.hysteresis - self.state.budget
        self.config, self.state = config, replace(self.state, budget=(config.hysteresis - spent).clamp(min=1))

    def hold(self, state: ScaleState, *, in_graph: bool) -> None:
        """Replace the state, between two steps, and drop what steps have reported.

        Args:
            state: The state; it is not copied.
            in_graph: Whether it is a graph's.
        """
        self.state, self.in_graph, self._reports = state, in_graph, []

    # In a captured graph ----------------------------------------------------------------------------------

    def tensors(self) -> ScaleState:
        """Return a copy of the state for a graph, which reads it there and leaves the next one in the same memory."""
        return self.state.clone()

    def enter(self, tensors: ScaleState) -> None:
        """Move the state into the tensors of a graph, with the values of now; no host sync.

        Args:
            tensors: Of :meth:`tensors`.
        """
        if self.state is not tensors:
            tensors.copy_(self.state)
        self.hold(tensors, in_graph=True)

    def leave(self) -> None:
        """Move the state into tensors that no replay overwrites; no host sync."""
        if self.in_graph:
            self.hold(self.state.clone(), in_graph=False)

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


def moved_on(config: LossScale, *tensors: Tensor) -> list[Tensor]:
    """Return the next state's numbers as new tensors, after all steps since the last move.

    Args:
        config: The rules; not those of mode ``"none"``.
        *tensors: The four numbers of the state before; then of each step whether it overflowed, and whether it is held.
    """
    before, reports = tensors[:4], tensors[4:]
    overflowed, is_held = _as_one_step(reports, invert)
    return [
        torch.where(is_held, old, new)
        for old, new in zip(before, next_numbers(before, overflowed, config), strict=True)
    ]


def _as_one_step(reports: Sequence[Any], counts: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return whether a step that counts has overflowed, and whether none counts."""
    flags, holds = reports[::2], reports[1::2]
    return reduce(or_, map(and_, flags, map(counts, holds))), reduce(and_, holds)
