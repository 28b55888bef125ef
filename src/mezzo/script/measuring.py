"""Counting the work of matrix products in the first steps of a session, while the script goes on."""

from __future__ import annotations

from typing import Final

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mezzo.script.report import Ledger
from mezzo.trace.products import Products

__all__ = ["Measuring"]

#: In how many steps, at some microseconds of Python for each kernel.
_STEPS: Final = 3


class Measuring:
    """Count products from :meth:`begin` on, until there were a few steps; before it, nothing.

    Args:
        ledger: Gets what was counted.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._products = ledger, Products()
        self._has_begun = self._is_entered = self._is_over = False

    def begin(self) -> None:
        """Count from now on, or, in a block of a mode of the script's, which may end before, from a later step on."""
        self._has_begun = True
        if not self._is_over and not self._is_entered and not _get_current_dispatch_mode_stack():
            self._products.__enter__()
            self._is_entered = True

    def stepped(self) -> None:
        """Take note of a step, a skipped one too."""
        if self._is_over or not self._has_begun:
            return
        self._ledger.measured_steps += self._is_entered
        self.begin()
        if self._ledger.measured_steps == _STEPS:
            self.stop()

    def stop(self) -> None:
        """Count no more."""
        if not self._is_over:
            self._is_over = True
            self._ledger.flops, self._ledger.low_share = self._products.flops.copy(), self._products.low_share
        stack = _get_current_dispatch_mode_stack()
        if self._is_entered and stack and stack[-1] is self._products:  # and not below one of the script's
            self._products.__exit__(None, None, None)
            self._is_entered = False
