"""A watched pass as a table: a record for each call of a torch function, and one for each kernel, in their order.

Each write makes a new value, which has a number of its own. So the records tell, once the pass is over, which kernel
made a value and which read it: :meth:`WatchedPass.maker`, :meth:`WatchedPass.readers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch

from mezzo.policy import Decision
from mezzo.tensors import dtype_name
from mezzo.trace.kernels import Shape

#: ``recomputed``: a checkpoint runs a part of the forward pass again, inside the backward pass.
KernelPhase = Literal["forward", "recomputed", "backward"]
#: Views and allocations of memory make no record. ``free cast``: the high half of a weight in halves is read, which
#: moves nothing. ``rounding``: integers become low numbers. ``rearranging``: elements are copied in another order, and
#: nothing is computed.
KernelEffect = Literal["cast", "free cast", "rounding", "rearranging", "product", "other"]
#: What mezzo does around a kernel: see :func:`~mezzo.trace.function_calls.around`.
Doing = Literal["emulation", "cast", "quantised", "buffer", "region", "other"]

#: Effects that keep the numbers that a kernel reads, or round them.
HANDS_ON: Final[frozenset[KernelEffect]] = frozenset({"cast", "free cast", "rearranging"})


class Value(NamedTuple):
    """The numbers of a tensor, from one write to the next.

    Attributes:
        number: Its own; views share their base's.
        dtype: The format in which they are read or written.
        shape: The shape in which they are.
        role: ``parameter``, ``buffer`` or ``input`` for a value from before the pass, whose path is in
            :attr:`WatchedPass.names`; empty for others.
        memory: The number of the memory, which stays the same when kernels write in place.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    role: str = ""
    memory: int = 0


class NodeName(NamedTuple):
    """An autograd node.

    Attributes:
        name: The name of its class.
        number: Its sequence number.
        is_custom: Whether a program's ``autograd.Function`` made it.
    """

    name: str
    number: int
    is_custom: bool


@dataclass(slots=True, eq=False, kw_only=True)
class CallRecord:
    """One call of a torch function.

    Attributes:
        op: The op's base name.
        decision: What the policy decided.
        low_dtype: Name of the policy's compute dtype.
        argument_dtypes: Names of the dtypes of the arguments that hold fractions.
        goes_back: Whether FP32 results are cast back to the compute dtype: a parameter rule holds, without autocast.
        cause: Why the policy does not reach this call, if it does not.
        written: Names of the dtypes of the tensors that it writes to, which they keep; ``None`` where it returns new
            ones.
        number: The number of the call in the pass; -1 for :data:`NO_CALL`.
        module: The module that calls.
        line: The user's line.
        hidden: Whether mezzo itself made the call, to cast: it is no op of the model's.
        is_backward: Whether the backward pass had begun: a checkpoint recomputes it, or it computes a gradient.
        has_returned: Whether it has returned without an error.
        returns: Names of the dtypes of the tensors that it returned.
    """

    op: str
    decision: Decision
    low_dtype: str
    argument_dtypes: tuple[str, ...] = ()
    goes_back: bool = False
    cause: str = ""
    written: tuple[str, ...] | None = None
    number: int = -1
    module: str = ""
    line: str | None = None
    hidden: bool = False
    is_backward: bool = False
    has_returned: bool = False
    returns: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The rule or the reason that decided about the call."""
        return f"rule {self.decision.rule}" if self.decision.rule else self.cause or self.decision.reason

    @property
    def is_conversion(self) -> bool:
        """Whether the call is a conversion: ``x.float()``."""
        return self.op in _CONVERSIONS


#: The call of kernels that ran outside of any call.
NO_CALL: Final = CallRecord(
    op="", decision=Decision(treatment="native", rule=None, reason="", source="op table"), low_dtype="", hidden=True
)
_CONVERSIONS: Final = frozenset("to float half bfloat16 double type type_as to_copy _to_copy".split())


@dataclass(slots=True, eq=False, kw_only=True)
class KernelRecord:
    """One kernel that has run.

    Attributes:
        kernel: The kernel itself, of ``torch.ops``.
        name: Its base name: ``softmax`` for ``aten::_softmax``.
        effect: What it does.
        constants: Its arguments that are plain numbers and truth values, in their order.
        by: What mezzo does around it.
        formats: Formats of the quantised operands of the product around it.
        num_bytes: What it reads and writes; under emulation FP32 tensors count as the format that they stand for.
        flops: A product's operations, and the format of its operands.
        sizes: A product's dimensions by name.
        reads: The values that it reads, in their order.
        gives: The values that it writes in place, and those that it returns beside them.
        number: The number of the kernel in the pass.
        phase: When it ran.
        is_inner: Whether ``torch.autograd.grad`` ran it inside the forward pass.
        call: The call that it belongs to, in the backward pass that of its autograd node. Where no torch function
            runs, a C++ extension's kernel has a call of its own, and others have :data:`NO_CALL`.
        module: The module that it belongs to; in the backward pass the module of its node.
        node: The running autograd node, in the backward pass.
        next_node: The number of the next node that is made.
        probes: The results of probes, by their names, once they are fetched.
    """

    kernel: Any
    name: str
    effect: KernelEffect
    constants: tuple[int | float | bool, ...]
    by: Doing
    formats: tuple[str, ...]
    num_bytes: int
    flops: tuple[int, torch.dtype] | None
    sizes: Shape | None
    reads: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()
    number: int = -1
    phase: KernelPhase = "forward"
    is_inner: bool = False
    call: CallRecord = NO_CALL
    module: str = ""
    node: NodeName | None = None
    next_node: int = 0
    probes: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """The op as the user's code has it."""
        return self.call.op or self.name


class WatchedPass:
    """The table of a pass.

    Attributes:
        calls: The calls, in the order in which they began.
        kernels: The kernels, in their order.
        names: The names of values from before the pass: a parameter's path, ``input 0``.
        allocated: The call in which memory was allocated, by :attr:`Value.memory`.
        modules_run: Paths of the modules that have been called.
    """

    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self.kernels: list[KernelRecord] = []
        self.names: dict[int, str] = {}
        self.allocated: dict[int, CallRecord] = {}
        self.modules_run: set[str] = set()
        self._of: dict[CallRecord, list[KernelRecord]] = {}
        self._makers: dict[int, KernelRecord] = {}
        self._readers: dict[int, list[KernelRecord]] = {}

    def add(self, record: KernelRecord) -> None:
        """Append a kernel."""
        self.kernels.append(record)
        self._of.setdefault(record.call, []).append(record)
        self._makers.update((value.number, record) for value in record.gives)
        for number in {value.number for value in record.reads}:
            self._readers.setdefault(number, []).append(record)

    def of(self, call: CallRecord) -> list[KernelRecord]:
        """Return the kernels of a call, of every phase."""
        return self._of.get(call, [])

    def maker(self, value: Value) -> KernelRecord | None:
        """Return the kernel that wrote a value; ``None`` for a value from before the pass."""
        return self._makers.get(value.number)

    def readers(self, value: Value) -> list[KernelRecord]:
        """Return the kernels that read a value, or a view of it."""
        return self._readers.get(value.number, [])

    def role_of(self, value: Value) -> str:
        """Return the role of a value: a ``parameter``, a ``buffer``, an ``activation`` or a ``gradient``.

        A cast of a parameter counts as one; so does a buffer that was written to.
        """
        maker = self.maker(value)
        while not value.role and maker is not None and maker.effect in ("cast", "free cast"):
            value, is_half = maker.reads[0], maker.effect == "free cast"
            maker = self.maker(value)
            if is_half and not value.role:
                return "parameter"
        if value.role:
            return "activation" if value.role == "input" else value.role
        first = next(iter([maker] if maker is not None else self.readers(value)), None)
        return "gradient" if first is not None and first.phase == "backward" else "activation"


def flops_by_format(kernels: Iterable[KernelRecord]) -> Counter[str]:
    """Return the operations of products by the format of their operands.

    Those that were computed in FP32 from rounded operands count as ``emulated``. A product inside a cast, such as the
    rotation before an operand is quantised, is none of the model's, and does not count.
    """
    totals = Counter[str]()
    for record in kernels:
        if record.flops is not None and record.by != "cast":
            totals["emulated" if record.by == "emulation" else dtype_name(record.flops[1])] += record.flops[0]
    return totals


def low_share(flops: Mapping[str, int], low_dtypes: Iterable[torch.dtype]) -> float:
    """Return the share of the low formats, emulation in them included; 0 where there was no product."""
    names = {"emulated", *map(dtype_name, low_dtypes)}
    return sum(amount for name, amount in flops.items() if name in names) / max(1, sum(flops.values()))
