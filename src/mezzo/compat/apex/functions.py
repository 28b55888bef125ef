"""Functions that a program has cast its own way, by decorators or by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

from mezzo.cast import autocast, fp32, low, promote
from mezzo.compat.apex.running import NOW
from mezzo.errors import PolicyError, StateError, nearest, shown
from mezzo.policy import Policy
from mezzo.policy.ops import functions as functions_of
from mezzo.policy.ops import resolve
from mezzo.session.attached import Standing

__all__ = [
    "bfloat16_function", "float_function", "forget", "half_function", "promote_function", "register_bfloat16_function",
    "register_float_function", "register_half_function", "register_promote_function", "take_over", "with_registered",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
_Kind = Literal["half", "bfloat16", "float", "promote"]

#: What was registered, in order: the module, the function's name, and how to cast.
_REGISTERED: Final[list[tuple[Any, str, _Kind]]] = []


def half_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to FP16, and what it calls runs in FP16."""
    return _pinned(fn, low(fn))


def bfloat16_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to bfloat16, and what it calls runs in bfloat16."""
    pinned = low(fn)

    @functools.wraps(fn)
    def in_bfloat16(*args: Any, **kwargs: Any) -> Any:
        with autocast("O1,dtype=bfloat16"):
            return pinned(*args, **kwargs)

    return _pinned(fn, in_bfloat16)


def float_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to FP32, and nothing inside is cast."""
    return _pinned(fn, fp32(fn))


def promote_function(fn: Function) -> Function:
    """Decorate a function: at O1 its floating arguments are cast to the widest dtype among them."""
    return _pinned(fn, promote(fn))


def _pinned(fn: Function, pinned: Callable[..., Any]) -> Function:
    """Return what calls one where ops are cast now, and the function itself where not."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (pinned if NOW.standing is not None and NOW.standing.casts else fn)(*args, **kwargs)

    return call  # type: ignore[return-value]


_DECORATORS: Final[dict[_Kind, Callable[[Any], Any]]] = {
    "half": half_function,
    "bfloat16": bfloat16_function,
    "float": float_function,
    "promote": promote_function,
}
_RULES: Final[dict[_Kind, Callable[[Policy, str], Policy]]] = {
    "half": lambda policy, op: policy.low(op),
    "float": lambda policy, op: policy.fp32(op),
    "promote": lambda policy, op: policy.promote(op),
}


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
    _register(module, name, "half")


def register_bfloat16_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`bfloat16_function` does; see :func:`register_half_function`."""
    _register(module, name, "bfloat16")


def register_float_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`float_function` does; see :func:`register_half_function`."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Have a function cast as :func:`promote_function` does; see :func:`register_half_function`."""
    _register(module, name, "promote")


def _register(module: Any, name: str, kind: _Kind) -> None:
    where = f"amp.register_{kind}_function({getattr(module, '__name__', shown(module))}, {shown(name)})"
    if NOW.standing is not None:
        raise StateError(
            "a function is registered after amp.initialize", where=where, write="amp.register_… before amp.initialize"
        )
    if not callable(getattr(module, name, None)):
        raise PolicyError(f"there is no function {shown(name)}", where=where, why=nearest(name, dir(module)))
    _REGISTERED.append((module, name, kind))


def _op(module: Any, name: str, kind: _Kind) -> str | None:
    """Return the op that a function of torch's is, where a rule can say what to do."""
    try:
        op = resolve(name)
    except PolicyError:
        return None
    return op if kind in _RULES and getattr(module, name) in functions_of(op) else None


def with_registered(policy: Policy) -> Policy:
    """Return a policy with rules for those functions of torch's that are registered; only O1 casts at ops."""
    for module, name, kind in _REGISTERED if policy.autocast else ():
        if (op := _op(module, name, kind)) is not None:
            policy = _RULES[kind](policy, op)
    return policy


def take_over(standing: Standing) -> None:
    """Replace the other registered functions in their modules, until amp ends."""
    for module, name, kind in _REGISTERED if standing.policy.autocast else ():
        if _op(module, name, kind) is None:
            standing.replace(module, name, _DECORATORS[kind])


def forget() -> None:
    """Forget what was registered."""
    _REGISTERED.clear()
