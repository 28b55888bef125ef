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

from mezzo.backward import current_node
from mezzo.overflow.diagnose import BOUNDED, SOFTMAX, Context, Origin, Reader
from mezzo.policy.ops import OPS
from mezzo.tensors import has_fraction, tensors
from mezzo.trace import measure
from mezzo.trace.function_calls import LOSS, Locator
from mezzo.trace.measure import Edge, Names, Operand, Range, edges
from mezzo.trace.recording import KernelTensors, PassRecorder
from mezzo.trace.table import CallRecord, KernelRecord

_CASTS = ("cast", "free cast")


class _Spoiled(NamedTuple):
    """A kernel whose results are not finite.

    Attributes:
        record: The kernel.
        origin: The origin of these results.
        memories: The memories of those results.
    """

    record: KernelRecord
    origin: Origin
    memories: set[int]


class Watch:
    """The non-finite tensors of one forward pass and of backward passes from it.

    Args:
        context: The models, which give modules and parameters their names, and their policy.
        where: Where the pass is.

    Attributes:
        recorder: What records the passes.
        names: The names of parameters, buffers and inputs.
        origins: The tensors that were the first non-finite ones on their paths, in the order of execution.
    """

    def __init__(self, context: Context, where: Locator | None = None) -> None:
        self.recorder = PassRecorder(context.policy, where=where, called=self._record_arguments, ran=self._record)
        self.names = Names(context.models)
        self.origins: list[Origin] = []
        self._context = context
        self._from: dict[int, Origin] = {}  # by memory
        self._copies: dict[int, str] = {}  # the names of tensors that were cast, by the memory of the copy
        self._spoiled: list[_Spoiled] = []
        self._arguments: dict[CallRecord, dict[Edge, str]] = {}
        self._last: tuple[KernelRecord, list[Operand]] | None = None  # the last kernel, and what it read

    def _record_arguments(self, call: CallRecord, function: Any, args: Any, kwargs: Any) -> None:
        """Record the names of a call's arguments, by which its gradients are named."""
        self._arguments[call] = edges(args, kwargs)
        kinds = {tensor.device.type for tensor in tensors((args, kwargs))}
        autocastable = filter(is_autocast_available, kinds)  # no meta device
        self._context.autocasts |= any(map(torch.is_autocast_enabled, autocastable))

    def _record(self, record: KernelRecord, values: KernelTensors) -> None:
        """Record a kernel whose results are not finite, and the names of what it cast."""
        results = [tensor for tensor in tensors(values.out) if has_fraction(tensor.dtype)]
        bad = [number for number, result in enumerate(results) if not measure.is_finite(result)]
        if bad:
            origin = self._origin(record, values, results[bad[0]], bad[0])
            memories = {self._memory(results[number]) for number in bad}
            self._from.update(dict.fromkeys(memories, origin))
            self._spoiled.append(_Spoiled(record, origin, memories))
        if record.effect in _CASTS and (name := self._called(values.args[0])) is not None:
            self._copies[self._memory(values.out)] = name
        if results:
            self._last = record, values.before

    def _call(self, record: KernelRecord) -> CallRecord | None:
        """Return the call of a torch function that a kernel belongs to; above an extension's kernel there is none."""
        return record.call if record.call in self._arguments else None

    def _memory(self, tensor: Tensor) -> int:
        return self.recorder.value(tensor).memory

    def _origin(self, record: KernelRecord, values: KernelTensors, result: Tensor, position: int) -> Origin:
        """Return the origin of a result that is not finite."""
        bad = (
            operand
            for operand in values.before
            if not measure.is_finite(operand.tensor) and not self.names.was_finite(operand.argument)
        )
        # A tensor that no kernel of the pass made was there before.
        sources = [
            self._from.get(self._memory(operand.argument)) or self._given_origin(operand.argument, record)
            for operand in bad
        ]
        if not sources:
            return self._made_origin(record, values, result, position)
        origin = min(sources, key=lambda source: source.rank)
        if origin.may_be_meant and measure.has_nan(result):
            if record.name in SOFTMAX or "scaled_dot_product" in record.name:
                return self._add("masked", record, result, values.before)
            if not origin.made_nan_by:
                line = f" ({record.call.line})" if record.call.line else ""
                origin.made_nan_by = f"{record.call.op or record.name}{line}"
        return origin

    # Origins ------------------------------------------------------------------------------------------

    def _made_origin(self, record: KernelRecord, values: KernelTensors, result: Tensor, position: int) -> Origin:
        """Return a new origin: a tensor that a kernel made non-finite out of finite numbers."""
        if measure.has_literal(values.args, values.kwargs):
            origin = self._add("written", record, result, values.before)
            origin.may_be_meant = origin.tensor.num_nan == 0
            return origin
        if record.effect not in _CASTS:
            origin = self._add("made", record, result, values.before)
            origin.needed, origin.holds = measure.needed(
                result.dtype, record.kernel, values.args, values.kwargs, values.before, position
            )
            makers = [self.recorder.recorded.maker(value) for value in record.reads if value.dtype == result.dtype]
            origin.is_low_by_model = bool(makers) and all(
                maker is not None and self._by_model(maker) for maker in makers
            )
            return origin
        before, is_emulated = values.args[0], record.by == "emulation"
        last, read = self._last or (record, [])
        is_of_call = (self._call(last) or last.module, last.node) == (self._call(record) or record.module, record.node)
        if last is self.recorder.recorded.maker(record.reads[0]) and (is_emulated or is_of_call):
            # The call rounds its own result: the report shows what the result was computed from.
            rounded = [Operand(operand.name, operand.tensor.to(result.dtype), operand.argument) for operand in read]
            origin = self._add("made", record, result, rounded if is_emulated else read)
            origin.kernel = str(last.kernel._schema.name)
        else:
            origin = self._add("made", record, result, values.before)
            self._name_cast(origin, before, record)
        origin.needed, origin.holds = measure.range_of(before, "").largest, before.dtype
        return origin

    def _name_cast(self, origin: Origin, before: Tensor, record: KernelRecord) -> None:
        if origin.phase == "backward":
            return
        origin.cast_by = "model" if self._by_model(record) else "policy"
        named = self.names.of(before)
        if named is not None:
            origin.role, origin.path = named[:2]
        if origin.cast_by == "policy":
            origin.rename(f"{'argument' if named is None else named[1]} cast to {origin.tensor.dtype}")

    def _by_model(self, record: KernelRecord) -> bool:
        """Whether a kernel is a cast of the model's own code."""
        call, by_mezzo = self._call(record), record.by in ("cast", "quantised")
        return record.effect in _CASTS and call is not None and call.is_conversion and not by_mezzo

    def _given_origin(self, tensor: Tensor, record: KernelRecord | None = None) -> Origin:
        """Return a new origin: a non-finite tensor that was there before the pass."""
        named = self.names.of(tensor)
        origin = self._add("given", record, tensor, [])
        origin.may_be_meant = measure.is_like_a_mask(tensor)
        origin.role, origin.path = ("input", "a tensor made before the step") if named is None else named[:2]
        origin.rename(origin.path)
        if named is not None and origin.role == "parameter" and measure.is_finite(named[2]):
            # A region keeps the cast of a parameter from one micro-batch to the next: it was made before the pass.
            origin.source, origin.cast_by, origin.may_be_meant = "made", "policy", False
            origin.needed, origin.holds = measure.range_of(named[2], "").largest, named[2].dtype
            origin.rename(f"{origin.path} cast to {origin.tensor.dtype}")
        return origin

    def _add(self, source: Any, record: KernelRecord | None, tensor: Tensor, read: list[Operand]) -> Origin:
        call = None if record is None else self._call(record)
        is_backward = record is not None and record.phase == "backward"
        bare = "" if record is None else record.name
        # Autograd adds up gradients of several paths by itself, after the node's own hooks.
        name = "output" if not is_backward else "sum of gradients" if bare == "add" else "gradient"
        origin = Origin(
            number=len(self.origins),
            source=source,
            phase="backward" if is_backward else "forward",
            module=LOSS if record is None else record.module,
            op=bare if call is None else call.op,
            kernel="" if record is None else str(record.kernel._schema.name),
            line=self.recorder.where.line() if call is None else call.line,
            rule=None if call is None else call.decision.rule,
            dtype=tensor.dtype,
            tensor=measure.range_of(tensor, name),
            inputs=tuple(self._range(operand) for operand in read),
        )
        self.origins.append(origin)
        self._from[self._memory(tensor)] = origin
        node = current_node()
        if is_backward and node is not None:
            self._name_later(origin, node, {} if call is None else self._arguments[call])
        return origin

    def _range(self, operand: Operand) -> Range:
        return measure.range_of(operand.tensor, self._called(operand.argument) or operand.name)

    def _called(self, tensor: Tensor) -> str | None:
        named = self.names.of(tensor)
        return self._copies.get(self._memory(tensor)) if named is None else named[1]

    def _name_later(self, origin: Origin, node: Any, arguments: dict[Edge, str]) -> None:
        """Name a gradient once its node has run and the gradient's edge is known."""

        def name(gradients: Sequence[Tensor | None], _: Any) -> None:
            for slot, gradient in enumerate(gradients):
                if gradient is not None and self._from.get(self._memory(gradient)) is origin:
                    origin.rename(f"gradient of {self.names.of_edge(node.next_functions[slot], arguments)}")

        node.register_hook(name)

    # After --------------------------------------------------------------------------------------------

    def first(self, outputs: Iterable[Tensor]) -> Origin | None:
        """Return the first origin of the non-finite ones among these tensors; ``None`` where all are finite."""
        bad = [tensor for tensor in outputs if not measure.is_finite(tensor)]
        if not bad:
            return None
        origins = [origin for tensor in bad if (origin := self._from.get(self._memory(tensor))) is not None]
        origin = min(origins or self.origins, key=lambda origin: origin.rank, default=None) or self._given_origin(
            bad[0]
        )
        origin.readers = self._readers(origin)
        return origin

    def _readers(self, origin: Origin) -> list[Reader]:
        """Return the calls that read numbers which are too large, until an op brings them back into range."""
        readers, wide = dict[Reader, None](), set[int]()
        for record, source, memories in self._spoiled if origin.source == "made" else ():
            if record.phase == "backward":
                continue
            if not wide.isdisjoint(value.memory for value in record.reads):
                op = record.call.op
                entry = OPS.get(op)
                readers[Reader(record.module, op, entry is not None and entry.portable == "low")] = None
                if op not in BOUNDED and record.module != LOSS:
                    wide |= memories
            elif source is origin and not wide:
                wide |= memories
        return list(readers)
