"""The work of the host, counted and not timed: the functions that mezzo's own lines call."""

import gc
import sys
from pathlib import Path

import mezzo

HOUSE = str(Path(mezzo.__file__).parent)


def calls_of(function, events=("call", "c_call")):
    """Return how many functions of mezzo's a call runs, and how many C functions they call, together.

    Args:
        function: The function to call.
        events: Which of both to count.
    """
    num_calls = 0

    def count(frame, event, _):
        nonlocal num_calls
        num_calls += event in events and frame.f_code.co_filename.startswith(HOUSE)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # or finalizers of earlier sessions would count
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return num_calls


def base_and_slope(calls, few, many):
    """Return the calls of a step of no tensor, and those that each tensor adds.

    Args:
        calls: Returns the calls of a step, by the number of its tensors.
        few: A number of tensors.
        many: A larger one.
    """
    first, last = calls(few), calls(many)
    slope = (last - first) / (many - few)
    return first - slope * few, slope
