"""Operands of a product, rotated where a recipe says so, and quantised along what is summed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from mezzo.cast.notes import ProductListener, product_beside
from mezzo.cast.products.memory import Memory, Role, Slot
from mezzo.cast.products.recipes import Recipe, depends
from mezzo.dispatch import makes_fake
from mezzo.formats import BlockFormat, Quantized, quantized
from mezzo.formats.noise import drawn

#: An operand as it is multiplied: quantised, or in the policy's dtype.
Operand: TypeAlias = Quantized | Tensor

#: The signs of the random rotation, drawn once and the same in every layer and step, as in Transformer Engine
#: (``transformer_engine/pytorch/tensor/nvfp4_tensor.py``, ``get_wgrad_sign_vector``).
_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

#: The rotation, on each device that has asked for it.
_ROTATIONS: Final[dict[torch.device, Tensor]] = {}


def _rotation(device: torch.device) -> Tensor:
    """Return the 16×16 Hadamard matrix, orthonormal, its columns times the signs: float32."""
    if makes_fake():
        return _made_rotation(device)  # without values, which must not outlive the mode
    if device not in _ROTATIONS:
        _ROTATIONS[device] = _made_rotation(device)
    return _ROTATIONS[device]


def _made_rotation(device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / 4 * torch.tensor(_SIGNS, dtype=torch.float32)).to(device)


def rotated(x: Tensor) -> Tensor:
    """Rotate each 16 rows of a matrix among themselves, which changes no sum over rows of two that are rotated.

    Args:
        x: (rows, features).

    Returns:
        float32 of that shape.
    """
    groups = x.float().view(-1, 16, x.shape[1])
    return product_beside(_rotation(x.device), groups).view(x.shape)


@dataclass(slots=True)
class Quantiser:
    """Quantises the operands of one call of a weight's products, forward and backward.

    Attributes:
        recipe: How.
        memory: What is known of earlier steps; ``None`` where a region is of no prepared model.
        slot: The weight's part of it, where scales are delayed.
        listeners: What is told of the call.
        noted: The largest values that operands had, by their roles.
    """

    recipe: Recipe
    memory: Memory | None
    slot: Slot | None
    listeners: Sequence[ProductListener] = ()
    noted: dict[Role, Tensor] = field(default_factory=dict)

    def along(self, role: Role, x: Tensor, *dims: int | None) -> list[Any]:
        """Return a matrix as it is multiplied, for each product that sums over one of its dimensions.

        Args:
            role: Which operand it is.
            x: The matrix, in the policy's dtype.
            *dims: What each product sums over; ``None`` for one that is not computed from it.
        """
        form: BlockFormat = getattr(self.recipe, role)
        quantised: list[Quantized | None] = []
        for dim in dims:
            like = next((earlier for earlier in quantised if earlier is not None), None)
            if dim is not None and (like is None or depends(form)):
                like = self._along(role, x, form, dim)
            quantised.append(None if dim is None else like)
        return quantised

    def record(self) -> None:
        """Record the operands' largest values for later steps, where a backward pass of the session runs."""
        if self.slot is not None and self.memory is not None and self.memory.counts:
            for role, now in self.noted.items():
                self.slot.record(role, now)

    def _along(self, role: Role, x: Tensor, form: BlockFormat, dim: int) -> Quantized:
        key = amax = None
        if self.recipe.stochastic and role == "gradient":
            key = drawn(x.device) if self.memory is None else self.memory.draw(x.device)
        if self.slot is not None:
            least, most = torch.aminmax(x)  # on a CPU 25 times as fast as a norm
            now = torch.maximum(-least, most).float()
            self.noted[role], amax = now, self.slot.amax(role, now)
        is_rotated = self.recipe.transformed and role != "weight" and dim == 0
        operand = rotated(x) if is_rotated else x
        result = quantized(operand, form, dim, key=key, amax=amax)
        for listener in self.listeners:
            listener.quantised(role, operand, result)
        return result
