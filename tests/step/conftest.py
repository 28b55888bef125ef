"""The implementations of both passes, one after another."""

import pytest

from .executors.implementations import PARAMETERS, prepared


@pytest.fixture(params=PARAMETERS)
def each(request, monkeypatch):
    """Every implementation in turn."""
    return prepared(request, monkeypatch)


@pytest.fixture(params=["inductor"])
def inductor(request, monkeypatch):
    """The kernels that torch.compile makes, which take seconds each."""
    return prepared(request, monkeypatch)
