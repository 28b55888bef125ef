"""A CUDA graph, as far as a machine without one goes; and what capture is without a GPU."""

import contextlib
import types
import warnings

import pytest
import torch

import mezzo
from mezzo.session.graph import CudaGraph

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
        for name in ("set_stream", "graph_pool_handle", "current_stream"):
            found = {"graph_pool_handle": "pool"}.get(name, self.around)
            monkeypatch.setattr(torch.cuda, name, self.noting(name, found))
        for name in ("device", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, self.context(name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "throw-away")
        monkeypatch.setattr(torch, "zeros", self.noting("zeros", None))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, self.noting(name, None), raising=False)

    def noting(self, name, result):
        def call(*args, **kwargs):
            self.calls.append((name, *args))
            if name in self.failing:
                raise RuntimeError(name)
            return result

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
    names = ["device", "current_stream", "graph_pool_handle", "graph", "end of graph", "set_stream", "end of device"]
    assert [name for name, *_ in calls] == names
    assert calls[3][1:3] == ("graph", "pool")
    assert driver.calls[3] == "graph waits for around"  # what was written just now is read by the recorded step


@pytest.mark.parametrize("worse", [(), ("_cuda_endAllocateToPool",), ("_cuda_releasePool", "throw-away")])
def test_a_capture_that_failed_is_ended(monkeypatch, worse, caplog):
    caplog.set_level("DEBUG", "mezzo.session.graph")
    driver = Driver(monkeypatch, ("graph", *worse))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        driver.graph().record(lambda: 7)
    after = driver.calls[driver.calls.index(("end of graph", "graph")) + 1 :]
    pool = [("_cuda_endAllocateToPool", 1, "pool"), ("_cuda_releasePool", 1, "pool")]
    assert after == [
        ("set_stream", driver.around),
        *(pool[:1] if worse == ("_cuda_endAllocateToPool",) else pool),  # nothing is released twice
        ("graph", "throw-away"),
        ("zeros", 1),
        ("end of graph", "throw-away"),
        ("set_stream", driver.around),
        ("end of device", "cuda:1"),
    ]
    assert len(caplog.records) == len(worse)


# Without a GPU -------------------------------------------------------------------------------------------


def test_a_session_on_the_cpu_is_called_plainly(bits):
    eager, other = Loop(), Loop()
    captured = mezzo.capture(other.train_step, other.amp)
    assert not captured.is_graph
    assert repr(captured) == "Captured(Loop.train_step, plain calls)"
    data = batches(range(6), bad=(2,))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, captured, data))
    assert not captured(*batch(6))["loss"].requires_grad


def test_its_text_says_what_it_is():
    loop = Loop()
    captured = loop.captured()
    assert captured.is_graph
    assert repr(captured) == "Captured(Loop.train_step, to be recorded)"
    for data in batches(range(4)):
        captured(*data)
    assert repr(captured) == "Captured(Loop.train_step, a graph)"
