"""Which executor carries the passes out, by device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mezzo.emit.tracing import Pure
from mezzo.errors import UnsupportedError
from mezzo.launched import has_triton
from mezzo.step.executors.portable import Portable
from mezzo.step.verdict import Bucket, BucketUpdate, Executor

if TYPE_CHECKING:
    from mezzo.step.executors.triton import Shared


logger = logging.getLogger(__name__)

_BLOCK_BY_BLOCK: Final = "optimizer steps on %s run block by block, since %s"


def executor_for(device: torch.device) -> Executor:
    """Return the executor of a device: C++ on the CPU, Triton on NVIDIA's GPUs, elsewhere torch's own operations.

    Where a compiler is missing, torch's own operations take its place, too. The log says so once.
    """
    return _working(torch.device("cpu") if device.type == "cpu" else device)


def update_of(bucket: Bucket) -> BucketUpdate:
    """Return pass 2 for a bucket by its device's executor."""
    return executor_for(bucket.step.device).update_of(bucket)


def shared(function: Pure, constants: tuple[Hashable, ...], tensors: Sequence[Tensor | float]) -> Sequence[Tensor]:
    """Return numbers that all elements of a step share: computed in one launch, where kernels can be written.

    Args:
        function: Pure: without a branch on values, from 0-d tensors, vectors and numbers to tensors.
        constants: Its first arguments; code is written for each set of them.
        tensors: The other arguments: of one device, the first a tensor. An argument that the function returns, or a
            copy of it, may come back as the tensor itself.
    """
    device = tensors[0].device if isinstance(tensors[0], Tensor) else torch.device("cpu")
    launched = _shared_on(device) if device.type == "cuda" and has_triton() else None
    return function(*constants, *tensors) if launched is None else launched(function, constants, tensors)


@functools.cache
def _working(device: torch.device) -> Executor:
    """Return the executor that has kernels on a device, or the one that needs none."""
    executor: Cpp | Triton
    if device.type == "cpu":
        from mezzo.step.executors.cpp import Cpp

        executor = Cpp()
    elif device.type == "cuda" and has_triton():
        from mezzo.step.executors.triton import Triton, refuse_capture

        refuse_capture(device, "the first step of all")  # no kernel can be tried in a graph, and no result is cached
        executor = Triton()
    else:
        logger.warning(_BLOCK_BY_BLOCK, device, "kernels are written for CPUs, and for NVIDIA's GPUs with Triton")
        return Portable()
    try:
        executor.require(device)
    except UnsupportedError as error:
        logger.warning(_BLOCK_BY_BLOCK, device, error)
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
