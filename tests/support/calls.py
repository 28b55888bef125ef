"""What the host does, counted and not timed: the functions that mezzo's own lines call."""

import gc
import sys
from pathlib import Path

import mezzo

HOUSE = str(Path(mezzo.__file__).parent)


def calls_of(function, events=("call", "c_call")):
    """Return how many functions of mezzo's ran meanwhile, and how many of C's they called, both together.

    Args:
        function: What is called.
        events: Which of both count.
    """
    found = 0

    def count(frame, event, _):
        nonlocal found
        found += event in events and frame.f_code.co_filename.startswith(HOUSE)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # or it calls what sessions of before have left to be called when they go
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def base_and_slope(calls, few, many):
    """Return the calls of a step of no tensor, and those that each tensor adds.

    Args:
        calls: Gives the calls of a step, by the number of its tensors.
        few: A number of tensors.
        many: A larger one.
    """
    first, last = calls(few), calls(many)
    slope = (last - first) / (many - few)
    return first - slope * few, slope
