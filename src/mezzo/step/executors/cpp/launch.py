"""Both passes on the CPU over all tensors at once: kernels in C++ that find tensors by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.cpp.build import CppKernel, built
from mezzo.step.executors.cpp.source import norm_source, update_source
from mezzo.step.executors.portable import calls
from mezzo.step.executors.tables import (
    Rows,
    addresses,
    as_table,
    chunked,
    laid_out,
    readable,
    stored,
    vector,
    where,
)
from mezzo.step.passes import Bucket, BucketUpdate, NoKernel, Verdict
from mezzo.step.rounding import keys
from mezzo.step.whole import Call, Piece

__all__ = ["Cpp"]

#: Elements that one thread takes at a time.
CHUNK: Final = 1 << 14
#: Elements for each thread: fewer are done sooner than another thread wakes.
WORTH_A_THREAD: Final = 1 << 14
#: Sets of gradients whose tables pass 1 remembers.
REMEMBERED: Final = 16


class Cpp:
    """One call for each pass over a bucket, however many tensors there are.

    Loops over elements, one for each set of dtypes, that a C++ compiler turns into vector instructions. Chunks of
    tensors are shared among OpenMP's threads, torch's own where torch runs on the compiler's OpenMP (GCC's, in torch's
    packages for Linux). Weights with gaps, or whose states lie otherwise, are updated one by one with
    torch's operations.

    **Cost**: 60 ms at the first step of a process, and 0.2 s to compile a kernel, which is kept on disk. Per step the
    bytes of the stored tensors, once, and 4 µs a tensor.

    Raises:
        UnsupportedError: At the first step: no C++ compiler with OpenMP, or an operation that is not in its table.
    """

    def __init__(self) -> None:
        # One executor serves all optimizers of a process, in any thread. The cache of C's needs no lock: one that is
        # taken in Python can be left locked by an interrupt, and the next step would wait for ever.
        self._known = lru_cache(REMEMBERED)(_CppNorms)

    def require(self, device: torch.device) -> None:
        """Compile pass 1 for FP32.

        Raises:
            UnsupportedError: There is no C++ compiler with OpenMP.
        """
        self.norms([torch.ones(1, dtype=torch.float32, device=device)])

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.passes.Executor`."""
        vectors = [vector(readable(gradient)) for gradient in gradients]
        kinds = tuple([(each.dtype, each.numel()) for each in vectors])
        return self._known(kinds)(vectors)

    def prepare(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.passes.Executor`."""
        return _CppUpdate(bucket)


class _CppNorms:
    """Pass 1 for gradients of certain dtypes and lengths, wherever they lie."""

    def __init__(self, kinds: Sequence[tuple[torch.dtype, int]]) -> None:
        self.lengths = as_table([length for _, length in kinds])
        self.launches = []
        for dtype in dict.fromkeys(dtype for dtype, length in kinds if length):
            places = as_table([place for place, kind in enumerate(kinds) if kind[0] == dtype])
            cut = chunked(self.lengths[places], places, CHUNK)
            owners = cut[:, 0].long()
            elements = sum(length for each, length in kinds if each == dtype)
            self.launches.append((_kernel(norm_source(dtype)), cut, owners, elements))

    def __call__(self, vectors: Sequence[Tensor]) -> Tensor:
        places = as_table(addresses(vectors))
        squares = torch.zeros(len(vectors), dtype=torch.float64, device="cpu")
        for kernel, cut, owners, elements in self.launches:
            sums = torch.empty(len(cut), dtype=torch.float64, device="cpu")
            kernel(places, self.lengths, cut, len(cut), CHUNK, sums, _threads(elements))
            squares.index_add_(0, owners, sums)
        return squares.sqrt_().to(torch.float32)


class _CppUpdate(BucketUpdate):
    """Pass 2 for one bucket: a call for each set of dtypes in it, which is one unless somebody mixed them."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.tensors = stored(bucket)
        self.random = bucket.random
        self.seen: tuple[object, ...] = ()
        self.no_keys = torch.zeros(1, dtype=torch.int32, device="cpu")
        if bucket.weights:  # here nothing is updated yet; gradients have the weight's dtype, as a rule
            targets = bucket.targets(0)
            dtypes = (targets[0].dtype, *(target.dtype for target in targets))
            _kernel(update_source(bucket.rule, bucket.storage, dtypes))

    @torch.no_grad()
    def pieces(self, gradients: Sequence[Tensor], check: Verdict, step: Tensor) -> list[Piece]:
        """See :class:`mezzo.step.passes.BucketUpdate`."""
        bucket = self.bucket
        if not gradients:
            return []
        gradients = [readable(gradient) for gradient in gradients]
        self.follow(gradients)
        scalars = bucket.rule.scalars(bucket.hypers, step)
        seeds = keys(step, len(gradients), bucket.seed) if self.random else self.no_keys
        one_by_one = partial(calls, bucket.rule, bucket.storage)
        alone = [
            partial(one_by_one, gradients[at], targets, scalars, check, seeds[at if self.random else 0])
            for at, targets in self.rows.others.items()
        ]
        vectors = [
            gradient if index in self.rows.others else laid_out(gradient, weight)
            for index, (gradient, weight) in enumerate(zip(gradients, bucket.weights, strict=True))
        ]
        places = as_table(addresses(vectors))
        numbers = (scalars, check.multiplier.to(torch.float32), check.found_inf.to(torch.bool), seeds)
        launches = [
            kernel.bound(places, self.rows.table, cut, len(cut), CHUNK, *numbers, _threads(elements))
            for kernel, cut, elements in self.launches
        ]
        # Copies, where there are any, live on until the kernels have read them.
        return [*alone, partial(_given, launches, (vectors, places, numbers))]

    def follow(self, gradients: Sequence[Tensor]) -> None:
        """Write the tables anew if a tensor was given other memory since, or a gradient another dtype."""
        seen = where(self.bucket, self.tensors, gradients)
        if seen == self.seen:
            return
        self.seen = ()  # until all tables follow: an interrupt may come in between
        self.rows = Rows.of(self.bucket, gradients)
        lengths = self.rows.table[:, 0]
        self.launches = []
        for dtypes, indices in self.rows.alike.items():
            places = as_table(indices)
            cut = chunked(lengths[places], places, CHUNK)
            kernel = _kernel(update_source(self.bucket.rule, self.bucket.storage, dtypes))
            self.launches.append((kernel, cut, sum(self.bucket.weights[index].numel() for index in indices)))
        self.seen = seen


def _kernel(source: str) -> CppKernel:
    try:
        return built(source)
    except (UnsupportedError, OSError) as error:  # such as a full disk
        raise NoKernel(str(error)) from error


def _given(calls: Sequence[Call], _kept: object) -> Sequence[Call]:
    return calls


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // WORTH_A_THREAD))
