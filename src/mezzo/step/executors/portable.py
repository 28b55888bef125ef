"""Both passes in torch's own operations, a cacheful at a time: what every device runs, and needs no compiler for."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.tables import laid_out
from mezzo.step.passes import Bucket, BucketUpdate, NoKernel, Verdict, stepped
from mezzo.step.rounding import keys
from mezzo.step.storage import Storage
from mezzo.step.update import Scalars, States, UpdateRule
from mezzo.step.whole import Call, Piece
from mezzo.tensors import flat

__all__ = ["Compiled", "Portable", "calls"]

#: Elements in a block. Smaller ones stay nearer to the cores, but each operation costs 2 µs of dispatch: on a Zen 4
#: with 1 MiB of second-level cache a core, 2^15 takes twice as long and 2^18 1.1 times.
CPU_BLOCK: Final = 1 << 17
#: On other devices, where a block costs launches, and a few FP32 temporaries.
DEVICE_BLOCK: Final = 1 << 24
#: For a compiled kernel: what int32 element numbers can count.
COMPILED_BLOCK: Final = 1 << 30
#: Elements of the vectors that a kernel is compiled with, for any number.
EXAMPLE: Final = 1 << 12


class Portable:
    """Update block by block by the rule's and the storage's own operations.

    On the CPU torch's fused kernel stands for the rule where there is one, unless anything is rounded at random: it
    works on a copy of a block's FP32 values and states.

    **Cost**: per step the bytes of the stored tensors, once; some FP32 temporaries of a block, and 2 µs for each of
    some twenty operations on a block. No host sync on other devices than the CPU.
    """

    @torch.no_grad()
    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.passes.Executor`.

        On the CPU block by block: torch's own norm of a low-precision tensor is not vectorised there (2.1 ns an
        element, against 0.24, on one core of a Zen 4), and that of 30 million FP32 values is 0.17 % too small, against
        2e-7.
        """
        if not gradients:
            return torch.zeros(0)
        if gradients[0].device.type != "cpu":
            return torch.stack(torch._foreach_norm([each.detach() for each in gradients], 2, torch.float32))
        return torch.stack([_squares(gradient).sqrt() for gradient in gradients])

    def prepare(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.passes.Executor`."""
        return _PortableUpdate(bucket)


class Compiled(Portable):
    """The same fused by ``torch.compile`` into one kernel for each rule, storage and set of dtypes: off the CPU.

    Kernels take vectors of any length. Hyper-parameters, multiplier and step are tensors, so that neither a step nor a
    schedule compiles again. One graph over all tensors would save 20 µs for each of them, and compile for minutes.

    **Cost**: 2 to 10 s to compile a kernel, once a process. Per step the bytes of the stored tensors, once, and 30 µs
    a tensor. No host sync.
    """

    def require(self, device: torch.device) -> None:
        """Compile a little on a device.

        Raises:
            UnsupportedError: torch cannot: there is no C++ compiler, or compiling is switched off.
        """
        example = torch.zeros(2, device=device)
        if not _compiled(_is_compiled, "check", example)(example).all():
            raise UnsupportedError(
                "torch.compile is switched off",
                why="what it returns runs in Python",
                write="unset TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE",
            )

    def prepare(self, bucket: Bucket) -> BucketUpdate:
        """See :class:`mezzo.step.passes.Executor`."""
        return _CompiledUpdate(bucket)


class _PortableUpdate(BucketUpdate):
    """Pass 2 by :func:`mezzo.step.passes.updated`, block by block."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.on_cpu = bucket.step.device.type == "cpu"
        self.size = CPU_BLOCK if self.on_cpu else DEVICE_BLOCK
        self.rule_of_vectors = bucket.rule

    @torch.no_grad()
    def pieces(self, gradients: Sequence[Tensor], check: Verdict, step: Tensor) -> list[Piece]:
        """See :class:`mezzo.step.passes.BucketUpdate`."""
        if self.on_cpu and check.found_inf:  # here the flag is host memory
            return []
        bucket = self.bucket
        self.make_ready(gradients, step)
        scalars = bucket.rule.scalars(bucket.hypers, step)
        seeds = keys(step, len(gradients), bucket.seed) if bucket.random else scalars.new_zeros((), dtype=torch.int32)
        pieces: list[Piece] = []
        for index, gradient in enumerate(gradients):
            for start, block in _blocks(gradient.detach(), bucket.targets(index), self.size):
                key = seeds[index] + start if bucket.random else seeds
                pieces.append(partial(self.block, block[0], block[1:], scalars, check, key))
        return pieces

    def make_ready(self, gradients: Sequence[Tensor], step: Tensor) -> None:
        """Let torch's kernel stand for the rule in this step, where there is one."""
        if self.on_cpu and self.bucket.rule.native is not None and not self.bucket.random:
            self.rule_of_vectors = _by_torch(self.bucket.rule, self.bucket.hypers, step)

    def block(
        self, gradient: Tensor, targets: Sequence[Tensor], scalars: Tensor, check: Verdict, key: Tensor
    ) -> list[Call]:
        """Return what writes a block's new values."""
        is_vectors = all(each.is_contiguous() for each in (gradient, *targets))
        rule = self.rule_of_vectors if is_vectors else self.bucket.rule
        return calls(rule, self.bucket.storage, gradient, targets, scalars, check, key, predicated=not self.on_cpu)


def calls(
    rule: UpdateRule,
    storage: Storage,
    gradient: Tensor,
    targets: Sequence[Tensor],
    scalars: Tensor,
    check: Verdict,
    key: Tensor,
    *,
    predicated: bool = True,
) -> list[Call]:
    """Return what updates some elements with torch's operations.

    Args:
        rule: What to do.
        storage: How the weights are stored.
        gradient: Scaled.
        targets: The parts and states of the weights, of the gradient's shape.
        scalars: Of ``rule.scalars``.
        check: The verdict on the step.
        key: Of the first element's random bits.
        predicated: Whether the verdict's flag is asked for each element, and the old values are written again.
    """
    values = _new_values(rule, storage, gradient, targets, scalars, check.multiplier, key)
    return [
        partial(target.copy_, torch.where(check.found_inf, target, value) if predicated else value)
        for target, value in zip(targets, values, strict=True)
    ]


def _new_values(
    rule: UpdateRule,
    storage: Storage,
    gradient: Tensor,
    targets: Sequence[Tensor],
    scalars: Tensor,
    multiplier: Tensor,
    key: Tensor,
) -> tuple[Tensor, ...]:
    parts, states = targets[: len(targets) - len(rule.states)], targets[len(targets) - len(rule.states) :]
    order = torch.arange(gradient.numel(), dtype=torch.int32, device=gradient.device).view(gradient.shape)
    return stepped(rule, storage, gradient, tuple(parts), tuple(states), scalars, multiplier, key, order)


def _by_torch(rule: UpdateRule, hypers: Mapping[str, Tensor], step: Tensor) -> UpdateRule:
    """Return a rule whose arithmetic is torch's own kernel for the CPU, on vectors."""
    native, count = rule.native, step.to(torch.float32)
    assert native is not None, "asked for rules that have one"
    numbers = {name: hypers[name].item() for name in rule.hypers}

    def apply(gradient: Tensor, weight: Tensor, states: States, _: Scalars) -> tuple[Tensor, States]:
        weight, states = weight.clone(), tuple(state.clone() for state in states)  # which the kernel writes to
        native(gradient, weight, states, numbers, count)
        return weight, states

    return replace(rule, apply=apply)


def _blocks(gradient: Tensor, targets: Sequence[Tensor], size: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Cut a gradient and what it is for into vectors in memory order: the first element's number, and the vectors.

    A weight with gaps or overlaps, or whose states lie otherwise, is one block of its own shape.
    """
    lying = flat(*targets)
    if lying is None:
        yield 0, (gradient, *targets)
        return
    vectors = flat(laid_out(gradient, targets[0]))
    assert vectors is not None, "it lies as its weight does, which has neither gaps nor overlaps"
    for number, block in enumerate(zip(*(torch.split(each, size) for each in (*vectors, *lying)), strict=True)):
        yield number * size, block


def _squares(gradient: Tensor) -> Tensor:
    """Sum the squares of a gradient on the CPU in FP32."""
    (vector,) = flat(gradient) or (gradient.reshape(-1),)
    wide = (each.to(torch.float32) for each in torch.split(vector.detach(), CPU_BLOCK))
    return torch.stack([torch.dot(each, each) for each in wide]).sum()


# torch.compile's ------------------------------------------------------------------------------------------------


class _CompiledUpdate(_PortableUpdate):
    """Pass 2 by a compiled :func:`mezzo.step.passes.updated`, with a flag that stays on the device."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.size = COMPILED_BLOCK

    def make_ready(self, gradients: Sequence[Tensor], step: Tensor) -> None:
        """Compile what these gradients need, if it is missing, before anything is updated."""
        for index, gradient in enumerate(gradients):
            self.kernel(gradient, self.bucket.targets(index))

    def block(
        self, gradient: Tensor, targets: Sequence[Tensor], scalars: Tensor, check: Verdict, key: Tensor
    ) -> list[Call]:
        """See :class:`_PortableUpdate`."""
        if gradient.dim() != 1 or len(gradient) == 1:  # torch.compile would take a length of 1 for a constant
            return super().block(gradient, targets, scalars, check, key)
        kernel = self.kernel(gradient, targets)
        return [partial(kernel, gradient, targets, scalars, check.multiplier, check.found_inf, key)]

    def kernel(self, gradient: Tensor, targets: Sequence[Tensor]) -> Callable[..., None]:
        dtypes = (gradient.dtype, *(target.dtype for target in targets))
        return _kernel(self.bucket.rule, self.bucket.storage, dtypes, self.bucket.step.device)


@cache
def _kernel(
    rule: UpdateRule, storage: Storage, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Callable[..., None]:
    """Compile pass 2 for vectors: of a gradient's dtype, then of the parts' and states'."""

    def update(
        gradient: Tensor, targets: Sequence[Tensor], scalars: Tensor, multiplier: Tensor, found_inf: Tensor, key: Tensor
    ) -> None:
        values = _new_values(rule, storage, gradient, targets, scalars, multiplier, key)
        for target, value in zip(targets, values, strict=True):
            target.copy_(torch.where(found_inf, target, value))

    gradient, *targets = (torch.zeros(EXAMPLE, dtype=dtype, device=device) for dtype in dtypes)
    scalars, one = torch.ones(len(rule.numbers), device=device), torch.ones((), device=device)
    return _compiled(
        update, f"{rule.name}_{storage.name}", gradient, targets, scalars, one, one == 0, one.to(torch.int32)
    )


def _is_compiled(example: Tensor) -> Tensor:
    return example + torch.compiler.is_compiling()


def _compiled(function: Callable[..., Any], name: str, *examples: Any) -> Callable[..., Any]:
    """Compile a function of vectors for any length, by a call with some."""
    import torch._dynamo

    # A code object of its own: torch counts recompilations by code object, and gives up after eight.
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True)
    for example in examples:
        for tensor in example if isinstance(example, list) else (example,):
            if tensor.numel() == EXAMPLE:
                torch._dynamo.mark_dynamic(tensor, 0)
    try:
        with torch.no_grad():
            compiled(*examples)
    except RuntimeError as error:
        reasons = [line for line in str(error).splitlines() if line.strip() and not line.startswith("backend=")]
        raise NoKernel(
            "torch.compile cannot make an optimizer kernel here",
            where=f"{name} on {examples[0].device}",
            why=reasons[0] if reasons else type(error).__name__,
            write="apt install g++ (or another C++ compiler), or CXX=its path",
        ) from error
    return compiled
