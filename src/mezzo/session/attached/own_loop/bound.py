"""Names of torch's that are bound to something else, for the whole process, and given back."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.optim.checks import Look

__all__ = ["Bound", "Make"]

#: Returns what replaces a function, and is given that function.
Make: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

#: What may stand in front of a class's attribute that was none of its own.
_ABSENT: Final = object()


class Bound:
    """What was bound, and the way back. It refers to no session, so that it keeps none alive.

    Example:
        >>> import math
        >>> from mezzo.session.attached.own_loop.bound import Bound
        >>> bound, plain = Bound(), math.sqrt
        >>> bound.replace(math, "sqrt", lambda sqrt: lambda x: sqrt(x) + 1)
        >>> math.sqrt(4.0)
        3.0
        >>> bound.give_back()
        >>> math.sqrt is plain
        True
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def replace(self, place: Any, name: str, make: Make) -> None:
        """Bind an attribute of a module, a class or an instance to something else.

        Args:
            place: What has it.
            name: Its name.
            make: Makes the replacement.
        """
        before = vars(place).get(name, _ABSENT)
        made = make(getattr(place, name))
        self._undo.callback(_put_back, place, name, before, made)
        setattr(place, name, made)

    def inside(self, place: Any, name: str, make: Make) -> None:
        """Replace what a decorated function calls, so that names that were imported before have it too.

        torch's clipping functions are each a wrapper that disables gradients around the function itself. The wrapper
        stays the same object under every name; what it finds inside is replaced. One without a wrapper is replaced by
        name.

        Args:
            place: The module that has the function.
            name: The function's name.
            make: Makes the replacement of what the wrapper calls.
        """
        function = getattr(place, name)
        if cell := _cell_of(function):
            plain = cell.cell_contents
            self._undo.callback(setattr, cell, "cell_contents", plain)
            cell.cell_contents = make(plain)
        else:
            self.replace(place, name, make)

    def before_steps(self, look: Callable[[Optimizer], object]) -> None:
        """Have something look at every optimizer that is about to step.

        Args:
            look: Is called with it; it may raise, and writes nothing.
        """
        self._undo.callback(register_optimizer_step_pre_hook(Look(look)).remove)

    def give_back(self) -> None:
        """Put everything back; what others have bound since stays."""
        self._undo.close()


def _cell_of(function: Any) -> types.CellType | None:
    """Return where a decorator's wrapper keeps the function that it calls."""
    cells = getattr(function, "__closure__", None) or ()
    wrapped = getattr(function, "__wrapped__", None)
    return next((cell for cell in cells if wrapped is not None and cell.cell_contents is wrapped), None)


def _put_back(place: Any, name: str, before: Any, made: Any) -> None:
    if vars(place).get(name) is not made:
        return
    if before is _ABSENT:
        delattr(place, name)
    else:
        setattr(place, name, before)
