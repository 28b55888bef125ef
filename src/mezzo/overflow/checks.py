"""The mode that shows a watch every kernel, with what it read as it was before."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mezzo.overflow.watch import Watch
from mezzo.trace.measure import operands

__all__ = ["Checks", "is_checking"]


class Checks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Look at every kernel's results, below autograd and autocast."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = operands(func, args, kwargs)
        out = func(*args, **kwargs)
        self.watch.check(func, read, args, kwargs, out)
        return out


def is_checking() -> bool:
    """Whether a search is what runs the current code."""
    return any(isinstance(mode, Checks) for mode in _get_current_dispatch_mode_stack())
