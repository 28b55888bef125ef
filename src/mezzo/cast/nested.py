"""Casting what a user passes around: tensors in nested containers, dataclasses and mappings."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, MutableMapping
from types import NoneType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from mezzo.cast.notes import WATCHERS, during
from mezzo.tensors import CASTABLE

__all__ = ["any_off", "cast_floating", "mapped", "widest"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`

#: What holds no tensor, of the arguments that modules are called with most.
_HOLDS_NONE: Final = frozenset({NoneType, bool, int, float, str})


def widest(each: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype that holds what all of these tensors do; ``None`` for none."""
    dtypes = {tensor.dtype for tensor in each}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def any_off(values: Iterable[Any], dtypes: Container[torch.dtype]) -> bool:
    """Whether there is a tensor in one of some dtypes, or what may hold tensors: of that it is not known."""
    for each in values:  # noqa: SIM110 - a generator would cost as much again
        if each.dtype in dtypes if isinstance(each, Tensor) else type(each) not in _HOLDS_NONE:
            return True
    return False


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
        now = (each.data if isinstance(each, PackedSequence) else each).dtype
        if now == dtype or now not in CASTABLE:
            return each
        for seen, cast in made:
            if seen is each:
                return cast
        made.append((each, _to(each, dtype)))
        return made[-1][1]

    out: T = mapped(value, cast)
    return out


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change each tensor and packed sequence in nested containers.

    Args:
        value: As of :func:`cast_floating`.
        change: Returns what stands for one.
    """
    kind = type(value)
    if isinstance(value, Tensor | PackedSequence):
        return change(value)
    if kind in _HOLDS_NONE:
        return value
    if kind is tuple or kind is list:
        return kind([mapped(item, change) for item in value])
    if kind is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if not pytree.tree_is_leaf(value):  # named tuples, and what programs have registered
        return pytree.tree_map(lambda leaf: mapped(leaf, change), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        given = {name: getattr(value, name) for name in names}
    elif isinstance(value, MutableMapping):
        given = dict(value)
    else:
        return value
    changed = {key: new for key, item in given.items() if (new := mapped(item, change)) is not item}
    if not changed:
        return value
    out = copy.copy(value)
    for key, new in changed.items():
        if isinstance(value, MutableMapping):
            out[key] = new
        else:  # frozen ones cannot be assigned to, nor always be constructed anew
            object.__setattr__(out, key, new)
    return out


def _to(value: Any, dtype: torch.dtype) -> Any:
    return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)
