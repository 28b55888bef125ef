"""Round trips: what is cast up from a low format and its result down again, with the ops that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mezzo.tensors import dtype_name, tensors
from mezzo.trace.calls import OpCall
from mezzo.trace.kernels import Storages, is_allocation, is_view

__all__ = ["Account", "Cause", "Trip", "Trips"]


@dataclass(slots=True, eq=False)
class Account:
    """One cast of the forward pass, with that of its gradient.

    Attributes:
        by: Whose cast it is.
        num_bytes: What both read and write.
    """

    by: str
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """A call that asks for the wider format, or that converts by itself."""

    module: str
    op: str
    line: str | None
    treatment: str
    rule: str | None


@dataclass(frozen=True, slots=True)
class Trip:
    """A tensor that is wider than it came.

    Attributes:
        low: The format that it came in.
        first: The call at which it was cast up.
        causes: The calls since then whose treatment is another precision, in order.
        casts: The casts on the way.
    """

    low: str
    first: Cause
    causes: tuple[Cause, ...]
    casts: tuple[Account, ...]


class Trips:
    """Follow what is cast up, kernel by kernel, until it is cast down.

    Attributes:
        done: The round trips, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.done: list[Trip] = []
        self._under_way = Storages[Trip | None]()

    def cast(self, before: Tensor, after: Tensor, account: Account, module: str, call: OpCall | None) -> None:
        """Take note of a cast in the forward pass."""
        here = self._under_way.get(before)
        if before.element_size() < after.element_size():
            trip = here or Trip(dtype_name(before.dtype), _cause(module, call), (), ())
            self._under_way.put([after], Trip(trip.low, trip.first, trip.causes, (*trip.casts, account)))
        elif here is not None:
            self.done.append(Trip(here.low, here.first, here.causes, (*here.casts, account)))

    def kernel(self, kernel: Any, args: Any, out: Any, module: str, call: OpCall | None) -> None:
        """Take note of any other kernel in the forward pass: what it makes of a wide tensor is as wide."""
        if is_view(kernel) or is_allocation(kernel):
            return
        read = [each for each in tensors(args) if each.dtype.is_floating_point and each.dim()]
        known = [trip for each in read if (trip := self._under_way.get(each)) is not None]
        if not known and not kernel._schema.is_mutable:
            return
        asks = call is not None and call.decision.treatment in ("fp32", "fp32_math", "promote")
        # Without the cast another wide operand, such as an FP32 residual, would make the result as wide.
        alone = all(self._under_way.get(each) or each.element_size() < 4 or (call and call.made(each)) for each in read)
        if not known or not (asks or alone):
            self._under_way.put(tensors(out), None)
            return
        causes = [cause for trip in known for cause in trip.causes]
        casts = [account for trip in known for account in trip.casts]
        added = (_cause(module, call),) if asks else ()
        trip = Trip(known[0].low, known[0].first, tuple(dict.fromkeys((*causes, *added))), tuple(dict.fromkeys(casts)))
        self._under_way.put((each for each in tensors(out) if each.element_size() >= 4), trip)


def _cause(module: str, call: OpCall | None) -> Cause:
    if call is None:
        return Cause(module, "", None, "native", None)
    rule = None if call.decision.rule is None else str(call.decision.rule)
    return Cause(module, call.op, call.line, call.decision.treatment, rule)
