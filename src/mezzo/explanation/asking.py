"""What an explanation asks the table of a watched pass: rows, casts and whose they are, products, what they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from mezzo.explanation.rows import Cast, Misaligned, Product, Row, tallied
from mezzo.tensors import CASTABLE, dtype_name, has_fraction
from mezzo.trace.kernels import factors, multiple_of
from mezzo.trace.measure import LostIntegers
from mezzo.trace.table import HANDS_ON, CallRecord, KernelRecord, Value, WatchedPass

_CASTABLE: Final = frozenset(map(dtype_name, CASTABLE))
#: Nodes of casts; the other one is of a weight in halves.
_OF_CASTS: Final = frozenset({"ToCopyBackward0", "LazyCloneBackward0"})


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """One cast of the forward pass, with that of its gradient.

    Attributes:
        by: Whose cast it is: the policy's, the model's own code's, torch's inside a function, or emulation's.
        cast: The cast.
    """

    by: str
    cast: KernelRecord


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


#: Integers that a product reads, before them its module, op and line.
IntegerRead: TypeAlias = tuple[str, str, str | None, Integers]


@dataclass(slots=True)
class _CallSeen:
    """What the kernels of one call were given, so far.

    Attributes:
        inputs: Names of the dtypes that kernels read from outside the call.
        converted: Names of the dtypes of arguments that were only cast.
        kernels: Base names of the kernels that ran.
        formats: Formats of quantised operands.
        is_emulated: Whether a product was computed in FP32 from rounded operands.
        memory: What the call made by itself.
        has_run: Whether any kernel computed or converted something, in the forward pass.
    """

    inputs: dict[str, None] = field(default_factory=dict)
    converted: dict[str, None] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    formats: tuple[str, ...] = ()
    is_emulated: bool = False
    memory: set[int] = field(default_factory=set)
    has_run: bool = False

    @property
    def computes_in(self) -> tuple[str, ...]:
        """Names of the dtypes in which the call computes; of a conversion, the dtype before it."""
        return self.formats or tuple(self.inputs if self.kernels or self.is_emulated else self.converted)


class Asked:
    """The answers of one pass.

    Args:
        table: The pass.
        dtype: The policy's compute dtype, as which emulated products count.
        stored: The buffers whose integers were rounded where they are stored, by path.

    Attributes:
        accounts: Who made each cast.
        inner_ops: The kernels of each op, by module.
        rows: Every op that read or made floating numbers in the forward pass, in the order of first use.
        products: The products of the forward pass, those with the most operations first.
    """

    def __init__(self, table: WatchedPass, dtype: torch.dtype, stored: Mapping[str, LostIntegers]) -> None:
        self.table, self._dtype, self._stored = table, dtype, stored
        self.accounts: dict[KernelRecord, Account] = {}
        self.inner_ops: dict[tuple[str, str], set[str]] = {}
        self._inside: dict[CallRecord, _CallSeen] = {}
        numbered: dict[int, Account] = {}
        for record in table.kernels:
            if record.effect in ("cast", "free cast"):
                self.accounts[record] = self._account(record, numbered)
            if record.effect != "free cast":
                self._add_kernel(record)
        self.rows, self.products = tallied(self._rows()), self._products()

    def _add_kernel(self, record: KernelRecord) -> None:
        """Add a kernel to its call: what the kernel reads from outside the call is what the call computes in."""
        inside = self._inside.setdefault(record.call, _CallSeen())
        is_emulated, is_forward = record.by == "emulation", record.phase == "forward"
        outside = [value for value in record.reads if not self._is_made_by(record.call, value.memory)]
        names = dict.fromkeys(dtype_name(value.dtype) for value in outside if has_fraction(value.dtype))
        if is_forward:
            inside.has_run = True
            inside.formats = inside.formats or record.formats
            if record.effect == "cast":
                inside.is_emulated |= is_emulated
                (inside.inputs if is_emulated else inside.converted).update(names)
            else:
                inside.kernels.add(record.name)
                inside.inputs.update(names)
        if (is_emulated or not outside) if record.effect == "cast" else not record.kernel._schema.is_mutable:
            inside.memory |= {value.memory for value in record.gives}

    def _is_made_by(self, call: CallRecord, memory: int) -> bool:
        return memory in self._inside.get(call, _CallSeen()).memory or self.table.allocated.get(memory) is call

    def _account(self, record: KernelRecord, numbered: dict[int, Account]) -> Account:
        """Return whose cast a kernel is: of emulation, the policy, the model's own code, or torch inside a function."""
        call, node = record.call, record.node
        if record.by == "emulation":
            return Account("emulation", record)
        if node is not None:
            # The gradient of a cast is cast back on the same account; others follow from mixed dtypes.
            of_cast = numbered.get(node.number) if node.name in _OF_CASTS else None
            return of_cast or Account("model" if node.is_custom else "torch", record)
        if record.by in ("cast", "quantised") or (call.number >= 0 and (call.hidden or self._asks_for(record))):
            by = "policy"
        else:
            by = "model" if call.number < 0 or call.is_conversion else "torch"
        account = Account(by, record)
        # Autograd numbers the node of a cast just before the kernel runs. A cast without a node comes after the owner
        # of the last number, which therefore is not overwritten.
        numbered.setdefault(record.next_node - 1, account)
        return account

    def _asks_for(self, record: KernelRecord) -> bool:
        """Whether a cast of an argument is what the policy's decision about its call asks for."""
        call, result_dtype = record.call, record.gives[0].dtype
        if call.is_conversion or self._is_made_by(call, record.reads[0].memory):
            return False
        match call.decision.treatment:
            case "low" | "fp8" | "mxfp8" | "nvfp4":
                return dtype_name(result_dtype) == call.low_dtype
            case "fp32" | "fp32_math":
                return result_dtype == torch.float32
            case treatment:
                return treatment == "promote"

    def _forward(self) -> Iterator[KernelRecord]:
        return (record for record in self.table.kernels if record.phase == "forward")

    # Rows ---------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Row]:
        for call in self.table.calls:
            inside = self._inside.get(call)
            if call.is_backward or call.hidden or not call.has_returned or inside is None or not inside.has_run:
                continue
            if inside.computes_in or any(has_fraction(getattr(torch, name)) for name in call.returns):
                self.inner_ops.setdefault((call.module, call.op), set()).update(inside.kernels)
                yield _row(call, inside)

    # Casts --------------------------------------------------------------------------------------------

    def casts(self) -> tuple[Cast, ...]:
        """Return every conversion between floating dtypes, largest first; those of emulation last."""
        casts = tallied(
            Cast(
                module=record.module,
                op="" if record.call.hidden else record.call.op,
                phase="forward" if record.phase == "forward" else "backward",
                what=self.table.role_of(record.reads[0]),
                before=dtype_name(record.reads[0].dtype),
                after=dtype_name(record.gives[0].dtype),
                by=account.by,
                count=1,
                num_bytes=record.num_bytes,
            )
            for record, account in self.accounts.items()
            if record.effect == "cast"
        )
        return tuple(sorted(casts, key=lambda cast: (cast.by == "emulation", -cast.num_bytes, cast.module)))

    def moved_bytes(self) -> int:
        """Return what all kernels read and write, casts included, without what only emulation does."""
        only_emulated = (record for record, account in self.accounts.items() if account.by == "emulation")
        return sum(record.num_bytes for record in self.table.kernels) - sum(
            record.num_bytes for record in only_emulated
        )

    # Products -----------------------------------------------------------------------------------------

    def _multiplying(self) -> Iterator[tuple[KernelRecord, str]]:
        """Yield the products of the forward pass, and the format that each reads; no rotation, which is a cast's."""
        for record in self._forward():
            if record.by != "cast" and (record.flops is not None or record.sizes is not None):
                dtype = next(value.dtype for value in record.reads if value.dtype.is_floating_point)
                yield record, dtype_name(self._dtype if record.by == "emulation" else dtype)

    def misaligned(self) -> tuple[Misaligned, ...]:
        """Return the products with a dimension that tensor cores do not like."""
        products = []
        for record, name in self._multiplying():
            multiple, shape = multiple_of(getattr(torch, name)), record.sizes or ()
            if multiple is not None and any(size % multiple for _, size in shape):
                location: dict[str, Any] = {"module": record.module, "op": record.call.op, "line": record.call.line}
                products.append(Misaligned(**location, shape=shape, dtype=name, multiple=multiple, count=1))
        return tallied(products)

    def _products(self) -> tuple[Product, ...]:
        products = []
        for record, name in self._multiplying():
            if record.flops is not None:
                dtype, why = next(iter(record.formats), name), record.call.why
                location: dict[str, Any] = {"module": record.module, "op": record.op, "line": record.call.line}
                products.append(Product(**location, dtype=dtype, count=1, flops=record.flops[0], why=why))
        return tuple(sorted(tallied(products), key=lambda product: -product.flops))

    def integers(self) -> Counter[IntegerRead]:
        """Count the exact integers that products read rounded to a low format, by module, op and line."""
        of_buffers = ((number, self._stored.get(name)) for number, name in self.table.names.items())
        labels: dict[int, Integers] = {
            number: Integers(lost, self.table.names[number]) for number, lost in of_buffers if lost is not None
        }
        counts = Counter[IntegerRead]()
        for record in self._forward():
            if record.flops is not None:
                for read in {labels[value.number] for value in _factors(record) if value.number in labels}:
                    counts[record.module, record.op, record.call.line, read] += 1
            elif record.effect in HANDS_ON or record.effect == "rounding":
                labels_read = (labels[value.number] for value in record.reads if value.number in labels)
                label: Integers | None = next(labels_read, None)
                lost = record.probes.get("integers")
                if label is None and lost is not None:
                    by = self.accounts[record].by if record.effect == "cast" else "model"
                    label = Integers(lost, by, record.call.line if by == "model" else None)
                if label is not None:
                    labels.update((value.number, label) for value in record.gives)
        return counts


def _factors(record: KernelRecord) -> Sequence[Value]:
    return factors(record.kernel, record.reads)


def _row(call: CallRecord, inside: _CallSeen) -> Row:
    decision = call.decision
    return Row(
        module=call.module,
        op=call.op,
        given=call.argument_dtypes,
        computes_in=inside.computes_in,
        returns=call.returns,
        count=1,
        treatment=decision.treatment,
        rule=None if decision.rule is None else str(decision.rule),
        reason=decision.reason,
        source=decision.source,
        line=call.line,
        emulated=inside.is_emulated,
        disagreement=_disagreement(call, inside),
    )


def _disagreement(call: CallRecord, inside: _CallSeen) -> str:
    """Return in words how the measured precision differs from the decided one; empty where it does not."""
    if call.is_conversion:
        return ""  # the model's own code names the dtype
    ins, argument_dtypes = [
        [name for name in names if name in _CASTABLE] for names in (inside.computes_in, call.argument_dtypes)
    ]
    outs = [name for name in call.returns if name in _CASTABLE]
    if call.written is not None:  # an in-place op reads its target, and rounds to its dtype, whatever it computes in
        ins, outs = [name for name in ins if name not in call.written], []
    match call.decision.treatment:
        case "low":
            wanted, agrees = call.low_dtype, not set(ins) - {call.low_dtype} and not inside.formats
        case "fp8" | "mxfp8" | "nvfp4" as treatment:
            wanted, agrees = treatment, bool(inside.formats)
        case "fp32":
            returned = {"float32", call.low_dtype} if call.goes_back else {"float32"}
            wanted, agrees = "float32", not set(ins) - {"float32"} and not (argument_dtypes and set(outs) - returned)
        case "fp32_math":
            wanted = f"float32 inside, {argument_dtypes[0] if argument_dtypes else 'float32'} out"
            agrees = not set(ins) - {"float32"} and not (argument_dtypes and set(outs) - {argument_dtypes[0]})
        case "promote":
            wanted, agrees = "one dtype", len(set(ins)) <= 1
        case _:
            wanted, agrees = "the dtypes it is given", not (argument_dtypes and set(ins) - set(argument_dtypes))
    if agrees:
        return ""
    inner = sorted(inside.kernels - {call.op})
    parts = f"; its kernels: {', '.join(inner)}" if inner else ""
    because = (call.cause or "torch runs it as one C++ function, whose parts it casts by itself") + parts
    return f"decided: {wanted}; measured: {'+'.join(ins)} in, {'+'.join(outs) or 'none'} out; {because}"
