"""What to write so that an overflow does not come back: rules, a wider format, a lower loss scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from torch import nn

from mezzo.errors import PolicyError
from mezzo.overflow.origins import Origin
from mezzo.policy import Policy, Rule
from mezzo.policy.fields import FIELDS, level_fields
from mezzo.scale import LossScale
from mezzo.trace.where import LOSS, MODEL

__all__ = ["Context", "highest_scale", "lower_scale", "power", "wider_format"]

#: More modules than these in FP32 are better served by another format.
_MANY: Final = 3


@dataclass(slots=True)
class Context:
    """What is known of the step beside the origin.

    Attributes:
        models: The models.
        policy: Their policy, where it is known.
        loss_scale: What the loss was multiplied by.
        autocasts: Whether ops are cast one by one, as far as has been seen.
    """

    models: Sequence[nn.Module]
    policy: Policy | None
    loss_scale: float = 1.0
    autocasts: bool = False

    def __post_init__(self) -> None:
        self.autocasts = self.policy is not None and self.policy.autocast


# Forward --------------------------------------------------------------------------------------------


def wider_format(origin: Origin, context: Context) -> tuple[str, str]:
    """Return what makes room for a number beyond 16 bits: a remark on it, and the text to paste.

    An FP32 rule cures only what nothing casts back: where a low-precision op reads the number before another one has
    brought it back into range, that op's module must be FP32 as well; where that spreads, BF16 has the range. Trying
    a rule would tell as much, but a user's function runs once, and in the region that it enters itself.
    """
    policy, low = context.policy, [each for each in origin.readers if each.is_low]
    if origin.cast_by == "model":
        return ", and the model's own code casts it", "x.bfloat16() in place of x.half(), or no cast"
    if policy is not None and policy.dtype != origin.dtype:
        return f", which {policy} does not ask for: the model's own code casts", "x.float() before it"
    if origin.phase == "backward":
        return "; other gradients are not finite with a lower loss scale either", _bfloat16(context)
    if origin.role == "parameter" and (path := _as_in_rules(origin.path, context)):
        return "", f'policy = policy.keep_fp32(params=["{path}"])'
    op_rule = f'policy = policy.fp32("{origin.op}")'
    is_op_enough = all(each.op == origin.op for each in low) and len({each.module for each in low}) <= _MANY
    if origin.rule is not None and origin.rule.op is not None and is_op_enough:
        return f", under the rule {origin.rule}", op_rule
    if modules := _modules(origin, context):
        return "", f"policy = policy.keep_fp32(modules=[{', '.join(modules)}])"
    if context.autocasts and is_op_enough and _takes_rule(origin.op):
        return "", op_rule
    names = ", ".join(dict.fromkeys(f"{each.op} in {each.module or MODEL}" for each in low[:_MANY]))
    return f"; FP32 there would not do, since {names} would cast it again" if names else "", _bfloat16(context)


def _modules(origin: Origin, context: Context) -> list[str]:
    """Return, quoted, the modules that together keep the number in FP32 until it is back in range; few, or none."""
    # With autocast what is FP32 stays FP32 until an op casts it low. Without, a module's results are cast back, so that
    # one module must hold all that reads the number.
    modules = [origin.module, *(each.module for each in origin.readers if each.is_low or not context.autocasts)]
    if not context.autocasts:
        common = takewhile(lambda parts: len({*parts}) == 1, zip(*(path.split(".") for path in modules), strict=False))
        modules = [".".join(parts[0] for parts in common)]
    found = [_as_in_rules(path, context) for path in dict.fromkeys(modules)]
    return [f'"{path}"' for path in found] if all(found) and len(found) <= _MANY else []


def _as_in_rules(path: str, context: Context) -> str:
    """Return a path as rules have it, if every model has a parameter, or a module that is called, under it."""
    if len(context.models) > 1:
        path = path.partition(".")[2]
    if path == LOSS:
        return ""
    for model in context.models:
        module = dict(model.named_modules(remove_duplicate=False)).get(path)
        is_called = module is not None and type(module).forward is not nn.Module.forward
        if not is_called and path not in dict(model.named_parameters(remove_duplicate=False)):
            return ""
    return path


def _takes_rule(op: str) -> bool:
    try:
        return bool(Rule("fp32", op=op).ops)
    except PolicyError:
        return False


def _bfloat16(context: Context) -> str:
    policy = context.policy
    if policy is None:
        return f'policy = mezzo.Policy.{"O1" if context.autocasts else "O2"}("bfloat16")'
    before = level_fields(policy.level, policy.dtype)
    # The format and the loss scale follow from the new one.
    kept = {name: getattr(policy, name) for name in FIELDS if getattr(policy, name) != before[name]}
    kept = {name: value for name, value in kept.items() if value != policy.dtype and name != "loss_scale"}
    other: Policy = getattr(Policy, policy.level)("bfloat16", rules=policy.rules, **kept)
    return f'policy = mezzo.Policy.parse("{other}")'


# Backward -------------------------------------------------------------------------------------------


def highest_scale(
    scale: float, needed: float | None, limit: float, is_finite_at: Callable[[float], bool]
) -> float | None:
    """Find the largest power of two below a loss scale with which a backward pass stays finite.

    Args:
        scale: The scale that is too large.
        needed: The magnitude that did not fit, from which the first guess is made.
        limit: The largest number of its format.
        is_finite_at: Runs the backward pass with another scale.

    Returns:
        The scale; ``None`` where none of 2^40 times less does, so that the scale is not what is wrong.
    """
    high = math.ceil(math.log2(scale))  # the exponent of a scale that is too large
    low = high - 41
    if not is_finite_at(2.0**low):
        return None
    guess = high - 1
    if needed is not None and math.isfinite(needed):
        guess = math.floor(math.log2(scale * limit / needed))
    while high - low > 1:
        middle = guess if low < guess < high else (low + high) // 2
        if is_finite_at(2.0**middle):
            low, guess = middle, middle + 1
        else:
            high, guess = middle, middle - 1
    return 2.0**low


def lower_scale(context: Context, scale: float) -> str:
    """Return the text that lowers the loss scale, or where a policy has none, the format that needs none."""
    policy = context.policy or Policy.O1()
    before, after = policy.loss_scale, LossScale.constant(scale)
    if before.mode == "dynamic" and before.floor <= scale <= (before.ceiling or math.inf):
        after = dataclasses.replace(before, init=scale)
    try:
        policy.evolve(loss_scale=after)
    except PolicyError:  # O3 in float16 cannot unscale
        return _bfloat16(context)
    return f'policy = policy.evolve(loss_scale="{after}")'


def power(value: float) -> str:
    """Write a power of two.

    Example:
        >>> power(512.0)
        '2**9'
    """
    return f"2**{int(math.log2(value))}"
