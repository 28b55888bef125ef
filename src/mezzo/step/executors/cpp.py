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
    tell,
    vectors,
)
from mezzo.step.storage import keys
from mezzo.step.verdict import Bucket, BucketUpdate, Verdict

#: Elements that one thread takes at a time.
CHUNK: Final = 1 << 14
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
        NoKernel: Before the first step: no C++ compiler with OpenMP, or an operation that is not in its table.
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
        self._known((torch.float32,), (1,))

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.verdict.Executor`."""
        read, dtypes = vectors(gradients)
        try:
            return self._known(tuple(dtypes), tuple(map(Tensor.numel, read)))(read)
        except NoKernel as error:  # the compiler is gone since
            tell(str(error))
            return Portable().norms(gradients)

    def update_of(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.verdict.Executor`."""
        return _CppUpdate(bucket)


class _CppNorms:
    """Pass 1 for gradients of certain dtypes and lengths, wherever they lie."""

    def __init__(self, dtypes: Sequence[torch.dtype], lengths: Sequence[int]) -> None:
        self.lengths, kinds = as_table(lengths), list(zip(dtypes, lengths, strict=True))
        self.launches = [
            (_kernel(norm_source(dtype)), cut, cut[:, 0].long(), sum(length for kind, length in kinds if kind == dtype))
            for dtype, _, cut in by_dtype(kinds, CHUNK)
            if len(cut)
        ]

    def __call__(self, vectors: Sequence[Tensor]) -> Tensor:
        places = table_of(vectors)
        squares = torch.zeros(len(vectors), dtype=torch.float64, device="cpu")
        for kernel, cut, owners, elements in self.launches:
            sums = torch.empty(len(cut), dtype=torch.float64, device="cpu")
            kernel(places, self.lengths, cut, len(cut), CHUNK, sums, threads(elements))
            squares.index_add_(0, owners, sums)
        return squares.sqrt_().to(torch.float32)


class _CppUpdate(TabledUpdate):
    """Pass 2 for one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.random = bucket.random
        self.no_keys = torch.zeros(1, dtype=torch.int32, device="cpu")

    def follow(self, rows: Rows) -> None:
        """See :class:`.tables.TabledUpdate`."""
        self.tables = [
            (self.kernel(dtypes), chunked(lengths, as_table(places), CHUNK), int(lengths.numpy().sum()))
            for dtypes, places in rows.alike.items()
            for lengths in [rows.table[places, 0]]
        ]

    def follow_addresses(self, rows: Rows) -> None:
        """See :class:`.tables.TabledUpdate`. Each launch takes the rows as they are."""

    def launch(self, vectors: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """See :class:`.tables.TabledUpdate`."""
        places = table_of(vectors)
        seeds = keys(step, len(vectors), self.bucket.seed) if self.random else self.no_keys
        numbers = scalars, verdict.multiplier.to(torch.float32), verdict.found_inf.to(torch.bool), seeds
        for kernel, cut, elements in self.tables:
            kernel(places, self.rows.table, cut, len(cut), CHUNK, *numbers, threads(elements))

    def kernel(self, dtypes: tuple[torch.dtype, ...]) -> CppKernel:
        """Return the kernel for a gradient, parts and states of these dtypes."""
        return _kernel(update_source(self.bucket.rule, self.bucket.storage, dtypes))


def _kernel(source: str) -> CppKernel:
    try:
        return built(source)
    except (UnsupportedError, OSError) as error:  # such as a full disk
        raise NoKernel(str(error)) from error
