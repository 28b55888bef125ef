"""In a process with the fake device ``case_*.py`` are collected; in any other only what starts such a process."""

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from mezzo.cast.model import checks

from ..gpus import FAKE
from .machine import Machine

if not FAKE:
    collect_ignore_glob = ["case_*.py"]


@pytest.fixture
def machine(monkeypatch):
    """The fake device, for the length of a test: its parameters are no class of a program's own."""
    is_plain = checks.is_plain
    monkeypatch.setattr(checks, "is_plain", lambda param: type(param) is FakeTensor or is_plain(param))
    with Machine() as made:
        yield made
