"""Names of torch's, of models and of programs that are bound to something else for a while, and put back.

The one place that puts anything back: what a user asks for by name (``attach``, ``mezzo run``, ``compat.apex``) binds
names here, and ends by calling what it was given.
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


def patch(place: Any, name: str, value: Any) -> Callable[[], None]:
    """Bind a name, and return what puts back what was bound to it, unless others have bound it again since.

    Args:
        place: A module, a class or an instance that has the name, or inherits it.
        name: The name.
        value: What it is from now on.
    """
    has = name in vars(place)
    before = vars(place).get(name)  # as it stands: a static method is not what getattr returns
    _bind(place, name, value)

    def put_back() -> None:
        if vars(place).get(name) is value:
            _bind(place, name, before) if has else delattr(place, name)

    return put_back


def _bind(place: Any, name: str, value: Any) -> None:
    names = vars(place)
    if isinstance(names, dict):  # past what an instance's class does about attributes
        names[name] = value
    else:
        setattr(place, name, value)


#: Held where functions are bound and given back. Garbage that is collected meanwhile gives others back.
_BINDING: Final = threading.RLock()


class Binding:
    """A function of torch's that goes through sessions. It is bound once, in whatever order they begin and end.

    Args:
        place: The class or module that has it.
        name: Its name there.
    """

    #: That of autograd's engine: each pass of a session may bind it, and compiled code asks whether it is the same.
    _engines: ClassVar[Binding | None] = None

    def __init__(self, place: Any, name: str) -> None:
        self._plain = stands = getattr(place, name)
        self._is_inherited = name not in vars(place)
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
        setattr(place, name, self.bound)

    @classmethod
    def of(cls, place: Any, name: str) -> Binding:
        """Return the one that stands there, or a new one: over what others have bound since, too."""
        now = getattr(place, name)
        for found in (getattr(now, "binding", None), cls._engines):
            if isinstance(found, cls) and now in (found.bound, found._plain):
                return found
        return cls(place, name)

    @classmethod
    def join(cls, place: Any, name: str, here: weakref.ref[Any], call: Callable[..., Any]) -> Callable[[], None]:
        """Have a function go through a call that is given the session and the function; return what ends it.

        Sessions of several threads may begin and end at the same time.
        """
        joined = here, call
        with _BINDING:
            binding = cls.of(place, name)
            binding._through.add(joined)
            # A session that was dropped may have ended since: collecting garbage runs in any line.
            if getattr(place, name) is binding._plain:
                setattr(place, name, binding.bound)

        def end() -> None:
            with _BINDING:
                binding._through.remove(joined)
                if not binding._through.now and vars(place).get(name) is binding.bound:
                    delattr(place, name) if binding._is_inherited else setattr(place, name, binding._plain)

        return end
