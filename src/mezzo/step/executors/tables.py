"""Tensors as tables of addresses, for kernels that work on all of them at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.portable import laid_out, write_elements
from mezzo.step.passes import Bucket, BucketUpdate, Verdict
from mezzo.step.rounding import keys
from mezzo.tensors import CASTABLE, flat

__all__ = [
    "Rows", "TabledUpdate", "addresses", "as_table", "by_dtype", "chunked", "upload_captured", "uploaded_once",
    "vectors",
]  # fmt: skip


_DTYPE: Final = attrgetter("dtype")
_READABLE: Final = set(CASTABLE)
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
    """Fill a table that a graph reads: once, if the caller uploads it, or else in each replay of the graph."""
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

    def moved(self, addresses: Sequence[int]) -> Rows:
        """Return the same weights, with what belongs to each, in other memory."""
        there = as_table(addresses).view(len(self.table), -1)
        return replace(self, table=torch.cat([self.table[:, :1], there], 1))


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where tensors begin.

    Raises:
        UnsupportedError: A tensor that is more than its memory, such as a DTensor.
    """
    found = list(map(Tensor.data_ptr, tensors))
    if 0 not in found:
        return found
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


def by_dtype(kinds: Sequence[tuple[torch.dtype, int]], size: int) -> Iterator[tuple[torch.dtype, Tensor, Tensor]]:
    """Cut gradients into chunks, those of each dtype together: the dtype, their places, and the chunks.

    Args:
        kinds: The dtype and length of each gradient.
        size: Elements of a chunk.
    """
    lengths = as_table([length for _, length in kinds])
    for dtype in dict.fromkeys(dtype for dtype, _ in kinds):
        places = as_table([place for place, kind in enumerate(kinds) if kind[0] == dtype])
        yield dtype, places, chunked(lengths[places], places, size)


def as_table(numbers: Sequence[object]) -> Tensor:
    """Return numbers in host memory, whatever torch's default device is."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))  # of thousands, in a third of torch's own time


# A step asks these of every gradient of a model: in loops of C's, where all of them are as most are.


def readable(gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[torch.dtype]]:
    """Return gradients that kernels can read, and their dtypes: any other is what an update rounds to FP32 first."""
    dtypes = list(map(_DTYPE, gradients))
    if _READABLE.issuperset(dtypes) and not any(map(Tensor.is_neg, gradients)):
        return gradients, dtypes
    # The memory of a second derivative may hold it negated.
    resolved = [gradient.resolve_neg() for gradient in gradients]
    found = [each if each.dtype in CASTABLE else each.to(torch.float32) for each in resolved]
    return found, list(map(_DTYPE, found))


def vectors(gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[torch.dtype]]:
    """Return readable gradients as their elements in memory order, copied where they have gaps, and their dtypes."""
    found, dtypes = readable(gradients)
    if all(map(Tensor.is_contiguous, found)):
        return found, dtypes
    # Not reshape(-1) alone: every second column of a matrix is a view too, as a vector with steps of two.
    copies = [each if each.is_contiguous() else (flat(each) or (each.reshape(-1).contiguous(),))[0] for each in found]
    return copies, dtypes


def _layout(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return what tables say of tensors, but for their addresses."""
    are_contiguous = all(map(Tensor.is_contiguous, tensors))
    strides = None if are_contiguous else list(map(Tensor.stride, tensors))
    return list(map(_DTYPE, tensors)), list(map(Tensor.numel, tensors)), strides


class TabledUpdate(BucketUpdate):
    """Pass 2 for one bucket: a launch for each set of dtypes in it, which is one unless gradients mix them."""

    rows: Rows

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.tensors = [tensor for index in range(len(bucket.weights)) for tensor in bucket.targets(index)]
        self.seen: tuple[object, ...] = ()
        self.layout: tuple[object, ...] = ()

    @abstractmethod
    def follow(self, rows: Rows) -> None:
        """Write all tables anew."""

    @abstractmethod
    def follow_addresses(self, rows: Rows) -> None:
        """Write the table of addresses anew: tensors lie elsewhere, and otherwise as they did."""

    @abstractmethod
    def launch(self, vectors: Sequence[Tensor], verdict: Verdict, step: Tensor) -> Tensor:
        """Update the weights that have no gaps, and return the rule's numbers in this step.

        Args:
            vectors: Gradients that lie as their weights do.
            verdict: On the step.
            step: Its count.
        """

    def ready(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """See :class:`mezzo.step.passes.BucketUpdate`."""
        bucket, (gradients, dtypes) = self.bucket, readable(gradients)
        # Equal as long as nothing was given other memory or another dtype.
        found = addresses(self.tensors)
        have_no_gaps = all(map(Tensor.is_contiguous, bucket.weights))
        strides = None if have_no_gaps else list(map(Tensor.stride, bucket.weights))
        seen = found, strides, dtypes
        if seen != self.seen:
            self.seen = ()  # until all tables follow: compiling a kernel may fail in between
            layout = dtypes, *_layout(self.tensors)
            if layout == self.layout:  # memory that comes and goes with each step
                self.rows = self.rows.moved(found)
                self.follow_addresses(self.rows)
            else:
                self.layout = ()
                self.rows = Rows.of(bucket, gradients)
                self.follow(self.rows)
            self.seen, self.layout = seen, layout
        if have_no_gaps and all(map(Tensor.is_contiguous, gradients)):
            return gradients
        return [
            gradient if index in self.rows.others else laid_out(gradient, weight)
            for index, (gradient, weight) in enumerate(zip(gradients, bucket.weights, strict=True))
        ]

    def write(self, gradients: Sequence[Tensor], verdict: Verdict, step: Tensor) -> None:
        """See :class:`mezzo.step.passes.BucketUpdate`."""
        scalars, bucket = self.launch(gradients, verdict, step), self.bucket
        if others := self.rows.others:
            seeds = keys(step, len(gradients), bucket.seed)
            for at, targets in others.items():
                write_elements(bucket.rule, bucket.storage, gradients[at], targets, scalars, verdict, seeds[at])
