"""What one forward and backward pass did: which call asked for which kernels, in which module, and every cast."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from mezzo.backward import current_node, next_number, number_of
from mezzo.dispatch import DisableTorchFunction
from mezzo.tensors import LOW, dtype_name, has_fraction, tensors
from mezzo.trace import kernels
from mezzo.trace.function_calls import Decider, Place, Where, casting, doing, kernel_name, quantised_formats
from mezzo.trace.kernels import Storages
from mezzo.trace.measure import LostIntegers, lost_integers
from mezzo.trace.table import Doing


@dataclass(slots=True, eq=False)
class Account:
    """One cast of the forward pass, with that of its gradient.

    Attributes:
        by: Whose cast it is.
        place: Where it is made.
        line: The user's line.
        num_bytes: What both read and write.
    """

    by: str
    place: Place
    line: str | None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Integers:
    """Exact integers that are rounded to a low format.

    Attributes:
        lost: What that changes.
        by: Whose cast it is, or the path of the buffer that is stored low.
        line: The line of a cast that the model's own code makes.
    """

    lost: LostIntegers
    by: str
    line: str | None = None


@dataclass(slots=True)
class Trace:
    """Everything that is seen in one forward and backward pass; told by the modes of :mod:`mezzo.trace.modes`.

    Attributes:
        decider: Answers which treatment a call gets.
        dtype: The policy's compute dtype, as which emulated products count.
        where: Where the pass is.
        rows: How often each row of an explanation occurs.
        casts: The same of casts.
        cast_bytes: The bytes that they read and write.
        products: How often each product occurs whose dimensions tensor cores do not like.
        flops: The operations of products in the forward pass, by module, op, dtype, reason and line.
        num_products: How many products these are.
        moved_bytes: What all kernels read and write, casts included, without what only emulation does.
        inner_ops: The kernels of each op, by module.
        integers: Exact integers that a product reads rounded to a low format, by its module, op and line.
        logits: The casts that widen what a softmax over the last dimension reads, of a loss or of a product's result.
    """

    decider: Decider
    dtype: torch.dtype
    where: Where
    rows: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    casts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    cast_bytes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    products: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str, str, str, str | None]] = field(default_factory=Counter)
    num_products: Counter[tuple[str, str, str, str, str | None]] = field(default_factory=Counter)
    moved_bytes: int = 0
    inner_ops: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    integers: Counter[tuple[str, str, str | None, Integers]] = field(default_factory=Counter)
    logits: list[Account] = field(default_factory=list)
    _labels: Storages[str] = field(default_factory=Storages)
    _rounded: Storages[Integers | None] = field(default_factory=Storages)
    _widened: Storages[tuple[bool, tuple[Account, ...]]] = field(default_factory=Storages)
    _accounts: dict[int, Account] = field(default_factory=dict)

    def learn(self, model: nn.Module, inputs: Any) -> None:
        """Learn what parameters, buffers and inputs are, before a forward pass."""
        self._labels.put(tensors(inputs), "activation")
        self._labels.put(model.buffers(), "buffer")
        self._labels.put(model.parameters(), "parameter")
        self.where.learn_owners(model)

    def round_buffer(self, buffer: Tensor, lost: LostIntegers, path: str) -> None:
        """Learn of a buffer whose integers were rounded where it is stored."""
        self._rounded.put([buffer], Integers(lost, path))

    # Calls --------------------------------------------------------------------------------------------

    def begin(self, function: Any, args: Any, kwargs: Any) -> Place:
        """Count what happens from now on to one call, until it is left."""
        with DisableTorchFunction():
            around = self.where.now
            call = self.decider.call(function, args, kwargs, around.path)
            made_by = doing()
            call.hidden = made_by == "cast"
            if made_by == "region":  # one that the model's code entered, and which lies above the mode that tells
                call.cause = "a region that the model's own code enters decides here"
            if not call.hidden and not self.where.is_backward:
                call.line = self.where.line()
            place = Place(around.module, call)
            self.where.enter(place)
        return place

    def finish(self, place: Place, out: Any) -> None:
        """Turn a call into a row, if it read or made floating numbers."""
        call = place.call
        if call is None or self.where.is_backward or call.hidden or not call.has_run:
            return
        with DisableTorchFunction():
            row = call.row(place.module, out)
        if row is not None:
            self.rows[row] += 1
            self.inner_ops.setdefault((place.module, call.op), set()).update(call.kernels)

    # Kernels ------------------------------------------------------------------------------------------

    def before(self, kernel: Any, args: Any, kwargs: Any) -> None:
        """Need nothing before a kernel runs: what is read is still there afterwards."""

    def kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any, before: Any) -> None:
        """Take note of one kernel."""
        with DisableTorchFunction():
            place = self.where.place()
            made_by = doing()
            if kernels.is_free_cast(kernel, args, out):
                self._account(args[0], out, place, made_by)  # its gradient's cast costs what any does
                self._labels.put([out], self._labels.get(args[0]) or "parameter")
                return
            is_alone = place.call is None and not self.where.is_backward and made_by in ("region", "other")
            if is_alone:  # no torch function stands above: a C++ extension, or a scripted function
                call = self.decider.call(kernel, args, kwargs, place.path)
                call.line = self.where.line()
                place = Place(place.module, call)
            emulated = made_by == "emulation"
            if kernels.is_cast(kernel, args, out):
                self._cast(args[0], out, place, made_by)
            else:
                if not self.where.is_backward:
                    self._follow(kernel, args, kwargs, out, place)
                self._labels.put(tensors(out), self._new_label(), replace=False)
                self.moved_bytes += kernels.moved_bytes(kernel, args, kwargs, out, self.dtype if emulated else None)
                if not self.where.is_backward and not casting():
                    self._product(kernel, args, kwargs, out, place, emulated=emulated)
            if place.call is not None:
                place.call.kernel(kernel, args, kwargs, out, emulated=emulated)
                if is_alone:
                    place.call.op = kernel_name(kernel)
                    self.finish(place, out)

    def _cast(self, before: Tensor, after: Tensor, place: Place, made_by: Doing) -> None:
        what = self._labels.get(before) or self._new_label()
        self._labels.put([after], what)
        account = self._account(before, after, place, made_by)
        phase = "backward" if self.where.is_backward else "forward"
        op = "" if place.call is None or place.call.hidden else place.call.op
        key = (place.module, op, phase, what, dtype_name(before.dtype), dtype_name(after.dtype), account.by)
        if not self.where.is_backward:
            self._rounded.put([after], self._rounded.get(before) or self._rounding(before, after, account))
            is_product, accounts = self._widened.get(before) or (False, ())
            if made_by != "emulation" and before.element_size() < after.element_size():
                accounts = (*accounts, account)
            self._widened.put([after], (is_product, accounts))
        num_bytes = before.numel() * (before.element_size() + after.element_size())
        account.num_bytes += num_bytes
        self.casts[key] += 1
        self.cast_bytes[key] += num_bytes
        if made_by != "emulation":
            self.moved_bytes += num_bytes

    def _account(self, before: Tensor, after: Tensor, place: Place, made_by: Doing) -> Account:
        """Say whose cast it is: emulation's, the policy's, the model's own code's, or torch's inside a function."""
        call = place.call
        line = None if call is None else call.line
        if made_by == "emulation":
            return Account("emulation", place, line)
        node = current_node() if self.where.is_gradient else None
        if node is not None:
            # The gradient of a cast is cast back on the same account; others follow from mixed dtypes.
            of_cast = node.name() in ("ToCopyBackward0", "LazyCloneBackward0")  # the other one: of a weight in halves
            account = self._accounts.get(number_of(node)) if of_cast else None
            return account or Account("model" if isinstance(node, BackwardCFunction) else "torch", place, line)
        if made_by == "cast" or (call is not None and (call.hidden or call.asks_for(before, after))):
            by = "policy"
        else:
            by = "model" if call is None or call.is_conversion else "torch"
        # Autograd numbers the node of a cast just before the kernel runs. A cast without a node comes after the owner
        # of the last number, which therefore is not overwritten.
        account = Account(by, place, line)
        self._accounts.setdefault(next_number() - 1, account)
        return account

    def _rounding(self, before: Tensor, after: Tensor, account: Account) -> Integers | None:
        """Say which integers a cast changes."""
        lost = lost_integers(before, after.dtype) if after.dtype in LOW else None
        return None if lost is None else Integers(lost, account.by, account.line if account.by == "model" else None)

    def _follow(self, kernel: Any, args: Any, kwargs: Any, out: Any, place: Place) -> None:
        """Follow rounded integers into products, and what products make into the softmax of a loss."""
        results = [each for each in tensors(out) if has_fraction(each.dtype)]
        if kernels.is_view(kernel) or not results:
            return
        if kernels.is_rounding(kernel, args, out):  # of integers
            line = self.where.line() if place.call is None else place.call.line
            lost = lost_integers(args[0], out.dtype)
            self._rounded.put(results, None if lost is None else Integers(lost, "model", line))
            return
        if kernels.is_rearranging(kernel):
            _carry(self._rounded, args, results)
            _carry(self._widened, args, results)
            return
        if kernel._schema.is_mutable:
            self._rounded.put(results, None)
        if kernels.flops(kernel, args, kwargs, out) is not None:
            read = kernels.factors(kernel, args)
            self._widened.put(results, (any(self._labels.get(each) == "parameter" for each in read), ()))
            for found in {label for each in read if (label := self._rounded.get(each)) is not None}:
                op, line = (kernel_name(kernel), None) if place.call is None else (place.call.op, place.call.line)
                self.integers[place.module, op, line, found] += 1
        name = str(kernel._schema.name)
        if name in ("aten::_log_softmax", "aten::_softmax") and args[1] % max(1, args[0].dim()) == args[0].dim() - 1:
            is_product, accounts = self._widened.get(args[0]) or (False, ())
            for account in accounts if is_product or name == "aten::_log_softmax" else ():
                if account not in self.logits:
                    self.logits.append(account)

    def _new_label(self) -> str:
        return "gradient" if self.where.is_gradient else "activation"

    def _product(self, kernel: Any, args: Any, kwargs: Any, out: Any, place: Place, *, emulated: bool) -> None:
        """Count a product's operations, and its dimensions if tensor cores do not like them."""
        call = place.call
        line = None if call is None else call.line
        if (found := kernels.product(kernel, args)) is not None:
            shape, dtype = found
            dtype = self.dtype if emulated else dtype
            multiple = kernels.multiple_of(dtype)
            if multiple is not None and any(size % multiple for _, size in shape):
                op = "" if call is None else call.op
                self.products[place.module, op, shape, dtype_name(dtype), multiple, line] += 1
        if (counted := kernels.flops(kernel, args, kwargs, out)) is not None:
            amount, dtype = counted
            formats = quantised_formats()
            name = formats[0] if formats else dtype_name(self.dtype if emulated else dtype)
            op, why = (kernel_name(kernel), "") if call is None else (call.op, call.why)
            key = (place.module, op, name, why, line)
            self.flops[key] += amount
            self.num_products[key] += 1


def _carry(labels: Storages[Any], args: Any, results: list[Tensor]) -> None:
    """Label what holds the numbers of a labelled tensor, among others perhaps."""
    found = next((label for each in tensors(args) if (label := labels.get(each)) is not None), None)
    if found is not None:
        labels.put(results, found)
