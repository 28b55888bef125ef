"""Every module of a converted model may be the one that is called from outside: casting at that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from mezzo.cast.model.boundary import Boundary
from mezzo.cast.model.entrance import Entrance, runs_backward

__all__ = ["Door", "doors_of"]


class Door:
    """The hooks of a submodule: where a call comes from outside the model they are what the model's own are.

    ``model.generate(…)`` or ``model.encoder(x)`` casts inputs and outputs then as ``model(x)`` does; a call from inside
    passes. The second hook is added when it is first needed.

    **Cost**: for each call of the submodule one Python function, 1 to 2 µs.
    """

    def __init__(self, entrance: Entrance, make: Callable[[], Boundary]) -> None:
        self.entrances = [entrance]  # several where models share the module
        self._make = make
        self._boundary: Boundary | None = None
        self._hooks: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        """Hook the module, outside all hooks that it has."""
        self._hooks.append(module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True))

    def detach(self, entrance: Entrance) -> None:
        """Close the door for one model, closed already or not; take the hooks off with the last."""
        if entrance in self.entrances:
            self.entrances.remove(entrance)
        if not self.entrances:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Cast what comes from outside: a forward pre-hook."""
        inside = False
        for entrance in self.entrances:
            inside = inside or entrance.is_open()
        if inside:
            if self._boundary is not None:  # it may be this module that calls itself
                self.entrances[0].enter(self)
            return None
        if runs_backward():
            return None
        if self._boundary is None:
            self.install(module)
        assert self._boundary is not None
        self.entrances[0].enter(self)
        return self._boundary.enter(module, args, kwargs)

    @_disable_dynamo
    def install(self, module: nn.Module) -> None:
        """Plan the region that is entered here, and add the hook that leaves it."""
        self._boundary = self._make()
        self._hooks.append(module.register_forward_hook(self.exit, always_call=True))

    def exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast what goes outside: a forward hook."""
        if self._boundary is None or not self.entrances[0].leave(self):
            return None
        return self._boundary.exit(module, args, output)


def doors_of(module: nn.Module) -> Iterator[Door]:
    """Yield the door of a module that another model, which shares it, has put there."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(owner := getattr(hook, "__self__", None), Door):
            yield owner
