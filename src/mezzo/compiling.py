"""All that mezzo knows of torch.compile: how its own functions are compiled, and what Dynamo is doing.

The one file that takes private names of Dynamo's. None of them needs ``torch._dynamo``, a second of imports, before a
program compiles something.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mezzo.errors import UnsupportedError
from mezzo.releases import private, require

C = TypeVar("C", bound=Callable[..., Any])

# How functions of mezzo's are compiled -------------------------------------------------------------------

_HOOKS_LEFT_OUT: Final = "torch._dynamo.config.skip_nnmodule_hook_guards"
_STRATEGIES: Final = (
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
)
_DISABLE: Final = private("torch._compile._disable_dynamo", public=torch.compiler.disable)


def never_compiled(function: C) -> C:
    """Return a function that runs in Python, with all that it calls: torch.compile breaks the graph there.

    ``torch.compiler.disable``, without the second of imports that its mention costs.
    """
    left: C = _DISABLE(function)
    return left


def constant_in_graphs(function: C) -> C:
    """Return the function, which torch.compile calls once while it traces, and whose result is a constant of the graph.

    ``torch._dynamo.assume_constant_result``, without the second of imports that its mention costs.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compiled_inside_alone(function: C) -> C:
    """Return a function that is compiled inside the functions that call it, and never by itself, nor what it calls.

    Where torch.compile leaves a function to Python, it compiles each function that this one calls by itself. One that
    takes torch's functions as arguments, as a mode's does, must not be: torch 2.13 guards no method of C's among them,
    and ``x.square()`` ran what was compiled for ``x.float()``, without an error.
    """
    return _with_strategy(function, "SKIP")


def compiled_inside(function: C) -> C:
    """As :func:`compiled_inside_alone`, but for what the function calls, which is compiled as anything else."""
    return _with_strategy(function, "DEFAULT")


def _with_strategy(function: C, calls: Literal["SKIP", "DEFAULT"]) -> C:
    try:
        _require_strategies()
    except UnsupportedError:
        return _refusing_to_compile(function)
    action, strategy, set_strategy = map(private, _STRATEGIES)
    set_strategy(function.__code__, strategy(action.SKIP, getattr(action, calls)))
    return function


@constant_in_graphs  # what it raises ends the trace
def _require_strategies() -> None:
    require(*_STRATEGIES)


def _refusing_to_compile(function: C) -> C:
    """Return a function that raises where torch.compile is at work, which would compile it by itself."""

    @functools.wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _CALLBACK() not in (None, False):
            _require_strategies()
        return function(*args, **kwargs)

    return refusing  # type: ignore[return-value]


#: For each call of :func:`guard_hooks` that is not undone: whether torch left hooks out before it.
_GUARDING: Final[list[bool]] = []


def guard_hooks() -> None:
    """Make graphs of torch.compile depend on the hooks of modules, until :func:`leave_hooks`.

    By default they do not, so that a graph of one module serves another of its class, whatever hooks either has.
    Graphs that were made before are dropped.

    Raises:
        UnsupportedError: This release of torch has no such setting.
    """
    require(_HOOKS_LEFT_OUT)
    from torch._dynamo import config

    _GUARDING.append(config.skip_nnmodule_hook_guards)
    if _GUARDING[-1]:
        config.skip_nnmodule_hook_guards = False
        forget_compiled()


def leave_hooks() -> None:
    """Undo one call of :func:`guard_hooks`; the last one restores torch's setting."""
    from torch._dynamo import config

    before = _GUARDING.pop()
    if not _GUARDING:
        config.skip_nnmodule_hook_guards = before


def forget_compiled() -> None:
    """Drop what torch.compile has made so far: hooks were put on modules, or taken off, and torch guards none of them.

    **Cost**: what is called again is compiled again.
    """
    if is_imported():
        private("torch._dynamo.reset_code_caches", public=torch.compiler.reset)()


def is_one(size: int) -> bool:
    """Whether a size is one; of a size that torch.compile will know when the code runs, no."""
    if type(size) is int and not torch.compiler.is_dynamo_compiling():
        return size == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size == 1)


# What is compiled ----------------------------------------------------------------------------------------

#: Of models whose graphs have their casts placed by a policy: that policy, as text.
_PLACED: Final[WeakKeyDictionary[nn.Module, str]] = WeakKeyDictionary()


def note_placed(model: nn.Module, policy: str) -> None:
    """Record that a compiled model has the casts of a policy in its graphs, whatever region is around."""
    _PLACED[model] = policy


def placed_in(models: Iterable[nn.Module]) -> str | None:
    """Return the policy whose casts are in the graphs of one of these models, or of a part; ``None`` without one."""
    return next((_PLACED[module] for model in models for module in model.modules() if module in _PLACED), None)


#: What torch.compile calls the module that it wraps.
INSIDE: Final = "_orig_mod"


def inside(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` has wrapped; any other as it is."""
    wrapped: nn.Module = getattr(model, INSIDE, model)
    return wrapped


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: by ``module.compile()``, or as what ``torch.compile(module)`` returns."""
    require("torch.nn.Module._compiled_call_impl")
    return module._compiled_call_impl is not None or hasattr(module, INSIDE)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return what runs code inside its block that torch compiled, uncompiled."""
    return torch.compiler.set_stance("force_eager") if is_imported() else contextlib.nullcontext()


# What torch.compile does now ---------------------------------------------------------------------------

_CALLBACK: Final = private("torch._C._dynamo.eval_frame.get_eval_frame_callback")
_TRACER: Final = "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx"
_BACKEND: Final = (
    "torch._dynamo.output_graph.OutputGraph.compiler_fn",
    "torch._dynamo.repro.after_dynamo.WrapBackendDebug._torchdynamo_orig_backend",
    "torch._TorchCompileWrapper.compiler_fn",
)


def is_imported() -> bool:
    """Whether Dynamo is imported: before, nothing is compiled."""
    return "torch._dynamo" in sys.modules


@constant_in_graphs  # in which torch 2.11 says that each is exported
def is_exporting() -> bool:
    """Whether ``torch.export`` makes a program now."""
    return torch.compiler.is_exporting()


def is_scripted() -> bool:
    """Whether ``torch.jit`` traces."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


@compiled_inside  # where torch.compile is left alone, whether it is at work cannot be asked
def is_at_work() -> bool:
    """Whether what Python calls now may be compiled: it is called by what was compiled, and left to Python."""
    return _CALLBACK() not in (None, False)


@constant_in_graphs  # it is a fact about the graph: torch guards which backend one is for
def casts_are_placed() -> bool:
    """Whether the backend for which torch.compile traces now places casts itself, in the graph that it is given."""
    if _LATE.waiting and _LATE.before is None:
        _LATE.before = _switch_off()
    require(*_BACKEND)
    backend = private(_TRACER)().output.compiler_fn
    while not hasattr(backend, "places_casts"):
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None:
            return False
        backend = inner
    return bool(backend.places_casts)


def traced_variable(name: str) -> Any:
    """Return what a variable holds in the function that torch.compile traces now; ``None`` where there is none."""
    frame = private(_TRACER)()
    return frame.f_locals.get(name, frame.f_globals.get(name))


@contextlib.contextmanager
def differentiated_plainly(region: torch.autocast) -> Iterator[None]:
    """Enter autocast, and let torch.compile differentiate what it traces inside the block without it, as eager does.

    Torch 2.13 traces the backward pass under the autocast around the call, where the gradient of a product that is
    pinned to FP32 would be computed in low precision: https://github.com/pytorch/pytorch/issues/179804.
    """
    before = begin_plainly()
    try:
        with region:
            yield
    finally:
        end_plainly(before)


class _Late(threading.local):
    """Blocks of this thread that began before Dynamo was imported: what it traces in them begins there.

    Attributes:
        waiting: How many of these there are.
        before: What the setting was, once it was changed for them.
    """

    waiting = 0
    before: str | None = None


_LATE: Final = _Late()


def begin_plainly() -> str | None:
    """Begin what :func:`differentiated_plainly` does, and return what :func:`end_plainly` is to be given.

    **Cost**: 2 µs, and next to nothing as long as Dynamo is not imported.
    """
    if not is_imported():
        _LATE.waiting += 1
        return None
    return _switch_off()


def end_plainly(before: str | None) -> None:
    """End it."""
    if before is None:
        _LATE.waiting -= 1
        if _LATE.waiting or _LATE.before is None:
            return
        before, _LATE.before = _LATE.before, None
    from torch._functorch import config

    config.backward_pass_autocast = before


def _switch_off() -> str:
    require("torch._functorch.config.backward_pass_autocast")
    from torch._functorch import config  # a setting of this thread

    before: str = config.backward_pass_autocast
    config.backward_pass_autocast = "off" if before in ("same_as_forward", "default") else before
    return before


# Capturing a model, and handing graphs on -----------------------------------------------------------------

#: The functions that Dynamo's graphs call where a program enters or leaves autocast, or turns gradients on or off.
_SWITCHES: Final = (
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch._C._set_grad_enabled",
)
ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED = map(private, _SWITCHES)


def require_switches() -> None:
    """Refuse to read a graph where one of these calls could not be told from others.

    Raises:
        UnsupportedError: torch has another name for it.
    """
    require(*_SWITCHES)


def as_given(left_out: Iterable[Callable[..., Any]]) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager under which a model is captured for the sizes of its inputs, recurrent layers too.

    Args:
        left_out: Functions of loggers, which a graph does not call.
    """
    patch = private("torch._dynamo.config.patch")
    settings: contextlib.AbstractContextManager[Any] = patch(
        allow_rnn=True, automatic_dynamic_shapes=False, ignore_logger_methods={*left_out}
    )
    return settings


def capture_errors() -> tuple[type[Exception], type[Exception]]:
    """Return the classes of Dynamo's errors: of all, and of those that pass on an error of the program."""
    require("torch._dynamo.exc.TorchDynamoException", "torch._dynamo.exc.TorchRuntimeError")  # except takes no stand-in
    return private("torch._dynamo.exc.TorchDynamoException"), private("torch._dynamo.exc.TorchRuntimeError")


def backend_of(name: str) -> Any:
    """Return the backend of torch.compile that a name stands for; ``None`` where there is none."""
    require("torch._dynamo.exc.InvalidBackend", "torch._dynamo.lookup_backend")  # except takes no stand-in
    unknown: type[Exception] = private("torch._dynamo.exc.InvalidBackend")
    try:
        return private("torch._dynamo.lookup_backend")(name)
    except unknown:
        return None


def backends() -> list[str]:
    """Return the names of torch.compile's backends."""
    names: list[str] = private("torch._dynamo.list_backends")()
    return names
