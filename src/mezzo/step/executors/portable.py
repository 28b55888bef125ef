"""Both passes in torch's own operations, a cacheful at a time: what every device runs, and needs no compiler for.

Below it are the tables of addresses that compiled executors read.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mezzo.emit.tracing import NoKernel
from mezzo.errors import UnsupportedError
from mezzo.step.moments import GROUP, elements, in_groups
from mezzo.step.storage import Storage, keys
from mezzo.step.update import UpdateRule
from mezzo.step.verdict import Bucket, BucketUpdate, Verdict, scales_among, updated
from mezzo.tensors import CASTABLE, flat, foreach_norm

logger = logging.getLogger(__name__)

#: Elements in a block. Smaller ones stay nearer to the cores, but each operation costs 2 µs of dispatch: on a Zen 4
#: with 1 MiB of second-level cache a core, 2^15 takes twice as long and 2^18 1.1 times.
CPU_BLOCK: Final = 1 << 17
#: On other devices, where a block costs launches, and a few FP32 temporaries.
DEVICE_BLOCK: Final = 1 << 24


@cache
def tell(why: str) -> None:
    """Log why torch's own operations do what a kernel should: each reason once a process.

    Args:
        why: No kernel can be written, or built.
    """
    logger.warning("optimizer steps go on by torch's own operations, since %s", why)


class Portable:
    """Update block by block by the rule's and the storage's own operations.

    **Cost**: per step the bytes of the stored tensors, once; some FP32 temporaries of a block, and 2 µs for each of
    some twenty operations on a block. No host sync on other devices than the CPU.
    """

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.verdict.Executor`.

        On the CPU block by block: torch's own norm of a low-precision tensor is not vectorised there (2.1 ns an
        element, against 0.24, on one core of a Zen 4), and that of 30 million FP32 values is 0.17 % too small, against
        2e-7.
        """
        if not gradients:
            return torch.zeros(0)
        if gradients[0].device.type != "cpu":
            return torch.stack(foreach_norm([each.detach() for each in gradients], 2, torch.float32))
        return torch.stack([_squares(gradient).sqrt() for gradient in gradients])

    def update_of(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.verdict.Executor`."""
        return _PortableUpdate(bucket)


class _PortableUpdate(BucketUpdate):
    """Pass 2 by :func:`mezzo.step.verdict.updated`, block by block."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.on_cpu = bucket.step.device.type == "cpu"
        self.size = CPU_BLOCK if self.on_cpu else DEVICE_BLOCK

    def ready(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        return [gradient.detach() for gradient in gradients]

    def write(self, gradients: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        if self.on_cpu and verdict.found_inf:  # here the flag is host memory
            return
        bucket, rule = self.bucket, self.bucket.rule
        seeds = keys(step, len(gradients), bucket.seed) if bucket.random else scalars.new_zeros((), dtype=torch.int32)
        for index, gradient in enumerate(gradients):
            for start, block in _blocks(bucket, gradient, bucket.targets(index), self.size):
                key = seeds[index] + start if bucket.random else seeds
                numbers = scalars, verdict, key
                write_elements(rule, bucket.storage, block[0], block[1:], *numbers, predicated=not self.on_cpu)


def write_elements(
    rule: UpdateRule,
    storage: Storage,
    gradient: Tensor,
    targets: Sequence[Tensor],
    scalars: Tensor,
    verdict: Verdict,
    key: Tensor,
    *,
    predicated: bool = True,
) -> None:
    """Update some elements with torch's operations.

    Args:
        rule: What to do.
        storage: How the weights are stored.
        gradient: Scaled.
        targets: The parts and states of the weights, of the gradient's shape; of states in codes scales, too.
        scalars: Of ``rule.scalars``.
        verdict: On the step.
        key: Of the first element's random bits.
        predicated: Whether the verdict's flag is asked for each element, and the old values are written again.
    """
    places = in_groups_of(storage, gradient, targets) if scales_among(storage, targets) else [gradient, *targets]
    order = torch.arange(places[0].numel(), dtype=torch.int32, device=gradient.device).view(places[0].shape)
    values = updated(rule, storage, places[0], places[1:], scalars, verdict.multiplier, key, order)
    for target, place, value in zip(targets, places[1:], values, strict=True):
        if value is place:
            continue
        place.copy_(torch.where(verdict.found_inf, place, value) if predicated else value)
        if place.data_ptr() != target.data_ptr():
            codes = targets[storage.num_parts]
            target.copy_(elements(place, codes))


def in_groups_of(storage: Storage, gradient: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """Return a gradient and what it is for as an update takes them where states are codes: in groups.

    They are the same memory, or copies: of what lies otherwise than the codes, and where the last group is not full.

    Args:
        storage: How the weights are stored.
        gradient: Of any layout.
        targets: Parts, and codes with their scales.
    """
    codes, scales = targets[storage.num_parts], scales_among(storage, targets)
    found = []
    for place, each in enumerate((gradient, *targets), start=-1):
        vectors = (each.view(-1),) if place in scales else flat(laid_out(each, codes))
        assert vectors is not None, "codes have neither gaps nor overlaps"
        found.append(vectors[0].view(-1, 1) if place in scales else in_groups(vectors[0]))
    return found


def _blocks(
    bucket: Bucket, gradient: Tensor, targets: Sequence[Tensor], size: int
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Cut a gradient and what it is for into vectors in memory order: the first element's number, and the vectors.

    A weight with gaps or overlaps, or whose states lie otherwise, is one block of its own shape.
    """
    lying = _vectors(bucket.storage, targets)
    if lying is None:
        yield 0, (gradient, *targets)
        return
    vectors = flat(laid_out(gradient, targets[0]))
    assert vectors is not None, "it lies as its weight does, which has neither gaps nor overlaps"
    scales = scales_among(bucket.storage, targets)
    cut = [torch.split(each, size // GROUP if place in scales else size) for place, each in enumerate(lying)]
    for number, block in enumerate(zip(torch.split(vectors[0], size), *cut, strict=True)):
        yield number * size, block


def _vectors(storage: Storage, targets: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """View what an update writes as vectors in memory order; None where elements lie in memory otherwise."""
    scales = scales_among(storage, targets)
    if not scales:
        return flat(*targets)
    lying = flat(*(target for place, target in enumerate(targets) if place not in scales))
    if lying is None:
        return None
    vectors = iter(lying)
    return [target.view(-1) if place in scales else next(vectors) for place, target in enumerate(targets)]


def laid_out(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient that lies as its weight does, copied if need be. The weight has no gaps."""
    if gradient.stride() == weight.stride() or (gradient.is_contiguous() and weight.is_contiguous()):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _squares(gradient: Tensor) -> Tensor:
    """Sum the squares of a gradient on the CPU in FP32."""
    (vector,) = flat(gradient) or (gradient.reshape(-1),)
    wide = (each.to(torch.float32) for each in torch.split(vector.detach(), CPU_BLOCK))
    return torch.stack([torch.dot(each, each) for each in wide]).sum()


# Tensors as tables of addresses, for kernels that work on all of them at once.

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
            vectors = _vectors(bucket.storage, targets)
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


def table_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return where tensors begin, in host memory; see :func:`addresses`."""
    found = list(map(Tensor.data_ptr, tensors))
    return torch.from_numpy(np.array(addresses(tensors) if 0 in found else found, dtype=np.int64))


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
    # The memory of a second derivative may hold it negated.
    resolved = [gradient.resolve_neg() for gradient in gradients]
    found = [each if each.dtype in CASTABLE else each.to(torch.float32) for each in resolved]
    return found, list(map(_DTYPE, found))


def vectors(gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[torch.dtype]]:
    """Return readable gradients as their elements in memory order, copied where they have gaps, and their dtypes."""
    dtypes = list(map(_DTYPE, gradients))
    found = gradients
    if not _READABLE.issuperset(dtypes) or any(map(Tensor.is_neg, gradients)):
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
    """Pass 2 for one bucket: a launch for each set of dtypes in it, which is one unless gradients mix them.

    Where a kernel cannot be built, now or for dtypes that a later step has, torch's own operations do it from then on.
    """

    rows: Rows

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.tensors = [tensor for index in range(len(bucket.weights)) for tensor in bucket.targets(index)]
        self.seen: tuple[list[int], list[tuple[int, ...]] | None, list[torch.dtype]] | None = None
        self.layout: tuple[object, ...] = ()
        self.instead: BucketUpdate | None = None

    @abstractmethod
    def follow(self, rows: Rows) -> None:
        """Write all tables anew."""

    @abstractmethod
    def follow_addresses(self, rows: Rows) -> None:
        """Write the table of addresses anew: tensors lie elsewhere, and otherwise as they did."""

    @abstractmethod
    def launch(self, vectors: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """Update the weights that have no gaps.

        Args:
            vectors: Gradients that lie as their weights do.
            verdict: On the step.
            step: Its count.
            scalars: The rule's numbers in this step.
        """

    def ready(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        if self.instead is not None:
            return self.instead.ready(gradients)
        bucket, found, only_move = self.bucket, list(map(Tensor.data_ptr, self.tensors)), False
        if 0 in found:
            found = addresses(self.tensors)
        if self.seen and bucket.only_move:
            only_move, (_, strides, dtypes) = True, self.seen
        else:
            dtypes = list(map(_DTYPE, gradients))
            if not _READABLE.issuperset(dtypes) or any(map(Tensor.is_neg, gradients)):
                gradients, dtypes = readable(gradients)
            are_contiguous = all(map(Tensor.is_contiguous, bucket.weights))
            strides = None if are_contiguous else list(map(Tensor.stride, bucket.weights))
        # Equal as long as nothing was given other memory or another dtype.
        seen = found, strides, dtypes
        if seen != self.seen:
            self.seen = None  # until all tables follow: compiling a kernel may fail in between
            layout = self.layout if only_move else (dtypes, *_layout(self.tensors))
            if layout == self.layout:  # memory that comes and goes with each step
                self.rows = self.rows.moved(found)
                self.follow_addresses(self.rows)
            else:
                self.layout = ()
                self.rows = Rows.of(bucket, gradients)
                try:
                    self.follow(self.rows)
                except NoKernel as error:
                    tell(str(error))
                    self.instead = _PortableUpdate(bucket)
                    return self.instead.ready(gradients)
            self.seen, self.layout = seen, layout
        if strides is None and (only_move or all(map(Tensor.is_contiguous, gradients))):
            return gradients
        return [
            gradient if index in self.rows.others else laid_out(gradient, weight)
            for index, (gradient, weight) in enumerate(zip(gradients, bucket.weights, strict=True))
        ]

    def write(self, gradients: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        if self.instead is not None:
            self.instead.write(gradients, verdict, step, scalars)
            return
        self.launch(gradients, verdict, step, scalars)
        bucket = self.bucket
        if others := self.rows.others:
            seeds = keys(step, len(gradients), bucket.seed)
            for at, targets in others.items():
                write_elements(bucket.rule, bucket.storage, gradients[at], targets, scalars, verdict, seeds[at])
