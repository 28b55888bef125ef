"""Pass 2 by whole matrices, one after another, on any device: for rules that are about more than an element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mezzo.formats.noise import noise
from mezzo.sharded import part_of, whole_of
from mezzo.step import moments
from mezzo.step.matrix import Matrix, Number
from mezzo.step.moments import Stored
from mezzo.step.storage import keys
from mezzo.step.verdict import Bucket, BucketUpdate, Verdict
from mezzo.tensors import flat


class WholeUpdate(BucketUpdate):
    """Pass 2 for matrices, by the operations of their rule.

    On a CPU nothing is touched in a step that is skipped. On other devices the flag stays there: every result is
    computed beside the stored tensors, and where the step is skipped the old values are written again, so that
    whatever gradients hold reaches nothing.

    **Cost**: FP32 temporaries of one matrix at a time, and of a matrix in shards the whole of it in BF16, gathered
    once. No host sync on other devices than the CPU.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.on_cpu = bucket.step.device.type == "cpu"

    def ready(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        return [gradient.detach() for gradient in gradients]

    def write(self, gradients: Sequence[Tensor], verdict: Verdict, step: Tensor, scalars: Tensor) -> None:
        """See :class:`mezzo.step.verdict.BucketUpdate`."""
        if self.on_cpu and verdict.found_inf:  # here the flag is host memory
            return
        bucket, numbers = self.bucket, self._numbers(scalars)
        seeds = keys(step, len(gradients), bucket.seed) if bucket.random else None
        for index, gradient in enumerate(gradients):
            self._write_matrix(index, gradient, verdict, numbers, None if seeds is None else seeds[index])

    def _numbers(self, scalars: Tensor) -> Mapping[str, Number]:
        """Return the numbers of the rule and its learning rate: of the host on a CPU, where torch reads them there."""
        rule, hypers = self.bucket.rule, self.bucket.hypers
        if not self.on_cpu:
            return {"lr": hypers["lr"], **dict(zip(rule.numbers, scalars.unbind(), strict=True))}
        on_host: dict[str, Any] = {name: float(number) for name, number in hypers.items()}
        if self.bucket.rate_dtype != torch.float64:  # torch computes with a tensor of the program's as it is
            on_host["lr"] = torch.tensor(on_host["lr"], dtype=self.bucket.rate_dtype)
        return {"lr": on_host["lr"], **rule.numbers_of(on_host, self.bucket.step)}

    def _write_matrix(
        self, index: int, gradient: Tensor, verdict: Verdict, numbers: Mapping[str, Number], key: Tensor | None
    ) -> None:
        bucket, storage = self.bucket, self.bucket.storage
        parts = storage.parts(bucket.weights[index], bucket.extras[index])
        stored = moments.apart(bucket.states[index])
        exact = gradient.to(torch.float32)
        if not verdict.is_one:
            exact = exact * verdict.multiplier
        weight = self._free(storage.read(parts), parts[0])
        states = tuple(self._free(_like(moment_of(tensors), exact), tensors[0]) for tensors in stored)
        param = bucket.params[index]
        matrix = Matrix(
            shape=param.shape,
            whole_of=partial(whole_of, param=param),
            part_of=partial(part_of, param=param),
            on_host=self.on_cpu,
            products=bucket.products,
        )
        bucket.rule.apply(exact, weight, states, numbers, matrix=matrix, **bucket.settings)
        if weight is not parts[0] and storage.write is not None:
            self._put(zip(parts, storage.write(weight, parts[0].dtype), strict=True), verdict)
        for tensors, state in zip(stored, states, strict=True):
            if state is not tensors[0]:
                self._put(zip(tensors, values_of(tensors, state, key), strict=True), verdict)

    def _free(self, value: Tensor, stored: Tensor) -> Tensor:
        """Return a value that the rule may write to: on a CPU the stored tensor itself, if the value is that."""
        return value.clone() if value is stored and not self.on_cpu else value

    def _put(self, pairs: Iterable[tuple[Tensor, Tensor]], verdict: Verdict) -> None:
        for target, value in pairs:
            target.copy_(value if self.on_cpu else torch.where(verdict.found_inf, target, value))


def _like(moment: Tensor, gradient: Tensor) -> Tensor:
    """Return a moment with the layout of a gradient, as torch begins it: bits of sums depend on where vectors end."""
    if moment.stride() == gradient.stride() or (moment.is_contiguous() and gradient.is_contiguous()):
        return moment
    return torch.empty_like(gradient).copy_(moment)


def moment_of(stored: Stored) -> Tensor:
    """Return a moment in FP32, with the layout of its stored tensors: the tensor itself if it is stored so."""
    return stored[0].to(torch.float32) if len(stored) == 1 else moments.decode(*stored)


def values_of(stored: Stored, moment: Tensor, key: Tensor | None) -> Sequence[Tensor]:
    """Return the values to copy into the stored tensors of a moment.

    Args:
        stored: The moment, or its codes and their scales.
        moment: The new value, FP32.
        key: Of the first element's random bits, for what is rounded.
    """
    if key is None:
        return [moment]
    codes = stored[0]
    vectors = flat(torch.empty_like(codes, dtype=torch.float32).copy_(moment))
    assert vectors is not None, "a state has neither gaps nor overlaps"
    (vector,) = vectors
    is_coded = len(stored) > 1
    elements = moments.in_groups(vector) if is_coded else vector
    order = torch.arange(elements.numel(), dtype=torch.int32, device=elements.device).view(elements.shape)
    values = moments.write(stored, elements, noise(order, key, 1), take_high=False)
    first = values[0].view(-1)[: codes.numel()].as_strided(codes.shape, codes.stride())
    return [first, *(value.view(-1) for value in values[1:])]
