"""The CUDA device that a test runs on: a real one, or in a process of its own one that computes nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

#: Set in a process whose CUDA device computes nothing: see tests/fake_cuda.
FAKE = os.environ.get("MEZZO_FAKE_CUDA")


class Real:
    """A GPU."""

    computes = True

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Make calls inside the block raise that wait for the device."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def kernels(self) -> Iterator[list[str]]:
        """Yield a list that has the names of the kernels of the block, in order, once it ends."""
        import torch

        names: list[str] = []
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            yield names
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        names += [event.name for event in events if not event.name.startswith(("Memcpy", "Memset"))]

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Capture a graph that is thrown away, as ``torch.cuda.graph`` does it."""
        import torch

        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")  # or torch warns of an empty graph
            yield


class Fake:
    """A device that computes nothing, where shapes, dtypes and launches are real and values are not."""

    computes = False

    def __init__(self) -> None:
        from .fake_cuda.machine import Machine

        self.machine = Machine()

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """See :class:`Real`; the assertion names the lines that waited."""
        with self.machine.watched() as record:
            yield
        assert record.reads == []

    @contextlib.contextmanager
    def kernels(self) -> Iterator[list[str]]:
        """See :class:`Real`."""
        names: list[str] = []
        with self.machine.watched() as record:
            yield names
        names += record.kernels

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """See :class:`Real`."""
        from .fake_cuda.machine import capturing

        with capturing():
            yield


@contextlib.contextmanager
def opened() -> Iterator[Real | Fake]:
    """Yield the device of this process."""
    import torch

    if FAKE:
        device = Fake()
        with device.machine:
            yield device
    elif torch.cuda.is_available():
        yield Real()
    else:
        pytest.skip("needs a CUDA device")
