"""How a pass is watched: from above torch, from below it, and at the modules' doors.

A function mode sees the calls that the model's code makes; below autocast and autograd a dispatch mode sees the
kernels. Hooks keep the function mode innermost when a module's boundary enters a region of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from mezzo.cast.notes import watched
from mezzo.compiling import compiled_inside_alone
from mezzo.dispatch import TorchDispatchMode, dispatch_modes, function_modes
from mezzo.tensors import LOW, dtype_name
from mezzo.trace.function_calls import Place, Where, casting, doing, opened_by_region
from mezzo.trace.kernels import flops
from mezzo.trace.measure import numbered

_BACKWARD_FUNCTIONS: Final = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class Observer(Protocol):
    """What is told of a pass, as it happens."""

    where: Where

    def begin(self, function: Any, args: Any, kwargs: Any) -> Place:
        """Take note of a call, and enter it."""

    def finish(self, place: Place, out: Any) -> None:
        """Take note of what a call returns, once it is left."""

    def before(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Look at what a kernel is about to read."""

    def kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any, before: Any) -> None:
        """Take note of a kernel, with what :meth:`before` returned."""


@contextmanager
def watching(observer: Observer, *, backward: bool = False) -> Iterator[None]:
    """Watch a pass inside the block; a forward pass lies inside the policy's region."""
    observer.where.is_backward = backward
    with KernelMode(observer):
        if backward:
            yield
        else:
            with CallMode(observer):
                yield


def is_watched() -> bool:
    """Whether the current code is watched."""
    return any(isinstance(mode, KernelMode) for mode in dispatch_modes())


#: How any module is hooked: scripted ones refuse by their own methods, and are called from Python as others are.
before_forward: Final = nn.Module.register_forward_pre_hook
after_forward: Final = nn.Module.register_forward_hook


class _ModuleHooks:
    """The hooks of one module.

    Args:
        observer: What is told.
        path: The module's path.
    """

    def __init__(self, observer: Observer, path: str) -> None:
        self._observer, self._path = observer, path
        self._entered: list[Place] = []
        self._pushed: list[CallMode | None] = []

    def on(self, module: nn.Module) -> list[RemovableHandle]:
        """Hook a module: outside of the hooks by which a prepared one casts it is told that the module runs.

        Inside of them the module's calls are watched.
        """
        return [
            before_forward(module, self._enter, prepend=True),
            after_forward(module, self._leave, always_call=True),
            before_forward(module, self._push),
            after_forward(module, self._pop, prepend=True, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._entered.append(Place(self._path))
        self._observer.where.modules_run.add(self._path)
        self._observer.where.enter(self._entered[-1])

    def _push(self, module: nn.Module, args: Any) -> None:
        stack = function_modes()
        mode = None if stack and isinstance(stack[-1], CallMode) else CallMode(self._observer)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]
        self._pushed.append(mode)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pushed and (mode := self._pushed.pop()) is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            self._observer.where.leave(self._entered.pop())


@contextmanager
def hooked(observer: Observer, models: Sequence[nn.Module]) -> Iterator[None]:
    """Hook every module of prepared models inside the block, so that it is known which one runs."""
    with ExitStack() as hooks:
        for prefix, model in numbered(models):
            for path, module in model.named_modules():
                for handle in _ModuleHooks(observer, f"{prefix}{path}".rstrip(".")).on(module):
                    hooks.callback(handle.remove)
        yield


class CallMode(TorchFunctionMode):
    """See every torch function that the model's code calls, and inside those that a region opens."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    @compiled_inside_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        where = self._observer.where
        if where.now.call is not None:  # what a function calls is part of it
            return func(*args, **kwargs)
        if func in _BACKWARD_FUNCTIONS:
            with where.inner_backward():
                return func(*args, **kwargs)
        if not where.is_backward and (opened := opened_by_region(func, types, args, kwargs)) is not None:
            with self:
                return opened(*args, **kwargs)
        place = self._observer.begin(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            where.leave(place)
        self._observer.finish(place, out)
        return out


class KernelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is told of kernels inside its block, while the casting room says what it is doing."""

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
    """See every kernel, in the dtypes in which it really runs."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # autograd, which takes functions apart, is not above
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        before = self._observer.before(func, args, kwargs)
        out = func(*args, **kwargs)
        self._observer.kernel(func, args, kwargs, out, before)
        return out


class ShallowMode(KernelWatch):  # type: ignore[no-untyped-call]
    """See every kernel once it has run, and nothing else of a pass: it is not watched."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._observer.before(func, args, kwargs)
        out = func(*args, **kwargs)
        self._observer.kernel(func, args, kwargs, out, before)
        return out


# Which share of the work of matrix products ran low: counted at the kernels, forward and backward.


class Products(KernelWatch):  # type: ignore[no-untyped-call]
    """Count the operations of products by the precision that their kernels read, inside its block.

    Args:
        *low: The formats that count as low; float16 and bfloat16 when omitted.
        is_apart: Whether what runs now is not to be counted.

    Attributes:
        flops: The operations by the name of the format, and under ``"emulated"`` those that were computed in FP32 from
            rounded operands.
    """

    def __init__(self, *low: torch.dtype, is_apart: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._low, self._is_apart = low or LOW, is_apart
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not casting() and (counted := flops(func, args, kwargs, out)) is not None and not self._is_apart():
            self.flops["emulated" if doing() == "emulation" else dtype_name(counted[1])] += counted[0]
        return out

    @property
    def low_share(self) -> float:
        """The share of the low formats, emulation in it included; 0 where there was no product."""
        low = sum(self.flops[dtype_name(dtype)] for dtype in self._low) + self.flops["emulated"]
        return low / max(1, self.flops.total())
