"""Tensors as tables of addresses, for kernels that work on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.passes import Bucket
from mezzo.tensors import CASTABLE, flat

__all__ = [
    "Rows",
    "addresses",
    "as_table",
    "chunked",
    "laid_out",
    "readable",
    "stored",
    "upload_captured",
    "uploaded_once",
    "vector",
    "where",
]


#: Tables in device memory with their contents in the host's, while a graph is captured that will read them.
_WAITING: Final[ContextVar[list[tuple[Tensor, Tensor]] | None]] = ContextVar("waiting", default=None)


@contextmanager
def uploaded_once() -> Iterator[Callable[[], None]]:
    """Let the tables of a graph that is captured meanwhile be uploaded once, and not by each of its replays.

    Yields:
        What uploads them, on the current stream, for the time when the graph is recorded.
    """
    waiting: list[tuple[Tensor, Tensor]] = []

    def upload() -> None:
        for table, host in waiting:
            table.copy_(host, non_blocking=True)

    token = _WAITING.set(waiting)
    try:
        yield upload
    finally:
        _WAITING.reset(token)


def upload_captured(table: Tensor, host: Tensor) -> None:
    """Fill a table that a graph reads: when it is recorded, if somebody will, or else in each of its replays."""
    if (waiting := _WAITING.get()) is None:
        table.copy_(host, non_blocking=True)
    else:
        waiting.append((table, host))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Where the weights of a bucket lie, with all that belongs to them.

    Args:
        table: (weights, 1 + parts + states) int64: length, then addresses.
        alike: Places of the weights that lie as vectors without gaps, by the dtypes of gradient, parts and states.
        others: Parts and states of the rest, by place: weights with gaps, or whose states lie otherwise.
    """

    table: Tensor
    alike: dict[tuple[torch.dtype, ...], list[int]]
    others: dict[int, tuple[Tensor, ...]]

    @classmethod
    def of(cls, bucket: Bucket, gradients: Sequence[Tensor]) -> Rows:
        """Look at a bucket and its gradients."""
        rows, alike = [], dict[tuple[torch.dtype, ...], list[int]]()
        others: dict[int, tuple[Tensor, ...]] = {}
        for index, gradient in enumerate(gradients):
            targets = bucket.targets(index)
            vectors = flat(*targets)
            if vectors is None:
                others[index] = targets
            elif targets[0].numel():
                alike.setdefault((gradient.dtype, *(each.dtype for each in vectors)), []).append(index)
            rows.append([targets[0].numel(), *addresses(targets)])
        return cls(table=as_table(rows), alike=alike, others=others)


def stored(bucket: Bucket) -> list[Tensor]:
    """Return all tensors that belong to the weights of a bucket, in one order."""
    return [tensor for index in range(len(bucket.weights)) for tensor in bucket.targets(index)]


def where(bucket: Bucket, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[object, ...]:
    """Return what :class:`Rows` depend on: equal as long as nothing was given other memory or another dtype.

    Args:
        bucket: The bucket.
        tensors: Of :func:`stored`, which need not be asked for again.
        gradients: Of this step.
    """
    places = tuple([tensor.data_ptr() for tensor in tensors])
    strides = tuple([weight.stride() for weight in bucket.weights])
    return places, strides, tuple([gradient.dtype for gradient in gradients])


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where tensors begin.

    Raises:
        UnsupportedError: A tensor that is more than its memory, such as a DTensor.
    """
    found = [tensor.data_ptr() for tensor in tensors]
    for address, tensor in zip(found, tensors, strict=True):
        if not address and tensor.numel():
            raise UnsupportedError(
                "optimizer kernels cannot find a tensor",
                where=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}",
                why="it has no memory of its own",
                write="a plain tensor; of a DTensor its to_local()",
            )
    return found


def chunked(lengths: Tensor, places: Tensor, size: int) -> Tensor:
    """Cut tensors into chunks: (chunks, 2) int32, the tensor's place and the chunk's number within it."""
    counts = -(-lengths // size)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    numbers = torch.arange(len(before), device="cpu") - before
    return torch.stack([torch.repeat_interleave(places, counts), numbers], 1).int()


def as_table(numbers: Sequence[object]) -> Tensor:
    """Return numbers in host memory, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def readable(gradient: Tensor) -> Tensor:
    """Return a gradient that kernels can read: any other dtype is what an update rounds to FP32 first anyway."""
    if gradient.requires_grad or gradient.is_neg():  # as a second derivative is; its memory holds it negated
        gradient = gradient.detach().resolve_neg()
    return gradient if gradient.dtype in CASTABLE else gradient.to(torch.float32)


def vector(gradient: Tensor) -> Tensor:
    """Return a tensor's elements in memory order, copied if they have gaps."""
    # Not reshape(-1) alone: every second column of a matrix is a view too, as a vector with steps of two.
    return gradient if gradient.is_contiguous() else (flat(gradient) or (gradient.reshape(-1).contiguous(),))[0]


def laid_out(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient that lies as its weight does, copied if need be. The weight has no gaps."""
    if gradient.stride() == weight.stride() or (gradient.is_contiguous() and weight.is_contiguous()):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
