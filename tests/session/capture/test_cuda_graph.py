"""A CUDA graph, as far as a machine without one goes; and what capture is without a GPU."""

import contextlib
import types
import warnings

import pytest
import torch

import mezzo
from mezzo.session.capture import CudaGraph

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
                if args and args[0] in self.failing:
                    raise RuntimeError("operation failed due to a previous error during capture")

        return entered

    def stream(self, name, other):
        def wait_stream(_):
            self.calls.append(f"{name} waits for {other}")

        return types.SimpleNamespace(device=torch.device("cuda:1"), wait_stream=wait_stream)

    def graph(self):
        made = object.__new__(CudaGraph)
        made._device, made._graph, made._stream = "cuda:1", "graph", self.stream("graph", "around")
        return made


def test_a_capture_puts_the_stream_back_on_its_own_device(monkeypatch):
    driver = Driver(monkeypatch, ())
    assert driver.graph().record(lambda: 7) == 7
    calls = [call for call in driver.calls if not isinstance(call, str)]
    names = ["device", "current_stream", "graph", "end of graph", "set_stream", "end of device"]
    assert [name for name, *_ in calls] == names
    assert driver.calls[2] == "graph waits for around"  # what was written just now is read by the recorded step


def test_a_capture_that_failed_puts_the_stream_back(monkeypatch):
    driver = Driver(monkeypatch, ("graph",))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        driver.graph().record(lambda: 7)
    assert driver.calls[-2:] == [("set_stream", driver.around), ("end of device", "cuda:1")]


# Without a GPU -------------------------------------------------------------------------------------------


def test_a_session_on_the_cpu_is_called_plainly():
    eager, other = Loop(), Loop()
    captured = mezzo.capture(other.train_step, other.amp)
    assert repr(captured) == "Captured(Loop.train_step)"
    data = batches(range(6), bad=(2,))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, captured, data))
    assert not captured(*batch(6))["loss"].requires_grad
