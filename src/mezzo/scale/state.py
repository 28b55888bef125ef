"""The state of one loss scale, as tensors of one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mezzo.errors import StateError, nearest, shown

__all__ = ["ScaleState", "inverse"]

COUNTERS = ("clean_steps", "budget", "floor_overflows")
KEYS = ("scale", *COUNTERS, "window")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaleState:
    """Everything that :func:`mezzo.scale.next_scale` needs to know about the past.

    Two states are the same only if they are one object; compare ``state_dict()`` for equal values.

    Args:
        scale: 0-d float32: what the loss is multiplied by.
        clean_steps: 0-d int64: finite steps since the last overflow or growth. Starts at
            ``-growth_offset``, at the beginning and after an overflow, so that reaching ``interval`` takes
            that many steps more.
        budget: 0-d int64: overflows that may still come before the scale backs off.
        floor_overflows: 0-d int64: consecutive overflows while the scale was at its floor already.
        window: (interval,) bool: which of the last ``interval`` steps were skipped, newest last; empty
            unless ``skip_rate_limit`` is set.
    """

    scale: Tensor
    clean_steps: Tensor
    budget: Tensor
    floor_overflows: Tensor
    window: Tensor

    def inverse(self) -> Tensor:
        """Return 1/scale: :func:`inverse`."""
        return inverse(self.scale)

    def clone(self) -> Self:
        """Return the same state in tensors of its own."""
        return type(self)(**{key: getattr(self, key).clone() for key in KEYS})

    def copy_(self, other: ScaleState) -> None:
        """Take over another state's values, in place: a captured graph holds addresses.

        Args:
            other: A state whose window is as long.

        Cost:
            One kernel for each field that is not the same tensor, no host sync.
        """
        for key in KEYS:
            mine, value = getattr(self, key), getattr(other, key)
            if mine is not value:
                mine.copy_(value, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Return every field as a plain value.

        Returns:
            ``scale`` (float), the three counters (int), and ``window`` as text, ``X`` for a skipped step
            and ``.`` for any other.

        Cost:
            One host sync.

        Example:
            >>> from mezzo.scale import LossScale
            >>> LossScale.dynamic().start().state_dict()
            {'scale': 65536.0, 'clean_steps': 0, 'budget': 1, 'floor_overflows': 0, 'window': ''}
        """
        # One transfer: float64 holds float32 and every count below 2^53 exactly.
        numbers = torch.stack([getattr(self, key).double() for key in KEYS[:-1]])
        scale, *rest = torch.cat([numbers, self.window.double()]).tolist()
        counts = dict(zip(COUNTERS, map(int, rest), strict=False))
        window = "".join("X" if skipped else "." for skipped in rest[len(COUNTERS) :])
        return {"scale": scale, **counts, "window": window}

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
        problems = list(_problems(state))
        if problems:
            raise StateError.together(problems)
        counters = {key: torch.tensor(state[key], dtype=torch.int64, device=device) for key in COUNTERS}
        skipped = [mark == "X" for mark in state["window"]]
        return cls(
            scale=torch.tensor(state["scale"], dtype=torch.float32, device=device),
            window=torch.tensor(skipped, dtype=torch.bool, device=device),
            **counters,
        )


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


def _problems(state: Mapping[str, Any]) -> Iterator[StateError]:
    where = "state of a loss scale"
    write = "ScaleState.from_state_dict(saved.state_dict())"
    missing = [key for key in KEYS if key not in state]
    if missing:
        yield StateError(f"missing keys: {', '.join(missing)}", where=where, write=write)
    for key in state:
        if key not in KEYS:
            yield StateError(f"unknown key {shown(key)}", where=where, why=nearest(shown(key), KEYS))
    for key in KEYS:
        if key in state and not _fits(key, state[key]):
            kinds = {"scale": "a positive float32 number", "window": "text of '.' and 'X'"}
            yield StateError(
                f"{key} cannot be {shown(state[key])}",
                where=where,
                why=f"it is {kinds.get(key, 'a whole number')}",
            )


def _fits(key: str, value: Any) -> bool:
    if key == "window":
        return isinstance(value, str) and set(value) <= {".", "X"}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if key == "scale":
        # Neither 0 nor infinity once it is a float32.
        return 2.0**-149 <= value <= torch.finfo(torch.float32).max
    return isinstance(value, int) and abs(value) < 2**53
