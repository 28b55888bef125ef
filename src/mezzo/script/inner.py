"""A region around what a script calls of a model's inside: its encoder, or what a method of the model's own calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mezzo.cast.nested import cast_floating

__all__ = ["InnerCalls"]


class InnerCalls:
    """Run modules inside of models in a region, and return FP32, where a script calls them by themselves.

    A model's own call is left to the model. So is what ``torch.compile`` has made of one.

    Args:
        models: The models.
        region: Returns the region for one call.
    """

    def __init__(self, models: Iterable[nn.Module], region: Callable[[], AbstractContextManager[Any]]) -> None:
        self._region, self._here = region, _Here()
        self._handles: list[RemovableHandle] = []
        self._models = [each.module if isinstance(each, DistributedDataParallel) else each for each in models]
        for module in dict.fromkeys(each for model in self._models for each in (model, *_inside(model))):
            self._handles += [
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def leave(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_models_own = any(module is model for model in self._models)
        region = None if self._here.regions or is_models_own else self._region()
        if region is not None:
            region.__enter__()
        self._here.regions.append(region)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._here.regions or (region := self._here.regions.pop()) is None:
            return None
        region.__exit__(None, None, None)
        return cast_floating(output, torch.float32)


class _Here(threading.local):
    def __init__(self) -> None:
        self.regions: list[AbstractContextManager[Any] | None] = []  # one for each module that runs in this thread


def _inside(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside of a model, but not those inside of compiled ones."""
    if "_orig_mod" in model._modules:
        return
    for child in model.children():
        yield child
        yield from _inside(child)
