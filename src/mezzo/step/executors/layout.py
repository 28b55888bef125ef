"""The tensors of a cohort as vectors: long ones cut into blocks, short ones bundled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from mezzo.step.passes import Cohort
from mezzo.step.runs import SHORT, run
from mezzo.step.storage import Parts
from mezzo.step.update import States
from mezzo.step.whole import Call
from mezzo.tensors import flat

__all__ = ["Block", "Places", "Task", "Unit", "norms", "pieces", "squares", "units"]

#: Gradients up to this length are gathered for their norms.
SHORT_NORM: Final = 1 << 14
#: Elements whose squares are summed at a time without a compiler.
NORM_BLOCK: Final = 1 << 18
#: From here on a compiled kernel, which takes 100 µs to call, is faster.
LONG_NORM: Final = 1 << 21

OrderT = TypeVar("OrderT", Tensor, Tensor | None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A run of elements to update.

    Args:
        parts: Views of the weights' stored tensors.
        states: Views of their states.
        vectors: Whether they are vectors without gaps.
        places: What random bits depend on beside the step.
    """

    parts: Parts
    states: States
    vectors: bool = True
    places: Places


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Which elements of which weights a block holds.

    Args:
        index: The weight's place in its cohort, or each element's, int32.
        start: The first element's number in its weight.
        numbers: Each element's number in its weight, int32, where there are several weights.
    """

    index: int | Tensor
    start: int = 0
    numbers: Tensor | None = None

    def hashed(self, order: OrderT, keys: Tensor) -> tuple[OrderT | Tensor, Tensor]:
        """Return the ``index`` and ``key`` of :func:`mezzo.step.rounding.noise` for a block.

        Args:
            order: 0, 1, … as int32, in the block's shape, or whatever stands for that.
            keys: Of :func:`mezzo.step.rounding.keys`.
        """
        if self.numbers is None:
            return order, keys[self.index] + self.start
        return self.numbers + keys[self.index], keys.new_zeros(())


#: Returns a block to update in place, its gradient, and what then brings copies back to where they were gathered.
Task: TypeAlias = Callable[[], tuple[Block, Tensor, list[Call]]]


class Unit(Protocol):
    """A part of a cohort's work."""

    def tasks(self, gradients: Sequence[Tensor]) -> list[Task]:
        """Return one task for each block."""


def units(cohort: Cohort, block: int) -> list[Unit]:
    """Divide a cohort into blocks of at most ``block`` elements."""
    alone = [_Layout(cohort, index, block) for index in range(len(cohort.weights))]
    short = [each for each in alone if each.length <= min(SHORT, block)]
    rest = [each for each in alone if each.length > min(SHORT, block)]
    bundles: list[list[_Layout]] = [[]]
    for each in short:
        if sum(other.length for other in bundles[-1]) + each.length > block:
            bundles.append([])
        bundles[-1].append(each)
    # The longest first: kernels that are compiled at the first call see what they are for.
    return [*rest, *(_Bundle(members) if len(members) > 1 else members[0] for members in bundles if members)]


@dataclass(slots=True, eq=False)
class _Layout:
    """Where one weight and all that belongs to it lies, as blocks in memory order."""

    cohort: Cohort
    index: int
    block: int
    _blocks: list[Block] = field(default_factory=list, init=False)
    _seen: tuple[int, ...] = field(default=(), init=False)

    @property
    def length(self) -> int:
        return self.cohort.weights[self.index].numel()

    def tasks(self, gradients: Sequence[Tensor]) -> list[Task]:
        pairs = zip(self.blocks(), self.gradients(gradients[self.index]), strict=True)
        return [partial(_as_it_lies, block, gradient) for block, gradient in pairs]

    def blocks(self) -> list[Block]:
        """Return the blocks, cut anew if a tensor was given other memory since.

        A weight with gaps or overlaps, or whose states lie otherwise, is one block of the weight's own shape.
        """
        cohort, at = self.cohort, self.index
        weight, extra, states = cohort.weights[at], cohort.extras[at], cohort.states[at]
        places = tuple([tensor.data_ptr() for tensor in (weight, extra, *states) if tensor is not None])
        seen = (*places, *weight.stride())
        if seen != self._seen or not self._blocks:
            parts = tuple(part.detach() for part in cohort.storage.parts(weight, extra))
            self._blocks, self._seen = _cut(at, parts, states, self.block), seen
        return self._blocks

    def gradients(self, gradient: Tensor) -> Sequence[Tensor]:
        """Cut a gradient as the weight is cut; one that lies otherwise is copied first."""
        gradient = gradient.detach()
        if not self._blocks[0].vectors:
            return [gradient]
        weight = self.cohort.weights[self.index]
        if len(self._blocks) == 1 and gradient.is_contiguous() and weight.is_contiguous():
            return [gradient.view(-1)]
        pair = flat(weight, gradient) or flat(weight, torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient))
        assert pair is not None, "a weight in blocks has neither gaps nor overlaps"
        return torch.split(pair[1], self.block)


@dataclass(slots=True, eq=False)
class _Bundle:
    """Short weights, updated as one vector: what does not lie in one run is gathered, and put back."""

    members: list[_Layout]
    _blocks: list[Block] = field(default_factory=list, init=False)
    _columns: list[list[Tensor]] = field(default_factory=list, init=False)  # by part and state: the members' vectors
    _runs: list[Tensor | None] = field(default_factory=list, init=False)  # by part and state: all of them as they lie
    _places: Places = field(default_factory=lambda: Places(index=0), init=False)

    def tasks(self, gradients: Sequence[Tensor]) -> list[Task]:
        self._look()
        own = [member.gradients(gradients[member.index])[0] for member in self.members]
        both = list(zip(self._blocks, own, strict=True))
        alone: list[Task] = [partial(_as_it_lies, block, gradient) for block, gradient in both if not block.vectors]
        if not self._columns:
            return alone
        return [*alone, partial(self._together, [gradient for block, gradient in both if block.vectors])]

    def _together(self, gradients: list[Tensor]) -> tuple[Block, Tensor, list[Call]]:
        pairs = list(zip(self._columns, self._runs, strict=True))
        joined = [_joined(column) if lying is None else lying for column, lying in pairs]
        count = len(self._blocks[0].parts)
        block = Block(parts=tuple(joined[:count]), states=tuple(joined[count:]), places=self._places)
        lengths = [len(target) for target in self._columns[0]]
        back: list[Call] = [
            partial(torch.split_with_sizes_copy, vector, lengths, out=targets)
            for (targets, lying), vector in zip(pairs, joined, strict=True)
            if lying is None
        ]
        return block, _joined(gradients), back

    def _look(self) -> None:
        """See where everything lies, anew if a tensor was given other memory."""
        blocks = [member.blocks()[0] for member in self.members]
        if blocks == self._blocks:
            return
        self._blocks = []  # until everything follows: an interrupt may come in between
        members = [member for member, block in zip(self.members, blocks, strict=True) if block.vectors]
        vectors = [(*block.parts, *block.states) for block in blocks if block.vectors]
        self._columns = [list(column) for column in zip(*vectors, strict=True)]
        self._runs = [run(column) for column in self._columns]
        if members and members[0].cohort.random:
            whole = [torch.arange(each.length, dtype=torch.int32) for each in members]
            index = [torch.full_like(numbers, each.index) for each, numbers in zip(members, whole, strict=True)]
            device = members[0].cohort.step.device
            self._places = Places(index=torch.cat(index).to(device), numbers=torch.cat(whole).to(device))
        self._blocks = blocks


def _as_it_lies(block: Block, gradient: Tensor) -> tuple[Block, Tensor, list[Call]]:
    return block, gradient, []


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def _cut(index: int, parts: Parts, states: States, block: int) -> list[Block]:
    tensors = flat(*parts, *states)
    if tensors is None:
        return [Block(parts=parts, states=states, vectors=False, places=Places(index=index))]
    cuts = zip(*(torch.split(vector, block) for vector in tensors), strict=True)
    return [
        Block(parts=cut[: len(parts)], states=cut[len(parts) :], places=Places(index=index, start=number * block))
        for number, cut in enumerate(cuts)
    ]


def norms(gradients: Sequence[Tensor], long: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Pass 1 on every device: the 2-norm of each gradient, in FP32.

    On the CPU block by block, low precision through a cached FP32 copy: torch's own norm of a low-precision tensor is
    not vectorised there (2.1 ns an element, against 0.24, on one core of a Zen 4), and that of 30 million FP32 values
    is 0.17 % too small, against 2e-7.

    Args:
        gradients: Floating tensors of one device, any layout.
        long: On the CPU, what sums the squares of the longest.
    """
    if not gradients:
        return torch.zeros(0)
    gradients = [gradient.detach() for gradient in gradients]
    if gradients[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(gradients, 2, torch.float32))
    short = [gradient for gradient in gradients if gradient.numel() <= SHORT_NORM]
    of_short = iter(_short_norms(short) if short else ())
    scratch = torch.empty(min(NORM_BLOCK, max(gradient.numel() for gradient in gradients)))

    def norm(gradient: Tensor) -> Tensor:
        if gradient.numel() <= SHORT_NORM:
            return next(of_short)
        if long is not None and gradient.numel() > LONG_NORM:
            return long(gradient).sqrt()
        return squares(gradient, scratch).sqrt()

    return torch.stack([norm(gradient) for gradient in gradients])


def _short_norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    wide = _joined(gradients).to(torch.float32)
    vectors = torch.split_with_sizes(wide, [gradient.numel() for gradient in gradients])
    return torch._foreach_norm(list(vectors))


def squares(gradient: Tensor, scratch: Tensor) -> Tensor:
    """Sum the squares of a gradient on the CPU, in blocks of the FP32 scratch's length."""
    sums = []
    for piece in pieces(gradient, max(1, len(scratch))):
        wide = piece if piece.dtype == torch.float32 else scratch[: len(piece)].copy_(piece)
        sums.append(torch.dot(wide, wide))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def pieces(gradient: Tensor, block: int) -> tuple[Tensor, ...]:
    """Cut a tensor into vectors of at most ``block`` elements, in memory order if it has no gaps."""
    (vector,) = flat(gradient) or (gradient.reshape(-1),)
    return torch.split(vector, block)
