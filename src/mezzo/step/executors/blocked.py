"""Pass 2 in plain torch operations, a cacheful at a time: needs no compiler, and runs on every device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from mezzo.step.executors.inplace import INPLACE, Inplace, Scratch
from mezzo.step.executors.layout import Block, Task, norms, units
from mezzo.step.passes import Cohort, InPieces, Update, Verdict, updated
from mezzo.step.rounding import keys, noise
from mezzo.step.update import Native
from mezzo.step.whole import Call, Piece

__all__ = ["Blocked"]

#: Elements in a block. Smaller ones stay nearer to the cores, but each operation costs 2 µs of dispatch: on a Zen 4
#: with 1 MiB of second-level cache a core, 2^16 takes 1.4 times as long and 2^19 1.3 times.
CPU_BLOCK: Final = 1 << 18
#: On other devices, where a block costs launches, and a few FP32 temporaries.
DEVICE_BLOCK: Final = 1 << 24


class Blocked:
    """Update block by block: FP32 values in a scratch block, torch's own fused kernel on them, and back.

    Rules without a kernel of torch's, storages that round at random or compensate, BF16 moments, weights with gaps and
    other devices than the CPU take the rule's and the storage's own operations instead.

    **Cost**: per step the bytes of the stored tensors, once; on the CPU 3.5 MiB of scratch, elsewhere a few FP32
    temporaries of a block. No host sync on other devices than the CPU.
    """

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def planes(self, device: torch.device) -> bool:
        """See :class:`mezzo.step.passes.Executor`."""
        return False

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """See :class:`mezzo.step.passes.Executor`."""
        return norms(gradients)

    def prepare(self, cohort: Cohort) -> Update:
        """See :class:`mezzo.step.passes.Executor`."""
        if cohort.step.device.type != "cpu":
            return _Pure(cohort, DEVICE_BLOCK)
        inplace, native = INPLACE.get(cohort.storage.name), cohort.rule.native
        wide = all(state.dtype == torch.float32 for states in cohort.states for state in states)
        if native is None or inplace is None or not wide:
            return _Pure(cohort, CPU_BLOCK)
        self._scratch = self._scratch or Scratch.allocate(CPU_BLOCK)
        return _Native(cohort, native, inplace, self._scratch)


class _Pure(InPieces):
    """Pass 2 by :func:`mezzo.step.passes.updated`, block by block."""

    def __init__(self, cohort: Cohort, size: int) -> None:
        self.cohort = cohort
        self.units = units(cohort, size)
        device = cohort.step.device
        self.on_cpu = device.type == "cpu"
        self.order = torch.arange(size, dtype=torch.int32, device=device)

    @torch.no_grad()
    def pieces(self, gradients: Sequence[Tensor], check: Verdict, step: Tensor) -> list[Piece]:
        """See :class:`mezzo.step.passes.Update`."""
        if self.on_cpu and check.found_inf:  # here the flag is host memory
            return []
        cohort = self.cohort
        scalars = cohort.rule.scalars(cohort.hypers, step)
        seeds = keys(step, len(gradients), cohort.seed)
        tasks = (task for unit in self.units for task in unit.tasks(gradients))
        return [partial(self.piece, task, scalars, check, seeds) for task in tasks]

    @torch.no_grad()
    def piece(self, task: Task, scalars: Tensor, check: Verdict, seeds: Tensor) -> list[Call]:
        block, gradient, back = task()
        return [*self.block(block, gradient, scalars, check, seeds), *back]

    def block(self, block: Block, gradient: Tensor, scalars: Tensor, check: Verdict, seeds: Tensor) -> list[Call]:
        weight = block.parts[0]

        def bits(slot: int) -> Tensor:
            count = weight.numel()
            order = self.order if count <= len(self.order) else torch.arange(count, device=seeds.device).int()
            return noise(*block.places.hashed(order[:count].view(weight.shape), seeds), slot)

        values, states = updated(
            self.cohort.rule, self.cohort.storage, gradient, block.parts, block.states, scalars, check.multiplier, bits
        )
        return [
            partial(target.copy_, value if self.on_cpu else torch.where(check.found_inf, target, value))
            for target, value in zip((*block.parts, *block.states), (*values, *states), strict=True)
        ]


class _Native(InPieces):
    """Pass 2 on the CPU by torch's own kernel, block by block through a scratch block."""

    def __init__(self, cohort: Cohort, native: Native, inplace: Inplace, scratch: Scratch) -> None:
        self.cohort = cohort
        self.native, self.inplace, self.scratch = native, inplace, scratch
        self.units = units(cohort, CPU_BLOCK)
        self.pure = _Pure(cohort, CPU_BLOCK)
        self.before: list[Tensor] | None = None  # what a block held that is being updated

    @torch.no_grad()
    def pieces(self, gradients: Sequence[Tensor], check: Verdict, step: Tensor) -> list[Piece]:
        """See :class:`mezzo.step.passes.Update`."""
        if check.found_inf:
            return []
        self.before = None
        rule = self.cohort.rule
        hypers = {name: self.cohort.hypers[name].item() for name in rule.hypers}
        multiplier = check.multiplier if check.multiplier.item() != 1 else None
        scalars = rule.scalars(self.cohort.hypers, step)
        shared = (multiplier, hypers, step.to(torch.float32), scalars, check)
        tasks = (task for unit in self.units for task in unit.tasks(gradients))
        return [partial(self.piece, task, *shared) for task in tasks]

    @torch.no_grad()
    def piece(
        self,
        task: Task,
        multiplier: Tensor | None,
        hypers: dict[str, float],
        step: Tensor,
        scalars: Tensor,
        check: Verdict,
    ) -> list[Call]:
        block, gradient, back = task()
        if not block.vectors:
            return self.pure.block(block, gradient, scalars, check, seeds=step)
        targets = [*block.parts, *block.states]
        if self.before is not None:  # an interrupt came while the block was updated, which begins again
            torch._foreach_copy_(targets, self.before)
        self.before = [target.clone() for target in targets]
        self.block(block, gradient, multiplier, hypers, step)
        return [partial(setattr, self, "before", None), *back]

    def block(
        self, block: Block, gradient: Tensor, multiplier: Tensor | None, hypers: dict[str, float], step: Tensor
    ) -> None:
        scratch = self.scratch.of(gradient.numel())
        wide = self.inplace.load(block.parts, scratch)
        if multiplier is not None:
            gradient = scratch.other.copy_(gradient).mul_(multiplier)
        elif gradient.dtype != torch.float32:
            gradient = scratch.other.copy_(gradient)
        self.native(gradient, wide, block.states, hypers, step)
        self.inplace.store(wide, block.parts, scratch)
