"""A loss scale that stays where it is until it is told to move, once for all that was found since."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import and_, invert, or_
from typing import Any

import torch
from torch import Tensor

from mezzo.scale.scaler import Scaler
from mezzo.scale.state import ScaleState

__all__ = ["HeldScaler"]


class HeldScaler(Scaler):
    """Hold the state of a loss scale that moves in :meth:`advance` alone, however many steps there were before it.

    Several optimizers that step between two moves count as one step: it overflowed where one of them did.

    Example:
        >>> import torch
        >>> from mezzo.scale import LossScale
        >>> scaler = HeldScaler(LossScale.dynamic(init=8.0), "cpu")
        >>> scaler.update(torch.tensor(False))
        >>> scaler.update(torch.tensor(True))
        >>> scaler.state.scale.item()
        8.0
        >>> scaler.advance()
        >>> scaler.state.scale.item()
        4.0
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._found: list[tuple[Tensor, Tensor]] = []

    def moves_at_once(self, made_with: Tensor) -> bool:
        """Return False: no step by itself says where the scale goes."""
        return False

    def update(self, found_inf: Tensor, *, made_with: Tensor | None = None, hold: Tensor | None = None) -> None:
        """Take note of a step; arguments as of :meth:`Scaler.update`, though every scale counts as the one of now."""
        self._found.append((found_inf, torch.zeros_like(found_inf) if hold is None else hold))

    def advance(self, found_infs: Iterable[Tensor] = ()) -> None:
        """Move to the next state; it stays where no step counts. No host sync.

        Args:
            found_infs: 0-d bool, of gradients that were checked, and with which no optimizer stepped.
        """
        found = [*self._found, *((flag, torch.zeros_like(flag)) for flag in found_infs)]
        self._found = []
        if found:
            flag, hold = found[0] if len(found) == 1 else self._compute(_as_one_step, (), [*chain(*found)])
            super().update(flag, hold=hold)

    def set(self, scale: float | Tensor) -> None:
        """Go on with another scale, and forget what was found; the count of clean steps goes on. No host sync.

        Args:
            scale: A number, or a tensor of one element.
        """
        here = self.state.scale
        if isinstance(scale, Tensor):
            value = scale.detach().to(here.device, here.dtype, copy=True).reshape(())
        else:
            value = torch.full_like(here, scale)
        self.hold(replace(self.state, scale=value), in_graph=False)

    def place(self, device: torch.device) -> None:
        """Go on on a device."""
        if self.state.scale.device != device:
            self.hold(ScaleState.of(*(tensor.to(device) for tensor in self.state.tensors())), in_graph=False)

    def hold(self, state: ScaleState, *, in_graph: bool) -> None:
        """See :meth:`Scaler.hold`; what was found before is forgotten."""
        self._found = []
        super().hold(state, in_graph=in_graph)

    def remembering(self) -> Callable[[], None]:
        """See :meth:`Scaler.remembering`."""
        restore, found = super().remembering(), list(self._found)

        def restore_all() -> None:
            restore()
            self._found = list(found)

        return restore_all


def _as_one_step(*told: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether a step that counts has overflowed, and whether none counts, from what each has told of itself."""
    flags, holds = told[::2], told[1::2]
    return reduce(or_, map(and_, flags, map(invert, holds))), reduce(and_, holds)
