"""Functions that a program has cast its own way, by decorators or by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from mezzo.compat.apex.by_name import ByName, Pin
from mezzo.compat.apex.running import NOW
from mezzo.errors import StateError

__all__ = [
    "FUNCTIONS", "bfloat16_function", "float_function", "half_function", "promote_function",
    "register_bfloat16_function", "register_float_function", "register_half_function", "register_promote_function",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

FUNCTIONS: Final = ByName(lambda: NOW.standing is not None and NOW.standing.casts)


def half_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to FP16, and what it calls runs in FP16."""
    return FUNCTIONS.pinned(fn, "low")


def bfloat16_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to bfloat16, and what it calls runs in bfloat16."""
    return FUNCTIONS.pinned(fn, "bfloat16")


def float_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to FP32, and nothing inside is cast."""
    return FUNCTIONS.pinned(fn, "fp32")


def promote_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to the widest dtype among them."""
    return FUNCTIONS.pinned(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`half_function` does, from ``initialize`` at O1 to ``deinitialize``.

    One of torch's becomes a rule of the policy, which reaches its other spellings too (``torch.softmax`` and
    ``x.softmax``). Any other one is replaced in its module meanwhile.

    Args:
        module: Where the function is: a module or a class.
        name: Its name there.

    Raises:
        PolicyError: There is none.
        StateError: Amp is initialised already.
    """
    _register(module, name, "low", "amp.register_half_function")


def register_bfloat16_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`bfloat16_function` does; see :func:`register_half_function`."""
    _register(module, name, "bfloat16", "amp.register_bfloat16_function")


def register_float_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`float_function` does; see :func:`register_half_function`."""
    _register(module, name, "fp32", "amp.register_float_function")


def register_promote_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`promote_function` does; see :func:`register_half_function`."""
    _register(module, name, "promote", "amp.register_promote_function")


def _register(module: Any, name: str, pin: Pin, call: str) -> None:
    if NOW.standing is not None:
        raise StateError(f"{call} after amp.initialize", write=f"{call}(module, name), then amp.initialize(…)")
    FUNCTIONS.register(module, name, pin, call)
