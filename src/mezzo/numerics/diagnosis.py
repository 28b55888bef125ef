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
from mezzo.numerics.evidence import Evidence, RecordedStep, RecordedTensor, SwallowedUpdates, grouped
from mezzo.numerics.histogram import ExponentHistogram
from mezzo.policy import Policy
from mezzo.policy.rules import both
from mezzo.scale import LossScale
from mezzo.trace.observe import FIRST

# What is wrong with a recorded run itself: values not finite, gradients flushed, steps skipped, weights at rest.

Level = Literal["warn", "bad"]

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
        cure: The policy to go on with, and what it changes; ``None`` where no policy cures it.
    """

    level: Level
    what: str
    where: str = ""
    why: str = ""
    write: str = ""
    cure: tuple[Policy, str] | None = None


class RunFacts:
    """The facts of a recorded run, each computed once.

    Args:
        evidence: The evidence, with a tensor at least.

    Attributes:
        steps: The recorded steps.
        has_session: Whether a session trained it.
        is_low: Whether it did in 16 bits.
        policy: Its policy if so; else O1 in FP16.
        dtype: That of the policy; ``None`` without a session.
        totals: Each tensor, summed over the steps; gradients over those that were not skipped, since these are a run's.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.steps, self.dtype = evidence.steps, evidence.header.compute_dtype
        self.has_session = evidence.header.policy is not None
        self.is_low = self.has_session and self.dtype in (FP16.name, BF16.name)
        self.policy = Policy.parse(evidence.header.policy or "") if self.is_low else Policy.O1(FP16.name)
        taken = (
            tensor for step in self.steps for tensor in step.tensors if not (step.skipped and tensor.kind in GRADIENTS)
        )
        groups = grouped(taken, lambda tensor: (tensor.kind, name_of(tensor)))
        self.totals = [RecordedTensor.total_of(tensors) for tensors in groups.values()]

    @functools.cached_property
    def masks(self) -> dict[str, RecordedStep]:
        """The activations that are infinite as those of a mask, each with the first step that has it so.

        They are in steps whose gradients are finite, or at least what the model returns: a softmax has made zeros of
        them.
        """
        first_steps: dict[str, RecordedStep] = {}
        for step in self.steps:
            outputs = [tensor for tensor in step.tensors if tensor.kind == "activations" and not tensor.module]
            if (outputs and all(map(is_finite, outputs))) or not (step.skipped or _spoils_weights(step)):
                for tensor in _not_finite_in(step, "activations"):
                    if not tensor.histogram.nans:
                        first_steps.setdefault(name_of(tensor), step)
        return first_steps

    @functools.cached_property
    def spoilt(self) -> tuple[RecordedStep | None, list[RecordedTensor]]:
        """The first step with tensors that are not finite and spoil it, and those tensors; or none.

        They are weights, or else activations, or else gradients in a step that was taken all the same.
        """
        for step in self.steps:
            activations = _not_finite_in(step, "activations")
            for tensors, is_spoilt in (
                (_not_finite_in(step, "weights"), True),
                (
                    activations,
                    any(tensor.histogram.nans or name_of(tensor) not in self.masks for tensor in activations),
                ),
                (_not_finite_in(step, *GRADIENTS), _spoils_weights(step)),
            ):
                if tensors and is_spoilt:
                    return step, tensors
        return None, []

    @functools.cached_property
    def swallowed(self) -> dict[str, SwallowedUpdates]:
        """The updates of each weight that vanish."""
        return {tensor.path: tensor.swallowed for tensor in self.totals if tensor.swallowed is not None}

    @functools.cached_property
    def stored_low(self) -> dict[str, str]:
        """The dtypes of the weights that have 16 bits and no FP32 value besides."""
        low = (FP16.name, BF16.name)
        return {tensor.path: tensor.dtype for tensor in self.totals if tensor.kind == "weights" and tensor.dtype in low}

    def scaled(self, scale: LossScale, why: str) -> tuple[Policy, str]:
        """Return the run's policy with another loss scale, and with FP32 weights: FP16 cannot unscale gradients."""
        if self.policy.param_dtype == torch.float32:
            return dataclasses.replace(self.policy, loss_scale=scale), why
        return Policy.O2(self.policy.dtype, emulate=self.policy.emulate, loss_scale=scale), why

    @property
    def cure_bf16(self) -> tuple[Policy, str]:
        """The run's policy in BF16."""
        level = Policy.O2 if self.policy.halves else Policy.O1
        wide = level(BF16.name, rules=self.policy.rules, emulate=self.policy.emulate)
        return wide, "BF16 has FP32's range, and needs no loss scale."

    @property
    def cure_fp32_weights(self) -> tuple[Policy, str]:
        """The run's policy with weights in FP32."""
        wide = Policy.O2(self.policy.dtype, emulate=self.policy.emulate)
        return wide, "Weights of O2 are FP32, which no update leaves or rounds away in."


def name_of(tensor: RecordedTensor) -> str:
    """Return what a tensor is called in words: an output after its module."""
    return tensor.path.removesuffix(".output")


def is_finite(tensor: RecordedTensor) -> bool:
    """Whether there is neither infinity nor NaN in a tensor."""
    return not (tensor.histogram.infs or tensor.histogram.nans)


def _not_finite_in(step: RecordedStep, *kinds: str) -> list[RecordedTensor]:
    return [tensor for tensor in step.tensors if tensor.kind in kinds and not is_finite(tensor)]


def _spoils_weights(step: RecordedStep) -> bool:
    """Whether a step was taken with gradients that are not finite: weights' where they are recorded, else outputs'."""
    has_weights = any(tensor.kind == GRADIENTS[1] for tensor in step.tensors)
    return not step.skipped and bool(_not_finite_in(step, *GRADIENTS[has_weights:]))


def _explained(what: str) -> str:
    return f'MixedPrecision(…, on_overflow="locate"), which names {what}'


_TAKEN: Final = "the step was taken all the same, and its update spoils the weights."
_ANY_FORMAT: Final = "reaches 3.4e38: training diverged, divided by zero or read such a batch, whatever the format."
_ORIGIN: Final = _explained("the op or the batch that they come from")
#: Why tensors are not finite, and what to write: by what they are, and whether that is in FP16.
_CAUSES: Final[Mapping[tuple[str, bool], tuple[str, str]]] = {
    ("weights", True): (
        "An update left FP16's range. Of weights in FP16 alone optimizers compute in it, where AdamW's eps of 1e-8 is "
        "zero, and what is divided by it infinite.",
        'policy="O2,dtype=float16", whose weights are FP32',
    ),
    ("activations", True): (
        "FP16 ends at 65504, whatever the loss scale, and what is beyond is infinite; or a batch had such numbers.",
        f"{_ORIGIN}; where it is FP16's range, {both('dtype=bfloat16')}",
    ),
    ("gradients", True): (
        f"The backward pass left the range of FP16: {_TAKEN}",
        'MixedPrecision(model, optimizer, "{policy}"), whose loss scale skips such steps and comes down',
    ),
    ("weights", False): (f"{{format}} {_ANY_FORMAT}", _ORIGIN),
    ("activations", False): (f"{{format}} {_ANY_FORMAT}", _ORIGIN),
    ("gradients", False): (
        f"The backward pass made them, whatever the format: {_TAKEN}",
        _explained("the op that made the first of them"),
    ),
}


def not_finite(run: RunFacts) -> Alert | None:
    """Return an alert of tensors that are not finite, in the first step that they spoil; or else of possible masks."""
    step, tensors = run.spoilt
    is_mask = step is None and bool(run.masks)
    if is_mask:
        step = min(run.masks.values(), key=lambda step: step.step)
        tensors = [tensor for tensor in step.tensors if tensor.kind == "activations" and tensor.histogram.infs]
    if step is None:
        return None
    first, category, is_fp16 = tensors[0], tensors[0].kind, tensors[0].dtype == FP16.name
    where = f"{name_of(first)} ({first.dtype})"
    if category in GRADIENTS:
        first = first_in_backward(step) or first
        category, where, is_fp16 = "gradients", gradient_text(first), FP16.name in (run.dtype, first.dtype)
    why, write = _CAUSES[category, is_fp16]
    if is_mask:  # nothing to write: a mask needs no cure
        why = "Later tensors are finite all the same: these infinities may be an attention mask's, and meant."
        write = ""
    scaled = run.scaled(LossScale.dynamic(), "Its loss scale skips steps whose gradients are not finite.")
    cures = {"weights": run.cure_fp32_weights, "activations": run.cure_bf16, "gradients": scaled}
    num_not_finite = sum(tensor.histogram.infs + tensor.histogram.nans for tensor in tensors)
    return Alert(
        level="warn" if is_mask else "bad",
        what=f"{num_not_finite:,} {category} are infinite or NaN at step {step.step}.",
        where=where + (f", and {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""),
        why=why.format(format=format_text([first.dtype])),
        write=write.format(policy=scaled[0]),
        cure=cures[category] if is_fp16 and not is_mask else None,
    )


def all_skipped(run: RunFacts) -> Alert | None:
    """Return an alert if every recorded step was skipped, so that nothing was trained."""
    if not all(step.skipped for step in run.steps):
        return None
    first, scale = first_in_backward(run.steps[0]), min(run.steps[-1].loss_scales, default=1.0)
    return Alert(
        level="bad",
        what="All recorded steps were skipped.",
        where="" if first is None else gradient_text(first),
        why=f"Their gradients are not finite, the last ones at loss scale {scale:,.10g}: what formats would lose of "
        "others is not known.",
        write=_explained("the op that made the first of them, and a cure"),
    )


def flushed(run: RunFacts) -> Alert | None:
    """Return an alert if FP16 loses many gradients at the loss scale of the run."""
    gradients = [
        (min(step.loss_scales, default=1.0), tensor.histogram)
        for step in run.steps
        for tensor in step.tensors
        if tensor.kind in GRADIENTS and tensor.dtype == FP16.name and not step.skipped
    ]
    covered = [histogram.coverage(FP16, scale) for scale, histogram in gradients]
    total, zeros, num_subnormal = (
        sum(getattr(coverage, name) for coverage in covered) for name in ("total", "zero", "subnormal")
    )
    if not total or (num_subnormal <= SUBNORMAL * (total - zeros) and zeros < total):
        return None
    scales = {scale for scale, _ in gradients}
    carried = "without a loss scale" if scales == {1.0} else f"at loss scale {min(scales):,.10g}"
    what = f"{share_text(num_subnormal, total - zeros)} of the gradients that are not zero lose digits {carried}."
    write, cure = f"{both('dtype=bfloat16')}, which needs no loss scale", run.cure_bf16
    whole = ExponentHistogram.total_of(histogram for _, histogram in gradients)
    # Of zeros nothing is known but that they are small: from above the scale comes down by itself.
    highest = min(whole.best_scale(FP16), CEILING) if whole.max_abs and not (whole.infs or whole.nans) else CEILING
    if highest >= 2.0 * max(scales) and not (whole.infs or whole.nans):
        scale = LossScale.dynamic(init=highest)
        cure = run.scaled(scale, "The loss scale moves the gradients into FP16's range.")
        # Without a session, the loss scale is that of torch's scaler.
        torchs = f"torch.amp.GradScaler(init_scale=2.0**{round(math.log2(scale.init))})"
        write = f'policy="{cure[0]}"' if run.has_session else torchs
    return Alert(
        level="bad" if num_subnormal > _ALL_BUT * (total - zeros) or zeros == total else "warn",
        what=f"All gradients are zero {carried}." if zeros == total else what,
        where=f"{len(covered)} tensors in float16, {share_text(zeros, total)} of their values zero",
        why="They are smaller than FP16's normal numbers, and what is below "
        f"{FP16.smallest_subnormal / 2 / min(scales):.2g} is flushed to zero.",
        write=write,
        cure=cure,
    )


def gradient_text(tensor: RecordedTensor) -> str:
    """Return what a gradient is called in words."""
    of = "the output of " if tensor.kind == GRADIENTS[0] else ""
    return f"gradient of {of}{name_of(tensor)} ({tensor.dtype})"


def first_in_backward(step: RecordedStep) -> RecordedTensor | None:
    """Return the first gradient in the order of the backward pass that is not finite, of the innermost module."""
    # Calls are ordered by their ends in the forward pass; a module that is not called counts as its parent.
    called = [tensor.module for tensor in step.tensors if tensor.kind in ("activations", GRADIENTS[0])]
    order = {path: n for n, path in enumerate(dict.fromkeys(called or [tensor.module for tensor in step.tensors]))}

    def call_index(tensor: RecordedTensor) -> int:
        path = tensor.module
        while path and path not in order:
            path = path.rpartition(".")[0]
        return order.get(path, -1)

    # The gradient of a module's output comes before those of its own weights.
    gradients = sorted(
        _not_finite_in(step, *GRADIENTS), key=lambda gradient: (-call_index(gradient), GRADIENTS.index(gradient.kind))
    )
    first = gradients[0] if gradients else None
    for gradient in gradients[1:]:
        # A container returns the output of its last module: both have the same gradient.
        if first is not None and first.kind == gradient.kind == GRADIENTS[0]:
            is_inside = gradient.module.startswith(f"{first.module}." if first.module else "")
            if not is_inside or gradient.histogram.numbers != first.histogram.numbers:
                break
            first = gradient
    return first


def stopped(run: RunFacts) -> Alert | None:
    """Return an alert of weights that are stored in 16 bits alone and do not move although they have gradients."""
    low = run.stored_low
    swallowed = {path: updates for path, updates in run.swallowed.items() if path in low}
    still = {path: updates.share_unmoved for path, updates in swallowed.items() if updates.share_unmoved > SWALLOWED}
    if not still:
        return None
    worst = max(still, key=lambda path: still[path])
    whole = functools.reduce(operator.add, swallowed.values())
    return Alert(
        level="bad" if whole.share_unmoved > _STOPPED else "warn",
        what=f"{share_text(whole.unmoved, whole.with_gradient)} of the weights with a gradient did not move.",
        where=f"{worst}: {share_text(still[worst], 1)}; of {len(swallowed)} weights {len(still)} lose over a tenth",
        why=f"They are stored in {format_text([low[worst]])}: an update of less than half the gap to the next number "
        "rounds away.",
        write=f'policy="O2,dtype={low[worst]}", whose weights are FP32',
        cure=run.cure_fp32_weights,
    )


def close_to_limit(run: RunFacts) -> Alert | None:
    """Return an alert of activations that come close to the end of FP16's range."""
    largest = {
        name_of(tensor): tensor.histogram.max_abs
        for tensor in run.totals
        if tensor.kind == "activations" and tensor.dtype == FP16.name and tensor.histogram.max_abs > FP16.max / 4
    }
    if not largest or run.spoilt[1]:
        return None
    worst = max(
        largest, key=lambda name: (largest[name], len(name))
    )  # of modules that return the same tensor the innermost
    return Alert(
        level="warn",
        what=f"Activations reach {largest[worst] / FP16.max:.0%} of FP16's range.".replace("%", " %"),
        where=some_of(sorted(largest), 3),
        why=f"{worst} reaches {largest[worst]:.4g} of 65504; a loss scale does not help activations.",
        write=f"{both('dtype=bfloat16')}, which has the range of FP32",
        cure=run.cure_bf16,
    )


# Which formats would do --------------------------------------------------------------------------------------

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
        alerts = (message(alert.what, where=alert.where, why=alert.why, write=alert.write) for alert in self.alerts)
        lines = (*alerts, *(answer.line for answer in self.formats), *self.lines)
        why = f"   # {self.why}" if self.why and self.why not in lines else ""
        return "\n".join((*lines, *(() if self.policy is None else (f'policy="{self.policy}"{why}',))))

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, as JSON has them; policies as their texts."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return [*map(plain, value)]
            if isinstance(value, Diagnosis | FormatAnswer | Alert):
                return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return str(value) if isinstance(value, Policy) else value

        document: dict[str, Any] = plain(self)
        return document


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return what is wrong with a recorded run, and which formats would do.

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
    run = RunFacts(evidence)
    spoiling = [alert for fault in (not_finite, all_skipped) if (alert := fault(run)) is not None]
    problems = spoiling + [alert for fault in (close_to_limit, flushed, stopped) if (alert := fault(run)) is not None]
    formats: tuple[FormatAnswer, ...] = ()
    lines: list[str] = []
    if all(alert.level != "bad" for alert in spoiling):  # or numbers say nothing of formats
        formats, lines = (_fp16(run.totals), _bf16(run.totals), _fp8(run.totals)), [*_swallowing(run)]
        if run.dtype == FP16.name:
            lines.append(_RECORDED_IN_FP16)
    cures = [alert.cure for alert in problems if alert.cure is not None]
    if not run.is_low:
        cures = [(answer.policy, answer.line) for answer in formats if answer.policy is not None]
    policy, why = cures[0] if cures else (None, "")
    alerts = tuple(sorted(problems, key=lambda alert: alert.level != "bad"))
    return Diagnosis(formats=formats, lines=tuple(lines), alerts=alerts, policy=policy, why=why)


_RECORDED_IN_FP16: Final = (
    "Recorded in FP16: gradients that it flushed are zeros here; a run under O0 shows what they were."
)


# Formats ----------------------------------------------------------------------------------------------------


def _fp16(totals: Sequence[RecordedTensor]) -> FormatAnswer:
    """Judge FP16: what overflows whatever the loss scale, and which loss scale keeps the gradients."""
    beyond = {
        name_of(tensor): tensor.histogram.max_abs
        for tensor in totals
        if tensor.kind in ("weights", "activations") and _beyond(tensor, FP16)
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
    whole = ExponentHistogram.total_of(tensor.histogram for tensor in totals if tensor.kind in GRADIENTS)
    policy = Policy.O1("float16")
    if not whole.max_abs or whole.infs or whole.nans:
        line = "FP16 holds all weights and activations; of gradients nothing is known."
        return FormatAnswer(format=FP16.name, is_safe=False, line=line)
    scale = min(whole.best_scale(FP16), CEILING)
    unscaled, scaled = (_Kept.of(whole, factor) for factor in (1.0, scale))
    highest = f"2^{round(math.log2(scale))}, the highest loss scale that fits,"
    if scaled.lost > _LOST:
        line = f"FP16 is not safe: at {highest} {scaled.text}{_flushed_text(totals, scale)}."
        return FormatAnswer(format=FP16.name, is_safe=False, line=line)
    # Above it steps would be skipped until the scale fits; and from below it needs thousands of steps to rise.
    if scale < INIT or _Kept.of(whole, INIT).is_poor:
        policy = Policy.O1("float16", loss_scale=LossScale.dynamic(init=scale, floor=min(LossScale().floor, scale)))
    line = f"FP16 is safe: without a loss scale {unscaled.text}"
    if unscaled.is_poor:
        line = f"FP16 is safe with a loss scale: without one {unscaled.text}; at {highest} {scaled.text}"
    line = f"{line}{_flushed_text(totals, policy.loss_scale.init)}."
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


def _beyond(tensor: RecordedTensor, target: Format) -> int:
    """Return how many finite values leave a format's range; a mask's infinities are meant."""
    return tensor.histogram.coverage(target).overflow - tensor.histogram.infs


def _share_flushed(tensor: RecordedTensor, target: Format, scale: float) -> float:
    """Return the share that a format flushes to zero, of the values that are not zero."""
    covered = tensor.histogram.coverage(target, scale)
    return covered.underflow / max(1, covered.total - covered.zero - covered.nan)


def _flushed_text(totals: Sequence[RecordedTensor], scale: float) -> str:
    """Return a text that names the weights of whose gradients FP16 flushes more than half at a loss scale; or ''."""
    shares = {name_of(tensor): _share_flushed(tensor, FP16, scale) for tensor in totals if tensor.kind == GRADIENTS[1]}
    names = sorted((name for name in shares if shares[name] > _MOSTLY), key=lambda name: -shares[name])
    if not names:
        return ""
    more = f", and more than half of those of {some_of(names[1:], 2)}" if names[1:] else ""
    return f"; at 2^{round(math.log2(scale))} it flushes {share_text(shares[names[0]], 1)} of those of {names[0]}{more}"


def _bf16(totals: Sequence[RecordedTensor]) -> FormatAnswer:
    """Judge BF16: its range is FP32's, all but the last numbers."""
    beyond = [name_of(tensor) for tensor in totals if _beyond(tensor, BF16)]
    line = "BF16 is safe: it has FP32's range, and needs no loss scale."
    if beyond:
        line = f"BF16 is not safe: {some_of(beyond, 3)} reach beyond {BF16.max:.4g}."
    policy = None if beyond else Policy.O1("bfloat16")
    return FormatAnswer(format=BF16.name, is_safe=not beyond, line=line, policy=policy)


def _fp8(totals: Sequence[RecordedTensor]) -> FormatAnswer:
    """Judge the eight-bit pair, each tensor at a scale of its own: E4M3 for what goes forward, E5M2 for gradients."""
    lossy: dict[str, float] = {}
    for tensor in totals:
        target = E5M2 if tensor.kind in GRADIENTS else E4M3
        if tensor.kind == "updates" or not tensor.histogram.max_abs or not is_finite(tensor):
            continue
        share = _share_flushed(tensor, target, tensor.histogram.best_scale(target))
        if share > _FLUSHED_IN_FP8:
            lossy[f"{name_of(tensor)} ({tensor.kind.replace('_', ' ')})"] = share
    limit, recipe = (
        f"{100 * _FLUSHED_IN_FP8:g} %",
        "FP8 with a scale for each tensor, E4M3 forward and E5M2 for gradients,",
    )
    line = f"{recipe} flushes at most {limit} of any tensor."
    if lossy:
        worst, *rest = sorted(lossy, key=lambda path: -lossy[path])
        more = f", and more than {limit} of {len(rest)} other tensors" if rest else ""
        line = f"{recipe} is not safe: it flushes {share_text(lossy[worst], 1)} of {worst}{more}."
    return FormatAnswer(format=f"{E4M3.name}+{E5M2.name}", is_safe=not lossy, line=line)


def _swallowing(run: RunFacts) -> Iterator[str]:
    """Yield how many updates vanish in weights that are stored in a 16-bit format alone."""
    # What a weight of 16 bits has swallowed already is no update any more: an alert says how much that was.
    swallowed = {path: updates for path, updates in run.swallowed.items() if path not in run.stored_low}
    for target in (FP16, BF16):
        updated = {
            path: updates for path, updates in swallowed.items() if target.name in updates.swallowed and updates.updated
        }
        if not updated:
            continue
        worst = max(updated, key=lambda path: updated[path].share(target))
        whole = functools.reduce(operator.add, updated.values())
        name, share = format_text([target.name]), share_text(whole.swallowed[target.name], whole.updated)
        if whole.share(target) > SWALLOWED:
            yield (
                f"Weights stored in {name} alone swallow {share} of the updates, "
                f"{share_text(updated[worst].share(target), 1)} in {worst}: keep them FP32, as O1 and O2 do."
            )
        else:
            yield f"Weights stored in {name} swallow {share} of the updates."
