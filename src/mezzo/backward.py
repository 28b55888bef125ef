"""Torch's autograd engine, as far as mezzo uses it: whether a pass runs, at which node, and where it ends.

The one file that takes private names of the engine's.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any, Final
from weakref import ref

import torch
from torch.autograd import Function, Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from mezzo.compiling import constant_in_graphs
from mezzo.releases import private, require

#: What tells the backward pass that runs now from others; -1 outside of one.
number_of_pass: Final[Callable[[], int]] = private("torch._C._current_graph_task_id")
#: The autograd node whose gradients this thread computes now; ``None`` outside of backward passes.
current_node: Final[Callable[[], Any]] = private("torch._C._current_autograd_node")
#: The number that the next autograd node of this thread will have.
next_number: Final[Callable[[], int]] = private("torch._C._autograd._get_sequence_nr")
#: Whether the pass that runs now will run a node; a RuntimeError for a leaf whose gradient ``torch.autograd.grad``
#: returns.
will_run: Final[Callable[[Any], bool]] = private("torch._C._will_engine_execute_node")
#: Has the pass that runs now call a function when all else has ended.
call_at_end: Final[Callable[[Callable[[], None]], None]] = private(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
_OF_MODULES: Final = private("torch.nn.modules._functions.BackwardHookFunction")
_STORE_OBJECT: Final = private("torch._C._stash_obj_in_tls")
_STORED_OBJECT: Final = private("torch._C._get_obj_in_tls")
_HAS_OBJECT: Final = private("torch._C._is_key_in_tls")
_FORGET: Final = getattr(torch._C, "_remove_obj_from_tls", None)


# While it traces, torch.compile asks once: a module that is compiled by itself and recomputed is traced for its forward
# pass before.
@constant_in_graphs
def runs_backward() -> bool:
    """Whether autograd runs in this thread: a module that is called then is recomputed."""
    return bool(number_of_pass() != -1)


def number_of(node: Any) -> int:
    """Return the number of an autograd node, which torch counts up in each thread."""
    require("torch._C._functions.AccumulateGrad._sequence_nr")
    number: int = node._sequence_nr()
    return number


@functools.cache
def node_of(function: type[Function]) -> type:
    """Return the class of the nodes that one of mezzo's or torch's autograd functions puts in a graph."""
    require("torch.autograd.Function._backward_cls")
    node_class: type = function._backward_cls
    return node_class


def runs_hooks_of_modules(node_classes: set[type]) -> bool:
    """Whether nodes of some classes run hooks of modules with the gradients of inputs or outputs."""
    return node_of(_OF_MODULES) in node_classes


def may_run_others(node_class: type) -> bool:
    """Whether nodes of a class may run passes of their own, over leaves that the graph does not show.

    Those of torch's reentrant checkpoint do, and any of a program's autograd functions may.
    """
    if not issubclass(node_class, BackwardCFunction):
        return False
    require("torch.autograd.function.BackwardCFunction._forward_cls")
    function: type = node_class._forward_cls  # type: ignore[attr-defined]
    return issubclass(function, CheckpointFunction) or function.__module__.partition(".")[0] not in ("torch", "mezzo")


# The door ------------------------------------------------------------------------------------------------


@functools.cache
def door() -> tuple[Any, str]:
    """Return the class that has the engine of all backward passes, and the engine's name in it.

    Every way to begin a pass calls this engine: ``backward``, ``torch.autograd.grad``, and patches of these.
    """
    require("torch.autograd.Variable._execution_engine.run_backward")
    return Variable, "_execution_engine"


def engine_through(plain: Any, through: Callable[..., Any]) -> Any:
    """Return an engine that replaces another one, and runs its passes through a function.

    Args:
        plain: The engine that is replaced.
        through: The function; it is called with all of a pass's arguments, by position.
    """
    engine_class: Any = type(plain)
    engine = _engine_like(engine_class)()
    engine.through = through
    return engine


@functools.cache
def _engine_like(engine_class: Any) -> Any:
    """Return a subclass of an engine's class, which compiled code checks for."""

    class Through(engine_class):  # type: ignore[misc]
        through: Callable[..., Any]

        def run_backward(
            self,
            tensors: Any,
            grad_tensors: Any,
            keep_graph: bool,
            create_graph: bool,
            inputs: Any = (),
            allow_unreachable: bool = False,
            accumulate_grad: bool = False,
        ) -> Any:
            return self.through(
                tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )

    return Through


# The owner of a thread's work, such as a session's pass. Torch copies what is stored under a key in a thread to the
# threads of its own that run a backward pass for it.

_KEY: Final = "mezzo"


def thread_owner() -> Any:
    """Return the owner of this thread's work; ``None`` where none was set, or where it has been freed.

    It was set by :func:`set_thread_owner`, in this thread or in the one where the pass began whose nodes this one runs.
    """
    owner = _STORED_OBJECT(_KEY) if _HAS_OBJECT(_KEY) else None
    return None if owner is None else owner()


def set_thread_owner(owner: object) -> Callable[[], None]:
    """Set the owner of this thread's work, and of each thread that runs nodes of a pass that begins in it.

    Args:
        owner: Held weakly, so that a signal which keeps the restoring from running leaves nothing behind.

    Returns:
        What restores the owner of before.
    """
    before = _STORED_OBJECT(_KEY) if _HAS_OBJECT(_KEY) else None
    _store(ref(owner))
    # Torch 2.11 cannot forget an object. What is left in a thread that ends would wait there for Python.
    if before is not None or _FORGET is None:
        return functools.partial(_store, before)
    return functools.partial(_FORGET, _KEY)


def _store(value: object) -> None:
    if _steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _STORE_OBJECT(_KEY, value)


@functools.cache
def _steals() -> bool:
    """Whether torch drops a reference that it has never taken to a stored object, as 2.11 does."""
    probe = object()
    before = sys.getrefcount(probe)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # what is one too many stays in memory
    _STORE_OBJECT(_KEY, probe)
    return sys.getrefcount(probe) == before + 1


def innermost_saving_hooks() -> tuple[Any, Any] | None:
    """Return the innermost pair of hooks on tensors that are saved for backward passes, if there is one."""
    hooks: tuple[Any, Any] | None = private("torch._C._autograd._top_saved_tensors_default_hooks")(True)
    return hooks
