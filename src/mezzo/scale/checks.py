"""What no loss scale can be: the fields, their ranges, and why, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mezzo.errors import PolicyError, nearest, shown

if TYPE_CHECKING:
    from mezzo.scale.config import LossScale

__all__ = [
    "COUNTS",
    "FIELDS",
    "HIGHEST",
    "LOWEST",
    "MODES",
    "OPTIONAL",
    "REFILLS",
    "problems",
    "unknown_fields",
    "written",
]

MODES = ("none", "constant", "dynamic")
REFILLS = ("backoff", "clean", "growth", "clean+backoff")

#: Below float32's smallest normal number 1/scale would not be finite; torch's scale sinks to 0 there.
LOWEST = torch.finfo(torch.float32).smallest_normal
HIGHEST = torch.finfo(torch.float32).max


class Check(NamedTuple):
    """The range of one field."""

    accepts: Callable[[float], bool]
    why: str
    write: str


def _whole(least: int) -> Callable[[float], bool]:
    return lambda value: least <= value < 2**31


#: Every field with a range, in the order of the dataclass.
FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        "init": Check(
            lambda x: LOWEST <= x <= HIGHEST, "a scale is a normal float32 number, from 2**-126", "init=2**16"
        ),
        "growth": Check(lambda x: 1 < x <= HIGHEST, "a factor above 1 raises the scale", "growth=2"),
        "backoff": Check(lambda x: 0 < x < 1, "only a factor between 0 and 1 lowers the scale", "backoff=0.5"),
        "interval": Check(_whole(1), "it counts steps, from 1 to 2**31 - 1", "interval=2000"),
        "hysteresis": Check(_whole(1), "it counts overflows, from 1 to 2**31 - 1", "hysteresis=1"),
        "floor": Check(lambda x: LOWEST <= x <= HIGHEST, "a scale is a normal float32 number, from 2**-126", "floor=1"),
        "ceiling": Check(lambda x: LOWEST <= x <= HIGHEST, "a scale is a finite float32 number", "ceiling=None"),
        "patience": Check(_whole(1), "it counts overflows, from 1 to 2**31 - 1", "patience=None"),
        "growth_offset": Check(_whole(0), "it counts extra steps, from 0 to 2**31 - 1", "growth_offset=0"),
        "skip_rate_limit": Check(lambda x: 0 < x <= 1, "it is a share of the steps", "skip_rate_limit=0.25"),
    }
)
COUNTS = ("interval", "hysteresis", "patience", "growth_offset")
OPTIONAL = ("ceiling", "patience", "skip_rate_limit")

#: What a scale that never moves can have.
SETTABLE: Mapping[str, tuple[str, ...]] = MappingProxyType({"none": (), "constant": ("init", "patience")})


def problems(scale: LossScale) -> Iterator[PolicyError]:
    """Yield everything that is wrong with a loss scale, for one message."""
    if not isinstance(scale.mode, str) or scale.mode not in MODES:
        yield PolicyError(f"unknown mode {shown(scale.mode)}", why=nearest(shown(scale.mode), MODES))
        return
    bad = {}
    for name, check in FIELDS.items():
        value = getattr(scale, name)
        why = _fault(name, value, check)
        if why:
            bad[name] = PolicyError(f"{name} is {shown(value)}", where="LossScale", why=why, write=check.write)
    yield from bad.values()
    is_refill = isinstance(scale.refill, str) and scale.refill in REFILLS
    if not is_refill:
        yield PolicyError(
            f"unknown refill {shown(scale.refill)}", where="LossScale", why=nearest(shown(scale.refill), REFILLS)
        )
    if scale.mode == "dynamic":
        yield from _out_of_order(scale, bad)
    else:
        yield from _unused(scale, [*bad, *(() if is_refill else ("refill",))])


def unknown_fields(values: Mapping[str, Any], where: str) -> Iterator[PolicyError]:
    """Yield a problem for each name that is no field of a dynamic scale."""
    names = [*FIELDS, "refill"]
    for name in values:
        if name not in names:
            yield PolicyError(f"unknown field {name!r}", where=where, why=nearest(name, names))


def written(value: Any) -> str:
    """Write a field's value so that it reads back exactly; large and small powers of two as powers.

    Example:
        >>> written(2.0**24), written(1000.0), written(0.3), written(None)
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


def _fault(name: str, value: Any, check: Check) -> str:
    if value is None and name in OPTIONAL:
        return ""
    if isinstance(value, bool) or not isinstance(value, int if name in COUNTS else int | float):
        return "a whole number was expected" if name in COUNTS else "a number was expected"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number was expected"
    if not check.accepts(value):
        return check.why
    # Such an integer would come back from the text form as its neighbour.
    return "" if value == float(value) else "float64 does not hold it exactly"


def _out_of_order(scale: LossScale, bad: Mapping[str, object]) -> Iterator[PolicyError]:
    """Compare the scale's ends, as far as each is a scale at all."""
    for low, high in (("floor", "ceiling"), ("floor", "init"), ("init", "ceiling")):
        least, most = getattr(scale, low), getattr(scale, high)
        if low not in bad and high not in bad and most is not None and least > most:
            yield PolicyError(
                f"{low} {written(least)} is above {high} {written(most)}",
                where="LossScale",
                why="the scale stays between floor and ceiling",
                write=f"{high}={written(least)}" if high == "ceiling" else f"floor={written(most)}",
            )


def _unused(scale: LossScale, bad: Collection[str]) -> Iterator[PolicyError]:
    """Refuse fields that a scale which never moves would ignore."""
    defaults = {name: field.default for name, field in type(scale).__dataclass_fields__.items()}
    if scale.mode == "none":
        defaults["init"] = 1.0
    settable = ("mode", *SETTABLE[scale.mode], *bad)  # what is wrong anyhow has been told
    given = [name for name in defaults if name not in settable and getattr(scale, name) != defaults[name]]
    if given:
        yield PolicyError(
            f"a scale of mode {scale.mode!r} has no {', '.join(given)}",
            where="LossScale",
            why="it never moves",
            write="LossScale.none()" if scale.mode == "none" else f"LossScale.constant({shown(scale.init)})",
        )
