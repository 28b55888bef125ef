"""Functions that a program has cast its own way, by decorators or by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import torch

from mezzo.cast.casts import cast_floating, widest
from mezzo.cast.device import default_device_types
from mezzo.cast.pins import fp32, low
from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, StateError, nearest, shown
from mezzo.patches import patch
from mezzo.policy import Policy
from mezzo.policy.ops import functions, resolve
from mezzo.tensors import CASTABLE, tensors

Function = TypeVar("Function", bound=Callable[..., Any])


def half_function(fn: Function) -> Function:
    """Decorate a function: in models at O1 its floating arguments are cast to FP16, and what it calls runs in FP16."""
    return _where_cast(fn, low(fn))


def bfloat16_function(fn: Function) -> Function:
    """Decorate a function: as :func:`half_function`, in bfloat16."""
    return _where_cast(fn, autocast("O1,dtype=bfloat16")(low(fn)))


def float_function(fn: Function) -> Function:
    """Decorate a function: in models at O1 its floating arguments are cast to FP32, and nothing inside is cast."""
    return _where_cast(fn, fp32(fn))


def promote_function(fn: Function) -> Function:
    """Decorate a function: in models at O1 its floating arguments are cast to the widest dtype among them."""

    @functools.wraps(fn)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        dtype = widest(tensor for tensor in tensors((args, kwargs)) if tensor.dtype in CASTABLE)
        args, kwargs = (args, kwargs) if dtype is None else cast_floating((args, kwargs), dtype)
        return fn(*args, **kwargs)

    return _where_cast(fn, promoted)


def _where_cast(fn: Function, pinned: Callable[..., Any]) -> Function:
    """Return a function that is pinned where ops are cast, and left alone elsewhere."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (pinned if any(map(torch.is_autocast_enabled, default_device_types())) else fn)(*args, **kwargs)

    return call  # type: ignore[return-value]


def register_half_function(module: Any, name: str) -> None:
    """Register a function to cast as :func:`half_function` does, from ``initialize`` at O1 to ``deinitialize``.

    One of torch's becomes a rule of the policy, which reaches its other spellings too (``torch.softmax`` and
    ``x.softmax``). Any other one is replaced in its module meanwhile.

    Args:
        module: Where the function is: a module or a class.
        name: Its name there.

    Raises:
        PolicyError: There is none.
        StateError: Amp is initialised already.
    """
    REGISTERED.add(module, name, half_function)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Register a function to cast as :func:`bfloat16_function` does; see :func:`register_half_function`."""
    REGISTERED.add(module, name, bfloat16_function)


def register_float_function(module: Any, name: str) -> None:
    """Register a function to cast as :func:`float_function` does; see :func:`register_half_function`."""
    REGISTERED.add(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Register a function to cast as :func:`promote_function` does; see :func:`register_half_function`."""
    REGISTERED.add(module, name, promote_function)


#: What a rule of a policy can say of a function of torch's, by the decorator that says it of any other.
_RULES: Final[dict[Callable[[Any], Any], Callable[[Policy, str], Policy]]] = {
    half_function: Policy.low,
    float_function: Policy.fp32,
    promote_function: Policy.promote,
}


class Registered:
    """The functions that were registered by name, each with its decorator, until amp ends."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, Callable[[Any], Any]]] = []
        self._are_in_force = False

    def add(self, module: Any, name: str, decorator: Callable[[Any], Any]) -> None:
        """Add a function; see :func:`register_half_function`."""
        call = f"amp.register_{decorator.__name__}"
        if self._are_in_force:
            raise StateError(f"{call} after amp.initialize", write=f"{call}(module, name), then amp.initialize(…)")
        if not callable(getattr(module, name, None)):
            where = f"{call}({getattr(module, '__name__', shown(module))}, {shown(name)})"
            raise PolicyError(f"there is no function {shown(name)}", where=where, why=nearest(name, dir(module)))
        self._all.append((module, name, decorator))

    def with_rules(self, policy: Policy) -> Policy:
        """Return a policy with rules for those functions of torch's that a rule can reach."""
        for module, name, decorator in self._all:
            if decorator in _RULES and (op := _op(module, name)) is not None:
                policy = _RULES[decorator](policy, op)
        return policy

    def replace_others(self, undo: ExitStack) -> None:
        """Replace in their modules those that no rule reaches.

        Args:
            undo: Puts everything back.
        """
        for module, name, decorator in self._all:
            if decorator not in _RULES or _op(module, name) is None:
                decorated = decorator(getattr(module, name))
                is_static = isinstance(vars(module).get(name), staticmethod)
                undo.callback(patch(module, name, staticmethod(decorated) if is_static else decorated))

    def begin(self) -> None:
        """Close the registry: functions that come later are refused."""
        self._are_in_force = True

    def forget(self) -> None:
        """Begin anew: amp has ended."""
        self._all.clear()
        self._are_in_force = False


REGISTERED: Final = Registered()


def _op(module: Any, name: str) -> str | None:
    """Return the op that a function of torch's is; ``None`` for any other."""
    try:
        op = resolve(name)
    except PolicyError:
        return None
    return op if getattr(module, name) in functions(op) else None
