"""The state of one loss scale, as tensors of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor

from mezzo.errors import Fields, StateError, misfits, shown

COUNTERS: Final = ("clean_steps", "budget", "floor_overflows")


@dataclass(frozen=True, slots=True, eq=False)
class ScaleState:
    """Everything that :func:`mezzo.scale.next_scale` needs to know about the past.

    Two states are the same only if they are one object; compare ``state_dict()`` for equal values.

    Args:
        scale: 0-d float32: what the loss is multiplied by.
        clean_steps: 0-d int64: finite steps since the last overflow or growth. Starts at
            ``-growth_offset``, at the beginning and after an overflow, so that reaching ``interval`` takes
            that many steps more.
        budget: 0-d int64: overflows that may still come before the scale backs off.
        floor_overflows: 0-d int64: overflows in a row at the floor, at each of which it would have backed off.
    """

    scale: Tensor
    clean_steps: Tensor
    budget: Tensor
    floor_overflows: Tensor

    @classmethod
    def made(cls, scale: float, counts: Sequence[int], device: torch.device | str) -> Self:
        """Return the state of these numbers on a device."""
        counter = partial(torch.full, (), dtype=torch.int64, device=device)
        return cls(torch.full((), scale, dtype=torch.float32, device=device), *map(counter, counts))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the state, in the order of the fields."""
        return self.scale, self.clean_steps, self.budget, self.floor_overflows

    def inverse(self) -> Tensor:
        """Return 1/scale: :func:`inverse`."""
        return inverse(self.scale)

    def clone(self) -> Self:
        """Return the same state in tensors of its own."""
        return type(self)(*(tensor.clone() for tensor in self.tensors()))

    def to(self, device: torch.device) -> Self:
        """Return the same state on a device, in tensors of its own; a host sync where that is the CPU."""
        return type(self)(*(tensor.to(device, copy=True) for tensor in self.tensors()))

    def copy_(self, other: ScaleState) -> None:
        """Copy another state's values in place: a captured graph holds addresses.

        Args:
            other: The state.

        Cost:
            One kernel for each field that is not the same tensor, no host sync.
        """
        for mine, value in zip(self.tensors(), other.tensors(), strict=True):
            if mine is not value:
                mine.copy_(value, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Return every field as a plain value.

        Returns:
            ``scale`` (float), and the three counters (int).

        Cost:
            One host sync.

        Example:
            >>> from mezzo.scale import LossScale
            >>> LossScale.dynamic().start().state_dict()
            {'scale': 65536.0, 'clean_steps': 0, 'budget': 1, 'floor_overflows': 0}
        """
        # One transfer: float64 holds float32 and every count below 2^53 exactly.
        scale, *counts = torch.stack([tensor.double() for tensor in self.tensors()]).tolist()
        return {"scale": scale, **dict(zip(COUNTERS, map(int, counts), strict=True))}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], *, device: torch.device | str = "cpu") -> Self:
        """Restore what :meth:`state_dict` returned, bit for bit.

        Args:
            state: Plain values under the keys of :meth:`state_dict`, and no others.
            device: Where the tensors go.

        Returns:
            A state that continues exactly as the saved one would have.

        Raises:
            StateError: Keys are missing or unknown, or a value cannot be a state's. One message lists all.
        """
        wrong = [*misfits(state, FIELDS), *(f"{shown(key)} is none of its fields" for key in state.keys() - FIELDS)]
        if wrong:
            what = "this is not the state of a loss scale"
            raise StateError(what, where="\n".join(wrong), write="what state_dict() has returned")
        return cls.checked(state, device)

    @classmethod
    def checked(cls, state: Mapping[str, Any], device: torch.device | str) -> Self:
        """Return the state of plain values in which :func:`mezzo.errors.misfits` has found nothing."""
        return cls.made(state["scale"], [state[key] for key in COUNTERS], device)


def inverse(scale: Tensor) -> Tensor:
    """Return 1/scale, rounded once.

    Args:
        scale: 0-d float32.

    Returns:
        0-d float32 on the scale's device, taken through float64. It is finite for every scale that a
        :class:`LossScale` can reach, and exact where the scale is a power of two.

    Cost:
        Three one-element kernels, no host sync.
    """
    return scale.double().reciprocal().float()


def _is_scale(value: Any) -> bool:
    """Whether a value is a number that is neither 0 nor infinity once it is a float32."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 2.0**-149 <= value <= torch.finfo(torch.float32).max


def is_whole(value: Any) -> bool:
    """Whether a value is an integer that float64 holds."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def is_count(value: Any) -> bool:
    """Whether it is one from 0 on."""
    return is_whole(value) and value >= 0


#: What each field of a saved state can be.
FIELDS: Final[Fields] = {
    "scale": (_is_scale, "a positive float32 number"),
    "clean_steps": (is_whole, "a whole number"),
    **dict.fromkeys(("budget", "floor_overflows"), (is_count, "a whole number from 0")),
}
