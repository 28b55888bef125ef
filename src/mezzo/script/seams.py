"""Names of torch that are something else while a script runs, each of them put back."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

__all__ = ["Seams", "is_script"]


def is_script() -> bool:
    """Whether the function that has called the caller is neither torch's nor mezzo's."""
    module = str(sys._getframe(2).f_globals.get("__name__", ""))
    return module.partition(".")[0] not in ("torch", "mezzo")


class Seams(contextlib.ExitStack):
    """Replace attributes, until the block is left, or they are put back by ``close``."""

    def replace(self, place: Any, name: str, value: Any) -> None:
        """Replace an attribute.

        Args:
            place: The module or class that has it.
            name: Its name.
            value: What it is from now on.
        """
        self.callback(setattr, place, name, vars(place)[name])
        setattr(place, name, value)
