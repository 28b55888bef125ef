"""Hooks of models and optimizers that belong to what has put them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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


def owner_of(hook: Any) -> Any:
    """Return whose method a hook is; one that is no method belongs to itself."""
    hook = getattr(hook, "hook", hook)  # as modules wrap those on loading
    return getattr(hook, "__self__", hook)


def is_ours(hook: Any) -> bool:
    """Whether this package has put a hook where it is."""
    return type(owner_of(hook)).__module__.partition(".")[0] == __name__.partition(".")[0]
