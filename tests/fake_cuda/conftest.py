"""In a process with the fake device ``case_*.py`` are collected; in any other only what starts such a process."""

import os
from pathlib import Path

import pytest

from .machine import Machine, plug_in

LIBRARY = os.environ.get("MEZZO_FAKE_CUDA")
if LIBRARY:
    plug_in(Path(LIBRARY))
else:
    collect_ignore_glob = ["case_*.py"]


@pytest.fixture
def machine():
    """The fake device, for the length of a test."""
    with Machine() as made:
        yield made
