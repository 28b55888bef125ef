"""Calls of models from outside, each in its policy's region; and functions of torch's that go through sessions."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo.backward import engine_through, runs_backward
from mezzo.cast import autocast
from mezzo.cast.mode import cast_floating
from mezzo.cast.model.calls import GivesOut, Within
from mezzo.compiling import compiled_inside, never_compiled
from mezzo.hooks import owner_of
from mezzo.policy import Policy
from mezzo.tensors import tensors

K = TypeVar("K")  # Python 3.11 has no `def f[K]`


class Calls:
    """Run each method of models, and of their parts that are called by themselves, in a region, until :meth:`close`.

    A call inside of another one is part of that. What comes out of the outer one is FP32, or the policy's
    ``output_dtype``; parameters that a method returns stay what they are. A checkpoint recomputes a part after the
    call around it has ended: such a call is part of another one if the last one in a forward pass was.

    Args:
        models: The models.
        policy: Their policy.
        region: Returns its region.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        policy: Policy,
        region: Callable[[], autocast],
    ) -> None:
        self._region = region
        self._gives_out = policy.output_dtype or torch.float32
        self._autocasts = policy.casts
        self._here, self._is_over = threading.local(), False
        self._parts = set[Callable[..., Any]]()  # methods whose last call in a forward pass was part of another one
        self._undo = ExitStack()
        for model in models:
            root = model.module if isinstance(model, DistributedDataParallel) else model
            for module in root.modules():
                if isinstance(module, nn.ModuleList | nn.ModuleDict):
                    continue  # which is no function
                is_torchs = type(module).__module__.startswith("torch.")
                for name in ["forward"] if is_torchs else _methods(type(module)):
                    call = self._around(getattr(module, name), module, is_root=module is root)
                    self._undo.callback(rebound(vars(module), name, types.MethodType(call, module)))

    def _around(self, plain: Callable[..., Any], module: nn.Module, *, is_root: bool) -> Callable[..., Any]:
        within, last = _owner(module._forward_pre_hooks, Within), _owner(module._forward_hooks, GivesOut)

        def root(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return self._call(plain, args, kwargs, None, last)
            # For parts that Python calls where the graph breaks (torch 2.13 resumes in no `try`, and leaves all to it).
            self._here.inside = True
            try:
                with self._region():
                    output = plain(*args, **kwargs)
            finally:
                self._here.inside = False
            return output if self._gives_out is None else cast_floating(output, self._gives_out)

        @compiled_inside
        def part(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if not self._autocasts or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                    return plain(*args, **kwargs)
                _leave_graph()  # called from outside, or where the model has autocast switched off: Python knows
            return self._call(plain, args, kwargs, within, last)

        call = functools.wraps(getattr(plain, "__func__", plain))(root if is_root else part)
        call.is_of_mezzo = True  # type: ignore[attr-defined]
        return call

    @compiled_inside
    def _call(
        self, plain: Callable[..., Any], args: Any, kwargs: Any, within: Within | None, last: GivesOut | None
    ) -> Any:
        """Call a method, in the region where it is called from outside; a part that has rules in its own one."""
        if self._is_over or self._is_part(plain):
            return plain(*args, **kwargs)
        self._here.inside = True
        try:
            with self._region(), autocast.of(within.region()) if within and within.path else nullcontext():
                output = plain(*args, **kwargs)
        finally:
            self._here.inside = False
        if self._gives_out is None or any(isinstance(each, nn.Parameter) for each in tensors(output)):
            return output
        return cast_floating(output, self._gives_out) if last is None else last.widen(output)

    def _is_part(self, plain: Callable[..., Any]) -> bool:
        """Whether a call of a method is part of another one, or was where it is recomputed."""
        inside = getattr(self._here, "inside", False)
        if runs_backward():
            return inside or plain in self._parts
        (self._parts.add if inside else self._parts.discard)(plain)
        return inside

    def close(self) -> None:
        """Give the methods back; those that others hold meanwhile do nothing of their own."""
        self._is_over = True
        self._undo.close()


def _owner(hooks: Mapping[int, Any], kind: type[K]) -> K | None:
    """Return what of some kind has put one of a module's hooks there."""
    return next((owner for owner in map(owner_of, hooks.values()) if isinstance(owner, kind)), None)


@never_compiled
def _leave_graph() -> None:
    """Have the call that is traced run in Python."""


def rebound(names: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    """Bind a name, and return what puts back what it was, unless others have bound it again since.

    Args:
        names: ``vars()`` of what has the name.
        name: The name.
        value: What it is from now on.
    """
    has, before = name in names, names.get(name)
    names[name] = value

    def put_back() -> None:
        if names.get(name) is value:
            del names[name]
            if has:
                names[name] = before

    return put_back


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
        self._plain = stands = vars(place)[name]
        plain = stands if callable(stands) else stands.run_backward  # autograd's engine is called by its methods
        self._through: list[tuple[weakref.ref[Any], Callable[..., Any]]] = []  # changed by one operation at a time

        @never_compiled  # which would trace what decides on the host
        @functools.wraps(plain)
        def bound(*args: Any, **kwargs: Any) -> Any:
            call = plain
            for here, through in tuple(self._through):  # a session may be dropped meanwhile
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
        now = vars(place)[name]
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
            binding._through.append(joined)
            # A session that was dropped may have ended since: collecting garbage runs in any line.
            if vars(place)[name] is binding._plain:
                setattr(place, name, binding.bound)

        def end() -> None:
            with _BINDING:
                binding._through.remove(joined)
                if not binding._through and vars(place).get(name) is binding.bound:
                    setattr(place, name, binding._plain)

        return end


def _methods(kind: type) -> list[str]:
    """Return the public methods of a module's class that are none of ``nn.Module``'s."""
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if each is nn.Module:
            break
        for name, value in vars(each).items():
            found.setdefault(name, value)
    return [
        name
        for name, value in found.items()
        if isinstance(value, types.FunctionType)
        and not name.startswith("_")
        and (name == "forward" or not hasattr(nn.Module, name))
        and not inspect.isgeneratorfunction(value)
        and not inspect.iscoroutinefunction(value)
    ]
