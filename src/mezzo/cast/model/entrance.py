"""Where a model is entered: the first of its modules that is called from outside."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["Entrance", "runs_backward"]


class Entrance:
    """The call by which each thread has come into a model, as long as it lasts.

    A copy of the model, or of a part of it, is a model of its own that nobody is in.
    """

    def __init__(self) -> None:
        # By thread, and 0 for what torch.compile traces, which knows no threads. With the call, how often the same
        # module has been called again inside it.
        self._at: dict[int, tuple[Any, int]] = {}

    def __deepcopy__(self, memo: Any) -> Entrance:
        return Entrance()

    def __reduce__(self) -> Any:
        return Entrance, ()

    def is_open(self) -> bool:
        """Whether this thread is inside the model."""
        if torch.compiler.is_compiling():
            return len(self._at) > 0  # a graph depends on it, and is traced for both; torch 2.11 traces no bool(dict)
        return threading.get_ident() in self._at or 0 in self._at

    def enter(self, by: Any) -> bool:
        """Note a call, and return whether it came from outside.

        Args:
            by: Whose call it is; :meth:`leave` gets the same.
        """
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        if self.is_open():
            held = self._at.get(thread)
            if held is not None and held[0] is by:
                self._at[thread] = (by, held[1] + 1)
            return False
        self._at[thread] = (by, 0)
        return True

    def leave(self, by: Any) -> bool:
        """Note the end of a call, and return whether it was the one that came from outside."""
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        held = self._at.get(thread)
        if held is None or held[0] is not by:
            return False
        if held[1]:
            self._at[thread] = (by, held[1] - 1)
            return False
        del self._at[thread]
        return True

    def forget(self) -> None:
        """Be outside, in this thread: between steps no call lasts, though an interrupted one may have left no word."""
        self._at.pop(threading.get_ident(), None)


def runs_backward() -> bool:
    """Whether autograd runs in this thread: a module that is called then is recomputed, inside its model."""
    return torch._C._current_graph_task_id() != -1


# What torch._dynamo.assume_constant_result sets, without a second of imports. While it traces, torch.compile asks once:
# a module that is compiled by itself and recomputed is traced for its forward pass before.
runs_backward._dynamo_marked_constant = True  # type: ignore[attr-defined]
