"""Hooks of a model that belong to what has put them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["OwnHook"]


class OwnHook:
    """A hook of a module or a tensor; in a copy of these it does nothing.

    Args:
        call: What it calls.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call it, if it is here."""
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return OwnHook, ()
