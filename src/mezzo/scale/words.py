"""The fields of a loss scale by the words that torch, Paddle and Fleet have for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Literal

from mezzo.errors import PolicyError
from mezzo.scale.config import LOWEST, LossScale

__all__ = ["PADDLES_RULES", "PADDLES_WORDS", "TORCHS_RULES", "TORCHS_WORDS", "from_words", "one_number"]

#: The rules in the state of torch's ``GradScaler``, and in that of Paddle's: by word the field that it is.
TORCHS_RULES: Final = MappingProxyType(
    {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
)
PADDLES_RULES: Final = MappingProxyType({
    "incr_ratio": "growth", "decr_ratio": "backoff", "incr_every_n_steps": "interval",
    "decr_every_n_nan_or_inf": "hysteresis",
})  # fmt: skip
#: What their scalers are made with.
TORCHS_WORDS: Final = MappingProxyType({"init_scale": "init", **TORCHS_RULES})
PADDLES_WORDS: Final = MappingProxyType({"init_loss_scaling": "init", **PADDLES_RULES})

_WORDS: Final = {"torch": TORCHS_WORDS, "paddle": PADDLES_WORDS, "fleet": PADDLES_WORDS}


def from_words(
    system: Literal["torch", "paddle", "fleet"], given: Mapping[str, Any], where: str, base: LossScale | None = None
) -> tuple[LossScale, list[PolicyError]]:
    """Return the rule of a system with some of its values, or what is wrong with them in its own words.

    Args:
        system: Whose rule, and whose defaults.
        given: Values by that system's words; others are left out.
        where: What they were given to.
        base: A rule of that system's to begin with, instead of its defaults.

    Example:
        >>> scale, problems = from_words("fleet", {"decr_ratio": 0.8}, "amp_configs")
        >>> scale.backoff, problems
        (0.8, [])
        >>> print(from_words("paddle", {"decr_ratio": 2}, "GradScaler")[1][0])
        decr_ratio is 2
          where  GradScaler
          why    only a factor between 0 and 1 lowers the scale
          write  decr_ratio=0.5
    """
    words = _WORDS[system]
    values = {words[word]: value for word, value in given.items() if word in words}
    problems = []
    for word, field in words.items():
        try:
            LossScale.like(system, floor=LOWEST, **({field: values[field]} if field in values else {}))
        except PolicyError as problem:
            text = re.sub(rf"\b{field}(?==| is )", word, str(problem))
            problems.append(PolicyError(text.replace("LossScale", where)))
    if not problems and values.get("init", 1.0) < LossScale.like(system).floor:
        why = "Paddle's kernel lets no scale go below 1"
        problems = [PolicyError(f"init_loss_scaling is {values['init']}", where=where, why=why, write="1.0")]
    scale = LossScale.like(system) if base is None else base
    return scale if problems else replace(scale, **values), problems


def one_number(value: Any) -> Any:
    """Return the number that is saved as a tensor, an array or a list of one, as Paddle's are; anything else as it is.

    Example:
        >>> one_number([512.0]), one_number("x")
        (512.0, 'x')
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain[0] if isinstance(plain, list) and len(plain) == 1 else plain
