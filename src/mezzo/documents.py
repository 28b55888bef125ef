"""Values as JSON: numbers that JSON lacks are texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["jsonable"]


def jsonable(value: Any) -> Any:
    """Replace what JSON cannot write: non-finite numbers by their names, tuples by lists.

    Example:
        >>> jsonable({"loss": float("nan"), "ms": (1.5, float("-inf"))})
        {'loss': 'nan', 'ms': [1.5, '-inf']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    return value
