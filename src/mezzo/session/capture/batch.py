"""The batch of a captured train step: what each call must look like, and where the graph reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from mezzo.errors import PolicyError, raise_together
from mezzo.tensors import described

__all__ = ["Batch", "Layout"]

#: What an argument's nest holds, each with the path to it, and how it is nested.
_Nest: TypeAlias = tuple[list[tuple[KeyPath, Any]], TreeSpec]


class Layout:
    """The arguments of a train step as in the example: nests of tensors, and plain values between them.

    Args:
        train_step: The train step, for the names of its parameters.
        example: The example's arguments.

    Raises:
        TypeError: The train step does not take so many arguments.
    """

    def __init__(self, train_step: Callable[..., Any], example: tuple[Any, ...]) -> None:
        self.names = _names(train_step, example)
        self._example = [tree_flatten_with_path(argument) for argument in example]

    def leaves(self, batch: tuple[Any, ...]) -> list[Any]:
        """Return what a batch's nests hold, in order, if the batch is like the example.

        Args:
            batch: The arguments of a call.

        Raises:
            PolicyError: It is not; one message names each argument that differs, and what it was captured with.
        """
        if len(batch) != len(self.names):
            raise PolicyError(
                f"the step was captured with {len(self.names)} argument(s), and called with {len(batch)}",
                where=", ".join(self.names),
                write=f"captured({', '.join(self.names)})",
            )
        found = [tree_flatten_with_path(argument) for argument in batch]
        alike = zip(self.names, self._example, found, strict=True)
        raise_together(problem for name, example, given in alike for problem in _differences(name, example, given))
        return [leaf for leaves, _ in found for _, leaf in leaves]

    def nest(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Return arguments from what their nests hold."""
        rest = iter(leaves)
        return tuple(tree_unflatten(islice(rest, len(own)), structure) for own, structure in self._example)


def _differences(name: str, example: _Nest, given: _Nest) -> Iterator[PolicyError]:
    """Yield why an argument is not like that of the example."""
    (leaves, structure), (found, other) = example, given
    if other != structure:
        yield PolicyError(
            f"{name} has another structure than in the example",
            where=f"{_shown(example)} → {_shown(given)}",
            why="the graph reads the tensors that were there when it was captured",
            write="the same nest of tensors in each call, or mezzo.capture(…) for each",
        )
        return
    for (path, before), (_, now) in zip(leaves, found, strict=True):
        if isinstance(before, Tensor) or isinstance(now, Tensor):
            if _like(before) != _like(now):
                yield PolicyError(
                    f"{name}{keystr(path)} is not like the example",
                    where=f"{_like(before)} → {_like(now)}",
                    why="a graph is captured for one shape, dtype and device",
                    write="DataLoader(…, drop_last=True), or mezzo.capture(…) for each shape",
                )
        elif not _same(before, now):
            place = name + keystr(path)
            yield PolicyError(
                f"{place} is not what it was in the example",
                where=f"{before!r} → {now!r}",
                why="only tensors are read at each replay; all else was decided when the step was captured",
                write=f"torch.tensor({now!r}) as {place}, or mezzo.capture(…) for each value",
            )


def _shown(nest: _Nest) -> str:
    leaves, structure = nest
    return str(tree_unflatten([described(v) if isinstance(v, Tensor) else v for _, v in leaves], structure))


class Batch:
    """The tensors from which a graph reads its batch.

    Args:
        layout: What batches look like.
        leaves: What one of them holds.
        device: The graph's; tensors in host memory are copied there, best from pinned memory.
    """

    def __init__(self, layout: Layout, leaves: list[Any], device: torch.device) -> None:
        self._leaves = [_empty(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.arguments = layout.nest(self._leaves)

    @torch.no_grad()
    def take(self, leaves: list[Any]) -> None:
        """Copy the tensors of a batch here, without waiting."""
        for mine, given in zip(self._leaves, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)

    def forget_gradients(self) -> None:
        """Begin a run as an eager step begins with a new batch: with no gradients to add to."""
        for mine in self._leaves:
            if isinstance(mine, Tensor):
                mine.grad = None


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(like, device=device).requires_grad_(like.requires_grad)


def _names(train_step: Callable[..., Any], example: tuple[Any, ...]) -> list[str]:
    try:
        signature = inspect.signature(train_step)
    except ValueError:  # of a callable from C
        return [f"argument {number}" for number in range(len(example))]
    names: list[str] = []
    for name, value in signature.bind(*example).arguments.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{number}]" for number in range(len(value))] if several else [name]
    return names


def _like(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r}"
    return f"{described(value)} on {value.device}" + (", requires_grad" if value.requires_grad else "")


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (ValueError, RuntimeError):  # such as NumPy's arrays, of which nobody knows whether "all" is meant
        return False
