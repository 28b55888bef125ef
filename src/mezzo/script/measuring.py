"""Counting the work of matrix products in the first steps of a session, while the script goes on."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any, Final

from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mezzo.script.report import Ledger
from mezzo.trace.products import Products

__all__ = ["Measuring"]

#: In how many steps, at some microseconds of Python for each kernel.
_STEPS: Final = 3


class Measuring:
    """Count products from now on, until the optimizers have stepped a few times.

    Args:
        ledger: Gets what was counted.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._products = ledger, Products()
        self._wrapped: list[tuple[Optimizer, Any, Any]] = []
        self._is_entered = self._is_over = self._is_in_step = False
        self._enter()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Count the steps of optimizers, skipped ones too: what ``optimizer.step`` is now is called inside."""
        for optimizer in () if self._is_over else optimizers:
            self._wrap(optimizer)

    def _wrap(self, optimizer: Optimizer) -> None:
        measuring, plain, before = self, optimizer.step, vars(optimizer).get("step")

        @functools.wraps(getattr(plain, "__func__", plain))
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if measuring._is_in_step:  # a session that begins in its closure calls it again
                return plain(*args, **kwargs)
            measuring._is_in_step = True
            try:
                result = plain(*args, **kwargs)
            finally:
                measuring._is_in_step = False
            measuring._count()
            return result

        vars(optimizer)["step"] = types.MethodType(step, optimizer)
        self._wrapped.append((optimizer, before, step))

    def stop(self) -> None:
        """Count no more."""
        if not self._is_over:
            self._is_over = True
            self._ledger.flops, self._ledger.low_share = self._products.flops.copy(), self._products.low_share
        self.let_go()
        stack = _get_current_dispatch_mode_stack()
        if self._is_entered and stack and stack[-1] is self._products:  # and not below one of the script's
            self._products.__exit__(None, None, None)
            self._is_entered = False

    def let_go(self) -> None:
        """Give back what was wrapped; where others have wrapped it since, it stays inside theirs, and counts on."""
        for optimizer, before, mine in self._wrapped:
            if getattr(vars(optimizer).get("step"), "__func__", None) is mine:
                if before is None:
                    del vars(optimizer)["step"]
                else:
                    vars(optimizer)["step"] = before
        self._wrapped.clear()

    def _enter(self) -> None:
        """Begin, unless in a block of a mode of the script's, which may end before."""
        if not self._is_entered and not _get_current_dispatch_mode_stack():
            self._products.__enter__()
            self._is_entered = True

    def _count(self) -> None:
        if self._is_over:
            return
        self._ledger.measured_steps += self._is_entered
        self._enter()
        if self._ledger.measured_steps == _STEPS:
            self.stop()
