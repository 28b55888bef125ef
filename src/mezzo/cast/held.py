"""A region that is entered once and left much later: for call styles in which casting holds from a call on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from mezzo.cast.emulate import with_autocast
from mezzo.cast.model.hooks import OwnHook
from mezzo.cast.region import autocast
from mezzo.cast.weight_casts import WeightCasts
from mezzo.errors import StateError

__all__ = ["HeldRegion"]


class HeldRegion:
    """Enter a region for this thread, until :meth:`leave`.

    A region's casts of weights end with it, and this one does not end. So each call of a model begins as a region does:
    without the casts of calls before, but those that a session keeps for its window. A weight that was written in
    between, through ``.data`` too, is seen.

    Args:
        region: The region; nothing of it is entered yet.
        models: The models that are called in it.

    Raises:
        UnsupportedError: As entering the region.
    """

    def __init__(self, region: autocast, models: Iterable[nn.Module]) -> None:
        self._thread = threading.get_ident()
        self._region = region
        self._hooks: list[RemovableHandle] = []
        around = _modes()
        region.__enter__()
        self._modes = [mode for mode in _modes() if mode not in around]
        begin = OwnHook(partial(_begin, region.region.casts))
        for model in models:
            self._hooks.append(model.register_forward_pre_hook(begin, prepend=True))

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that it holds for."""
        return threading.get_ident() == self._thread

    @property
    def casts(self) -> bool:
        """Whether ops are cast now: in its thread, and not where that is off."""
        return self.is_here and any(map(torch.is_autocast_enabled, self._region.device_types))

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Cast nothing inside the block: for backward passes and optimizers' steps, which have their own precision."""
        return with_autocast(self._region.device_types if self.is_here else (), False)

    def on(self) -> contextlib.AbstractContextManager[None]:
        """Cast again, inside :meth:`off`: for a function of the user's that computes a loss there."""
        return with_autocast(self._region.device_types if self.is_here else (), True)

    def require_here(self) -> None:
        """Refuse another thread than the one that it holds for.

        Raises:
            StateError: With both threads.
        """
        if not self.is_here:
            raise StateError(
                "casts hold for a thread, and only this one can end them",
                where=f"begun in thread {self._thread}, ended in thread {threading.get_ident()}",
                why="torch keeps what is cast for each thread apart",
                write="the call that ends them in the thread of the one that has begun them",
            )

    def leave(self) -> None:
        """Leave the region; modes that were entered since, and are still active, stay so.

        Raises:
            StateError: In another thread than the one that it holds for.
        """
        self.require_here()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        above = list[Any]()
        while self._modes and (modes := _modes()) and modes[-1] not in self._modes:
            above.append(torch._C._pop_torch_function_stack())
        try:
            self._region.__exit__(None, None, None)
        finally:
            for mode in reversed(above):
                torch._C._push_on_torch_function_stack(mode)


def _begin(casts: WeightCasts | None, *_: Any) -> None:
    """Begin a call of a model: a hook."""
    if casts is not None and not torch.compiler.is_compiling():
        casts.begin()
        torch.clear_autocast_cache()


def _modes() -> list[TorchFunctionMode]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
