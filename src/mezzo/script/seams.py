"""Names of torch that are something else while a script runs, each of them put back."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any

__all__ = ["Seams", "is_script"]


def is_script() -> bool:
    """Whether the function that has called the caller is neither torch's nor mezzo's."""
    module = str(sys._getframe(2).f_globals.get("__name__", ""))
    return module.partition(".")[0] not in ("torch", "mezzo")


class Seams:
    """Replace attributes, until the block is left or they are put back one by one."""

    def __init__(self) -> None:
        self._before: dict[tuple[Any, str], Any] = {}

    def replace(self, place: Any, name: str, value: Any) -> Any:
        """Replace an attribute, and return what it was.

        Args:
            place: The module or class that has it.
            name: Its name.
            value: What it is from now on.
        """
        before = self._before.setdefault((place, name), vars(place)[name])
        setattr(place, name, value)
        return before

    def put_back(self, place: Any, name: str) -> None:
        """Put one attribute back, if it was replaced."""
        if (place, name) in self._before:
            setattr(place, name, self._before.pop((place, name)))

    def __enter__(self) -> Seams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for key in self._before:
                stack.callback(self.put_back, *key)
