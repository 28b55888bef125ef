"""Which executor carries the passes out, by device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.launched import has_triton
from mezzo.step.executors.emit import Pure
from mezzo.step.executors.portable import Compiled, Portable, tell
from mezzo.step.verdict import Bucket, BucketUpdate, Executor, NoKernel, Verdict

if TYPE_CHECKING:
    from mezzo.step.executors.cpp import Cpp
    from mezzo.step.executors.triton import Shared, Triton


logger = logging.getLogger(__name__)


def executor_for(device: torch.device) -> Executor:
    """Return the executor of a device: C++ on the CPU, Triton on NVIDIA's GPUs, else torch's compiler.

    Where a compiler is missing, the executor that needs none takes its place, and the log says so once.
    """
    if device.type == "cpu":
        return _working("C++", torch.device("cpu"))
    return _working("Triton" if device.type == "cuda" and has_triton() else "torch.compile", device)


def update_of(bucket: Bucket) -> BucketUpdate:
    """Return pass 2 for a bucket by its device's executor, or by the one that needs no compiler.

    The other one takes its place for good where a kernel cannot be built, now or for dtypes that a later step has.
    """
    return _Working(bucket)


class _Working(BucketUpdate):
    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        try:
            self.update = executor_for(bucket.step.device).update_of(bucket)
        except NoKernel as error:
            self.update = portable(error).update_of(bucket)

    def ready(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        try:
            return self.update.ready(gradients)
        except NoKernel as error:
            self.update = portable(error).update_of(self.bucket)
            return self.update.ready(gradients)

    def write(self, gradients: Sequence[Tensor], verdict: Verdict, step: Tensor) -> None:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        self.update.write(gradients, verdict, step)


def shared(function: Pure, given: tuple[Hashable, ...], tensors: Sequence[Tensor | float]) -> Sequence[Tensor]:
    """Compute some of the few numbers that all of a step shares: in one launch, where kernels can be written.

    Args:
        function: Pure: without a branch on values, from 0-d tensors, vectors and numbers to tensors.
        given: Its first arguments; code is written for each set of them.
        tensors: The others: of one device, the first a tensor. One that the function returns, or a copy of it, may come
            back as the tensor itself.
    """
    device = tensors[0].device if isinstance(tensors[0], Tensor) else torch.device("cpu")
    launched = _shared_on(device) if device.type == "cuda" and has_triton() else None
    return function(*given, *tensors) if launched is None else launched(function, given, tensors)


def portable(error: NoKernel) -> Executor:
    """Return the executor that needs no compiler, in place of one that cannot build a kernel.

    Args:
        error: Why it cannot, for the log.
    """
    tell(str(error))
    return Portable()


@functools.cache
def _working(kind: str, device: torch.device) -> Executor:
    """Return an executor, or the one that needs no compiler where that cannot build its kernels."""
    executor: Cpp | Triton | Compiled = Compiled()
    if kind == "C++":
        from mezzo.step.executors.cpp import Cpp

        executor = Cpp()
    elif kind == "Triton":
        from mezzo.step.executors.triton import Triton, refuse_capture

        refuse_capture(device, "the first step of all")  # nothing can be tried in a graph, and nothing is remembered
        executor = Triton()
    try:
        executor.require(device)
    except UnsupportedError as error:
        logger.warning("optimizer steps on %s run block by block, since %s", device, error)
        return Portable()
    return executor


@functools.cache
def _shared_on(device: torch.device) -> Shared | None:
    from mezzo.step.executors.triton import Triton

    executor = Triton()
    try:
        executor.require(device)
    except UnsupportedError as error:
        logger.info("the few numbers that a step shares are computed one by one on %s, since %s", device, error)
        return None
    return executor.shared
