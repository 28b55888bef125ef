"""Optimizers that do not read halves: their parameters are decoded before a step, and encoded after it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import accumulate, chain, compress, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo.compiling import never_compiled
from mezzo.dispatch import num_dispatch_modes
from mezzo.hooks import before_every_step
from mezzo.releases import private
from mezzo.step.gradients import alike
from mezzo.weights.cell import STEP
from mezzo.weights.codec import Exchange
from mezzo.weights.halves import Halves, halves_among
from mezzo.weights.parts import FusedParts, is_fused

#: The classes of tensors that torch's optimizers update many at a time.
_FOREACH_CLASSES: Final[list[type]] = private("torch.optim.optimizer._foreach_supported_types")
_WATCHING: Final = threading.Lock()
_CELL: Final = attrgetter("cell")
_PARAMS: Final = itemgetter("params")
_OF_TORCH: Final = frozenset({Tensor, torch.nn.Parameter})
_WIDE: Final = attrgetter("cell.decoded")
_HIGH: Final = attrgetter("hi")
_LOW: Final = attrgetter("lo")
#: Values begin at multiples of so many elements, 64 bytes.
_ALIGNED: Final = 16


def watch_steps() -> None:
    """Decode the parameters of each optimizer before its step, and encode them after it, from now on.

    This is for speed alone: without it an optimizer reads and writes the same values, one operation at a time. Values
    that a step which raised has left decoded train on so, until the next step has ended.
    """
    with _WATCHING:
        if Halves not in _FOREACH_CLASSES:
            _FOREACH_CLASSES.append(Halves)
            register_optimizer_step_post_hook(stored_again)
        before_every_step(_before)


class _Decoded:
    """Parameters of an optimizer that are decoded while it steps.

    Args:
        weights: Their halves, one of those that share memory; none of them is decoded yet.

    **Cost**: 4 bytes an element during the step; 8 bytes read or written an element before it, and 8 after it.
    """

    def __init__(self, weights: list[Halves]) -> None:
        self._weights, self._memory = weights, in_memory(weights)
        self._parts = [
            _Alike([weights[index] for index in indices])
            for indices in alike([weight.hi for weight in weights]).values()
        ]

    def serves(self, weights: list[Halves]) -> bool:
        """Whether these are the same halves, in the same memory."""
        memory = in_memory(weights)
        return (
            len(weights) == len(self._weights)
            and all(map(is_, weights, self._weights))
            and all(map(is_, memory, self._memory))
        )

    def show(self) -> None:
        """Decode the parameters."""
        for part in self._parts:  # a lack of memory raises here, before any of them is decoded
            part.take_memory()
        for part in self._parts:
            part.show()

    def store(self, *, keeps_memory: bool) -> bool:
        """Store the parameters in halves again, but those whose memory was replaced during the step.

        Args:
            keeps_memory: Whether the FP32 memory is kept: a captured graph writes there.

        Returns:
            Whether the object can serve another step: no other tensor uses its memory.
        """
        serve = [part.store(keeps_memory=keeps_memory) for part in self._parts]
        return all(serve)


class _Alike:
    """Parameters of one device, with high halves of one dtype, whose FP32 values lie side by side in one memory."""

    def __init__(self, weights: list[Halves]) -> None:
        high_halves, remainders = zip(*(weight.base_halves() for weight in weights), strict=True)
        *starts, total = accumulate((-(-high.numel() // _ALIGNED) * _ALIGNED for high in high_halves), initial=0)
        memory = torch.empty(total, dtype=torch.float32, device=high_halves[0].device)
        # The tensor is held, so that a cast during the step does not find the memory unused and store it in halves.
        self._weights, self._all, self._memory, self._size = weights, memory, memory.untyped_storage(), 4 * total
        self._values = [
            memory.as_strided(high.size(), high.stride(), start)
            for high, start in zip(high_halves, starts, strict=True)
        ]
        self._exchange = Exchange(high_halves, remainders, self._values)

    def take_memory(self) -> None:
        if self._memory.nbytes() != self._size:
            self._memory.resize_(self._size)

    def show(self) -> None:
        self._exchange.widen()
        for weight, value in zip(self._weights, self._values, strict=True):
            weight.cell.decoded = value

    def store(self, *, keeps_memory: bool) -> bool:
        self._exchange.store(self._values)
        has_left = False
        for weight, value in zip(self._weights, self._values, strict=True):
            if isinstance(weight, Halves) and weight.cell.decoded is value:
                weight.cell.decoded = None
            else:  # a parameter may have become a plain one, in this memory
                has_left = True
        if not keeps_memory and not has_left:
            self._memory.resize_(0)
        return not has_left


def written_by(params: Iterable[Tensor]) -> list[Halves]:
    """Return the halves that a step over parameters will write: those with a gradient, one of several aliases."""
    halves, _ = halves_among([param for param in params if param.grad is not None])
    halves = [*compress(halves, map(is_, map(_WIDE, halves), repeat(None)))]
    return [*dict(zip(map(id, map(_CELL, halves)), halves, strict=True)).values()]


@never_compiled
@torch.no_grad()
def _before(optimizer: Optimizer, *_: Any) -> None:
    params = [*chain.from_iterable(map(_PARAMS, optimizer.param_groups))]
    if getattr(type(optimizer), "reads_halves", False) or _OF_TORCH.issuperset(map(type, params)):
        return
    stored_again(optimizer)
    names = vars(optimizer)
    # What watches kernels is handed a fused one before the weights are.
    if is_fused(optimizer) and "_mezzo_keeps_memory" not in names and not num_dispatch_modes():
        if "_mezzo_parts" not in names:
            names["_mezzo_parts"] = FusedParts()
        names["_mezzo_parts"].make_ready(params)
        STEP.parts = names["_mezzo_parts"].run
        return
    if not (weights := written_by(params)):
        return
    if (decoded := names.get("_mezzo_decoded")) is None or not decoded.serves(weights):
        names["_mezzo_decoded"] = decoded = _Decoded(weights)
    decoded.show()
    names["_mezzo_shows"] = True


@never_compiled
@torch.no_grad()
def stored_again(optimizer: Optimizer, *_: Any) -> None:
    """Encode the parameters that were decoded for an optimizer's step: after it, or before the next if it raised."""
    names, STEP.parts = vars(optimizer), None
    if names.pop("_mezzo_shows", False) and not names["_mezzo_decoded"].store(
        keeps_memory="_mezzo_keeps_memory" in names
    ):
        del names["_mezzo_decoded"]


def keep_memory(optimizer: Optimizer) -> object:
    """Keep the FP32 memory of an optimizer's steps between them from now on, for a captured graph that writes there.

    Returns:
        The owner of that memory, which the graph is to hold; ``None`` before the first step.
    """
    vars(optimizer)["_mezzo_keeps_memory"] = True
    return vars(optimizer).get("_mezzo_decoded")


def in_memory(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the values of parameters: both halves, or the decoded values, and plain ones."""
    halves, plain = halves_among([*params])
    halved = [*compress(halves, map(is_, map(_WIDE, halves), repeat(None)))]
    decoded = [weight.value() for weight in halves if weight.cell.decoded is not None]
    return [*plain, *map(_HIGH, halved), *map(_LOW, halved), *decoded]
