"""A CUDA graph, as far as a machine without one goes; and what capture is without a GPU."""

import contextlib
import types
import warnings

import pytest
import torch

import mezzo
from mezzo.session.capture import CudaGraph, _stream_of

from ...support.refusals import bits
from .loops import Loop, batch, batches, run

# A CUDA graph, as far as a machine without one goes ------------------------------------------------------


def test_syncs_are_refused_on_the_stream_of_the_graph_where_warnings_are_errors(monkeypatch):
    modes, driver = ["default"], Driver(monkeypatch, ())

    def set_mode(mode):
        modes.append(mode)
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    graph = driver.graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graph.run(lambda: modes[-1], refuses_syncs=True) == "error"
        assert graph.run(lambda: modes[-1]) == "default"
    assert modes == ["default", "error", "default"]
    with pytest.raises(KeyError):
        graph.run(lambda: {}["mine"], refuses_syncs=True)
    assert modes[-1] == "default"
    waits = ["graph waits for around", "around waits for graph"]
    assert [call for call in driver.calls if "waits" in str(call)] == 3 * waits


class Driver:
    """CUDA as ``CudaGraph`` calls it, written down."""

    def __init__(self, monkeypatch, failing):
        self.calls, self.failing = [], failing
        self.around = self.stream("around", "graph")
        for name in ("set_stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, self.noting(name))
        for name in ("device", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, self.context(name))
        generator = types.SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=self.noting("set_state"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "default_generators", [None, generator])

    def noting(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, *args))
            return self.around

        return call

    def context(self, name):
        @contextlib.contextmanager
        def entered(*args, **kwargs):
            self.calls.append((name, *args))
            try:
                yield
            finally:
                self.calls.append((f"end of {name}", *args[:1]))
                if name in self.failing:
                    raise RuntimeError("operation failed due to a previous error during capture")

        return entered

    def stream(self, name, other):
        def wait_stream(_):
            self.calls.append(f"{name} waits for {other}")

        return types.SimpleNamespace(device=torch.device("cuda:1"), wait_stream=wait_stream)

    def graph(self):
        made = object.__new__(CudaGraph)
        made._device, made._stream = "cuda:1", self.stream("graph", "around")
        made._graph = types.SimpleNamespace(reset=self.noting("reset"))
        return made


def test_a_capture_puts_the_stream_back_on_its_own_device(monkeypatch):
    driver = Driver(monkeypatch, ())
    assert driver.graph().record(lambda: 7) == 7
    calls = [call for call in driver.calls if not isinstance(call, str)]
    names = ["device", "current_stream", "graph", "end of graph", "set_stream", "end of device"]
    assert [name for name, *_ in calls] == names
    assert driver.calls[2] == "graph waits for around"  # what was written just now is read by the recorded step


def test_a_capture_that_failed_leaves_stream_and_random_numbers_usable(monkeypatch):
    """Random numbers would wait for the graph: on an H100 with torch 2.11 each later one raised."""
    driver = Driver(monkeypatch, ("graph",))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        driver.graph().record(lambda: 7)
    assert driver.calls[-4:] == [
        *(("reset",), ("set_state", "a copy")),
        *(("set_stream", driver.around), ("end of device", "cuda:1")),
    ]


def test_captures_on_one_device_share_a_stream(monkeypatch):
    """For each that cuBLAS meets it keeps memory: 68 MB a capture on an H100."""
    Driver(monkeypatch, ())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    _stream_of.cache_clear()
    try:
        first, second = CudaGraph("cuda:1"), CudaGraph("cuda:1")
    finally:
        _stream_of.cache_clear()
    assert first._stream is second._stream
    assert first._graph is not second._graph


# Without a GPU -------------------------------------------------------------------------------------------


def test_a_session_on_the_cpu_is_called_plainly():
    eager, other = Loop(), Loop()
    captured = mezzo.capture(other.train_step, other.amp)
    assert repr(captured) == "Captured(Loop.train_step)"
    data = batches(range(6), bad=(2,))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, captured, data))
    assert not captured(*batch(6))["loss"].requires_grad
