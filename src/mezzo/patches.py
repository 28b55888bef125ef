"""Patching names of torch, of models and of programs for a while, and restoring them.

All patches are made and undone here: those of ``attach``, ``mezzo run`` and ``compat.apex``, which a user asks for by
name.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Final

from mezzo.backward import engine_through
from mezzo.compiling import never_compiled
from mezzo.interrupts import Members


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Bind a name to another value, and return a function that restores the former one.

    It restores nothing where other code has bound the name again since.

    Args:
        owner: A module, a class or an instance that has the name, or inherits it.
        name: The name.
        value: The new value.
    """
    has = name in vars(owner)
    before = vars(owner).get(name)  # as it stands: a static method is not what getattr returns
    _bind(owner, name, value)

    def put_back() -> None:
        if vars(owner).get(name) is value:
            _bind(owner, name, before) if has else delattr(owner, name)

    return put_back


def _bind(owner: Any, name: str, value: Any) -> None:
    names = vars(owner)
    if isinstance(names, dict):  # past what an instance's class does about attributes
        names[name] = value
    else:
        setattr(owner, name, value)


#: Held while functions are bound and restored. It is re-entrant: a finalizer may restore another one meanwhile.
_BINDING: Final = threading.RLock()


class Binding:
    """A function of torch's that goes through sessions. It is bound once, in whatever order they begin and end.

    Args:
        owner: The class or module that has it.
        name: Its name there.
    """

    #: That of autograd's engine: each pass of a session may bind it, and compiled code asks whether it is the same.
    _engines: ClassVar[Binding | None] = None

    def __init__(self, owner: Any, name: str) -> None:
        self._plain = stands = getattr(owner, name)
        self._is_inherited = name not in vars(owner)
        plain = stands if callable(stands) else stands.run_backward  # autograd's engine is called by its methods
        self._through: Members[tuple[weakref.ref[Any], Callable[..., Any]]] = Members()

        @never_compiled  # which would trace what decides on the host
        @functools.wraps(plain)
        def bound(*args: Any, **kwargs: Any) -> Any:
            call = plain
            for here, through in self._through.now:  # a session may be dropped meanwhile
                if (amp := here()) is not None and not amp.is_closed:
                    call = functools.partial(through, amp, call)
            return call(*args, **kwargs)

        self.bound = bound
        if not callable(stands):
            self.bound, Binding._engines = engine_through(stands, bound), self
        vars(self.bound)["binding"] = self
        setattr(owner, name, self.bound)

    @classmethod
    def of(cls, owner: Any, name: str) -> Binding:
        """Return the binding of a name that is bound now, or a new one, also over what other code has bound since."""
        now = getattr(owner, name)
        for binding in (getattr(now, "binding", None), cls._engines):
            if isinstance(binding, cls) and now in (binding.bound, binding._plain):
                return binding
        return cls(owner, name)

    @classmethod
    def join(cls, owner: Any, name: str, here: weakref.ref[Any], call: Callable[..., Any]) -> Callable[[], None]:
        """Route a function through ``call(session, function)``; return a function that ends it.

        Sessions of several threads may begin and end at the same time.
        """
        joined = here, call
        with _BINDING:
            binding = cls.of(owner, name)
            binding._through.add(joined)
            # A session that was dropped may have ended since: collecting garbage runs in any line.
            if getattr(owner, name) is binding._plain:
                setattr(owner, name, binding.bound)

        def end() -> None:
            with _BINDING:
                binding._through.remove(joined)
                if not binding._through.now and vars(owner).get(name) is binding.bound:
                    delattr(owner, name) if binding._is_inherited else setattr(owner, name, binding._plain)

        return end
