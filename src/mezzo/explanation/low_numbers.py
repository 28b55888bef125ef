"""What sixteen bits do not hold: sums by hand, positions, filter banks, losses, derivatives, codes.

Each kind of finding is one function over the table of a pass. What it says was measured at the kernels: how far their
numbers are from the same kernel's in FP64, as so many of FP32's bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from mezzo.errors import PolicyError
from mezzo.explanation.rows import Finding, FindingKind, folded, format_text
from mezzo.policy import Rule
from mezzo.policy.rules import both, exact
from mezzo.tensors import LOW, dtype_name, has_fraction, tensors
from mezzo.trace.function_calls import LOSS, place_text
from mezzo.trace.probes import Distinct, Extent, Probe, Ratio, Total, is_measurable
from mezzo.trace.table import HANDS_ON, KernelRecord, Value, WatchedPass

#: A sum by hand is told where it is off by more than this share of its terms' magnitudes, and is so long: a quarter of
#: the integers that the format holds.
_OFF: Final = 2.0**-6
#: Noise that is worth a word, in dB: five bits are left. A low product has 50 or more.
_QUIET_DB: Final = 30.0
#: Fewer rows than these say little about a place; half of the places are to be quiet then, and not a tenth.
_FEW_ROWS: Final = 8

_POSITIONS: Final = frozenset("arange linspace range logspace".split())
_ADDITIONS: Final = frozenset("aten::add aten::add_ aten::sub aten::sub_".split())
_SCALED: Final = frozenset("add sub rsub mul div true_divide pow neg".split())
_ROUNDS: Final = frozenset("round floor ceil trunc".split())
_ARITHMETIC: Final = frozenset("sub rsub mul div true_divide pow square abs exp expm1 log log1p log2 log10".split())
#: What is sensitive to the small ones among the results of a filter bank.
_MAGNITUDES: Final = frozenset("log log2 log10 log1p abs pow square angle atan2 view_as_complex complex".split())


def has_too_many_positions(record: KernelRecord) -> bool:
    """Whether a kernel makes more positions in a low format than the format has integers: a fact of shapes alone."""
    if record.name not in _POSITIONS or not record.gives or record.gives[0].dtype not in LOW:
        return False
    return math.prod(record.gives[0].shape) > num_integers(record.gives[0].dtype)


def num_integers(dtype: torch.dtype) -> int:
    """Return up to which integer a format holds all: 256 in BF16, 2,048 in FP16."""
    return int(2 / torch.finfo(dtype).eps)


class _Fault(NamedTuple):
    """What was found in one place.

    Attributes:
        kind: Of the finding.
        record: The kernel.
        bits: How many of FP32's bits are lost.
        what: What happens, in words.
        words: What to write in the program; empty where the rule is all there is to write.
        rule: The rule that cures it, too.
    """

    kind: FindingKind
    record: KernelRecord
    bits: int
    what: str
    words: str
    rule: Rule | None = None

    @property
    def place(self) -> str:
        """The line, or where there is none the module and the op: what is told of once."""
        return self.record.call.line or place_text(self.record.module, self.op)

    @property
    def op(self) -> str:
        """The op as the user's code has it."""
        return self.record.call.op or self.record.name


class LowNumbers:
    """Measure in a pass what sixteen bits lose, and say it afterwards.

    Args:
        model: The model.
        table: Returns the table while it is filled.

    Attributes:
        probes: What to measure.
    """

    def __init__(self, model: nn.Module, table: Callable[[], WatchedPass]) -> None:
        self._table, self._fixed, self._num_seen = table, dict[int, bool](), 0
        self._losses = {LOSS}
        for path, module in model.named_modules():
            if re.search(r"(Loss|Criterion)$", type(module).__name__):
                self._losses.add(path)
        self.probes: tuple[Probe, ...] = (
            Total(_is_addition, starts=lambda kernel: kernel._schema.name in _ADDITIONS),
            Distinct(self._makes_positions),
            Ratio(self._is_compared, self._along),
            Extent(self._makes_codes, of_operand=True),
            Difference(),
        )

    def findings(self, told: Iterable[Finding] = ()) -> Iterator[Finding]:
        """Yield what was found; of each line the gravest of the first kind.

        Args:
            told: What is said already, of lines that are left out here.
        """
        table = self._table()
        kinds = (self._sums, self._positions, self._bases, self._criteria, self._derivatives, self._codes)
        lines = {finding.where.rpartition("(")[2].rstrip(")") for finding in told}
        for kind in kinds:
            found: dict[tuple[str, str], _Fault] = {}
            for fault in kind(table):
                key = fault.record.module, fault.place
                if fault.place not in lines and (key not in found or found[key].bits < fault.bits):
                    found[key] = fault
            for fold in folded(
                found.values(), lambda fault: fault.record.module, lambda fault: (fault.place, fault.op)
            ):
                fault = fold.rows[0]
                where = fold.text if len(fold.rows) > 1 else fault.record.module
                rule = _joined([each.rule for each in fold.rows if each.rule is not None])
                lines.add(fault.place)
                place = place_text(where, fault.op, fault.record.call.line)
                cure = ", or ".join(each for each in (fault.words, rule and both(str(rule))) if each)
                text = f"{fault.what}, {fault.bits} of FP32's 24 bits lost: write {cure}"
                yield Finding(kind=fault.kind, where=place, text=text, rule=str(rule or ""))

    def _is_compared(self, record: KernelRecord) -> bool:
        """Whether a kernel is run again in FP64."""
        return self._basis(record) is not None or self._is_loss(record) or _is_derivative(record)

    # Sums by hand --------------------------------------------------------------------------------------

    @staticmethod
    def _sums(table: WatchedPass) -> Iterator[_Fault]:
        """Find chains of additions of one line, each to the result of the last, that nothing else reads."""
        chains: dict[int, list[tuple[KernelRecord, int]]] = {}  # by what they have come to; and where the new term is
        for record in table.kernels:
            if not _is_addition(record) or "total" not in record.probes or len({v.number for v in record.reads}) < 2:
                continue
            chain = [(record, 1)]
            for place, value in enumerate(record.reads[: 1 if record.name == "sub" else 2]):
                before = chains.get(value.number)
                is_same = value.shape == record.gives[0].shape
                if before and is_same and before[-1][0].call.line == record.call.line:
                    chain = chains.pop(value.number)
                    chain.append((record, 1 - place))
                    break
            chains[record.gives[0].number] = chain
        for chain in chains.values():
            first, last = chain[0][0], chain[-1][0]
            dtype = last.gives[0].dtype
            if first.call.line is None or len(chain) < num_integers(dtype) // 4 or _is_stream(table, chain):
                continue
            size = math.prod(last.gives[0].shape)
            exact_sum = first.probes["total"].terms[0]
            magnitude = first.probes["total"].magnitudes[0]
            for record, term in chain:
                times = size / max(1, math.prod(record.reads[term].shape))
                times *= float(record.constants[-1]) if record.constants else 1.0
                exact_sum += record.probes["total"].terms[term] * (-times if record.name == "sub" else times)
                magnitude += record.probes["total"].magnitudes[term] * abs(times)
            result = last.probes["total"].result
            error = abs(result - exact_sum) / magnitude if magnitude else 0.0
            if not error > _OFF:
                continue
            total = table.maker(first.reads[1 - chain[0][1]])
            is_given = total is None or not any(has_fraction(value.dtype) for value in total.reads)
            what = (
                f"{len(chain):,} terms added one by one in {format_text([dtype_name(dtype)])} come to {result:.4g} for "
                f"{exact_sum:.4g}"
            )
            if is_given:  # what is added to it takes its dtype, whatever that was
                words, rule = "total = torch.zeros((), device=x.device) before the first term, in FP32", None
            else:
                made = table.maker(last.reads[chain[-1][1]])
                words = "the sum in FP32, total += term.float()"
                rule = None if made is None or made.kind != "other" or not made.call.op else _op_in_fp32(made)
            yield _Fault("sum by hand", last, _lost(error), what, words, rule)

    # Positions -----------------------------------------------------------------------------------------

    def _makes_positions(self, record: KernelRecord) -> bool:
        """Whether a kernel makes positions in a low format: by itself, or of some by arithmetic with constants."""
        if record.phase != "forward" or not record.gives or record.gives[0].dtype not in LOW:
            return False
        if record.name in _POSITIONS:
            return True
        if record.name == "cumsum":
            return _counts(self._table(), record.reads[0])
        if not (record.kind == "rounding" or record.name in _SCALED):
            return False
        while len(record.reads) == 1:
            maker = self._table().maker(record.reads[0])
            if maker is None or maker.name in _POSITIONS:
                return maker is not None
            if maker.name not in _SCALED and maker.kind not in ("rounding", "rearranging"):
                return False
            record = maker
        return False

    def _positions(self, table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            found = record.probes.get("distinct")
            if found is None or not math.isfinite(found.step) or self._reads_product(table, record):
                continue
            if found.given >= found.exact and found.error < found.step / 2:
                continue
            name = format_text([dtype_name(record.gives[0].dtype)])
            what = (
                f"{found.given:,} of {found.exact:,} positions are different in {name}, up to "
                f"{found.error / found.step:.3g} steps off"
            )
            cure = "torch.arange(n, device=x.device) and all arithmetic with it in FP32, and the cast last"
            if record.name in _POSITIONS:
                cure += "; no rule does it, for the call's own dtype= wins"
            bits = _lost(found.error / (found.step * found.num_all))
            yield _Fault("positions", record, bits, what, cure)

    @staticmethod
    def _reads_product(table: WatchedPass, record: KernelRecord) -> bool:
        """Whether rounded integers go into a product by themselves: then they are lost integers."""
        return record.kind == "rounding" and any(
            reader.kind == "product" for reader in _readers(table, record.gives[0])
        )

    # Filter banks --------------------------------------------------------------------------------------

    def _basis(self, record: KernelRecord) -> int | None:
        """Return which operand of a low product is of no parameter and no input; ``None`` for other kernels."""
        self._learn()
        if record.phase != "forward" or not _is_low_product(record) or not record.gives:
            return None
        places = (0, 1) if record.name in ("convolution", "mm", "bmm", "mv", "linear", "matmul") else (1, 2)
        fixed = [self._fixed.get(value.number, True) for value in record.reads[:3]]
        if len(fixed) <= places[1] or fixed[places[0]] == fixed[places[1]]:
            return None
        return 0 if fixed[places[0]] else 1

    def _learn(self) -> None:
        """Follow which values are of no parameter and no input."""
        kernels = self._table().kernels
        for record in kernels[self._num_seen :]:
            for value in record.reads:
                self._fixed.setdefault(value.number, value.role in ("", "buffer"))
            is_fixed = all(self._fixed[value.number] for value in record.reads)
            is_fixed = is_fixed and torch.Tag.nondeterministic_seeded not in record.kernel.tags
            self._fixed.update((value.number, is_fixed) for value in record.gives)
        self._num_seen = len(kernels)

    def _along(self, record: KernelRecord) -> int:
        """Return the dimension of a result along which the rows of its filter bank lie."""
        operand = self._basis(record)
        if record.name == "convolution":
            return 1
        return -2 if operand == 0 and len(record.gives[0].shape) > 1 else -1

    def _bases(self, table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            ratio = record.probes.get("ratio")
            if ratio is None or self._basis(record) is None or not ratio.places:
                continue
            readers = _readers(table, record.gives[0])
            if readers and not any(reader.name in _MAGNITUDES or _squares(reader) for reader in readers):
                continue
            rows = math.prod(record.gives[0].shape) // len(ratio.places)
            worst = sorted(ratio.places)[len(ratio.places) // (2 if rows < _FEW_ROWS else 10)]
            if not -math.inf < worst < _QUIET_DB:
                continue
            name = format_text([_format(record)])
            num_quiet = sum(place < _QUIET_DB for place in ratio.places)
            what = (
                f"it multiplies by a table of constants in {name}, whose rounding is heard in {num_quiet:,} of "
                f"{len(ratio.places):,} results: signal to noise is {worst:.3g} dB"
            )
            yield _Fault("basis", record, _lost_at(worst), what, *_in_fp32(record))

    # Losses --------------------------------------------------------------------------------------------

    def _is_loss(self, record: KernelRecord) -> bool:
        """Whether a kernel is arithmetic of a loss, in a low format."""
        return (
            record.phase == "forward" and record.module in self._losses and record.name in _ARITHMETIC
            and bool(record.gives) and record.gives[0].dtype in LOW
        )  # fmt: skip

    def _criteria(self, table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            ratio = record.probes.get("ratio")
            if ratio is None or not self._is_loss(record) or not math.isfinite(ratio.whole):
                continue
            name = format_text([dtype_name(record.gives[0].dtype)])
            what = f"the loss computes {record.call.op or record.name} in {name}, {_noise(ratio.whole)}"
            cure = "criterion(output.float(), target)"
            yield _Fault("criterion", record, _lost_at(ratio.whole), what, cure, _op_in_fp32(record))

    # Derivatives ---------------------------------------------------------------------------------------

    @staticmethod
    def _derivatives(table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            if _is_derivative(record) and (ratio := record.probes.get("ratio")) and math.isfinite(ratio.whole):
                name = format_text([_format(record)])
                what = f"a derivative that the forward pass takes is computed in {name}, {_noise(ratio.whole)}"
                yield _Fault("forward derivative", record, _lost_at(ratio.whole), what, *_in_fp32(record))
            if (found := record.probes.get("difference")) is not None:
                dtype = record.gives[0].dtype
                error = float(torch.finfo(dtype).eps) / 2 * found
                if error > _OFF:
                    name, maker = format_text([dtype_name(dtype)]), table.maker(record.reads[0]) or record
                    what = f"differences of neighbours in {name} are 1/{found:.3g} of what is subtracted"
                    yield _Fault("forward derivative", record, _lost(error), what, *_in_fp32(maker))

    # Codes ---------------------------------------------------------------------------------------------

    def _makes_codes(self, record: KernelRecord) -> bool:
        """Whether a kernel makes integers of numbers that a low format held."""
        return self._low_behind(record) is not None

    def _low_behind(self, record: KernelRecord) -> Value | None:
        """Return the low numbers that a kernel makes integers of."""
        is_code = record.kernel is torch.ops.aten._to_copy.default and record.phase == "forward" and bool(record.reads)
        if not is_code or has_fraction(record.gives[0].dtype) or record.gives[0].dtype == torch.bool:
            return None
        value = record.reads[0]
        while value.dtype not in LOW:
            maker = self._table().maker(value)
            if maker is None or not (maker.kind in HANDS_ON or maker.name in _ROUNDS | _SCALED) or not maker.reads:
                return None
            value = maker.reads[0]
        return value

    def _codes(self, table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            value, extent = self._low_behind(record), record.probes.get("extent")
            if value is None or extent is None or not extent.largest > num_integers(value.dtype):
                continue
            maker, source = table.maker(value), record
            while maker is not None:  # the first of what computed low: what it gives is what all others are made of
                source = source if maker.name in _ROUNDS or maker.kind in HANDS_ON else maker
                before = maker.reads[0] if maker.flops is None and maker.reads else None
                is_low = before is not None and (before.dtype in LOW or maker.by == "emulation")
                maker = table.maker(before) if before is not None and is_low else None
            name = format_text([dtype_name(value.dtype)])
            what = (
                f"integers up to {extent.largest:,.0f} are read off numbers in {name}, which holds all up to "
                f"{num_integers(value.dtype):,} only"
            )
            bits = math.ceil(math.log2(extent.largest / num_integers(value.dtype)))
            yield _Fault("codes", record, bits, what, *_in_fp32(source))


class Difference:
    """How much larger the numbers are than the differences of them, where places of one tensor are subtracted."""

    name = "difference"

    def begin(self, kernel: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...] | None:
        """Add up the magnitudes of what is subtracted, which is written to where the kernel is in-place."""
        if kernel._schema.name not in ("aten::sub", "aten::sub_"):
            return None
        read = [each for each in tensors((args, kwargs)) if is_measurable(each) and each.dtype in LOW]
        return (read[0].detach().double().abs().sum(),) if len(read) == 2 else None

    def wants(self, record: KernelRecord) -> bool:
        """Whether a kernel subtracts places of one tensor from others of it, in the forward pass."""
        if record.name != "sub" or record.phase != "forward" or len(record.reads) != 2 or not record.gives:
            return False
        one, other = record.reads
        return one.number == other.number and one.shape == other.shape and record.gives[0].dtype in LOW

    def measure(self, record: KernelRecord, args: Any, kwargs: Any, out: Any, begun: Any) -> Tensor | None:
        """Add up the magnitudes of the differences."""
        return None if begun is None else torch.stack([*begun, out.detach().double().abs().sum()])

    def read(self, numbers: list[float]) -> float | None:
        """Divide; nothing where all are equal."""
        return numbers[0] / numbers[1] if numbers[1] else None


# What a kernel is -------------------------------------------------------------------------------------


def _is_addition(record: KernelRecord) -> bool:
    return (
        record.name in ("add", "sub") and record.phase == "forward" and len(record.reads) == 2
        and bool(record.gives) and record.gives[0].dtype in LOW
    )  # fmt: skip


def _is_low_product(record: KernelRecord) -> bool:
    return record.flops is not None and (record.flops[1] in LOW or record.by == "emulation")


def _is_derivative(record: KernelRecord) -> bool:
    """Whether it is a low product of ``torch.autograd.grad`` inside the forward pass."""
    return record.is_inner and record.phase == "backward" and _is_low_product(record)


def _is_stream(table: WatchedPass, chain: list[tuple[KernelRecord, int]]) -> bool:
    """Whether what has come together is read by more than the next addition, as a residual stream is."""
    read = 0
    for (record, _), (after, _) in itertools.pairwise(chain):
        others = (each for each in table.readers(record.gives[0]) if each is not after and each.phase == "forward")
        read += any(has_fraction(value.dtype) for each in others for value in each.gives)
    return 2 * read > len(chain)


def _counts(table: WatchedPass, value: Value) -> bool:
    """Whether numbers are a mask: truth values or integers, or made of some by a cast."""
    maker = table.maker(value)
    return not has_fraction(value.dtype) or (maker is not None and (maker.kind == "rounding" or maker.name == "ones"))


def _squares(record: KernelRecord) -> bool:
    return record.name == "mul" and len({value.number for value in record.reads}) == 1 < len(record.reads)


def _readers(table: WatchedPass, value: Value) -> list[KernelRecord]:
    """Return what reads numbers in the forward pass, behind what hands them on."""
    found, waiting, seen = list[KernelRecord](), [value], {value.number}
    while waiting:
        for reader in table.readers(waiting.pop()):
            if reader.phase != "forward":
                continue
            if reader.kind not in HANDS_ON:
                found.append(reader)
                continue
            waiting += [each for each in reader.gives if each.number not in seen]
            seen.update(each.number for each in reader.gives)
    return found


# What it costs, and what to write ---------------------------------------------------------------------


def _lost(error: float) -> int:
    """Return how many of FP32's 24 bits a relative error takes."""
    return min(24, max(0, round(24 + math.log2(error)))) if error > 0 else 0


def _lost_at(ratio: float) -> int:
    return _lost(10 ** (-ratio / 20))


def _noise(ratio: float) -> str:
    return f"signal to noise {ratio:.3g} dB"


def _format(record: KernelRecord) -> str:
    """Return the format of a product's operands: under emulation the one that FP32 stands for."""
    assert record.flops is not None
    return record.call.low if record.by == "emulation" else dtype_name(record.flops[1])


def _in_fp32(record: KernelRecord) -> tuple[str, Rule | None]:
    """Return what keeps the module of a kernel in FP32, in words or as a rule."""
    if record.module in ("", LOSS):
        return f"a function under @mezzo.fp32 for this {record.call.op or record.name}", None
    return "", Rule("fp32", module=exact(record.module))


def _op_in_fp32(record: KernelRecord) -> Rule | None:
    """Return the rule that keeps the op of a kernel in FP32 where it runs; ``None`` where no rule names the op."""
    with suppress(PolicyError):
        module = None if record.module in ("", LOSS) else exact(record.module)
        return Rule("fp32", op=record.call.op or record.name, module=module)
    return None


def _joined(rules: list[Rule]) -> Rule | None:
    """Return one rule for those of alike modules."""
    paths = list(dict.fromkeys(rule.module for rule in rules if rule.module is not None))
    if len(paths) < 2:
        return next(iter(rules), None)
    return replace(rules[0], module=re.sub(r"\{[^}]*\}", "*", folded(paths, str, lambda path: None)[0].path))
