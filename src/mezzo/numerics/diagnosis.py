"""What evidence comes to, in words: which formats would do, at which loss scale, what goes wrong, and what to write."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from mezzo.errors import PolicyError, message, shown, some_of
from mezzo.explanation.words import format_text, share_text
from mezzo.formats import BF16, E4M3, E5M2, FP16, Format
from mezzo.numerics.counting import FIRST
from mezzo.numerics.evidence import Evidence, SwallowedUpdates
from mezzo.numerics.faults import (
    CEILING,
    GRADIENTS,
    INIT,
    SUBNORMAL,
    SWALLOWED,
    Alert,
    better_scale,
    first_not_finite,
    flushed,
    idle,
    lost_updates,
    name_of,
    near,
    not_finite,
    rescaled,
    stopped,
    stored_low,
)  # fmt: skip
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy
from mezzo.scale import LossScale

#: The share of gradients that FP16 may lose where training needs them: at 31 % a detection network diverged, at 0.1 %
#: it trained as in FP32 (Micikevicius et al. 2018, section 3.2).
_LOST: Final = 0.01
#: Gradients below 2^-27 do not matter for training (ibid.), beside larger ones.
_NEEDED: Final = -27
#: The exponent of FP16's smallest number.
_SMALLEST: Final = round(math.log2(FP16.smallest_subnormal))
#: The share of a tensor that eight bits may flush, where each tensor has a scale of its own.
_FLUSHED_IN_FP8: Final = 0.05
#: The share of one weight's gradients whose loss leaves it all but untrained.
_MOSTLY: Final = 0.5

Place = tuple[str, str]
Totals = Mapping[Place, ExponentHistogram]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatAnswer:
    """Whether one format would do for the run.

    Attributes:
        format: Its name, or two names for the eight-bit pair.
        is_safe: Whether nothing that matters is lost.
        line: The answer in words.
        policy: What to write to compute in it; ``None`` where it is not safe, and for eight bits.
    """

    format: str
    is_safe: bool
    line: str
    policy: Policy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What evidence comes to. It prints in words: what is wrong, which formats would do, and the policy to write.

    Attributes:
        formats: An answer for each format; none where the run itself was not finite, which says nothing of formats.
        lines: What else there is to know.
        alerts: What is wrong with the run itself, the gravest first.
        policy: The policy to go on with; ``None`` where there is nothing to change, or nothing known.
        why: What it changes.
    """

    formats: tuple[FormatAnswer, ...] = ()
    lines: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    policy: Policy | None = None
    why: str = ""

    def __str__(self) -> str:
        alerts = (message(each.what, where=each.where, why=each.why, write=each.write) for each in self.alerts)
        lines = (*alerts, *(each.line for each in self.formats), *self.lines)
        why = f"   # {self.why}" if self.why and self.why not in lines else ""
        return "\n".join((*lines, *(() if self.policy is None else (f'policy="{self.policy}"{why}',))))

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them; policies as their texts."""

        def plain(value: Diagnosis | FormatAnswer) -> dict[str, Any]:
            policy = None if value.policy is None else str(value.policy)
            return dataclasses.asdict(dataclasses.replace(value, policy=None)) | {"policy": policy}

        return plain(dataclasses.replace(self, formats=())) | {"formats": [*map(plain, self.formats)]}


def diagnose(evidence: Evidence) -> Diagnosis:
    """Say what recorded evidence comes to.

    Gradients that a format has flushed already are zeros in the evidence: for what FP16 would lose, record a run in
    FP32 or BF16.

    Args:
        evidence: What was recorded.

    Returns:
        An answer for FP16, BF16 and FP8, what is wrong with the run as it was trained, and a policy to go on with.

    Raises:
        PolicyError: It is no evidence.

    **Cost**: milliseconds for each hundred tensors of a recorded step.

    Example:
        >>> import torch
        >>> from mezzo.numerics import Recorder
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Recorder(model, optimizer) as recorder:
        ...     (model(torch.ones(4, 8)).square().mean() * 2.0**-40).backward()
        ...     optimizer.step()
        ...     recorder.step()
        >>> print(diagnose(recorder.evidence).formats[0].policy)
        O1,dtype=float16,loss_scale=dynamic(init=2**24)
    """
    if not isinstance(evidence, Evidence):
        raise PolicyError(
            f"{shown(evidence)} is no evidence", write="diagnose(recorder.evidence), or diagnose(read_evidence(path))"
        )
    if not any(step.tensors for step in evidence.steps):
        line = "The recorded steps had no tensor of 32 bits or less." if evidence.steps else "No step was recorded."
        return Diagnosis(lines=(line,))
    faults, lost = [*not_finite(evidence), *idle(evidence)], lost_updates(evidence)
    alerts = [*faults, *flushed(evidence), *stopped(evidence, lost), *near(evidence)]
    alerts.sort(key=lambda alert: alert.level != "bad")
    if any(alert.level == "bad" for alert in faults):
        policy, why = _advice(evidence, (), alerts)
        return Diagnosis(alerts=tuple(alerts), policy=policy, why=why)
    totals = _totals(evidence)
    formats = (_fp16(totals), _bf16(totals), _fp8(totals))
    policy, why = _advice(evidence, formats, alerts)
    low = stored_low(evidence)
    # What such a weight has swallowed already is no update any more: an alert says how much that was.
    lines = [*_swallowing({path: each for path, each in lost.items() if path not in low})]
    if evidence.header.compute_dtype == FP16.name:
        lines.append("Recorded in FP16: gradients that it flushed are zeros here; a run under O0 shows what they were.")
    return Diagnosis(formats=formats, lines=tuple(lines), alerts=tuple(alerts), policy=policy, why=why)


# Evidence, summed up ----------------------------------------------------------------------------------------


def _totals(evidence: Evidence) -> dict[Place, ExponentHistogram]:
    """Sum up the histograms of each tensor over the steps that were not skipped, whose gradients are those of a run."""
    found: dict[Place, list[ExponentHistogram]] = {}
    for step in evidence.steps:
        for each in step.tensors:
            if not (step.skipped and each.kind in GRADIENTS):
                found.setdefault((each.kind, name_of(each)), []).append(each.histogram)
    return {place: ExponentHistogram.total_of(histograms) for place, histograms in found.items()}


# Formats ----------------------------------------------------------------------------------------------------


def _fp16(totals: Totals) -> FormatAnswer:
    """Judge FP16: what overflows whatever the loss scale, and which loss scale keeps the gradients."""
    beyond = {
        name: histogram.max_abs
        for (kind, name), histogram in totals.items()
        if kind in ("weights", "activations") and _beyond(histogram, FP16)
    }
    if beyond:
        # What holds one of the others only hands it on.
        own = [name for name in beyond if not any(other.startswith(f"{name}.") for other in beyond)]
        worst, *others = sorted(own, key=lambda name: -beyond[name])
        as_well = f" ({some_of(others, 3)} overflow as well)" if others else ""
        line = (
            f"FP16 is not safe: {worst} reaches {beyond[worst]:.4g}, beyond 65504, whatever the loss scale{as_well}; "
            "mezzo tune finds what has to stay in FP32."
        )
        return FormatAnswer(format=FP16.name, is_safe=False, line=line)
    gradients = [histogram for (kind, _), histogram in totals.items() if kind in GRADIENTS]
    whole = ExponentHistogram.total_of(gradients)
    policy = Policy.O1("float16")
    if not whole.max_abs or whole.infs or whole.nans:
        line = "FP16 holds all weights and activations; of gradients nothing is known."
        return FormatAnswer(format=FP16.name, is_safe=False, line=line)
    scale = min(whole.best_scale(FP16), CEILING)
    unscaled, scaled = (_Kept.of(whole, each) for each in (1.0, scale))
    highest = f"2^{round(math.log2(scale))}, the highest loss scale that fits,"
    if scaled.lost > _LOST:
        line = f"FP16 is not safe: at {highest} {scaled.text}{_losers(totals, scale)}."
        return FormatAnswer(format=FP16.name, is_safe=False, line=line)
    # Above it steps would be skipped until the scale fits; and from below it needs thousands of steps to rise.
    if scale < INIT or _Kept.of(whole, INIT).is_poor:
        policy = Policy.O1("float16", loss_scale=LossScale.dynamic(init=scale, floor=min(1.0, scale)))
    line = f"FP16 is safe: without a loss scale {unscaled.text}"
    if unscaled.is_poor:
        line = f"FP16 is safe with a loss scale: without one {unscaled.text}; at {highest} {scaled.text}"
    line = f"{line}{_losers(totals, policy.loss_scale.init)}."
    return FormatAnswer(format=FP16.name, is_safe=True, line=line, policy=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What FP16 keeps of gradients at one loss scale: shares of those that are not zero.

    Attributes:
        lost: Of those that training needs, what lies below FP16's smallest number; that rounds to it, or to zero.
        subnormal: What loses digits.
        text: This in words.
    """

    lost: float
    subnormal: float
    text: str

    @property
    def is_poor(self) -> bool:
        """Whether too much of what training needs is lost, or loses digits."""
        return self.lost > _LOST or self.subnormal > SUBNORMAL

    @classmethod
    def of(cls, whole: ExponentHistogram, scale: float) -> _Kept:
        """Count it, exactly where the scale is a power of two.

        Args:
            whole: All gradients, not all of them zero.
            scale: The loss scale.
        """
        shift = round(math.log2(scale))
        # Where all gradients are as small as that, they are all that training has.
        needed = _NEEDED if whole.max_abs >= 2.0**_SMALLEST else FIRST
        end = _SMALLEST - shift
        total = whole.total - whole.zeros
        lost, below, subnormal = (
            sum(map(whole.count, range(*ends))) / total
            for ends in ((needed, end), (FIRST, min(needed, end)), (end, end + FP16.mantissa_bits))
        )
        where = f", which lie below 2^{end}" if needed == FIRST else f", those from 2^{needed} to 2^{end}"
        text = f"it loses {share_text(lost, 1)} of the gradients{where if lost else ''}"
        text += f", and {share_text(subnormal, 1)} lose digits" if shift == 0 else ""
        if below:
            text += f" ({share_text(below, 1)} lie below 2^{min(needed, end)}, where training does not need them)"
        return cls(lost=lost, subnormal=subnormal, text=text)


def _beyond(histogram: ExponentHistogram, target: Format) -> int:
    """Return how many finite values leave a format's range; a mask's infinities are meant."""
    return histogram.coverage(target).overflow - histogram.infs


def _flushed(histogram: ExponentHistogram, target: Format, scale: float) -> float:
    """Return the share that a format flushes to zero, of the values that are not zero."""
    covered = histogram.coverage(target, scale)
    return covered.underflow / max(1, covered.total - covered.zero - covered.nan)


def _losers(totals: Totals, scale: float) -> str:
    """Name the weights of whose gradients FP16 flushes more than half at a loss scale; of none there is no text."""
    shares = {name: _flushed(each, FP16, scale) for (kind, name), each in totals.items() if kind == GRADIENTS[1]}
    lost = sorted((name for name in shares if shares[name] > _MOSTLY), key=lambda name: -shares[name])
    if not lost:
        return ""
    more = f", and more than half of those of {some_of(lost[1:], 2)}" if lost[1:] else ""
    return f"; at 2^{round(math.log2(scale))} it flushes {share_text(shares[lost[0]], 1)} of those of {lost[0]}{more}"


def _bf16(totals: Totals) -> FormatAnswer:
    """Judge BF16: its range is FP32's, all but the last numbers."""
    beyond = [name for (_, name), histogram in totals.items() if _beyond(histogram, BF16)]
    if beyond:
        line = f"BF16 is not safe: {some_of(beyond, 3)} reach beyond {BF16.max:.4g}."
        return FormatAnswer(format=BF16.name, is_safe=False, line=line)
    line = "BF16 is safe: it has FP32's range, and needs no loss scale."
    return FormatAnswer(format=BF16.name, is_safe=True, line=line, policy=Policy.O1("bfloat16"))


def _fp8(totals: Totals) -> FormatAnswer:
    """Judge the eight-bit pair, each tensor at a scale of its own: E4M3 for what goes forward, E5M2 for gradients."""
    lossy: dict[str, float] = {}
    for (kind, name), histogram in totals.items():
        target = E5M2 if kind in GRADIENTS else E4M3
        if kind == "updates" or not histogram.max_abs or histogram.infs or histogram.nans:
            continue
        share = _flushed(histogram, target, histogram.best_scale(target))
        if share > _FLUSHED_IN_FP8:
            lossy[f"{name} ({kind.replace('_', ' ')})"] = share
    name = f"{E4M3.name}+{E5M2.name}"
    said = "FP8 with a scale for each tensor, E4M3 forward and E5M2 for gradients,"
    if not lossy:
        line = f"{said} flushes at most {_FLUSHED_IN_FP8:.0%} of any tensor."
        return FormatAnswer(format=name, is_safe=True, line=line.replace("%", " %"))
    worst, *others = sorted(lossy, key=lambda each: -lossy[each])
    more = f", and more than {100 * _FLUSHED_IN_FP8:g} % of {len(others)} other tensors" if others else ""
    line = f"{said} is not safe: it flushes {share_text(lossy[worst], 1)} of {worst}{more}."
    return FormatAnswer(format=name, is_safe=False, line=line)


def _swallowing(lost: Mapping[str, SwallowedUpdates]) -> Iterator[str]:
    """Say of the 16-bit formats how many updates vanish where weights are stored in them without masters."""
    for target in (FP16, BF16):
        known = {path: each for path, each in lost.items() if target.name in each.swallowed and each.updated}
        if not known:
            continue
        worst = max(known, key=lambda path: known[path].share(target))
        whole = functools.reduce(operator.add, known.values())
        name, share = format_text([target.name]), share_text(whole.swallowed[target.name], whole.updated)
        if whole.share(target) > SWALLOWED:
            yield (
                f"Weights stored in {name} without FP32 masters swallow {share} of the updates, "
                f"{share_text(known[worst].share(target), 1)} in {worst}: keep masters, as O1 and O2 do."
            )
        else:
            yield f"Weights stored in {name} swallow {share} of the updates."


# What to write ----------------------------------------------------------------------------------------------


def _advice(evidence: Evidence, formats: Sequence[FormatAnswer], alerts: Sequence[Alert]) -> tuple[Policy | None, str]:
    """Return the policy to go on with: that of the run where it does, else the first format that is safe."""
    header = evidence.header
    current = None if header.policy is None else Policy.parse(header.policy)
    if current is None or header.compute_dtype not in (FP16.name, BF16.name):
        safe = [each for each in formats if each.policy is not None]
        return (safe[0].policy, safe[0].line) if safe else (None, "")
    spoilt = first_not_finite(evidence)[1]
    if header.compute_dtype == FP16.name and any(each.kind in GRADIENTS for each in spoilt):
        return rescaled(current, LossScale.dynamic()), "Its loss scale skips steps whose gradients are not finite."
    scale = better_scale(evidence)
    if alerts and not (current.master_weights or current.param_dtype == torch.float32):
        masters = Policy.O2(current.dtype, emulate=current.emulate)
        if any(flushed(evidence)) and scale is not None:
            masters = rescaled(current, scale)
        return masters, "O2 keeps FP32 masters of the weights, which no update leaves or rounds away in."
    if header.compute_dtype == BF16.name or not alerts:
        return None, ""
    beyond = [each.dtype for each in spoilt][:1] == [FP16.name] or any(near(evidence))
    if not beyond and scale is not None and any(flushed(evidence)):
        return rescaled(current, scale), "The loss scale moves the gradients into FP16's range."
    if beyond or any(flushed(evidence)):
        level = Policy.O1 if current.autocast else Policy.O2
        bfloat16 = level(BF16.name, rules=current.rules, emulate=current.emulate)
        return bfloat16, "BF16 has FP32's range, and needs no loss scale."
    return None, ""
