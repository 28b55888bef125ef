"""Captures on the CPU: executors that a stand-in for a graph can replay."""

import pytest

from mezzo.optim import optimizer as one_pass
from mezzo.step import gradients
from mezzo.weights import codec

from .host_graph import Predicated


@pytest.fixture(autouse=True)
def _predicated(monkeypatch):
    for module in (one_pass, gradients):
        monkeypatch.setattr(module, "executor_for", lambda device: Predicated())
    monkeypatch.setattr(codec, "update_of", Predicated().update_of)
