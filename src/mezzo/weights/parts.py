"""Halves under a fused kernel of torch's: a part at a time is FP32, in memory that stays in a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mezzo.weights.codec import Exchange
from mezzo.weights.halves import Halves, halves_among

#: Elements that are FP32 at a time: on CPUs such as stay in a cache, elsewhere as many as make few launches.
_CPU_PART: Final = 1 << 22
_DEVICE_PART: Final = 1 << 24
#: How many lists of parameters are known: a group has one for each device.
_MOST: Final = 16
_CELL: Final = attrgetter("cell")
_HIGH: Final = attrgetter("hi")
_LOW: Final = attrgetter("lo")
_IS_PART: Final = attrgetter("is_part")
_WIDE: Final = attrgetter("cell.wide")
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
        place: The parameter's in its list.
        start: The first of them.
        stop: The end of them.
        is_whole: Whether these are all.
    """

    place: int
    start: int
    stop: int
    is_whole: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of what belongs to the parameter; of what is a single number that."""
        return tensor if self.is_whole or tensor.dim() == 0 else tensor.view(-1)[self.start : self.stop]


class FusedParts:
    """Carries out the fused kernels of one optimizer over parameters in halves.

    **Cost**: of memory 16 MiB on CPUs and 64 MiB on others, however large the model is; 4 bytes read and 4 written an
    element beside what the kernel moves, since FP32 values stay in a cache.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], _Cuts] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run a kernel over lists; False where it is none that may be cut, or a parameter lies in FP32 for now."""
        if func not in _FUSED or torch.is_grad_enabled():
            return False
        params = args[0]
        found, _ = halves_among(params)
        if not found or any(map(_IS_PART, found)) or not all(map(is_, map(_WIDE, found), repeat(None))):
            return False
        if len({*map(id, map(_CELL, found))}) < len(found):  # aliases
            return False
        key = tuple(map(id, params))
        plan = self._plans.get(key)
        if plan is None or not plan.serves(params, found, args):
            if len(self._plans) == _MOST:  # where other parameters have gradients in each step
                self._plans.clear()
            self._plans[key] = plan = _Cuts(params, args)
        plan.run(func, args, kwargs)
        return True


class _Cuts:
    """How one list of parameters is cut."""

    def __init__(self, params: list[Any], args: Sequence[Any]) -> None:
        found, self._params, self._layout = halves_among(params)[0], params[:], _layout(args)
        self._memory = [*map(_HIGH, found), *map(_LOW, found)]
        self._plain = [place for place, each in enumerate(params) if not isinstance(each, Halves)]
        part = _CPU_PART if params[0].device.type == "cpu" else _DEVICE_PART
        parts = [*_parts(params, part, cuts=all(self._layout))]
        self._size = max(sum(piece.stop - piece.start for piece in pieces) for pieces in parts)
        scratch = torch.empty(self._size, dtype=torch.float32, device=params[0].device)
        self._scratch = scratch.untyped_storage()
        self._parts: list[tuple[Exchange, list[Tensor], list[_Piece]]] = []
        for pieces in parts:
            *starts, _ = accumulate((piece.stop - piece.start for piece in pieces), initial=0)
            high, low = ([piece.of(half(params[piece.place])) for piece in pieces] for half in (_HIGH, _LOW))
            values = [scratch.as_strided(each.size(), each.stride(), at) for each, at in zip(high, starts, strict=True)]
            self._parts.append((Exchange(high, low, values), values, pieces))

    def serves(self, params: list[Any], found: list[Halves], args: Sequence[Any]) -> bool:
        """Whether these are the same parameters, in the same memory, and may be cut alike."""
        memory = [*map(_HIGH, found), *map(_LOW, found)]
        same = all(map(is_, params, self._params)) and all(map(is_, memory, self._memory))
        return same and self._layout == _layout(args)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Update the plain parameters, then those in halves, part by part."""
        if self._scratch.nbytes() != 4 * self._size:
            self._scratch.resize_(4 * self._size)
        increment_version(self._params)  # before the first write: what ends the step in its middle is seen by it
        if self._plain:
            func(*[[*map(each.__getitem__, self._plain)] if each else each for each in args], **kwargs)
        for exchange, values, pieces in self._parts:
            exchange.widen()
            func(values, *[_taken(each, pieces) for each in args[1:]], **kwargs)
            exchange.store(values)
        self._scratch.resize_(0)


def _taken(each: list[Tensor], pieces: list[_Piece]) -> list[Tensor]:
    """Return what a list has for some pieces."""
    if not each:
        return each
    return [each[piece.place] if piece.is_whole else piece.of(each[piece.place]) for piece in pieces]


def _layout(args: Sequence[Any]) -> list[bool]:
    """Tell of each list that a kernel is given beside the parameters whether all in it lies without gaps."""
    return [all(map(Tensor.is_contiguous, each)) for each in args[1:]]


def _parts(params: list[Any], size: int, *, cuts: bool) -> Iterator[list[_Piece]]:
    """Cut parameters into parts of so many elements; what has gaps is as large as it is, and all unless ``cuts``."""
    pieces, left = list[_Piece](), size
    for place, param in enumerate(params):
        if not isinstance(param, Halves):
            continue
        start, end = 0, param.numel()
        while start < end or not end:
            stop = min(end, start + left) if cuts and param.hi.is_contiguous() else end
            pieces.append(_Piece(place, start, stop, (start, stop) == (0, end)))
            left -= stop - start
            start = stop
            if left <= 0:
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
