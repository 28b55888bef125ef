"""Watching a forward and a backward pass for numbers that are not finite, and for where each comes from.

A kernel's result that is not finite though all it read is finite is an *origin*. Later kernels hand it on, and in the
end it is known which origin the loss and the gradients have it from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import BackwardCFunction

from mezzo.backward import current_node
from mezzo.cast.notes import notes
from mezzo.dispatch import DisableTorchFunction
from mezzo.overflow.diagnose import BOUNDED, SOFTMAX, Context, Origin, Phase, Reader
from mezzo.policy import Policy
from mezzo.policy.ops import OPS
from mezzo.tensors import has_fraction, tensors
from mezzo.trace import measure
from mezzo.trace.function_calls import LOSS, Decider, Place, Where, kernel_name
from mezzo.trace.kernels import Storages, is_allocation, is_cast, is_view, same_storage
from mezzo.trace.measure import Edge, Names, Operand, Range, edges


class _Ran(NamedTuple):
    """A kernel that has run.

    Attributes:
        kernel: The kernel.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        read: What it read, as it was before.
        results: Its results that hold fractions.
        bad: The number of the first of them that is not finite.
    """

    kernel: Any
    args: Any
    kwargs: Any
    read: list[Operand]
    results: list[Tensor]
    bad: int

    @property
    def name(self) -> str:
        return str(self.kernel._schema.name)

    @property
    def result(self) -> Tensor:
        return self.results[self.bad]


class Watch:
    """Everything non-finite that is seen in one forward pass and in backward passes from it.

    Args:
        context: The models, which give modules and parameters their names, and their policy.
        where: Where the pass is.
    """

    def __init__(self, context: Context, where: Where) -> None:
        self.where, self.names = where, Names(context.models)
        self.origins: list[Origin] = []
        self._context = context
        self._decider = Decider(context.policy or Policy.O0(), {})
        self._from, self._wide = Storages[Origin](), Storages[Origin]()
        self._copies = Storages[str]()  # the names of what was cast
        self._arguments: dict[int, tuple[Place, dict[Edge, str]]] = {}
        self._last: tuple[Any, _Ran] | None = None  # and the call or the autograd node that it belongs to

    # Calls --------------------------------------------------------------------------------------------

    def begin(self, function: Any, args: Any, kwargs: Any) -> Place:
        """Be in a call, and remember what its gradients will be gradients of."""
        with DisableTorchFunction():
            # A region above the mode that tells may have taken apart what the user's code calls.
            ops = [note.about for note in notes() if note.kind == "op"]
            around = self.where.now
            call = self._decider.call(ops[-1] if ops else function, args, kwargs, around.path)
            call.line = self.where.line()
            place = Place(around.module, call)
            self.where.enter(place)
            self._arguments[id(place)] = place, edges(args, kwargs)  # with the place, so that its id stays its own
            kinds = {tensor.device.type for tensor in tensors((args, kwargs))}
            known = filter(is_autocast_available, kinds)  # no meta device
            self._context.autocasts |= any(map(torch.is_autocast_enabled, known))
        return place

    def finish(self, place: Place, out: Any) -> None:
        """Need nothing of what a call returns: its kernels have been looked at."""

    def _place(self) -> Place:
        """Return where a kernel belongs; emulation runs backward passes inside its own, whose kernels belong to it."""
        nodes = (note.about for note in reversed(notes()) if isinstance(note.about, BackwardCFunction))
        node = next(nodes, None) if self.where.is_backward else None
        return self.where.place() if node is None else self.where.of_node(node)

    @property
    def _phase(self) -> Phase:
        return "backward" if self.where.is_gradient else "forward"

    # Kernels ------------------------------------------------------------------------------------------

    def before(self, kernel: Any, args: Any, kwargs: Any) -> list[Operand]:
        """Keep what a kernel is about to read."""
        return measure.operands(kernel, args, kwargs)

    def kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any, before: list[Operand]) -> None:
        """Look at what a kernel made."""
        results = [tensor for tensor in tensors(out) if has_fraction(tensor.dtype)]
        if not results or is_view(kernel) or is_allocation(kernel):
            return
        with DisableTorchFunction():
            bad = [number for number, result in enumerate(results) if not measure.is_finite(result)]
            ran = _Ran(kernel, args, kwargs, before, results, bad[0] if bad else 0)
            if bad:
                num_before = len(self.origins)
                origin = self._origin(ran)
                self._from.put((results[number] for number in bad), origin)
                is_new = origin.number >= num_before and origin.source == "made"
                self._follow(origin if is_new else None, before, [results[number] for number in bad])
            if is_cast(kernel, args, out) and (name := self._called(args[0])) is not None:
                self._copies.put([out], name)
            self._last = self._asker(), ran

    def _asker(self) -> Any:
        """Return what two kernels of one call share: the call, or the autograd node."""
        return current_node() if self.where.is_backward else self.where.now

    def _origin(self, ran: _Ran) -> Origin:
        """Return where the result that is not finite has it from."""
        bad = (
            each for each in ran.read if not measure.is_finite(each.tensor) and not self.names.was_finite(each.argument)
        )
        sources = [self._source(operand, ran.kernel) for operand in bad]
        if not sources:
            return self._made(ran)
        found = min(sources, key=lambda origin: origin.rank)
        if found.may_be_meant and measure.has_nan(ran.result):
            if kernel_name(ran.kernel) in SOFTMAX or "scaled_dot_product" in ran.name:
                return self._add("masked", ran.kernel, ran.result, ran.read)
            if not found.made_nan_by:
                call = self._place().call
                line = "" if call is None or call.line is None else f" ({call.line})"
                found.made_nan_by = f"{kernel_name(ran.kernel) if call is None else call.op}{line}"
        return found

    def _source(self, operand: Operand, kernel: Any) -> Origin:
        """Return the origin of a non-finite tensor; one that no kernel made was there before."""
        known = self._from.get(operand.tensor) or self._from.get(operand.argument)
        return known or self.given(operand.argument, kernel)

    def _follow(self, new: Origin | None, read: list[Operand], bad: list[Tensor]) -> None:
        """Follow numbers that are too large through the forward pass, until an op brings them back into range."""
        if self._phase == "backward":
            return
        if new is not None:
            self._wide.put(bad, new)
        place = self._place()
        op = "" if place.call is None else place.call.op
        entry = OPS.get(op)
        reader = Reader(place.module, op, entry is not None and entry.portable == "low")
        for origin in {origin for operand in read if (origin := self._wide.get(operand.argument)) is not None}:
            origin.readers[reader] = None
            if op not in BOUNDED and place.module != LOSS:
                self._wide.put(bad, origin)

    # Origins ------------------------------------------------------------------------------------------

    def _made(self, ran: _Ran) -> Origin:
        """Note a tensor that a kernel made non-finite out of finite numbers."""
        kernel, args, kwargs, read, _, position = ran
        if measure.has_literal(args, kwargs):
            origin = self._add("written", kernel, ran.result, read)
            origin.may_be_meant = origin.tensor.num_nan == 0
            return origin
        if not is_cast(kernel, args, ran.result):
            origin = self._add("made", kernel, ran.result, read)
            origin.needed, origin.holds = measure.needed(ran.result.dtype, kernel, args, kwargs, read, position)
            return origin
        doing = {note.kind for note in notes()}
        is_emulated = "emulation" in doing
        asker, last = self._last or (None, ran)
        if same_storage(last.results[0], args[0]) and (is_emulated or asker is self._asker()):
            # The call rounds its own result: what counts is what the result was computed from.
            rounded = [Operand(each.name, each.tensor.to(ran.result.dtype), each.argument) for each in last.read]
            origin = self._add("made", kernel, ran.result, rounded if is_emulated else last.read)
            origin.kernel = last.name
        else:
            origin = self._add("made", kernel, ran.result, read)
            self._name_cast(origin, args[0], by_mezzo="cast" in doing)
        origin.needed, origin.holds = measure.range_of(args[0], "").largest, args[0].dtype
        return origin

    def _name_cast(self, origin: Origin, before: Tensor, *, by_mezzo: bool) -> None:
        if origin.phase == "backward":
            return
        call = self._place().call
        origin.cast_by = "model" if call is not None and call.is_conversion and not by_mezzo else "policy"
        found = self.names.of(before)
        if found is not None:
            origin.role, origin.path = found[:2]
        if origin.cast_by == "policy":
            origin.rename(f"{'argument' if found is None else found[1]} cast to {origin.tensor.dtype}")

    def given(self, tensor: Tensor, kernel: Any = None) -> Origin:
        """Note a tensor that is non-finite and that nothing in the pass has made."""
        found = self.names.of(tensor)
        origin = self._add("given", kernel, tensor, [])
        origin.may_be_meant = measure.is_like_a_mask(tensor)
        origin.role, origin.path = ("input", "a tensor made before the step") if found is None else found[:2]
        origin.rename(origin.path)
        if found is not None and origin.role == "parameter" and measure.is_finite(found[2]):
            # A cast of it from before the pass, which a region keeps from one micro-batch to the next.
            origin.source, origin.cast_by, origin.may_be_meant = "made", "policy", False
            origin.needed, origin.holds = measure.range_of(found[2], "").largest, found[2].dtype
            origin.rename(f"{origin.path} cast to {origin.tensor.dtype}")
        return origin

    def _add(self, source: Any, kernel: Any, tensor: Tensor, read: list[Operand]) -> Origin:
        place, phase = self._place(), self._phase
        call = place.call
        bare = "" if kernel is None else kernel_name(kernel)
        # Autograd adds up what arrives along several ways by itself, after the node's own hooks.
        name = "output" if phase == "forward" else "sum of gradients" if bare == "add" else "gradient"
        origin = Origin(
            number=len(self.origins),
            source=source,
            phase=phase,
            module=place.module,
            op=bare if call is None else call.op,
            kernel="" if kernel is None else str(kernel._schema.name),
            line=self.where.line() if call is None else call.line,
            rule=None if call is None else call.decision.rule,
            dtype=tensor.dtype,
            tensor=measure.range_of(tensor, name),
            inputs=tuple(self._range(operand) for operand in read),
        )
        self.origins.append(origin)
        self._from.put([tensor], origin)
        node = current_node()
        if phase == "backward" and node is not None:
            self._name_later(origin, node, self._arguments.get(id(place), (place, {}))[1])
        return origin

    def _range(self, operand: Operand) -> Range:
        return measure.range_of(operand.tensor, self._called(operand.argument) or operand.name)

    def _called(self, tensor: Tensor) -> str | None:
        found = self.names.of(tensor)
        return self._copies.get(tensor) if found is None else found[1]

    def _name_later(self, origin: Origin, node: Any, arguments: dict[Edge, str]) -> None:
        """Name a gradient once its node has run, when it is known along which edge it goes."""

        def name(gradients: Sequence[Tensor | None], _: Any) -> None:
            for slot, gradient in enumerate(gradients):
                if gradient is not None and self._from.get(gradient) is origin:
                    origin.rename(f"gradient of {self.names.of_edge(node.next_functions[slot], arguments)}")

        node.register_hook(name)

    # After --------------------------------------------------------------------------------------------

    def first(self, ends: Iterable[Tensor]) -> Origin | None:
        """Return the origin that the non-finite among these tensors have it from, the first of several."""
        bad = [tensor for tensor in ends if not measure.is_finite(tensor)]
        if not bad:
            return None
        known = [origin for tensor in bad if (origin := self._from.get(tensor)) is not None]
        return min(known or self.origins, key=lambda origin: origin.rank, default=None) or self.given(bad[0])
