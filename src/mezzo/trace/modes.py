"""The modes and hooks that watch a pass: above torch, below it, and at the modules' boundaries.

A function mode sees the calls that the model's code makes; below autocast and autograd a dispatch mode sees the
kernels. Hooks keep the function mode innermost when a module's boundary enters a region of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mezzo.cast.notes import watched
from mezzo.compiling import compiled_inside_alone
from mezzo.dispatch import TorchDispatchMode, dispatch_modes, function_modes
from mezzo.trace.function_calls import Location, Locator, opened_by_region
from mezzo.trace.measure import numbered

_BACKWARD_FUNCTIONS: Final = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def is_watched() -> bool:
    """Whether the current code is watched."""
    return any(isinstance(mode, KernelMode) for mode in dispatch_modes())


#: How any module is hooked: scripted ones refuse by their own methods, and are called from Python as others are.
before_forward: Final = nn.Module.register_forward_pre_hook
after_forward: Final = nn.Module.register_forward_hook


class _ModuleHooks:
    """The hooks of one module.

    Args:
        where: Tracks the location of the pass.
        mode: Makes the function mode that records calls.
        path: The module's path.
    """

    def __init__(self, where: Locator, mode: Callable[[], CallMode], path: str) -> None:
        self._where, self._mode, self._path = where, mode, path
        self._entered: list[Location] = []
        self._pushed: list[CallMode | None] = []

    def on(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook a module, on both sides of the hooks by which a prepared module casts.

        The outer hooks enter and leave the module's location; between the inner ones its calls are recorded.
        """
        return [
            before_forward(module, self._enter, prepend=True),
            after_forward(module, self._leave, always_call=True),
            before_forward(module, self._push),
            after_forward(module, self._pop, prepend=True, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._entered.append(Location(self._path))
        self._where.modules_run.add(self._path)
        self._where.enter(self._entered[-1])

    def _push(self, module: nn.Module, args: Any) -> None:
        stack = function_modes()
        mode = None if stack and isinstance(stack[-1], CallMode) else self._mode()
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]
        self._pushed.append(mode)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pushed and (mode := self._pushed.pop()) is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self._where.leave(self._entered.pop())


@contextmanager
def hooked(where: Locator, mode: Callable[[], CallMode], models: Sequence[nn.Module]) -> Iterator[None]:
    """Hook every module of prepared models inside the block, so that the locator knows which module runs."""
    with ExitStack() as hooks:
        for prefix, model in numbered(models):
            for path, module in model.named_modules():
                for handle in _ModuleHooks(where, mode, f"{prefix}{path}".rstrip(".")).on(module):
                    hooks.callback(handle.remove)
        yield


class CallMode(TorchFunctionMode):
    """Records every torch function that the model's code calls, and those inside functions that a region opens."""

    def __init__(self, where: Locator, begin: Callable[..., Location], finish: Callable[[Location, Any], None]) -> None:
        super().__init__()
        self._where, self._begin, self._finish = where, begin, finish

    @compiled_inside_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = self._where
        if where.now.call is not None:  # a call that a function makes is a part of that function's
            return func(*args, **kwargs)
        if func in _BACKWARD_FUNCTIONS:
            with where.inner_backward():
                return func(*args, **kwargs)
        if not where.is_backward and (opened := opened_by_region(func, types, args, kwargs)) is not None:
            with self:
                return opened(*args, **kwargs)
        location = self._begin(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            where.leave(location)
        self._finish(location, out)
        return out


class KernelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees kernels, while the casting room writes notes of what it is doing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        self._watched.append(watched())
        self._watched[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._watched.pop().__exit__(None, None, None)


class KernelMode(KernelWatch):  # type: ignore[no-untyped-call]
    """Records every kernel, in the dtypes in which the device runs it."""

    def __init__(self, before: Callable[..., Any], ran: Callable[..., None]) -> None:
        super().__init__()
        self._before, self._ran = before, ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # without autograd, composite functions arrive here undecomposed
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        before = self._before(func, args, kwargs)
        out = func(*args, **kwargs)
        self._ran(func, args, kwargs, out, before)
        return out
