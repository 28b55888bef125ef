"""While an optimizer steps that knows of no halves, its parameters lie in FP32: once before, and once after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mezzo.compiling import never_compiled
from mezzo.releases import private
from mezzo.sharded import local
from mezzo.step.gradients import Exchange
from mezzo.weights.halves import Halves, in_halves

#: The classes of tensors that torch's optimizers update many at a time.
_FOREACH_CLASSES: Final[list[type]] = private("torch.optim.optimizer._foreach_supported_types")
_HOOKS: Final[list[Any]] = []


def watch_steps() -> None:
    """Decode the parameters of each optimizer before its step, and encode them after it, from now on.

    A matter of speed alone: an optimizer that nothing decodes for reads and writes the same values one operation at a
    time; and what a step that raised has left in FP32 trains on so until the next one has ended.
    """
    if not _HOOKS:
        if Halves not in _FOREACH_CLASSES:
            _FOREACH_CLASSES.append(Halves)
        _HOOKS.append(register_optimizer_step_pre_hook(_before))
        _HOOKS.append(register_optimizer_step_post_hook(_after))


class _Decoded:
    """Parameters of an optimizer that lie in FP32 while it steps.

    Args:
        weights: Their halves, of those that share memory one: none of them lies in FP32.

    **Cost**: 4 bytes an element during the step; 8 bytes read or written an element before it, and 8 after it.
    """

    def __init__(self, weights: list[Halves]) -> None:
        self.weights = weights
        self._halves = [each.whole() for each in weights]
        self._values = [torch.empty_like(high, dtype=torch.float32) for high, _ in self._halves]
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, each in enumerate(weights):
            alike.setdefault((each.device, each.hi.dtype), []).append(place)
        self._exchanges = list[tuple[Exchange, list[Tensor]]]()
        for places in alike.values():
            high, low = zip(*(self._halves[at] for at in places), strict=True)
            values = [self._values[at] for at in places]
            self._exchanges.append((Exchange(high, low, values), values))

    def serves(self, weights: list[Halves]) -> bool:
        """Whether these are the same, in the same memory."""
        return len(weights) == len(self.weights) and all(
            a is b and hi is a.hi and lo is a.lo
            for a, b, (hi, lo) in zip(weights, self.weights, self._memory, strict=True)
        )

    def show(self) -> None:
        """Let them lie in FP32."""
        self._memory = [(each.hi, each.lo) for each in self.weights]
        for value in self._values:
            storage, size = value.untyped_storage(), value.numel() * 4
            if storage.nbytes() != size:  # torch would move what has that size already
                storage.resize_(size)
        for exchange, _ in self._exchanges:
            exchange.widen()
        for each, value in zip(self.weights, self._values, strict=True):
            each.cell.wide = value

    def store(self, *, keeps_memory: bool) -> None:
        """Store them in halves again, but those that were given other values to lie in meanwhile.

        Args:
            keeps_memory: Whether the FP32 values stay where they are: a captured graph writes there.
        """
        for exchange, values in self._exchanges:
            exchange.store(values)
        for each, value in zip(self.weights, self._values, strict=True):
            if each.cell.wide is value:
                each.cell.wide = None
            if not keeps_memory:
                value.untyped_storage().resize_(0)


def written_by(optimizer: Optimizer) -> list[Halves]:
    """Return the halves that a step of an optimizer will write: those with a gradient, of aliases one."""
    params = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    found = {id(halves.cell): halves for param in params if (halves := in_halves(param)) is not None}
    return list(found.values())


def reads_halves(optimizer: Optimizer) -> bool:
    """Whether an optimizer's own kernels read and write both halves, as mezzo's do."""
    return bool(getattr(type(optimizer), "reads_halves", False))


@never_compiled
@torch.no_grad()
def _before(optimizer: Optimizer, *_: Any) -> None:
    if reads_halves(optimizer) or not (weights := written_by(optimizer)):
        return
    stored_again(optimizer)
    names = vars(optimizer)
    if (decoded := names.get("_mezzo_decoded")) is None or not decoded.serves(weights):
        names["_mezzo_decoded"] = decoded = _Decoded(weights)
    decoded.show()
    names["_mezzo_shows"] = True


@never_compiled
def _after(optimizer: Optimizer, *_: Any) -> None:
    stored_again(optimizer)


@torch.no_grad()
def stored_again(optimizer: Optimizer) -> None:
    """Encode what was decoded for a step of an optimizer: after it, or after one that has raised."""
    if vars(optimizer).pop("_mezzo_shows", False):
        vars(optimizer)["_mezzo_decoded"].store(keeps_memory="_mezzo_keeps_memory" in vars(optimizer))


def keep_memory(optimizer: Optimizer) -> object:
    """Let what is decoded for steps of an optimizer keep its memory from now on, as a captured graph wants it.

    Returns:
        What has that memory, if there is any yet: for the graph to hold.
    """
    vars(optimizer)["_mezzo_keeps_memory"] = True
    return vars(optimizer).get("_mezzo_decoded")


def in_memory(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors in which the values of parameters lie: of halves both of them, of a DTensor this rank's."""
    found: list[Tensor] = []
    for here in map(local, params):
        if not isinstance(here, Halves):
            found.append(here)
        elif here.cell.wide is None:
            found += [here.hi, here.lo]
        else:
            found.append(here.value())
    return found
