"""Find out whether *this* process survives work that kills others, by trying it in a copy of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mezzo.cast.device.child import SIZES, in_copy, run_case

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
        cases: Some of ``child.CASES``.
        onednn: Whether the copy may use oneDNN; without it torch falls back on its own kernels.

    Returns:
        The empty string if the copy survived, otherwise why that cannot be said.

    Cost:
        A fork and some 20 ms.
    """

    def work() -> None:
        torch.set_num_threads(1)  # the threads of the pool are not copied
        if not onednn:
            switch_onednn_off()
        for case in cases:
            run_case(case, dtype, "cpu", SIZES if onednn else SIZES[:1])  # without oneDNN a large product takes seconds

    try:
        _, ended = in_copy(work, TRIAL_TIMEOUT_S)
    except OSError as fault:
        return f"this process could not be copied to find out ({fault})"
    return ended.trouble and f"a copy of this process that tried it {ended.trouble}"
