"""Values as JSON and back: numbers that JSON lacks are texts, and what is read is what the fields of a class say."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Final, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from mezzo.errors import StateError, shown

__all__ = ["Document", "built", "is_count", "is_number", "jsonable"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A value whose fields are plain ones, other dataclasses and tuples of these."""

    _version: ClassVar[int] = 1
    #: Properties that are written for readers of the JSON, and follow from the fields when it is read back.
    _derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them."""
        data: dict[str, Any] = json.loads(self.to_json())
        return data

    def to_json(self) -> str:
        """Write everything as one JSON object; ``from_json`` reads it back."""
        derived = {name: dataclasses.asdict(getattr(self, name)) for name in self._derived}
        data = {"version": self._version, **derived, **dataclasses.asdict(self)}
        return json.dumps(jsonable(data), indent=2, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            StateError: It is not JSON, not a document of this class, or one of another version.
        """
        name = cls.__name__.lower()

        def refused(why: str, what: str = f"this is no {name}") -> StateError:
            return StateError(what, why=why, write=f"{name}.to_json(), read back with {cls.__name__}.from_json(text)")

        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise refused(f"not JSON: {error}") from error
        if not isinstance(data, dict) or "version" not in data:
            raise refused("it names no version")
        if (version := data.pop("version")) != cls._version:
            raise refused(f"this mezzo reads version {cls._version}", f"the {name} has version {version!r}")
        for derived in cls._derived:
            data.pop(derived, None)
        try:
            return built(cls, data)
        except ValueError as error:
            raise refused(f"a field is wrong: {error}") from error


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


def built(kind: type[T], value: Any, name: str = "it") -> T:
    """Build a value from what :func:`jsonable` made of it.

    Args:
        kind: A dataclass whose fields are texts, flags, counts, numbers, literals, ``None`` or one of these, tuples and
            mappings of them, and other such classes.
        value: What JSON has for it.
        name: What the error calls it.

    Raises:
        ValueError: It is something else; the message says which part, and what it should be.

    Example:
        >>> @dataclass
        ... class Point:
        ...     step: int
        ...     loss: float = 0.0
        >>> built(Point, {"step": 3, "loss": "nan"})
        Point(step=3, loss=nan)
        >>> built(Point, {"step": "3"})
        Traceback (most recent call last):
        ValueError: step is '3', not a count
    """
    found: T = _built(kind, value, name)
    return found


def is_count(value: Any) -> bool:
    """Whether it is an integer that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Whether it is a number, or one of the texts that stand for those that JSON lacks; ``float()`` reads both."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 2**1023


_LEAVES: Final[Mapping[Any, tuple[Callable[[Any], bool], Callable[[Any], Any], str]]] = {
    str: (lambda value: isinstance(value, str), str, "text"),
    bool: (lambda value: isinstance(value, bool), bool, "true or false"),
    int: (is_count, int, "a count"),
    float: (is_number, float, "a number"),
}


def _built(kind: Any, value: Any, name: str) -> Any:
    if kind in _LEAVES:
        fits, make, words = _LEAVES[kind]
        return make(_required(fits(value), value, name, words))
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        (other,) = (each for each in inner if each is not NoneType)
        return None if value is None else _built(other, value, name)
    if origin is Literal:
        return _required(value in inner, value, name, f"one of {', '.join(inner)}")
    if origin is tuple:
        _required(isinstance(value, list), value, name, "a list")
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(value) != len(kinds):
            raise ValueError(f"{name} has {len(value)} values, not {len(kinds)}")
        return tuple(_built(each, item, f"{name} {n}") for n, (each, item) in enumerate(zip(kinds, value, strict=True)))
    _required(isinstance(value, dict), value, name, "an object")
    if origin is not None:
        return {key: _built(inner[1], item, f"{name} {key}") for key, item in value.items()}
    types, needed = _fields(kind)
    if unknown := [key for key in value if key not in types]:
        raise ValueError(f"{shown(unknown[0])} is no field of {name}")
    if missing := [key for key in needed if key not in value]:
        raise ValueError(f"{name} has no {', '.join(missing)}")
    within = "" if name == "it" else f"{name}, "
    return kind(**{key: _built(types[key], item, f"{within}{key}") for key, item in value.items()})


def _required(fits: bool, value: Any, name: str, words: str) -> Any:
    if not fits:
        raise ValueError(f"{name} is {shown(value)}, not {words}")
    return value


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a class's fields, and those that have no default."""
    hints, fields, none = get_type_hints(kind), dataclasses.fields(kind), dataclasses.MISSING
    needed = [each.name for each in fields if each.default is none and each.default_factory is none]
    return {each.name: hints[each.name] for each in fields}, needed
