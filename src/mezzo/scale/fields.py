"""The fields of a loss scale: the range of each, and their text form.

Nothing here knows the class: checks and text work on mappings from field to value. The text is ``none``,
``constant(1024)`` or ``dynamic(init=1024,interval=100)``: words in one pair of parentheses, and only what differs from
the defaults, so that it can stand inside a policy's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from mezzo.errors import PolicyError, nearest, raise_together, shown, unknown_word

__all__ = ["LOWEST", "problems", "read", "unknown_fields", "write"]

MODES: Final = ("none", "constant", "dynamic")
REFILLS: Final = ("backoff", "clean", "growth", "clean+backoff")

#: Below float32's smallest normal number 1/scale would not be finite; torch's scale sinks to 0 there.
LOWEST: Final = torch.finfo(torch.float32).smallest_normal
HIGHEST: Final = torch.finfo(torch.float32).max

_LONGEST_TEXT: Final = 1000  # characters: all fields take 300
_SHAPE: Final = re.compile(r"(?P<mode>\w+)\s*(?:\((?P<words>[^()]*)\))?", re.ASCII)
_POWER: Final = re.compile(r"2\*\*(?P<exponent>-?\d{1,4})", re.ASCII)


class _Field(NamedTuple):
    """What one field can be."""

    accepts: Callable[[Any], bool]
    why: str
    write: str
    is_count: bool = False
    is_optional: bool = False
    words: tuple[str, ...] = ()


def _counting(what: str, write: str, *, least: int = 1, is_optional: bool = False) -> _Field:
    why = f"it counts {what}, from {least} to 2**31 - 1"
    return _Field(lambda value: least <= value < 2**31, why, write, is_count=True, is_optional=is_optional)


def _normal(value: float) -> bool:
    return LOWEST <= value <= HIGHEST


#: Every field of a dynamic scale, in the order of the class.
_FIELDS: Final[Mapping[str, _Field]] = MappingProxyType(
    {
        "init": _Field(_normal, "a scale is a normal float32 number, from 2**-126 to 3.4e38", "2**16"),
        "growth": _Field(lambda x: 1 < x <= HIGHEST, "a factor above 1 raises the scale", "growth=2"),
        "backoff": _Field(lambda x: 0 < x < 1, "only a factor between 0 and 1 lowers the scale", "backoff=0.5"),
        "interval": _counting("steps", "interval=2000"),
        "hysteresis": _counting("overflows", "hysteresis=1"),
        "refill": _Field(REFILLS.__contains__, "it is a word", "refill=clean", words=REFILLS),
        "floor": _Field(_normal, "a scale is a normal float32 number, from 2**-126", "floor=1"),
        "ceiling": _Field(_normal, "a scale is a finite float32 number", "ceiling=None", is_optional=True),
        "patience": _counting("overflows", "patience=None", is_optional=True),
        "growth_offset": _counting("extra steps", "growth_offset=0", least=0),
        "skip_rate_limit": _Field(
            lambda x: 0 < x <= 1, "it is a share of the steps", "skip_rate_limit=0.25", is_optional=True
        ),
    }
)
#: What a scale that never moves can have.
_SETTABLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"none": (), "constant": ("init", "patience")})


# Checks -----------------------------------------------------------------------------------------------


def problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[PolicyError]:
    """Yield everything that is wrong with the fields of a loss scale, for one message.

    Args:
        values: The value of every field.
        defaults: What each is where nothing is given.
    """
    mode = values["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        yield unknown_word("mode", mode, MODES)
        return
    faults: dict[str, PolicyError] = {}
    for name in _FIELDS:  # a comprehension here would be more than torch.compile can trace
        if (fault := _fault(name, values[name], "LossScale")) is not None:
            faults[name] = fault
    yield from faults.values()
    # What is wrong by itself has been told, and is not compared with anything.
    yield from _out_of_order(values, faults) if mode == "dynamic" else _unused(mode, values, defaults, faults)


def unknown_fields(names: Collection[str], where: str) -> Iterator[PolicyError]:
    """Yield a problem for each name that is no field of a dynamic scale."""
    for name in names:
        if name not in _FIELDS:
            yield PolicyError(f"unknown field {name!r}", where=where, why=nearest(name, _FIELDS))


def _fault(name: str, value: Any, where: str) -> PolicyError | None:
    field = _FIELDS[name]
    if value is None and field.is_optional:
        return None
    if field.words:
        if isinstance(value, str) and field.accepts(value):
            return None
        return PolicyError(f"unknown {name} {shown(value)}", where=where, why=nearest(shown(value), field.words))
    if isinstance(value, bool) or not isinstance(value, int if field.is_count else int | float):
        why = "a whole number was expected" if field.is_count else "a number was expected"
        why += ", or none" if isinstance(value, str) and field.is_optional else ""
    elif isinstance(value, float) and not math.isfinite(value):
        why = "a finite number was expected"
    elif not field.accepts(value):
        why = field.why
    elif value != float(value):  # such an integer would come back from the text form as its neighbour
        why = "float64 does not hold it exactly"
    else:
        return None
    return PolicyError(f"{name} is {shown(value)}", where=where, why=why, write=field.write)


def _out_of_order(values: Mapping[str, Any], wrong: Collection[str]) -> Iterator[PolicyError]:
    for low, high in (("floor", "ceiling"), ("floor", "init"), ("init", "ceiling")):
        least, most = values[low], values[high]
        if low not in wrong and high not in wrong and most is not None and least > most:
            yield PolicyError(
                f"{low} {_written(least)} is above {high} {_written(most)}",
                where="LossScale",
                why="the scale stays between floor and ceiling",
                write=f"{high}={_written(least)}" if high == "ceiling" else f"floor={_written(most)}",
            )


def _unused(
    mode: str, values: Mapping[str, Any], defaults: Mapping[str, Any], wrong: Collection[str]
) -> Iterator[PolicyError]:
    """Refuse fields that a scale which never moves would ignore."""
    expected = {**defaults, "mode": mode, **({"init": 1.0} if mode == "none" else {})}
    settable = (*_SETTABLE[mode], *wrong)
    if given := [name for name in values if name not in settable and values[name] != expected[name]]:
        yield PolicyError(
            f"a scale of mode {mode!r} has no {', '.join(given)}",
            where="LossScale",
            why="it never moves",
            write="LossScale.none()" if mode == "none" else f"LossScale.constant({shown(values['init'])})",
        )


# Text -------------------------------------------------------------------------------------------------


def write(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Write the fields of a loss scale that differ from the defaults.

    Example:
        >>> write({"mode": "dynamic", "init": 1024.0, "floor": 2.0**-126}, {"init": 65536.0, "floor": 1.0})
        'dynamic(init=1024,floor=2**-126)'
    """
    mode = values["mode"]
    if mode == "none":
        return "none"
    named = [name for name, usual in defaults.items() if values[name] != usual and name != "mode"]
    words = [f"{name}={_written(values[name])}" for name in named if mode == "dynamic" or name != "init"]
    if mode == "constant":  # its scale needs no name
        words = [_written(values["init"]), *words]
    return f"{mode}({','.join(words)})" if words else str(mode)


def _written(value: Any) -> str:
    """Write a field's value so that it reads back exactly; large and small powers of two as powers.

    Example:
        >>> _written(2.0**24), _written(1000.0), _written(0.3), _written(None)
        ('2**24', '1000', '0.3', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not 2.0**-10 <= value < 2.0**20:
        return f"2**{exponent - 1}"
    return str(int(value)) if float(value).is_integer() and value < 2.0**53 else repr(float(value))


def read(text: str) -> dict[str, Any]:
    """Read what :func:`write` wrote, or a plain number, into fields.

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
    if (number := _number(text.strip())) is not None:
        return {"mode": "constant", "init": number}
    shape = _SHAPE.fullmatch(text.strip())
    if shape is None or shape["mode"] not in MODES:
        is_open = text.count("(") > text.count(")")
        raise PolicyError(
            f"unknown loss scale {text!r}",
            why="a bracket is not closed" if is_open else nearest(shape["mode"] if shape else text, MODES),
            write="none, dynamic, dynamic(init=1024,interval=100), constant(1024) or 1024",
        )
    mode, where = shape["mode"], f"loss scale {text!r}"
    words = shape["words"].split(",") if (shape["words"] or "").strip() else []
    fields: dict[str, Any] = {"mode": mode, **({"init": 1.0} if mode == "none" else {})}
    raise_together(_read_words(mode, [word.strip() for word in words], fields, where))
    return fields


def _read_words(mode: str, words: list[str], fields: dict[str, Any], where: str) -> Iterator[PolicyError]:
    if mode == "constant":
        if not words or "=" in words[0]:
            yield PolicyError("a constant scale needs its factor", where=where, write="constant(1024)")
        else:
            words[0] = f"init={words[0]}"
    seen = set()
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            yield PolicyError(f"{word!r} is no field", where=where, write="name=value, as init=1024")
        elif name in seen:
            yield PolicyError(f"{name} is given twice", where=where)
        elif unknown := list(unknown_fields([name], where)):
            yield from unknown
        else:
            fields[name] = _value(name, value)
            if (fault := _fault(name, fields[name], where)) is not None:
                yield fault
        seen.add(name)


def _value(name: str, text: str) -> Any:
    """Read the value of a field; what cannot be one stays text."""
    field, number = _FIELDS[name], _number(text)
    if number is None:
        return None if field.is_optional and text == "none" else text
    if field.words or (field.is_count and not number.is_integer()):
        return text
    return int(number) if field.is_count else number


def _number(text: str) -> float | None:
    power = _POWER.fullmatch(text)
    try:
        return math.ldexp(1.0, int(power["exponent"])) if power else float(text)
    except (ValueError, OverflowError):
        return None
