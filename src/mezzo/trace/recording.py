"""What fills the table of a pass: told of calls and kernels as they happen, it asks for numbers and waits for none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from mezzo.backward import current_node, next_number, number_of
from mezzo.cast.notes import notes
from mezzo.dispatch import DisableTorchFunction
from mezzo.policy import Decision, Policy, Rule
from mezzo.tensors import dtype_name, each_tensor, tensors, values_of
from mezzo.trace import kernels, measure, modes
from mezzo.trace.function_calls import Decider, Location, Locator, around, kernel_name
from mezzo.trace.kernels import Storages
from mezzo.trace.measure import Operand
from mezzo.trace.probes import Probe
from mezzo.trace.table import NO_CALL, CallRecord, KernelEffect, KernelRecord, NodeName, Value, WatchedPass

_NOTHING: Final[Mapping[int, tuple[Rule, str]]] = MappingProxyType({})

#: Is told of a call before it runs: its record, the function, its arguments; may return what is told of the result.
Called = Callable[[CallRecord, Any, Any, Any], Callable[[Any], None] | None]


@dataclass(slots=True)
class KernelTensors:
    """The tensors of a kernel that has just run, for who looks at them now: the table keeps none.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        before: What it read, as it was before: copies of what it writes to.
        out: What it returned.
    """

    args: Any
    kwargs: Any
    before: list[Operand]
    out: Any


class _Numbers(NamedTuple):
    """What a storage holds now: the value's number, its role, and the number that names the memory."""

    number: int
    role: str
    memory: int


class PassRecorder:
    """Fill a table: of a forward pass, and of backward passes from it.

    Args:
        policy: The policy that decides about calls.
        ruled: Rule and path of each parameter and buffer that a rule speaks about, by ``id``.
        where: Where the pass is.
        probes: What is measured at kernels.
        called: Is told of each call.
        ran: Is told of each kernel, with its tensors; the tensors that kernels write to are copied for it.

    Attributes:
        recorded: The table as it is now, in which no probe is fetched yet.
        kernel_mode: What sees kernels; entered by itself, no calls are seen.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        ruled: Mapping[int, tuple[Rule, str]] = _NOTHING,
        *,
        where: Locator | None = None,
        probes: Sequence[Probe] = (),
        called: Called | None = None,
        ran: Callable[[KernelRecord, KernelTensors], None] | None = None,
    ) -> None:
        policy = policy or Policy.O0()
        self.where = where or Locator()
        self.recorded = WatchedPass()
        self.recorded.modules_run = self.where.modules_run
        self._decider, self._dtype = Decider(policy, ruled), policy.dtype
        self.kernel_mode = modes.KernelMode(self._before, self._kernel)
        self._probes, self._called, self._ran = probes, called, ran
        self._open: dict[int, Callable[[Any], None] | None] = {}  # what is told of a call's result
        self._numbers, self._count = Storages[_Numbers](), 0
        self._measured: list[tuple[KernelRecord, Probe, Tensor]] = []

    # The pass -----------------------------------------------------------------------------------------

    def learn(self, model: nn.Module, inputs: Any = (), prefix: str = "") -> None:
        """Learn what parameters, buffers and inputs are, before a forward pass.

        Args:
            model: The model.
            inputs: What it is given.
            prefix: What its paths begin with in names.
        """
        self.where.learn_owners(model)
        named: list[tuple[str, str, Tensor]] = [
            ("parameter", prefix + path, each) for path, each in model.named_parameters()
        ]
        named += [("buffer", prefix + path, each) for path, each in model.named_buffers()]
        named += [("input", f"input {path}", each) for path, each in each_tensor(inputs)]
        for role, name, tensor in named:
            if self._numbers.get(tensor) is None:
                self._count += 1
                self._numbers.put([tensor], _Numbers(self._count, role, self._count))
                self.recorded.names[self._count] = name

    def hooked(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Know inside the block which module of the models runs."""
        return modes.hooked(self.where, self._call_mode, models)

    @contextmanager
    def watching(self, *, backward: bool = False) -> Iterator[None]:
        """Record a pass inside the block; a forward pass lies inside the policy's region."""
        self.where.is_backward = backward
        with self.kernel_mode, nullcontext() if backward else self._call_mode():
            yield

    def _call_mode(self) -> modes.CallMode:
        return modes.CallMode(self.where, self._begin, self._finish)

    def table(self) -> WatchedPass:
        """Return the table, with what was measured: one transfer from each device."""
        of_devices: dict[torch.device, list[tuple[KernelRecord, Probe, Tensor]]] = {}
        for each in self._measured:
            of_devices.setdefault(each[2].device, []).append(each)
        for measured in of_devices.values():
            numbers = torch.cat([numbers for *_, numbers in measured]).tolist()
            place = 0
            for record, probe, held in measured:
                record.probes[probe.name] = probe.read(numbers[place : place + held.numel()])
                place += held.numel()
        self._measured.clear()
        return self.recorded

    def value(self, tensor: Tensor) -> Value:
        """Return the value that a tensor holds now."""
        known = self._numbers.get(tensor)
        if known is None:
            self._count += 1
            known = _Numbers(self._count, "", self._count)
            self._numbers.put([tensor], known)
        return Value(known.number, tensor.dtype, _shape(tensor), known.role, known.memory)

    # Calls --------------------------------------------------------------------------------------------

    def _begin(self, function: Any, args: Any, kwargs: Any) -> Location:
        """Count what happens from now on to one call, until it is left."""
        with DisableTorchFunction():
            before = self.where.now
            # A region above the mode that tells may have taken apart what the user's code calls.
            by, asked = around()[0], [note.about for note in notes() if note.kind == "op"]
            call = self._decider.call(asked[-1] if asked else function, args, kwargs, before.path)
            call.hidden = by in ("cast", "quantised")
            if by == "region":  # one that the model's code entered, and which lies above the mode that tells
                call.cause = "a region that the model's own code enters decides here"
            self._enter(call, before.module)
            place = Location(before.module, call)
            self.where.enter(place)
            if self._called is not None:
                self._open[id(place)] = self._called(call, function, args, kwargs)
        return place

    def _enter(self, call: CallRecord, module: str) -> None:
        call.number, call.module, call.is_backward = len(self.recorded.calls), module, self.where.is_backward
        call.line = self.where.line()
        self.recorded.calls.append(call)

    def _finish(self, place: Location, out: Any) -> None:
        """Take note of what a call returns."""
        call = place.call
        assert call is not None
        with DisableTorchFunction():
            self._leave(call, out)
            told = self._open.pop(id(place), None)
            if told is not None:
                told(out)

    @staticmethod
    def _leave(call: CallRecord, out: Any) -> None:
        call.has_returned = True
        call.returns = tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors(out)))

    # Kernels ------------------------------------------------------------------------------------------

    def _before(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Keep what a kernel is about to read, where it is asked for."""
        if self._ran is None and not self._probes:
            return None
        with DisableTorchFunction():
            begun = [probe.begin(kernel, args, kwargs) for probe in self._probes]
            return begun, [] if self._ran is None else measure.operands(kernel, args, kwargs)

    def _kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any, before: Any) -> None:
        """Record a kernel."""
        with DisableTorchFunction():
            if kernels.is_allocation(kernel):
                for tensor in kernels.tensors_in(out):
                    self.recorded.allocated[self._renewed(tensor).memory] = self.where.now.call or NO_CALL
            record = kernel_record(kernel, args, kwargs, out, self._dtype)
            if record is None:
                return
            self._place_record(record, args, kwargs, out)
            self.recorded.add(record)
            if before is None:
                return
            begun, read = before
            for probe, what in zip(self._probes, begun, strict=True):
                if probe.wants(record) and (numbers := probe.measure(record, args, kwargs, out, what)) is not None:
                    self._measured.append((record, probe, numbers))
            if self._ran is not None:
                self._ran(record, KernelTensors(args, kwargs, read, out))

    def _place_record(self, record: KernelRecord, args: Any, kwargs: Any, out: Any) -> None:
        """Say of a kernel where it belongs, and which values it reads and writes."""
        where, kernel = self.where, record.kernel
        record.number, record.is_inner, record.next_node = len(self.recorded.kernels), where.is_inner, next_number()
        if where.is_backward:
            record.phase = "backward" if where.is_gradient else "recomputed"
            node = current_node() if record.phase == "backward" else None
            if node is not None:
                record.node = NodeName(node.name(), number_of(node), isinstance(node, BackwardCFunction))
        place = self._place()
        record.module = place.module
        if place.call is not None:
            record.call = place.call
        elif record.phase == "forward" and record.by in ("region", "other"):
            # No torch function stands above: a C++ extension, or a scripted function.
            record.call = self._decider.call(kernel, args, kwargs, place.path)
            self._enter(record.call, place.module)
            record.call.op = record.name
            self._leave(record.call, out)
        if place.call is not None and any(note.kind == "widened" for note in notes()):
            reason = f"no kernel in {place.call.low_dtype} here"
            place.call.decision = Decision(treatment="fp32", rule=None, reason=reason, source="torch")
        self._number(record, args, kwargs, out)

    def _place(self) -> Location:
        """Return where a kernel belongs; emulation runs backward passes inside its own, whose kernels belong to it."""
        nodes = (note.about for note in reversed(notes()) if isinstance(note.about, BackwardCFunction))
        node = next(nodes, None) if self.where.is_backward else None
        return self.where.of_kernel() if node is None else self.where.of_node(node)

    def _number(self, record: KernelRecord, args: Any, kwargs: Any, out: Any) -> None:
        """Number what a kernel reads, and what it writes, anew."""
        record.reads = tuple(map(self.value, kernels.tensors_in(*args, *kwargs.values())))
        written: list[Tensor] = []
        for place, name in kernels.written_places(record.kernel):
            written += kernels.tensors_in(args[place] if place < len(args) else kwargs.get(name))
        first, gives = self._count, dict[int, Value]()
        for tensor in (*written, *kernels.tensors_in(out)):
            known = self._numbers.get(tensor)
            if known is None or known.number <= first:
                self._renewed(tensor, known if any(tensor is each for each in written) else None)
            value = self.value(tensor)
            gives[value.number] = value
        record.gives = tuple(gives.values())

    def _renewed(self, tensor: Tensor, before: _Numbers | None = None) -> _Numbers:
        """Give what a tensor holds a new number; of memory that was written to, it stays the same memory."""
        self._count += 1
        numbers = _Numbers(self._count, "", self._count) if before is None else before._replace(number=self._count)
        self._numbers.put([tensor], numbers)
        return numbers


class KernelTeller(modes.KernelWatch):  # type: ignore[no-untyped-call]
    """Tell of each kernel inside the block once it has run; of calls, modules and values nothing is known.

    Args:
        told: Gets the records, of which none is kept here.
    """

    def __init__(self, told: Callable[[KernelRecord], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with DisableTorchFunction():
            record = kernel_record(func, args, kwargs, out)
            if record is None:
                return out
            record.reads = tuple(map(_unnumbered, kernels.tensors_in(*args, *kwargs.values())))
            record.gives = tuple(map(_unnumbered, kernels.tensors_in(out)))
        self._told(record)
        return out


def kernel_record(
    kernel: Any, args: Any, kwargs: Any, out: Any, low: torch.dtype = torch.float32
) -> KernelRecord | None:
    """Say of a kernel what it says itself, its values left out; nothing of views and fresh memory.

    Args:
        kernel: The kernel.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
        low: What FP32 stands for under emulation.
    """
    is_free = kernels.is_free_cast(kernel, args, out)
    if not is_free and (kernels.is_view(kernel) or kernels.is_allocation(kernel) or kernel.namespace == "prim"):
        return None  # the last of them asks fake tensors for their device
    by, formats = around()
    flops, product = kernels.flops(kernel, args, kwargs, out), kernels.product(kernel, args)
    given, results = kernels.tensors_in(*args, *kwargs.values()), kernels.tensors_in(out)
    effect = "free cast" if is_free else _effect(kernel, args, out, is_product=flops is not None or product is not None)
    stands_for = low if by == "emulation" and effect != "cast" else None
    return KernelRecord(
        kernel=kernel,
        name=kernel_name(kernel),
        effect=effect,
        constants=tuple(each for each in (*args, *kwargs.values()) if isinstance(each, (int, float))),
        by=by,
        formats=formats,
        num_bytes=0 if is_free else kernels.moved_bytes(kernel, given, results, stands_for),
        flops=flops,
        sizes=None if product is None else product[0],
    )


def _effect(kernel: Any, args: Any, out: Any, *, is_product: bool) -> KernelEffect:
    if kernels.is_cast(kernel, args, out):
        return "cast"
    if kernels.is_rounding(kernel, args, out):
        return "rounding"
    if kernels.is_rearranging(kernel):
        return "rearranging"
    return "product" if is_product else "other"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple((values_of(tensor) if tensor.is_nested else tensor).shape)


def _unnumbered(tensor: Tensor) -> Value:
    return Value(0, tensor.dtype, _shape(tensor))
