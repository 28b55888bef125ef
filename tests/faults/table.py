"""All faults, a file for each room: ``make faults`` plants each."""

import importlib
from pathlib import Path

from .fault import Fault

#: What belongs to no room.
_OWN = {"__init__", "fault", "plant", "table", "test_faults"}
_ROOMS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _OWN)
FAULTS: tuple[Fault, ...] = tuple(
    fault for room in _ROOMS for fault in importlib.import_module(f".{room}", __package__).FAULTS
)
