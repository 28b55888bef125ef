"""Casting what a user passes around: tensors in nested containers, dataclasses and mappings."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from mezzo.cast.notes import WATCHERS, during
from mezzo.tensors import CASTABLE

__all__ = ["cast_floating", "mapped", "widest"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`


def widest(each: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype that holds what all of these tensors do; ``None`` for none."""
    dtypes = {tensor.dtype for tensor in each}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def cast_floating(value: T, dtype: torch.dtype) -> T:
    """Cast every floating tensor in nested containers, but float64; other leaves stay the same objects.

    Args:
        value: Tensors in tuples, lists, dicts, named tuples, dataclasses, mappings and packed sequences, nested.
        dtype: The target.

    Returns:
        The same structure, of the same types.
    """
    # One cast for a tensor that stands in several places, as in attention(x, x, x). Found by `is`: on an id() compiled
    # code would depend, and be compiled again for every new tensor.
    made: list[tuple[Any, Any]] = []

    def cast(each: Any) -> Any:
        tensor = each.data if isinstance(each, PackedSequence) else each
        if tensor.dtype not in CASTABLE or tensor.dtype == dtype:
            return each
        for seen, cast in made:
            if seen is each:
                return cast
        made.append((each, _to(each, dtype)))
        return made[-1][1]

    return mapped(value, cast)


def mapped(value: T, change: Callable[[Any], Any]) -> T:
    """Change each tensor and packed sequence in nested containers.

    Args:
        value: As of :func:`cast_floating`.
        change: Returns what stands for one.
    """

    def inside(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | PackedSequence):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
            items = {name: getattr(leaf, name) for name in names}
        elif isinstance(leaf, MutableMapping):
            items = dict(leaf)
        else:
            return leaf
        changed = {key: new for key, item in items.items() if (new := mapped(item, change)) is not item}
        if not changed:
            return leaf
        out = copy.copy(leaf)
        for key, new in changed.items():
            if isinstance(leaf, MutableMapping):
                out[key] = new
            else:  # frozen ones cannot be assigned to, nor always be constructed anew
                object.__setattr__(out, key, new)
        return out

    out: T = pytree.tree_map(inside, value)
    return out


def _to(value: Any, dtype: torch.dtype) -> Any:
    return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)
