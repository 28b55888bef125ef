"""Values as JSON, in text and in files: numbers that JSON lacks are texts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from mezzo.files import whole

__all__ = ["json_text", "jsonable", "save_json"]


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


def json_text(value: Any) -> str:
    """Write a value as JSON for people and programs: indented, any letters as they are.

    Example:
        >>> print(json_text({"ε": float("nan")}))
        {
          "ε": "nan"
        }
    """
    return json.dumps(jsonable(value), indent=2, allow_nan=False, ensure_ascii=False)


def save_json(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a value as JSON into a file, which appears whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    with whole(path) as file:
        file.write(f"{json_text(value)}\n".encode())
