"""How a loss scale moves: one pure function from state and outcome to the next state.

The reference is plain Python in tests/scale/test_rules.py; other executors must agree with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.scale.config import LossScale, as_float32
from mezzo.scale.state import FIELDS, ScaleState

_ITEM: Final = methodcaller("item")
_NUMBERS: Final = attrgetter(*FIELDS)

#: The midpoint between the largest float32 and 2^128: from here on float32 rounds to infinity.
ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103


def next_scale(state: ScaleState, found_inf: Tensor, config: LossScale) -> ScaleState:
    """Return the state after a step, given whether its gradients held an infinity or a NaN.

    For a dynamic scale:

    - *overflow*: the clean steps start over and the budget shrinks by one. If it is used up, the scale backs off to
      ``max(scale · backoff, floor)``.
    - *clean*: at ``interval`` clean steps in a row (``growth_offset`` more for the first growth after an
      overflow or the start) the scale grows to ``min(scale · growth, ceiling)``, or without a ceiling
      stays where the product is not a finite float32.
    - The event that ``refill`` names restores the budget to ``hysteresis``.

    Overflows in a row at the floor count in ``floor_overflows`` where the scale would back off if it could. A constant
    scale never moves and stands at its floor, so that each counts. Mode ``"none"`` returns the state itself.

    Args:
        state: The state before the step; it is not changed.
        found_inf: 0-d bool or floating tensor on the state's device; non-zero (NaN too) is an overflow.
        config: The rules.

    Returns:
        A new state on the same device. Products are taken in float64 and rounded once to float32, as
        torch's own kernel does, so powers of two stay exact.

    Raises:
        PolicyError: ``found_inf`` is not such a tensor.

    Cost:
        No host sync, and nothing copied from host memory: it can be captured in a CUDA graph. About 20
        one-element kernels for a dynamic scale.

    Example:
        >>> config = LossScale.dynamic(init=1024, interval=2)
        >>> state = config.start()
        >>> for overflow in (False, False, True):
        ...     state = next_scale(state, torch.tensor(overflow), config)
        ...     print(state.scale.item())
        1024.0
        2048.0
        1024.0
    """
    _check(found_inf, state)
    if config.mode == "none":
        return state
    return ScaleState(*next_numbers(state.tensors(), found_inf.to(torch.bool), config))


def next_numbers(numbers: Sequence[Tensor], found_inf: Tensor, config: LossScale) -> list[Tensor]:
    """Return the numbers of a state after a step: the rule on the device.

    Args:
        numbers: Of the state before, in their order.
        found_inf: 0-d bool: whether this step overflowed.
        config: The rules; not those of mode ``"none"``.
    """
    scale, clean_steps, budget, floor_overflows = numbers
    if config.mode == "constant":
        return [scale, clean_steps, budget, (floor_overflows + 1) * found_inf]
    scale, *counts = _moved((scale.double(), *numbers[1:]), found_inf, config)
    return [scale.float(), *counts]


def next_scale_on_host(state: ScaleState, found_inf: bool, config: LossScale) -> ScaleState:
    """Return what :func:`next_scale` returns, bit for bit, for a state on the CPU.

    Python's numbers are quicker there than kernels of one element: about a fifth of the time.

    Args:
        state: A state on the CPU.
        found_inf: Whether the step's gradients held an infinity or a NaN.
        config: The rules.
    """
    if config.mode != "dynamic":
        return next_scale(state, torch.tensor(found_inf), config)
    values = list(map(_ITEM, map(Tensor.numpy, _NUMBERS(state))))  # numpy asks nothing of a device
    scale, *counts = _moved(values, found_inf, config)
    return ScaleState.made(scale, counts, "cpu")


def _moved(values: Sequence[Any], found_inf: Any, config: LossScale) -> tuple[Any, Any, Any, Any]:
    """Spell the rule of a dynamic scale once, for 0-d tensors and for Python's numbers.

    Args:
        values: Scale (in float64), clean steps, budget and overflows at the floor, as in :class:`ScaleState`.
        found_inf: Whether this step overflowed.
        config: The rules.

    Returns:
        The four values after the step.
    """
    scale, clean_steps, budget, floor_overflows = values
    at_least, at_most = (torch.clamp_min, torch.clamp_max) if isinstance(found_inf, Tensor) else (max, min)
    fewer = torch.add(budget, found_inf, alpha=-1) if isinstance(budget, Tensor) else budget - found_inf
    budget = at_least(fewer, 0)
    backs_off = found_inf & (budget == 0)
    clean_steps = _chosen(found_inf, -config.growth_offset, clean_steps + 1)
    grows = clean_steps >= config.interval  # an overflow leaves at most 0, and the interval is at least 1
    events = {"backoff": backs_off, "growth": grows}
    for name in config.refill.split("+"):
        budget = _chosen(found_inf == 0 if name == "clean" else events[name], config.hysteresis, budget)

    lower, higher = at_least(scale * config.backoff, config.floor), scale * config.growth
    if config.ceiling is None:
        higher = _chosen(higher < ROUNDS_TO_INFINITY, higher, scale)
    else:
        higher = at_most(higher, config.ceiling)
    stuck = found_inf & (scale <= as_float32(config.floor))
    scale = _chosen(backs_off, lower, _chosen(grows, higher, scale))
    return scale, _chosen(grows, 0, clean_steps), budget, (floor_overflows + backs_off) * stuck


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    if not isinstance(condition, Tensor):
        return one if condition else other
    # Numbers enter through kernel arguments: torch.where would copy them from host memory to the device.
    return torch.where(condition, one, other) if isinstance(one, Tensor) else other.masked_fill(condition, one)


def _check(found_inf: object, state: ScaleState) -> None:
    if not isinstance(found_inf, Tensor):
        shown = f"{found_inf!r}"
    elif found_inf.dim() or not (found_inf.dtype == torch.bool or found_inf.is_floating_point()):
        shown = f"a {found_inf.dtype} tensor of shape {tuple(found_inf.shape)}"
    elif found_inf.device != state.scale.device:
        shown = f"a tensor on {found_inf.device}"
    else:
        return
    raise PolicyError(
        f"found_inf is {shown}",
        why=f"it is one 0-d bool or floating tensor on {state.scale.device}, where the scale lives",
        write=f"next_scale(state, torch.tensor(overflow, device={str(state.scale.device)!r}), config)",
    )
