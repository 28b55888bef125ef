"""Functions that a program has cast its own way, by decorators or by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias, TypeVar

from mezzo.cast.pins import fp32, low, promote
from mezzo.cast.region import autocast
from mezzo.compat.apex.running import NOW
from mezzo.errors import PolicyError, StateError, nearest, shown
from mezzo.policy import Policy
from mezzo.policy.ops import functions, resolve

__all__ = [
    "REGISTERED", "bfloat16_function", "float_function", "half_function", "others", "promote_function",
    "register_bfloat16_function", "register_float_function", "register_half_function", "register_promote_function",
    "with_rules",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
Pin: TypeAlias = Literal["low", "bfloat16", "fp32", "promote"]

#: What was registered by name: where a function is, its name there, and what it is pinned to.
REGISTERED: Final[list[tuple[Any, str, Pin]]] = []


def with_rules(policy: Policy) -> Policy:
    """Return a policy with rules for those registered functions of torch's that a rule can reach."""
    for place, name, pin in REGISTERED:
        if pin != "bfloat16" and (op := _op(place, name)) is not None:
            policy = {"low": policy.low, "fp32": policy.fp32, "promote": policy.promote}[pin](op)
    return policy


def others() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the registered functions that no rule reaches: where they are, their names, and what pins them."""
    for place, name, pin in REGISTERED:
        if pin == "bfloat16" or _op(place, name) is None:
            yield place, name, functools.partial(_pinned, pin=pin)


def half_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to FP16, and what it calls runs in FP16."""
    return _pinned(fn, "low")


def bfloat16_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to bfloat16, and what it calls runs in bfloat16."""
    return _pinned(fn, "bfloat16")


def float_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to FP32, and nothing inside is cast."""
    return _pinned(fn, "fp32")


def promote_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to the widest dtype among them."""
    return _pinned(fn, "promote")


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
    if not callable(getattr(module, name, None)):
        where = f"{call}({getattr(module, '__name__', shown(module))}, {shown(name)})"
        raise PolicyError(f"there is no function {shown(name)}", where=where, why=nearest(name, dir(module)))
    REGISTERED.append((module, name, pin))


def _pinned(fn: Function, pin: Pin) -> Function:
    """Return a function that is pinned while ops are cast, and left alone while not."""
    inner = _PINS[pin](fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (inner if NOW.standing is not None and NOW.standing.casts else fn)(*args, **kwargs)

    return call  # type: ignore[return-value]


def _in_bfloat16(fn: Callable[..., Any]) -> Callable[..., Any]:
    return autocast("O1,dtype=bfloat16")(low(fn))


_PINS: Final[dict[Pin, Callable[[Any], Any]]] = {
    "low": low, "bfloat16": _in_bfloat16, "fp32": fp32, "promote": promote,
}  # fmt: skip


def _op(place: Any, name: str) -> str | None:
    """Return the op that a function of torch's is; ``None`` for any other."""
    try:
        op = resolve(name)
    except PolicyError:
        return None
    return op if getattr(place, name) in functions(op) else None
