"""Names of torch's that lead to something else, for the whole process, and are given back."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo.optim.checks import Look

__all__ = ["Bound"]

#: What may stand in front of a class's attribute that was none of its own.
_ABSENT: Final = object()


class Bound:
    """Have calls of functions lead to methods, which are given the function itself first, and the way back.

    Methods are held weakly, so that no session is kept alive: once their object is gone, the function is called.

    Example:
        >>> import math
        >>> from mezzo.session.attached.own_loop.bound import Bound
        >>> class Shift:
        ...     def sqrt(self, plain, x):
        ...         return plain(x) + 1
        >>> bound, plain, shift = Bound(), math.sqrt, Shift()
        >>> bound.replace(math, "sqrt", shift.sqrt)
        >>> math.sqrt(4.0)
        3.0
        >>> bound.give_back()
        >>> math.sqrt is plain
        True
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def replace(self, place: Any, name: str, instead: Callable[..., Any]) -> None:
        """Have a function lead to a method.

        Args:
            place: The module or class that has the function.
            name: Its name.
            instead: The method.
        """
        before = vars(place).get(name, _ABSENT)
        made: Any = _leading_to(instead, getattr(place, name))
        if name == "__init_subclass__":  # a class method of itself only where a class statement has it
            made = classmethod(made)
        self._undo.callback(_put_back, place, name, before, made)
        setattr(place, name, made)

    def inside(self, place: Any, name: str, instead: Callable[..., Any]) -> None:
        """Replace what a decorated function calls, so that names that were imported before have it too.

        torch's clipping functions are each a wrapper that disables gradients around the function itself. The wrapper
        stays the same object under every name; what it finds inside is replaced. One without a wrapper is replaced by
        name.

        Args:
            place: The module that has the function.
            name: The function's name.
            instead: The method to which the wrapper's call leads.
        """
        if cell := _cell_of(getattr(place, name)):
            plain = cell.cell_contents
            self._undo.callback(setattr, cell, "cell_contents", plain)
            cell.cell_contents = _leading_to(instead, plain)
        else:
            self.replace(place, name, instead)

    def before_steps(self, look: Callable[[Optimizer], object]) -> None:
        """Have a method look at every optimizer that is about to step.

        Args:
            look: Is called with it; it may raise, and writes nothing.
        """
        here = weakref.WeakMethod(look)
        hook = Look(lambda optimizer: None if (found := here()) is None else found(optimizer))
        self._undo.callback(register_optimizer_step_pre_hook(hook).remove)

    def give_back(self) -> None:
        """Put everything back; what others have bound since stays."""
        self._undo.close()


def _leading_to(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    here = weakref.WeakMethod(method)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        instead = here()
        return plain(*args, **kwargs) if instead is None else instead(plain, *args, **kwargs)

    return call


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
