"""What sixteen bits do not hold: sums by hand, positions, filter banks, losses, derivatives, codes.

Each kind of finding is one function over the table of a pass. What it says was measured at the kernels: how far their
numbers are from the same kernel's in FP64, as so many of FP32's bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import torch
from torch import nn

from mezzo.errors import PolicyError
from mezzo.explanation.rows import Finding, FindingKind, as_glob, folded, format_text
from mezzo.policy import Rule
from mezzo.policy.rules import both, exact
from mezzo.tensors import LOW, dtype_name, has_fraction
from mezzo.trace.function_calls import LOSS, location_text
from mezzo.trace.kernels import factors
from mezzo.trace.probes import Difference, Distinct, Largest, Probe, Ratio, Total
from mezzo.trace.table import HANDS_ON, KernelRecord, Value, WatchedPass

#: A sum by hand is told where it is off by more than this share of its terms' magnitudes, and is so long: a quarter of
#: the integers that the format holds.
_MAX_SUM_ERROR: Final = 2.0**-6
#: Noise that is worth a word, in dB: five bits are left. A low product has 50 or more.
_QUIET_DB: Final = 30.0
#: Fewer rows than these say little about a place; half of the places are to be quiet then, and not a tenth.
_FEW_ROWS: Final = 8

_POSITIONS: Final = frozenset("arange linspace range logspace".split())
#: What makes positions of positions, with constants.
_SCALED: Final = frozenset("add sub rsub mul div true_divide pow neg".split())
#: What a loss is to compute in FP32.
_ARITHMETIC: Final = frozenset("sub rsub mul div true_divide pow square abs exp expm1 log log1p log2 log10".split())
#: What is sensitive to the small ones among the results of a filter bank.
_MAGNITUDES: Final = frozenset("log log2 log10 log1p abs pow square angle atan2 view_as_complex complex".split())


def has_too_many_positions(record: KernelRecord) -> bool:
    """Whether a kernel makes more positions in a low format than the format has integers: a fact of shapes alone."""
    if record.name not in _POSITIONS or not _gives_low(record):
        return False
    return math.prod(record.gives[0].shape) > num_integers(record.gives[0].dtype)


def num_integers(dtype: torch.dtype) -> int:
    """Return up to which integer a format holds all: 256 in BF16, 2,048 in FP16."""
    return int(2 / torch.finfo(dtype).eps)


class _Fault(NamedTuple):
    """What was found in one place.

    Attributes:
        finding: The kind of the finding.
        record: The kernel.
        bits: How many of FP32's bits are lost.
        symptom: What goes wrong, in words.
        words: What to write in the program; empty where a rule is all there is to write.
        rules: The rules that cure it, on ops or on modules.
    """

    finding: FindingKind
    record: KernelRecord
    bits: int
    symptom: str
    words: str
    rules: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """The line, or where there is none the module and the op: each location has one finding."""
        return self.record.call.line or location_text(self.record.module, self.record.op)


class LowNumbers:
    """What sixteen bits lose in a pass: measured by probes, and reported as findings afterwards.

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
            Total(_is_addition),
            Distinct(self._makes_positions),
            Ratio(
                lambda record: self._basis(record) is not None or self._is_loss(record) or _is_derivative(record),
                self._along,
            ),
            Largest(lambda record: _makes_codes(record) and bool(_first_low(self._table(), record.reads[0]))),
            Difference(_is_difference, lambda record: _gives_low(record) and _is_pointwise(record)),
        )

    def findings(self, reported: Iterable[str] = ()) -> Iterator[Finding]:
        """Yield a finding for each location: the gravest of the first search that finds one there.

        Args:
            reported: The locations of which other searches have findings: they are left out here.
        """
        table = self._table()
        searches = (self._sums, self._positions, self._bases, self._criteria, self._derivatives, self._codes)
        reported_locations = set(reported)
        for search in searches:
            by_location: dict[tuple[str, str], list[_Fault]] = {}
            for fault in search(table):
                if fault.location not in reported_locations:
                    by_location.setdefault((fault.record.module, fault.location), []).append(fault)
            worst_faults = (max(faults, key=lambda fault: fault.bits) for faults in by_location.values())
            # One finding for blocks.0 to blocks.11 with the same line and op.
            for fold in folded(
                worst_faults, lambda fault: fault.record.module, lambda fault: (fault.location, fault.record.op)
            ):
                reported_locations.add(fold.rows[0].location)
                faults = [fault for row in fold.rows for fault in by_location[row.record.module, row.location]]
                yield _finding(fold.rows[0], fold.text, dict.fromkeys(rule for fault in faults for rule in fault.rules))

    # Sums by hand --------------------------------------------------------------------------------------

    @staticmethod
    def _sums(table: WatchedPass) -> Iterator[_Fault]:
        for chain in _chains(table):
            first, last = chain[0].record, chain[-1].record
            dtype = last.gives[0].dtype
            if first.call.line is None or len(chain) < num_integers(dtype) // 4 or _is_stream(table, chain):
                continue
            size = math.prod(last.gives[0].shape)
            start = 1 - chain[0].term
            exact_sum, magnitude = (sums[start] for sums in first.probes["total"][:2])
            for record, term in chain:
                times = size / max(1, math.prod(record.reads[term].shape))
                times *= float(record.constants[-1]) if record.constants else 1.0
                exact_sum += record.probes["total"].terms[term] * (-times if record.name == "sub" else times)
                magnitude += record.probes["total"].magnitudes[term] * abs(times)
            result = last.probes["total"].result
            error = abs(result - exact_sum) / magnitude if magnitude else 0.0
            if not error > _MAX_SUM_ERROR:
                continue
            terms = f"{len(chain):,} terms added one by one in {_dtype_text(dtype)}"
            symptom = f"{terms} come to {result:.4g} for {exact_sum:.4g}"
            # An operand that the program made low stays so, whatever a rule says of the terms.
            start_maker, term_maker = table.maker(first.reads[start]), table.maker(last.reads[chain[-1].term])
            is_made_low = start_maker is None or not any(has_fraction(value.dtype) for value in start_maker.reads)
            is_op = term_maker is not None and term_maker.effect == "other" and bool(term_maker.call.op)
            rules = _op_in_fp32(term_maker) if term_maker is not None and is_op and not is_made_low else ()
            yield _Fault(
                "sum by hand", last, _bits_lost(error), symptom, "the sum in FP32, total = total + term.float()", rules
            )

    # Positions -----------------------------------------------------------------------------------------

    def _makes_positions(self, record: KernelRecord) -> bool:
        """Whether a kernel makes positions in a low format: by itself, or of some by arithmetic with constants."""
        if not _gives_low(record):
            return False
        if record.name in _POSITIONS:
            return True
        if record.name == "cumsum":
            return _is_mask(self._table(), record.reads[0])
        is_cast = record.effect == "rounding" or (record.effect == "cast" and record.call.is_conversion)
        if not (is_cast or record.name in _SCALED):
            return False
        while len(record.reads) == 1:
            maker = self._table().maker(record.reads[0])
            if maker is None or maker.name in _POSITIONS:
                return maker is not None
            if maker.name not in _SCALED and maker.effect not in ("rounding", "rearranging"):
                return False
            record = maker
        return False

    @staticmethod
    def _positions(table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            distinct = record.probes.get("distinct")
            if distinct is None or not math.isfinite(distinct.step):
                continue
            if distinct.result >= distinct.exact and distinct.error < distinct.step / 2:
                continue
            if record.effect in ("rounding", "cast") and any(
                reader.effect == "product" for reader in _readers(table, record.gives[0])
            ):
                continue  # those are lost integers
            symptom = (
                f"{distinct.result:,.0f} of {distinct.exact:,.0f} positions are different in "
                f"{_dtype_text(record.gives[0].dtype)}, up to {distinct.error / distinct.step:.3g} steps off"
            )
            words = "torch.arange(n, device=x.device) and all arithmetic with it in FP32, and no cast of positions"
            if record.name in _POSITIONS:
                words += "; no rule does it, for the call's own dtype= wins"
            yield _Fault(
                "positions", record, _bits_lost(distinct.error / (distinct.step * distinct.num_all)), symptom, words
            )

    # Filter banks --------------------------------------------------------------------------------------

    def _basis(self, record: KernelRecord) -> int | None:
        """Return which factor of a low product comes from neither parameters nor inputs; ``None`` for other kernels."""
        self._update_fixed()
        if record.phase != "forward" or not _is_low_product(record) or not record.gives:
            return None
        fixed = [self._fixed.get(value.number, True) for value in factors(record.kernel, record.reads)]
        return fixed.index(True) if sorted(fixed) == [False, True] else None

    def _update_fixed(self) -> None:
        """Record which values are computed from neither parameters nor inputs."""
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
        if record.name == "convolution":
            return 1
        return -2 if self._basis(record) == 0 and len(record.gives[0].shape) > 1 else -1

    def _bases(self, table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            ratio = record.probes.get("ratio")
            if ratio is None or self._basis(record) is None or not ratio.entries:
                continue
            readers = _readers(table, record.gives[0])
            if readers and not any(reader.name in _MAGNITUDES or _squares(reader) for reader in readers):
                continue
            rows = math.prod(record.gives[0].shape) // len(ratio.entries)
            worst = sorted(ratio.entries)[len(ratio.entries) // (2 if rows < _FEW_ROWS else 10)]
            if not -math.inf < worst < _QUIET_DB:
                continue
            num_quiet = sum(decibels < _QUIET_DB for decibels in ratio.entries)
            symptom = (
                f"it multiplies by a table of constants in {_operands_text(record)}, whose rounding is heard in "
                f"{num_quiet:,} of {len(ratio.entries):,} results: signal to noise is {worst:.3g} dB"
            )
            yield _Fault("basis", record, _bits_lost_at_db(worst), symptom, *_in_fp32([record]))

    # Losses --------------------------------------------------------------------------------------------

    def _is_loss(self, record: KernelRecord) -> bool:
        """Whether a kernel is arithmetic of a loss, in a low format."""
        return _gives_low(record) and record.module in self._losses and record.name in _ARITHMETIC

    def _criteria(self, table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            ratio = record.probes.get("ratio")
            if ratio is not None and self._is_loss(record) and math.isfinite(ratio.whole):
                symptom = (
                    f"the loss computes {record.op} in {_dtype_text(record.gives[0].dtype)}, {_noise_text(ratio.whole)}"
                )
                words = "criterion(output.float(), target)"
                yield _Fault("criterion", record, _bits_lost_at_db(ratio.whole), symptom, words, _op_in_fp32(record))

    # Derivatives ---------------------------------------------------------------------------------------

    @staticmethod
    def _derivatives(table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            if _is_derivative(record) and (ratio := record.probes.get("ratio")) and math.isfinite(ratio.whole):
                derivative = f"a derivative that the forward pass takes is computed in {_operands_text(record)}"
                symptom = f"{derivative}, {_noise_text(ratio.whole)}"
                yield _Fault("forward derivative", record, _bits_lost_at_db(ratio.whole), symptom, *_in_fp32([record]))
            if (difference := record.probes.get("difference")) is None:
                continue
            value, dtype = record.reads[0], record.gives[0].dtype
            if difference.result:
                times = difference.subtracted / difference.result
                error = float(torch.finfo(dtype).eps) / 2 * times
                symptom = f"differences of neighbours in {_dtype_text(dtype)} are 1/{times:.3g} of what is subtracted"
            else:  # all are 0, and of a field that is constant in FP32 they are to be
                error = float(difference.exact > torch.finfo(torch.float32).eps * difference.subtracted)
                symptom = f"differences of neighbours in {_dtype_text(dtype)} are all 0, and in FP32 are not"
            if error > _MAX_SUM_ERROR:
                cure = _in_fp32(_first_low(table, value))
                yield _Fault("forward derivative", record, _bits_lost(error), symptom, *cure)

    # Codes ---------------------------------------------------------------------------------------------

    @staticmethod
    def _codes(table: WatchedPass) -> Iterator[_Fault]:
        for record in table.kernels:
            if (largest := record.probes.get("largest")) is None:
                continue
            first = _first_low(table, record.reads[0])
            result_dtype, low_dtype = first[0].gives[0].dtype, first[0].call.low_dtype
            dtype = result_dtype if result_dtype in LOW else getattr(torch, low_dtype)  # an emulated product gives FP32
            holds = num_integers(dtype)
            if largest > holds:
                symptom = (
                    f"integers up to {largest:,.0f} are read off numbers in {_dtype_text(dtype)}, which holds all "
                    f"up to {holds:,} only"
                )
                bits = math.ceil(math.log2(largest / holds))
                yield _Fault("codes", record, bits, symptom, *_in_fp32(first))


# What a kernel is -------------------------------------------------------------------------------------


def _gives_low(record: KernelRecord) -> bool:
    """Whether a kernel of the forward pass gives low numbers."""
    return record.phase == "forward" and bool(record.gives) and record.gives[0].dtype in LOW


def _is_pointwise(record: KernelRecord) -> bool:
    return torch.Tag.pointwise in record.kernel.tags


def _is_addition(record: KernelRecord) -> bool:
    return _gives_low(record) and record.name in ("add", "sub") and len(record.reads) == 2


def _is_difference(record: KernelRecord) -> bool:
    """Whether a kernel subtracts elements of a tensor from other elements of it."""
    is_low = _gives_low(record) and record.name == "sub" and len(record.reads) == 2
    return (
        is_low and record.reads[0].number == record.reads[1].number and record.reads[0].shape == record.reads[1].shape
    )


def _is_low_product(record: KernelRecord) -> bool:
    return record.flops is not None and (record.flops[1] in LOW or record.by == "emulation")


def _is_derivative(record: KernelRecord) -> bool:
    """Whether a kernel is a low product of ``torch.autograd.grad`` inside the forward pass."""
    return record.is_inner and record.phase == "backward" and _is_low_product(record)


def _makes_codes(record: KernelRecord) -> bool:
    """Whether a kernel makes integers of numbers that may have a fraction."""
    is_cast = record.kernel is torch.ops.aten._to_copy.default and record.phase == "forward" and bool(record.reads)
    return is_cast and not has_fraction(record.gives[0].dtype) and record.gives[0].dtype != torch.bool


class _Addition(NamedTuple):
    """One addition of a sum by hand, and which of its operands is the new term."""

    record: KernelRecord
    term: int


def _chains(table: WatchedPass) -> Iterable[list[_Addition]]:
    """Return the chains of additions of one line, each to the result of the last."""
    chains: dict[int, list[_Addition]] = {}  # by the number of their partial sum
    for record in table.kernels:
        if not _is_addition(record) or "total" not in record.probes or len({v.number for v in record.reads}) < 2:
            continue
        chain = [_Addition(record, 1)]
        for index, value in enumerate(record.reads[: 1 if record.name == "sub" else 2]):
            before = chains.get(value.number)
            is_same = value.shape == record.gives[0].shape
            if before and is_same and before[-1].record.call.line == record.call.line:
                chain = chains.pop(value.number)
                chain.append(_Addition(record, 1 - index))
                break
        chains[record.gives[0].number] = chain
    return chains.values()


def _is_stream(table: WatchedPass, chain: list[_Addition]) -> bool:
    """Whether partial sums are read by more than the next addition, as a residual stream is."""
    num_read = 0
    for (record, _), (next_record, _) in itertools.pairwise(chain):
        other_readers = (
            reader
            for reader in table.readers(record.gives[0])
            if reader is not next_record and reader.phase == "forward"
        )
        num_read += any(has_fraction(value.dtype) for reader in other_readers for value in reader.gives)
    return 2 * num_read > len(chain)


def _is_mask(table: WatchedPass, value: Value) -> bool:
    """Whether numbers are a mask: truth values or integers, or made of some by a cast."""
    maker = table.maker(value)
    return not has_fraction(value.dtype) or (maker is not None and (maker.effect == "rounding" or maker.name == "ones"))


def _squares(record: KernelRecord) -> bool:
    return record.name == "mul" and len({value.number for value in record.reads}) == 1 < len(record.reads)


def _readers(table: WatchedPass, value: Value) -> list[KernelRecord]:
    """Return the kernels that read a value in the forward pass, directly or through kernels that hand it on."""
    readers, waiting, seen = list[KernelRecord](), [value], {value.number}
    while waiting:
        for reader in table.readers(waiting.pop()):
            if reader.phase != "forward":
                continue
            if reader.effect not in HANDS_ON:
                readers.append(reader)
                continue
            waiting += [output for output in reader.gives if output.number not in seen]
            seen.update(output.number for output in reader.gives)
    return readers


def _first_low(table: WatchedPass, value: Value) -> list[KernelRecord]:
    """Return the kernels where a value first became low: products, or kernels that read nothing low.

    With these in FP32, everything pointwise between them and the value would be in FP32 too.
    """
    origins, waiting, seen = dict[KernelRecord, None](), [value], set[int]()

    def is_low(value: Value) -> bool:
        maker = table.maker(value)
        return value.dtype in LOW or (maker is not None and maker.by == "emulation")

    while waiting:
        value = waiting.pop()
        maker = table.maker(value)
        if maker is None or value.number in seen:
            continue
        seen.add(value.number)
        before = [] if maker.flops is not None else [operand for operand in maker.reads if has_fraction(operand.dtype)]
        if is_low(value):
            low_operands = list(filter(is_low, before))
            waiting += low_operands
            origins.update(dict.fromkeys([] if low_operands else [maker]))
        elif _is_pointwise(maker) or maker.effect in HANDS_ON:
            waiting += before
    return list(origins)


# What it costs, and what to write ---------------------------------------------------------------------


def _bits_lost(error: float) -> int:
    """Return how many of FP32's 24 bits a relative error takes."""
    return min(24, max(0, round(24 + math.log2(error)))) if error > 0 else 0


def _bits_lost_at_db(decibels: float) -> int:
    return _bits_lost(10 ** (-decibels / 20))


def _noise_text(decibels: float) -> str:
    return f"signal to noise {decibels:.3g} dB"


def _dtype_text(dtype: torch.dtype) -> str:
    return format_text([dtype_name(dtype)])


def _operands_text(record: KernelRecord) -> str:
    """Return the format of a product's operands: under emulation the one that FP32 stands for."""
    assert record.flops is not None
    return format_text([record.call.low_dtype]) if record.by == "emulation" else _dtype_text(record.flops[1])


def _in_fp32(records: Sequence[KernelRecord]) -> tuple[str, tuple[str, ...]]:
    """Return what keeps kernels in FP32: words where no module's rule reaches them, and rules.

    No rule reaches a cast of the model's own code. Where all kernels are the model's own, rules on ops do.
    """
    if not records:
        return "inputs in FP32", ()
    casts = [
        record for record in records if record.effect in ("cast", "rounding") and record.by not in ("cast", "emulation")
    ]
    computed = [record for record in records if record not in casts]
    alone = [record for record in computed if record.module in ("", LOSS)]
    words = [f"no cast of the model's own at {casts[0].call.line}"] if casts else []
    if alone:
        words.append(f"a function under @mezzo.fp32 for this {' and this '.join(dict.fromkeys(e.op for e in alone))}")
    if len(alone) == len(records):
        rules = [rule for record in alone for rule in _op_in_fp32(record)]
    else:
        rules = [str(Rule("fp32", module=exact(record.module))) for record in computed if record not in alone]
    return ", and ".join(words), tuple(dict.fromkeys(rules))


def _op_in_fp32(record: KernelRecord) -> tuple[str, ...]:
    """Return the rule on the op of a kernel where it runs; nothing where no rule names the op."""
    module = None if record.module in ("", LOSS) else exact(record.module)
    with suppress(PolicyError):
        return (str(Rule("fp32", op=record.op, module=module)),)
    return ()


def _finding(fault: _Fault, module: str, rules: Iterable[str]) -> Finding:
    """Return a finding with one rule for alike modules. A rule on an op may replace the words."""
    named: dict[str, list[str]] = {}
    for rule in rules:
        key, _, name = rule.partition("=")
        named.setdefault(key, []).append(name)
    key = max(named, default="", key=len)  # fp32_module, where a rule of modules is among them
    globs = (as_glob(fold.path) for fold in folded(named.get(key, ()), str, lambda name: None))
    rule = f"{key}={'+'.join(globs)}" if key else ""
    cure = (", or " if key == "fp32" else ", and ").join(part for part in (fault.words, rule and both(rule)) if part)
    text = f"{fault.symptom}, {fault.bits} of FP32's 24 bits lost: write {cure}"
    where = location_text(module, fault.record.op, fault.record.call.line)
    return Finding(kind=fault.finding, where=where, text=text, rule=rule)
