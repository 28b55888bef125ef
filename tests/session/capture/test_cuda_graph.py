"""A CUDA graph, as far as a machine without one goes; and what capture is without a GPU."""

import contextlib
import sys
import types
import warnings

import pytest
import torch

import mezzo
from mezzo import LossScale
from mezzo.session.capture.cuda import CudaGraph, _syncs_refused

from .host_graph import HostGraph
from .loops import Loop, batch, batches, everything, run

# A CUDA graph, as far as a machine without one goes ------------------------------------------------------


def test_syncs_are_refused_where_warnings_are_errors(monkeypatch):
    modes = ["default"]

    def set_mode(mode):
        modes.append(mode)
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _syncs_refused():
            assert modes[-1] == "error"
    assert modes == ["default", "error", "default"]
    with pytest.raises(KeyError), _syncs_refused():
        raise KeyError
    assert modes[-1] == "default"


class Driver:
    """CUDA as ``CudaGraph`` calls it, written down."""

    def __init__(self, monkeypatch, failing):
        self.calls, self.failing = [], failing
        for name in ("set_stream", "graph_pool_handle", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, self.noting(name, {"graph_pool_handle": "pool"}.get(name, "around")))
        for name in ("device", "graph"):
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
                if args[0] in self.failing:
                    raise RuntimeError("operation failed due to a previous error during capture")

        return entered

    def record(self, run):
        made = object.__new__(CudaGraph)
        made.device, made._graph, made._stream = "cuda:1", "graph", types.SimpleNamespace(device=torch.device("cuda:1"))
        return made.record(run)


def test_a_capture_puts_the_stream_back_on_its_own_device(monkeypatch):
    driver = Driver(monkeypatch, ())
    assert driver.record(lambda: 7) == 7
    names = [name for name, *_ in driver.calls]
    assert names == ["device", "current_stream", "graph_pool_handle", "graph", "end of graph", "set_stream", *names[6:]]
    assert names[6:] == ["end of device"]
    assert driver.calls[3][1:3] == ("graph", "pool")


@pytest.mark.parametrize("worse", [(), ("_cuda_endAllocateToPool",), ("_cuda_releasePool", "throw-away")])
def test_a_capture_that_failed_is_ended(monkeypatch, worse, caplog):
    caplog.set_level("DEBUG", "mezzo.session.capture.cuda")
    driver = Driver(monkeypatch, ("graph", *worse))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        driver.record(lambda: 7)
    after = driver.calls[driver.calls.index(("end of graph", "graph")) + 1 :]
    pool = [("_cuda_endAllocateToPool", 1, "pool"), ("_cuda_releasePool", 1, "pool")]
    assert after == [
        ("set_stream", "around"),
        *(pool[:1] if worse == ("_cuda_endAllocateToPool",) else pool),  # nothing is released twice
        ("graph", "throw-away"),
        ("zeros", 1),
        ("end of graph", "throw-away"),
        ("set_stream", "around"),
        ("end of device", "cuda:1"),
    ]
    assert len(caplog.records) == len(worse)


# Without a GPU -------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_is_the_train_step_itself(bits):
    eager, other = Loop(), Loop()
    before, _ = everything(other)
    captured = mezzo.capture(other.train_step, *batch(0))
    assert bits(before) == bits(everything(other)[0])
    assert not captured.is_graph
    assert repr(captured) == "Captured(Loop.train_step(x, y, boost), plain calls)"
    data = batches(range(6), bad=(2,))
    assert bits(run(eager, eager.train_step, data)) == bits(run(other, captured, data))


def test_its_text_says_what_it_is():
    loop = Loop()
    captured = loop.captured()
    assert captured.is_graph
    assert repr(captured) == "Captured(Loop.train_step(x, y, boost), graph)"


def test_on_a_machine_with_a_gpu_a_session_on_the_cpu_is_called_plainly(monkeypatch, bits):
    class Elsewhere(HostGraph):
        device = torch.device("meta")

    module = sys.modules["mezzo.session.capture.captured"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(module, "CudaGraph", lambda device: Elsewhere())
    loop = Loop(scale=LossScale.none())
    before, _ = everything(loop)
    called = []

    def train_step(x, y, boost):
        with loop.amp.autocast():
            called.append(x.device.type)
        return loop.train_step(x, y, boost)

    captured = mezzo.capture(train_step, *batch(0))
    assert not captured.is_graph
    assert not called  # the session's first call ended the attempt
    assert bits(before) == bits(everything(loop)[0])
    captured(*batch(0))
    assert called == ["cpu"]
