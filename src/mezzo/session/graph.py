"""Graphs: code that ran once, run again without its Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

import torch

__all__ = ["CudaGraph", "Graph"]

T = TypeVar("T")

#: Runs before the graph is made: the first makes and compiles what is missing, the last must not ask the host.
_REHEARSALS: Final = 3


class Graph(Protocol):
    """One recorded run of some code on one device.

    ``replay`` computes what the recorded run would have computed with the values that its inputs have now, in the same
    memory: results stand where the recorded run put them.
    """

    device: torch.device

    def rehearse(self, run: Callable[[], object]) -> None:
        """Run it a few times for what happens only once: lazy initialisation, compilation, choice of kernels."""

    def record(self, run: Callable[[], T]) -> T:
        """Run it for the record; whatever it would have written to memory that was there before is not written.

        Raises:
            RuntimeError: The code asks the device for a value.
        """

    def replay(self) -> None:
        """Run what was recorded, without waiting for it."""


class CudaGraph:
    """A CUDA graph with a memory pool of its own.

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
        """See :class:`Graph`."""
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
        """See :class:`Graph`."""
        around = torch.cuda.current_stream(self.device)
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                return run()
        finally:
            torch.cuda.set_stream(around)  # which torch leaves undone where the capture has failed

    def replay(self) -> None:
        """See :class:`Graph`."""
        self._graph.replay()


@contextmanager
def _syncs_refused() -> Iterator[None]:
    """Let torch raise where code waits for the device: with the line at fault, and no stream left half captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
