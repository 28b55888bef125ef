"""How a loss scale moves: one pure function from state and outcome to the next state.

The reference is plain Python in tests/scale/test_rules.py; other executors must agree with both.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mezzo.errors import PolicyError
from mezzo.scale.config import LossScale, allowed_skips, as_float32
from mezzo.scale.state import ScaleState

__all__ = ["LossScale", "ScaleState", "collapsed", "fitted", "held", "next_scale"]

#: The midpoint between the largest float32 and 2^128: from here on float32 rounds to infinity.
ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103


def next_scale(state: ScaleState, found_inf: Tensor, config: LossScale) -> ScaleState:
    """Return the state after a step, given whether its gradients held an infinity or a NaN.

    For a dynamic scale:

    - *overflow*: the clean steps start over and the budget shrinks by one. If it is used up, or more than
      ``skip_rate_limit`` of the last ``interval`` steps were skipped, the scale backs off to
      ``max(scale · backoff, floor)`` and the window of skipped steps starts over, since what it counted
      belonged to the old scale.
    - *clean*: at ``interval`` clean steps in a row (``growth_offset`` more for the first growth after an
      overflow or the start) the scale grows to ``min(scale · growth, ceiling)``, or without a ceiling
      stays where the product is not a finite float32.
    - The event that ``refill`` names restores the budget to ``hysteresis``.

    A constant scale never moves; it stands at its floor, so each overflow in a row counts in
    ``floor_overflows``. Mode ``"none"`` returns the state itself.

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
        one-element kernels for a dynamic scale, 3 more over ``interval`` bytes with ``skip_rate_limit``.

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
    found = found_inf.to(torch.bool)
    if config.mode == "constant":
        return dataclasses.replace(state, floor_overflows=(state.floor_overflows + 1) * found)

    # Scalars enter through kernel arguments (masked_fill, clamp, mul), never through torch.where, which
    # would copy them from host memory to the device.
    budget = torch.add(state.budget, found, alpha=-1).clamp_(min=0)
    exhausted = budget == 0
    window = fitted(state.window, config)
    if config.skip_rate_limit is not None:
        window = torch.cat((window[1:], found.reshape(1)))
        exhausted |= window.sum() > allowed_skips(config.skip_rate_limit, config.interval)
    backs_off = found & exhausted
    if config.skip_rate_limit is not None:
        window = window & ~backs_off

    clean_steps = (state.clean_steps + 1).masked_fill_(found, -config.growth_offset)
    grows = clean_steps >= config.interval  # an overflow leaves at most 0, and the interval is at least 1
    events = {"backoff": backs_off, "clean": ~found, "growth": grows}
    for name in config.refill.split("+"):
        budget = budget.masked_fill_(events[name], config.hysteresis)

    wide = state.scale.double()
    lower = (wide * config.backoff).clamp_(min=config.floor)
    higher = wide * config.growth
    if config.ceiling is None:
        higher = torch.where(higher < ROUNDS_TO_INFINITY, higher, wide)
    else:
        higher = higher.clamp_(max=config.ceiling)
    stuck = found & (state.scale <= as_float32(config.floor))
    return ScaleState(
        scale=torch.where(backs_off, lower, torch.where(grows, higher, wide)).float(),
        clean_steps=clean_steps.masked_fill_(grows, 0),
        budget=budget,
        floor_overflows=(state.floor_overflows + 1) * stuck,
        window=window,
    )


def held(before: ScaleState, after: ScaleState, hold: Tensor) -> ScaleState:
    """Choose between two states on their device.

    Args:
        before: The state to keep where ``hold`` is true.
        after: The state to take elsewhere.
        hold: 0-d bool.

    Cost:
        One kernel for each field, no host sync.
    """
    if after is before:
        return before
    pairs = {f.name: (getattr(before, f.name), getattr(after, f.name)) for f in dataclasses.fields(ScaleState)}
    chosen = {
        name: torch.where(hold, old, new) if old.shape == new.shape and new.numel() else new
        for name, (old, new) in pairs.items()
    }
    return ScaleState(**chosen)


def collapsed(state: ScaleState, config: LossScale) -> Tensor:
    """Tell whether the scale has stood at its floor for ``patience`` overflows in a row.

    Args:
        state: The state after a step.
        config: The rules; without ``patience`` the answer is always no.

    Returns:
        0-d bool on the state's device.

    Cost:
        One one-element kernel, no host sync; asking the tensor from Python is one.

    Example:
        >>> config = LossScale.dynamic(init=1, patience=2)
        >>> state = config.start()
        >>> for _ in range(2):
        ...     state = next_scale(state, torch.tensor(True), config)
        >>> collapsed(state, config)
        tensor(True)
    """
    if config.patience is None:
        return torch.zeros_like(state.floor_overflows, dtype=torch.bool)
    return state.floor_overflows >= config.patience


def fitted(window: Tensor, config: LossScale) -> Tensor:
    """Give the window the length that the rules ask for: a state may come from a run with other rules.

    Args:
        window: Of a :class:`ScaleState`.
        config: The rules.
    """
    length = 0 if config.skip_rate_limit is None else config.interval
    surplus = window.shape[0] - length
    if surplus < 0:
        return torch.cat((window.new_zeros(-surplus), window))
    return window[surplus:] if surplus else window


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
