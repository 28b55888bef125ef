"""Graphs: code that ran once, run again without its Python."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

__all__ = ["CudaGraph"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Runs before the graph is made: the first makes and compiles what is missing, the last must not ask the host.
_REHEARSALS: Final = 3


class CudaGraph:
    """One recorded run of some code on one device, with a memory pool of its own.

    Rehearsals run on the stream that is captured later, since autograd remembers the stream of a parameter's first
    use. Other threads may go on (a loader that pins memory), as ``capture_error_mode="thread_local"`` allows.

    Args:
        device: The CUDA device.

    References:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._graph = torch.cuda.CUDAGraph()

    def rehearse(self, run: Callable[[], object]) -> None:
        """Run it a few times for what happens only once: lazy initialisation, compilation, choice of kernels."""
        around = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(around)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                for _ in range(_REHEARSALS - 1):
                    run()
                with _syncs_refused():
                    run()
        finally:
            around.wait_stream(self._stream)

    def record(self, run: Callable[[], T]) -> T:
        """Run it for the record; whatever it would have written to memory that was there before is not written.

        Raises:
            RuntimeError: The code asks the device for a value.
        """
        with torch.cuda.device(self.device):  # around it all, since set_stream changes the device too
            around, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(self._graph, pool, self._stream, capture_error_mode="thread_local"):
                    return run()
            except BaseException:
                torch.cuda.set_stream(around)
                _end_failed_capture(self._stream, pool)
                raise
            finally:
                torch.cuda.set_stream(around)  # which torch leaves undone where the capture has failed

    def replay(self) -> None:
        """Run the recorded kernels again, without waiting, on the values that their memory holds now."""
        self._graph.replay()


def _end_failed_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Let the device be used as before, after a capture that failed.

    Where ending a capture fails, torch stops half-way: its allocator goes on serving the pool, and (in older versions)
    its generator stays in the mode of a capture, so that the next random op on the device raises. The allocator is told
    what the end would have told it, and a capture that succeeds brings the generator back.
    """
    device = stream.device
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)  # never twice: the first raises where torch has done both
    except RuntimeError as error:
        logger.debug("the allocator has ended the capture already: %s", error)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=device)
    except RuntimeError as error:
        logger.debug("the generator of %s may still be in a capture: %s", device, error)


@contextmanager
def _syncs_refused() -> Iterator[None]:
    """Let torch raise where code waits for the device: with the line at fault, and no stream left half captured."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # where warnings are errors, one would be raised with the mode already set
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
