"""While an optimizer steps that knows of no halves, its parameters lie in FP32: once before, and once after."""

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

    A matter of speed alone: an optimizer that nothing decodes for reads and writes the same values one operation at a
    time; and what a step that raised has left in FP32 trains on so until the next one has ended.
    """
    with _WATCHING:
        if Halves not in _FOREACH_CLASSES:
            _FOREACH_CLASSES.append(Halves)
            register_optimizer_step_post_hook(stored_again)
        before_every_step(_before)


class _Decoded:
    """Parameters of an optimizer that lie in FP32 while it steps.

    Args:
        weights: Their halves, of those that share memory one: none of them lies in FP32.

    **Cost**: 4 bytes an element during the step; 8 bytes read or written an element before it, and 8 after it.
    """

    def __init__(self, weights: list[Halves]) -> None:
        self._weights, self._memory = weights, in_memory(weights)
        self._parts = [
            _Alike([weights[at] for at in places]) for places in alike([each.hi for each in weights]).values()
        ]

    def serves(self, weights: list[Halves]) -> bool:
        """Whether these are the same, in the same memory."""
        memory = in_memory(weights)
        return (
            len(weights) == len(self._weights)
            and all(map(is_, weights, self._weights))
            and all(map(is_, memory, self._memory))
        )

    def show(self) -> None:
        """Let them lie in FP32."""
        for part in self._parts:  # what fails for want of memory fails here
            part.take_memory()
        for part in self._parts:
            part.show()

    def store(self, *, keeps_memory: bool) -> bool:
        """Store them in halves again, but those that were given other values to lie in meanwhile.

        Args:
            keeps_memory: Whether the FP32 values stay where they are: a captured graph writes there.

        Returns:
            Whether this can serve another step: nothing else lies in this memory.
        """
        serve = [part.store(keeps_memory=keeps_memory) for part in self._parts]
        return all(serve)


class _Alike:
    """Those of them that are of one device, with high halves of one dtype: their FP32 values lie side by side."""

    def __init__(self, weights: list[Halves]) -> None:
        high, low = zip(*(each.whole() for each in weights), strict=True)
        *starts, total = accumulate((-(-each.numel() // _ALIGNED) * _ALIGNED for each in high), initial=0)
        memory = torch.empty(total, dtype=torch.float32, device=high[0].device)
        # The tensor is held: nothing is stored again meanwhile because nobody else lay there.
        self._weights, self._all, self._memory, self._size = weights, memory, memory.untyped_storage(), 4 * total
        self._values = [
            memory.as_strided(each.size(), each.stride(), start) for each, start in zip(high, starts, strict=True)
        ]
        self._exchange = Exchange(high, low, self._values)

    def take_memory(self) -> None:
        if self._memory.nbytes() != self._size:
            self._memory.resize_(self._size)

    def show(self) -> None:
        self._exchange.widen()
        for each, value in zip(self._weights, self._values, strict=True):
            each.cell.decoded = value

    def store(self, *, keeps_memory: bool) -> bool:
        self._exchange.store(self._values)
        has_left = False
        for each, value in zip(self._weights, self._values, strict=True):
            if isinstance(each, Halves) and each.cell.decoded is value:
                each.cell.decoded = None
            else:  # a parameter may have become a plain one, in this memory
                has_left = True
        if not keeps_memory and not has_left:
            self._memory.resize_(0)
        return not has_left


def written_by(params: Iterable[Tensor]) -> list[Halves]:
    """Return the halves that a step over parameters will write: those with a gradient, of aliases one."""
    found, _ = halves_among([param for param in params if param.grad is not None])
    found = [*compress(found, map(is_, map(_WIDE, found), repeat(None)))]
    return [*dict(zip(map(id, map(_CELL, found)), found, strict=True)).values()]


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
    """Encode what was decoded for a step of an optimizer: after it, or after one that has raised."""
    names, STEP.parts = vars(optimizer), None
    if names.pop("_mezzo_shows", False) and not names["_mezzo_decoded"].store(
        keeps_memory="_mezzo_keeps_memory" in names
    ):
        del names["_mezzo_decoded"]


def keep_memory(optimizer: Optimizer) -> object:
    """Let what is decoded for steps of an optimizer keep its memory from now on, as a captured graph wants it.

    Returns:
        What has that memory, if there is any yet: for the graph to hold.
    """
    vars(optimizer)["_mezzo_keeps_memory"] = True
    return vars(optimizer).get("_mezzo_decoded")


def in_memory(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors in which the values of parameters lie: of halves both of them, of a DTensor this rank's."""
    found, plain = halves_among([*params])
    halved = [*compress(found, map(is_, map(_WIDE, found), repeat(None)))]
    decoded = [each.value() for each in found if each.cell.decoded is not None]
    return [*plain, *map(_HIGH, halved), *map(_LOW, halved), *decoded]
