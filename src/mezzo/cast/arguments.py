"""Calls whose arguments decide, not their name: what a product that contracts nothing gets, and its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from mezzo.policy import Treatment

#: Says what a call gets instead of its op's own treatment; ``None`` where that holds.
ByArguments: TypeAlias = Callable[[Any, Any], Treatment | None]


def _when(name: str, place: int) -> ByArguments:
    """Compute what adds one by one in FP32, where an argument of a mover says that it adds."""

    def is_sum(args: Any, kwargs: Any) -> Treatment | None:
        return "fp32_math" if kwargs.get(name) or (len(args) > place and args[place]) else None

    return is_sum


#: By the op's base name. A rule on the op is about all of its calls, and these are not asked.
BY_ARGUMENTS: Final[Mapping[str, ByArguments]] = {
    "index_put": _when("accumulate", 3),
    "put": _when("accumulate", 3),
    "scatter": _when("reduce", 4),
}
