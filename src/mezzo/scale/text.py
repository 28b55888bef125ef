"""The text form of a loss scale: ``none``, ``constant(1024)``, ``dynamic(init=1024,interval=100)``.

Words are separated by commas inside one pair of parentheses, and only what differs from the defaults is
written, so that the text can stand inside a policy's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mezzo.errors import PolicyError, nearest, shown
from mezzo.scale.checks import COUNTS, MODES, OPTIONAL, unknown_fields, written

__all__ = ["read", "write"]

_SHAPE = re.compile(r"(?P<mode>\w+)\s*(?:\((?P<words>[^()]*)\))?", re.ASCII)
_LONGEST_TEXT = 1000  # characters: all fields take 300
_POWER = re.compile(r"2\*\*(?P<exponent>-?\d{1,4})", re.ASCII)


def write(mode: str, changed: Mapping[str, Any]) -> str:
    """Write a mode and the fields that differ from the defaults.

    Example:
        >>> write("dynamic", {"init": 1024.0, "floor": 2.0**-126, "ceiling": None})
        'dynamic(init=1024,floor=2**-126,ceiling=none)'
    """
    words = [f"{name}={written(value)}" for name, value in changed.items()]
    if mode == "none":
        return mode
    if mode == "constant":
        # Its scale needs no name; 2^16 is the field's default and so is not among the changes.
        scale = written(changed.get("init", 2.0**16))
        words = [scale, *(word for word in words if not word.startswith("init="))]
    return f"{mode}({','.join(words)})" if words else mode


def read(text: str) -> dict[str, Any]:
    """Read what :func:`write` wrote, or a plain number, into the fields of a ``LossScale``.

    Raises:
        PolicyError: The text is not of that form; one message lists every word that cannot be read.

    Example:
        >>> read("constant(2**10)")
        {'mode': 'constant', 'init': 1024.0}
    """
    if len(text) > _LONGEST_TEXT:
        raise PolicyError(
            f"loss scale {shown(text)} is too long",
            why=f"a loss scale's text has at most {_LONGEST_TEXT:,} characters",
            write="dynamic(init=1024,interval=100)",
        )
    number = _number(text.strip())
    if number is not None:
        return {"mode": "constant", "init": number}
    shape = _SHAPE.fullmatch(text.strip())
    if shape is None or shape["mode"] not in MODES:
        raise PolicyError(
            f"unknown loss scale {text!r}",
            why=nearest(shape["mode"] if shape else text, MODES),
            write="none, dynamic, dynamic(init=1024,interval=100), constant(1024) or 1024",
        )
    fields, found = _fields(shape["mode"], shape["words"], where=f"loss scale {text!r}")
    if found:
        raise PolicyError.together(found)
    return fields


def _fields(mode: str, words: str | None, where: str) -> tuple[dict[str, Any], list[PolicyError]]:
    fields: dict[str, Any] = {"mode": mode}
    found: list[PolicyError] = []
    if mode == "none":
        fields["init"] = 1.0
    given = [word.strip() for word in words.split(",")] if words and words.strip() else []
    if mode == "constant":
        if not given or "=" in given[0]:
            found.append(PolicyError("a constant scale needs its factor", where=where, write="constant(1024)"))
        else:
            given[0] = f"init={given[0]}"
    seen = set()
    for word in given:
        name, equals, value = (part.strip() for part in word.partition("="))
        unknown = list(unknown_fields({name: value}, where)) if equals else []
        if not equals:
            found.append(PolicyError(f"{word!r} is no field", where=where, write="name=value, as init=1024"))
        elif name in seen:
            found.append(PolicyError(f"{name} is given twice", where=where))
        elif unknown:
            found.extend(unknown)
        else:
            fields[name], problem = _value(name, value)
            if problem:
                found.append(PolicyError(f"{name} is {value!r}", where=where, why=problem))
        seen.add(name)
    return fields, found


def _value(name: str, text: str) -> tuple[Any, str]:
    """Read the value of a field; the second result says what is wrong with it."""
    if name == "refill":
        return text, ""
    if name in OPTIONAL and text == "none":
        return None, ""
    number = _number(text)
    if number is None:
        return None, "a number was expected" + (", or none" if name in OPTIONAL else "")
    if name in COUNTS:
        return (int(number), "") if number.is_integer() else (None, "a whole number was expected")
    return number, ""


def _number(text: str) -> float | None:
    power = _POWER.fullmatch(text)
    try:
        return math.ldexp(1.0, int(power["exponent"])) if power else float(text)
    except (ValueError, OverflowError):
        return None
