"""Halves under a fused kernel of torch's: a part at a time is FP32, in memory that stays in a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, compress, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mezzo.weights.codec import Exchange, are_ready, get_all_ready
from mezzo.weights.halves import Halves, halves_among

#: Elements that are FP32 at a time: on CPUs such as stay in a cache, elsewhere as many as make few launches.
_CPU_PART: Final = 1 << 22
_DEVICE_PART: Final = 1 << 24
#: Parameters are cut behind multiples of so many elements: a kernel's last ones may be rounded otherwise than others.
_TOGETHER: Final = 64
#: How many lists of parameters are known: a group has one for each device.
_MOST: Final = 16
_CELL: Final = attrgetter("cell")
_HIGH: Final = attrgetter("hi")
_LOW: Final = attrgetter("lo")
_IS_PART: Final = attrgetter("is_part")
_IS_LENT: Final = attrgetter("cell.is_lent")
_WIDE: Final = attrgetter("cell.decoded")
_IS_FUSED: Final = itemgetter("fused")
#: Kernels that update each element by itself, and leave counts of steps alone.
_FUSED: Final = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
    for overload in ("default", "tensor_lr")
)


class _Piece(NamedTuple):
    """Elements of one parameter, in memory order.

    Attributes:
        number: The parameter's, in its list.
        start: The first element.
        stop: The end.
        is_whole: Whether the parameter has no other elements.
    """

    number: int
    start: int
    stop: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the parameter's gradient or state; a single number as it is."""
        return tensor if self.is_whole or tensor.dim() == 0 else tensor.view(-1)[self.start : self.stop]


class FusedParts:
    """Carries out the fused kernels of one optimizer over parameters in halves.

    **Cost**: of memory 16 MiB on CPUs and 64 MiB on others, however large the model is; 4 bytes read and 4 written an
    element beside what the kernel moves, since FP32 values stay in a cache.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], _Cuts] = {}
        self._is_ready = False

    def make_ready(self, params: list[Tensor]) -> None:
        """Build the kernels for parameters: they cannot be traced where torch's fused ones are dispatched.

        Lent values are stored in halves again.

        Args:
            params: The optimizer's.
        """
        if not self._is_ready:
            halves, _ = halves_among(params)
            get_all_ready([*map(_HIGH, halves)])
            self._is_ready = True
        for plan in self._plans.values():
            plan.store_lent()

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run a kernel over lists; False where it may not be cut, or a parameter is decoded for now."""
        if func not in _FUSED or torch.is_grad_enabled():
            return False
        key = tuple(map(id, args[0]))
        plan = self._plans.get(key)
        if plan is None or not plan.serves(args):
            self._plans.pop(key, None)
            halves, _ = halves_among(args[0])
            if not _may_be_cut(halves):
                return False
            if not are_ready([*map(_HIGH, halves)]):  # they have come from another device
                self._is_ready = False
                return False
            if len(self._plans) == _MOST:  # where other parameters have gradients in each step
                self._plans.clear()
            self._plans[key] = plan = _Cuts(args)
        plan.run(func, args, kwargs)
        return True


def _may_be_cut(halves: list[Halves]) -> bool:
    """Whether there are parameters in halves, of which none is a view, stands twice or is decoded for now."""
    return (
        len(halves) > 0
        and not any(map(_IS_PART, halves))
        and all(map(is_, map(_WIDE, halves), repeat(None)))
        and len({*map(id, map(_CELL, halves))}) == len(halves)
    )


class _Cuts:
    """The cuts of the lists that one kernel is called with."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._params: list[Any] = args[0][:]
        self._halves, _ = halves_among(self._params)
        self._high, self._remainders = [*map(_HIGH, self._halves)], [*map(_LOW, self._halves)]
        self._plain = [index for index, high_part in enumerate(self._params) if not isinstance(high_part, Halves)]
        part = _CPU_PART if self._params[0].device.type == "cpu" else _DEVICE_PART
        parts = [*_parts(self._params, part, cuts=all(map(Tensor.is_contiguous, chain(*args[1:]))))]
        self._size = max(sum(piece.stop - piece.start for piece in pieces) for pieces in parts)
        scratch = torch.empty(self._size, dtype=torch.float32, device=self._params[0].device)
        self._scratch = scratch.untyped_storage()
        self._parts: list[tuple[Exchange, list[Tensor], list[_Piece]]] = []
        for pieces in parts:
            *starts, _ = accumulate((piece.stop - piece.start for piece in pieces), initial=0)
            high_parts, remainders = (
                [piece.of(half(self._params[piece.number])) for piece in pieces] for half in (_HIGH, _LOW)
            )
            values = [
                scratch.as_strided(high_part.size(), high_part.stride(), at)
                for high_part, at in zip(high_parts, starts, strict=True)
            ]
            self._parts.append((Exchange(high_parts, remainders, values), values, pieces))
        self._cut = {piece.number for pieces in parts for piece in pieces if not piece.is_whole}

    def serves(self, args: Sequence[Any]) -> bool:
        """Whether these are the same parameters, in the same memory, and cut tensors have no gaps."""
        halves = self._halves
        return (
            all(map(is_, args[0], self._params))
            and all(map(is_, map(_HIGH, halves), self._high))
            and all(map(is_, map(_LOW, halves), self._remainders))
            and all(map(is_, map(_WIDE, halves), repeat(None)))
            and all(tensors[index].is_contiguous() for tensors in args[1:] if tensors for index in self._cut)
        )

    def store_lent(self) -> None:
        """Store lent values in halves again."""
        for weight in compress(self._halves, map(_IS_LENT, self._halves)):
            weight.store_lent()

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Update the plain parameters, then those in halves, part by part."""
        if self._scratch.nbytes() != 4 * self._size:
            self._scratch.resize_(4 * self._size)
        increment_version(self._params)  # before the first write: what ends the step in its middle is seen by it
        if self._plain:
            func(*[[*map(tensors.__getitem__, self._plain)] if tensors else tensors for tensors in args], **kwargs)
        for exchange, values, pieces in self._parts:
            exchange.widen()
            func(values, *[_taken(tensors, pieces) for tensors in args[1:]], **kwargs)
            exchange.store(values)
        self._scratch.resize_(0)


def _taken(tensors: list[Tensor], pieces: list[_Piece]) -> list[Tensor]:
    """Return the elements of a list's tensors that belong to some pieces."""
    if not tensors:
        return tensors
    return [tensors[piece.number] if piece.is_whole else piece.of(tensors[piece.number]) for piece in pieces]


def _parts(params: list[Any], size: int, *, cuts: bool) -> Iterator[list[_Piece]]:
    """Yield parts of so many elements; a parameter with gaps stays whole, and without ``cuts`` each one does."""
    pieces, left = list[_Piece](), size
    for index, param in enumerate(params):
        if not isinstance(param, Halves):
            continue
        start, end = 0, param.numel()
        while start < end or not end:
            is_cut = cuts and start + left < end and param.hi.is_contiguous()
            stop = start + left // _TOGETHER * _TOGETHER if is_cut else end
            if stop > start or not end:
                pieces.append(_Piece(index, start, stop, (start, stop) == (0, end)))
            left -= stop - start
            start = stop
            if is_cut or left <= 0:
                yield pieces
                pieces, left = [], size
            if not end:
                break
    if pieces:
        yield pieces


def is_fused(optimizer: Optimizer) -> bool:
    """Whether all that an optimizer updates goes through fused kernels of torch's that may be cut."""
    is_known = isinstance(optimizer, torch.optim.Adam | torch.optim.SGD)
    return is_known and all(map(_IS_FUSED, optimizer.param_groups))
