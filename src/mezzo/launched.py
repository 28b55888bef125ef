"""Triton source to kernels, and their launches. Triton is imported when the first kernel is made."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch


@cache
def has_triton() -> bool:
    """Whether Triton is there, for NVIDIA's devices: its options for arithmetic as in torch's are theirs."""
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def jitted(source: str, name: str) -> Any:
    """Return a kernel of some source, for Triton's compiler, or for its interpreter if ``TRITON_INTERPRET`` is set."""
    triton: Any = importlib.import_module("triton")
    return _scope(source, bool(triton.knobs.runtime.interpret))[name]


class Launch:
    """A kernel for arguments of the same types each time: what Triton finds out of them, it finds out once.

    Triton binds and describes all arguments anew for each launch, which takes longer than the launch. Here neither the
    value nor the alignment of an argument changes the code (``do_not_specialize``).

    Args:
        kernel: Of :func:`jitted`.
        options: What it is compiled with.
        constants: Its last arguments, which are known when it is compiled, in order.
    """

    def __init__(self, kernel: Any, options: Mapping[str, Any], **constants: Any) -> None:
        self.kernel, self.options, self.constants = kernel, options, constants
        self._compiled: dict[torch.device, Any] = {}

    def prepare(self, device: torch.device, *arguments: Any) -> None:
        """Compile and load it for a device, and launch nothing. Triton keeps what is compiled for the first launch.

        Args:
            device: Where it is to be launched.
            arguments: As it is launched with, or for a tensor its dtype alone.

        Raises:
            Exception: Whatever Triton fails with. Its interpreter compiles nothing: it fails while it runs.
        """
        with on(device):
            compiled = self.kernel.warmup(*arguments, grid=(1,), **self.constants, **self.options)
            if compiled is not None:
                _ = compiled.run  # Triton loads a kernel when it is first asked how to run it

    def __call__(self, programs: int, device: torch.device, *arguments: Any) -> None:
        """Launch it on a device, which is the current one."""
        if (compiled := self._compiled.get(device)) is not None:
            compiled[programs, 1, 1](*arguments, *self.constants.values())
            return
        compiled = self.kernel[(programs,)](*arguments, **self.constants, **self.options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[device] = compiled


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _library(interpreted: bool) -> Any:
    """Return CUDA's mathematical functions; Triton's interpreter has none, and gets NumPy's."""
    if not interpreted:
        return importlib.import_module("triton.language.extra.libdevice")
    numpy, inside = importlib.import_module("numpy"), importlib.import_module("triton.runtime.interpreter")

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            value = function(*(arg.handle.data for arg in args))
            return inside.tl.core.tensor(inside.TensorHandle(value, args[0].handle.dtype), args[0].type)

        return call

    return SimpleNamespace(pow=of(numpy.power), rsqrt=of(lambda value: 1 / numpy.sqrt(value)))


@cache
def _scope(source: str, interpreted: bool) -> dict[str, Any]:
    triton: Any = importlib.import_module("triton")
    # Triton reads a kernel's text with `inspect`, which asks linecache; an entry without a time is never dropped.
    file = f"<mezzo kernel {hash((source, interpreted)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"__name__": __name__, "triton": triton, "tl": triton.language, "libdevice": _library(interpreted)}
    exec(compile(source, file, "exec"), scope)
    return scope
