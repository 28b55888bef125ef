"""Casting what a user passes around: tensors in nested containers, dataclasses and mappings."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Container, Iterable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from mezzo.cast.notes import WATCHERS, during
from mezzo.tensors import CASTABLE

__all__ = ["cast_batches", "cast_floating", "widest"]

T = TypeVar("T")  # Python 3.11 has no `def f[T]`


def widest(each: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype that holds what all of these tensors do; ``None`` for none."""
    dtypes = {tensor.dtype for tensor in each}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def cast_floating(value: T, dtype: torch.dtype, of: Container[torch.dtype] = CASTABLE) -> T:
    """Cast every floating tensor in nested containers; other leaves stay the same objects.

    Args:
        value: Tensors in tuples, lists, dicts, named tuples, dataclasses, mappings and packed sequences, nested.
        dtype: The target.
        of: The dtypes that are cast; when omitted float64 is none of them.

    Returns:
        The same structure, of the same types.
    """
    # One cast for a tensor that stands in several places, as in attention(x, x, x). Found by `is`: on an id() compiled
    # code would depend, and be compiled again for every new tensor.
    made: list[tuple[Tensor, Tensor]] = []

    def cast_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in of or leaf.dtype == dtype:
            return _cast_leaf(leaf, dtype, of)
        for seen, cast in made:
            if seen is leaf:
                return cast
        made.append((leaf, _to(leaf, dtype)))
        return made[-1][1]

    cast_value: T = pytree.tree_map(cast_leaf, value)
    return cast_value


def _to(value: Any, dtype: torch.dtype) -> Any:
    return during("cast", dtype, value.to, dtype) if WATCHERS else value.to(dtype)


def _cast_leaf(leaf: Any, dtype: torch.dtype, of: Container[torch.dtype]) -> Any:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, PackedSequence):
        return _to(leaf, dtype) if leaf.data.dtype in of else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
        cast = {name: cast_floating(getattr(leaf, name), dtype, of) for name in names if hasattr(leaf, name)}
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
            mapping[key] = cast_floating(item, dtype, of)
        return mapping
    return leaf


def cast_batches(model: nn.Module, dtype: torch.dtype, *, float64_alone: bool = False) -> RemovableHandle:
    """Have whatever is floating cast as it enters a model: float64 too, and batches of the user's own classes.

    Such a batch, which :func:`cast_floating` leaves alone, is cast by its ``to(dtype)``. Not for everybody: a class
    whose ``to`` casts indices as well, or takes a device alone, would fail.

    Args:
        model: The model.
        dtype: The target.
        float64_alone: Whether nothing else than float64 tensors is cast: what ops that are cast cannot take.

    Returns:
        What ends it.
    """
    hook = functools.partial(_cast_float64 if float64_alone else _cast_batches, dtype)
    return model.register_forward_pre_hook(hook, with_kwargs=True)


def _cast_float64(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_floating((args, kwargs), dtype, (torch.float64,))


def _cast_batches(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast_leaf(leaf: Any) -> Any:
        known = isinstance(leaf, Tensor | PackedSequence | MutableMapping | nn.Module) or dataclasses.is_dataclass(leaf)
        return leaf if known or not callable(getattr(leaf, "to", None)) else leaf.to(dtype)

    return pytree.tree_map(cast_leaf, cast_floating((args, kwargs), dtype, (*CASTABLE, torch.float64)))
