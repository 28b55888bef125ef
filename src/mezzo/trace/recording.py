"""The recorder, which fills the table of a pass as calls and kernels run, without waiting for a device."""

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
from mezzo.trace.function_calls import Decider, Location, Locator, doing_now, kernel_name
from mezzo.trace.kernels import Storages
from mezzo.trace.measure import Operand
from mezzo.trace.probes import Probe
from mezzo.trace.table import NO_CALL, CallRecord, KernelEffect, KernelRecord, NodeName, Value, WatchedPass

_NOTHING: Final[Mapping[int, tuple[Rule, str]]] = MappingProxyType({})

#: Gets a call before it runs: its record, the function, its arguments. It may return a function that gets the result.
Called = Callable[[CallRecord, Any, Any, Any], Callable[[Any], None] | None]


@dataclass(slots=True)
class KernelTensors:
    """The tensors of a kernel that has just run, which the table does not keep.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        before: Its operands as they were before: copies of those that it writes to.
        out: What it returned.
    """

    args: Any
    kwargs: Any
    before: list[Operand]
    out: Any


class _Numbers(NamedTuple):
    """The value that a storage holds now: its number, its role, and the number of the memory."""

    number: int
    role: str
    memory: int


class PassRecorder:
    """Fills the table of a forward pass, and of backward passes from it.

    Args:
        policy: The policy that decides about calls.
        ruled: Rule and path of each parameter and buffer that a rule names, by ``id``.
        where: Tracks the location of the pass.
        probes: The measurements to make at kernels.
        called: Gets each call.
        ran: Gets each kernel, with its tensors; those that a kernel writes to are copied for it.

    Attributes:
        recorded: The table as it is now, in which no probe is fetched yet.
        kernel_mode: The mode that records kernels. A program may enter it alone, to record no calls.
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
        self._open: dict[int, Callable[[Any], None] | None] = {}  # by the location's id: what gets the call's result
        self._numbers, self._count = Storages[_Numbers](), 0
        self._measured: list[tuple[KernelRecord, Probe, Tensor]] = []

    # The pass -----------------------------------------------------------------------------------------

    def learn(self, model: nn.Module, inputs: Any = (), prefix: str = "") -> None:
        """Name parameters, buffers and inputs, before a forward pass.

        Args:
            model: The model.
            inputs: Its arguments.
            prefix: The prefix of its paths in names.
        """
        self.where.learn_owners(model)
        named: list[tuple[str, str, Tensor]] = [
            ("parameter", prefix + path, tensor) for path, tensor in model.named_parameters()
        ]
        named += [("buffer", prefix + path, tensor) for path, tensor in model.named_buffers()]
        named += [("input", f"input {path}", tensor) for path, tensor in each_tensor(inputs)]
        for role, name, tensor in named:
            if self._numbers.get(tensor) is None:
                self._count += 1
                self._numbers.put([tensor], _Numbers(self._count, role, self._count))
                self.recorded.names[self._count] = name

    def hooked(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which the recorder knows which module of the models runs."""
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
        for measurement in self._measured:
            of_devices.setdefault(measurement[2].device, []).append(measurement)
        for measured in of_devices.values():
            numbers = torch.cat([numbers for *_, numbers in measured]).tolist()
            start = 0
            for record, probe, row in measured:
                record.probes[probe.name] = probe.read(numbers[start : start + row.numel()])
                start += row.numel()
        self._measured.clear()
        return self.recorded

    def value(self, tensor: Tensor) -> Value:
        """Return the value that a tensor holds now."""
        numbers = self._numbers.get(tensor)
        if numbers is None:
            self._count += 1
            numbers = _Numbers(self._count, "", self._count)
            self._numbers.put([tensor], numbers)
        return Value(numbers.number, tensor.dtype, _shape(tensor), numbers.role, numbers.memory)

    # Calls --------------------------------------------------------------------------------------------

    def _begin(self, function: Any, args: Any, kwargs: Any) -> Location:
        """Record a call, and open its location: what runs until it is left belongs to the call."""
        with DisableTorchFunction():
            before = self.where.now
            # A region above this mode may have decomposed the function that the user's code calls.
            by, functions = doing_now()[0], [note.about for note in notes() if note.event == "op"]
            call = self._decider.call(functions[-1] if functions else function, args, kwargs, before.path)
            call.hidden = by in ("cast", "quantised")
            if by == "region":  # the model's own code entered it, above this mode
                call.cause = "a region that the model's own code enters decides here"
            self._enter(call, before.module)
            location = Location(before.module, call)
            self.where.enter(location)
            if self._called is not None:
                self._open[id(location)] = self._called(call, function, args, kwargs)
        return location

    def _enter(self, call: CallRecord, module: str) -> None:
        call.number, call.module, call.is_backward = len(self.recorded.calls), module, self.where.is_backward
        call.line = self.where.line()
        self.recorded.calls.append(call)

    def _finish(self, location: Location, out: Any) -> None:
        """Record the dtypes that a call returns."""
        call = location.call
        assert call is not None
        with DisableTorchFunction():
            self._leave(call, out)
            on_result = self._open.pop(id(location), None)
            if on_result is not None:
                on_result(out)

    @staticmethod
    def _leave(call: CallRecord, out: Any) -> None:
        call.has_returned = True
        call.returns = tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors(out)))

    # Kernels ------------------------------------------------------------------------------------------

    def _before(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Return the state of the probes and the operands, before a kernel runs; ``None`` if nothing needs them."""
        if self._ran is None and not self._probes:
            return None
        with DisableTorchFunction():
            states = [probe.begin(kernel, args, kwargs) for probe in self._probes]
            return states, [] if self._ran is None else measure.operands(kernel, args, kwargs)

    def _kernel(self, kernel: Any, args: Any, kwargs: Any, out: Any, before: Any) -> None:
        """Record a kernel."""
        with DisableTorchFunction():
            if kernels.is_allocation(kernel):
                for tensor in kernels.tensors_in(out):
                    self.recorded.allocated[self._renewed(tensor).memory] = self.where.now.call or NO_CALL
            record = kernel_record(kernel, args, kwargs, out, self._dtype)
            if record is None:
                return
            self._complete(record, args, kwargs, out)
            self.recorded.add(record)
            if before is None:
                return
            states, read = before
            for probe, state in zip(self._probes, states, strict=True):
                if probe.wants(record) and (numbers := probe.measure(record, args, kwargs, out, state)) is not None:
                    self._measured.append((record, probe, numbers))
            if self._ran is not None:
                self._ran(record, KernelTensors(args, kwargs, read, out))

    def _complete(self, record: KernelRecord, args: Any, kwargs: Any, out: Any) -> None:
        """Complete a kernel's record: its phase, node, location and call, and the values that it reads and writes."""
        where, kernel = self.where, record.kernel
        record.number, record.is_inner, record.next_node = len(self.recorded.kernels), where.is_inner, next_number()
        if where.is_backward:
            record.phase = "backward" if where.is_gradient else "recomputed"
            node = current_node() if record.phase == "backward" else None
            if node is not None:
                record.node = NodeName(node.name(), number_of(node), isinstance(node, BackwardCFunction))
        location = self._location()
        record.module = location.module
        if location.call is not None:
            record.call = location.call
        elif record.phase == "forward" and record.by in ("region", "other"):
            # No torch function runs: the kernel is of a C++ extension, or of a scripted function.
            record.call = self._decider.call(kernel, args, kwargs, location.path)
            self._enter(record.call, location.module)
            record.call.op = record.name
            self._leave(record.call, out)
        if location.call is not None and any(note.event == "widened" for note in notes()):
            reason = f"no kernel in {location.call.low_dtype} here"
            location.call.decision = Decision(treatment="fp32", rule=None, reason=reason, source="torch")
        self._number(record, args, kwargs, out)

    def _location(self) -> Location:
        """Return the location of a kernel; those of a backward pass inside emulation have that of emulation's node."""
        nodes = (note.about for note in reversed(notes()) if isinstance(note.about, BackwardCFunction))
        node = next(nodes, None) if self.where.is_backward else None
        return self.where.of_kernel() if node is None else self.where.of_node(node)

    def _number(self, record: KernelRecord, args: Any, kwargs: Any, out: Any) -> None:
        """Record the values that a kernel reads, and new values for the tensors that it writes."""
        record.reads = tuple(map(self.value, kernels.tensors_in(*args, *kwargs.values())))
        written_tensors: list[Tensor] = []
        for index, name in kernels.written_places(record.kernel):
            written_tensors += kernels.tensors_in(args[index] if index < len(args) else kwargs.get(name))
        first, gives = self._count, dict[int, Value]()
        for tensor in (*written_tensors, *kernels.tensors_in(out)):
            numbers = self._numbers.get(tensor)
            if numbers is None or numbers.number <= first:
                self._renewed(tensor, numbers if any(tensor is target for target in written_tensors) else None)
            value = self.value(tensor)
            gives[value.number] = value
        record.gives = tuple(gives.values())

    def _renewed(self, tensor: Tensor, previous: _Numbers | None = None) -> _Numbers:
        """Return a new value's number for a tensor, and store it.

        Args:
            tensor: The tensor.
            previous: Its numbers before, if a kernel wrote to it: its memory stays the same.
        """
        self._count += 1
        numbers = _Numbers(self._count, "", self._count) if previous is None else previous._replace(number=self._count)
        self._numbers.put([tensor], numbers)
        return numbers


class KernelTeller(modes.KernelWatch):  # type: ignore[no-untyped-call]
    """Passes on a record of each kernel inside the block, once it has run, without call, module and values.

    Args:
        on_kernel: Gets the records.
    """

    def __init__(self, on_kernel: Callable[[KernelRecord], None]) -> None:
        super().__init__()
        self._on_kernel = on_kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with DisableTorchFunction():
            record = kernel_record(func, args, kwargs, out)
            if record is None:
                return out
            record.reads = tuple(map(_unnumbered, kernels.tensors_in(*args, *kwargs.values())))
            record.gives = tuple(map(_unnumbered, kernels.tensors_in(out)))
        self._on_kernel(record)
        return out


def kernel_record(
    kernel: Any, args: Any, kwargs: Any, out: Any, stands_for: torch.dtype = torch.float32
) -> KernelRecord | None:
    """Return a kernel's record without values and location; ``None`` for views and allocations.

    Args:
        kernel: The kernel.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
        stands_for: The dtype that FP32 stands for under emulation.
    """
    is_free = kernels.is_free_cast(kernel, args, out)
    if not is_free and (kernels.is_view(kernel) or kernels.is_allocation(kernel) or kernel.namespace == "prim"):
        return None  # a prim kernel asks fake tensors for their device
    by, formats = doing_now()
    flops, product = kernels.flops(kernel, args, kwargs, out), kernels.product(kernel, args)
    operands, results = kernels.tensors_in(*args, *kwargs.values()), kernels.tensors_in(out)
    effect = "free cast" if is_free else _effect(kernel, args, out, is_product=flops is not None or product is not None)
    emulated = stands_for if by == "emulation" and effect != "cast" else None
    return KernelRecord(
        kernel=kernel,
        name=kernel_name(kernel),
        effect=effect,
        constants=tuple(value for value in (*args, *kwargs.values()) if isinstance(value, (int, float))),
        by=by,
        formats=formats,
        num_bytes=0 if is_free else kernels.moved_bytes(kernel, operands, results, emulated),
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
