"""Calls whose arguments decide, not their name: what a product that contracts nothing gets, and its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from mezzo.policy import Treatment

#: Says what a call gets instead of its op's own treatment; ``None`` where that holds.
ByArguments: TypeAlias = Callable[[Any, Any], Treatment | None]

#: By the op's base name. A rule on the op is about all of its calls, and these are not asked.
BY_ARGUMENTS: Final[Mapping[str, ByArguments]] = {}
