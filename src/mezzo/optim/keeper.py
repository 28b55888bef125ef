"""What keepers of FP32 weights have in common, be they masters beside an optimizer or the other halves inside one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

__all__ = ["Keeper"]


class Keeper(Protocol):
    """Keeps the FP32 values of the low-precision parameters that one optimizer updates.

    :class:`mezzo.MasterWeights` keeps them as tensors of their own. mezzo's optimizers keep what each weight lacks.
    """

    def stored(self, *, in_fp32: bool = False) -> list[Tensor]:
        """Return the low-precision parameters whose FP32 values are kept here.

        Args:
            in_fp32: Whether to leave out those of which only a compensation is kept, and no FP32 value.
        """

    def master_of(self, param: Tensor) -> Tensor:
        """Return the FP32 value of a parameter; it is not to be written to."""

    def write(self, param: Tensor, value: Tensor, *, refines: bool = False) -> None:
        """Give a parameter another value.

        Args:
            param: One of :meth:`stored`.
            value: Of its shape. In FP32 it is kept whole. In the parameter's own dtype it leaves each FP32 value that
                rounds to it.
            refines: Whether it is the FP32 value that the parameter was rounded from. Forward passes that have read
                the parameter go on then.

        Raises:
            NumericsError: A value that cannot be kept; nothing was changed.
        """

    def take_edits(self, params: Iterable[Tensor] | None = None) -> None:
        """Take over parameters that were changed in place since their FP32 values were last rounded into them.

        Args:
            params: Which; all when omitted. In these, FP32 values that were changed in place are rounded too.
        """

    def leave(self) -> None:
        """Serve no session any more: the optimizer is as it was built, and updates the model's parameters."""
