"""All that mezzo asks of torch's autograd engine: whether a pass runs, whose node it is at, where it ends.

The one file that takes private names of the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from mezzo.compiling import constant_in_graphs
from mezzo.releases import private, require

_NUMBER_OF_PASS: Final = private("torch._C._current_graph_task_id")

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


# While it traces, torch.compile asks once: a module that is compiled by itself and recomputed is traced for its forward
# pass before.
@constant_in_graphs
def runs_backward() -> bool:
    """Whether autograd runs in this thread: a module that is called then is recomputed."""
    return bool(_NUMBER_OF_PASS() != -1)


def number_of_pass() -> int:
    """Return what tells the backward pass that runs now from others; -1 outside of one."""
    number: int = _NUMBER_OF_PASS()
    return number


def number_of(node: Any) -> int:
    """Return the number that an autograd node was given when it was made, by thread one after the other."""
    require("torch._C._functions.AccumulateGrad._sequence_nr")
    number: int = node._sequence_nr()
    return number


def node_of(function: type[Function]) -> type:
    """Return the class of the nodes that an autograd function puts in a graph."""
    require("torch.autograd.Function._backward_cls")
    kind: type = function._backward_cls
    return kind


def runs_another(kind: type) -> bool:
    """Whether nodes of a class run a pass of their own, over parameters of which the graph says nothing."""
    return issubclass(kind, node_of(CheckpointFunction))


def door() -> tuple[Any, str]:
    """Return where torch has the function through which each backward pass goes: a module, and the name in it."""
    require("torch.autograd._engine_run_backward")
    return torch.autograd, "_engine_run_backward"


def innermost_saving_hooks() -> tuple[Any, Any] | None:
    """Return the innermost pair of hooks on tensors that are saved for backward passes, if there is one."""
    found: tuple[Any, Any] | None = private("torch._C._autograd._top_saved_tensors_default_hooks")(True)
    return found
