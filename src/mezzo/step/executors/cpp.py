"""Both passes on the CPU over all tensors at once: kernels in C++ that find tensors by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from mezzo.compiled import CppKernel, built, threads
from mezzo.emit.tracing import NoKernel
from mezzo.errors import UnsupportedError
from mezzo.step.executors.cpp_source import norm_source, update_source
from mezzo.step.executors.portable import (
    Portable,
    Rows,
    TabledUpdate,
    as_table,
    by_dtype,
    chunked,
    table_of,
    vectors,
    warn_once,
)
from mezzo.step.storage import keys
from mezzo.step.verdict import Bucket, BucketUpdate, Verdict

#: Elements of a chunk, which one thread computes.
CHUNK: Final = 1 << 14
#: Sets of gradients whose tables pass 1 remembers.
REMEMBERED: Final = 16


class Cpp:
    """One call for each pass over a bucket, however many tensors there are.

    Each set of dtypes has a loop over elements, which a C++ compiler turns into vector instructions. Chunks of
    tensors are shared among OpenMP's threads, torch's own where torch runs on the compiler's OpenMP (GCC's, in torch's
    packages for Linux). Weights with gaps, or whose states lie otherwise, are updated one by one with
    torch's operations.

    **Cost**: 60 ms at the first step of a process, and 0.2 s to compile a kernel, which is kept on disk. Per step the
    bytes of the stored tensors, once, and 4 µs a tensor.

    Raises:
        NoKernel: Before the first step: no C++ compiler with OpenMP, or an operation that is not in its table.
    """

    def __init__(self) -> None:
        # One executor serves all optimizers of a process, in any thread. The cache of C's needs no lock: one that is
        # taken in Python can be left locked by an interrupt, and the next step would wait for ever.
        self._norms_of = lru_cache(REMEMBERED)(_CppNorms)

    def require(self, device: torch.device) -> None:
        """Compile pass 1 for FP32.

        Raises:
            UnsupportedError: There is no C++ compiler with OpenMP.
        """
        self._norms_of((torch.float32,), (1,))

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.verdict.Executor`."""
        read, dtypes = vectors(gradients)
        try:
            return self._norms_of(tuple(dtypes), tuple(map(Tensor.numel, read)))(read)
        except NoKernel as error:  # the compiler was removed meanwhile
            warn_once(str(error))
            return Portable().norms(gradients)

    def update_of(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.verdict.Executor`."""
        return _CppUpdate(bucket)


class _CppNorms:
    """Pass 1 for gradients of certain dtypes and lengths, wherever they lie."""

    def __init__(self, dtypes: Sequence[torch.dtype], lengths: Sequence[int]) -> None:
        self.lengths = as_table(lengths)
        self.launches = [
            (_kernel(norm_source(dtype)), chunks, chunks[:, 0].long(), int(self.lengths[indices].sum()))
            for dtype, indices, chunks in by_dtype(list(zip(dtypes, lengths, strict=True)), CHUNK)
            if len(chunks)
        ]

    def __call__(self, vectors: Sequence[Tensor]) -> Tensor:
        addresses = table_of(vectors)
        squares = torch.zeros(len(vectors), dtype=torch.float64, device="cpu")
        for kernel, chunks, owners, elements in self.launches:
            sums = torch.empty(len(chunks), dtype=torch.float64, device="cpu")
            kernel(addresses, self.lengths, chunks, len(chunks), CHUNK, sums, threads(elements))
            squares.index_add_(0, owners, sums)
        return squares.sqrt_().to(torch.float32)


class _CppUpdate(TabledUpdate):
    """Pass 2 for one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.random = bucket.random
        self.no_keys = torch.zeros(1, dtype=torch.int32, device="cpu")

    def rebuild_tables(self, rows: Rows) -> None:
        """See :class:`mezzo.step.executors.portable.TabledUpdate`."""
        self.tables = [
            (self.kernel(dtypes), chunked(lengths, as_table(indices), CHUNK), int(lengths.numpy().sum()))
            for dtypes, indices in rows.by_dtypes.items()
            for lengths in [rows.table[indices, 0]]
        ]

    def refresh_addresses(self, rows: Rows) -> None:
        """See :class:`mezzo.step.executors.portable.TabledUpdate`. Each launch takes the rows as they are."""

    def launch(self, vectors: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """See :class:`mezzo.step.executors.portable.TabledUpdate`."""
        addresses = table_of(vectors)
        seeds = keys(step, len(vectors), self.bucket.seed) if self.random else self.no_keys
        numbers = scalars, verdict.multiplier.to(torch.float32), verdict.found_inf.to(torch.bool), seeds
        for kernel, chunks, elements in self.tables:
            kernel(addresses, self.rows.table, chunks, len(chunks), CHUNK, *numbers, threads(elements))

    def kernel(self, dtypes: tuple[torch.dtype, ...]) -> CppKernel:
        """Return the kernel for a gradient, parts and states of these dtypes."""
        return _kernel(update_source(self.bucket.rule, self.bucket.storage, dtypes))


def _kernel(source: str) -> CppKernel:
    try:
        return built(source)
    except (UnsupportedError, OSError) as error:  # such as a full disk
        raise NoKernel(str(error)) from error
