"""Alike modules as one: rows that agree in all but the indices in their paths become ``blocks.{0..11}.norm1 ×12``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: A path, whose indices are sets: ``("blocks", {0, 1}, "norm")``.
Parts = tuple[str | frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Fold(Generic[T]):
    """Rows that are alike, in one.

    Attributes:
        path: Their paths, as one: ``blocks.{0..11}.norm1``.
        rows: The rows, in their order; never empty.
    """

    path: str
    rows: tuple[T, ...]

    @property
    def text(self) -> str:
        """The path, and how many rows there are."""
        return f"{self.path} ×{len(self.rows)}" if len(self.rows) > 1 else self.path


def folded(rows: Iterable[T], path: Callable[[T], str], rest: Callable[[T], Hashable]) -> list[Fold[T]]:
    """Fold rows that agree in all but indices in their paths.

    Args:
        rows: Any rows; those with one path are not folded with each other.
        path: Reads a row's module path, whose components that are numbers are its indices.
        rest: Reads all else in which rows must agree.

    Returns:
        The folds, each where its first row was. Together they hold every row once.

    Example:
        >>> modules = "stem blocks.0.norm blocks.1.norm blocks.2.norm head".split()
        >>> [each.text for each in folded(modules, str, lambda row: None)]
        ['stem', 'blocks.{0..2}.norm ×3', 'head']
        >>> nested = [f"layers.{i}.{j}" for i, depth in enumerate((2, 2, 6)) for j in range(depth)]
        >>> [each.text for each in folded(nested, str, lambda row: None)]
        ['layers.{0,1}.{0,1} ×4', 'layers.2.{0..5} ×6']
    """
    groups: dict[Hashable, dict[Parts, list[tuple[int, T]]]] = {}
    for number, row in enumerate(rows):
        parts = tuple(_part(part) for part in path(row).split("."))
        shape = tuple(part if isinstance(part, str) else None for part in parts)
        turn = 0  # rows of one path stay apart: the second of each module is folded with the other seconds
        while parts in groups.setdefault((turn, shape, rest(row)), {}):
            turn += 1
        groups[turn, shape, rest(row)][parts] = [(number, row)]
    found = [(each, parts) for group in groups.values() for parts, each in _merged(group).items()]
    found.sort(key=lambda fold: fold[0][0][0])
    return [Fold(_text(parts), tuple(row for _, row in each)) for each, parts in found]


def _part(text: str) -> str | frozenset[int]:
    is_index = text.isascii() and text.isdecimal() and str(int(text)) == text
    return frozenset([int(text)]) if is_index else text


def _merged(group: dict[Parts, list[tuple[int, T]]]) -> dict[Parts, list[tuple[int, T]]]:
    """Join paths that differ in one index, the last index first, then those that differ in the one before."""
    length = len(next(iter(group)))
    for position in reversed(range(length)):
        joined: dict[Hashable, tuple[Parts, list[tuple[int, T]]]] = {}
        for parts, rows in group.items():
            here = parts[position]
            key = (*parts[:position], None, *parts[position + 1 :]) if isinstance(here, frozenset) else parts
            if key in joined and isinstance(here, frozenset):
                others, before = joined[key]
                union = (*parts[:position], here | _indices(others[position]), *parts[position + 1 :])
                joined[key] = union, sorted([*before, *rows], key=lambda each: each[0])
            else:
                joined[key] = parts, rows
        group = dict(joined.values())
    return group


def _indices(part: str | frozenset[int]) -> frozenset[int]:
    assert isinstance(part, frozenset)
    return part


def _text(parts: Parts) -> str:
    return ".".join(part if isinstance(part, str) else _set_text(sorted(part)) for part in parts)


def _set_text(indices: list[int]) -> str:
    """Write indices, neighbours as a range: ``{0..11}``, ``{0,2..5}``."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs += [f"{numbers[0]}..{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    return f"{{{','.join(runs)}}}"
