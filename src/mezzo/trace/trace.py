"""What one forward and backward pass did: which call asked for which kernels, in which module, and every cast.

Told by the modes of :mod:`mezzo.trace.modes`. In the backward pass the running autograd node says where, by its
sequence number: the numbers that nodes got while a module or a call ran are noted here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from mezzo.tensors import dtype_name, tensors
from mezzo.trace import kernels
from mezzo.trace.calls import Call, Decider
from mezzo.trace.frames import Maker, kernel_name, maker, user_line
from mezzo.trace.kernels import Storages

__all__ = ["LOSS", "MODEL", "Place", "Trace"]

#: How the model itself is called where people read, for its path is empty.
MODEL: Final = "(model)"
#: The module path of what the loss function does.
LOSS: Final = "(loss)"

_NO_TORCH_FUNCTION: Final = torch._C.DisableTorchFunction


@dataclass(slots=True)
class Place:
    """Where the program is: in a module, and in one call of a torch function or between calls."""

    module: str
    call: Call | None = None


@dataclass(slots=True)
class Trace:
    """Everything that is seen in one forward and backward pass.

    Attributes:
        decider: Answers which treatment a call gets.
        dtype: The policy's compute dtype, as which emulated products count.
        until: The frame beyond which no line is the model's; see :func:`~mezzo.trace.frames.user_line`.
    """

    decider: Decider
    dtype: torch.dtype
    until: int = 0
    rows: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    casts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    cast_bytes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    products: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str, str | None, str, str]] = field(default_factory=Counter)
    inner_ops: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    modules_run: set[str] = field(default_factory=set)
    _places: list[Place] = field(default_factory=lambda: [Place(LOSS)])
    _timeline: list[tuple[int, Place]] = field(default_factory=list)
    _labels: Storages = field(default_factory=Storages)
    _owners: dict[int, str] = field(default_factory=dict)
    _accounts: dict[int, str] = field(default_factory=dict)
    _backward: bool = False
    _level: int = 1  # how many places there were when the backward pass began
    _inner: bool = False

    # Where ----------------------------------------------------------------------------------------------

    def begin_forward(self, model: nn.Module, inputs: Any) -> None:
        """Learn what parameters, buffers and inputs are, before a forward pass."""
        self._labels.put(tensors(inputs), "activation")
        self._labels.put(model.buffers(), "buffer")
        self._labels.put(model.parameters(), "parameter")
        self._owners = {id(p): n.rpartition(".")[0] for n, p in model.named_parameters()}

    def begin_backward(self) -> None:
        """Know that what follows is the backward pass."""
        self._backward = True

    @contextmanager
    def inner_backward(self) -> Iterator[None]:
        """Watch ``torch.autograd.grad`` inside the forward pass, a gradient penalty's for example."""
        before = self._backward, self._level, self._inner
        self._backward, self._level, self._inner = True, len(self._places), True
        try:
            yield
        finally:
            self._backward, self._level, self._inner = before

    def enter(self, place: Place) -> None:
        """Be in a module, or in a call."""
        self._places.append(place)
        self._mark()

    def leave(self, place: Place) -> None:
        """Be where the program was before, whatever lies between."""
        if any(each is place for each in self._places):
            while self._places.pop() is not place:
                pass
            self._mark()

    def _mark(self) -> None:
        """Note from which autograd node on the program is in this place."""
        number = torch._C._autograd._get_sequence_nr()
        if self._timeline and self._timeline[-1][0] == number:
            self._timeline.pop()
        self._timeline.append((number, self._places[-1]))

    def _place(self) -> Place:
        """Return where a kernel belongs: to the running module, or to the one whose backward pass runs."""
        if not self._backward or len(self._places) > self._level:
            return self._places[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._places[-1]
        if (variable := getattr(node, "variable", None)) is not None:
            return Place(self._owners.get(id(variable), ""))
        found = bisect_right(self._timeline, node._sequence_nr(), key=lambda mark: mark[0])
        return self._timeline[found - 1][1] if found else self._places[-1]

    # Calls --------------------------------------------------------------------------------------------

    def is_in_call(self) -> bool:
        """Whether a torch function is running, so that what it calls is part of it."""
        return self._places[-1].call is not None

    def is_backward(self) -> bool:
        """Whether the backward pass has begun: calls are recomputation, and no rows of their own."""
        return self._backward

    def begin(self, function: Any, args: Any, kwargs: Any) -> Place:
        """Count what happens from now on to one call, until :meth:`leave`."""
        with _NO_TORCH_FUNCTION():
            module = self._places[-1].module
            call = self.decider.call(function, args, kwargs, None if module == LOSS else module)
            made_by = maker()
            call.hidden = made_by == "cast"
            if made_by == "region":  # one that the model's code entered, and which lies above this mode
                call.cause = "a region that the model's own code enters decides here"
            if not call.hidden and not self._backward:
                call.line = user_line(self.until)
            place = Place(module, call)
            self.enter(place)
        return place

    def finish(self, place: Place, out: Any) -> None:
        """Turn a call into a row, if it read or made floating numbers."""
        call = place.call
        if call is None or self._backward or call.hidden or not call.has_run:
            return
        with _NO_TORCH_FUNCTION():
            row = call.row(place.module, out)
        if row is not None:
            self.rows[row] += 1
            self.inner_ops.setdefault((place.module, call.op), set()).update(call.kernels)

    # Kernels ------------------------------------------------------------------------------------------

    def kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of one kernel."""
        with _NO_TORCH_FUNCTION():
            place = self._place()
            made_by = maker()
            alone = None
            if place.call is None and not self._backward and made_by in ("region", "other"):
                # No torch function stands above: a C++ extension, or a scripted function.
                alone = self.decider.call(kernel, args, kwargs, None if place.module == LOSS else place.module)
                alone.line = user_line(self.until)
            call = alone or place.call
            if kernels.is_cast(kernel, args, out):
                self._cast(args[0], out, place if alone is None else Place(place.module, alone), made_by)
            else:
                self._labels.put(tensors(out), self._new_label(), replace=False)
                if not self._backward and (found := kernels.product(kernel, args)) is not None:
                    self._product(found, place.module, call, emulated=made_by == "emulation")
                if not self._backward and (counted := kernels.flops(kernel, args, kwargs, out)) is not None:
                    self._count(*counted, place.module, call, kernel, emulated=made_by == "emulation")
            if call is not None:
                call.kernel(kernel, args, kwargs, out, emulated=made_by == "emulation")
            if alone is not None:
                alone.op = kernel_name(kernel)
                self.finish(Place(place.module, alone), out)

    def _cast(self, before: Tensor, after: Tensor, place: Place, made_by: Maker) -> None:
        what = self._labels.get(before) or self._new_label()
        self._labels.put([after], what)
        by = self._caster(before, after, place.call, made_by)
        phase = "backward" if self._backward else "forward"
        key = (place.module, phase, what, dtype_name(before.dtype), dtype_name(after.dtype), by)
        self.casts[key] += 1
        self.cast_bytes[key] += before.numel() * (before.element_size() + after.element_size())

    def _caster(self, before: Tensor, after: Tensor, call: Call | None, made_by: Maker) -> str:
        """Say whose cast it is: emulation's, the policy's, the model's own code's, or torch's inside a function."""
        if made_by == "emulation":
            return "emulation"
        node: Any = torch._C._current_autograd_node() if self._backward and not self._recomputing() else None
        if node is not None:
            # The gradient of a cast is cast back on the same account; others follow from mixed dtypes.
            account = self._accounts.get(node._sequence_nr()) if node.name() == "ToCopyBackward0" else None
            return account or ("model" if isinstance(node, BackwardCFunction) else "torch")
        if made_by == "cast" or (call is not None and (call.hidden or call.asks_for(before, after))):
            by = "policy"
        else:
            by = "model" if call is None or call.is_conversion else "torch"
        # Autograd numbers the node of a cast just before the kernel runs. A cast without a node comes after the owner
        # of the last number, which therefore is not overwritten.
        self._accounts.setdefault(torch._C._autograd._get_sequence_nr() - 1, by)
        return by

    def _new_label(self) -> str:
        return "gradient" if self._backward and not self._recomputing() else "activation"

    def _recomputing(self) -> bool:
        """Whether a checkpoint runs a piece of the forward pass again, inside the backward pass."""
        # A graph made of an inner backward pass needs gradients too, and is none.
        return self._backward and (len(self._places) > self._level or (torch.is_grad_enabled() and not self._inner))

    def _product(self, found: Any, module: str, call: Call | None, *, emulated: bool) -> None:
        shape, dtype = found
        dtype = self.dtype if emulated else dtype
        if (multiple := kernels.multiple_of(dtype)) is not None and any(size % multiple for _, size in shape):
            op, line = ("", None) if call is None else (call.op, call.line)
            self.products[module, op, shape, dtype_name(dtype), multiple, line] += 1

    def _count(
        self, amount: int, dtype: torch.dtype, module: str, call: Call | None, kernel: Any, *, emulated: bool
    ) -> None:
        """Add a product's operations to those of its precision."""
        op, line, decision = (kernel_name(kernel), None, None) if call is None else (call.op, call.line, call.decision)
        why = "" if decision is None else f"rule {decision.rule}" if decision.rule else decision.reason
        self.flops[module, op, line, dtype_name(self.dtype if emulated else dtype), why] += amount
