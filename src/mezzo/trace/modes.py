"""How a pass is watched: from above torch, from below it, and at the modules' doors.

A function mode sees the calls that the model's code makes; below autocast and autograd a dispatch mode sees the
kernels. Hooks keep the function mode innermost when a module's boundary enters a region of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.cast.notes import watched
from mezzo.trace.seam import opened_by_region
from mezzo.trace.trace import Place, Trace

__all__ = ["watch_modules", "watching_backward", "watching_forward"]

_BACKWARD_FUNCTIONS: Final = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


@contextmanager
def watching_forward(trace: Trace, model: nn.Module, inputs: Any) -> Iterator[None]:
    """Watch a forward pass inside the block, which lies inside the policy's region."""
    trace.begin_forward(model, inputs)
    with watched(), Kernels(trace), Calls(trace):
        yield


@contextmanager
def watching_backward(trace: Trace) -> Iterator[None]:
    """Watch a backward pass inside the block."""
    trace.begin_backward()
    with watched(), Kernels(trace):
        yield


def watch_modules(trace: Trace, model: nn.Module) -> Callable[[], None]:
    """Hook every module, innermost part; the call that is returned hooks the outermost part.

    Between the two come the hooks that cast at a module's boundary, so that what they do counts as the module's own,
    and so that a region which they enter lies outside the mode that watches the module's calls.
    """
    modules = list(model.named_modules())
    watchers = [Watcher(trace, path) for path, _ in modules]
    for (_, module), watcher in zip(modules, watchers, strict=True):
        module.register_forward_pre_hook(watcher.push, prepend=True)
        module.register_forward_hook(watcher.pop, always_call=True)

    def around() -> None:
        for (_, module), watcher in zip(modules, watchers, strict=True):
            module.register_forward_pre_hook(watcher.enter, prepend=True)
            module.register_forward_hook(watcher.leave, always_call=True)

    return around


class Watcher:
    """The hooks of one module."""

    def __init__(self, trace: Trace, path: str) -> None:
        self.trace, self.path = trace, path
        self._entered: list[Place] = []
        self._pushed: list[Calls | None] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        place = Place(self.path)
        self._entered.append(place)
        self.trace.modules_run.add(self.path)
        self.trace.enter(place)

    def push(self, module: nn.Module, args: Any) -> None:
        """Watch from the inside of a region that the module's boundary has just entered."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        mode = None if stack and isinstance(stack[-1], Calls) else Calls(self.trace)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]
        self._pushed.append(mode)

    def pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pushed and (mode := self._pushed.pop()) is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self.trace.leave(self._entered.pop())


class Calls(TorchFunctionMode):
    """See every torch function that the model's code calls, and inside those that a region opens."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        trace = self.trace
        if trace.is_in_call():
            return func(*args, **kwargs)
        if func in _BACKWARD_FUNCTIONS:
            with trace.inner_backward():
                return func(*args, **kwargs)
        if not trace.is_backward() and (opened := opened_by_region(func, types, args, kwargs)) is not None:
            with self:
                return opened(*args, **kwargs)
        place = trace.begin(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            trace.leave(place)
        trace.finish(place, out)
        return out


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See every kernel, in the dtypes in which it really runs."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.trace.kernel(func, args, kwargs, out)
        return out
