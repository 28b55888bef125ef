"""Functions that are cast in a way of their own while amp casts ops: decorated, or known by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias, TypeVar

from mezzo.cast.pins import fp32, low, promote
from mezzo.cast.region import autocast
from mezzo.errors import PolicyError, nearest, shown
from mezzo.policy import Policy
from mezzo.policy.ops import functions, resolve

__all__ = ["ByName", "Pin"]

Function = TypeVar("Function", bound=Callable[..., Any])
Pin: TypeAlias = Literal["low", "bfloat16", "fp32", "promote"]


class ByName:
    """Cast functions while ops are cast, and leave them alone where not.

    Args:
        casts: Says whether ops are cast now.
    """

    def __init__(self, casts: Callable[[], bool]) -> None:
        self._casts = casts
        self._registered: list[tuple[Any, str, Pin]] = []

    def pinned(self, fn: Function, pin: Pin) -> Function:
        """Return a function that is pinned while ops are cast.

        Args:
            fn: The function.
            pin: To what: ``"low"`` is the dtype of the region, ``"promote"`` the widest of its arguments.
        """
        casts, inner = self._casts, _PINS[pin](fn)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (inner if casts() else fn)(*args, **kwargs)

        return call  # type: ignore[return-value]

    def register(self, place: Any, name: str, pin: Pin, call: str) -> None:
        """Take note of a function.

        Args:
            place: The module or class that has it.
            name: Its name there.
            pin: To what.
            call: The user's call, for errors.

        Raises:
            PolicyError: There is no such function.
        """
        if not callable(getattr(place, name, None)):
            where = f"{call}({getattr(place, '__name__', shown(place))}, {shown(name)})"
            raise PolicyError(f"there is no function {shown(name)}", where=where, why=nearest(name, dir(place)))
        self._registered.append((place, name, pin))

    def rules(self, policy: Policy) -> Policy:
        """Return a policy with rules for those functions of torch's that a rule can reach."""
        for place, name, pin in self._registered:
            if pin != "bfloat16" and (op := _op(place, name)) is not None:
                policy = {"low": policy.low, "fp32": policy.fp32, "promote": policy.promote}[pin](op)
        return policy

    def others(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Yield the functions that no rule reaches: where they are, their names, and what pins them."""
        for place, name, pin in self._registered:
            if pin == "bfloat16" or _op(place, name) is None:
                yield place, name, functools.partial(self.pinned, pin=pin)

    def clear(self) -> None:
        """Forget what was registered."""
        self._registered.clear()


def _in_bfloat16(fn: Callable[..., Any]) -> Callable[..., Any]:
    pinned = low(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast("O1,dtype=bfloat16"):
            return pinned(*args, **kwargs)

    return call


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
