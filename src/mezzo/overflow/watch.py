"""Watching a forward and a backward pass for numbers that are not finite, and for where each comes from.

Built on the trace behind :func:`mezzo.explain`, which knows the module, the op and the user's line of every kernel,
forward and backward. A kernel's result that is not finite though all it read is finite is an *origin*. Later kernels
hand it on, and in the end it is known which origin the loss and the gradients have it from.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from mezzo.cast.notes import notes
from mezzo.overflow.origins import BOUNDED, SOFTMAX, Consumer, Origin
from mezzo.overflow.report import Phase
from mezzo.policy import Policy
from mezzo.policy.ops import OPS
from mezzo.tensors import has_fraction, tensors
from mezzo.trace.calls import Decider
from mezzo.trace.frames import kernel_name, user_line
from mezzo.trace.kernels import Storages, is_allocation, is_cast, is_view, same_storage
from mezzo.trace.measure import (
    Operand,
    Range,
    has_literal,
    has_nan,
    is_finite,
    is_like_a_mask,
    needed,
    range_of,
)
from mezzo.trace.names import Edge, Names, edges
from mezzo.trace.trace import LOSS, Place, Trace

__all__ = ["Watch"]


class _Result(NamedTuple):
    """What the last kernel made, and of what."""

    where: Any
    kernel: str
    tensor: Tensor
    read: list[Operand]


class Watch(Trace):
    """Everything non-finite that is seen in one forward pass and in backward passes from it.

    Args:
        models: The models, which give modules and parameters their names.
        policy: The policy, where it is known.
        until: The frame beyond which no line is the step's; see :func:`~mezzo.trace.frames.user_line`.
        instead: The line to name where there is none.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        policy: Policy | None,
        *,
        until: int = 0,
        instead: str | None = None,
    ) -> None:
        super().__init__(Decider(policy or Policy.O0(), {}), torch.float32, until)
        self.names = Names(models)
        self.origins: list[Origin] = []
        self.autocasts = False if policy is None else policy.autocast
        self._instead = instead
        self._from, self._wide = Storages(), Storages()  # the number of an origin, as text
        self._copies = Storages()  # the names of what was cast
        self._arguments: dict[int, tuple[Place, dict[Edge, str]]] = {}
        self._last: _Result | None = None

    # Where ----------------------------------------------------------------------------------------------

    def begin(self, function: Any, args: Any, kwargs: Any) -> Place:
        """Be in a call, and remember what its gradients will be gradients of."""
        place = super().begin(function, args, kwargs)
        with torch._C.DisableTorchFunction():
            assert place.call is not None
            if ops := [note.about for note in notes() if note.kind == "op"]:
                # A region above this trace has taken apart what the user's code calls.
                place.call = self.decider.call(ops[-1], args, kwargs, None if place.module == LOSS else place.module)
            place.call.line = place.call.line or self._line()
            self._arguments[id(place)] = place, edges(args, kwargs)  # with the place, so that its id stays its own
            self.autocasts |= any(torch.is_autocast_enabled(kind) for kind in _kinds(args, kwargs))
        return place

    def finish(self, place: Place, out: Any) -> None:
        """End a call: there are no rows to count here."""

    def _line(self) -> str | None:
        return user_line(self.until) or self._instead

    def _where(self) -> Place:
        """Return where a kernel belongs, inside the backward passes that emulation runs within its own as well."""
        for note in reversed(notes()) if self._backward else ():
            if isinstance(node := note.about, BackwardCFunction):
                number = node._sequence_nr()
                found = bisect_right(self._timeline, number, key=lambda mark: mark[0])
                return self._timeline[found - 1][1] if found else self._places[-1]
        return self._place()

    def _phase(self) -> Phase:
        return "backward" if self._backward and not self._recomputing() else "forward"

    # Kernels ------------------------------------------------------------------------------------------

    def check(self, kernel: Any, read: list[Operand], args: Any, kwargs: Any, out: Any) -> None:
        """Look at what a kernel made.

        Args:
            kernel: The kernel.
            read: What it read, as it was before.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            out: Its results.
        """
        results = [tensor for tensor in tensors(out) if has_fraction(tensor.dtype)]
        if not results or is_view(kernel) or is_allocation(kernel):
            return
        with torch._C.DisableTorchFunction():
            bad = [number for number, result in enumerate(results) if not is_finite(result)]
            if bad:
                num_before = len(self.origins)
                origin = self._origin(kernel, read, args, kwargs, results, bad[0])
                self._from.put((results[number] for number in bad), str(origin.number))
                is_new = origin.number >= num_before and origin.source == "made"
                self._hand_on(str(origin.number) if is_new else None, read, [results[number] for number in bad])
            if is_cast(kernel, args, out) and (name := self._called(args[0])) is not None:
                self._copies.put([out], name)
            self._last = _Result(self._identity(), str(kernel._schema.name), results[0], read)

    def _identity(self) -> Any:
        """Return what two kernels of one call share: the call, or the autograd node."""
        return torch._C._current_autograd_node() if self._backward else self._places[-1]

    def _origin(
        self, kernel: Any, read: list[Operand], args: Any, kwargs: Any, results: list[Tensor], position: int
    ) -> Origin:
        bad = (each for each in read if not is_finite(each.tensor) and not self.names.was_finite(each.argument))
        sources = [self._source(operand, kernel) for operand in bad]
        if not sources:
            return self._made(kernel, read, args, kwargs, results, position)
        found = min(sources, key=lambda origin: origin.rank)
        if found.is_weak and has_nan(results[position]):
            if kernel_name(kernel) in SOFTMAX or "scaled_dot_product" in str(kernel._schema.name):
                return self._add("masked", kernel, results[position], read)
            if not found.spoiled_by:
                place = self._where()
                line = "" if place.call is None or place.call.line is None else f" ({place.call.line})"
                found.spoiled_by = f"{kernel_name(kernel) if place.call is None else place.call.op}{line}"
        return found

    def _source(self, operand: Operand, kernel: Any) -> Origin:
        """Return the origin of a non-finite tensor; one that nobody made was there before."""
        label = self._from.get(operand.tensor) or self._from.get(operand.argument)
        return self.origins[int(label)] if label is not None else self.given(operand.argument, kernel)

    def _hand_on(self, new: str | None, read: list[Operand], bad: list[Tensor]) -> None:
        """Follow numbers that are too large through the forward pass, until an op brings them back into range."""
        if self._phase() == "backward":
            return
        if new is not None:
            self._wide.put(bad, new)
        place = self._where()
        op = "" if place.call is None else place.call.op
        entry = OPS.get(op)
        consumer = Consumer(place.module, op, entry is not None and entry.portable == "low")
        for label in {label for operand in read if (label := self._wide.get(operand.argument)) is not None}:
            self.origins[int(label)].consumers[consumer] = None
            if op not in BOUNDED and place.module != LOSS:
                self._wide.put(bad, label)

    # Origins ------------------------------------------------------------------------------------------

    def _made(
        self, kernel: Any, read: list[Operand], args: Any, kwargs: Any, results: list[Tensor], position: int
    ) -> Origin:
        """Note a tensor that a kernel made non-finite out of finite numbers."""
        result = results[position]
        if has_literal(args, kwargs):
            origin = self._add("written", kernel, result, read)
            origin.is_weak = origin.tensor.num_nan == 0
            return origin
        if not is_cast(kernel, args, result):
            origin = self._add("made", kernel, result, read)
            origin.needed, origin.holds = needed(kernel, args, kwargs, read, position, result.dtype)
            return origin
        last, doing = self._last, {note.kind for note in notes()}
        is_emulated = "emulation" in doing
        made_here = last is not None and same_storage(last.tensor, args[0])
        if last is not None and made_here and (is_emulated or last.where is self._identity()):
            # The call rounds its own result: what counts is what the result was computed from.
            origin = self._add("made", kernel, result, _rounded(last.read, result.dtype) if is_emulated else last.read)
            origin.kernel = last.kernel
        else:
            origin = self._add("made", kernel, result, read)
            self._name_cast(origin, args[0], by_mezzo="cast" in doing)
        origin.needed, origin.holds = range_of(args[0], "").largest, args[0].dtype
        return origin

    def _name_cast(self, origin: Origin, before: Tensor, *, by_mezzo: bool) -> None:
        call = self._where().call
        if origin.phase == "backward":
            return
        origin.cast_by = "model" if call is not None and call.is_conversion and not by_mezzo else "policy"
        found = self.names.of(before)
        if found is not None:
            origin.role, origin.path = found[:2]
        if origin.cast_by == "policy":
            name = "argument" if found is None else found[1]
            origin.tensor = dataclasses.replace(origin.tensor, name=f"{name} cast to {origin.tensor.dtype}")

    def given(self, tensor: Tensor, kernel: Any = None) -> Origin:
        """Note a tensor that is non-finite and that nothing in the pass has made."""
        found = self.names.of(tensor)
        origin = self._add("given", kernel, tensor, [])
        origin.is_weak = is_like_a_mask(tensor)
        origin.role, name = ("input", "a tensor made before the step") if found is None else found[:2]
        origin.path = name
        if found is not None and origin.role == "parameter" and is_finite(found[2]):
            # A cast of it from before the pass, which a region keeps from one micro-batch to the next.
            origin.source, origin.cast_by, origin.is_weak = "made", "policy", False
            origin.needed, origin.holds = range_of(found[2], "").largest, found[2].dtype
            name = f"{name} cast to {origin.tensor.dtype}"
        origin.tensor = dataclasses.replace(origin.tensor, name=name)
        return origin

    def _add(self, source: Any, kernel: Any, tensor: Tensor, read: list[Operand]) -> Origin:
        place = self._where()
        call = place.call
        phase = self._phase()
        bare = "" if kernel is None else kernel_name(kernel)
        origin = Origin(
            number=len(self.origins),
            source=source,
            phase=phase,
            module=place.module,
            op=bare if call is None else call.op,
            kernel="" if kernel is None else str(kernel._schema.name),
            line=self._line() if call is None else call.line,
            rule=None if call is None else call.decision.rule,
            dtype=tensor.dtype,
            tensor=range_of(tensor, _name(phase, bare)),
            inputs=tuple(self._range(operand) for operand in read),
        )
        self.origins.append(origin)
        self._from.put([tensor], str(origin.number))
        node: Any = torch._C._current_autograd_node()
        if phase == "backward" and node is not None:
            self._name_later(origin, node, self._arguments.get(id(place), (place, {}))[1])
        return origin

    def _range(self, operand: Operand) -> Range:
        return range_of(operand.tensor, self._called(operand.argument) or operand.name)

    def _called(self, tensor: Tensor) -> str | None:
        found = self.names.of(tensor)
        return self._copies.get(tensor) if found is None else found[1]

    def _name_later(self, origin: Origin, node: Any, arguments: dict[Edge, str]) -> None:
        """Name a gradient once its node has run, when it is known along which edge it goes."""

        def name(gradients: Sequence[Tensor | None], _: Any) -> None:
            for slot, gradient in enumerate(gradients):
                if gradient is not None and self._from.get(gradient) == str(origin.number):
                    owner = self.names.of_edge(node.next_functions[slot], arguments)
                    origin.tensor = dataclasses.replace(origin.tensor, name=f"gradient of {owner}")

        node.register_hook(name)

    # After --------------------------------------------------------------------------------------------

    def first(self, ends: Iterable[Tensor]) -> Origin | None:
        """Return the origin that the non-finite among these tensors have it from, the first of several."""
        bad = [tensor for tensor in ends if not is_finite(tensor)]
        labels = [label for tensor in bad if (label := self._from.get(tensor)) is not None]
        if labels:
            return min((self.origins[int(label)] for label in labels), key=lambda origin: origin.rank)
        if not bad:
            return None
        return min(self.origins, key=lambda origin: origin.rank, default=None) or self.given(bad[0])


def _rounded(read: list[Operand], dtype: torch.dtype) -> list[Operand]:
    """Give widened operands back the format that their numbers have."""
    return [Operand(each.name, each.tensor.to(dtype), each.argument) for each in read]


def _name(phase: Phase, kernel: str) -> str:
    if phase == "forward":
        return "output"
    # Autograd adds up what arrives along several ways by itself, after the node's own hooks.
    return "sum of gradients" if kernel == "add" else "gradient"


def _kinds(args: Any, kwargs: Any) -> set[str]:
    return {tensor.device.type for tensor in tensors((args, kwargs))}
