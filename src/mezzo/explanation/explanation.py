"""An explanation as a whole: what :func:`mezzo.explain` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mezzo.explanation.differences import differences
from mezzo.explanation.rows import Difference, Explained
from mezzo.explanation.table import plain, renderables

__all__ = ["Explanation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Explained):
    """Which precision each op in each module gets, and why: what :func:`mezzo.explain` returns.

    It prints as tables, compares by value, and goes to JSON and back without loss.

    Attributes:
        model: Class of the model.
        policy: The policy's text.
        devices: Types of the devices that held tensors.
        torch: The torch version.
        emulated: Whether products were computed in FP32 from rounded operands.
        rows: Every op that read or made floating numbers in the forward pass, in the order of first use.
        casts: Every conversion between floating dtypes, forward and backward, largest first.
        misaligned: Products and convolutions in a low format whose dimensions should be padded.
        findings: What else there is to know.
    """

    def differences(self, other: Explanation) -> tuple[Difference, ...]:
        """List what differs between two explanations, meant of one model under two policies.

        Ops are matched by module, op and line; casts by module, phase and what is cast.

        Args:
            other: The explanation to compare with.

        Returns:
            The differences, those of the policy first. Empty when both say the same.
        """
        return differences(self, other)

    def __str__(self) -> str:
        return plain(renderables(self))

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        yield from renderables(self)
