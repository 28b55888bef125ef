"""Ctrl-C by a real signal, at any line."""

import contextlib
import dis
import os
import signal
import sys

import torch
from hypothesis import strategies as st

import mezzo

#: At whose lines a signal comes: mezzo's, and what its writes go through, contextlib on their behalf alone: torch's own
#: state does not outlive a signal as torch leaves a context.
LINES = (os.path.dirname(mezzo.__file__), os.path.dirname(torch.optim.__file__))
#: At which of them; none where there are fewer.
lines = st.integers(0, 1200)


#: With what a ``with`` begins to end, after a ``return`` too. Python handles no signal between its block and
#: ``__exit__``, although it calls tracers there.
ENDS = {dis.opmap["LOAD_CONST"], dis.opmap["SWAP"]}


class Interrupt:
    """Send SIGINT at the n-th of :data:`LINES` that runs inside the block, and catch what comes of it outside."""

    def __init__(self, line):
        self.left, self.came = line, False

    def _at_call(self, frame, event, _):
        caller = frame
        while caller is not None and caller.f_code.co_filename == contextlib.__file__:
            caller = caller.f_back
        return self._at_line if caller is not None and caller.f_code.co_filename.startswith(LINES) else None

    def _at_line(self, frame, event, _):
        if event == "line" and frame.f_code.co_code[frame.f_lasti] not in ENDS:
            self.left -= 1
            if self.left < 0 and not self.came:
                self.came = True
                signal.raise_signal(signal.SIGINT)
        return self._at_line

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._at_call)
        return self

    def __exit__(self, kind, error, trace):
        sys.settrace(self._before)
        return kind is KeyboardInterrupt
