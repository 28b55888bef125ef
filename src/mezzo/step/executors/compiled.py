"""Both passes through ``torch.compile``: one fused kernel that reads and writes every byte once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mezzo.errors import UnsupportedError
from mezzo.step.executors.layout import Block, Task, norms, pieces, units
from mezzo.step.passes import Cohort, InPieces, NoKernel, Update, Verdict, updated
from mezzo.step.rounding import keys, noise
from mezzo.step.storage import Storage
from mezzo.step.update import Rule
from mezzo.step.whole import Call, Piece

__all__ = ["Compiled"]

#: Elements for each call of a kernel on the CPU: enough to hide the 30 µs that a call costs, few enough that the
#: copies of 16-bit tensors (:class:`_CompiledUpdate`) stay in cache.
CPU_CHUNK: Final = 1 << 20
#: Elsewhere: what int32 element numbers can count.
DEVICE_CHUNK: Final = 1 << 30
#: Squares are summed by rows of this length first, which is faster than one long sum and as accurate.
ROW: Final = 1 << 12


class Compiled:
    """Update with one compiled kernel for each rule, storage and set of dtypes, whatever the lengths of the tensors.

    Kernels take vectors of any length; they are compiled once a process (the next finds them in torch's cache on
    disk). Hyper-parameters, multiplier and step are tensors, so that neither a step nor a schedule compiles again. One
    graph over all tensors would save 20 µs for each of them, and compile for minutes.

    **Cost**: 2 to 10 s to compile a kernel. Per step the bytes of the stored tensors, once, and 30 µs a tensor. No host
    sync on other devices than the CPU.
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

    def planes(self, device: torch.device) -> bool:
        """See :class:`mezzo.step.passes.Executor`."""
        return device.type == "cpu"

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.passes.Executor`."""
        return norms(gradients, long=_squares)

    def prepare(self, cohort: Cohort) -> Update:
        """See :class:`mezzo.step.passes.Executor`."""
        return _CompiledUpdate(cohort)


def _is_compiled(example: Tensor) -> Tensor:
    return example + torch.compiler.is_compiling()


def _squares(gradient: Tensor) -> Tensor:
    """Sum the squares of a long gradient on the CPU: whole rows by a compiled kernel, the rest without."""
    (vector,) = pieces(gradient, gradient.numel())
    whole = len(vector) // ROW * ROW
    total = _row_squares(gradient.dtype)(vector[:whole].view(-1, ROW)).sum()
    return total + vector[whole:].to(torch.float32).square().sum() if whole < len(vector) else total


@cache
def _row_squares(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def row_squares(rows: Tensor) -> Tensor:
        return rows.to(torch.float32).square().sum(1)

    return _compiled(row_squares, f"squares_{dtype}", torch.zeros(CPU_CHUNK // ROW, ROW, dtype=dtype))


class _CompiledUpdate(InPieces):
    """Pass 2 by a compiled :func:`mezzo.step.passes.updated`.

    On the CPU kernels read 16-bit tensors from a copy, made chunk by chunk, while it is in cache. Inductor moves 16
    such values as the masked half of a vector register, and a masked load right behind a masked store next to it
    waits for the store: reading what it writes makes a kernel half as fast.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.on_cpu = cohort.step.device.type == "cpu"
        self.units = units(cohort, CPU_CHUNK if self.on_cpu else DEVICE_CHUNK)
        self.kernels: dict[tuple[torch.dtype, ...], Callable[..., None]] = {}
        self.spares: list[Tensor] = []
        self.random = cohort.random
        # The kernel for bundles is that for long weights, so both get their element numbers from a vector on the CPU.
        self.order = torch.arange(CPU_CHUNK, dtype=torch.int32) if self.random and self.on_cpu else None
        self.no_key = torch.zeros((), dtype=torch.int32, device=cohort.step.device)

    @torch.no_grad()
    def pieces(self, gradients: Sequence[Tensor], check: Verdict, step: Tensor) -> list[Piece]:
        """See :class:`mezzo.step.passes.Update`."""
        if self.on_cpu and check.found_inf:  # here the flag is host memory
            return []
        self.make_kernels(gradients)
        shared = (self.cohort.rule.scalars(self.cohort.hypers, step), check.multiplier, check.found_inf)
        seeds = keys(step, len(gradients), self.cohort.seed) if self.random else None
        tasks = (task for unit in self.units for task in unit.tasks(gradients))
        return [partial(self.piece, task, shared, seeds) for task in tasks]

    @torch.no_grad()
    def piece(self, task: Task, shared: tuple[Tensor, ...], seeds: Tensor | None) -> list[Call]:
        block, gradient, back = task()
        return [*self.block(block, gradient, *shared, *self.hashed(block, gradient, seeds)), *back]

    def make_kernels(self, gradients: Sequence[Tensor]) -> None:
        """Compile what these gradients need, if it is missing, before anything is updated."""
        dtypes = {gradient.dtype for gradient in gradients}
        dtypes.add(functools.reduce(torch.promote_types, dtypes))  # short ones are joined
        for weight, extra, states in zip(self.cohort.weights, self.cohort.extras, self.cohort.states, strict=True):
            if weight.numel() > 1:
                for dtype in dtypes:
                    self.kernel(dtype, (*self.cohort.storage.parts(weight, extra), *states))

    def hashed(self, block: Block, gradient: Tensor, seeds: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return what random bits are made from: element numbers, or None for 0, 1, …, and a key."""
        if seeds is None:
            return None, self.no_key
        order = self.order[: len(gradient)] if self.order is not None and block.vectors else None
        return block.places.hashed(order, seeds)

    def block(self, block: Block, gradient: Tensor, *shared: Any) -> list[Call]:
        targets = (*block.parts, *block.states)
        if block.vectors and len(gradient) > 1:  # torch.compile would take a length of 1 for a constant
            return [partial(self.kernel(gradient.dtype, targets), gradient, targets, self.copies(targets), *shared)]
        values = _computed(self.cohort.rule, self.cohort.storage, self.on_cpu, gradient, targets, *shared)
        return [partial(target.copy_, value) for target, value in zip(targets, values, strict=True)]

    def kernel(self, gradient: torch.dtype, targets: tuple[Tensor, ...]) -> Callable[..., None]:
        dtypes = (gradient, *(target.dtype for target in targets))
        if dtypes not in self.kernels:
            self.kernels[dtypes] = _kernel(self.cohort.rule, self.cohort.storage, dtypes, targets[0].device)
        return self.kernels[dtypes]

    def copies(self, targets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        narrow = [target for target in targets if self.on_cpu and target.itemsize == 2]
        if len(self.spares) < len(narrow):
            self.spares = [torch.empty(CPU_CHUNK, dtype=torch.int16) for _ in narrow]
        spares = (spare[: len(target)].view(target.dtype) for spare, target in zip(self.spares, narrow, strict=False))
        return tuple(spare.copy_(target) for spare, target in zip(spares, narrow, strict=True))


@cache
def _kernel(rule: Rule, storage: Storage, dtypes: tuple[torch.dtype, ...], device: torch.device) -> Callable[..., None]:
    """Compile pass 2 for vectors: of a gradient's dtype, then of the parts' and states'."""
    on_cpu = device.type == "cpu"
    copied = (dtype for dtype in dtypes[1:] if on_cpu and dtype.itemsize == 2)
    vectors = [torch.zeros(CPU_CHUNK, dtype=dtype, device=device) for dtype in (*dtypes, *copied)]
    targets, copies = tuple(vectors[1 : len(dtypes)]), tuple(vectors[len(dtypes) :])
    scalars, one = torch.ones(len(rule.numbers), device=device), torch.ones((), device=device)
    random = storage.random or any(dtype != torch.float32 for dtype in dtypes[len(dtypes) - len(rule.states) :])
    order = torch.zeros(CPU_CHUNK, dtype=torch.int32) if random and on_cpu else None
    key = torch.zeros((), dtype=torch.int32, device=device)
    function, name = _traceable(rule, storage, on_cpu), f"{rule.name}_{storage.name}"
    return _compiled(function, name, vectors[0], targets, copies, scalars, one, one == 0, order, key)


@cache
def _traceable(rule: Rule, storage: Storage, on_cpu: bool) -> Callable[..., None]:
    """Pass 2 in place; tensors of 16 bits are read from copies on the CPU.

    Elsewhere the step is predicated: with ``found_inf`` the old values are written again.
    """

    def update(
        gradient: Tensor,
        targets: tuple[Tensor, ...],
        copies: tuple[Tensor, ...],
        scalars: Tensor,
        multiplier: Tensor,
        found_inf: Tensor,
        order: Tensor | None,
        key: Tensor,
    ) -> None:
        rest = iter(copies)
        sources = tuple(next(rest) if on_cpu and t.itemsize == 2 else t for t in targets)
        values = _computed(rule, storage, on_cpu, gradient, sources, scalars, multiplier, found_inf, order, key)
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    return update


def _computed(
    rule: Rule,
    storage: Storage,
    on_cpu: bool,
    gradient: Tensor,
    sources: tuple[Tensor, ...],
    scalars: Tensor,
    multiplier: Tensor,
    found_inf: Tensor,
    order: Tensor | None,
    key: Tensor,
) -> list[Tensor]:
    """Return the new values of the tensors that are read."""
    parts, states = sources[: -len(rule.states) or None], sources[len(sources) - len(rule.states) :]

    def bits(slot: int) -> Tensor:
        index = order
        if index is None:
            index = torch.arange(gradient.numel(), dtype=torch.int32, device=gradient.device)
        return noise(index.view(gradient.shape), key, slot)

    values, new = updated(rule, storage, gradient, parts, states, scalars, multiplier, bits)
    pairs = zip(sources, (*values, *new), strict=True)
    return [value if on_cpu else torch.where(found_inf, source, value) for source, value in pairs]


def _compiled(function: Callable[..., Any], name: str, *examples: Any) -> Callable[..., Any]:
    """Compile a function of vectors for any length, by a call with long ones: shorter ones would not use threads."""
    import torch._dynamo

    # A code object of its own: torch counts recompilations by code object, and gives up after eight.
    code = function.__code__.replace(co_name=name.replace(".", "_"))
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True)
    for example in examples:
        for tensor in example if isinstance(example, tuple) else (example,):
            if tensor is not None and tensor.numel() == CPU_CHUNK:
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
