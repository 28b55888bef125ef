"""The one place that looks inside the active region: what it opens, and which parameter rule speaks about a call."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn import functional

from mezzo.cast.differences import open_function
from mezzo.cast.mode import acting_differences, pinned_parameter
from mezzo.policy import Treatment
from mezzo.policy.ops import OPS
from mezzo.trace.frames import op_name

__all__ = ["opened_by_region", "pinned"]


def opened_by_region(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the copy of a Python function to run in its place, so that the ops inside it are seen one by one.

    What the region itself would open is opened here first, with the region below, which changes nothing. Other
    Python functions are opened where the op table has no decision about the function as a whole; to them too it is
    all the same, unless an argument's class overrides torch functions.
    """
    differences = acting_differences(args, kwargs)
    if differences is not None:
        if pinned(args, kwargs) is not None or differences.handler(function) is not None:
            return None
        if (opened := differences.opened.get(function)) is not None:
            return opened
    if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
        return None
    entry = OPS.get(op_name(function))
    return None if entry is not None and not entry.parts else _openable(function)


def pinned(args: Any, kwargs: Any) -> tuple[torch.Tensor, Treatment] | None:
    """Return the parameter among the arguments that a parameter rule speaks about, and its treatment."""
    differences = acting_differences(args, kwargs)
    if differences is None or not differences.pinned:
        return None
    param = pinned_parameter(differences, args, kwargs)
    return None if param is None else (param, differences.pinned[id(param)])


@functools.lru_cache(maxsize=1024)
def _openable(function: Any) -> Any:
    if not inspect.isfunction(function) or function.__module__ not in (functional.__name__, "torch.functional"):
        return None
    if not any(name.startswith("has_torch_function") for name in function.__code__.co_names):
        return None
    return open_function(function)
