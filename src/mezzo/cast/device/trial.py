"""Find out whether *this* process survives work that kills others, by trying it in a copy of it."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings
from collections.abc import Iterable

import torch

from mezzo.cast.device.child import SIZES, leave_no_core, run_case
from mezzo.cast.device.probing import how_it_ended

__all__ = ["read_limit", "survives_here", "switch_onednn_off"]

#: The work takes some 20 ms. A copy that waits for a lock which another thread held will wait for ever.
TRIAL_TIMEOUT_S = 20.0


def read_limit() -> None:
    """Have oneDNN read its environment now, if it has not done so yet; later changes of that mean nothing.

    A limit that is only set would be lost if the environment were put back before oneDNN's first use, as
    ``unittest.mock.patch.dict(os.environ)`` does.

    Cost:
        None: oneDNN is asked what the processor can do, and computes nothing.
    """
    if torch._C._has_mkldnn:
        torch.ops.mkldnn._is_mkldnn_bf16_supported()


def switch_onednn_off() -> None:
    """Have torch compute everything on the CPU without oneDNN: in any thread, and for C++ callers too."""
    torch._C._set_mkldnn_enabled(False)


def survives_here(dtype: torch.dtype, cases: Iterable[str], *, onednn: bool = True) -> str:
    """Try cases in a copy of this process, with whatever state oneDNN is in here.

    oneDNN reads its limit once, at its first use or at the first query of it, and torch has no call that
    tells whether that has happened: an FP32 ``bmm`` already does it. A forked copy has the same state, so
    what it survives, this process survives.

    Args:
        dtype: The format.
        cases: Keys of ``child.CASES``.
        onednn: Whether the copy may use oneDNN; without it torch falls back on its own kernels.

    Returns:
        The empty string if the copy survived, otherwise why that cannot be said.

    Cost:
        A fork and some 20 ms.
    """
    if not hasattr(os, "fork"):
        return "this platform cannot copy a process to find out"
    try:
        with warnings.catch_warnings():
            # Python warns of threads that a fork leaves behind. The copy needs none of them; should it
            # wait for one all the same, the time limit ends it.
            warnings.simplefilter("ignore")
            child = os.fork()
    except OSError as fault:
        return f"this process could not be copied to find out ({fault})"
    if child == 0:
        _try_and_exit(dtype, tuple(cases), onednn)
    return _end_of(child)


def _try_and_exit(dtype: torch.dtype, cases: tuple[str, ...], onednn: bool) -> None:
    code = 1
    try:
        faulthandler.disable()  # a death here is an answer, not something to report on stderr
        for deadly in (signal.SIGILL, signal.SIGSEGV):
            signal.signal(deadly, signal.SIG_DFL)
        leave_no_core()
        torch.set_num_threads(1)  # the threads of the pool were not copied
        if not onednn:
            switch_onednn_off()
        for case in cases:
            run_case(case, dtype, "cpu", SIZES if onednn else SIZES[:1])  # without oneDNN a large product takes seconds
        code = 0
    finally:
        os._exit(code)  # no exit handlers, no flushing of buffers that belong to the parent


def _end_of(child: int) -> str:
    deadline = time.monotonic() + TRIAL_TIMEOUT_S
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return f"a copy of this process that tried it {how_it_ended(code)}" if code else ""
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"a copy of this process that tried it did not finish in {TRIAL_TIMEOUT_S:.3g} s"
            time.sleep(0.005)
    except ChildProcessError:
        return "somebody else collected the exit status of the copy of this process that tried it"
