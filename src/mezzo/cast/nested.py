"""Casting what a user passes around: tensors in nested containers, dataclasses and mappings."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from mezzo.cast.notes import WATCHERS, during
from mezzo.tensors import CASTABLE

__all__ = ["cast_floating", "widest"]

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
    made: list[tuple[Tensor, Tensor]] = []

    def cast_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in CASTABLE or leaf.dtype == dtype:
            return _cast_leaf(leaf, dtype)
        for seen, cast in made:
            if seen is leaf:
                return cast
        made.append((leaf, _to(leaf, dtype)))
        return made[-1][1]

    cast_value: T = pytree.tree_map(cast_leaf, value)
    return cast_value


def _to(value: Any, dtype: torch.dtype) -> Any:
    return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, PackedSequence):
        return _to(leaf, dtype) if leaf.data.dtype in CASTABLE else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
        cast = {name: cast_floating(getattr(leaf, name), dtype) for name in names if hasattr(leaf, name)}
        changed = {name: new for name, new in cast.items() if new is not getattr(leaf, name)}
        if not changed:
            return leaf
        out = copy.copy(leaf)
        for name, new in changed.items():
            # Frozen dataclasses of the user's own cannot be assigned to, nor always be constructed anew.
            object.__setattr__(out, name, new)
        return out
    if isinstance(leaf, MutableMapping):
        mapping = copy.copy(leaf)
        for key, item in leaf.items():
            mapping[key] = cast_floating(item, dtype)
        return mapping
    return leaf
