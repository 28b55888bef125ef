"""Ctrl-C by a real signal, at any line."""

import contextlib
import dis
import gc
import inspect
import os
import signal
import sys
import weakref

import torch
from hypothesis import strategies as st

import mezzo
from mezzo.cast import region
from mezzo.interrupts import Members

#: At whose lines a signal comes: mezzo's, and what its writes go through, contextlib on their behalf alone: torch's own
#: state does not outlive a signal as torch leaves a context.
LINES = (os.path.dirname(mezzo.__file__), os.path.dirname(torch.optim.__file__))
#: At which of them; none where there are fewer.
lines = st.integers(0, 1200)


_SWAP, _CONST, _HANDLED = (dis.opmap[name] for name in ("SWAP", "LOAD_CONST", "POP_EXCEPT"))


def ends_a_block(frame):
    """Whether a ``with`` or an ``except`` begins to end, where Python calls tracers, but handles no signal.

    A ``with`` gives its ``__exit__`` three times None; after a ``return`` under the value on the stack.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if code[at] == _HANDLED:
        return True
    at += 2 if code[at] == _SWAP else 0
    return list(code[at : at + 6 : 2]) == [_CONST] * 3 and len({*code[at + 1 : at + 7 : 2]}) == 1


def is_finalizing(frame):
    """Whether an object's end is what runs, whenever it comes: Python lets no error out of that, Ctrl-C included."""
    while frame is not None and not ends_an_object(frame):
        frame = frame.f_back
    return frame is not None


def ends_an_object(frame):
    """Whether a finalizer, a ``__del__``, or what a reference calls when it has died has this frame."""
    reference = frame.f_locals.get("removed") if frame.f_code is Members.remove.__code__ else None
    is_called_back = isinstance(reference, weakref.ref) and reference() is None
    return is_called_back or frame.f_code is weakref.finalize.__call__.__code__ or frame.f_code.co_name == "__del__"


#: Where the region of a forward pass is entered and left. As with torch's own contexts, its state does not outlive a
#: signal just there. (That of a backward pass does.)
_EDGES = {
    inspect.unwrap(method).__code__
    for context in (region._Inside, region.autocast)
    for method in (context.__enter__, context.__exit__)
}


def is_at_the_edge_of_a_region(frame):
    """Whether a region is being entered or left."""
    while frame is not None and frame.f_code not in _EDGES:
        frame = frame.f_back
    return frame is not None


class Interrupt:
    """Send SIGINT at the n-th line of the files below LINES that runs in the block, and catch what comes of it."""

    def __init__(self, line):
        self.left, self.came = line, False

    def _at_call(self, frame, event, _):
        caller = frame
        while caller is not None and caller.f_code.co_filename == contextlib.__file__:
            caller = caller.f_back
        return self._at_line if caller is not None and caller.f_code.co_filename.startswith(LINES) else None

    def _at_line(self, frame, event, _):
        if event == "line" and not ends_a_block(frame):
            self.left -= 1
            if self.left < 0 and not self.came and not is_finalizing(frame) and not is_at_the_edge_of_a_region(frame):
                self.came = True
                signal.raise_signal(signal.SIGINT)
        return self._at_line

    def __enter__(self):
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # what is collected, and when, depends on all that ran before: the n-th line would be another one
        sys.settrace(self._at_call)
        return self

    def __exit__(self, cls, error, trace):
        sys.settrace(self._before)
        if self._collects:
            gc.enable()
        return cls is KeyboardInterrupt
