"""The smallest set that passes a test, found by bisection: QuickXplain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shortest", "smallest"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`


def smallest(items: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of the items that passes, none of which can be left out; of several such the most preferred.

    Halves are left out first, and then ever smaller segments.

    Args:
        items: All of them, the preferred ones first. Together they pass, and none of them does not.
        passes: Whether a part passes; a part that holds one that passes is taken to pass as well.

    Returns:
        The part, in the order of the items. **Cost**: about ``2k·log2(n/k) + 2k`` tests for k of n items.

    Example:
        >>> smallest(range(100), lambda part: {7, 70} <= {*part})
        [7, 70]

    References:
        Junker, *QuickXplain: Preferred Explanations and Relaxations for Over-Constrained Problems*, AAAI 2004.
    """
    return _needed([], False, list(items), passes)


def _needed(around: list[T], has_grown: bool, items: list[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return what is needed of the items beside those around, to which something was added since they were tested."""
    if has_grown and passes(around):
        return []
    if len(items) == 1:
        return items
    first, second = items[: len(items) // 2], items[len(items) // 2 :]
    of_second = _needed(around + first, True, second, passes)
    of_first = _needed(around + of_second, bool(of_second), first, passes)
    return of_first + of_second


def shortest(items: list[T], passes: Callable[[Sequence[T]], bool], most: int) -> list[T]:
    """Return the fewest first items that pass, or all of them: for what :func:`smallest` found by a test with noise.

    Near the limit of such a test a part may pass that lies in one that does not, and then was not looked for.

    Args:
        items: The preferred ones first. Together they pass.
        passes: Whether a part passes.
        most: How many parts are tested.

    Example:
        >>> shortest([7, 8, 9], lambda part: 7 in part and len(part) != 2, 5)
        [7]
    """
    parts = (items[:count] for count in range(1, min(len(items), most + 1)))
    return next((part for part in parts if passes(part)), items)
