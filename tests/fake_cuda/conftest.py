"""In a process with the fake device ``case_*.py`` are collected; in any other only what starts such a process."""

import pytest

from ..gpus import FAKE
from .machine import Machine

if not FAKE:
    collect_ignore_glob = ["case_*.py"]


@pytest.fixture
def machine():
    """The fake device, for the length of a test."""
    with Machine() as made:
        yield made
