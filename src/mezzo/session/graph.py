"""A CUDA graph: code that runs once for the record, and is run again without its Python; and why some cannot be."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Final, TypeVar

import torch

from mezzo.errors import MezzoError, UnsupportedError

__all__ = ["CudaGraph", "explained"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How torch says that something asked the device for a value, or cannot be part of a graph.
_NOT_CAPTURABLE: Final = ("captur", "synchronizing CUDA operation")


class CudaGraph:
    """One recorded run of some code on one device, with a memory pool of its own.

    What comes before runs on the stream that is captured later, since autograd remembers the stream of a parameter's
    first use. Other threads may go on (a loader that pins memory), as ``capture_error_mode="thread_local"`` allows.

    Args:
        device: The CUDA device.

    References:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._graph = torch.cuda.CUDAGraph()

    def run(self, run: Callable[[], T], *, refuses_syncs: bool = False) -> T:
        """Run it on the stream that is captured.

        Args:
            run: The code.
            refuses_syncs: Whether to let torch raise where it waits for the device: with the line at fault, and no
                stream left half captured.
        """
        around = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(around)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), _syncs(refused=refuses_syncs):
                return run()
        finally:
            around.wait_stream(self._stream)

    def record(self, run: Callable[[], T]) -> T:
        """Run it for the record; nothing is computed.

        Raises:
            RuntimeError: The code asks the device for a value.
        """
        with torch.cuda.device(self._device):  # around it all, since set_stream changes the device too
            around, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
            self._stream.wait_stream(around)
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
def _syncs(*, refused: bool) -> Iterator[None]:
    """Let torch raise where code waits for the device."""
    before = torch.cuda.get_sync_debug_mode() if refused else None
    try:
        if refused:
            with warnings.catch_warnings():  # where warnings are errors, one would be raised with the mode already set
                warnings.filterwarnings("ignore", message="Synchronization debug mode")
                torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if before is not None:
            torch.cuda.set_sync_debug_mode(before)


# Why code cannot be part of one ----------------------------------------------------------------------------


def explained(run: Callable[[], T]) -> T:
    """Run code of a train step, and say which of its lines a graph cannot hold, and why."""
    try:
        return run()
    except MezzoError:
        raise
    except RuntimeError as error:
        if (refusal := _refusal(error)) is None:
            raise
        raise refusal from error


def _refusal(error: RuntimeError) -> UnsupportedError | None:
    """Return what to say of an error of torch's, if it is one of capturing."""
    chain: list[BaseException] = [error]  # ending a graph that failed raises again
    while (before := chain[-1].__context__) is not None:
        chain.append(before)
    lines = [line for each in chain for line in _lines(each)]
    if any(module.startswith("torch._inductor.cudagraph_") for module, _ in lines):
        return UnsupportedError(
            "the train step makes CUDA graphs of its own",
            where='torch.compile(…, mode="reduce-overhead") or "max-autotune"',
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            write='torch.compile(…) without that mode, or "max-autotune-no-cudagraphs", inside mezzo.capture',
        )
    if not any(words in str(error) for words in _NOT_CAPTURABLE):
        return None
    *_, first = takewhile(lambda each: isinstance(each, RuntimeError), chain)
    users = [line for module, line in _lines(first) if module.partition(".")[0] not in ("torch", "mezzo")]
    return UnsupportedError(
        "a line of the train step cannot be part of a CUDA graph",
        where=users[-1] if users else "",
        why=str(first).splitlines()[0],
        write="nothing that waits for the device there: no .item(), print or if on a tensor, no tensor made from "
        "Python numbers on the GPU; return tensors, and read them after the call. And no loss of an earlier step that "
        "is kept, which ties gradients to another stream: del loss",
    )


def _lines(error: BaseException) -> list[tuple[str, str]]:
    """Return the modules and lines that an error came through, the innermost last."""
    return [
        (str(frame.f_globals.get("__name__")), f"{frame.f_code.co_filename}:{number}")
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
