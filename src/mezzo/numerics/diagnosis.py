"""What evidence comes to, in words: which formats would do, at which loss scale, what goes wrong, and what to write."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from mezzo.errors import PolicyError, message, shown, some_of
from mezzo.explanation.rows import format_text, share_text
from mezzo.formats import BF16, E4M3, E5M2, FP16, Format
from mezzo.numerics.evidence import Evidence, RecordedStep, RecordedTensor, SwallowedUpdates
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy
from mezzo.policy.rules import both
from mezzo.scale import LossScale
from mezzo.trace.observe import FIRST

# What is wrong with a recorded run itself: values not finite, gradients flushed, steps skipped, weights at rest.

Level = Literal["ok", "warn", "bad"]

#: Shares of updates that vanish: what is said, and what stops a weight.
SWALLOWED: Final = 0.1
_STOPPED: Final = 0.5
#: The share of gradients that may lose digits, being subnormal; and that at which many more are flushed to zero.
SUBNORMAL: Final = 0.1
_ALL_BUT: Final = 0.9
#: Where dynamic scales begin if nothing is known, and where they end: no loss scale is higher.
INIT: Final = LossScale.dynamic().init
CEILING: Final = LossScale.dynamic().ceiling or math.inf
#: Kinds that a loss scale multiplies.
GRADIENTS: Final = ("activation_gradients", "weight_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that is wrong with a run.

    Attributes:
        level: ``bad`` spoils the result, ``warn`` may.
        what: One line.
        where: Policy, module or tensor.
        why: The evidence.
        write: What cures it, as text to paste.
    """

    level: Level
    what: str
    where: str = ""
    why: str = ""
    write: str = ""


def first_not_finite(evidence: Evidence) -> tuple[RecordedStep | None, list[RecordedTensor]]:
    """Return the first recorded step with tensors that are not finite and spoil it, and those tensors; or none.

    They are weights, or else activations, or else gradients in a step that was taken all the same.
    """
    masks = masks_of(evidence)
    for step in evidence.steps:
        for kinds in (("weights",), ("activations",), GRADIENTS):
            found = [each for each in step.tensors if each.kind in kinds and not is_finite(each)]
            if found and _is_spoilt(step, found, masks):
                return step, found
    return None, []


def _is_spoilt(step: RecordedStep, found: list[RecordedTensor], masks: Mapping[str, RecordedStep]) -> bool:
    if found[0].kind == "activations":
        return any(each.histogram.nans or name_of(each) not in masks for each in found)
    return found[0].kind == "weights" or _spoils_weights(step)


def _spoils_weights(step: RecordedStep) -> bool:
    """Whether a step was taken with gradients that are not finite; one of an activation may end before any weight."""
    found = [each.kind for each in step.tensors if each.kind in GRADIENTS and not is_finite(each)]
    has_weights = any(each.kind == GRADIENTS[1] for each in step.tensors)
    return not step.skipped and (GRADIENTS[1] in found if has_weights else bool(found))


def not_finite(evidence: Evidence) -> Iterator[Alert]:
    """Say which tensors are not finite, in the first recorded step that they spoil; or else which may be masks."""
    step, found = first_not_finite(evidence)
    level: Level = "bad"
    if step is None and (masks := masks_of(evidence)):
        level, step = "warn", min(masks.values(), key=lambda each: each.step)
        found = [each for each in step.tensors if each.kind == "activations" and each.histogram.infs]
    if step is None:
        return
    first, kind = found[0], found[0].kind
    (why, write), where = _cause(first), f"{name_of(first)} ({first.dtype})"
    if level == "warn":
        why, write = "What follows is finite all the same: they may be those of a mask, which are meant.", ""
    if kind in GRADIENTS:
        kind, first = "gradients", first_in_backward(step) or first
        (why, write), where = _cause_in_backward(evidence, first), gradient_text(first)
    others = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
    yield Alert(
        level=level,
        what=f"{sum(map(_num_not_finite, found)):,} {kind} are infinite or NaN at step {step.step}.",
        where=f"{where}{others}",
        why=why,
        write=write,
    )


def _cause(first: RecordedTensor) -> tuple[str, str]:
    """Return why a tensor is not finite, and what to write."""
    named = format_text([first.dtype])
    explained = 'MixedPrecision(…, on_overflow="explain"), which names the op or the batch that they come from'
    if first.dtype != FP16.name:
        why = f"{named} reaches 3.4e38: training diverged, divided by zero or read such a batch, whatever the format."
        return why, explained
    if first.kind == "weights":
        why = (
            f"An update left FP16's range. Of weights in {named} alone optimizers compute in it, where AdamW's eps of "
            "1e-8 is zero, and what is divided by it infinite."
        )
        return why, f'policy="O2,dtype={first.dtype}", whose weights are FP32'
    why = "FP16 ends at 65504, whatever the loss scale, and what is beyond is infinite; or a batch had such numbers."
    return why, f"{explained}; where it is FP16's range, {both('dtype=bfloat16')}"


def _cause_in_backward(evidence: Evidence, first: RecordedTensor) -> tuple[str, str]:
    """Return why gradients of a step that was taken are not finite, and what to write."""
    taken = "the step was taken all the same, and its update spoils the weights."
    if evidence.header.compute_dtype != FP16.name and first.dtype != FP16.name:
        write = 'MixedPrecision(…, on_overflow="explain"), which names the op that made the first of them'
        return f"The backward pass made them, whatever the format: {taken}", write
    text = evidence.header.policy
    policy = Policy.O1(FP16.name) if text is None else rescaled(Policy.parse(text), LossScale.dynamic())
    write = f'MixedPrecision(model, optimizer, "{policy}"), whose loss scale skips such steps and comes down'
    return f"The backward pass left the range of FP16: {taken}", write


def flushed(evidence: Evidence) -> Iterator[Alert]:
    """Say how many gradients FP16 loses at the loss scale that they have in the run."""
    gradients = gradients_in_fp16(evidence)
    scales = {scale for scale, _ in gradients}
    covered = [each.coverage(FP16, scale) for scale, each in gradients]
    total, zeros = sum(each.total for each in covered), sum(each.zero for each in covered)
    lost = sum(each.subnormal for each in covered)
    if not total or (lost <= SUBNORMAL * (total - zeros) and zeros < total):
        return
    carried = "without a loss scale" if scales == {1.0} else f"at loss scale {min(scales):,.10g}"
    tiny = FP16.smallest_subnormal / 2 / min(scales)
    scale = better_scale(evidence)
    yield Alert(
        level="bad" if lost > _ALL_BUT * (total - zeros) or zeros == total else "warn",
        what=f"All gradients are zero {carried}."
        if zeros == total
        else f"{share_text(lost, total - zeros)} of the gradients that are not zero lose digits {carried}.",
        where=f"{len(gradients)} tensors in float16, {share_text(zeros, total)} of their values zero",
        why=f"They are smaller than FP16's normal numbers, and what is below {tiny:.2g} is flushed to zero.",
        write=f"{both('dtype=bfloat16')}, which needs no loss scale" if scale is None else _written(evidence, scale),
    )


def better_scale(evidence: Evidence) -> LossScale | None:
    """Return a loss scale that keeps more of the gradients that FP16 loses in a run; ``None`` where none does."""
    gradients = gradients_in_fp16(evidence)
    whole = ExponentHistogram.total_of(each for _, each in gradients)
    if not gradients or whole.infs or whole.nans:
        return None
    # Of zeros nothing is known but that they are small: from above the scale comes down by itself.
    highest = min(whole.best_scale(FP16), CEILING) if whole.max_abs else CEILING
    return LossScale.dynamic(init=highest) if highest >= 2.0 * max(scale for scale, _ in gradients) else None


def _written(evidence: Evidence, scale: LossScale) -> str:
    """Write the run's policy with another loss scale; without a session it is torch's scaler that has one."""
    if evidence.header.policy is None:
        return f"torch.amp.GradScaler(init_scale=2.0**{round(math.log2(scale.init))})"
    return f'policy="{rescaled(Policy.parse(evidence.header.policy), scale)}"'


def rescaled(policy: Policy, scale: LossScale) -> Policy:
    """Return a policy with another loss scale, and with FP32 weights: FP16 cannot unscale gradients."""
    if policy.param_dtype == torch.float32:
        return dataclasses.replace(policy, loss_scale=scale)
    return Policy.O2(policy.dtype, emulate=policy.emulate, loss_scale=scale)


def _num_not_finite(tensor: RecordedTensor) -> int:
    return tensor.histogram.infs + tensor.histogram.nans


def is_finite(tensor: RecordedTensor) -> bool:
    """Whether there is neither infinity nor NaN in a tensor."""
    return not _num_not_finite(tensor)


def masks_of(evidence: Evidence) -> dict[str, RecordedStep]:
    """Return the activations that are infinite as those of a mask, each with the first step that has it so.

    They are in steps whose gradients are finite, or at least what the model returns: a softmax has made zeros of them.
    """
    found: dict[str, RecordedStep] = {}
    for step in evidence.steps:
        outputs = [each for each in step.tensors if each.kind == "activations" and not each.module]
        if (outputs and all(map(is_finite, outputs))) or not (step.skipped or _spoils_weights(step)):
            for each in step.tensors:
                if each.kind == "activations" and each.histogram.infs and not each.histogram.nans:
                    found.setdefault(name_of(each), step)
    return found


def gradient_text(tensor: RecordedTensor) -> str:
    """Return what a gradient is called in words."""
    of = "the output of " if tensor.kind == GRADIENTS[0] else ""
    return f"gradient of {of}{name_of(tensor)} ({tensor.dtype})"


def first_in_backward(step: RecordedStep) -> RecordedTensor | None:
    """Return the first gradient in the order of the backward pass that is not finite, of the innermost module."""
    # The order of the pass forward is that in which calls ended; a module that is not called goes with what is around.
    called = [each.module for each in step.tensors if each.kind in ("activations", GRADIENTS[0])]
    order = {path: n for n, path in enumerate(dict.fromkeys(called or [each.module for each in step.tensors]))}

    def place(tensor: RecordedTensor) -> int:
        path = tensor.module
        while path and path not in order:
            path = path.rpartition(".")[0]
        return order.get(path, -1)

    found = [each for each in step.tensors if each.kind in GRADIENTS and not is_finite(each)]
    # The gradient of what a module returns comes before those of its own weights.
    found.sort(key=lambda each: (-place(each), GRADIENTS.index(each.kind)))
    if not found:
        return None
    first, *others = found
    for each in others:
        # A container hands on what its last module returns: the very tensor.
        if first.kind == each.kind == GRADIENTS[0]:
            is_inside = each.module.startswith(f"{first.module}." if first.module else "")
            if not is_inside or each.histogram.numbers != first.histogram.numbers:
                break
            first = each
    return first


def stopped(evidence: Evidence, lost: Mapping[str, SwallowedUpdates]) -> Iterator[Alert]:
    """Find weights that are stored in 16 bits alone, and do not move although they have gradients."""
    low = {path: dtype for path, dtype in stored_low(evidence).items() if path in lost}
    still = {path: lost[path].share_unmoved for path in low if lost[path].share_unmoved > SWALLOWED}
    if still:
        worst = max(still, key=lambda path: still[path])
        unmoved, whole = sum(lost[path].unmoved for path in low), sum(lost[path].with_gradient for path in low)
        dtype = format_text([low[worst]])
        yield Alert(
            level="bad" if unmoved > _STOPPED * whole else "warn",
            what=f"{share_text(unmoved, whole)} of the weights with a gradient did not move.",
            where=f"{worst}: {share_text(still[worst], 1)}; of {len(low)} weights {len(still)} lose over a tenth",
            why=f"They are stored in {dtype}: an update of less than half the gap to the next number rounds away.",
            write=f'policy="O2,dtype={low[worst]}", whose weights are FP32',
        )


def near(evidence: Evidence) -> Iterator[Alert]:
    """Find activations of an FP16 run that come near its end."""
    found = {
        name_of(each): each.histogram.max_abs
        for step in evidence.steps
        for each in step.tensors
        if each.kind == "activations" and each.dtype == FP16.name and each.histogram.max_abs > FP16.max / 4
    }
    if found and not first_not_finite(evidence)[1]:
        worst = max(found, key=lambda name: (found[name], len(name)))  # of those that hand it on the innermost
        yield Alert(
            level="warn",
            what=f"Activations reach {found[worst] / FP16.max:.0%} of FP16's range.".replace("%", " %"),
            where=some_of(sorted(found), 3),
            why=f"{worst} reaches {found[worst]:.4g} of 65504; a loss scale does not help activations.",
            write=f"{both('dtype=bfloat16')}, which has the range of FP32",
        )


# The run, summed up ------------------------------------------------------------------------------------------


def lost_updates(evidence: Evidence) -> dict[str, SwallowedUpdates]:
    """Sum up the updates of each weight that vanish."""
    found: dict[str, SwallowedUpdates] = {}
    for each in (tensor for step in evidence.steps for tensor in step.tensors):
        if each.swallowed is not None:
            found[each.path] = found[each.path] + each.swallowed if each.path in found else each.swallowed
    return found


def stored_low(evidence: Evidence) -> dict[str, str]:
    """Return the dtypes of the weights that have 16 bits and no FP32 value besides."""
    tensors = (each for step in evidence.steps for each in step.tensors)
    return {
        each.path: each.dtype for each in tensors if each.kind == "weights" and each.dtype in (FP16.name, BF16.name)
    }


def idle(evidence: Evidence) -> Iterator[Alert]:
    """Say that every recorded step was skipped, so that nothing was trained."""
    if not all(step.skipped for step in evidence.steps):
        return
    first, scale = first_in_backward(evidence.steps[0]), min(evidence.steps[-1].loss_scales, default=1.0)
    yield Alert(
        level="bad",
        what="All recorded steps were skipped.",
        where="" if first is None else gradient_text(first),
        why=f"Their gradients are not finite, the last ones at loss scale {scale:,.10g}: what formats would lose of "
        "others is not known.",
        write='MixedPrecision(…, on_overflow="explain"), which names the op that made the first of them, and a cure',
    )


def gradients_in_fp16(evidence: Evidence) -> list[tuple[float, ExponentHistogram]]:
    """Return the gradients that FP16 held in steps that were not skipped, each with the loss scale that it had."""
    return [
        (min(step.loss_scales, default=1.0), each.histogram)
        for step in evidence.steps
        for each in step.tensors
        if each.kind in GRADIENTS and each.dtype == FP16.name and not step.skipped
    ]


def name_of(tensor: RecordedTensor) -> str:
    """Return what a tensor is called in words: an output after its module."""
    return tensor.path.removesuffix(".output")


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
        policy = Policy.O1("float16", loss_scale=LossScale.dynamic(init=scale, floor=min(LossScale().floor, scale)))
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
    """Say of the 16-bit formats how many updates vanish where weights are stored in them alone."""
    for target in (FP16, BF16):
        known = {path: each for path, each in lost.items() if target.name in each.swallowed and each.updated}
        if not known:
            continue
        worst = max(known, key=lambda path: known[path].share(target))
        whole = functools.reduce(operator.add, known.values())
        name, share = format_text([target.name]), share_text(whole.swallowed[target.name], whole.updated)
        if whole.share(target) > SWALLOWED:
            yield (
                f"Weights stored in {name} alone swallow {share} of the updates, "
                f"{share_text(known[worst].share(target), 1)} in {worst}: keep them FP32, as O1 and O2 do."
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
    if alerts and current.param_dtype != torch.float32:
        wide = Policy.O2(current.dtype, emulate=current.emulate)
        if any(flushed(evidence)) and scale is not None:
            wide = rescaled(current, scale)
        return wide, "Weights of O2 are FP32, which no update leaves or rounds away in."
    if header.compute_dtype == BF16.name or not alerts:
        return None, ""
    beyond = [each.dtype for each in spoilt][:1] == [FP16.name] or any(near(evidence))
    if not beyond and scale is not None and any(flushed(evidence)):
        return rescaled(current, scale), "The loss scale moves the gradients into FP16's range."
    if beyond or any(flushed(evidence)):
        level = Policy.O2 if current.halves else Policy.O1
        bfloat16 = level(BF16.name, rules=current.rules, emulate=current.emulate)
        return bfloat16, "BF16 has FP32's range, and needs no loss scale."
    return None, ""
